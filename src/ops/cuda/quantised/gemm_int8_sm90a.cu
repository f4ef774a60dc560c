// The products of int8 weights and rows (gemm_fp8.cuh).
#include "ops/cuda/quantised/fp8_maps.cuh"

namespace nanovllm {

void CudaBackend::gemm_int8(Tensor y, Tensor x, const Weight& w, bool gated, const Fp8Plan& plan,
                            const SentParts* sent) {
  const QuantisedOperand operand = take_operand(x, w);
  with_index<static_cast<int>(std::size(kInt8Tiles))>(plan.tile, [&]<int i>() {
    constexpr Fp8Tile t = kInt8Tiles[i];
    if (gated)
      launch_fp8<t.of_integers(true)>(y, x, w, plan, operand, sent);
    else
      launch_fp8<t.of_integers(false)>(y, x, w, plan, operand, sent);
  });
}

}  // namespace nanovllm
