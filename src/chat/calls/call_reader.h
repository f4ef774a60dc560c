// One block of tool calls, read character by character: an implementation for each way of writing
// them. Because a reader sees single characters, no cut of the text can change what it finds.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "chat/tools.h"

namespace nanovllm {

/// Where a reader puts the calls of its block.
class CallSink {
 public:
  virtual ~CallSink() = default;
  /// A call begins. Up to here its text is content again if it does not parse after all.
  virtual void begin_call(std::string name) = 0;
  /// The next piece of its arguments, which add up to a JSON object.
  virtual void add_arguments(std::string_view json) = 0;
  virtual void end_call() = 0;
};

class CallReader {
 public:
  enum class Step {
    more,     ///< the block goes on
    last,     ///< it ends with this character
    past,     ///< it ended before this character
    refused,  ///< with this character it is no block of calls
  };
  virtual ~CallReader() = default;
  virtual Step take(char c, CallSink& sink) = 0;
  /// The text has ended. False: what is left of the block is text.
  virtual bool finish(CallSink& sink) = 0;
};

/// JSON's white space.
inline bool is_space(char c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }

/// `text` as a JSON string, without the quotes.
std::string json_escaped(std::string_view text);

/// Whether a tool of that name is there.
bool has_tool(std::span<const Tool> tools, std::string_view name);

/// Readers by how calls are written; `mark` is what opened the block.
std::unique_ptr<CallReader> make_hermes_reader(std::string_view mark, std::span<const Tool> tools);
std::unique_ptr<CallReader> make_llama_reader(std::string_view mark, std::span<const Tool> tools);
std::unique_ptr<CallReader> make_mistral_reader(std::string_view mark, std::span<const Tool> tools);
std::unique_ptr<CallReader> make_pythonic_reader(std::string_view mark,
                                                 std::span<const Tool> tools);
std::unique_ptr<CallReader> make_qwen3_coder_reader(std::string_view mark,
                                                    std::span<const Tool> tools);

}  // namespace nanovllm
