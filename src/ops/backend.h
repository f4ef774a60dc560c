// THE catalogue: everything a device can do for the engine, on one page.
//
// Conventions. Output first. Tensors are views, sizes come from them; rows may be strided (a slice
// of a wider matrix), the last axis is dense. f32 or bf16 throughout; bf16 accumulates in f32 and
// rounds once, at the end. An output may alias an input only where it says so. All work is ordered
// on the backend's one stream, but for that of run_micro_batches(); nothing here waits for the
// device except copy() to pageable memory and synchronize(). A backend belongs to one rank and is
// used by one thread at a time.
//
// Exactness (docs/contract.md): a row's bits depend on that row's inputs alone, never on how many
// rows there are, on their order, or on how a sequence was cut into chunks and blocks.
//
// Primitives are pure virtual: a backend that forgets one does not compile. A fusion has a body
// made of primitives: that is its definition, its fallback, and what its parity test compares with.
// Where a kernel takes only some sizes and the body would be dear, the body asks a fused_...() of
// the backend first.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/batch.h"
#include "core/sampling_batch.h"
#include "core/tensor.h"
#include "core/weight.h"

namespace nanovllm {

/// A recorded sequence of operations (a CUDA graph). It may still be prepared, beside whatever the
/// caller does.
struct Graph {
  virtual ~Graph() = default;
  /// Whether launch() need not wait for that.
  virtual bool is_ready() { return true; }
  virtual void wait_until_ready() {}
  virtual void launch() = 0;
};

/// A place in a backend's order of work, to wait for while later work is under way.
struct Fence {
  virtual ~Fence() = default;
  /// Moves the fence behind everything issued so far.
  virtual void record() = 0;
  /// Waits until everything before the fence is done. Errors of earlier asynchronous work surface
  /// here.
  virtual void wait() = 0;
};

struct MemoryInfo {
  size_t total = 0, free = 0;  // bytes, right now, of the whole device
};

/// A weight and what it is made of: the arguments of Backend::load().
struct WeightSource {
  Tensor dst;
  std::vector<Tensor> parts;
};

/// Copies the `to.size()` bytes of a source tensor that start at `from` to `to`. Several threads
/// may call it at once. For a file it is not the mapping that is read: a file that was cut gives an
/// error instead of a signal, and no pages are mapped.
using SourceReader = std::function<void(std::span<std::byte> to, const std::byte* from)>;

/// Scratch memory of moe_mlp(); its contents mean nothing before and after. For t tokens of
/// k experts each: act [t * k, n] and out [t * k, h] of x's dtype, plan i32
/// [moe_plan_size(t * k, experts)].
struct MoeWorkspace {
  Tensor act, out, plan;
};
constexpr int64_t moe_plan_size(int64_t pairs, int64_t experts) {
  return 4 * (pairs + experts) + 1;
}

/// The weights of one pre-norm decoder layer with rotary grouped-query attention and a gated MLP
/// or, where there is a router, a mixture of them. Biases, and the norms of the heads, may be
/// undefined.
struct DecoderWeights {
  Tensor input_norm, post_norm;  // [hidden]
  Weight qkv;                    // [(heads + 2 kv_heads) * head_dim, hidden]: q, k, v
  Tensor qkv_bias;
  Tensor q_norm, k_norm;  // [head_dim]
  Weight o;               // [hidden, heads * head_dim]
  Tensor o_bias;
  Weight gate_up;  // [2 * intermediate, hidden]: gate, up
  Tensor gate_up_bias;
  Weight down;  // [hidden, intermediate]
  Tensor down_bias;
  Weight router;       // [experts, hidden]; gate_up and down are stacks of experts then
  int64_t window = 0;  // of its attention; 0: none
};

/// The norms of attention's heads, [head_dim] each; undefined where there are none.
struct HeadNorms {
  Tensor q, k;
  float eps = 0;
};

/// The layers that decoder_layers() runs. All norms have one eps.
struct DecoderStack {
  std::vector<DecoderWeights> layers;
  Tensor cos_sin;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  float eps = 0, scale = 0;
  int64_t experts_per_token = 0;  // of the layers with a router
  bool normalises_experts = false;
};

/// The largest operands of an engine's steps, for what a backend sets aside.
struct OperandLimits {
  DType dtype = DType::f32;
  int64_t rows = 0;                // of activations: tokens of a step
  int64_t hidden = 0, widest = 0;  // columns of activations: the stream's, and the most
  int64_t vocab = 0, head_dim = 0;
  int64_t expert_inner = 0;       // columns between an expert's products; 0: no experts
  int64_t quantised_columns = 0;  // the most of rows that a product quantises; 0: none does
  int64_t quantised_expert_columns = 0, experts_per_token = 0;  // likewise of experts' products
};

/// Parts of a decode step that may run at the same time, at most.
constexpr int kMostMicroBatches = 2;

/// A decode step in figures: its sequences, the bytes that its layers read of keys and values, at
/// most, and those of their weights, which count as bf16 where they are quantised.
struct DecodeSize {
  int64_t rows = 0;
  double weight_bytes = 0, cache_bytes = 0;
  WeightFormat format = WeightFormat::bf16;  // of the weights
};

/// Result of measuring a product's algorithms: seconds with the choice as it was, with the fastest
/// that gives gemm()'s bits, and with the fastest of all. Zeros where there is nothing to choose.
struct GemmTuning {
  double before = 0, best = 0, free = 0;
};

class Backend {
 public:
  virtual ~Backend() = default;

  // -- The device
  virtual Device device() const = 0;
  virtual std::string name() const = 0;  // "cuda:0 NVIDIA H200", "cpu, 2 threads, avx512_core_bf16"
  virtual MemoryInfo memory() const = 0;
  /// Device memory, zeroed, 256-byte aligned. Throws Error(device) with the sizes.
  virtual Buffer allocate(size_t bytes) = 0;
  /// Host memory that copies to and from the device asynchronously (pinned).
  virtual Buffer allocate_host(size_t bytes) = 0;
  /// Copies between any two devices' contiguous tensors of one dtype and size, in stream order.
  virtual void copy(Tensor dst, Tensor src) = 0;
  /// The same from allocate_host()'s memory, but not after the operations before it: none of those
  /// that still run may use `dst`. The operations after it wait for it.
  virtual void copy_ahead(Tensor dst, Tensor src) { copy(dst, src); }
  /// Waits until everything issued so far is done. Errors of earlier asynchronous work surface
  /// here.
  virtual void synchronize() = 0;
  /// Whether operations only issue work, so that the host can prepare a step while another runs.
  virtual bool is_asynchronous() const { return false; }
  /// Null from a backend that is not asynchronous: nothing is ever under way there.
  virtual std::unique_ptr<Fence> make_fence() { return nullptr; }
  /// Whether capture() records. Steps are padded to few sizes only where it does.
  virtual bool has_graphs() const { return false; }
  /// Records what `body` issues, without running it; null where graphs do not exist.
  virtual std::unique_ptr<Graph> capture(const std::function<void()>& body) {
    return (void)body, nullptr;
  }
  /// Rows of logits that are worth computing at once: bounds the workspace of the LM head.
  virtual int64_t max_logits_rows() const = 0;
  /// Bytes that operations on such operands take beside them, inside the backend (split-K,
  /// attention partials, packing).
  virtual size_t scratch_bytes(const OperandLimits& largest) const = 0;
  /// Takes them now, so that no step has to.
  virtual void reserve(const OperandLimits& largest) { (void)largest; }

  /// Called once per step, before its first operation: to prepare what the attention of all layers
  /// shares (on CUDA: the division of the batch's keys among the SMs).
  virtual void begin_step(const Batch& batch) { (void)batch; }

  /// Whether store_kv() and attention() take a cache of e4m3.
  virtual bool has_e4m3_cache() const { return false; }

  // -- Micro-batches: parts of a step that may run at the same time
  /// How many the layers of such a decode step should be divided among, 1 to kMostMicroBatches.
  virtual int micro_batches_for(const DecodeSize& size) const { return (void)size, 1; }
  /// Issues body(0) to body(micro_batches - 1), each in a micro-batch of its own. What one writes
  /// no other touches. They begin with begin_step() of their own batch, and consist of what decoder
  /// layers do in a decode step, operation by operation. What is issued later runs after all of
  /// them.
  virtual void run_micro_batches(int micro_batches, const std::function<void(int)>& body) {
    for (int i = 0; i < micro_batches; ++i) body(i);
  }

  // -- Weights
  /// Whether gemm(), and all that is made of it, takes a quantised [n, k] weight of this format
  /// beside bf16 activations or, `stacked`, moe_mlp() a stack of them. Where rows that it quantises
  /// are the hindrance, the format without them is asked for, and then the plain one.
  virtual bool keeps(WeightFormat format, int64_t n, int64_t k, bool stacked = false) const {
    return (void)format, (void)n, (void)k, (void)stacked, false;
  }
  /// Bytes that a [n, k] matrix occupies in the layout that gemm() and embedding() read (private to
  /// the backend).
  virtual size_t weight_bytes(WeightFormat format, int64_t n, int64_t k) const = 0;
  /// A view of `data` as such a matrix; its tensor is `packed` where the layout is not row-major.
  virtual Weight weight_view(std::byte* data, WeightFormat format, int64_t n, int64_t k) const = 0;
  /// Fills `dst` (a weight's data, or a plain contiguous tensor) with host tensors stacked along
  /// the first axis: f32, f16 or bf16, converted to dst's dtype, possibly strided rows (a shard of
  /// a mapped file). Needs no more than one `dst` of extra memory. The sources may be dropped when
  /// load() returns.
  virtual void load(Tensor dst, std::span<const Tensor> parts) = 0;
  /// Fills a weight of a quantised format that keeps() takes.
  virtual void load_quantised(Weight dst, const QuantizedRows& rows) {
    (void)dst, (void)rows, fail(ErrorKind::engine, "{} keeps no quantised weights", name());
  }
  /// load() of many weights, in any order and perhaps several at once; their sources may be read
  /// through `read` alone. `loaded(i)` is called on the calling thread as soon as the sources of
  /// weight i may be dropped. Throws what `read` throws, once.
  virtual void load_all(std::span<const WeightSource> weights, const SourceReader& read,
                        const std::function<void(size_t)>& loaded) {
    (void)read;
    for (size_t i = 0; i < weights.size(); ++i) {
      load(weights[i].dst, weights[i].parts);
      loaded(i);
    }
  }

  // -- Primitives
  /// y[m, n] = x[m, k] w[n, k]^T. y has x's dtype or is f32. w is of a format for x's dtype:
  /// its plain one or, for bf16, a quantised one that keeps() takes, with the same bits. Where its
  /// format quantises rows, x is quantised first, in scratch (docs/contract.md: the definition).
  /// Where it is in halves, y is add() of the products of both halves of k.
  virtual void gemm(Tensor y, Tensor x, Weight w) = 0;
  /// Measures what may serve such a product, for a second or so, and lets gemm() use the fastest
  /// from now on, here and in later processes (a file in the user's cache). No bits change. Leaves
  /// a product in y. Nothing but an explicit command calls this.
  virtual GemmTuning tune_gemm(Tensor y, Tensor x, Weight w) {
    return (void)y, (void)x, (void)w, GemmTuning{};
  }
  /// y[t, :] = table[tokens[t] - first_row, :]; zeros where that is no row of the table (another
  /// rank has it).
  virtual void embedding(Tensor y, Tensor tokens, Weight table, int64_t first_row) = 0;
  /// tokens[i] = sampled[source[i]] where source[i] >= 0: input tokens that the step before sampled
  /// and that the host has not seen. Then slot_tokens[slots[i]] = tokens[i] where slots[i] >= 0:
  /// which token each slot of the KV cache belongs to. All i32.
  virtual void feed_tokens(Tensor tokens, Tensor source, Tensor sampled, Tensor slots,
                           Tensor slot_tokens) = 0;
  /// y[i, :] = x[rows[i], :]
  virtual void gather_rows(Tensor y, Tensor x, Tensor rows) = 0;
  /// x += y, elementwise. [t, n]
  virtual void add(Tensor x, Tensor y) = 0;
  /// x[t, :] += bias[:]
  virtual void add_bias(Tensor x, Tensor bias) = 0;
  /// y = x / sqrt(mean(x^2) + eps), rounded to y's dtype, times w; over the last axis. [t, n] or
  /// [t, heads, n]. y may be x. (Hugging Face's RMSNorm: the normalised value is rounded before it
  /// is scaled.)
  virtual void rms_norm(Tensor y, Tensor x, Tensor w, float eps) = 0;
  /// Rotates the first rotary_dim elements of every head in place, halves paired (NeoX style): q
  /// [t, heads, d], k [t, kv_heads, d], positions [t] i32, cos_sin f32 [max_position, rotary_dim]:
  /// cosines, then sines, rotary_dim / 2 of each.
  virtual void rotary_embedding(Tensor q, Tensor k, Tensor positions, Tensor cos_sin) = 0;
  /// Puts k, v [t, kv_heads, d] into their slots: slot_mapping [t] i32; -1 stores nothing.
  virtual void store_kv(KvCache cache, Tensor k, Tensor v, Tensor slot_mapping) = 0;
  /// Paged, variable-length, causal attention with grouped queries, for prefill, chunks and decode
  /// alike: out, q [t, heads, d] (out may be q); softmax(scale * q k^T) v over the keys of the
  /// row's sequence up to its position; with a `window` (0: none) only over the last `window` of
  /// them, the row's own included.
  virtual void attention(Tensor out, Tensor q, KvCache cache, const Batch& batch, float scale,
                         int64_t window) = 0;
  /// y[t, i] = silu(gate_up[t, i]) * gate_up[t, n + i]; gate_up [t, 2n]
  virtual void silu_and_mul(Tensor y, Tensor gate_up) = 0;

  // -- Mixture of experts. The experts' weights are stacks.
  /// ids i32, weights f32 [t, k]: the k likeliest experts of each row of logits f32 [t, experts],
  /// the likeliest first, ties to the lower id; their weights are softmax(logits), over all
  /// experts, and with `normalise` divided by the sum of the k. A row that is not finite gives
  /// weights of NaN and k different ids that exist.
  virtual void moe_route(Tensor weights, Tensor ids, Tensor logits, bool normalise) = 0;
  /// y[t] = sum over i of weights[t, i] * f(ids[t, i], x[t]), added in the order of i in f32 and
  /// rounded once, with f(e, x) = down[e] silu_and_mul(gate_up[e] x): three operations that round
  /// to x's dtype as gemm() and silu_and_mul() do. x, y [t, h] (y may be x); weights f32 and ids
  /// i32 [t, k]; gate_up [experts, 2n, h], down [experts, h, n].
  virtual void moe_mlp(Tensor y, Tensor x, Tensor weights, Tensor ids, Weight gate_up, Weight down,
                       const MoeWorkspace& work) = 0;

  // -- Sampling: logits are f32 [rows, vocab]
  /// logits[row - first_row, id] += bias, where there is such a row, for the biases i32 [n, 4]: row
  /// of batch.logits_rows, token id, the bits of a f32, and the token that must be the row's own
  /// (batch.tokens) or -1. A bias of -inf masks, whatever else the token gets; of the others a
  /// token has one.
  virtual void bias_logits(Tensor logits, Tensor biases, const Batch& batch, int64_t first_row) = 0;
  /// logits[i, t] = -inf where mask_rows[i] >= 0 and bit t % 32 of masks[mask_rows[i], t / 32] is
  /// clear. mask_rows i32 [rows], masks i32 [any, (vocab + 31) / 32], contiguous.
  virtual void apply_token_masks(Tensor logits, Tensor mask_rows, Tensor masks) = 0;
  /// For each token among the first `position` of the row's sequence (slot_tokens [blocks,
  /// block_size] by its block table): logit = logit > 0 ? logit / repetition_penalty : logit *
  /// repetition_penalty. Then, with c > 0 of them from num_prompt_tokens on: logit -=
  /// frequency_penalty * c, logit -= presence_penalty. Row i of logits is row i of params.
  virtual void apply_penalties(Tensor logits, const SamplingBatch& params, Tensor slot_tokens,
                               Tensor block_tables) = 0;
  /// One token id per row (i32): argmax at temperature 0, else argmax of logit / temperature +
  /// Gumbel noise over the tokens that top_k, then top_p, then min_p leave (on the tempered
  /// distribution; the token that crosses top_p stays; ties go to the lower id: top_k keeps exactly
  /// k; top_p counts within what top_k left; min_p is relative to the likeliest). The noise of a
  /// token is a function of (seed, position, token id): ops/noise.h. A row with a NaN or +inf, or
  /// all -inf, gives -1.
  virtual void sample(Tensor token_ids, Tensor logits, const SamplingBatch& params) = 0;
  /// ids, logprobs [rows, 1 + k]: the chosen token, then the k likeliest (ties: lower id first);
  /// ranks [rows] i32 of the chosen one (1 is the likeliest). Natural logarithm of softmax(logits),
  /// accumulated in f32 or better in an order that depends on the row alone. A chosen id outside
  /// the vocabulary (-1 of a failed row) is taken as 0; a row that is not finite gives NaN, not a
  /// fault.
  virtual void top_logprobs(Tensor ids, Tensor logprobs, Tensor ranks, Tensor logits,
                            Tensor chosen) = 0;

  // -- Fusions
  /// The gated half of an MLP: y [t, n] = silu_and_mul(x w^T), w [2n, k]. gate_up [t,
  /// 2n] is room for what lies between; its contents afterwards are undefined.
  virtual void gemm_silu_and_mul(Tensor y, Tensor gate_up, Tensor x, Weight w) {
    gemm(gate_up, x, w);
    silu_and_mul(y, gate_up);
  }
  /// residual += x; y = rms_norm(residual). y may be x. Where there is a `reader`, the next
  /// operation is the product of y with that weight, and no other reads y: it may stay unwritten.
  virtual void add_rms_norm(Tensor y, Tensor residual, Tensor x, Tensor w, float eps,
                            Weight reader = {}) {
    (void)reader;
    add(residual, x);
    rms_norm(y, residual, w, eps);
  }
  /// residual += x w^T; y = rms_norm(residual), with add_rms_norm()'s `reader`. y may not be x.
  virtual void gemm_add_rms_norm(Tensor y, Tensor residual, Tensor x, Weight w, Tensor norm,
                                 float eps, Weight reader = {}) {
    gemm(y, x, w);
    add_rms_norm(y, residual, y, norm, eps, reader);
  }
  /// sample() of the logits x w^T, after apply_token_masks() where the rows are constrained.
  /// `logits` f32 [rows, vocab] is room for them; its contents afterwards are undefined.
  void gemm_sample(Tensor token_ids, Tensor logits, Tensor x, Weight w,
                   const SamplingBatch& params) {
    if (fused_gemm_sample(token_ids, x, w, params)) return;
    gemm(logits, x, w);
    if (params.has(kSampleConstrained))
      apply_token_masks(logits, params.token_mask, params.token_masks);
    sample(token_ids, logits, params);
  }
  /// The same without the logits. False, and nothing is done, where the backend needs them.
  virtual bool fused_gemm_sample(Tensor token_ids, Tensor x, Weight w,
                                 const SamplingBatch& params) {
    return (void)token_ids, (void)x, (void)w, (void)params, false;
  }
  /// logits f32 [t, experts] = x w^T, and moe_route() of them. Rows without a slot in slot_mapping
  /// (i32 [t], or undefined: all have one) are padding, and may get another row's.
  virtual void moe_router(Tensor weights, Tensor ids, Tensor logits, Tensor x, Weight w,
                          bool normalise, Tensor slot_mapping) {
    (void)slot_mapping;
    gemm(logits, x, w);
    moe_route(weights, ids, logits, normalise);
  }
  /// Rotates q and k, and stores k and v. What is left in k is unspecified: the cache has it.
  virtual void rope_store(Tensor q, Tensor k, Tensor v, const Batch& batch, Tensor cos_sin,
                          KvCache cache) {
    rotary_embedding(q, k, batch.positions, cos_sin);
    store_kv(cache, k, v, batch.slot_mapping);
  }
  /// Normalises every head of q and k (Qwen3), rotates them, and stores k and v. q_norm, k_norm
  /// [d].
  virtual void qk_norm_rope_store(Tensor q, Tensor k, Tensor v, Tensor q_norm, Tensor k_norm,
                                  float eps, const Batch& batch, Tensor cos_sin, KvCache cache) {
    rms_norm(q, q, q_norm, eps);
    rms_norm(k, k, k_norm, eps);
    rotary_embedding(q, k, batch.positions, cos_sin);
    store_kv(cache, k, v, batch.slot_mapping);
  }
  /// qkv [t, n] = x w^T, and qk_norm_rope_store() of its columns q, k and v, which lie side by side
  /// in this order; what is left in k and v is unspecified.
  void gemm_qk_norm_rope_store(Tensor qkv, Tensor q, Tensor k, Tensor v, Tensor x, Weight w,
                               Tensor q_norm, Tensor k_norm, float eps, const Batch& batch,
                               Tensor cos_sin, KvCache cache) {
    if (fused_gemm_qk_norm_rope_store(qkv, q, k, v, x, w, q_norm, k_norm, eps, batch, cos_sin,
                                      cache))
      return;
    gemm(qkv, x, w);
    qk_norm_rope_store(q, k, v, q_norm, k_norm, eps, batch, cos_sin, cache);
  }
  /// The same. False, and nothing is done, where the backend would need two steps.
  virtual bool fused_gemm_qk_norm_rope_store(Tensor qkv, Tensor q, Tensor k, Tensor v, Tensor x,
                                             Weight w, Tensor q_norm, Tensor k_norm, float eps,
                                             const Batch& batch, Tensor cos_sin, KvCache cache) {
    return (void)qkv, (void)q, (void)k, (void)v, (void)x, (void)w, (void)q_norm, (void)k_norm,
           (void)eps, (void)batch, (void)cos_sin, (void)cache, false;
  }
  /// qk_norm_rope_store(), without norms rope_store(), and attention() of the rows; what is left in
  /// q, k and v is unspecified.
  void rope_store_attention(Tensor out, Tensor q, Tensor k, Tensor v, const HeadNorms& norms,
                            const Batch& batch, Tensor cos_sin, KvCache cache, float scale,
                            int64_t window) {
    if (fused_rope_store_attention(out, q, k, v, norms, batch, cos_sin, cache, scale, window))
      return;
    if (norms.q.defined())
      qk_norm_rope_store(q, k, v, norms.q, norms.k, norms.eps, batch, cos_sin, cache);
    else
      rope_store(q, k, v, batch, cos_sin, cache);
    attention(out, q, cache, batch, scale, window);
  }
  /// The same. False, and nothing is done, where the backend would need two steps.
  virtual bool fused_rope_store_attention(Tensor out, Tensor q, Tensor k, Tensor v,
                                          const HeadNorms& norms, const Batch& batch,
                                          Tensor cos_sin, KvCache cache, float scale,
                                          int64_t window) {
    return (void)out, (void)q, (void)k, (void)v, (void)norms, (void)batch, (void)cos_sin,
           (void)cache, (void)scale, (void)window, false;
  }
  /// All layers of a decode step: batch row i is the one query row of sequence i, its last
  /// (padding: a context of 0). residual [t, hidden]: the embeddings, then the stream without the
  /// last layer's output, which is x. False, and nothing is done, where the backend has no such
  /// kernel or it does not take these sizes. The one fusion without a body: its definition is the
  /// layers themselves, operation by operation (models/layer_schedule.h), and they know more than a
  /// stack of weights says, such as how ranks sum.
  virtual bool decoder_layers(Tensor x, Tensor residual, const DecoderStack& stack,
                              std::span<const KvCache> caches, const Batch& batch) {
    return (void)x, (void)residual, (void)stack, (void)caches, (void)batch, false;
  }
};

struct BackendOptions {
  int num_threads = 0;  // CPU; 0: OMP_NUM_THREADS or the physical cores
};

/// Opens a device: "auto", "cpu", "cuda" or "cuda:N". "auto" takes a GPU where the CUDA module, a
/// driver and a device are found, else the CPU; `note` then says in one sentence what was found and
/// chosen. Throws Error(device) if the named device is not there.
std::unique_ptr<Backend> make_backend(const std::string& device, const BackendOptions& options,
                                      std::string* note = nullptr);

/// The CPU backend: the definition of right.
std::unique_ptr<Backend> make_cpu_backend(const BackendOptions& options);

}  // namespace nanovllm
