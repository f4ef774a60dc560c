#include <fmt/ranges.h>

#include "models/llama.h"
#include "models/mistral.h"
#include "models/model.h"
#include "models/qwen2.h"
#include "models/qwen3.h"
#include "models/qwen3_moe.h"

namespace nanovllm {

// A new model is one file and one line here.
const std::vector<Architecture>& architectures() {
  static const std::vector<Architecture> table = {
      {"Qwen3ForCausalLM", make_qwen3},     {"Qwen3MoeForCausalLM", make_qwen3_moe},
      {"Qwen2ForCausalLM", make_qwen2},     {"LlamaForCausalLM", make_llama},
      {"MistralForCausalLM", make_mistral},
  };
  return table;
}

const Architecture& find_architecture(const ModelConfig& config) {
  std::vector<std::string> known;
  for (const Architecture& entry : architectures()) {
    if (config.architecture == entry.name) return entry;
    known.emplace_back(entry.name);
  }
  fail(ErrorKind::model, "config.json: architecture {} is not supported; supported: {}",
       config.architecture, fmt::join(known, ", "));
}

}  // namespace nanovllm
