// A decode step of few rows on GPUs that have no kernel of all layers (decoder_layers_sm90a.cu):
//
//   rotation, store, attention        operations
//   o; norm, gate_up; down; norm, qkv one kernel (layer_products.cuh), of the next layer's norm and
//                                     qkv
#include <algorithm>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/mma/layer_products.cuh"

namespace nanovllm {
namespace {

using namespace layer_products;

// Of exchange_: the blocks' epochs; the words; what other kernels read and write. The words' place
// is always the same, so that nothing else looks like one.
constexpr size_t kEpochBytes = 4096, kWordBytes = size_t{8} << 20;
constexpr uint32_t kLastEpoch = 0xf0000000;

/// Elements of a step's longest operand, at most: every block receives it whole. Measured on an
/// H100 with code for sm_80: 1 to 4 rows of the 0.6B and one of the 8B take less time than separate
/// operations, 8 rows of the 0.6B and two of the 8B take more.
constexpr int64_t kMostOperand = 12288;

/// The kernel with the longest rings that fit, and its shared memory; null where none does.
struct Fit {
  void (*kernel)(Arguments) = nullptr;
  size_t shared_bytes = 0;
};
Fit fit(int64_t rows, int64_t hidden, int64_t longest, size_t available) {
  const auto bytes = [&](int stages) {
    return static_cast<size_t>(kWarps * stages * kStageBytes +
                               rows * ((hidden + longest) * 2 + kOperandPad) +
                               kHalfDepth * 2);  // half a stage is read behind the last row
  };
  constexpr size_t kDeclared = 2048;  // at most, by the kernel itself
  if (bytes(8) + kDeclared <= available) return {layer_products_kernel<8>, bytes(8)};
  if (bytes(6) + kDeclared <= available) return {layer_products_kernel<6>, bytes(6)};
  if (bytes(4) + kDeclared <= available) return {layer_products_kernel<4>, bytes(4)};
  return {};
}

bool is_plain(const Weight& w) {
  return w.defined() && w.format.numbers == WeightFormat::bf16 && !w.data.packed &&
         (!w.format.in_halves || w.k() % (2 * kDepth) == 0) && !w.is_stack() &&
         w.data.contiguous() && wide_rows({w.data}) && w.n() % (2 * kUnit) == 0 &&
         w.k() % kHalfDepth == 0;
}

/// Whether all layers have the first one's sizes, and weights that the kernel takes.
bool are_plain(const DecoderStack& stack, int64_t hidden) {
  const int64_t heads = stack.heads * stack.head_dim, kv = stack.kv_heads * stack.head_dim;
  return std::ranges::all_of(stack.layers, [&](const DecoderWeights& w) {
    return !w.router.defined() && is_plain(w.qkv) && is_plain(w.o) && is_plain(w.gate_up) &&
           is_plain(w.down) && wide_rows({w.input_norm, w.post_norm}) &&
           w.qkv.n() == heads + 2 * kv && w.qkv.k() == hidden && w.o.n() == hidden &&
           w.o.k() == heads && w.gate_up.k() == hidden && w.down.n() == hidden &&
           w.gate_up.n() == 2 * w.down.k() && w.down.k() == stack.layers.front().down.k();
  });
}

Element* vector(const Tensor& t) { return t.defined() ? device_ptr<bf16>(t) : nullptr; }

Matrix matrix(const Weight& w, const Tensor& bias, const Tensor& y, uint64_t* words,
              bool is_gated = false) {
  const int64_t n = w.n(), k = w.k(), chain = w.format.in_halves ? k / 2 : k;
  return {.w = device_ptr<bf16>(w.data),
          .bias = vector(bias),
          .y = vector(y),
          .words = words,
          .n = static_cast<int>(n),
          .k = static_cast<int>(k),
          .units = static_cast<int>(n / (is_gated ? 2 : 1) / kUnit),
          .chain = static_cast<int>(chain),
          .second = is_gated    ? n / 2 * k
                    : chain < k ? chain
                                : 0};
}

}  // namespace

bool CudaBackend::decoder_layers(Tensor x, Tensor residual, const DecoderStack& stack,
                                 std::span<const KvCache> caches, const Batch& batch) {
#ifdef NANOVLLM_CUDA_HOPPER
  if (is_hopper_) return whole_decoder_layers(x, residual, stack, caches, batch);
#endif
  const int64_t rows = x.shape[0], hidden = x.shape[1], d = stack.head_dim;
  if (!can_run_cooperatively_ || peers_ || x.dtype != DType::bf16 || stack.layers.empty() ||
      rows < 1 || rows > kMostRows || !x.contiguous() || !wide_rows({x, residual}) ||
      num_sms_ * sizeof(uint32_t) > kEpochBytes || !are_plain(stack, hidden))
    return false;
  check(batch.num_seqs() == rows && batch.num_tokens() == rows && residual.shape == x.shape &&
            caches.size() == stack.layers.size(),
        "decoder_layers: {} and {} for {} tokens of {} sequences", x.describe(),
        residual.describe(), batch.num_tokens(), batch.num_seqs());
  const int64_t inner = stack.layers.front().down.k(), q_size = stack.heads * d,
                kv_size = stack.kv_heads * d, of_stream = rows * hidden / 2;  // words
  const int64_t longest = std::max({hidden, inner, q_size});
  const Fit chosen = fit(rows, hidden, longest, max_shared_bytes_);
  if (!chosen.kernel || rows * longest > kMostOperand ||
      (2 * of_stream + rows * inner / 2) * sizeof(uint64_t) > kWordBytes)
    return false;
  std::byte* free = exchange_.get() + kEpochBytes + kWordBytes;
  const auto take = [&](int64_t columns) {
    const Tensor t(free, DType::bf16, {rows, columns}, x.device);
    free += ceil_div(static_cast<int64_t>(t.bytes()), 256) * 256;
    return t;
  };
  const Tensor qkv = take(q_size + 2 * kv_size), heads = take(q_size),
               streams[2] = {take(hidden), take(hidden)};
  if (free > exchange_.get() + kExchangeBytes) return false;
  const Tensor q = qkv.cols(0, q_size).split(d), k = qkv.cols(q_size, q_size + kv_size).split(d),
               v = qkv.cols(q_size + kv_size, q_size + 2 * kv_size).split(d);

  const DecoderWeights& first = stack.layers.front();
  rms_norm(x, residual, first.input_norm, stack.eps);
  gemm(qkv, x, first.qkv);
  if (first.qkv_bias.defined()) add_bias(qkv, first.qkv_bias);
  auto* words = reinterpret_cast<uint64_t*>(exchange_.get() + kEpochBytes);
  Arguments a{};
  a.heads = vector(heads);
  a.epochs = reinterpret_cast<uint32_t*>(exchange_.get());
  a.last_epoch = last_epoch_ > 0 ? last_epoch_ : kLastEpoch;
  a.all_words = words;
  a.total_words = kWordBytes / sizeof(uint64_t);
  a.rows = static_cast<int>(rows);
  a.hidden = static_cast<int>(hidden);
  a.norm_warps = static_cast<int>(row_threads(hidden)) / kWarp;
  a.eps = stack.eps;
  for (size_t i = 0; i < stack.layers.size(); ++i) {
    const DecoderWeights& w = stack.layers[i];
    rope_store_attention(heads.split(d), q, k, v, {w.q_norm, w.k_norm, stack.eps}, batch,
                         stack.cos_sin, caches[i], stack.scale, w.window);
    const bool is_last = i + 1 == stack.layers.size();
    // The first block writes the next stream while others read this one.
    const Tensor &stream = i == 0 ? residual : streams[i % 2],
                 &next_stream = is_last && i > 0 ? residual : streams[(i + 1) % 2];
    a.stream = vector(stream);
    a.next_stream = vector(next_stream);
    a.stream_stride = stream.stride[0];
    a.next_stride = next_stream.stride[0];
    a.post_norm = vector(w.post_norm);
    a.products[kOut] = matrix(w.o, w.o_bias, {}, words);
    a.products[kDown] = matrix(w.down, w.down_bias, is_last ? x : Tensor{}, words + of_stream);
    a.products[kGateUp] = matrix(w.gate_up, w.gate_up_bias, {}, words + 2 * of_stream, true);
    a.count = kQkv;
    if (!is_last) {
      const DecoderWeights& next = stack.layers[i + 1];
      a.products[kQkv] = matrix(next.qkv, next.qkv_bias, qkv, nullptr);
      a.next_norm = vector(next.input_norm);
      a.count = kProducts;
    }
    const cudaError_t status = launch_on_all_sms(chosen.kernel, kThreads, chosen.shared_bytes, a);
    if (status == cudaSuccess) continue;
    if (i > 0)
      fail_launch(reinterpret_cast<const void*>(chosen.kernel), status, grid_size(num_sms_),
                  kThreads, chosen.shared_bytes);
    (void)cudaGetLastError();
    can_run_cooperatively_ = false;  // separate operations from now on; the stream is as it was
    return false;
  }
  if (stack.layers.size() == 1) copy(residual, streams[1]);
  return true;
}

}  // namespace nanovllm
