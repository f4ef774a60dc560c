// The exactness fuzz on the shapes of real models (fewer layers, a smaller vocabulary, random
// weights), where every kernel for few, some and many rows is at work: random requests run alone
// and eager first, then in company under random limits, arriving while others run, some aborted.
// Tokens and log probabilities are compared bit for bit.
//
// One round a shape takes seconds; NANOVLLM_FUZZ_SECONDS=N goes on for N seconds a shape with
// other requests each time, and NANOVLLM_FUZZ_SEED=S draws others from the start.
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <random>

#include <unistd.h>

#include "devices.h"

namespace nanovllm {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxModelLen = 2048, kVocabulary = 40'000;

struct Shape {
  const char* config;
  int layers;
  const char* name;
};
void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

int64_t setting(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoll(value) : otherwise;
}

struct Request {
  std::vector<int32_t> prompt;
  SamplingParams params;
  RequestOutput alone;
};

class LoadFuzz : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    const Shape shape = GetParam();
    directory_ = fs::temp_directory_path() /
                 ("nanovllm_load_fuzz_" + std::to_string(::getpid()) + "_" + shape.name);
    fs::create_directories(directory_);
    const fs::path source = fs::path(NANOVLLM_SOURCE_DIR) / "bench/configs" / shape.config;
    Json config = read_json_file((source / "config.json").string());
    config["num_hidden_layers"] = shape.layers;
    config["vocab_size"] = kVocabulary;
    config["bos_token_id"] = 0;
    config["eos_token_id"] = 1;
    std::ofstream(directory_ / "config.json") << config.dump();
    SKIP_WITHOUT(kTargets[3], directory_.string());
    base_ = config_for(kTargets[3]);
    base_.load_format = "dummy";
    base_.max_model_len = kMaxModelLen;
  }
  void TearDown() override { fs::remove_all(directory_); }

  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  int pick_from(std::initializer_list<int> values) {
    return values.begin()[pick(0, static_cast<int>(values.size()) - 1)];
  }
  /// Every order of magnitude as likely as every other.
  int pick_length(int low, int high) {
    const double exponent =
        std::uniform_real_distribution<>(std::log(low), std::log(high))(random_);
    return static_cast<int>(std::lround(std::exp(exponent)));
  }
  int pick_token() { return pick(0, kVocabulary - 1); }

  std::vector<Request> draw_requests(int count) {
    std::vector<int32_t> shared(1000);
    for (int32_t& id : shared) id = pick_token();
    std::vector<Request> requests(static_cast<size_t>(count));
    for (Request& r : requests) {
      const int common = pick(0, 2) == 0 ? pick(1, 1000) : 0;
      const int own = pick_length(1, pick(0, 3) == 0 ? kMaxModelLen - 1 - common : 300);
      r.prompt.assign(shared.begin(), shared.begin() + common);
      for (int i = 0; i < own; ++i) r.prompt.push_back(pick_token());
      const int room = kMaxModelLen - static_cast<int>(r.prompt.size());
      r.params.max_tokens = std::min(room, pick_length(1, 400));
      r.params.ignore_eos = pick(0, 1) == 0;
      r.params.temperature = pick(0, 2) == 0 ? 0 : 0.1 * pick(3, 15);
      r.params.seed = pick(0, 1 << 30);
      if (pick(0, 2) == 0) r.params.top_k = pick(1, 50);
      if (pick(0, 2) == 0) r.params.top_p = 0.05 * pick(2, 20);
      if (pick(0, 1) == 0) r.params.logprobs = pick(0, 5);
      if (pick(0, 7) == 0) r.params.prompt_logprobs = pick(0, 3);
    }
    return requests;
  }

  EngineConfig draw_config() {
    EngineConfig c = base_;
    c.block_size = pick_from({16, 32, 64, 128});
    c.max_num_seqs = pick_from({1, 3, 8, 20, 70, 130, 256});
    c.max_num_batched_tokens = pick_from({64, 256, 1000, 4096, 16384});
    c.enable_prefix_caching = pick(0, 3) != 0;
    c.enforce_eager = pick(0, 3) == 0;
    if (pick(0, 2) != 0) {  // little more than one request needs: the others preempt each other
      c.num_gpu_blocks_override = kMaxModelLen / c.block_size + pick(1, 10);
      c.max_num_seqs = std::max<int64_t>(c.max_num_seqs, 20);
    }
    return c;
  }

  void run_alone(std::vector<Request>& requests) {
    EngineConfig eager = base_;
    eager.enforce_eager = true;
    LLM llm(directory_.string(), eager);
    for (Request& r : requests) {
      r.alone = llm.generate({r.prompt}, r.params).front();
      llm.reset_prefix_cache();
    }
  }

  /// Requests arrive over the first steps; one in eight is aborted on the way.
  std::vector<RequestOutput> run_together(LLM& llm, const std::vector<Request>& requests) {
    std::vector<size_t> order(requests.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    std::vector<RequestOutput> outputs(requests.size());
    std::map<int64_t, size_t> request_of;
    size_t added = 0;
    while (added < order.size() || !llm.is_finished()) {
      for (int n = pick(0, 40); n > 0 && added < order.size(); --n, ++added)
        request_of[llm.add_request(requests[order[added]].prompt, requests[order[added]].params)] =
            order[added];
      for (RequestOutput& out : llm.step()) {
        if (!out.finished && pick(0, 300) == 0) llm.abort_request(out.request_id);
        if (out.finished) outputs[request_of.at(out.request_id)] = std::move(out);
      }
    }
    return outputs;
  }

  fs::path directory_;
  EngineConfig base_;
  std::mt19937 random_{static_cast<unsigned>(setting("NANOVLLM_FUZZ_SEED", 20261122))};
};

void expect_same(const std::vector<PositionLogprobs>& alone,
                 const std::vector<PositionLogprobs>& together, size_t count) {
  ASSERT_GE(alone.size(), count);
  ASSERT_GE(together.size(), count);
  for (size_t i = 0; i < count; ++i) {
    ASSERT_EQ(alone[i].size(), together[i].size()) << i;
    for (size_t j = 0; j < alone[i].size(); ++j) {
      ASSERT_EQ(alone[i][j].token_id, together[i][j].token_id) << i;
      ASSERT_EQ(std::memcmp(&alone[i][j].logprob, &together[i][j].logprob, sizeof(float)), 0)
          << i << ": " << alone[i][j].logprob << " and " << together[i][j].logprob;
      ASSERT_EQ(alone[i][j].rank, together[i][j].rank) << i;
    }
  }
}

/// What an aborted request got until then is the beginning of what it gets alone.
void expect_same(const RequestOutput& alone, const RequestOutput& together) {
  const size_t count = together.token_ids.size();
  ASSERT_LE(count, alone.token_ids.size());
  ASSERT_TRUE(
      std::equal(together.token_ids.begin(), together.token_ids.end(), alone.token_ids.begin()));
  if (!alone.logprobs.empty()) expect_same(alone.logprobs, together.logprobs, count);
  if (together.finish_reason == FinishReason::abort) return;
  ASSERT_EQ(count, alone.token_ids.size());
  ASSERT_EQ(alone.finish_reason, together.finish_reason) << together.error;
  expect_same(alone.prompt_logprobs, together.prompt_logprobs, alone.prompt_logprobs.size());
}

TEST_P(LoadFuzz, ARequestGivesTheSameBytesAloneAndAtAnyLoad) {
  const auto begin = std::chrono::steady_clock::now();
  const std::chrono::seconds limit(setting("NANOVLLM_FUZZ_SECONDS", 0));
  int64_t preemptions = 0, hits = 0, tokens = 0, aborted = 0;
  int rounds = 0;
  bool proven = false;
  do {
    auto requests = draw_requests(160);
    run_alone(requests);
    for (int i = 0; i < 4; ++i, ++rounds) {
      const EngineConfig config = draw_config();
      SCOPED_TRACE(testing::Message()
                   << "round " << rounds << ": block_size " << config.block_size << " max_num_seqs "
                   << config.max_num_seqs << " max_num_batched_tokens "
                   << config.max_num_batched_tokens << " blocks " << config.num_gpu_blocks_override
                   << (config.enforce_eager ? " eager" : ""));
      LLM llm(directory_.string(), config);
      const auto together = run_together(llm, requests);
      for (size_t r = 0; r < requests.size(); ++r) {
        SCOPED_TRACE(testing::Message()
                     << "request " << r << ", prompt of " << requests[r].prompt.size());
        expect_same(requests[r].alone, together[r]);
        if (HasFatalFailure()) return;
        aborted += together[r].finish_reason == FinishReason::abort;
        tokens += std::ssize(together[r].token_ids);
      }
      preemptions += llm.stats().preemptions;
      hits += llm.stats().cached_prompt_tokens;
    }
    proven =
        preemptions > 0 && hits > 0;  // a fuzz that never preempts and never hits proves little
  } while (std::chrono::steady_clock::now() - begin < limit || (!proven && rounds < 40));
  std::printf("  %s: %d rounds of 160 requests, %ld tokens, %ld aborted, %ld preemptions\n",
              GetParam().name, rounds, static_cast<long>(tokens), static_cast<long>(aborted),
              static_cast<long>(preemptions));
  EXPECT_TRUE(proven) << preemptions << " preemptions, " << hits << " tokens from the cache";
}

INSTANTIATE_TEST_SUITE_P(Cuda, LoadFuzz,
                         testing::Values(Shape{"qwen3-0.6b", 4, "qwen3_0_6b"},
                                         Shape{"qwen3-8b", 2, "qwen3_8b"},
                                         Shape{"qwen3-30b-a3b", 2, "qwen3_30b_a3b"}),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

}  // namespace
}  // namespace nanovllm
