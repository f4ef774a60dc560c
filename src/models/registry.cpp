#include <fmt/ranges.h>

#include "models/model.h"
#include "models/qwen3.h"

namespace nanovllm {

// A new model is one file and one line here.
const std::vector<Architecture>& architectures() {
  static const std::vector<Architecture> table = {
      {"Qwen3ForCausalLM", make_qwen3},
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
