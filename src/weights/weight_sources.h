// Host tensors that fill the parameters of a WeightLoader: slices, and rows of zeros behind them.
#pragma once

#include <vector>

#include "weights/weight_loader.h"

namespace nanovllm {

/// Rows and columns of a host tensor.
Tensor slice(Tensor t, const WeightPart& part);

/// Adds rows of zeros, which lie in `zeros`, until the sources fill the matrix `dst`.
void pad_rows(std::vector<Tensor>& sources, const Tensor& dst, std::vector<float>& zeros);

}  // namespace nanovllm
