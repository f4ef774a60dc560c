// The decoder layers' kernel for packed int4 weights (decoder_int4.cuh), and how it cuts them.
#include "ops/cuda/decoder/decoder_experts.cuh"
#include "ops/cuda/decoder/decoder_kernel.cuh"

namespace nanovllm::decoder {

/// Of eight rows of k columns.
static int64_t packed_row_bytes(int64_t k) { return k / kPackedColumns * kRecordBytes; }

/// Eights of rows of a tile, which a stage has of 128 columns at least; the warps that multiply so
/// many, two each.
constexpr int64_t kMostEights = kStageBytes / kRecordBytes;
constexpr int64_t warps_of(int64_t eights) {
  return std::max<int64_t>(kMultiplying, (eights + 1) / 2);
}
static_assert(warps_of(kMostEights) <= kWarps);

/// cut_matrix() of records. A tile is no part of two: its columns divide `whole`, if that is not 0.
/// Cycles of 128 columns of k: of a warp's products, or of the block's share of memory; products of
/// several warps in a quarter of the SM end before that.
static MatrixCut cut_int4(int64_t columns, int64_t k, int halves, int blocks, int64_t whole = 0) {
  constexpr int64_t kOfProducts = 300, kBytes = 14, kAround = 1900;
  const int64_t units = columns / kPackedRows, chunks = k / kPackedColumns;
  int64_t best = 1, least = INT64_MAX;
  for (int64_t size = 1; size * halves <= kMostEights; ++size) {
    if (whole % (size * kPackedRows) != 0) continue;
    const int64_t of_chunk = std::max(kOfProducts, size * halves * kRecordBytes / kBytes),
                  cost = ceil_div(ceil_div(units, size), blocks) * (chunks * of_chunk + kAround);
    if (cost < least) least = cost, best = size;
  }
  MatrixCut cut{};
  cut.columns = static_cast<int>(columns);
  cut.columns_of_tile = static_cast<int>(best * kPackedRows);
  cut.tiles = static_cast<int>(ceil_div(units, best));
  cut.groups = static_cast<int>(best) * halves;
  cut.warps = static_cast<int>(warps_of(cut.groups));
  cut.atoms = static_cast<int>(k / kAtomDepth);
  const auto of_stage =
      static_cast<int>(std::min<int64_t>(chunks, kStageBytes / (cut.groups * kRecordBytes)));
  cut.stage_atoms = of_stage * kPackedColumns / kAtomDepth;
  cut.stages = static_cast<int>(ceil_div(chunks, of_stage));
  return cut;
}

/// Down of all chosen experts.
static MatrixCut cut_int4_down(int64_t per_token, int64_t columns, int64_t k) {
  const int64_t chunks = k / kPackedColumns, of_stage = chunks % 3 == 0   ? 3
                                                        : chunks % 2 == 0 ? 2
                                                                          : 1;
  static_assert(3 * kExpertColumns / kPackedRows * kRecordBytes <= kExpertBytes);
  MatrixCut cut = cut_down(per_token, columns, k);
  cut.stage_atoms = static_cast<int>(of_stage) * kPackedColumns / kAtomDepth;
  cut.stages = static_cast<int>(per_token / kExpertsAtOnce * (chunks / of_stage));
  return cut;
}

/// describe_experts() of records: boxes that are what a stage holds of a tile, of down what it
/// holds of one expert's.
static bool describe_int4_experts(Arguments& a, EncodeMap encoder, const DecoderStack& stack,
                                  int64_t layer_stride, int blocks) {
  if (!takes_experts(a, stack)) return false;
  const DecoderWeights& w = stack.layers.front();
  const int64_t layers = static_cast<int64_t>(stack.layers.size()),
                per_token = stack.experts_per_token, n = w.down.k();
  Mixture& m = a.mixture;
  describe_mixture(m, stack);
  const auto describe = [&](Product product, const Weight& weight, int halves, int64_t rows,
                            int(&steps)[2]) {
    const MatrixCut& cut = a.cuts[product];
    const ExpertAxis axis(weight.data, layers, layer_stride, 0);
    std::copy_n(axis.steps, 2, steps);
    const int64_t chunks = weight.k() / kPackedColumns, units = weight.n() / kPackedRows / halves,
                  row = chunks * kRecordBytes;
    return axis.fits() &&
           encode_map<5>(
               encoder, a.maps[product], weight.data.data,
               {kRecordBytes / kMapUnit, chunks, units, halves, axis.size},
               {kRecordBytes, row, row * units, axis.stride},
               {kRecordBytes / kMapUnit, chunks_of_stage(cut), rows / kPackedRows, halves, 1},
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_DATA_TYPE_INT64,
               CU_TENSOR_MAP_SWIZZLE_NONE) == CUDA_SUCCESS;
  };
  a.cuts[kGateUp] = cut_int4(per_token * n, w.gate_up.k(), 2, blocks, n);
  a.cuts[kDown] = cut_int4_down(per_token, w.down.n(), n);
  m.tiles = static_cast<int>(n / a.cuts[kGateUp].columns_of_tile);
  return describe(kGateUp, w.gate_up, 2, a.cuts[kGateUp].columns_of_tile, m.gate_up_steps) &&
         describe(kDown, w.down, 1, kExpertColumns, m.down_steps);
}

bool describe_int4(Arguments& a, EncodeMap encoder, const DecoderStack& stack, int64_t layer_stride,
                   int blocks) {
  const bool mixture = stack.layers.front().router.defined();
  const auto takes = [](const Weight& w, int64_t halves) {
    return w.data.packed > 0 && w.format.numbers == WeightFormat::int4 &&
           !w.format.quantises_rows() && (w.is_stack() || w.data.contiguous()) &&
           packed_record_bytes(w.format, w.k()) == kRecordBytes &&
           w.n() % (halves * kPackedRows) == 0;
  };
  const DecoderWeights& w = stack.layers.front();
  if (!all_weights(stack, takes) || w.down.is_stack() != mixture ||
      w.gate_up.is_stack() != mixture || (mixture && w.o.format.in_halves))
    return false;
  // In boxes that are what a stage holds of a tile: first all of gate, or of the first half of k,
  // then all of up, or of the second.
  const auto describe = [&](Product product, const Weight& w, const Tensor& bias) {
    MatrixCut& cut = a.cuts[product];
    const bool gated = product == kGateUp, in_halves = w.format.in_halves;
    const int64_t n = w.n() / (gated ? 2 : 1), k = w.k() / (in_halves ? 2 : 1),
                  chunks = k / kPackedColumns, units = n / kPackedRows,
                  row = packed_row_bytes(w.k()),
                  next = in_halves ? packed_row_bytes(k) : row * units;
    const int halves = gated || in_halves ? 2 : 1;
    if (k % kPackedColumns != 0) return false;
    cut = cut_int4(n, k, halves, blocks);
    cut.beside = in_halves;
    if (bias.defined()) cut.bias = reinterpret_cast<const __nv_bfloat16*>(bias.data);
    return encode_map<5>(encoder, a.maps[product], w.data.data,
                         {kRecordBytes / kMapUnit, chunks, units, halves,
                          static_cast<int64_t>(stack.layers.size())},
                         {kRecordBytes, row, next, std::max<int64_t>(layer_stride, 16)},
                         {kRecordBytes / kMapUnit, chunks_of_stage(cut),
                          cut.columns_of_tile / kPackedRows, halves, 1},
                         CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_DATA_TYPE_INT64,
                         CU_TENSOR_MAP_SWIZZLE_NONE) == CUDA_SUCCESS;
  };
  if (!describe(kQkv, w.qkv, w.qkv_bias) || !describe(kOut, w.o, w.o_bias)) return false;
  if (mixture) return describe_int4_experts(a, encoder, stack, layer_stride, blocks);
  return describe(kGateUp, w.gate_up, w.gate_up_bias) && describe(kDown, w.down, w.down_bias);
}

template <int kHeadDim, class C>
Kernel* int4_kernel(const Arguments& a) {
  const auto of = [&]<Scales kScales>() -> Kernel* {
    if (a.mixture.per_token == 0)
      return has_single_row(a)
                 ? decoder_layers_kernel<kHeadDim, C, false, false, kScales, Halves::none, true>
                 : decoder_layers_kernel<kHeadDim, C, false, false, kScales>;
    return a.world > 1
               ? decoder_layers_kernel<kHeadDim, C, true, false, kScales, Halves::none, false>
               : decoder_layers_kernel<kHeadDim, C, true, false, kScales>;
  };
  return a.is_coarse ? of.template operator()<Scales::coarse_groups>()
                     : of.template operator()<Scales::groups>();
}
template Kernel* int4_kernel<64, __nv_bfloat16>(const Arguments&);
template Kernel* int4_kernel<64, E4m3>(const Arguments&);
template Kernel* int4_kernel<128, __nv_bfloat16>(const Arguments&);
template Kernel* int4_kernel<128, E4m3>(const Arguments&);

}  // namespace nanovllm::decoder
