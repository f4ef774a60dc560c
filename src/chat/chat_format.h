// How a family of models writes reasoning and tool calls: two tables, looked up by vLLM's names or
// by the marks of a chat template.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "nanovllm/tokenizer.h"

namespace nanovllm {

class CallReader;
struct Tool;

/// How one family spells its calls; the tool's name stands between before_name and after_name.
struct CallSyntax {
  std::string_view block_begin, block_end;  ///< around all calls
  std::string_view separator;               ///< between two
  std::string_view before_name, after_name, call_end;
  std::string_view trigger;  ///< what a call begins with whatever it calls; empty: nothing
  enum Arguments {
    json,               ///< one JSON object
    keywords,           ///< a=1, b="x"
    parameters,         ///< <parameter=a>, the value, </parameter>, each on a line
    inline_parameters,  ///< the same without lines around the value
  } arguments = json;
};

/// One family's tool calls.
struct ToolFormat {
  std::string_view name;                             ///< vLLM's --tool-call-parser
  std::span<const std::string_view> template_marks;  ///< a template with all of them is this one's
  std::span<const std::string_view> marks;           ///< each opens a block of calls
  std::string_view first;  ///< characters that open a block where the answer begins with one
  std::span<const std::string_view> tokens;  ///< marks that tokenizers may have as special tokens
  std::unique_ptr<CallReader> (*make_reader)(std::string_view mark, std::span<const Tool> tools);
  CallSyntax syntax;
  bool short_ids = false;  ///< nine letters and digits, as Mistral's templates insist
};

/// One family's reasoning.
struct ReasoningFormat {
  std::span<const std::string_view> names;           ///< vLLM's --reasoning-parser
  std::span<const std::string_view> template_marks;  ///< a template with all of them is this one's
  std::span<const std::string_view> begin, end;      ///< marks of the block
  std::span<const std::string_view> tokens;          ///< as in ToolFormat
  /// Marks around the answer proper; `begin` has the opening ones too.
  std::span<const std::string_view> content_begin{}, content_end{};
};

/// The formats of a model; null where it has none.
struct ChatFormat {
  const ToolFormat* tools = nullptr;
  const ReasoningFormat* reasoning = nullptr;

  /// Whether `prompt` leaves the answer inside of a reasoning block.
  bool opens_reasoning(std::string_view prompt) const;
  /// Whether `message`, which the answer goes on with, ends inside of one.
  bool ends_in_reasoning(std::string_view message) const;
  /// Whether `prompt` has closed one: the answer has none then.
  bool closes_reasoning(std::string_view prompt) const;
  /// Special tokens that the text must have for the parsers to see the marks:
  /// SamplingParams::visible_special_token_ids. `has_tools`: those of calls too.
  std::vector<int64_t> visible_tokens(const Tokenizer& tokenizer, bool has_tools) const;
  /// Whether a call's marks are special tokens, which no grammar spells. There must be `tools`.
  bool has_special_marks(const Tokenizer& tokenizer) const;
};

/// By name, or by the template's marks where a name is empty; "none" is none. Throws
/// Error(invalid_argument) for an unknown name, with the known ones.
ChatFormat choose_chat_format(std::string_view chat_template, std::string_view tool_call_parser,
                              std::string_view reasoning_parser);

/// The names for --tool-call-parser and --reasoning-parser.
std::vector<std::string> tool_call_parser_names();
std::vector<std::string> reasoning_parser_names();

}  // namespace nanovllm
