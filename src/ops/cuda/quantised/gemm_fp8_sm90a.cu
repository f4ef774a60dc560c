// The products of E4M3 weights (gemm_fp8.cuh).
#include "ops/cuda/quantised/fp8_maps.cuh"

namespace nanovllm {

void CudaBackend::gemm_fp8(Tensor y, Tensor x, const Weight& w, bool gated, const Fp8Plan& plan,
                           const SentParts* sent) {
  const QuantisedOperand operand = take_operand(x, w);
  with_index<static_cast<int>(std::size(kFp8Tiles))>(plan.tile, [&]<int i>() {
    with_fp8_kind(w, gated, [&]<bool kGated, bool kBlocks>() {
      constexpr Fp8Tile t = kFp8Tiles[i];
      constexpr Fp8Tile kTile{.rows = t.rows,
                              .depth = t.depth,
                              .columns = t.columns,
                              .cluster = t.cluster,
                              .gated = kGated,
                              .blocks = kBlocks,
                              .in_pairs = t.in_pairs};
      if constexpr (t.in_pairs ? kTile.takes_halves() : !kGated || t.can_be_gated())
        launch_fp8<kTile>(y, x, w, plan, operand, sent);
    });
  });
}

}  // namespace nanovllm
