// nanovllm chat: a conversation in the terminal, or from a pipe with a message per line.
#include <memory>
#include <optional>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "nanovllm/tokenizer.h"

#include "cli/command.h"
#include "cli/exit_code.h"
#include "cli/interrupt.h"
#include "cli/line_reader.h"
#include "cli/load_model.h"
#include "cli/output.h"
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
  bool quiet = false;
};

constexpr const char* kHelp =
    "/clear forgets the conversation, /again answers the last message once more, /exit or Ctrl-D "
    "ends;\nCtrl-C stops an answer; a line that ends in \\ goes on in the next\n";

/// The conversation: its messages, and the engine that answers.
class Chat {
 public:
  Chat(LLM& llm, const ChatOptions& options, const SamplingParams& params)
      : llm_(llm), options_(options), params_(params), interactive_(::isatty(STDIN_FILENO) != 0) {
    clear();
  }

  /// Until the input ends. Throws OutputError, and Error(engine) if the engine fails.
  int run();

 private:
  void clear();
  std::optional<std::string> read_message();
  void obey(const std::string& command);
  void ask(std::string text);
  void answer();
  void complain(const std::string& what);

  LLM& llm_;
  const ChatOptions& options_;
  const SamplingParams params_;
  const bool interactive_;
  LineReader input_{"standard input", "-"};
  Output output_;
  Json messages_;
  bool over_ = false, failed_ = false;
};

int Chat::run() {
  if (interactive_ && !options_.quiet) say(kHelp);
  while (!over_) {
    const std::optional<std::string> message = read_message();
    if (!message) break;
    if (message->empty()) continue;
    if (message->front() == '/')
      obey(*message);
    else
      ask(*message);
  }
  output_.close();
  if (interactive_ && !over_) say("\n");  // Ctrl-D leaves the cursor in the prompt
  return failed_ && !interactive_ ? kExitRequestsFailed : kExitDone;
}

void Chat::clear() {
  messages_ = Json::array();
  if (!options_.system.empty())
    messages_.push_back({{"role", "system"}, {"content", options_.system}});
}

/// The next message; nothing at the end of the input.
std::optional<std::string> Chat::read_message() {
  std::string message, line;
  for (bool first = true;; first = false) {
    if (interactive_) say(first ? "> " : "  ");
    LineReader::Result result;
    do result = input_.next(line, /*wait=*/true);
    while (result == LineReader::Result::not_yet);
    if (result == LineReader::Result::end_of_file)
      return message.empty() ? std::nullopt : std::optional(message);
    if (result == LineReader::Result::too_long) {
      complain(fmt::format("line {} is longer than {} MB", input_.line_number(),
                           LineReader::kMaxLine >> 20));
      return "";
    }
    const bool continues = line.ends_with('\\');
    if (continues) line.back() = '\n';
    message += line;
    if (!continues) return message;
  }
}

void Chat::obey(const std::string& command) {
  const bool answered = !messages_.empty() && messages_.back()["role"] == "assistant";
  if (command == "/exit" || command == "/quit" || command == "/bye") {
    over_ = true;
  } else if (command == "/clear") {
    clear();
  } else if (command == "/again" && answered) {
    messages_.erase(messages_.size() - 1);
    answer();
  } else if (command == "/again") {
    complain("there is no answer yet");
  } else if (command == "/help") {
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

// Streams the answer to the last message and adds it to the conversation. A message that cannot be
// answered is taken back.
void Chat::answer() {
  std::string text, error;
  try {
    const Prompt prompt = llm_.chat_prompt(messages_.dump(), options_.template_kwargs);
    const Interrupt interrupt;
    const int64_t id = llm_.add_request(prompt, params_);
    for (bool stopped = false; !llm_.is_finished();) {
      if (interrupt.requested() && !stopped) {
        llm_.abort_request(id);
        stopped = true;
      }
      for (const RequestOutput& output : llm_.step()) {
        text += output.outputs[0].text;
        error = output.error;
        output_.write(output.outputs[0].text);
      }
      output_.flush();
    }
  } catch (const Error& failure) {
    if (failure.kind() != ErrorKind::invalid_argument) throw;
    error = failure.what();
  }
  if (!error.empty() && text.empty()) {
    messages_.erase(messages_.size() - 1);
    return complain(error);
  }
  output_.write("\n");
  output_.flush();
  messages_.push_back({{"role", "assistant"}, {"content", text}});
}

void Chat::complain(const std::string& what) {
  failed_ = true;
  say("error: " + one_line(what) + "\n");
}

int chat(const ChatOptions& options) {
  require_model(options.model);
  if (const auto code = serve_as_other_rank(options.model, options.engine)) return *code;
  Progress progress(options.quiet);
  LLM llm = load_model(options.model, options.engine, progress, options.quiet);
  const Tokenizer* tokenizer = llm.tokenizer();
  check(tokenizer != nullptr, ErrorKind::invalid_argument,
        "chat needs the tokenizer: drop --skip-tokenizer-init");
  check(!tokenizer->chat_template().empty(), ErrorKind::model,
        "{}: no chat template in tokenizer_config.json or chat_template.jinja: generate --prompt "
        "completes text with such a model",
        options.model);
  // An answer may take what is left of max_model_len, unless somebody says otherwise.
  const int64_t usual = SamplingParams{}.max_tokens;
  SamplingParams params;
  if (options.generation_config == "auto") params = llm.default_sampling_params();
  if (params.max_tokens == usual) params.max_tokens = llm.info().max_model_len;
  options.sampling.apply(params);
  params.output_kind = OutputKind::delta;
  return Chat(llm, options, params).run();
}

}  // namespace

void add_chat(CLI::App& program, Action& action) {
  auto options = std::make_shared<ChatOptions>();
  CLI::App& command = add_command(program, "chat", "Talk with a model in the terminal");
  ChatOptions& o = *options;
  add_model(command, o.model);
  add_system(command, o.system, "the system message");
  add_value(command, "--chat-template-kwargs", "JSON",
            R"(variables for the chat template, as {"enable_thinking": false})",
            [&o](const std::string& s) {
              bool is_object = false;
              try {
                is_object = parse_json(s, "", ErrorKind::invalid_argument).is_object();
              } catch (const Error&) {
              }
              check(is_object, ErrorKind::invalid_argument, "must be a JSON object, got {}",
                    quote(s));
              o.template_kwargs = s;
            });
  add_flag(command, "--quiet,-q", o.quiet, "no notes and no progress on standard error");
  add_generation_config(command, o.generation_config);
  o.sampling.add_to(command);
  add_engine_options(command, o.engine);
  set_action(command, action, [options] { return chat(*options); });
}

}  // namespace nanovllm::cli
