// Shared by the tests of the public API: models, requests, and ways to look at what comes back.
#pragma once

#include <cstring>
#include <map>

#include "devices.h"

namespace nanovllm {

inline const Target kCpu{"cpu", "f32", "CpuF32"};

inline std::string golden(const char* name) { return (goldens() / name).string(); }
inline std::string demo() { return std::string(NANOVLLM_SOURCE_DIR) + "/models/demo"; }

inline EngineConfig demo_config() {
  EngineConfig config = config_for(kCpu);
  config.dtype = "auto";
  config.skip_tokenizer_init = false;
  return config;
}

inline std::vector<int32_t> ids(int count, int first = 3) {
  std::vector<int32_t> list;
  for (int i = 0; i < count; ++i) list.push_back((first + 7 * i) % 250);
  return list;
}

inline SamplingParams greedy(int64_t max_tokens) {
  SamplingParams params;
  params.temperature = 0;
  params.max_tokens = max_tokens;
  return params;
}

/// Steps until nothing is left; every output in order, by request.
inline std::map<int64_t, std::vector<RequestOutput>> drain(LLM& llm) {
  std::map<int64_t, std::vector<RequestOutput>> outputs;
  while (!llm.is_finished())
    for (RequestOutput& output : llm.step()) {
      const int64_t id = output.request_id;
      outputs[id].push_back(std::move(output));
    }
  return outputs;
}

inline void expect_contains(const std::string& text, const std::vector<std::string>& fragments) {
  for (const std::string& fragment : fragments)
    EXPECT_NE(text.find(fragment), std::string::npos) << fragment << ": " << text;
}

template <class Body>
void expect_invalid(Body body, const std::vector<std::string>& fragments) {
  try {
    body();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument) << error.what();
    expect_contains(error.what(), fragments);
  }
}

inline bool same_bits(const std::vector<PositionLogprobs>& a,
                      const std::vector<PositionLogprobs>& b) {
  const auto same = [](const TokenLogprob& x, const TokenLogprob& y) {
    return x.token_id == y.token_id && x.rank == y.rank &&
           std::memcmp(&x.logprob, &y.logprob, sizeof(float)) == 0;
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [&](const PositionLogprobs& x, const PositionLogprobs& y) {
                      return std::equal(x.begin(), x.end(), y.begin(), y.end(), same);
                    });
}

}  // namespace nanovllm
