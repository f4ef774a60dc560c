// The decoder layers' kernel for packed int4 weights (decoder_int4.cuh), and how it cuts them.
#include "ops/cuda/decoder/decoder_kernel.cuh"

namespace nanovllm::decoder {

/// cut_matrix() of records. Cycles of 128 columns of k: of a warp's instructions, or of the block's
/// share of memory.
static MatrixCut cut_int4(int64_t columns, int64_t k, int halves, int blocks) {
  constexpr int64_t kUnpacking = 340, kNarrow = 285, kBytes = 14, kAround = 1500;
  const int64_t units = columns / kPackedRows, chunks = k / kPackedColumns;
  int64_t best = 1, least = INT64_MAX;
  for (int64_t size = 1; size * halves <= kMostGroups; ++size) {
    const int64_t unpacking = halves == 1 && size <= kMultiplying ? kNarrow : kUnpacking,
                  of_chunk = std::max(unpacking, size * halves * kRecordBytes / kBytes),
                  cost = ceil_div(ceil_div(units, size), blocks) * (chunks * of_chunk + kAround);
    if (cost < least) least = cost, best = size;
  }
  MatrixCut cut =
      cut_of(columns, best * kPackedRows, static_cast<int>(best) * halves, k / kAtomDepth);
  const auto of_stage =
      static_cast<int>(std::min<int64_t>(chunks, kStageBytes / (cut.groups * kRecordBytes)));
  cut.stage_atoms = of_stage * kPackedColumns / kAtomDepth;
  cut.stages = static_cast<int>(ceil_div(chunks, of_stage));
  return cut;
}

bool describe_int4(Arguments& a, EncodeMap encoder, const DecoderStack& stack, int64_t layer_stride,
                   int blocks) {
  const auto takes = [](const Weight& w, int64_t halves) {
    return w.data.packed > 0 && !w.is_stack() && w.format.numbers == WeightFormat::int4 &&
           !w.format.quantises_rows() && w.data.contiguous() &&
           packed_record_bytes(w.format, w.k()) == kRecordBytes &&
           w.n() % (halves * kPackedRows) == 0;
  };
  if (a.world > 1 || stack.layers.front().router.defined() || !all_weights(stack, takes))
    return false;
  // In boxes that are what a stage holds of a tile: first all of gate, then all of up.
  const auto describe = [&](Product product, const Weight& w, const Tensor& bias) {
    MatrixCut& cut = a.cuts[product];
    const int halves = product == kGateUp ? 2 : 1;
    const int64_t chunks = w.k() / kPackedColumns, units = w.n() / kPackedRows / halves,
                  row = chunks * kRecordBytes;
    cut = cut_int4(w.n() / halves, w.k(), halves, blocks);
    if (bias.defined()) cut.bias = reinterpret_cast<const __nv_bfloat16*>(bias.data);
    return encode_map<5>(encoder, a.maps[product], w.data.data,
                         {kRecordBytes / kMapUnit, chunks, units, halves,
                          static_cast<int64_t>(stack.layers.size())},
                         {kRecordBytes, row, row * units, std::max<int64_t>(layer_stride, 16)},
                         {kRecordBytes / kMapUnit, chunks_of_stage(cut),
                          cut.columns_of_tile / kPackedRows, halves, 1},
                         CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_DATA_TYPE_INT64,
                         CU_TENSOR_MAP_SWIZZLE_NONE) == CUDA_SUCCESS;
  };
  const DecoderWeights& w = stack.layers.front();
  return describe(kQkv, w.qkv, w.qkv_bias) && describe(kOut, w.o, w.o_bias) &&
         describe(kGateUp, w.gate_up, w.gate_up_bias) && describe(kDown, w.down, w.down_bias);
}

template <int kHeadDim, class C>
Kernel* int4_kernel(bool coarse) {
  return coarse ? decoder_layers_kernel<kHeadDim, C, false, false, Scales::coarse_groups>
                : decoder_layers_kernel<kHeadDim, C, false, false, Scales::groups>;
}
template Kernel* int4_kernel<64, __nv_bfloat16>(bool);
template Kernel* int4_kernel<64, E4m3>(bool);
template Kernel* int4_kernel<128, __nv_bfloat16>(bool);
template Kernel* int4_kernel<128, E4m3>(bool);

}  // namespace nanovllm::decoder
