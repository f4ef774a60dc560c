// The devices and dtypes that a model test runs on. A GPU that is not there is a skipped test,
// never a passed one.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "nanovllm/llm.h"

#include "io/json.h"

namespace nanovllm {

struct Target {
  const char* device;
  const char* dtype;
  const char* name;
};
inline void PrintTo(const Target& target, std::ostream* out) { *out << target.name; }

inline const Target kTargets[] = {{"cpu", "f32", "CpuF32"},
                                  {"cpu", "bf16", "CpuBf16"},
                                  {"cuda", "f32", "CudaF32"},
                                  {"cuda", "bf16", "CudaBf16"}};

inline std::filesystem::path goldens() {
  return std::filesystem::path(NANOVLLM_SOURCE_DIR) / "tests/data/goldens";
}

/// `inspect` opens the device and allocates nothing: the cheapest way to ask whether it is there. A
/// GPU has no attention for the narrow heads of some models.
inline bool is_available(const Target& target, const std::string& model) {
  if (std::string(target.device) == "cuda" &&
      read_json_file(model + "/config.json").value("head_dim", 64) < 64)
    return false;
  try {
    inspect(model, {.device = target.device});
    return true;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::device && std::string(target.device) == "cuda") return false;
    throw;
  }
}

inline EngineConfig config_for(const Target& target) {
  EngineConfig config;
  config.device = target.device;
  config.dtype = target.dtype;
  config.skip_tokenizer_init = true;
  config.gpu_memory_utilization = 0.2;  // several engines share the device
  config.cpu_kvcache_bytes = 64 << 20;
  return config;
}

/// Whether the engine quantises activations, as it says when it starts.
inline bool quantises_rows(const EngineInfo& info) {
  return std::any_of(info.notes.begin(), info.notes.end(), [](const std::string& note) {
    return note.starts_with("activations are quantised, for ");
  });
}

/// "qwen3_tied_gqa_CpuF32"
inline std::string case_name(
    const testing::TestParamInfo<std::tuple<std::string, Target>>& parameter) {
  std::string name = std::get<0>(parameter.param) + "_" + std::get<1>(parameter.param).name;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

}  // namespace nanovllm

#define SKIP_WITHOUT(target, model) \
  if (!is_available(target, model)) GTEST_SKIP() << "no " << (target).device << " device here"
