#include "chat/chat_format.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "chat/calls/call_reader.h"
#include "core/check.h"
#include "io/json.h"

namespace nanovllm {
namespace {

template <size_t n>
using Texts = std::array<std::string_view, n>;

// -- Tool calls

constexpr Texts<1> kToolCall{"<tool_call>"};
constexpr Texts<2> kFunction{"<tool_call>", "<function="};  // the first is left out at times
constexpr Texts<2> kHermesTokens{"<tool_call>", "</tool_call>"};
constexpr Texts<2> kQwenCoderTemplate{"<tool_call>", "<function="};
constexpr Texts<2> kSeedTemplate{"seed:tool_call>", "<function="};
constexpr Texts<1> kSeedToolCall{"<seed:tool_call>"};
constexpr Texts<2> kSeedTokens{"<seed:tool_call>", "</seed:tool_call>"};
constexpr Texts<2> kHermesTemplate{"<tool_call>", "\"arguments"};
constexpr Texts<2> kHermesTemplateQuoted{"<tool_call>", "\\\"arguments"};
constexpr Texts<1> kMistralMarks{"[TOOL_CALLS]"};
constexpr Texts<2> kMistralArgsTemplate{"[TOOL_CALLS]", "[ARGS]"};
constexpr Texts<3> kMistralTokens{"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"};
constexpr Texts<2> kLlamaTemplate{"<|eot_id|>", "Respond in the format {\"name\": function name"};
constexpr Texts<1> kPythonTag{"<|python_tag|>"};
constexpr Texts<1> kPythonicTemplate{"[func_name1(params_name1=params_value1"};
constexpr Texts<1> kPythonStart{"<|python_start|>"};
constexpr Texts<2> kPythonicTokens{"<|python_start|>", "<|python_end|>"};

constexpr CallSyntax kHermesSyntax{
    "",           "", "\n", "<tool_call>\n{\"name\": \"", "\", \"arguments\": ", "}\n</tool_call>",
    "<tool_call>"};
constexpr CallSyntax kQwenCoderSyntax{"",
                                      "",
                                      "\n",
                                      "<tool_call>\n<function=",
                                      ">\n",
                                      "</function>\n</tool_call>",
                                      "<tool_call>",
                                      CallSyntax::parameters};
constexpr CallSyntax kSeedSyntax{"",
                                 "",
                                 "\n",
                                 "<seed:tool_call>\n<function=",
                                 ">\n",
                                 "</function>\n</seed:tool_call>",
                                 "<seed:tool_call>",
                                 CallSyntax::inline_parameters};
constexpr CallSyntax kMistralSyntax{"", "", "", "[TOOL_CALLS]", "[ARGS]", "", "[TOOL_CALLS]"};
constexpr CallSyntax kMistralListSyntax{"[TOOL_CALLS][",       "]", ", ",          "{\"name\": \"",
                                        "\", \"arguments\": ", "}", "[TOOL_CALLS]"};
constexpr CallSyntax kLlamaSyntax{"", "", "; ", "{\"name\": \"", "\", \"parameters\": ", "}", ""};
constexpr CallSyntax kPythonicSyntax{"[", "]", ", ", "", "(", ")", "", CallSyntax::keywords};

// In the order in which a template is compared with them.
constexpr ToolFormat kToolFormats[] = {
    {"qwen3_coder", kQwenCoderTemplate, kFunction, "", kHermesTokens, make_qwen3_coder_reader,
     kQwenCoderSyntax},
    {"seed_oss", kSeedTemplate, kSeedToolCall, "", kSeedTokens, make_qwen3_coder_reader,
     kSeedSyntax},
    {"hermes", kHermesTemplate, kToolCall, "", kHermesTokens, make_hermes_reader, kHermesSyntax},
    {"hermes", kHermesTemplateQuoted, kToolCall, "", kHermesTokens, make_hermes_reader,
     kHermesSyntax},
    {"mistral", kMistralArgsTemplate, kMistralMarks, "", kMistralTokens, make_mistral_reader,
     kMistralSyntax, true},
    {"mistral", kMistralMarks, kMistralMarks, "", kMistralTokens, make_mistral_reader,
     kMistralListSyntax, true},
    {"llama3_json", kLlamaTemplate, kPythonTag, "{", kPythonTag, make_llama_reader, kLlamaSyntax},
    {"pythonic", kPythonicTemplate, kPythonStart, "[", kPythonicTokens, make_pythonic_reader,
     kPythonicSyntax},
};
// Other names of vLLM's for the same.
constexpr std::pair<std::string_view, std::string_view> kSameTools[] = {
    {"qwen3_xml", "qwen3_coder"}, {"llama4_json", "llama3_json"}, {"llama4_pythonic", "pythonic"}};

// -- Reasoning

constexpr Texts<1> kThink{"<think>"}, kThinkEnd{"</think>"};
constexpr Texts<2> kThinkTokens{"<think>", "</think>"};
constexpr Texts<5> kThinkNames{"qwen3", "deepseek_r1", "deepseek_v3", "glm45", "nemotron_v3"};
constexpr Texts<1> kSeedNames{"seed_oss"}, kSeedTemplateThink{"seed:think"};
constexpr Texts<1> kSeedThink{"<seed:think>"}, kSeedThinkEnd{"</seed:think>"};
constexpr Texts<2> kSeedThinkTokens{"<seed:think>", "</seed:think>"};
constexpr Texts<1> kMistralNames{"mistral"};
constexpr Texts<1> kMistralThink{"[THINK]"}, kMistralThinkEnd{"[/THINK]"};
constexpr Texts<2> kMistralThinkTokens{"[THINK]", "[/THINK]"};
constexpr Texts<1> kGraniteNames{"granite"};
constexpr Texts<2> kGraniteTemplate{"<|start_of_role|>", "<think>"};
constexpr Texts<2> kGraniteTemplate32{"<|start_of_role|>", "Here is my thought process:"};
constexpr Texts<4> kGraniteBegin{
    "<think>", "Here is my thought process:", "Here's my thought process:", "<response>"};
constexpr Texts<3> kGraniteEnd{"</think>", "Here is my response:", "Here's my response:"};
constexpr Texts<1> kResponse{"<response>"}, kResponseEnd{"</response>"};
constexpr Texts<1> kGptOssNames{"openai_gptoss"}, kGptOssTemplate{"<|channel|>analysis"};
constexpr Texts<2> kGptOssBegin{"<|channel|>analysis<|message|>", "<|channel|>final<|message|>"};
constexpr Texts<1> kGptOssEnd{"<|end|>"};
constexpr Texts<2> kGptOssContent{"<|start|>assistant<|channel|>final<|message|>",
                                  "<|channel|>final<|message|>"};
constexpr Texts<2> kGptOssContentEnd{"<|return|>", "<|end|>"};
constexpr Texts<4> kGptOssTokens{"<|channel|>", "<|message|>", "<|start|>", "<|end|>"};

constexpr ReasoningFormat kReasoningFormats[] = {
    {kSeedNames, kSeedTemplateThink, kSeedThink, kSeedThinkEnd, kSeedThinkTokens},
    {kMistralNames, kMistralThink, kMistralThink, kMistralThinkEnd, kMistralThinkTokens},
    {kGraniteNames, kGraniteTemplate, kGraniteBegin, kGraniteEnd, kThinkTokens, kResponse,
     kResponseEnd},
    {kGraniteNames, kGraniteTemplate32, kGraniteBegin, kGraniteEnd, kThinkTokens, kResponse,
     kResponseEnd},
    {kGptOssNames, kGptOssTemplate, kGptOssBegin, kGptOssEnd, kGptOssTokens, kGptOssContent,
     kGptOssContentEnd},
    {kThinkNames, kThinkEnd, kThink, kThinkEnd, kThinkTokens},
};

bool has_all(std::string_view text, std::span<const std::string_view> marks) {
  return std::ranges::all_of(
      marks, [&](std::string_view mark) { return text.find(mark) != std::string_view::npos; });
}

/// White space behind them apart.
bool ends_with_one(std::string_view text, std::span<const std::string_view> marks) {
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return std::ranges::any_of(marks, [&](std::string_view mark) { return text.ends_with(mark); });
}

/// The first entry whose marks the template has, of those with that name if there is one; else the
/// first of that name, or null.
template <class Entries, class HasName>
auto choose(const Entries& entries, std::string_view name, std::string_view chat_template,
            HasName has_name) -> const std::remove_reference_t<decltype(entries[0])>* {
  const std::remove_reference_t<decltype(entries[0])>* named = nullptr;
  for (const auto& entry : entries) {
    if (!name.empty() && !has_name(entry)) continue;
    if (has_all(chat_template, entry.template_marks)) return &entry;
    if (!name.empty() && !named) named = &entry;
  }
  return named;
}

}  // namespace

ChatFormat choose_chat_format(std::string_view chat_template, std::string_view tool_call_parser,
                              std::string_view reasoning_parser) {
  for (const auto& [other, ours] : kSameTools)
    if (tool_call_parser == other) tool_call_parser = ours;
  const auto check_name = [](const char* option, std::string_view name,
                             const std::vector<std::string>& known) {
    check(name.empty() || std::ranges::find(known, name) != known.end(),
          ErrorKind::invalid_argument, "{} {} is not known: use one of {}", option, quote(name),
          fmt::join(known, ", "));
  };
  check_name("--tool-call-parser", tool_call_parser, tool_call_parser_names());
  check_name("--reasoning-parser", reasoning_parser, reasoning_parser_names());
  return {
      choose(kToolFormats, tool_call_parser, chat_template,
             [&](const ToolFormat& entry) { return entry.name == tool_call_parser; }),
      choose(kReasoningFormats, reasoning_parser, chat_template, [&](const ReasoningFormat& entry) {
        return std::ranges::find(entry.names, reasoning_parser) != entry.names.end();
      })};
}

std::vector<std::string> tool_call_parser_names() {
  std::vector<std::string> names{"none"};
  for (const ToolFormat& entry : kToolFormats)
    if (entry.name != names.back()) names.emplace_back(entry.name);
  for (const auto& [other, ours] : kSameTools) names.emplace_back(other);
  return names;
}

std::vector<std::string> reasoning_parser_names() {
  std::vector<std::string> names{"none"};
  for (const ReasoningFormat& entry : kReasoningFormats)
    if (entry.names.back() != names.back())
      names.insert(names.end(), entry.names.begin(), entry.names.end());
  return names;
}

bool ChatFormat::opens_reasoning(std::string_view prompt) const {
  return reasoning && ends_with_one(prompt, reasoning->begin);
}

bool ChatFormat::ends_in_reasoning(std::string_view message) const {
  const auto last = [&](std::span<const std::string_view> marks) {
    size_t end = 0;
    for (const std::string_view mark : marks)
      if (const size_t at = message.rfind(mark); at != message.npos)
        end = std::max(end, at + mark.size());
    return end;
  };
  return reasoning &&
         last(reasoning->begin) > std::max(last(reasoning->end), last(reasoning->content_begin));
}

bool ChatFormat::closes_reasoning(std::string_view prompt) const {
  return reasoning && ends_with_one(prompt, reasoning->end);
}

std::vector<int64_t> ChatFormat::visible_tokens(const Tokenizer& tokenizer, bool has_tools) const {
  std::vector<int64_t> ids;
  const auto add = [&](std::span<const std::string_view> tokens) {
    for (const std::string_view token : tokens) {
      const auto id = tokenizer.token_to_id(token);
      if (id && tokenizer.is_special(*id)) ids.push_back(*id);
    }
  };
  if (reasoning) add(reasoning->tokens);
  if (tools && has_tools) add(tools->tokens);
  return ids;
}

bool ChatFormat::has_special_marks(const Tokenizer& tokenizer) const {
  return std::ranges::any_of(tools->tokens, [&](std::string_view mark) {
    const auto id = tokenizer.token_to_id(mark);
    return id && tokenizer.is_special(*id);
  });
}

}  // namespace nanovllm
