// Steps in flight, recorded steps, and steps in two parts: over a device whose next token is a
// known function of the input token and its position, and of its token mask, every request must get
// the tokens that the function gives, however steps are prepared, fed, padded, recorded, preempted
// and aborted.
#include <array>
#include <bit>
#include <deque>
#include <map>
#include <random>

#include <gtest/gtest.h>

#include "engine/llm_engine.h"
#include "engine/model_runner.h"
#include "engine/test_grammars.h"
#include "ops/null_backend.h"

namespace nanovllm {
namespace {

constexpr int32_t kEos = 7, kVocab = 100;
constexpr size_t kMaskWords = 4;

int32_t next_token(int32_t token, int64_t position, int64_t seed) {
  return static_cast<int32_t>((token * 31 + position * 17 + seed % kVocab * 5 + 5 * kVocab) %
                              kVocab);
}

/// The first token from this one on, in a circle, that the mask has.
template <class Word>
int32_t first_allowed(int32_t token, const Word* mask) {
  while ((mask[token / 32] >> token % 32 & 1) == 0) token = (token + 1) % kVocab;
  return token;
}

struct Device {
  bool asynchronous = true, records = true;
  int captures = 0, replays = 0;
  int64_t pending = 0;      // operations that were issued and have not run
  int live = 0, early = 0;  // buffers: there now, and freed while there was such an operation
};

/// Issues work into a queue that runs at the latest moment: when somebody waits for it.
class LazyBackend : public NullBackend {
 public:
  explicit LazyBackend(Device& log) : log_(log) {}
  MemoryInfo memory() const override { return {size_t{1} << 30, size_t{1} << 30}; }
  Buffer allocate(size_t bytes) override {
    ++log_.live;
    return {new std::byte[bytes](), [&log = log_](std::byte* data) {
              --log.live;
              log.early += log.pending > 0;
              delete[] data;
            }};
  }
  Buffer allocate_host(size_t bytes) override { return allocate(bytes); }
  bool is_asynchronous() const override { return log_.asynchronous; }

  void copy(Tensor dst, Tensor src) override {
    issue([dst, src] { std::memcpy(dst.data, src.data, src.bytes()); });
  }
  void synchronize() override { run(issued_); }
  std::unique_ptr<Fence> make_fence() override {
    return log_.asynchronous ? std::make_unique<LazyFence>(*this) : nullptr;
  }
  bool has_graphs() const override { return log_.records; }
  std::unique_ptr<Graph> capture(const std::function<void()>& body) override {
    ++log_.captures;
    auto graph = std::make_unique<LazyGraph>(*this);
    recording_ = &graph->operations;
    body();
    recording_ = nullptr;
    return graph;
  }

  void begin_step(const Batch& batch) override {
    issue([this, batch] {
      batch_ = batch;
      row_ = 0;
      mask_rows_ = masks_ = {};
    });
  }
  void feed_tokens(Tensor tokens, Tensor source, Tensor sampled, Tensor slots,
                   Tensor slot_tokens) override {
    issue([=] {
      for (int64_t i = 0; i < tokens.numel(); ++i) {
        if (const int32_t from = source.ptr<int32_t>()[i]; from >= 0)
          tokens.ptr<int32_t>()[i] = sampled.ptr<int32_t>()[from];
        if (const int32_t slot = slots.ptr<int32_t>()[i]; slot >= 0)
          slot_tokens.ptr<int32_t>()[slot] = tokens.ptr<int32_t>()[i];
      }
    });
  }
  void apply_token_masks(Tensor, Tensor mask_rows, Tensor masks) override {
    issue([this, mask_rows, masks] {
      mask_rows_ = mask_rows;
      masks_ = masks;
    });
  }
  void sample(Tensor ids, Tensor, const SamplingBatch& params) override {
    issue([this, ids, params] {
      for (int64_t i = 0; i < ids.numel(); ++i) {
        const int32_t row = batch_.logits_rows.ptr<int32_t>()[row_++];
        ids.ptr<int32_t>()[i] =
            next_token(batch_.tokens.ptr<int32_t>()[row], params.position.ptr<int32_t>()[i],
                       params.seed.ptr<int64_t>()[i]);
        const int32_t mask = mask_rows_.defined() ? mask_rows_.ptr<int32_t>()[i] : -1;
        if (mask >= 0)
          ids.ptr<int32_t>()[i] =
              first_allowed(ids.ptr<int32_t>()[i],
                            masks_.ptr<int32_t>() + static_cast<size_t>(mask) * kMaskWords);
      }
    });
  }

 private:
  using Operation = std::function<void()>;

  struct LazyGraph final : Graph {
    explicit LazyGraph(LazyBackend& b) : backend(b) {}
    bool is_ready() override { return ++asked > 2; }
    void launch() override {
      EXPECT_GT(asked, 2) << "the host would have waited";
      ++backend.log_.replays;
      for (const Operation& operation : operations) backend.issue(operation);
    }
    LazyBackend& backend;
    std::vector<Operation> operations;
    int asked = 0;
  };
  struct LazyFence final : Fence {
    explicit LazyFence(LazyBackend& b) : backend(b) {}
    void record() override { place = backend.issued_; }
    void wait() override { backend.run(place); }
    LazyBackend& backend;
    int64_t place = 0;
  };

  void issue(Operation operation) {
    if (recording_) return recording_->push_back(std::move(operation));
    queue_.push_back(std::move(operation));
    ++issued_;
    ++log_.pending;
    if (!log_.asynchronous) run(issued_);
  }
  void run(int64_t end) {
    for (; done_ < end; ++done_) {
      queue_.front()();
      queue_.pop_front();
      --log_.pending;
    }
  }

  Device& log_;
  std::deque<Operation> queue_;
  std::vector<Operation>* recording_ = nullptr;
  int64_t issued_ = 0, done_ = 0;
  Batch batch_;
  int64_t row_ = 0;
  Tensor mask_rows_, masks_;  // of the next sample()
};

struct Case {
  bool asynchronous, records;
};

class StepsInFlightTest : public testing::TestWithParam<Case> {
 protected:
  StepsInFlightTest() {
    device_.asynchronous = GetParam().asynchronous;
    device_.records = GetParam().records;
    model_.architecture = "Qwen3ForCausalLM";
    model_.vocab_size = kVocab;
    model_.hidden_size = model_.head_dim = 8;
    model_.intermediate_size = 8;
    model_.num_hidden_layers = model_.num_attention_heads = model_.num_key_value_heads = 1;
    model_.max_position_embeddings = 64;
    model_.dtype = DType::f32;
    config_.block_size = 8;
    config_.max_num_seqs = 6;
    config_.max_num_batched_tokens = 24;
  }
  LLMEngine make() {
    auto runner =
        std::make_unique<ModelRunner>(std::make_unique<LazyBackend>(device_),
                                      std::make_unique<SingleCommunicator>(), model_, config_);
    return LLMEngine(std::move(runner), model_, config_, nullptr, {kEos});
  }
  struct Request {
    std::vector<int32_t> prompt;
    SamplingParams params;
    std::shared_ptr<const Grammar> grammar;
  };
  Request draw() {
    const auto number = [&](int low, int high) {
      return std::uniform_int_distribution<int>(low, high)(random_);
    };
    Request request;
    const int length = number(1, 40);
    for (int i = 0; i < length; ++i) request.prompt.push_back(i < 16 ? 5 : number(0, kVocab - 1));
    request.params.seed = number(0, 1000);
    request.params.max_tokens = number(1, 30);
    request.params.temperature = number(0, 2) / 2.0;
    request.params.top_p = number(0, 3) ? 1.0 : 0.5;
    request.params.ignore_eos = number(0, 1);
    request.params.min_tokens = number(0, 4) ? 0 : std::min<int64_t>(2, request.params.max_tokens);
    if (number(0, 5) == 0) request.params.logprobs = 1;
    request.params.output_kind = number(0, 1) ? OutputKind::delta : OutputKind::final_only;
    if (number(0, 2) == 0)
      request.grammar = hash_grammar(static_cast<uint64_t>(number(0, 1000)), kVocab, kEos);
    return request;
  }
  /// The tokens that the device's function makes of a request. min_tokens masks nothing here (this
  /// device has no logits), but the engine may not end a sequence before it.
  std::vector<int32_t> expected(const Request& request) const {
    std::vector<int32_t> tokens = request.prompt;
    const auto prompt = request.prompt.size();
    const auto matcher = request.grammar ? request.grammar->new_matcher() : nullptr;
    while (tokens.size() < 64 &&
           tokens.size() - prompt < static_cast<size_t>(request.params.max_tokens)) {
      int32_t token = next_token(tokens.back(), std::ssize(tokens), *request.params.seed);
      const bool stops = !request.params.ignore_eos &&
                         std::ssize(tokens) - std::ssize(request.prompt) + (matcher ? 0 : 1) >=
                             request.params.min_tokens;
      if (matcher) {
        std::array<uint32_t, kMaskWords> mask{};
        matcher->fill_mask(mask);
        const bool only_eos = std::popcount(mask[0]) == 1 && mask[0] >> kEos == 1 &&
                              std::all_of(mask.begin() + 1, mask.end(), std::logical_not());
        if (!stops && !only_eos) mask[0] &= ~(1u << kEos);
        token = first_allowed(token, mask.data());
        EXPECT_TRUE(matcher->accept(token));
      }
      tokens.push_back(token);
      if (token == kEos && (stops || matcher)) break;
    }
    return {tokens.begin() + static_cast<int64_t>(prompt), tokens.end()};
  }

  Device device_;
  ModelConfig model_;
  EngineConfig config_;
  std::mt19937 random_{12};
};

TEST_P(StepsInFlightTest, EveryRequestGetsItsTokens) {
  int64_t preemptions = 0, cached = 0;
  for (const int blocks : {9, 14, 60}) {
    config_.num_gpu_blocks_override = blocks;
    LLMEngine engine = make();
    std::map<int64_t, Request> requests;
    std::map<int64_t, std::vector<int32_t>> answers;
    std::map<int64_t, bool> aborted;
    size_t finished = 0;
    for (int step = 0; step < 3000 && finished < 150; ++step) {
      if (requests.size() < 150 && step % 2 == 0) {
        Request request = draw();
        const int64_t id = engine.add_request(request.prompt, request.params, request.grammar);
        requests[id] = std::move(request);
        if (random_() % 8 == 0) aborted[id] = false;
      }
      for (auto& [id, done] : aborted)
        if (!done && random_() % 6 == 0) engine.abort_request(id), done = true;
      for (const RequestOutput& output : engine.step()) {
        std::vector<int32_t>& received = answers[output.request_id];
        received.insert(received.end(), output.outputs[0].token_ids.begin(),
                        output.outputs[0].token_ids.end());
        if (!output.finished) {
          ASSERT_EQ(output.outputs[0].token_ids.size(), 1u);
          continue;
        }
        ++finished;
        const Request& request = requests.at(output.request_id);
        std::vector<int32_t> tokens = expected(request);
        if (output.outputs[0].finish_reason == FinishReason::abort) {
          ASSERT_LE(received.size(), tokens.size());
          tokens.resize(received.size());
        }
        ASSERT_EQ(received, tokens) << "request " << output.request_id;
        if (request.params.logprobs && request.params.output_kind == OutputKind::final_only) {
          EXPECT_EQ(output.outputs[0].logprobs.size(), tokens.size());
        }
      }
    }
    EXPECT_EQ(finished, 150u);
    EXPECT_TRUE(engine.is_finished());
    const EngineStats stats = engine.stats();
    preemptions += stats.preemptions;
    cached += stats.cached_prompt_tokens;
    EXPECT_EQ(stats.running + stats.waiting, 0);
    EXPECT_EQ(stats.free_blocks, blocks);
  }
  EXPECT_GT(preemptions, 0);
  EXPECT_GT(cached, 0);
  EXPECT_EQ(device_.captures > 0, GetParam().records);
  EXPECT_EQ(device_.replays > 50, GetParam().records);
}

TEST_P(StepsInFlightTest, EagerStepsAreNotRecorded) {
  config_.enforce_eager = true;
  LLMEngine engine = make();
  Request request = draw();
  engine.add_request(request.prompt, request.params);
  while (!engine.is_finished()) engine.step();
  EXPECT_EQ(device_.captures, 0);
}

TEST_P(StepsInFlightTest, AnEngineThatGoesWaitsForItsStepsAndGivesAllMemoryBack) {
  {
    LLMEngine engine = make();
    SamplingParams params;
    params.max_tokens = 40;
    engine.add_request({1, 2, 3}, params);
    for (int i = 0; i < 5; ++i) engine.step();
    EXPECT_EQ(device_.pending > 0, GetParam().asynchronous);
  }
  EXPECT_EQ(device_.early, 0);
  EXPECT_EQ(device_.live, 0);
}

std::string name_of_case(const testing::TestParamInfo<Case>& info) {
  return std::string(info.param.asynchronous ? "two_steps" : "one_step") +
         (info.param.records ? "_recorded" : "_eager");
}
INSTANTIATE_TEST_SUITE_P(Engine, StepsInFlightTest,
                         testing::Values(Case{false, false}, Case{false, true}, Case{true, false},
                                         Case{true, true}),
                         name_of_case);

}  // namespace
}  // namespace nanovllm
