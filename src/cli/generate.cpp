// nanovllm generate: text for prompts, from the command line or a file of JSON lines.
#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <unordered_map>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/command.h"
#include "cli/exit_code.h"
#include "cli/jsonl/ordered_results.h"
#include "cli/jsonl/request_source.h"
#include "cli/load_model.h"
#include "cli/terminal/interrupt.h"
#include "core/check.h"
#include "core/seconds.h"
#include "io/utf8.h"

namespace nanovllm::cli {
namespace {

struct GenerateOptions {
  std::string model;
  EngineConfig engine;
  SamplingOptions sampling;
  std::optional<std::string> text;  // the prompt as an argument
  std::vector<std::string> prompts;
  std::string system;
  std::string input, output;
  std::string generation_config = "auto", template_kwargs = "{}";
  bool chat = false, json = false, quiet = false;
};

/// How results look on standard output: the text of one prompt as it grows, prompts with their
/// completions, or JSON lines.
enum class Style { stream, text, json };

/// One run of the command: requests in, an engine, results out.
class Generation {
 public:
  Generation(LLM& llm, RequestSource& source, Output& output, Style style, Progress& progress,
             bool quiet, bool length_given)
      : llm_(llm),
        source_(source),
        output_(output),
        style_(style),
        progress_(progress),
        quiet_(quiet),
        length_given_(length_given) {}

  /// Until every request has its result. Throws OutputError, or Error(engine) once all results that
  /// there are have been written.
  int run();

 private:
  struct Live {
    int64_t place;
    Request request;
    bool streamed = false;  // some of its text is out
  };

  void admit();
  void submit(Request request);
  void step();
  void take(const RequestOutput& output);
  void finish(const Live& live, const RequestOutput& output);
  void end_all(FinishReason reason, const std::string& error);
  void write_results();
  void report_failures() const;
  void report_totals() const;

  LLM& llm_;
  RequestSource& source_;
  Output& output_;
  Style style_;
  Progress& progress_;
  const bool quiet_, length_given_;
  Interrupt interrupt_{kStopping};

  OrderedResults results_;
  std::unordered_map<int64_t, Live> live_;  // by the engine's request id
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  int64_t total_ = -1, done_ = 0, failed_ = 0, aborted_ = 0;
  int64_t cut_ = 0, cut_at_ = 0;            // texts ended by a max_tokens that was left open
  bool streamed_ = false;                   // text of the one request is out
  bool interrupted_ = false;                // with requests running or input unread
  std::string first_error_, first_failed_;  // the latter is an id, as JSON
};

int Generation::run() {
  if (progress_.active()) total_ = source_.count();
  while (!live_.empty() || !source_.ended()) {
    if (interrupt_.requested()) {
      interrupted_ = true;
      for (const auto& [id, live] : live_) llm_.abort_request(id);
      while (!live_.empty() && !llm_.is_finished()) step();
      end_all(FinishReason::abort, "");
      break;
    }
    admit();
    if (style_ == Style::stream && !streamed_) progress_.reading(llm_);
    if (!live_.empty()) step();
    if (style_ != Style::stream) progress_.update(llm_.stats(), done_, total_);
    write_results();
  }
  write_results();
  output_.close();
  progress_.clear();
  report_failures();
  if (!quiet_) report_totals();
  return failed_ + aborted_ == 0 && !interrupted_ ? kExitDone : kExitRequestsFailed;
}

// The engine always has a second batch waiting, and memory stays bounded however long the input is:
// neither more requests than these are read ahead, nor more results held back by a slow one. What
// the engine has taken is not kept here, and a prompt that it refuses is kept nowhere.
void Generation::admit() {
  const auto most_live = static_cast<size_t>(2 * llm_.info().max_num_seqs);
  const size_t most_held = std::max<size_t>(4096, 2 * most_live);
  while (live_.size() < most_live && !results_.full(most_held) && !interrupt_.requested()) {
    const bool wait = live_.empty() && results_.empty();
    std::optional<Request> request = source_.next(wait, interrupt_.descriptor());
    if (!request) return;
    submit(std::move(*request));
    if (live_.empty()) write_results();  // refused at once: results, too
  }
}

void Generation::submit(Request request) {
  const int64_t place = results_.reserve();
  try {
    check(request.error.empty(), ErrorKind::invalid_argument, "{}", request.error);
    struct ToPrompt {
      const LLM& llm;
      Prompt operator()(const std::string& text) const { return text; }
      Prompt operator()(const std::vector<int32_t>& ids) const { return ids; }
      Prompt operator()(const Messages& m) const {
        return llm.chat_prompt(m.messages.dump(), m.chat_template_kwargs.dump());
      }
    };
    // Only a text that is shown as it grows needs to be reported before its end.
    request.sampling_params.output_kind =
        style_ == Style::stream ? OutputKind::delta : OutputKind::final_only;
    const int64_t id =
        llm_.add_request(std::visit(ToPrompt{llm_}, request.prompt), request.sampling_params);
    if (style_ != Style::text)
      request.prompt.emplace<std::string>();  // only there it is shown again
    live_.emplace(id, Live{place, std::move(request)});
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::invalid_argument) throw;
    RequestOutput output;
    output.outputs.push_back({.finish_reason = FinishReason::error});
    output.error = error.what();
    finish({place, std::move(request)}, output);
  }
}

void Generation::step() {
  try {
    for (const RequestOutput& output : llm_.step()) take(output);
  } catch (const Error& error) {
    end_all(FinishReason::error, error.what());
    write_results();
    output_.close();
    throw;
  }
}

void Generation::take(const RequestOutput& output) {
  const auto found = live_.find(output.request_id);
  if (found == live_.end()) return;
  Live& live = found->second;
  if (style_ == Style::stream && !output.outputs[0].text.empty()) {
    progress_.clear();
    output_.write(output.outputs[0].text);
    output_.flush();
    live.streamed = streamed_ = true;
  }
  if (!output.finished) return;
  finish(live, output);
  live_.erase(found);
}

void Generation::finish(const Live& live, const RequestOutput& output) {
  const Request& request = live.request;
  const auto any = [&](FinishReason reason) {
    return std::ranges::count(output.outputs, reason, &CompletionOutput::finish_reason) > 0;
  };
  const bool failed = any(FinishReason::error);
  ++done_;
  if (any(FinishReason::abort)) ++aborted_;
  if (any(FinishReason::length) && request.default_length && !length_given_) {
    ++cut_;
    cut_at_ = request.sampling_params.max_tokens;
  }
  if (failed) {
    ++failed_;
    if (first_error_.empty()) {
      first_error_ = output.error;
      first_failed_ = request.id.dump();
    }
  }
  switch (style_) {
    case Style::json:
      results_.put(live.place, format_output(request, output) + "\n");
      return;
    case Style::stream:
      results_.put(live.place, failed && !live.streamed ? "" : "\n");
      return;
    case Style::text:
      break;
  }
  const std::string* prompt = std::get_if<std::string>(&request.prompt);
  if (const auto* chat = std::get_if<Messages>(&request.prompt))
    prompt = chat->messages.back().at("content").get_ptr<const std::string*>();
  std::string text = fmt::format("Prompt: {}\n", prompt ? *prompt : "");
  for (const CompletionOutput& answer : output.outputs)
    text += fmt::format(
        "Completion: {}{}\n", answer.text,
        answer.finish_reason == FinishReason::error ? "[error: " + output.error + "]" : "");
  results_.put(live.place, text + "\n");
}

// For the requests that the engine will not finish: those it has, and those not read yet.
void Generation::end_all(FinishReason reason, const std::string& error) {
  RequestOutput output;
  output.outputs.push_back({.finish_reason = reason});
  output.error = error;
  for (const auto& [id, live] : live_) finish(live, output);
  live_.clear();
  source_.stop_waiting();
  while (!source_.ended()) {
    std::optional<Request> request = source_.next(/*wait=*/false);
    if (!request) continue;
    RequestOutput own = output;
    if (!request->error.empty()) {
      own.outputs[0].finish_reason = FinishReason::error;
      own.error = request->error;
    }
    finish({results_.reserve(), std::move(*request)}, own);
    write_results();
  }
}

void Generation::write_results() {
  if (results_.ready()) progress_.clear();
  results_.write_to(output_);
}

// Totals and rates; prompts and answers are computed side by side.
void Generation::report_totals() const {
  if (cut_ > 0)
    say(fmt::format("note: {} cut after {} tokens: --max-tokens N (-n N) gives more\n",
                    done_ == 1 ? "the text was" : fmt::format("{} of {} texts were", cut_, done_),
                    cut_at_));
  const EngineStats stats = llm_.stats();
  if (stats.generated_tokens == 0) return;
  const double seconds = seconds_since(start_);
  say(fmt::format("note: {} request{} in {:.1f} s: {} prompt tokens, {} generated, {:.0f} tok/s\n",
                  done_, done_ == 1 ? "" : "s", seconds,
                  stats.prompt_tokens + stats.cached_prompt_tokens, stats.generated_tokens,
                  double(stats.generated_tokens) / seconds));
}

void Generation::report_failures() const {
  if (aborted_ > 0)
    say(fmt::format("error: interrupted: {} of {} requests aborted\n", aborted_, done_));
  else if (interrupted_)
    say("note: interrupted: the input was not read to its end\n");
  if (failed_ == 0) return;
  if (done_ == 1)
    say(fmt::format("error: {}\n", one_line(first_error_)));
  else
    say(fmt::format("error: {} of {} requests failed, the first (id {}): {}\n", failed_, done_,
                    first_failed_, one_line(first_error_)));
}

std::deque<Request> make_prompts(const GenerateOptions& options, const SamplingParams& params) {
  std::deque<Request> requests;
  for (const std::string& text : options.prompts) {
    Request request;
    request.sampling_params = params;
    request.default_length = true;
    const size_t bad = find_invalid_utf8(text);
    if (bad != std::string::npos) {  // JSON, of messages or of the result, could not hold it
      request.prompt = "";
      request.error = fmt::format("the text is not valid UTF-8 at byte {}", bad);
    } else if (options.chat) {
      Json messages = Json::array();
      if (!options.system.empty())
        messages.push_back({{"role", "system"}, {"content", options.system}});
      messages.push_back({{"role", "user"}, {"content", text}});
      request.prompt = Messages{std::move(messages), Json::parse(options.template_kwargs)};
    } else {
      request.prompt = text;
    }
    requests.push_back(std::move(request));
  }
  return requests;
}

// vLLM's rule: without sampling parameters of its own a request takes what generation_config.json
// recommends; with some, the class defaults fill the rest. The command line stands above both.
SamplingDefaults sampling_defaults(const GenerateOptions& options, const LLM& llm) {
  SamplingDefaults defaults;
  if (options.generation_config == "auto") defaults.without = llm.default_sampling_params();
  options.sampling.apply(defaults.without);
  options.sampling.apply(defaults.with);
  return defaults;
}

// Opening the output empties it: the input must not be that file.
void refuse_same_file(const LineReader* input, const std::string& output) {
  struct stat in {
  }, out{};
  if (!input || ::fstat(input->descriptor(), &in) != 0 || !S_ISREG(in.st_mode)) return;
  check(::stat(output.c_str(), &out) != 0 || in.st_dev != out.st_dev || in.st_ino != out.st_ino,
        ErrorKind::invalid_argument, "--output is the file of --input: give another one");
}

/// The prompt that is no option: an argument, or all of standard input, for "-" or where nothing
/// else is given and it is no terminal.
void take_prompt(GenerateOptions& options) {
  constexpr auto kBad = ErrorKind::invalid_argument;
  const bool has_others = !options.prompts.empty() || !options.input.empty();
  check(!options.text || !has_others, kBad, "a prompt is given twice: as an argument and with {}",
        options.prompts.empty() ? "--input" : "--prompt");
  const bool from_input = options.text ? *options.text == "-" : !has_others;
  if (from_input) {
    options.text = ::isatty(STDIN_FILENO) && !options.text ? "" : read_standard_input();
    for (const char end : {'\n', '\r'})
      if (options.text->ends_with(end)) options.text->pop_back();
    check(!options.text->empty(), kBad,
          "nothing to generate from: give a prompt in quotes, --prompt TEXT, a text on standard "
          "input, or --input FILE.jsonl");
  }
  if (options.text) options.prompts.push_back(*options.text);
}

int generate(GenerateOptions& options) {
  settle_model(options.model, options.text);
  if (const auto code = serve_as_other_rank(options.model, options.engine)) return *code;
  check(options.system.empty() || options.chat, ErrorKind::invalid_argument,
        "--system needs --chat");
  check(options.template_kwargs == "{}" || options.chat, ErrorKind::invalid_argument,
        "--chat-template-kwargs needs --chat: a line of --input has its own chat_template_kwargs");
  take_prompt(options);
  check(!options.chat || !options.prompts.empty(), ErrorKind::invalid_argument,
        "--chat is for prompts of the command line: a line of --input gives messages in place of "
        "prompt");
  // Files first: a wrong name should not cost the time to load a model.
  std::unique_ptr<LineReader> input;
  if (!options.input.empty()) input = std::make_unique<LineReader>("--input", options.input);
  const bool to_file = !options.output.empty() && options.output != "-";
  if (to_file) {
    refuse_same_file(input.get(), options.output);
    refuse_model_file("--output", options.output, options.model);
  }
  std::unique_ptr<Output> output =
      to_file ? std::make_unique<Output>("--output", options.output) : std::make_unique<Output>();

  Progress progress(options.quiet);
  LLM llm = load_model(options.model, options.engine, progress, options.quiet);

  const SamplingDefaults defaults = sampling_defaults(options, llm);
  const bool plain = !input && options.output.empty() && !options.json &&
                     !defaults.without.logprobs && !defaults.without.prompt_logprobs;
  const bool one = options.prompts.size() == 1 && defaults.without.n == 1;
  const Style style = !plain ? Style::json : one ? Style::stream : Style::text;
  SamplingParams probe{.max_tokens = 0};
  options.sampling.apply(probe);
  RequestSource source(make_prompts(options, defaults.without), std::move(input), defaults);
  return Generation(llm, source, *output, style, progress, options.quiet, probe.max_tokens != 0)
      .run();
}

}  // namespace

void add_generate(CLI::App& program, Action& action) {
  auto options = std::make_shared<GenerateOptions>();
  CLI::App& command = add_command(program, "generate", "Generate text for prompts");
  GenerateOptions& o = *options;
  add_model_and_text(command, o.model, o.text, "PROMPT",
                     "a prompt; - is standard input, as is leaving it out in a pipe");
  add_value(command, "--prompt,-p", "TEXT", "a prompt; repeatable",
            [&o](const std::string& s) { o.prompts.push_back(s); });
  add_value(command, "--input,-i", "FILE", "requests as JSON lines; - is standard input",
            [&o](const std::string& s) { o.input = s; });
  add_value(command, "--output,-o", "FILE", "results as JSON lines; - is standard output",
            [&o](const std::string& s) { o.output = s; });
  add_flag(command, "--chat", o.chat,
           "each prompt is a user's message, put into the chat template");
  add_system(command, o.system, "the system message of --chat");
  add_template_kwargs(command, o.template_kwargs);
  add_flag(command, "--json", o.json, "JSON lines on standard output for --prompt, too");
  add_flag(command, "--quiet,-q", o.quiet, "no notes and no progress on standard error");
  add_generation_config(command, o.generation_config);
  o.sampling.add_to(command, SamplingOptions::Use::generate);
  add_engine_options(command, o.engine);
  set_action(command, action, [options] { return generate(*options); });
}

}  // namespace nanovllm::cli
