// ChatTemplate: any template with any variables gives a text within the limits, or an Error. The
// input is the template, a zero byte, and the variables as JSON.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "io/jinja/chat_template.h"

namespace {

constexpr nanovllm::ChatTemplateLimits kLimits = {.max_steps = 200'000,
                                                  .max_memory_bytes = size_t{8} << 20,
                                                  .max_output_bytes = size_t{1} << 20,
                                                  .max_depth = 600};

nanovllm::Json parse_variables(std::string_view text) {
  try {
    nanovllm::Json variables =
        nanovllm::parse_json(text, "variables", nanovllm::ErrorKind::invalid_argument);
    if (variables.is_object()) return variables;
  } catch (const nanovllm::Error&) {
  }
  return {
      {"messages",
       {{{"role", "user"}, {"content", "Grüße"}}, {{"role", "assistant"}, {"content", nullptr}}}},
      {"tools", nullptr},
      {"n", 3},
      {"x", 2.5},
      {"add_generation_prompt", true}};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nanovllm;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t split = std::min(input.find('\0'), input.size());
  const Json variables = parse_variables(split < input.size() ? input.substr(split + 1) : "");
  try {
    const ChatTemplate chat_template(std::string(input.substr(0, split)), "input",
                                     [] { return std::tm{}; });
    const std::string text = chat_template.render(variables, kLimits);
    if (text.size() > kLimits.max_output_bytes) std::abort();
    if (chat_template.render(variables, kLimits) != text) std::abort();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::engine) std::abort();
  }
  return 0;
}
