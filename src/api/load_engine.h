// From a model directory to a running engine: reads the files, opens the device, plans the memory,
// loads the weights.
#pragma once

#include <memory>
#include <string>

#include "engine/llm_engine.h"
#include "io/generation_config.h"
#include "io/model_config.h"
#include "ranks/load_runner.h"

namespace nanovllm {

/// An engine, and what was read for it.
struct LoadedEngine {
  ModelConfig model;
  GenerationConfig generation;
  std::shared_ptr<const Tokenizer> tokenizer;  // null with skip_tokenizer_init
  std::vector<int32_t> eos;                    // the model's end-of-sequence ids
  std::unique_ptr<LLMEngine> engine;
  EngineInfo info;
};

/// Throws Error: invalid_argument (an option), model (a file of the directory) or device.
LoadedEngine load_engine(const std::string& directory, const EngineConfig& config,
                         const BackendDecorator& decorate = {});

/// The same plan from config.json alone; nothing is allocated or loaded.
EngineInfo plan_engine(const std::string& directory, const EngineConfig& config);

}  // namespace nanovllm
