#include "cli/tools/chat_tools.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "nanovllm/tokenizer.h"

#include "chat/structural_tag.h"
#include "cli/terminal/output.h"
#include "cli/tools/run_command.h"
#include "core/check.h"
#include "io/utf8.h"

namespace nanovllm::cli {
namespace {

constexpr size_t kShownBytes = 300;  // of a result

/// `json` on one line of printable ASCII: nothing in it can change what a terminal shows.
std::string shown(const Json& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
}

ChatFormat format_of(const std::string& chat_template, const std::string& parser) {
  const ChatFormat format = choose_chat_format(chat_template, parser, "");
  check(format.tools != nullptr, ErrorKind::invalid_argument,
        "--tools: the model's chat template does not show how it writes calls: take a model that "
        "was trained for tools, or name the way by --tool-call-parser");
  return format;
}

}  // namespace

ChatTools::ChatTools(const LLM& llm, CommandTools file, const std::string& chat_template,
                     const std::string& parser)
    : llm_(llm),
      file_(std::move(file)),
      format_(format_of(chat_template, parser)),
      for_template_(tools_for_template(file_.tools)) {}

void ChatTools::prepare(std::string_view prompt, SamplingParams& params) const {
  const Tokenizer& tokenizer = *llm_.tokenizer();
  params.visible_special_token_ids = format_.visible_tokens(tokenizer, true);
  if (format_.has_special_marks(tokenizer)) return;
  // As the server does: from its mark on a call is valid, where there can be such a grammar.
  const bool is_reasoning = format_.opens_reasoning(prompt);
  CallConstraint constraint;
  constraint.tools = file_.tools;
  constraint.may_reason = !is_reasoning && !format_.closes_reasoning(prompt);
  constraint.after_reasoning = is_reasoning;
  try {
    params.structured_outputs.structural_tag = structural_tag(format_, constraint);
    if (is_reasoning) params.structured_outputs.reasoning_end = format_.reasoning->end.front();
    (void)llm_.compile_grammar(params);
  } catch (const Error&) {
    params.structured_outputs = {};
  }
}

ChatParser ChatTools::new_parser(std::string_view prompt, uint64_t id_seed) const {
  return ChatParser(format_, {.is_reasoning = format_.opens_reasoning(prompt),
                              .tools = file_.tools,
                              .whole_calls = true,
                              .id_seed = id_seed});
}

bool ChatTools::run(const std::vector<ToolCall>& calls, ChatInput& input,
                    const Interrupt& interrupt, Json& messages) const {
  for (const ToolCall& call : calls) {
    // A conversation in which a call has no result is one that templates may refuse.
    const std::string result =
        interrupt.requested() ? "error: stopped by the user" : result_of(call, input, interrupt);
    messages.push_back(
        {{"role", "tool"}, {"tool_call_id", call.id}, {"name", call.name}, {"content", result}});
  }
  return !interrupt.requested();
}

std::string ChatTools::result_of(const ToolCall& call, ChatInput& input,
                                 const Interrupt& interrupt) const {
  const auto command = file_.commands.find(call.name);
  Json arguments;
  try {
    arguments = parse_json(call.arguments, "arguments", ErrorKind::invalid_argument);
    check(command != file_.commands.end(), ErrorKind::invalid_argument, "there is no such tool");
  } catch (const Error& error) {
    say(fmt::format("{}: {}\n", quote(call.name), one_line(error.what())));
    return std::string("error: ") + error.what();
  }
  // The command gets what is shown, byte for byte.
  const std::string text = shown(arguments);
  say(fmt::format("{} {}\nruns {}\n", command->first, text, shown(command->second)));
  if (!input.confirm("run it? [y/N] "))
    return interrupt.requested() ? "error: stopped by the user"
                                 : "error: the user did not allow this call";
  const CommandResult result = run_command(command->second, text + "\n", interrupt);
  const std::string content = result.problem.empty() ? result.output : "error: " + result.problem;
  std::string line = shown(content);
  if (line.size() > kShownBytes) line = line.substr(0, kShownBytes) + "...";
  say(line + "\n");
  return content;
}

std::string without_controls(std::string_view text) {
  std::string out;
  for (const char32_t c : to_utf32(text)) {
    const bool is_control = (c < 0x20 && c != '\n' && c != '\t') || (c >= 0x7F && c < 0xA0);
    if (is_control)
      out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
    else
      append_utf8(out, c);
  }
  return out;
}

Json assistant_message(const ChatMessage& answer) {
  Json message = {{"role", "assistant"}, {"content", answer.content}};
  if (!answer.reasoning.empty()) message["reasoning_content"] = answer.reasoning;
  for (const ToolCall& call : answer.tool_calls)
    message["tool_calls"].push_back(
        {{"id", call.id},
         {"type", "function"},
         {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
  Json list = Json::array({message});
  complete_messages(list);
  return list[0];
}

}  // namespace nanovllm::cli
