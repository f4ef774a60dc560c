// The exactness fuzz: random requests run alone and eager first, then in company under random
// limits, arriving while others run, some aborted. Tokens, texts and log probabilities are compared
// bit for bit. On GPUs with the shapes of real models (fewer layers, a smaller vocabulary, random
// weights), where every kernel for few, some and many rows is at work; on the CPU with a small one.
//
// One draw of requests a shape takes seconds; NANOVLLM_FUZZ_SECONDS=N goes on for N seconds a shape
// with other requests each time, and NANOVLLM_FUZZ_SEED=S draws others from the start. A line after
// each draw says what the steps were made of so far.
#include <array>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <random>
#include <set>

#include <nlohmann/json.hpp>
#include <unistd.h>

#include "grammar_llm.h"
#include "llm_rig.h"
#include "load_shapes.h"
#include "load_tally.h"
#include "random_structure.h"
#include "same_output.h"

namespace nanovllm {
namespace {

namespace fs = std::filesystem;

int64_t setting(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoll(value) : otherwise;
}

/// How much a request asks of a step's sampling. Plain ones alone may be sampled without writing
/// logits; log probabilities and masks keep a step from being recorded.
enum class Sampling { plain, filtered, any };

struct Request {
  std::vector<int32_t> prompt;
  SamplingParams params;
  Sampling sampling = Sampling::plain;
  RequestOutput alone;
};

/// How the requests of one engine come together.
struct Round {
  EngineConfig config;
  std::vector<size_t> requests;  // in the order of their arrival; some may come several times
  int most_arrivals;             // before a step
};

class LoadFuzz : public testing::TestWithParam<Shape> {
 protected:
  void SetUp() override {
    const Shape& shape = GetParam();
    directory_ = fs::temp_directory_path() /
                 ("nanovllm_load_fuzz_" + std::to_string(::getpid()) + "_" + shape.name);
    fs::create_directories(directory_);
    const fs::path source = fs::path(NANOVLLM_SOURCE_DIR) / "bench/configs" / shape.config;
    Json config = read_json_file((source / "config.json").string());
    config["vocab_size"] = 40'000;
    config["bos_token_id"] = 0;
    config["eos_token_id"] = 1;
    config.merge_patch(Json::parse(shape.changes));
    vocabulary_ = config["vocab_size"].get<int>();
    has_micro_batches_ = shape.ranks == 1 && !config.contains("num_experts");
    std::ofstream(directory_ / "config.json") << config.dump();
    for (const char* file : {"tokenizer.json", "tokenizer_config.json"})
      fs::copy_file(fs::path(demo()) / file, directory_ / file,
                    fs::copy_options::overwrite_existing);
    SKIP_WITHOUT(shape.target, directory_.string());
    base_ = config_for(shape.target);
    base_.skip_tokenizer_init = false;
    base_.load_format = "dummy";
    base_.tensor_parallel_size = shape.ranks;
    base_.kv_cache_dtype = shape.kv_cache_dtype;
    base_.quantization = shape.quantization;
    if (on_gpu() && !has_gpu(shape.ranks - 1)) GTEST_SKIP() << "too few GPUs here";
  }
  void TearDown() override { fs::remove_all(directory_); }

  int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  int pick_from(std::initializer_list<int> values) {
    return values.begin()[pick(0, static_cast<int>(values.size()) - 1)];
  }
  /// Every order of magnitude as likely as every other.
  int pick_length(int low, int high) {
    const double exponent =
        std::uniform_real_distribution<>(std::log(low), std::log(std::max(low, high)))(random_);
    return static_cast<int>(std::lround(std::exp(exponent)));
  }
  int pick_token() { return pick(0, vocabulary_ - 1); }
  int max_model_len() const { return static_cast<int>(base_.max_model_len); }

  bool on_gpu() const { return std::string(GetParam().target.device) == "cuda"; }
  bool has_gpu(int index) const {
    try {
      inspect(directory_.string(), {.device = fmt::format("cuda:{}", index)});
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  /// Some prompts begin as others do; some as a conversation so far, an earlier prompt and its
  /// answer; some with a pattern, whose blocks are equal but for what precedes them.
  std::vector<int32_t> draw_prompt(const std::vector<int32_t>& shared,
                                   const std::vector<Request>& earlier) {
    std::vector<int32_t> prompt;
    const int most = max_model_len() - 1;
    const int beginning = pick(0, 5);
    if (beginning < 2) {
      prompt.assign(shared.begin(), shared.begin() + pick(1, static_cast<int>(shared.size())));
    } else if (beginning == 2 && !earlier.empty()) {
      const int which = pick(0, static_cast<int>(earlier.size()) - 1);
      const Request& r = earlier[static_cast<size_t>(which)];
      prompt = r.prompt;
      prompt.insert(prompt.end(), r.alone.outputs[0].token_ids.begin(),
                    r.alone.outputs[0].token_ids.end());
      if (std::ssize(prompt) >= most) prompt.clear();
    } else if (beginning == 3) {
      const int period = pick_from({1, 8, 32});
      for (int n = pick_length(1, most / 2); n > 0; --n)
        prompt.push_back(shared[prompt.size() % static_cast<size_t>(period)]);
    }
    const int room = most - static_cast<int>(prompt.size());
    const int usual = std::min(room, long_answers_ ? 40 : 300);
    for (int own = pick_length(1, pick(0, 3) == 0 && !long_answers_ ? room : usual); own > 0; --own)
      prompt.push_back(pick_token());
    return prompt;
  }

  /// Log probabilities show every difference; but steps that have none need the fuzz more on a GPU,
  /// where they are recorded and have kernels of their own.
  Sampling draw_kind() {
    using enum Sampling;
    return std::array{plain, plain, filtered, any, any, any}[static_cast<size_t>(
        on_gpu() ? pick(0, 3) : pick(1, 5))];
  }

  void draw_sampling(Request& r) {
    SamplingParams& p = r.params;
    const int room = max_model_len() - static_cast<int>(r.prompt.size());
    const int longest = on_gpu() ? 400 : 80, most = pick(0, 3) == 0 ? 300 : 60;
    p.max_tokens =
        std::min(room, long_answers_ ? pick_length(longest / 10, longest) : pick_length(1, most));
    p.ignore_eos = pick(0, 1) == 0;
    p.temperature = pick(0, 2) == 0 ? 0 : 0.02 * pick_length(1, 75);
    p.seed = pick(0, 1 << 30);
    if (pick(0, 7) == 0) p.n = pick(2, 4);
    if (pick(0, 3) == 0) p.stop = {"e", "the", "\xc3\xa9"};
    r.sampling = draw_kind();
    if (r.sampling == Sampling::plain) return;
    if (pick(0, 2) == 0) p.top_k = pick(1, 50);
    if (pick(0, 2) == 0) p.top_p = 0.05 * pick(2, 20);
    if (pick(0, 4) == 0) p.min_p = 0.02 * pick(0, 10);
    if (pick(0, 2) == 0)
      p.structured_outputs = random_structure([&](int low, int high) { return pick(low, high); });
    if (r.sampling == Sampling::filtered) return;
    if (pick(0, 3) != 0) p.logprobs = pick(0, 5);
    if (pick(0, 5) == 0) p.prompt_logprobs = pick(0, 3);
    if (pick(0, 3) == 0)
      for (int i = 0; i < 128; ++i) p.stop_token_ids.push_back(pick_token());
    if (pick(0, 3) == 0) p.min_tokens = pick(0, static_cast<int>(p.max_tokens));
    if (pick(0, 3) == 0) p.repetition_penalty = 0.1 * pick(5, 30);
    if (pick(0, 3) == 0) p.frequency_penalty = 0.1 * pick(-20, 20);
    if (pick(0, 3) == 0) p.presence_penalty = 0.1 * pick(-20, 20);
    if (p.structured_outputs.empty() && pick(0, 5) == 0)
      for (int i = pick_length(1, 5000); i > 0; --i) p.allowed_token_ids.push_back(pick_token());
    if (pick(0, 4) == 0) p.bad_words = {"e", "in", "ing the", "xyzzy"};
    if (pick(0, 3) == 0)
      for (int i = pick_length(1, 1024); i > 0; --i) p.logit_bias[pick_token()] = pick(-100, 100);
  }

  /// Each runs alone as soon as it is drawn. In every second draw answers are long beside their
  /// prompts: then many decode at once, and outgrow small caches.
  std::vector<Request> draw_requests() {
    long_answers_ = !long_answers_;
    base_.max_model_len = !on_gpu() ? 200 : long_answers_ ? 500 : pick_from({500, 2048, 8192});
    std::vector<int32_t> shared(static_cast<size_t>(max_model_len() / 2));
    for (int32_t& id : shared) id = pick_token();
    EngineConfig eager = base_;
    eager.enforce_eager = true;
    GrammarLLM llm(directory_.string(), eager);
    std::vector<Request> requests;
    for (int n = on_gpu() && !long_answers_ ? 160 : 40; n > 0; --n) {
      Request r;
      r.prompt = draw_prompt(shared, requests);
      draw_sampling(r);
      r.alone = run_alone(llm, r.prompt, r.params);
      llm.expect_allowed(r.params, r.alone);
      tally_.tools += !r.params.structured_outputs.structural_tag.empty();
      tally_.failed += r.alone.outputs[0].finish_reason == FinishReason::error;
      requests.push_back(std::move(r));
    }
    return requests;
  }

  EngineConfig draw_config() {
    EngineConfig c = base_;
    c.block_size = 8 << pick(0, on_gpu() ? 5 : 2);
    c.max_num_seqs = on_gpu() ? pick_from({1, 3, 8, 20, 70, 130, 200, 256, 320}) : pick(1, 12);
    // Numbers below 64 take a step for every few tokens; 100, 129 and 300 lie between two sizes
    // that steps are padded to.
    c.max_num_batched_tokens = on_gpu()
                                   ? pick_from({64, 100, 129, 200, 256, 300, 1000, 4096, 16384})
                                   : pick_from({1, 2, 3, 7, 64, 100, 129, 1000, 16384});
    c.enable_prefix_caching = pick(0, 3) != 0;
    c.enforce_eager = pick(0, 3) == 0;
    c.decode_micro_batches = pick_from({0, 0, 1, 2});
    c.num_threads = on_gpu() ? 0 : pick(1, 2);
    return c;
  }

  /// As many requests as take a few seconds, perhaps of one kind. In half of the rounds the cache
  /// has room for few at their longest: they preempt each other.
  Round draw_round(const std::vector<Request>& requests) {
    Round round{draw_config(), {}, pick_from({1, 10, 40, 320})};
    EngineConfig& c = round.config;
    int64_t count = 24 + 3 * c.max_num_seqs;
    if (pick(0, 1) == 0) {
      const int longest = pick_from({1, 2, 4, 8});
      c.max_num_seqs = std::max<int64_t>(c.max_num_seqs, 20);
      c.num_gpu_blocks_override = longest * max_model_len() / c.block_size + pick(1, 4);
      count = 40 * longest;
    }
    count = std::min<int64_t>(count, on_gpu() ? 320 : 40);
    const Sampling sampling = draw_kind();
    for (size_t i = 0; i < requests.size(); ++i)
      if (requests[i].sampling <= sampling) round.requests.push_back(i);
    std::shuffle(round.requests.begin(), round.requests.end(), random_);
    for (size_t i = 0; std::ssize(round.requests) < count; ++i)
      round.requests.push_back(round.requests[i]);
    round.requests.resize(static_cast<size_t>(count));
    return round;
  }

  /// Requests arrive over the first steps; some are aborted at once, some on the way. The outputs
  /// are in the order of arrival.
  std::vector<RequestOutput> run_together(GrammarLLM& llm, const std::vector<Request>& requests,
                                          const Round& round) {
    std::vector<RequestOutput> outputs(round.requests.size());
    std::map<int64_t, size_t> arrival_of;
    std::set<int64_t> aborted;
    const auto perhaps_abort = [&](int64_t id, int one_in) {
      if (pick(1, one_in) > 1) return;
      llm.abort_request(id);
      aborted.insert(id);
    };
    size_t added = 0;
    while (added < outputs.size() || !llm.is_finished()) {
      for (int n = pick(0, round.most_arrivals); n > 0 && added < outputs.size(); --n) {
        const Request& next = requests[round.requests[added]];
        const int64_t id = llm.add_request(next.prompt, next.params);
        arrival_of[id] = added++;
        perhaps_abort(id, 60);
      }
      StepTokens step{.micro_batches =
                          has_micro_batches_ && round.config.decode_micro_batches == 2};
      for (RequestOutput& out : llm.step()) {
        const size_t arrival = arrival_of.at(out.request_id);
        add_to(step, requests[round.requests[arrival]].params, out);
        if (!out.finished) {
          perhaps_abort(out.request_id, 600);
          continue;
        }
        // A request may fail before it is aborted. Of several answers the last may have ended in a
        // step whose report had another's end as news: its own end is told a step later.
        const bool was_asked = aborted.count(out.request_id) > 0;
        if (out.outputs[0].finish_reason != FinishReason::error) {
          EXPECT_TRUE(was_asked || !was_aborted(out));
          EXPECT_TRUE(!was_asked || was_aborted(out) || out.outputs.size() > 1);
        }
        outputs[arrival] = std::move(out);
      }
      tally_.add(step);
    }
    return outputs;
  }

  static void add_to(StepTokens& step, const SamplingParams& params, const RequestOutput& out) {
    if (was_aborted(out)) return;
    ++(out.outputs[0].token_ids.size() == 1 ? step.first : step.later);
    step.logprobs |= params.logprobs.has_value();
    step.filters |= params.top_k > 0 || params.top_p < 1 || params.min_p > 0;
    step.masks |= std::ssize(out.outputs[0].token_ids) <= params.min_tokens;
    step.grammars |= !params.structured_outputs.empty();
  }

  /// False if something differed.
  bool run_round(const std::vector<Request>& requests, const Round& round);

  fs::path directory_;
  EngineConfig base_;
  int vocabulary_ = 0;
  bool has_micro_batches_ = false, long_answers_ = false;
  Tally tally_;
  Stopwatch watch_;
  const int64_t seed_ = setting("NANOVLLM_FUZZ_SEED", 20261122);
  std::mt19937 random_{static_cast<unsigned>(seed_)};
};

std::string describe(const Request& r) {
  const SamplingParams& p = r.params;
  return fmt::format(
      "prompt of {} tokens, answer of {} alone; temperature {} top_k {} top_p {} min_p {} "
      "logprobs {} prompt_logprobs {} min_tokens {} n {} grammar {}{} behind {}",
      r.prompt.size(), r.alone.outputs[0].token_ids.size(), p.temperature, p.top_k, p.top_p,
      p.min_p, p.logprobs.value_or(-1), p.prompt_logprobs.value_or(-1), p.min_tokens, p.n,
      p.structured_outputs.grammar, p.structured_outputs.structural_tag,
      p.structured_outputs.thinking_token_budget);
}

std::string describe(const Round& round) {
  const EngineConfig& c = round.config;
  return fmt::format(
      "{} requests, at most {} at a time; block_size {} max_num_seqs {} max_num_batched_tokens {} "
      "blocks {} decode_micro_batches {}{}{}",
      round.requests.size(), round.most_arrivals, c.block_size, c.max_num_seqs,
      c.max_num_batched_tokens, c.num_gpu_blocks_override, c.decode_micro_batches,
      c.enforce_eager ? " eager" : "", c.enable_prefix_caching ? "" : " without prefix caching");
}

bool LoadFuzz::run_round(const std::vector<Request>& requests, const Round& round) {
  GrammarLLM llm(directory_.string(), round.config);
  tally_.opening += watch_.lap();
  const auto outputs = run_together(llm, requests, round);
  tally_.together += watch_.lap();
  for (int in_flight = 0; in_flight < 2; ++in_flight) llm.step();  // rows computed in vain
  tally_.add(llm.stats());
  EXPECT_EQ(llm.stats().free_blocks, llm.info().num_blocks);
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Request& request = requests[round.requests[i]];
    SCOPED_TRACE(testing::Message() << "arrival " << i << ", " << describe(request));
    if (was_aborted(outputs[i]))  // asked for: run_together()
      expect_same_until_abort(request.alone, outputs[i]);
    else
      expect_same(request.alone, outputs[i]);
    if (HasFailure()) return false;
    tally_.add(outputs[i]);
  }
  return true;
}

TEST_P(LoadFuzz, ARequestGivesTheSameBytesAloneAndAtAnyLoad) {
  const auto begin = std::chrono::steady_clock::now();
  const std::chrono::seconds limit(setting("NANOVLLM_FUZZ_SECONDS", 0));
  const bool is_limited = limit.count() > 0;
  const int rounds = is_limited ? 12 : 5;  // of a draw: running alone takes as long as many rounds
  const auto is_over = [&] { return std::chrono::steady_clock::now() - begin >= limit; };
  do {
    const auto requests = draw_requests();
    tally_.alone += watch_.lap();
    for (int i = 0; i < rounds && !(is_limited && is_over()); ++i) {
      const Round round = draw_round(requests);
      SCOPED_TRACE(testing::Message()
                   << "seed " << seed_ << ", round " << tally_.rounds << ": " << describe(round));
      if (!run_round(requests, round)) break;
    }
    fmt::print("  {}, seed {}: {}\n", GetParam().name, seed_, tally_.text());
    std::fflush(stdout);
  } while (
      !HasFailure() &&
      (is_limited ? !is_over() : tally_.rounds < 10 || (!tally_.proves() && tally_.rounds < 40)));
  EXPECT_TRUE(is_limited || tally_.proves());
}

constexpr auto shape_name = [](const auto& info) { return std::string(info.param.name); };
INSTANTIATE_TEST_SUITE_P(Cuda, LoadFuzz, testing::ValuesIn(kGpuShapes), shape_name);
INSTANTIATE_TEST_SUITE_P(Cpu, LoadFuzz, testing::ValuesIn(kCpuShapes), shape_name);

}  // namespace
}  // namespace nanovllm
