// nanovllm generate: text for prompts, from the command line or a file of JSON lines.
#include <algorithm>
#include <memory>
#include <unordered_map>

#include <fmt/format.h>
#include <sys/stat.h>

#include "cli/command.h"
#include "cli/exit_code.h"
#include "cli/interrupt.h"
#include "cli/load_model.h"
#include "cli/ordered_results.h"
#include "cli/request_source.h"
#include "core/check.h"
#include "io/utf8.h"

namespace nanovllm::cli {
namespace {

struct GenerateOptions {
  std::string model;
  EngineConfig engine;
  SamplingOptions sampling;
  std::vector<std::string> prompts;
  std::string system;
  std::string input, output;
  std::string generation_config = "auto";
  bool chat = false, json = false, quiet = false;
};

/// How results look on standard output: the text of one prompt as it grows, prompts with their
/// completions, or JSON lines.
enum class Style { stream, text, json };

/// One run of the command: requests in, an engine, results out.
class Generation {
 public:
  Generation(LLM& llm, RequestSource& source, Output& output, Style style, Progress& progress)
      : llm_(llm), source_(source), output_(output), style_(style), progress_(progress) {}

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
  void report_failures() const;

  LLM& llm_;
  RequestSource& source_;
  Output& output_;
  Style style_;
  Progress& progress_;
  Interrupt interrupt_;

  OrderedResults results_;
  std::unordered_map<int64_t, Live> live_;  // by the engine's request id
  int64_t total_ = -1, done_ = 0, failed_ = 0, aborted_ = 0;
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
    if (!live_.empty()) step();
    if (style_ != Style::stream) progress_.update(llm_.stats(), done_, total_);
    results_.write_to(output_);
  }
  results_.write_to(output_);
  output_.close();
  progress_.clear();
  report_failures();
  return failed_ + aborted_ == 0 && !interrupted_ ? kExitDone : kExitRequestsFailed;
}

// The engine always has a second batch waiting, and memory stays bounded however long the input is:
// neither more requests than these are read ahead, nor more results held back by a slow one.
void Generation::admit() {
  const auto most_live = static_cast<size_t>(2 * llm_.info().max_num_seqs);
  const size_t most_held = std::max<size_t>(4096, 2 * most_live);
  while (live_.size() < most_live && results_.held() < most_held) {
    std::optional<Request> request = source_.next(/*wait=*/live_.empty() && results_.held() == 0);
    if (!request) return;
    submit(std::move(*request));
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
    results_.write_to(output_);
    output_.close();
    throw;
  }
}

void Generation::take(const RequestOutput& output) {
  const auto found = live_.find(output.request_id);
  if (found == live_.end()) return;
  Live& live = found->second;
  if (style_ == Style::stream && !output.outputs[0].text.empty()) {
    output_.write(output.outputs[0].text);
    output_.flush();
    live.streamed = true;
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
    results_.write_to(output_);
  }
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
    const size_t bad = find_invalid_utf8(text);
    if (bad != std::string::npos) {  // JSON, of messages or of the result, could not hold it
      request.prompt = "";
      request.error = fmt::format("the text is not valid UTF-8 at byte {}", bad);
    } else if (options.chat) {
      Json messages = Json::array();
      if (!options.system.empty())
        messages.push_back({{"role", "system"}, {"content", options.system}});
      messages.push_back({{"role", "user"}, {"content", text}});
      request.prompt = Messages{std::move(messages)};
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

int generate(const GenerateOptions& options) {
  require_model(options.model);
  if (const auto code = serve_as_other_rank(options.model, options.engine)) return *code;
  check(!options.prompts.empty() || !options.input.empty(), ErrorKind::invalid_argument,
        "nothing to generate from: give --prompt TEXT or --input FILE.jsonl");
  check(options.system.empty() || options.chat, ErrorKind::invalid_argument,
        "--system needs --chat");
  // Files first: a wrong name should not cost the time to load a model.
  std::unique_ptr<LineReader> input;
  if (!options.input.empty()) input = std::make_unique<LineReader>("--input", options.input);
  const bool to_file = !options.output.empty() && options.output != "-";
  if (to_file) refuse_same_file(input.get(), options.output);
  std::unique_ptr<Output> output =
      to_file ? std::make_unique<Output>("--output", options.output) : std::make_unique<Output>();

  Progress progress(options.quiet);
  LLM llm = load_model(options.model, options.engine, progress, options.quiet);

  const SamplingDefaults defaults = sampling_defaults(options, llm);
  const bool plain = !input && options.output.empty() && !options.json &&
                     !defaults.without.logprobs && !defaults.without.prompt_logprobs;
  const bool one = options.prompts.size() == 1 && defaults.without.n == 1;
  const Style style = !plain ? Style::json : one ? Style::stream : Style::text;
  RequestSource source(make_prompts(options, defaults.without), std::move(input), defaults);
  return Generation(llm, source, *output, style, progress).run();
}

}  // namespace

void add_generate(CLI::App& program, Action& action) {
  auto options = std::make_shared<GenerateOptions>();
  CLI::App& command = add_command(program, "generate", "Generate text for prompts");
  GenerateOptions& o = *options;
  add_model(command, o.model);
  add_value(command, "--prompt,-p", "TEXT", "a prompt; repeatable",
            [&o](const std::string& s) { o.prompts.push_back(s); });
  add_value(command, "--input,-i", "FILE", "requests as JSON lines; - is standard input",
            [&o](const std::string& s) { o.input = s; });
  add_value(command, "--output,-o", "FILE", "results as JSON lines; - is standard output",
            [&o](const std::string& s) { o.output = s; });
  add_flag(command, "--chat", o.chat,
           "each --prompt is a user's message, put into the chat template");
  add_system(command, o.system, "the system message of --chat");
  add_flag(command, "--json", o.json, "JSON lines on standard output for --prompt, too");
  add_flag(command, "--quiet,-q", o.quiet, "no notes and no progress on standard error");
  add_generation_config(command, o.generation_config);
  o.sampling.add_to(command);
  add_engine_options(command, o.engine);
  set_action(command, action, [options] { return generate(*options); });
}

}  // namespace nanovllm::cli
