// CpuBackend: the catalogue on the host's processors. One file per operation beside this one; the
// inner loops are in kernels.h.
#pragma once

#include <map>
#include <tuple>
#include <vector>

#include "ops/backend.h"
#include "ops/cpu/kernels/kernels.h"
#include "ops/cpu/memory.h"
#include "ops/cpu/onednn.h"

namespace nanovllm::cpu {

/// Rows that one product of an expert takes at once: bounds the buffer between the products.
constexpr int64_t kExpertRows = 128;

/// Bytes of that buffer: an expert's rows, and what its first product makes of them.
inline size_t expert_bytes(const OperandLimits& o) {
  if (o.expert_inner == 0) return 0;
  return static_cast<size_t>(kExpertRows * (o.hidden + 2 * o.expert_inner)) * size_of(o.dtype);
}

class CpuBackend : public Backend {
 public:
  /// `isa` names a set of kernels ("base", "avx2", ...: kernels.h) to use without oneDNN; empty:
  /// the best of all. Throws if the processor lacks it.
  explicit CpuBackend(const BackendOptions& options, std::string_view isa = {});

  Device device() const override { return {Device::cpu, 0}; }
  std::string name() const override;
  MemoryInfo memory() const override;
  Buffer allocate(size_t bytes) override;
  Buffer allocate_host(size_t bytes) override { return allocate(bytes); }
  void copy(Tensor dst, Tensor src) override;
  void synchronize() override {}
  int64_t max_logits_rows() const override {
    return 64;
  }  // 39 MB of f32 for 152k tokens; the GEMM gains little beyond
  size_t scratch_bytes(const OperandLimits& largest) const override;
  void reserve(const OperandLimits& largest) override;
  bool has_e4m3_cache() const override { return true; }

  bool keeps(WeightFormat format, int64_t n, int64_t k, bool stacked) const override;
  size_t weight_bytes(WeightFormat format, int64_t n, int64_t k) const override;
  Weight weight_view(std::byte* data, WeightFormat format, int64_t n, int64_t k) const override;
  void load(Tensor dst, std::span<const Tensor> parts) override;
  void load_quantised(Weight dst, const QuantizedRows& rows) override;

  void gemm(Tensor y, Tensor x, Weight w) override;
  void embedding(Tensor y, Tensor tokens, Weight table, int64_t first_row) override;
  void feed_tokens(Tensor tokens, Tensor source, Tensor sampled, Tensor slots,
                   Tensor slot_tokens) override;
  void gather_rows(Tensor y, Tensor x, Tensor rows) override;
  void add(Tensor x, Tensor y) override;
  void add_bias(Tensor x, Tensor bias) override;
  void rms_norm(Tensor y, Tensor x, Tensor w, float eps) override;
  void rotary_embedding(Tensor q, Tensor k, Tensor positions, Tensor cos_sin) override;
  void store_kv(KvCache cache, Tensor k, Tensor v, Tensor slot_mapping) override;
  void attention(Tensor out, Tensor q, KvCache cache, const Batch& batch, float scale,
                 int64_t window) override;
  void silu_and_mul(Tensor y, Tensor gate_up) override;
  void moe_route(Tensor weights, Tensor ids, Tensor logits, bool normalise) override;
  void moe_mlp(Tensor y, Tensor x, Tensor weights, Tensor ids, Weight gate_up, Weight down,
               const MoeWorkspace& work) override;
  void apply_token_masks(Tensor logits, Tensor mask_rows, Tensor masks) override;
  void bias_logits(Tensor logits, Tensor biases, const Batch& batch, int64_t first_row) override;
  void apply_penalties(Tensor logits, const SamplingBatch& params, Tensor slot_tokens,
                       Tensor block_tables) override;
  void sample(Tensor token_ids, Tensor logits, const SamplingBatch& params) override;
  void top_logprobs(Tensor ids, Tensor logprobs, Tensor ranks, Tensor logits,
                    Tensor chosen) override;
  void add_rms_norm(Tensor y, Tensor residual, Tensor x, Tensor w, float eps,
                    Weight reader) override;
  void qk_norm_rope_store(Tensor q, Tensor k, Tensor v, Tensor q_norm, Tensor k_norm, float eps,
                          const Batch& batch, Tensor cos_sin, KvCache cache) override;

 private:
  const WeightLayout& layout(DType dtype, int64_t n, int64_t k) const;
  bool uses_tiles(DType dtype) const { return dtype == DType::bf16 && kernels_.tile_gemm; }
  bool uses_onednn(DType dtype) const {
    return onednn_ && !uses_tiles(dtype) && onednn_->supports(dtype);
  }
  void gemm_in_halves(const Tensor& y, const Tensor& x, const Weight& w);
  void tile_gemm(const Tensor& y, const Tensor& x, const Weight& w);
  /// tile_gemm's product of the rows that are tiles with some blocks of the weight.
  void multiply_blocks(GemmTask<bf16> task, const Weight& w, bf16* plain) const;
  void quantised_gemm(const Tensor& y, const Tensor& x, const Weight& w);
  /// The same of x's quantised rows.
  void quantise_rows_and_multiply(const Tensor& y, const Tensor& x, const Weight& w);
  /// The part that both share: the task's product with a weight that lies so.
  void multiply_panels(const GemmTask<bf16>& task, const QuantisedKernels& kernels,
                       const QuantisedPanels& panels);
  const QuantisedKernels& quantised(WeightFormat format) const {
    const auto of = [&](const QuantisedKernels& beside_rows, const QuantisedKernels& pairs,
                        const QuantisedKernels& others) -> const QuantisedKernels& {
      return format.quantises_rows() ? beside_rows : uses_onednn(DType::bf16) ? pairs : others;
    };
    const Kernels& k = kernels_;
    return format.numbers == WeightFormat::int4   ? of(k.int4_rows, k.int4_pairs, k.int4)
           : format.numbers == WeightFormat::int8 ? of(k.int8_rows, k.int8_pairs, k.int8)
                                                  : of(k.e4m3_rows, k.e4m3_pairs, k.e4m3);
  }
  /// How many columns of k oneDNN's bf16 products sum from zero, so that quantised_pairs.inl gives
  /// their bits; 0: none that we know. Compared once for each k, with a small product.
  int64_t segment(int64_t k) const;
  int64_t find_segment(int64_t k) const;
  /// A thread's share of a sequence in attention(): some of its tokens, for one KV head.
  struct AttentionUnit {
    int64_t sequence, first, count;
  };
  void divide_attention(const Batch& batch, int64_t tokens, int64_t group, int64_t kv_heads,
                        DType dtype);
  /// FloatKernels::attention_rows.
  int64_t attention_rows(DType dtype) const {
    return dtype == DType::f32 ? kernels_.f32.attention_rows : kernels_.half.attention_rows;
  }

  /// The rows of a product that tile_gemm() turns into tiles, or that are quantised, at once.
  static constexpr int64_t kRowsAsTiles = 512;
  size_t row_tiles_bytes(int64_t m, int64_t k) const;

  static size_t half_bytes(int64_t m, int64_t n, int64_t k);
  /// Of an engine; 0 where no weight is in halves.
  static size_t half_bytes(const OperandLimits& o) {
    return multiplies_in_halves(o.hidden, 0) ? half_bytes(o.rows, o.hidden, o.widest) : 0;
  }

  size_t quantised_row_bytes(int64_t m, int64_t k) const;
  /// Of them what QuantisedKernels::arrange() makes.
  size_t arranged_bytes(int64_t m, int64_t k) const;
  /// Calls it for all tiles; null where the product reads none.
  const std::byte* arrange(const QuantisedNumber* numbers, int64_t m, int64_t k,
                           const QuantisedKernels& kernels, int64_t group);

  int64_t scratch_floats(const OperandLimits& largest) const;
  /// Makes sure that every thread has this much scratch.
  void reserve_scratch(int64_t floats);
  float* scratch(int thread) const {
    return reinterpret_cast<float*>(scratch_[static_cast<size_t>(thread)].get());
  }

  int threads_;
  const Kernels& kernels_;
  const bool arranges_ = kernels_.int4_rows.arrange && adds_beside_products();
  std::unique_ptr<OneDnn> onednn_;
  mutable std::map<std::tuple<DType, int64_t, int64_t>, WeightLayout> own_layouts_;
  mutable std::map<int64_t, int64_t> segments_;  // by k
  mutable int64_t most_paired_ = 0;  // k of the weights of products of pairs that were asked about
  std::vector<GrowingBuffer> scratch_;          // one per thread
  std::vector<AttentionUnit> attention_units_;  // of the step's attention()
  GrowingBuffer row_tiles_;                     // tile_gemm: rows of x, as tiles
  GrowingBuffer halves_;                        // gemm_in_halves()
  GrowingBuffer quantised_rows_;                // of a product: numbers, and their scales
  GrowingBuffer expert_rows_;                   // moe_mlp: what one expert works on
};

}  // namespace nanovllm::cpu
