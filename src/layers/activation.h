// SiluAndMul: silu(gate) * up, the activation of SwiGLU (Shazeer, arXiv 2002.05202).
#pragma once

#include "layers/step.h"

namespace nanovllm {

struct SiluAndMul {
  /// [t, 2n] -> [t, n], in step.arena
  Tensor forward(const Step& step, Tensor gate_up) const {
    Tensor y = step.arena.take(gate_up.dtype, {gate_up.shape[0], gate_up.shape[1] / 2});
    step.ops.silu_and_mul(y, gate_up);
    return y;
  }
};

}  // namespace nanovllm
