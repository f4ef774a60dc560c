// A decode step in micro-batches: each micro-batch sees its own sequences and takes memory of its
// own, and no token and no log probability changes. That micro-batches run side by side is for the
// GPU's tests; here they run one after another.
#include "models/micro_batches.h"

#include <cstring>

#include <gtest/gtest.h>

#include "engine/llm_engine.h"
#include "engine/model_runner.h"
#include "ops/cuda/core/micro_batches.h"
#include "ops/null_backend.h"

namespace nanovllm {
namespace {

ModelConfig small_model() {
  ModelConfig model;
  model.architecture = "Qwen3ForCausalLM";
  model.vocab_size = 200;
  model.hidden_size = 128;
  model.intermediate_size = 192;
  model.num_hidden_layers = 3;
  model.num_attention_heads = 4;
  model.num_key_value_heads = 2;
  model.head_dim = 64;
  model.max_position_embeddings = 2048;
  model.dtype = DType::f32;
  return model;
}

struct Case {
  const char *name, *device;
  DType dtype;
  bool eager;
  int requests, longest;  // prompt
};

/// The outputs that `micro_batches` give for requests of many lengths, which end at different
/// times. Where log probabilities are asked for no step is recorded.
std::vector<RequestOutput> outputs(const Case& c, int micro_batches) {
  ModelConfig model = small_model();
  model.dtype = c.dtype;
  EngineConfig config;
  config.block_size = 16;
  config.max_num_batched_tokens = 256;
  config.num_gpu_blocks_override = c.requests * (c.longest + 100) / 16;
  config.decode_micro_batches = micro_batches;
  config.enforce_eager = c.eager;
  auto runner =
      std::make_unique<ModelRunner>(make_backend(c.device, {.num_threads = 1}),
                                    std::make_unique<SingleCommunicator>(), model, config);
  runner->load(nullptr, 7, {});
  LLMEngine engine(std::move(runner), model, config, nullptr, {});
  for (int i = 0; i < c.requests; ++i) {
    SamplingParams params;
    params.max_tokens = 3 + 2 * i % 89;
    if (c.eager) params.logprobs = 3;
    params.seed = i;
    params.temperature = i % 2 == 0 ? 0 : 0.8;
    params.output_kind = OutputKind::final_only;
    std::vector<int32_t> prompt;
    for (int j = 0; j <= 53 * i % c.longest; ++j) prompt.push_back((31 * i + 7 * j) % 200);
    engine.add_request(std::move(prompt), params);
  }
  std::vector<RequestOutput> done(static_cast<size_t>(c.requests));
  for (int left = c.requests; left > 0;)
    for (RequestOutput& output : engine.step())
      if (output.finished) {
        --left;
        const auto id = static_cast<size_t>(output.request_id);
        done[id] = std::move(output);
      }
  return done;
}

class MicroBatches : public testing::TestWithParam<Case> {};

TEST_P(MicroBatches, DoNotShowInTokensAndLogprobs) {
  const Case& c = GetParam();
  if (std::string(c.device) == "cuda") {
    try {
      (void)make_backend(c.device, {});
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
  }
  const auto one = outputs(c, 1), two = outputs(c, 2);
  for (size_t i = 0; i < one.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "request " << i);
    ASSERT_EQ(one[i].error, "");
    ASSERT_EQ(one[i].outputs[0].token_ids, two[i].outputs[0].token_ids);
    ASSERT_EQ(one[i].outputs[0].logprobs.size(), two[i].outputs[0].logprobs.size());
    for (size_t t = 0; t < one[i].outputs[0].logprobs.size(); ++t)
      for (size_t k = 0; k < one[i].outputs[0].logprobs[t].size(); ++k)
        ASSERT_EQ(std::memcmp(&one[i].outputs[0].logprobs[t][k].logprob,
                              &two[i].outputs[0].logprobs[t][k].logprob, sizeof(float)),
                  0);
  }
}

INSTANTIATE_TEST_SUITE_P(All, MicroBatches,
                         testing::Values(Case{"CpuF32", "cpu", DType::f32, true, 11, 17},
                                         Case{"CpuBf16", "cpu", DType::bf16, true, 11, 17},
                                         Case{"CudaEager", "cuda", DType::bf16, true, 150, 700},
                                         Case{"CudaGraphs", "cuda", DType::bf16, false, 250, 1500}),
                         [](const auto& instance) { return std::string(instance.param.name); });

/// Notes where each micro-batch's products and attention read and write, and which sequences it
/// has.
class MicroBatchesBackend final : public NullBackend {
 public:
  struct Seen {
    std::vector<Tensor> activations;
    Batch batch;
    int begins = 0;
  };
  std::vector<Seen> micro_batches = std::vector<Seen>(1);  // 0: what no micro-batch does
  int advised = 1;

  void begin_step(const Batch& batch) override {
    micro_batches.back().batch = batch;
    ++micro_batches.back().begins;
  }
  int micro_batches_for(const DecodeSize&) const override { return advised; }
  void run_micro_batches(int count, const std::function<void(int)>& body) override {
    for (int i = 0; i < count; ++i) {
      micro_batches.emplace_back();
      body(i);
    }
  }
  void gemm(Tensor y, Tensor x, Weight) override { note({y, x}); }
  void attention(Tensor out, Tensor q, KvCache, const Batch&, float, int64_t) override {
    note({out, q});
  }

 private:
  void note(std::initializer_list<Tensor> tensors) {
    auto& seen = micro_batches.back().activations;
    seen.insert(seen.end(), tensors);
  }
};

/// The bytes from the first to behind the last element.
std::pair<const std::byte*, const std::byte*> extent(const Tensor& t) {
  int64_t last = 0;
  for (size_t i = 0; i < static_cast<size_t>(t.rank); ++i) last += (t.shape[i] - 1) * t.stride[i];
  return {t.data, t.data + static_cast<size_t>(last + 1) * size_of(t.dtype)};
}

class MicroBatchesOfAStep : public testing::Test {
 protected:
  static constexpr int64_t kRows = 7, kBlocks = 4;

  /// A step of seven decodes over the null backend, with real memory for its activations.
  void run(int micro_batches, int64_t head_dim = 64) {
    ModelConfig config = small_model();
    config.head_dim = head_dim;
    ops_.micro_batches.resize(1);
    WeightLoader loader(ops_, DType::f32, {});
    const auto model = find_architecture(config.architecture).make(config, {loader, {}});
    batch_ = {i32({kRows}), i32({kRows}),          i32({kRows}), i32({kRows + 1}),
              i32({kRows}), i32({kRows, kBlocks}), i32({kRows})};
    for (int32_t i = 0; i <= kRows; ++i) batch_.cu_seqlens_q.ptr<int32_t>()[i] = i;
    batch_.max_seqlen_q = 1;
    batch_.num_decodes = kRows;
    const std::vector<KvCache> caches(static_cast<size_t>(config.num_hidden_layers));
    std::vector<std::byte> memory(size_t{1} << 20);
    Arena arena(memory.data(), memory.size(), {});
    SingleCommunicator comm;
    (void)model->forward({ops_, comm, arena, batch_, caches, micro_batches});
    EXPECT_LT(arena.mark(), memory.size() / 2);
  }
  Tensor i32(std::initializer_list<int64_t> shape) {
    Tensor t(nullptr, DType::i32, shape);
    values_.emplace_back(static_cast<size_t>(t.numel()));
    t.data = reinterpret_cast<std::byte*>(values_.back().data());
    return t;
  }

  MicroBatchesBackend ops_;
  Batch batch_;
  std::vector<std::vector<int32_t>> values_;
};

TEST_F(MicroBatchesOfAStep, HaveTheirSequencesAndMemoryToThemselves) {
  run(2);
  ASSERT_EQ(ops_.micro_batches.size(), 3);
  EXPECT_EQ(ops_.micro_batches[0].activations.size(), 0);
  EXPECT_EQ(ops_.micro_batches[1].begins, 1);
  EXPECT_EQ(ops_.micro_batches[2].begins, 1);
  const Batch &low = ops_.micro_batches[1].batch, &high = ops_.micro_batches[2].batch;
  EXPECT_EQ(low.num_seqs(), 3);
  EXPECT_EQ(high.num_seqs(), 4);
  EXPECT_EQ(high.num_tokens(), 4);
  for (const auto member : {&Batch::tokens, &Batch::positions, &Batch::slot_mapping,
                            &Batch::context_lens, &Batch::block_tables}) {
    EXPECT_EQ((low.*member).data, (batch_.*member).data);
    EXPECT_EQ((high.*member).data, (batch_.*member)[3].data);
    EXPECT_EQ((high.*member).shape[0], 4);
  }
  for (const Batch* micro_batch : {&low, &high}) {
    ASSERT_EQ(micro_batch->cu_seqlens_q.shape[0], micro_batch->num_seqs() + 1);
    for (int64_t i = 0; i <= micro_batch->num_seqs(); ++i)
      EXPECT_EQ(micro_batch->cu_seqlens_q.ptr<int32_t>()[i], i);
  }
  ASSERT_GT(ops_.micro_batches[1].activations.size(), 10);
  for (const Tensor& a : ops_.micro_batches[1].activations)
    for (const Tensor& b : ops_.micro_batches[2].activations) {
      const auto [a_begin, a_end] = extent(a);
      const auto [b_begin, b_end] = extent(b);
      EXPECT_TRUE(a_end <= b_begin || b_end <= a_begin) << a.describe() << ", " << b.describe();
    }
}

/// Of a step of `rows` sequences of `context` tokens: bytes of the layers' weights, and of a
/// token's keys and values.
int micro_batches_on_a_gpu(double weights, double token, int64_t rows, int64_t context) {
  return decode_micro_batches({rows, weights, token * static_cast<double>(rows * context)});
}

TEST(MicroBatchesRule, WeighsTheKeysAgainstASecondReadingOfTheWeights) {
  const double small = 0.88e9, small_token = 28 * 4096, large = 13.9e9, large_token = 36 * 4096;
  EXPECT_EQ(micro_batches_on_a_gpu(small, small_token, 256, 1024), 2);
  EXPECT_EQ(micro_batches_on_a_gpu(small, small_token, 64, 1024), 2);
  EXPECT_EQ(micro_batches_on_a_gpu(small, small_token, 48, 1024), 2);
  EXPECT_EQ(micro_batches_on_a_gpu(small, small_token, 128, 512), 2);
  EXPECT_EQ(micro_batches_on_a_gpu(small, small_token, 32, 4096), 1);  // few rows
  EXPECT_EQ(micro_batches_on_a_gpu(small, small_token, 64, 512), 1);   // few keys
  EXPECT_EQ(micro_batches_on_a_gpu(small, small_token, 256, 256), 1);  // few keys for so many rows
  EXPECT_EQ(micro_batches_on_a_gpu(large, large_token, 256, 1024), 1);
  EXPECT_EQ(micro_batches_on_a_gpu(large, large_token, 256, 8192), 1);  // much to read twice
}

TEST_F(MicroBatchesOfAStep, AreAsManyAsAskedForOrAdvised) {
  run(1);
  EXPECT_EQ(ops_.micro_batches.size(), 1);
  run(0, 128);
  EXPECT_EQ(ops_.micro_batches.size(), 1);
  ops_.advised = 2;
  run(0, 128);
  EXPECT_EQ(ops_.micro_batches.size(), 3);
  run(0, 64);  // small heads have one, unless more are asked for
  EXPECT_EQ(ops_.micro_batches.size(), 1);
  run(2, 64);
  EXPECT_EQ(ops_.micro_batches.size(), 3);
}

}  // namespace
}  // namespace nanovllm
