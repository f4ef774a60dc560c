// Model: what an architecture gives the engine, and the table of architectures.
#pragma once

#include <memory>
#include <vector>

#include "io/model_config.h"
#include "layers/embed_head.h"
#include "layers/step.h"
#include "weights/weight_loader.h"

namespace nanovllm {

/// One rank's share of a model: views of weights and the way they are applied. Immutable once
/// built.
class Model {
 public:
  virtual ~Model() = default;
  /// The hidden states after the final norm, in step.arena.
  virtual HiddenStates forward(const Step& step) const = 0;
  virtual const ParallelLMHead& lm_head() const = 0;
};

/// Arguments of a model's constructor beside its configuration.
struct ModelContext {
  WeightLoader& load;
  Tensor cos_sin;  // RotaryEmbedding's table
};

/// An architecture: its name in config.json, its model's maker, its config.json's defaults.
struct Architecture {
  const char* name;  // config.json, architectures[0]
  std::unique_ptr<Model> (*make)(const ModelConfig& config, const ModelContext& context);
  ConfigDefaults config;
};

/// Every architecture that can run, in one visible table (models/registry.cpp).
const std::vector<Architecture>& architectures();
/// The table's entry of this name. Throws Error(model) with the name and the names that are known.
const Architecture& find_architecture(const std::string& name);
/// Its `config`, for load_model_config().
ConfigDefaults config_defaults(const std::string& architecture);

}  // namespace nanovllm
