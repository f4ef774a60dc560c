// The exactness fuzz on the shapes of real models (fewer layers, a smaller vocabulary, random
// weights), where every kernel for few, some and many rows is at work: random requests run alone
// and eager first, then in company under random limits, arriving while others run, some aborted.
// Tokens, texts and log probabilities are compared bit for bit.
//
// One turn a shape takes seconds; NANOVLLM_FUZZ_SECONDS=N goes on for N seconds a shape with
// other requests each time, and NANOVLLM_FUZZ_SEED=S draws others from the start. What is printed
// says what the steps were made of.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <random>
#include <utility>

#include <fmt/ranges.h>
#include <unistd.h>

#include "llm_rig.h"

namespace nanovllm {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxModelLen = 2048, kVocabulary = 40'000, kRequests = 320, kRounds = 8;

struct Shape {
  const char* config;
  int layers, ranks;
  const char* changes;  // of config.json
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
  bool is_plain = false;  // a step of such requests alone may sample without writing logits
  RequestOutput alone;
};

/// How the requests of one engine come together.
struct Round {
  EngineConfig config;
  std::vector<size_t> requests;  // in the order of their arrival
  int most_arrivals;             // before a step
};

/// What a run was made of.
struct Tally {
  static constexpr std::array<size_t, 6> kRows{1, 8, 64, 128, 192, 256};
  std::array<int64_t, kRows.size()> steps{};  // with so many requests at most that got a token
  int64_t rounds = 0, requests = 0, tokens = 0, aborted = 0, preemptions = 0, hits = 0;
  double alone = 0, opening = 0, together = 0;  // seconds

  void add_step(size_t rows) {
    if (rows > 0)
      ++steps[static_cast<size_t>(std::lower_bound(kRows.begin(), kRows.end(), rows) -
                                  kRows.begin())];
  }
  void add(const RequestOutput& output) {
    ++requests;
    aborted += output.finish_reason == FinishReason::abort;
    tokens += std::ssize(output.token_ids);
  }
  void add(const EngineStats& stats) {
    ++rounds;
    preemptions += stats.preemptions;
    hits += stats.cached_prompt_tokens;
  }
  /// A fuzz that never preempts and never hits proves little.
  bool proves() const { return preemptions > 0 && hits > 0; }
  std::string text() const {
    return fmt::format(
        "{} rounds, {} requests, {} tokens, {} aborted, {} preemptions, {} tokens from the cache; "
        "steps of up to {} rows: {}; seconds: {:.1f} alone, {:.1f} opening, {:.1f} together",
        rounds, requests, tokens, aborted, preemptions, hits, fmt::join(kRows, ", "),
        fmt::join(steps, ", "), alone, opening, together);
  }
};

class Stopwatch {
 public:
  /// Seconds since this was made, or since the last call.
  double lap() {
    const auto now = std::chrono::steady_clock::now(), before = std::exchange(last_, now);
    return std::chrono::duration<double>(now - before).count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
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
    config.merge_patch(Json::parse(shape.changes));
    config["num_hidden_layers"] = shape.layers;
    config["vocab_size"] = kVocabulary;
    config["bos_token_id"] = 0;
    config["eos_token_id"] = 1;
    std::ofstream(directory_ / "config.json") << config.dump();
    for (const char* file : {"tokenizer.json", "tokenizer_config.json"})
      fs::copy_file(fs::path(demo()) / file, directory_ / file,
                    fs::copy_options::overwrite_existing);
    SKIP_WITHOUT(kTargets[3], directory_.string());
    if (shape.ranks > 1 && !has_gpu(shape.ranks - 1)) GTEST_SKIP() << "too few GPUs here";
    base_ = config_for(kTargets[3]);
    base_.skip_tokenizer_init = false;
    base_.load_format = "dummy";
    base_.max_model_len = kMaxModelLen;
    base_.tensor_parallel_size = shape.ranks;
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

  bool has_gpu(int index) const {
    try {
      inspect(directory_.string(), {.device = fmt::format("cuda:{}", index)});
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  std::vector<Request> draw_requests() {
    std::vector<int32_t> shared(1000);
    for (int32_t& id : shared) id = pick_token();
    std::vector<Request> requests(kRequests);
    for (Request& r : requests) {
      const int common = pick(0, 2) == 0 ? pick(1, 1000) : 0;
      const int own = pick_length(1, pick(0, 3) == 0 ? kMaxModelLen - 1 - common : 300);
      r.prompt.assign(shared.begin(), shared.begin() + common);
      for (int i = 0; i < own; ++i) r.prompt.push_back(pick_token());
      const int room = kMaxModelLen - static_cast<int>(r.prompt.size());
      r.params.max_tokens = std::min(room, pick_length(1, pick(0, 3) == 0 ? 300 : 60));
      r.params.ignore_eos = pick(0, 1) == 0;
      r.params.temperature = pick(0, 2) == 0 ? 0 : 0.1 * pick(3, 15);
      r.params.seed = pick(0, 1 << 30);
      if (pick(0, 3) == 0) r.params.stop = {"e", "the", "\xc3\xa9"};
      r.is_plain = pick(0, 2) != 0;
      if (!r.is_plain) draw_particulars(r.params);
    }
    return requests;
  }

  void draw_particulars(SamplingParams& params) {
    if (pick(0, 2) == 0) params.top_k = pick(1, 50);
    if (pick(0, 2) == 0) params.top_p = 0.05 * pick(2, 20);
    if (pick(0, 4) == 0) params.min_p = 0.02 * pick(0, 10);
    if (pick(0, 1) == 0) params.logprobs = pick(0, 5);
    if (pick(0, 7) == 0) params.prompt_logprobs = pick(0, 3);
    if (pick(0, 3) == 0)
      for (int i = 0; i < 128; ++i) params.stop_token_ids.push_back(pick_token());
    if (pick(0, 3) == 0) params.min_tokens = pick(0, static_cast<int>(params.max_tokens));
  }

  /// Some or all of the requests, perhaps of plain ones alone: as many as take a few seconds.
  Round draw_round(const std::vector<Request>& requests) {
    Round round{base_, {}, pick_from({1, 10, 40, kRequests})};
    EngineConfig& c = round.config;
    c.block_size = pick_from({16, 32, 64, 128});
    c.max_num_seqs = pick_from({1, 3, 8, 20, 70, 130, 200, 256});
    c.max_num_batched_tokens = pick_from({64, 256, 1000, 4096, 16384});
    c.enable_prefix_caching = pick(0, 3) != 0;
    c.enforce_eager = pick(0, 3) == 0;
    c.decode_lanes = pick_from({0, 0, 1, 2});
    if (pick(0, 1) == 0) {  // room for few at their longest: they preempt each other
      c.max_num_seqs = std::max<int64_t>(c.max_num_seqs, 20);
      c.num_gpu_blocks_override =
          pick_from({1, 1, 3, 8}) * kMaxModelLen / c.block_size + pick(1, 10);
    }
    const bool plain = pick(0, 1) == 0;
    for (size_t i = 0; i < requests.size(); ++i)
      if (!plain || requests[i].is_plain) round.requests.push_back(i);
    std::shuffle(round.requests.begin(), round.requests.end(), random_);
    const auto most = static_cast<size_t>(24 + 3 * c.max_num_seqs);
    if (round.requests.size() > most) round.requests.resize(most);
    return round;
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

  /// Requests arrive over the first steps; one in eight is aborted on the way. The outputs of those
  /// that the round has are in their places.
  std::vector<RequestOutput> run_together(LLM& llm, const std::vector<Request>& requests,
                                          const Round& round) {
    std::vector<RequestOutput> outputs(requests.size());
    std::map<int64_t, size_t> request_of;
    size_t added = 0;
    while (added < round.requests.size() || !llm.is_finished()) {
      for (int n = pick(0, round.most_arrivals); n > 0 && added < round.requests.size(); --n) {
        const Request& next = requests[round.requests[added]];
        request_of[llm.add_request(next.prompt, next.params)] = round.requests[added++];
      }
      auto reports = llm.step();
      tally_.add_step(reports.size());
      for (RequestOutput& out : reports) {
        if (!out.finished && pick(0, 300) == 0) llm.abort_request(out.request_id);
        if (out.finished) outputs[request_of.at(out.request_id)] = std::move(out);
      }
    }
    return outputs;
  }

  fs::path directory_;
  EngineConfig base_;
  Tally tally_;
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

std::string describe(const Round& round) {
  const EngineConfig& c = round.config;
  return fmt::format(
      "{} requests, at most {} at a time; block_size {} max_num_seqs {} max_num_batched_tokens {} "
      "blocks {} decode_lanes {}{}{}",
      round.requests.size(), round.most_arrivals, c.block_size, c.max_num_seqs,
      c.max_num_batched_tokens, c.num_gpu_blocks_override, c.decode_lanes,
      c.enforce_eager ? " eager" : "", c.enable_prefix_caching ? "" : " without prefix caching");
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
  ASSERT_EQ(alone.stop_reason, together.stop_reason);
  ASSERT_EQ(alone.text, together.text);
  expect_same(alone.prompt_logprobs, together.prompt_logprobs, alone.prompt_logprobs.size());
}

TEST_P(LoadFuzz, ARequestGivesTheSameBytesAloneAndAtAnyLoad) {
  const auto begin = std::chrono::steady_clock::now();
  const std::chrono::seconds limit(setting("NANOVLLM_FUZZ_SECONDS", 0));
  const auto is_over = [&] { return std::chrono::steady_clock::now() - begin >= limit; };
  const bool breaks_off = limit.count() > 0;
  Stopwatch watch;
  do {
    auto requests = draw_requests();
    run_alone(requests);
    tally_.alone += watch.lap();
    for (int i = 0; i < kRounds && !(i > 0 && breaks_off && is_over()); ++i) {
      const Round round = draw_round(requests);
      SCOPED_TRACE(testing::Message() << "round " << tally_.rounds << ": " << describe(round));
      LLM llm(directory_.string(), round.config);
      tally_.opening += watch.lap();
      const auto outputs = run_together(llm, requests, round);
      tally_.together += watch.lap();
      tally_.add(llm.stats());
      for (const size_t r : round.requests) {
        SCOPED_TRACE(testing::Message()
                     << "request " << r << ", prompt of " << requests[r].prompt.size());
        expect_same(requests[r].alone, outputs[r]);
        if (HasFatalFailure()) return;
        tally_.add(outputs[r]);
      }
    }
  } while (!is_over() || (!tally_.proves() && tally_.rounds < 40));
  fmt::print("  {}: {}\n", GetParam().name, tally_.text());
  EXPECT_TRUE(tally_.proves());
}

constexpr const char *kAsItIs = "{}", *kMistral = R"({"architectures": ["MistralForCausalLM"],
                         "model_type": "mistral", "sliding_window": 500})",
                     *kQwen2 = R"({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
                         "head_dim": 64})";

INSTANTIATE_TEST_SUITE_P(
    Cuda, LoadFuzz,
    testing::Values(Shape{"qwen3-0.6b", 4, 1, kAsItIs, "qwen3_0_6b"},
                    Shape{"qwen3-8b", 2, 1, kAsItIs, "qwen3_8b"},
                    Shape{"qwen3-30b-a3b", 2, 1, kAsItIs, "qwen3_30b_a3b"},
                    Shape{"qwen3-32b", 1, 1, kAsItIs, "qwen3_32b"},  // rows wider than 4,096
                    Shape{"qwen3-1.7b", 3, 1, kMistral, "mistral_window"},
                    Shape{"qwen3-0.6b", 4, 1, kQwen2, "qwen2_heads_of_64"},
                    Shape{"qwen3-0.6b", 4, 2, kAsItIs, "qwen3_0_6b_2_ranks"},
                    Shape{"qwen3-30b-a3b", 2, 2, kAsItIs, "qwen3_30b_a3b_2_ranks"}),
    [](const auto& parameter) { return std::string(parameter.param.name); });

}  // namespace
}  // namespace nanovllm
