// nanovllm chat: a conversation in the terminal, or from a pipe with a message per line.
#include <csignal>
#include <memory>
#include <optional>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "nanovllm/tokenizer.h"

#include "api/chat_prompts.h"
#include "cli/command.h"
#include "cli/exit_code.h"
#include "cli/load_model.h"
#include "cli/parser_options.h"
#include "cli/terminal/chat_input.h"
#include "cli/terminal/interrupt.h"
#include "cli/terminal/output.h"
#include "cli/tools/chat_tools.h"
#include "core/check.h"
#include "io/json.h"
#include "io/utf8.h"

namespace nanovllm::cli {
namespace {

struct ChatOptions {
  std::string model;
  EngineConfig engine;
  SamplingOptions sampling;
  std::string system;
  std::string generation_config = "auto";
  std::string template_kwargs = "{}";
  std::string chat_template, chat_template_place;
  std::string tools, tool_call_parser;
  bool context_shift = false, quiet = false;
};

constexpr const char* kHelp =
    "/clear   forgets the conversation\n"
    "/again   answers the last message once more\n"
    "/drop    forgets the oldest turns of a conversation that has filled the context\n"
    "/help    shows this\n"
    "/exit    ends, as do /bye and Ctrl-D\n"
    "Ctrl-C stops an answer; a line that ends in \\ goes on in the next\n";

/// The conversation: its messages, and the engine that answers.
class Chat {
 public:
  /// `tools` may be null.
  Chat(LLM& llm, const ChatOptions& options, const SamplingParams& params, Progress& progress,
       const ChatTools* tools)
      : llm_(llm), options_(options), params_(params), progress_(progress), tools_(tools) {
    if (!options.chat_template.empty())
      prompts_.emplace(llm.tokenizer(), options.engine.parse_special_in_messages,
                       options.chat_template, options.chat_template_place);
    if (tools_) template_options_["tools"] = tools_->for_template();
    clear();
  }

  /// Until the input ends. Throws OutputError, and Error(engine) if the engine fails.
  int run();

 private:
  /// How an answer ended, or why there is none.
  struct Answer {
    ChatMessage message{};
    std::string error{};
    bool fills_context = false, stopped = false;
    bool failed() const { return !error.empty() && message.delta().empty(); }
  };

  void clear();
  void obey(const std::string& command);
  void ask(std::string text);
  void answer();
  std::vector<ToolCall> answer_once();
  bool run(const std::vector<ToolCall>& calls);
  Answer generate();
  Prompt prompt() const {
    return prompts_ ? prompts_->prompt(messages_, template_options_)
                    : llm_.chat_prompt(messages_.dump(), template_options_.dump());
  }
  void show(const ChatDelta& news, Answer& answer);
  void take_interrupt();
  size_t end_of_question() const;
  bool is_full() const;
  int drop_oldest();
  void drop();
  void complain(const std::string& what);

  LLM& llm_;
  const ChatOptions& options_;
  const SamplingParams params_;
  Progress& progress_;
  const ChatTools* tools_;
  Json template_options_ =
      parse_json(options_.template_kwargs, "--chat-template-kwargs", ErrorKind::invalid_argument);
  std::optional<ChatPrompts> prompts_;  // where the template is not the model's
  Interrupt interrupt_;
  ChatInput input_{interrupt_};
  Output output_;
  Json messages_;
  Json refused_;  // the message that found the context full, for /drop; else null
  bool over_ = false, failed_ = false;
};

int Chat::run() {
  if (input_.is_terminal() && !options_.quiet) say("/help lists what can be done; Ctrl-D ends\n");
  std::string message;
  ChatInput::Result result{};
  while (!over_ && (result = input_.next(message)) != ChatInput::Result::end) {
    if (result == ChatInput::Result::too_long)
      complain(fmt::format("line {} is longer than {} MB", input_.line_number(),
                           LineReader::kMaxLine >> 20));
    if (message.empty()) continue;
    input_.remember(message);
    if (message.front() == '/')
      obey(message);
    else
      ask(std::move(message));
  }
  output_.close();
  const int signal = input_.signal() != 0 ? input_.signal() : interrupt_.signal();
  if (signal != 0) return 128 + signal;
  if (input_.is_terminal() && !over_) say("\n");  // Ctrl-D leaves the cursor in the prompt
  return failed_ && !input_.is_terminal() ? kExitRequestsFailed : kExitDone;
}

void Chat::clear() {
  messages_ = Json::array();
  refused_ = nullptr;
  if (!options_.system.empty())
    messages_.push_back({{"role", "system"}, {"content", options_.system}});
}

/// Behind the user's last message; 0 where there is none.
size_t Chat::end_of_question() const {
  size_t end = messages_.size();
  while (end > 0 && messages_[end - 1]["role"] != "user") --end;
  return end;
}

void Chat::obey(const std::string& command) {
  const size_t question = end_of_question();
  const bool answered = question > 0 && question < messages_.size();
  if (command == "/exit" || command == "/quit" || command == "/bye") {
    over_ = true;
  } else if (command == "/clear") {
    clear();
  } else if (command == "/again" && answered) {
    while (messages_.size() > question) messages_.erase(messages_.size() - 1);
    answer();
  } else if (command == "/again") {
    complain("there is no answer yet");
  } else if (command == "/drop") {
    drop();
  } else if (command == "/help" || command == "/?") {
    say(kHelp);
  } else {
    complain(fmt::format("unknown command {}; /help lists them", quote(command)));
  }
}

void Chat::ask(std::string text) {
  if (find_invalid_utf8(text) != std::string::npos)
    return complain(fmt::format("line {} is not valid UTF-8", input_.line_number()));
  messages_.push_back({{"role", "user"}, {"content", std::move(text)}});
  answer();
}

// Answers until an answer calls no tools.
void Chat::answer() {
  for (auto calls = answer_once(); !calls.empty() && run(calls);) calls = answer_once();
}

bool Chat::run(const std::vector<ToolCall>& calls) {
  const bool goes_on = tools_->run(calls, input_, interrupt_, messages_);
  take_interrupt();
  return goes_on;
}

// Streams the answer to what was said last, adds it to the conversation and returns its calls. A
// message that cannot be answered is taken back.
std::vector<ToolCall> Chat::answer_once() {
  refused_ = nullptr;
  Answer answer = generate();
  bool full = answer.failed() && is_full();
  if (full && options_.context_shift) {
    const int dropped = drop_oldest();
    if (dropped > 0) {
      if (!options_.quiet) say(fmt::format("note: forgot the {} oldest messages\n", dropped));
      answer = generate();
      full = false;
    }
  }
  if (answer.failed()) {
    const size_t question = end_of_question();
    const Json message = messages_[question - 1];
    while (messages_.size() >= question) messages_.erase(messages_.size() - 1);
    if (full && messages_.size() > 1) {
      refused_ = message;
      answer.error += "; /drop forgets the oldest turns and answers, /clear forgets all";
    }
    complain(answer.error);
    return {};
  }
  const bool calls_alone = !answer.message.tool_calls.empty() && answer.message.content.empty();
  if (!calls_alone) output_.write("\n");
  output_.flush();
  if (answer.stopped) answer.message.tool_calls.clear();
  messages_.push_back(assistant_message(answer.message));
  if (answer.fills_context && !options_.quiet)
    say(fmt::format(
        "note: the context of {} tokens is full: /drop forgets the oldest turns, /clear "
        "forgets all\n",
        llm_.info().max_model_len));
  return answer.message.tool_calls;
}

/// Adds a piece to an answer and to what the user sees of it.
void Chat::show(const ChatDelta& news, Answer& answer) {
  const bool begins_content = !news.content.empty() && answer.message.content.empty();
  if (begins_content && !(answer.message.reasoning + news.reasoning).empty())
    output_.write(news.reasoning.empty() ? "\n\n" : without_controls(news.reasoning) + "\n\n");
  else if (!news.reasoning.empty())
    output_.write(without_controls(news.reasoning));
  // Without tools nothing is asked that a model could paint over.
  output_.write(tools_ ? without_controls(news.content) : news.content);
  answer.message.add(news);
  output_.flush();
}

/// Ctrl-C has stopped what was under way; one that comes behind it is for the next prompt.
void Chat::take_interrupt() {
  if (interrupt_.signal() == SIGTERM)
    over_ = true;
  else
    interrupt_.take();
}

Chat::Answer Chat::generate() {
  Answer answer;
  try {
    const Prompt asked = prompt();
    const auto& text = std::get<std::string>(asked.value);
    SamplingParams params = params_;
    if (tools_) tools_->prepare(text, params);
    if (interrupt_.take(kStopping) == SIGTERM) over_ = true;
    const int64_t id = llm_.add_request(asked, params);
    std::optional<ChatParser> parser;
    if (tools_) parser = tools_->new_parser(text, static_cast<uint64_t>(id));
    int64_t tokens = 0;
    while (!llm_.is_finished()) {
      if (interrupt_.requested() && !answer.stopped) {
        llm_.abort_request(id);
        answer.stopped = true;
      }
      if (tokens == 0) progress_.reading(llm_);
      for (const RequestOutput& output : llm_.step()) {
        const CompletionOutput& piece = output.outputs[0];
        if (!piece.text.empty()) progress_.clear();
        answer.error = output.error;
        tokens += std::ssize(output.prompt_token_ids) + std::ssize(piece.token_ids);
        answer.fills_context =
            piece.finish_reason == FinishReason::length && tokens >= llm_.info().max_model_len;
        show(parser ? parser->add(piece.text) : ChatDelta{.content = piece.text}, answer);
      }
    }
    if (parser) show(parser->finish(), answer);
  } catch (const Error& failure) {
    if (failure.kind() != ErrorKind::invalid_argument) throw;
    answer.error = failure.what();
  }
  progress_.clear();
  take_interrupt();
  return answer;
}

/// Whether the conversation leaves no room for an answer of a quarter of the context. The engine
/// counts exactly; this says how many turns to drop.
bool Chat::is_full() const {
  std::string text;
  try {
    text = std::get<std::string>(prompt().value);
  } catch (const Error&) {  // the template's refusal, which was reported
    return false;
  }
  const int64_t context = llm_.info().max_model_len;
  const int64_t room = std::min(params_.max_tokens, std::max<int64_t>(context / 4, 1));
  const Tokenizer& tokenizer = *llm_.tokenizer();
  return tokenizer.min_tokens(text) >= context ||
         std::ssize(tokenizer.encode(text, /*add_special_tokens=*/false)) + room > context;
}

/// Drops turns until there is room; the system message and the last turn stay. Returns the number
/// of messages dropped.
int Chat::drop_oldest() {
  const size_t first = messages_[0]["role"] == "system" ? 1 : 0;
  int dropped = 0;
  while (is_full()) {
    size_t next = first + 1;  // where the second turn begins
    while (next < messages_.size() && messages_[next]["role"] != "user") ++next;
    if (next >= messages_.size()) break;
    for (; next > first; --next, ++dropped) messages_.erase(first);
  }
  return dropped;
}

void Chat::drop() {
  const Json before = messages_;
  if (!refused_.is_null()) messages_.push_back(refused_);
  const int dropped = messages_.empty() ? 0 : drop_oldest();
  if (dropped == 0) {
    messages_ = before;
    return complain("there is room for an answer: nothing was forgotten");
  }
  say(fmt::format("forgot the {} oldest messages\n", dropped));
  if (!refused_.is_null()) answer();
}

void Chat::complain(const std::string& what) {
  failed_ = true;
  say("error: " + one_line(what) + "\n");
}

int chat(const ChatOptions& options) {
  require_model(options.model);
  check(options.tools.empty() || (::isatty(STDIN_FILENO) && ::isatty(STDERR_FILENO)),
        ErrorKind::invalid_argument,
        "--tools asks before each call, which needs a terminal: run it in one, or give the tools "
        "to nanovllm serve in each request");
  CommandTools file;
  if (!options.tools.empty()) file = read_tool_file(options.tools);
  if (const auto code = serve_as_other_rank(options.model, options.engine)) return *code;
  Progress progress(options.quiet);
  LLM llm = load_model(options.model, options.engine, progress, options.quiet);
  const Tokenizer* tokenizer = llm.tokenizer();
  check(tokenizer != nullptr, ErrorKind::invalid_argument,
        "chat needs the tokenizer: drop --skip-tokenizer-init");
  const std::string& chat_template =
      options.chat_template.empty() ? tokenizer->chat_template() : options.chat_template;
  check(!chat_template.empty(), ErrorKind::model,
        "{}: no chat template in tokenizer_config.json or chat_template.jinja: generate --prompt "
        "completes text with such a model",
        options.model);
  // An answer may take what is left of max_model_len, unless the user or the model says otherwise.
  const int64_t usual = SamplingParams{}.max_tokens;
  SamplingParams params;
  if (options.generation_config == "auto") params = llm.default_sampling_params();
  if (params.max_tokens == usual) params.max_tokens = llm.info().max_model_len;
  options.sampling.apply(params);
  params.output_kind = OutputKind::delta;
  std::optional<ChatTools> tools;
  if (!options.tools.empty())
    tools.emplace(
        llm, std::move(file),
        options.chat_template.empty() ? tokenizer->tool_template() + chat_template : chat_template,
        options.tool_call_parser);
  return Chat(llm, options, params, progress, tools ? &*tools : nullptr).run();
}

}  // namespace

void add_chat(CLI::App& program, Action& action) {
  auto options = std::make_shared<ChatOptions>();
  CLI::App& command = add_command(program, "chat", "Talk with a model in the terminal");
  ChatOptions& o = *options;
  add_model(command, o.model);
  add_system(command, o.system, "the system message");
  add_template_kwargs(command, o.template_kwargs);
  add_chat_template(command, o.chat_template, o.chat_template_place);
  add_value(command, "--tools", "FILE",
            "tools that the model may call, and the command that each of them runs if you allow it",
            [&o](const std::string& s) { o.tools = s; });
  add_tool_call_parser(command, o.tool_call_parser);
  add_flag(command, "--context-shift", o.context_shift,
           "a conversation that fills the context forgets its oldest turns by itself");
  add_flag(command, "--quiet,-q", o.quiet, "no notes and no progress on standard error");
  add_generation_config(command, o.generation_config);
  o.sampling.add_to(command, SamplingOptions::Use::chat);
  add_engine_options(command, o.engine);
  set_action(command, action, [options] { return chat(*options); });
}

}  // namespace nanovllm::cli
