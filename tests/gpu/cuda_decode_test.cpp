// The decode step's attention: whatever the batch, its padding, and the lengths with which a
// recorded step is replayed, a row has the bits that it has as the last row of a prefill chunk.
#include <gtest/gtest.h>

#include "gpu/gpu_test.h"

namespace nanovllm {
namespace {

struct Shape {
  int64_t heads, kv_heads, head_dim, block_size = 16;
};

/// Sequences in a cache, one query row of each, and steps over any of them at any length.
class DecodeSteps {
 public:
  DecodeSteps(Backend& gpu, const Shape& shape, std::vector<int> lengths, bool e4m3)
      : shape_(shape),
        rig_(gpu),
        paged_(rig_, DType::bf16, shape.block_size, shape.kv_heads, shape.head_dim,
               std::move(lengths), 5, e4m3),
        queries_(normal_values(static_cast<int64_t>(paged_.lengths.size()) * width(), 6, 2.0f)) {}

  int64_t width() const { return shape_.heads * shape_.head_dim; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)); }

  /// A step over these sequences; -1 is padding. The lengths are set by set_lengths().
  struct Step {
    std::vector<int> sequences;
    Batch batch;
    Tensor q, out;
  };
  Step step(const std::vector<int>& sequences) {
    Step step{sequences, {}, {}, {}};
    std::vector<Part> parts;
    std::vector<float> q;
    for (const int s : sequences) {
      const int row = std::max(s, 0);
      parts.push_back({row, 0, 1});
      q.insert(q.end(), queries_.begin() + row * width(), queries_.begin() + (row + 1) * width());
    }
    step.batch = paged_.batch(rig_, parts);
    const auto rows = static_cast<int64_t>(sequences.size());
    step.q = rig_.upload(q, DType::bf16, {rows, shape_.heads, shape_.head_dim});
    step.out = rig_.empty(DType::bf16, {rows, shape_.heads, shape_.head_dim});
    return step;
  }
  void set_lengths(const Step& step, std::vector<int32_t> lengths) {
    Tensor source(lengths.data(), DType::i32, {static_cast<int64_t>(lengths.size())});
    rig_.backend.copy(step.batch.context_lens, source);
    rig_.backend.synchronize();
  }
  void run(const Step& step, int64_t window) {
    rig_.backend.attention(step.out, step.q, paged_.cache, step.batch, scale(), window);
  }
  std::vector<std::byte> row(const Tensor& out, size_t i) {
    const auto at = static_cast<int64_t>(i);
    return rig_.bytes(out.rows(at, at + 1));
  }
  /// The row's bytes as the second of two query rows.
  std::vector<std::byte> in_prefill(int sequence, int length, int64_t window) {
    Batch batch = paged_.batch(rig_, {{sequence, 0, 2}});
    batch.context_lens = rig_.ints({length});
    batch.max_context_len = length;
    std::vector<float> q(static_cast<size_t>(width()), 0.5f);
    q.insert(q.end(), queries_.begin() + sequence * width(),
             queries_.begin() + (sequence + 1) * width());
    const Tensor two = rig_.upload(q, DType::bf16, {2, shape_.heads, shape_.head_dim}),
                 out = rig_.empty(DType::bf16, {2, shape_.heads, shape_.head_dim});
    rig_.backend.attention(out, two, paged_.cache, batch, scale(), window);
    return row(out, 1);
  }
  /// How many rows of the step differ from their own in a prefill; padding must be zeros still.
  int different(const Step& step, const std::vector<int32_t>& lengths, int64_t window) {
    int count = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const std::vector<std::byte> want =
          lengths[i] == 0 ? std::vector<std::byte>(static_cast<size_t>(2 * width()))
                          : in_prefill(step.sequences[i], lengths[i], window);
      count += row(step.out, i) != want;
    }
    return count;
  }
  /// Where the last keys of these lengths are.
  Tensor last_slots(const Step& step, const std::vector<int32_t>& lengths) {
    std::vector<int32_t> slots;
    for (size_t i = 0; i < lengths.size(); ++i) {
      const auto at = static_cast<int32_t>(lengths[i] - 1),
                 block_size = static_cast<int32_t>(shape_.block_size);
      const auto& blocks = paged_.blocks[static_cast<size_t>(step.sequences[i])];
      slots.push_back(blocks[static_cast<size_t>(at / block_size)] * block_size + at % block_size);
    }
    return rig_.upload(slots, {static_cast<int64_t>(slots.size())});
  }
  Rig& rig() { return rig_; }
  KvCache cache() const { return paged_.cache; }

 private:
  using Part = PagedSequences::Part;
  Shape shape_;
  Rig rig_;
  PagedSequences paged_;
  std::vector<float> queries_;
};

/// Over a cache of bf16 or, true, of E4M3.
class CudaDecode : public GpuTest, public testing::WithParamInterface<bool> {};

TEST_P(CudaDecode, PaddingIsLeftAloneAndDoesNotShow) {
  for (const Shape& shape : {Shape{16, 8, 128, 64}, {16, 1, 64}, {10, 2, 80, 8}, {4, 2, 256}}) {
    DecodeSteps steps(*gpu_, shape, {1300, 40, 700, 513}, GetParam());
    for (const int64_t window : {0, 200}) {
      const auto step = steps.step({-1, 0, 1, -1, -1, 2, 3, -1});
      const std::vector<int32_t> lengths{0, 1300, 40, 0, 0, 700, 513, 0};
      steps.set_lengths(step, lengths);
      steps.run(step, window);
      EXPECT_EQ(steps.different(step, lengths, window), 0)
          << "head_dim " << shape.head_dim << ", window " << window;
      const auto nothing = steps.step({-1, -1});
      steps.set_lengths(nothing, {0, 0});
      steps.run(nothing, window);
      EXPECT_EQ(steps.different(nothing, {0, 0}, window), 0);
    }
  }
}

TEST_P(CudaDecode, AllSizesOfBlocksAndHeads) {
  const std::vector<int32_t> lengths{700, 64, 1, 257, 129};
  for (const int64_t block_size : {8, 16, 32, 64, 128, 256})
    for (const Shape& shape :
         {Shape{4, 2, 64}, {4, 2, 80}, {4, 2, 96}, {4, 2, 128}, {16, 1, 128}, {4, 2, 256}}) {
      Shape paged = shape;
      paged.block_size = block_size;
      DecodeSteps steps(*gpu_, paged, {700}, GetParam());
      const auto step = steps.step({0, 0, 0, 0, 0});
      steps.set_lengths(step, lengths);
      for (const int64_t window : {0, 70}) {
        steps.run(step, window);
        EXPECT_EQ(steps.different(step, lengths, window), 0)
            << "blocks of " << block_size << ", head_dim " << shape.head_dim << ", window "
            << window;
      }
    }
}

// A layer may begin while the kernels before it run, and what it then fetches must not be what they
// are about to write: the keys of its own rows.
TEST_P(CudaDecode, KeysOfThisStepAreWaitedFor) {
  constexpr int64_t kSeqs = 6, kLayers = 8, kHeads = 8, kDim = 128;
  const std::vector<int32_t> lengths{400, 300, 200, 64, 17, 1};
  DecodeSteps steps(*gpu_, {16, kHeads, kDim, 64}, lengths, GetParam());
  const auto step = steps.step({0, 1, 2, 3, 4, 5});
  steps.set_lengths(step, lengths);
  Rig& rig = steps.rig();
  const Tensor slots = steps.last_slots(step, lengths);
  const Tensor new_keys = rig.upload(normal_values(kLayers * kSeqs * kHeads * kDim, 8, 2.0f),
                                     DType::bf16, {kLayers * kSeqs, kHeads, kDim});
  const Tensor rows = rig.empty(DType::bf16, {16'384, 1024}),
               weights = rig.empty(DType::bf16, {1024});
  std::vector<Tensor> outs;
  for (int64_t layer = 0; layer < kLayers; ++layer)
    outs.push_back(rig.empty(DType::bf16, {kSeqs, 16, kDim}));
  const auto run = [&](int64_t layer) {
    const Tensor kv = new_keys.rows(layer * kSeqs, (layer + 1) * kSeqs);
    gpu_->rms_norm(rows, rows, weights, 1e-6f);  // takes a while
    gpu_->store_kv(steps.cache(), kv, kv, slots);
    auto of_layer = step;
    of_layer.out = outs[static_cast<size_t>(layer)];
    steps.run(of_layer, 0);
  };
  std::vector<std::vector<std::byte>> want;
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    run(layer);  // with a plan of its own, before which all is done
    want.push_back(rig.bytes(outs[static_cast<size_t>(layer)]));
  }
  const auto graph = gpu_->capture([&] {
    gpu_->begin_step(step.batch);
    for (int64_t layer = 0; layer < kLayers; ++layer) run(layer);
  });
  for (int again = 0; again < 5; ++again) {
    graph->launch();
    for (int64_t layer = 0; layer < kLayers; ++layer)
      EXPECT_EQ(rig.bytes(outs[static_cast<size_t>(layer)]), want[static_cast<size_t>(layer)])
          << "layer " << layer;
  }
}

TEST_P(CudaDecode, ARecordedStepServesOtherLengths) {
  const Shape shape{8, 2, 128, 16};
  DecodeSteps steps(*gpu_, shape, {3000, 40, 700, 513, 2048, 256}, GetParam());
  auto first = steps.step({0, 1, 2, 3, 4, 5});
  // Layers of one step: with one plan, with a window beside it, and of another batch, which shares
  // the lengths.
  auto second = first, slides = first;
  second.out = steps.step({0, 1, 2, 3, 4, 5}).out;
  slides.out = steps.step({0, 1, 2, 3, 4, 5}).out;
  const auto graph = gpu_->capture([&] {
    gpu_->begin_step(first.batch);
    steps.run(first, 0);
    steps.run(slides, 100);
    steps.run(second, 0);
    steps.run(slides, 100);
  });
  ASSERT_TRUE(graph);
  const std::vector<std::vector<int32_t>> replays{
      {3000, 40, 700, 513, 2048, 256}, {1, 1, 1, 1, 1, 1},    {0, 0, 0, 0, 0, 0},
      {64, 0, 65, 512, 2047, 255},     {2999, 0, 0, 0, 0, 0}, {0, 0, 0, 0, 0, 256}};
  for (const auto& lengths : replays) {
    for (const auto* step : {&first, &second, &slides}) {
      const std::vector<float> zeros(static_cast<size_t>(step->out.numel()));
      gpu_->copy(step->out, steps.rig().upload(zeros, DType::bf16, {6, 8, 128}));
    }
    steps.set_lengths(first, lengths);
    for (int again = 0; again < 3; ++again) graph->launch();
    gpu_->synchronize();
    EXPECT_EQ(steps.different(first, lengths, 0), 0);
    EXPECT_EQ(steps.different(second, lengths, 0), 0);
    EXPECT_EQ(steps.different(slides, lengths, 100), 0);
  }
}

TEST_P(CudaDecode, PartialResultsThatDoNotFitAreAvoided) {
  // 150 pairs of 96 chunks: dividing pairs among the SMs would take more partial results of 16
  // rows of 256 than there is memory for.
  DecodeSteps steps(*gpu_, {16, 1, 256, 64}, {24'576}, GetParam());
  const std::vector<int> crowd(150, 0);
  const auto step = steps.step(crowd);
  std::vector<int32_t> lengths(150, 24'576);
  for (size_t i = 100; i < lengths.size(); ++i) lengths[i] -= static_cast<int32_t>(7 * i);
  steps.set_lengths(step, lengths);
  steps.run(step, 0);
  EXPECT_EQ(steps.different(step, lengths, 0), 0);
}

// Blocks leave partial results of pairs that they share: few, which a warp of its own merges, and
// many, of all sizes of groups, in a recording whose replays share much, little and nothing.
TEST_P(CudaDecode, SharedPairsAreMergedInEveryLaunch) {
  constexpr size_t kRows = 40;
  std::vector<std::vector<int32_t>> replays(5, std::vector<int32_t>(kRows));
  for (size_t i = 0; i < kRows; ++i) {
    replays[0][i] = i % 4 == 3 ? 0 : static_cast<int32_t>(1 + i * 7919 % 1500);
    replays[1][i] = i == 17 ? 10'000 : 0;               // 40 partial results of each pair
    replays[2][i] = i == kRows - 1 ? 300 : 0;           // fewer units than SMs
    replays[4][i] = static_cast<int32_t>(700 - 3 * i);  // after a step of padding alone
  }
  for (const Shape& shape : {Shape{16, 8, 128, 64}, {3, 3, 128}, {15, 3, 80}, {16, 1, 64}}) {
    DecodeSteps steps(*gpu_, shape, {10'000}, GetParam());
    const auto step = steps.step(std::vector<int>(kRows, 0));
    auto last = step;
    last.out = steps.step(std::vector<int>(kRows, 0)).out;
    const auto graph = gpu_->capture([&] {
      gpu_->begin_step(step.batch);
      for (int i = 0; i < 5; ++i) steps.run(step, 0);
      steps.run(last, 0);
    });
    const std::vector<float> zeros(static_cast<size_t>(step.out.numel()));
    const Tensor nothing =
        steps.rig().upload(zeros, DType::bf16, {kRows, shape.heads, shape.head_dim});
    for (const auto& lengths : replays) {
      gpu_->copy(step.out, nothing);
      gpu_->copy(last.out, nothing);
      steps.set_lengths(step, lengths);
      graph->launch();
      gpu_->synchronize();
      EXPECT_EQ(steps.different(step, lengths, 0), 0) << "head_dim " << shape.head_dim;
      EXPECT_EQ(steps.different(last, lengths, 0), 0) << "head_dim " << shape.head_dim;
    }
  }
}

TEST_P(CudaDecode, ManySequencesOfAllLengths) {
  for (const Shape& shape : {Shape{16, 8, 128, 64}, {12, 4, 64, 64}}) {
    DecodeSteps steps(*gpu_, shape, {2500}, GetParam());
    for (const size_t count : {1, 2, 5, 33, 256, 1024}) {
      const auto step = steps.step(std::vector<int>(count, 0));
      std::vector<int32_t> lengths;
      for (size_t i = 0; i < count; ++i)
        lengths.push_back(static_cast<int32_t>(count <= 2 ? 2500 - i : i * 7919 % 2500));
      steps.set_lengths(step, lengths);
      gpu_->begin_step(step.batch);
      for (int layer = 0; layer < 3; ++layer) steps.run(step, 0);
      EXPECT_EQ(steps.different(step, lengths, 0), 0)
          << count << " sequences, head_dim " << shape.head_dim;
    }
  }
}

/// Outputs of three layers of a step whose heads are as projections make them, and the cache.
using HeadsResult = std::vector<std::vector<std::byte>>;
struct HeadsCase {
  Shape shape;
  int64_t rotary_dim, window;
  bool has_norms;
};
HeadsResult attend_to_heads(Backend& gpu, const HeadsCase& c, const std::vector<int32_t>& lengths,
                            bool e4m3, bool composed) {
  const auto [heads, kv_heads, d, block_size] = c.shape;
  const int64_t seqs = std::ssize(lengths), q_size = heads * d, kv_size = kv_heads * d,
                row = q_size + 2 * kv_size;
  constexpr int64_t kMost = 3000;
  Rig rig(gpu);
  const PagedSequences paged(rig, DType::bf16, block_size, kv_heads, d,
                             std::vector<int>(lengths.begin(), lengths.end()), 5, e4m3);
  const auto width = static_cast<size_t>(kMost / block_size + 1);
  std::vector<int32_t> tables(lengths.size() * width, 0x7fffffff);
  for (size_t s = 0; s < lengths.size(); ++s)
    std::ranges::copy(paged.blocks[s], tables.begin() + static_cast<std::ptrdiff_t>(s * width));
  const Batch batch = decode_batch(rig, lengths, tables, block_size, kMost);
  const Tensor cos_sin =
      rig.upload(normal_values(kMost * c.rotary_dim, 7), DType::f32, {kMost, c.rotary_dim});
  HeadNorms norms{{}, {}, 1e-6f};
  if (c.has_norms) {
    norms.q = rig.upload(normal_values(d, 11), DType::bf16, {d});
    norms.k = rig.upload(normal_values(d, 12), DType::bf16, {d});
  }
  HeadsResult results;
  gpu.begin_step(batch);
  for (uint32_t layer = 0; layer < 3; ++layer) {
    const Tensor qkv = rig.upload(normal_values(seqs * row, 20 + layer), DType::bf16, {seqs, row}),
                 out = rig.empty(DType::bf16, {seqs, heads, d}), q = qkv.cols(0, q_size).split(d),
                 k = qkv.cols(q_size, q_size + kv_size).split(d),
                 v = qkv.cols(q_size + kv_size, row).split(d);
    const float scale = 1.0f / std::sqrt(static_cast<float>(d));
    if (!composed) {
      gpu.rope_store_attention(out, q, k, v, norms, batch, cos_sin, paged.cache, scale, c.window);
    } else {
      if (c.has_norms)
        gpu.qk_norm_rope_store(q, k, v, norms.q, norms.k, norms.eps, batch, cos_sin, paged.cache);
      else
        gpu.rope_store(q, k, v, batch, cos_sin, paged.cache);
      gpu.attention(out, q, paged.cache, batch, scale, c.window);
    }
    results.push_back(rig.bytes(out));
  }
  results.push_back(rig.bytes(paged.cache.k));
  results.push_back(rig.bytes(paged.cache.v));
  return results;
}

// Where attention makes its own heads, it has the bits of separate operations, and the cache, too;
// what was in the slots of the newest tokens must not show.
TEST_P(CudaDecode, HeadsOfAProjectionHaveTheBitsOfSeparateOperations) {
  const std::vector<int32_t> few{700, 0, 1, 64, 65, 256, 257, 1024, 0, 513}, one{2900};
  std::vector<int32_t> many;
  for (int32_t i = 0; i < 40; ++i) many.push_back(i % 8 == 5 ? 0 : 1 + i * 7919 % 350);
  for (const HeadsCase& c : {HeadsCase{{16, 8, 128, 64}, 128, 0, true},
                             {{32, 8, 128}, 128, 100, true},
                             {{12, 1, 128, 8}, 64, 0, false},
                             {{16, 1, 64}, 64, 0, true},
                             {{6, 3, 64, 256}, 32, 300, false},
                             {{10, 2, 80, 8}, 80, 0, true},
                             {{4, 2, 128}, 72, 0, true},
                             {{4, 2, 256}, 256, 0, false}})
    for (const auto& lengths : {few, one, many}) {
      const HeadsResult want = attend_to_heads(*gpu_, c, lengths, GetParam(), true);
      EXPECT_TRUE(attend_to_heads(*gpu_, c, lengths, GetParam(), false) == want)
          << c.shape.heads << " heads of " << c.shape.head_dim << ", " << lengths.size()
          << " sequences";
    }
}

INSTANTIATE_TEST_SUITE_P(Cache, CudaDecode, testing::Bool(),
                         [](const auto& e4m3) { return e4m3.param ? "E4m3" : "Bf16"; });

}  // namespace
}  // namespace nanovllm
