// All layers of a decode step of few rows in one kernel.
//
// At batch 1 a step reads every weight once and computes next to nothing: it is bound by memory,
// if the memory never idles. One kernel per operation idles between kernels, and while the first
// bytes of each are on their way. Here one block per SM stays for the whole step; one of its warps
// does nothing but bring the block's share of the weights, and of the keys and values, through a
// ring of stages in shared memory, in the order in which the block will need them, across
// operations and layers, as far ahead as the ring is long. Only activations wait for each other:
// they travel through the L2 cache in words that say of which layer they are (decoder_layers.cuh).
//
// The cost of a layer beside its bytes is latency: the chain of tensor core steps of each product
// (its order is fixed: docs/contract.md) and six exchanges between blocks. Three things made it far
// slower than it need be: copies of weights on their way, behind which the exchange's words queue
// (most_underway(), pace_products()); a ring too short for memory to work on while an exchange
// lasts (Layout, place_early()); and code: what a layer runs through should fit into the
// instruction cache, so all products share one piece of straight code.
//
// For one row there are kernels of their own (has_single_row()), and for the usual one of a small
// model another (is_lean()): of the same code, but what that step never needs is not there.
//
//   norm, qkv      every block has the residual stream and normalises it for itself
//   attention      units of (row, KV head, chunk): decoder_attention.cuh; then the merge of chunks
//   o              |
//   norm, gate_up  | decoder_gemm.cuh; gate and up of an output are in one thread
//   down           |
//
// Weights of 8 bits take the same way, and rows are quantised where they become an operand:
// decoder_fp8.cuh.
//
// Of one token, a mixture of experts may take the MLP's place: decoder_mixture.cuh.
//
// No deadlock: the launch is cooperative, so all blocks run at once, and none waits for a result
// that depends on what it has yet to do.
#include <bit>
#include <numbers>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/decoder/decoder_cut.cuh"
#include "ops/cuda/decoder/decoder_kernel.cuh"

namespace nanovllm {
namespace {

using decoder::MatrixCut;

/// The bytes from each tensor to the next layer's: one number for all of them, or -1.
int64_t common_stride(std::span<const Tensor> of_layer, std::span<const Tensor> of_next) {
  int64_t stride = -1;
  for (size_t i = 0; i < of_layer.size(); ++i) {
    if (of_layer[i].defined() != of_next[i].defined()) return -1;
    if (!of_layer[i].defined()) continue;
    const int64_t here = of_next[i].data - of_layer[i].data;
    if (here <= 0 || here % 16 != 0 || (stride >= 0 && here != stride)) return -1;
    stride = here;
  }
  return stride;
}

/// Fills the arguments that the weights give; false where the kernel does not fit them.
bool describe_weights(decoder::Arguments& a, EncodeMap encoder, const DecoderStack& stack,
                      int blocks) {
  const auto list = [](const DecoderWeights& w) {
    return std::array{w.input_norm, w.post_norm, w.q_norm,     w.k_norm,       w.qkv.data,
                      w.qkv_bias,   w.o.data,    w.o_bias,     w.gate_up.data, w.gate_up_bias,
                      w.down.data,  w.down_bias, w.router.data};
  };
  const DecoderWeights& first = stack.layers.front();
  const int64_t layers = static_cast<int64_t>(stack.layers.size());
  int64_t stride = 0;
  for (size_t i = 0; i < stack.layers.size(); ++i) {
    a.window[i] = static_cast<int>(stack.layers[i].window);
    if (i == 0) continue;
    const int64_t here = common_stride(list(stack.layers[i - 1]), list(stack.layers[i]));
    if (here < 0 || (i > 1 && here != stride)) return false;
    stride = here;
  }
  a.layer_stride = stride / static_cast<int64_t>(sizeof(bf16));
  if (stride % decoder::kAtomRow != 0 || layers * (stride / decoder::kAtomRow) > INT32_MAX)
    return false;
  a.layer_atoms = static_cast<int>(stride / decoder::kAtomRow);
  const auto vector = [](const Tensor& t) { return t.defined() ? device_ptr<bf16>(t) : nullptr; };
  a.norms[0] = vector(first.input_norm);
  a.norms[1] = vector(first.post_norm);
  a.q_norm = vector(first.q_norm);
  a.k_norm = vector(first.k_norm);
  const WeightFormat of_qkv = first.qkv.format;
  const bool fp8 = of_qkv.quantises_rows();
  a.has_integers = of_qkv.numbers == WeightFormat::int8;
  // An H100, Qwen3-8B: separate operations take 11 to 15 % longer at one row, as long at two, and
  // 16 % less at four.
  if (fp8 && a.rows > 1) return false;
  a.is_int4 = of_qkv.numbers == WeightFormat::int4;
  const bool both_in_halves = first.o.format.in_halves && first.down.format.in_halves;
  const auto map_matrix = [&](MatrixCut& cut, CUtensorMap& map, int halves, const Weight& weight,
                              const Tensor& bias, const WeightFormat& like) {
    const Tensor& w = weight.data;
    const int64_t n = w.shape[0] / halves, row = w.shape[1] * weight.format.bits() / 8;  // bytes
    WeightFormat format = weight.format;
    format.in_halves = false;
    if (format != decoder::format_of(like, w.shape[1]) || (w.packed > 0) != format.is_quantised() ||
        (weight.format.in_halves && w.shape[1] % (2 * decoder::kAtomDepth) != 0) ||
        !w.contiguous() || n % 8 != 0 || row % decoder::kAtomRow != 0)
      return false;
    // E4M3 numbers are copied and cut as half as many of bf16.
    const int64_t columns = row / static_cast<int64_t>(sizeof(bf16));
    const bool beside =
        weight.format.in_halves && both_in_halves && decoder::has_room_beside(a, n, blocks);
    cut = beside ? decoder::cut_matrix(n, columns / 2, 2, blocks)
                 : decoder::cut_matrix(n, columns, halves, blocks);
    cut.beside = beside;
    if (weight.format.in_halves && !beside) cut.second_atoms = cut.atoms / 2;
    cut.bias = vector(bias);
    return decoder::encode_weights(encoder, map, w.data, cut, beside ? 2 : halves, n, row,
                                   (layers - 1) * a.layer_atoms + cut.atoms,
                                   beside ? row / 2 : n * row);
  };
  const auto matrix = [&](decoder::Product product, const Weight& w, const Tensor& bias) {
    if (fp8) decoder::place_scales(a, product, w);
    return map_matrix(a.cuts[product], a.maps[product], product == decoder::kGateUp ? 2 : 1, w,
                      bias, of_qkv);
  };
  const auto map_router = [&] {
    return map_matrix(a.cuts[decoder::kRouter], a.maps[decoder::kRouter], 1, first.router, {},
                      WeightFormat::bf16);
  };
  if (a.is_int4)
    return (!first.router.defined() || map_router()) &&
           decoder::describe_int4(a, encoder, stack, stride, blocks);
  if (!matrix(decoder::kQkv, first.qkv, first.qkv_bias) ||
      !matrix(decoder::kOut, first.o, first.o_bias))
    return false;
  if (of_qkv.rows == WeightFormat::Rows::tensor) return false;
  if (first.router.defined())
    return !first.o.format.in_halves && map_router() &&
           decoder::describe_experts(a, encoder, stack, stride);
  return matrix(decoder::kGateUp, first.gate_up, first.gate_up_bias) &&
         matrix(decoder::kDown, first.down, first.down_bias);
}

/// The kernel of such weights, or that of a step that has_single_row(). C: of the cache's elements.
template <int kHeadDim, class C, decoder::Scales kScales, decoder::Halves kHalves>
decoder::Kernel* kernel_of(bool single) {
  using decoder::decoder_layers_kernel;
  return single ? decoder_layers_kernel<kHeadDim, C, false, false, kScales, kHalves, true>
                : decoder_layers_kernel<kHeadDim, C, false, false, kScales, kHalves>;
}

template <int kHeadDim, class C>
decoder::Kernel* kernel_for(const decoder::Arguments& a, bool lean) {
  using decoder::decoder_layers_kernel, decoder::Scales;
  using decoder::Halves;
  if (a.is_int4) return decoder::int4_kernel<kHeadDim, C>(a);
  if (lean) return decoder_layers_kernel<128, C, false, true, Scales::none, Halves::beside>;
  const bool plain = !a.scales[decoder::kQkv], single = decoder::has_single_row(a);
  if (plain && decoder::has_halves_beside(a))
    return a.rows > 4
               ? decoder_layers_kernel<kHeadDim, C, false, false, Scales::none, Halves::beside_many>
               : kernel_of<kHeadDim, C, Scales::none, Halves::beside>(single);
  if (plain && (a.cuts[decoder::kOut].second_atoms > 0 || a.cuts[decoder::kDown].second_atoms > 0))
    return decoder_layers_kernel<kHeadDim, C, false, false, Scales::none, Halves::in_turn>;
  if (a.mixture.per_token > 0)
    return a.world > 1
               ? decoder_layers_kernel<kHeadDim, C, true, false, Scales::none, Halves::none, false>
           : plain ? decoder_layers_kernel<kHeadDim, C, true, false>
                   : decoder_layers_kernel<kHeadDim, C, true, false, Scales::blocks>;
  if (plain) return decoder_layers_kernel<kHeadDim, C, false, false>;
  if (a.has_integers) return kernel_of<kHeadDim, C, Scales::rows_of_integers, Halves::none>(single);
  if (a.scale_stride[decoder::kQkv] == 0)
    return kernel_of<kHeadDim, C, Scales::rows, Halves::none>(single);
  if (!decoder::has_halves_beside(a))
    return decoder_layers_kernel<kHeadDim, C, false, false, Scales::blocks>;
  return decoder::has_high_tiles(a)
             ? kernel_of<kHeadDim, C, Scales::blocks, Halves::beside_high>(single)
             : kernel_of<kHeadDim, C, Scales::blocks, Halves::beside>(single);
}

/// Where ranks leave their parts of sums; false where there is not enough room.
bool place_parts(decoder::Arguments& a, const PeerTable* peers) {
  a.rank = peers ? peers->rank : 0;
  a.world = peers ? peers->world : 1;
  a.part_words = int64_t{a.rows} * a.hidden / 2;
  if (!peers) return true;
  for (int r = 0; r < a.world; ++r) a.parts[r] = reinterpret_cast<uint64_t*>(peers->layers[r]);
  a.stop = peers->stop;
  a.total_part_words = static_cast<int64_t>(PeerTable::layers_bytes(a.world) / sizeof(uint64_t));
  return 4 * a.world * a.part_words <= a.total_part_words;
}

}  // namespace

template <int kHeadDim>
bool CudaBackend::launch_decoder_layers(decoder::Arguments& a) {
  a.operand_bytes = decoder::operand_bytes(a);
  a.most_underway = decoder::most_underway(a, num_sms_);
  const auto fixed = [&] { return decoder::Layout::of<kHeadDim>(a).end; };
  const auto available = static_cast<int64_t>(max_shared_bytes_);
  a.stages = static_cast<int>(
      std::min<int64_t>(decoder::most_stages(a), (available - fixed()) / decoder::kStageBytes));
  if (a.stages < decoder::kFewestStages) return false;
  const int64_t of_stages = int64_t{a.stages} * decoder::kStageBytes;
  decoder::place_early(a, num_sms_, (available - fixed() - of_stages) / 128 * 128);
  decoder::pace_products(a);
  const bool lean = kHeadDim == 128 && decoder::is_lean(a, num_sms_);
  decoder::Kernel* const kernel = a.has_e4m3_cache ? kernel_for<kHeadDim, E4m3>(a, lean)
                                                   : kernel_for<kHeadDim, __nv_bfloat16>(a, lean);
  const decoder::Layout layout = decoder::Layout::of<kHeadDim>(a);
  a.operand_place = static_cast<int>(of_stages);
  a.shared_place = static_cast<int>(of_stages + layout.shared);
  a.residual_place = static_cast<int>(of_stages + layout.residual);
  const auto shared_bytes = static_cast<size_t>(fixed() + of_stages);
  allow_shared_memory(reinterpret_cast<const void*>(kernel), max_shared_bytes_);
  int resident = 0;
  cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, decoder::kLaunched,
                                                           shared_bytes));
  if (resident < 1) return false;
  const cudaError_t status = launch_on_all_sms(kernel, decoder::kLaunched, shared_bytes, a);
  if (status == cudaSuccess) return true;
  // The other ranks have agreed on this kernel, and wait for this one's words.
  if (a.world > 1)
    fail_launch(reinterpret_cast<const void*>(kernel), status, grid_size(num_sms_),
                decoder::kLaunched, shared_bytes);
  (void)cudaGetLastError();
  can_run_cooperatively_ = false;  // separate operations from now on
  return false;
}

bool CudaBackend::whole_decoder_layers(Tensor x, Tensor residual, const DecoderStack& stack,
                                       std::span<const KvCache> caches, const Batch& batch) {
  const int64_t rows = x.shape[0], hidden = x.shape[1], d = stack.head_dim;
  if (!can_run_cooperatively_ || x.dtype != DType::bf16 || caches.empty() ||
      (caches[0].k.dtype != DType::bf16 && caches[0].k.dtype != DType::e4m3) ||
      stack.layers.empty() || stack.layers.size() > decoder::kMaxLayers || rows < 1 ||
      rows > decoder::kMaxRows || hidden % 64 != 0 || stack.heads % stack.kv_heads != 0 ||
      stack.heads / stack.kv_heads > decoder::kMaxGroup || (d != 64 && d != 128) ||
      stack.cos_sin.shape[1] > d || stack.cos_sin.shape[1] % 16 != 0 || !wide_rows({x, residual}))
    return false;
  check(batch.num_seqs() == rows && batch.num_tokens() == rows && residual.shape == x.shape &&
            caches.size() == stack.layers.size(),
        "decoder_layers: {} and {} for {} tokens of {} sequences", x.describe(),
        residual.describe(), batch.num_tokens(), batch.num_seqs());
  use_device();
  decoder::Arguments a{};
  a.x = device_ptr<bf16>(x);
  a.residual = device_ptr<bf16>(residual);
  a.x_stride = x.stride[0];
  a.residual_stride = residual.stride[0];
  a.positions = batch.positions.ptr<int32_t>();
  a.slots = batch.slot_mapping.ptr<int32_t>();
  a.context_lens = batch.context_lens.ptr<int32_t>();
  a.block_tables = batch.block_tables.ptr<int32_t>();
  a.table_stride = batch.block_tables.stride[0];
  a.cos_sin = stack.cos_sin.ptr<float>();
  a.cos_sin_stride = stack.cos_sin.stride[0];
  a.eps = stack.eps;
  a.scale_log2 = stack.scale * std::numbers::log2e_v<float>;
  a.layers = static_cast<int>(stack.layers.size());
  a.rows = static_cast<int>(rows);
  a.hidden = static_cast<int>(hidden);
  a.inverse_hidden =
      std::has_single_bit(static_cast<uint64_t>(hidden)) ? 1.0f / static_cast<float>(hidden) : 0.0f;
  a.heads = static_cast<int>(stack.heads);
  a.kv_heads = static_cast<int>(stack.kv_heads);
  a.group = a.heads / a.kv_heads;
  a.half_rotary = static_cast<int>(stack.cos_sin.shape[1] / 2);
  a.norm_threads = static_cast<int>(row_threads(hidden));
  a.epochs = reinterpret_cast<unsigned*>(exchange_.get());
  a.last_epoch = last_epoch_ > 0 ? last_epoch_ : decoder::kLastEpoch;
  a.words = reinterpret_cast<uint64_t*>(exchange_.get() + decoder::kEpochBytes);
  a.total_words = static_cast<int64_t>((kExchangeBytes - decoder::kEpochBytes) / sizeof(uint64_t));
  const auto is_coarse = [&](const Weight& w, int) { return !has_any(fine_, w); };
  if (!place_parts(a, peers_) || !describe_weights(a, encode_map_, stack, num_sms_) ||
      (a.is_int4 && has_uneven_weights()) || !decoder::describe_caches(a, encode_map_, caches) ||
      place_words(a, d, batch.max_context_len) > a.total_words || are_faster_apart(a, d, num_sms_))
    return false;
  a.is_coarse = a.is_int4 && decoder::all_weights(stack, is_coarse);
  return d == 64 ? launch_decoder_layers<64>(a) : launch_decoder_layers<128>(a);
}

}  // namespace nanovllm
