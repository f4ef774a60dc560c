// Launches what quantises rows (quantise_rows.cuh) for the products that multiply such.
#include <utility>

#include "ops/cuda/core/cuda_backend.h"
#include "ops/cuda/moe/moe.cuh"
#include "ops/cuda/quantised/quantise_rows.cuh"

namespace nanovllm {
namespace {

/// Measured on an H100, at 2,048 to 12,288 columns: few rows wait for one look at memory, many for
/// its bandwidth, which blocks of fewer threads with more eights each have more of.
constexpr int64_t kFewRows = 256, kNarrowRow = 2048, kWideRow = 4096;

/// f<threads of a row, eights that each holds>().
template <class F>
void with_threads(int64_t rows, int64_t columns, F&& f) {
  if (rows <= kFewRows)
    return columns <= kWideRow ? f.template operator()<512, 1>() : f.template operator()<512, 3>();
  if (columns <= kNarrowRow) return f.template operator()<kWarp, 8>();
  columns <= kWideRow ? f.template operator()<256, 2>() : f.template operator()<256, 6>();
}

}  // namespace

CudaBackend::QuantisedOperand CudaBackend::quantise_rows(Tensor x, const Weight& w,
                                                         const ExpertPlan* places) {
  const int64_t count = places ? places->pairs : x.shape[0];
  const QuantisedOperand room = quantised_room(count, w);
  const auto fixed = input_scales_.find(w.data.data);
  const auto rows_of_kind = [&]<WeightFormat::Numbers kind>() {
    return RowsToQuantise<kind>{device_ptr<bf16>(x),
                                x.stride[0],
                                rows_in<kind>(room.numbers, room.scales, count, w.k()),
                                static_cast<int>(count),
                                fixed == input_scales_.end() ? 0.0f : fixed->second,
                                wide_rows({x}),
                                places ? places->token_of : nullptr,
                                places ? places->per_token : 1};
  };
  if (w.format.rows == WeightFormat::Rows::token) {
    const auto go = [&]<WeightFormat::Numbers kind>() {
      const auto rows = rows_of_kind.template operator()<kind>();
      with_threads(count, w.k(), [&]<int kThreads, int kHeld>() {
        constexpr int kRows = kThreads == kWarp ? kRowsTogether : 1;
        launch_early(quantise_tokens_kernel<kind, kThreads, kHeld>,
                     {grid_size(ceil_div(count, kRows))}, kRows * kThreads, 0, rows);
      });
    };
    if (w.format.numbers == WeightFormat::int8)
      go.template operator()<WeightFormat::int8>();
    else
      go.template operator()<WeightFormat::e4m3>();
    return room;
  }
  const auto rows = rows_of_kind.template operator()<WeightFormat::e4m3>();
  const dim3 grid{grid_size(ceil_div(w.k(), int64_t{kWarp} * 8)),
                  grid_size(ceil_div(count, kRowsTogether))};
  if (w.format.rows == WeightFormat::Rows::group)
    launch_early(quantise_groups_kernel<false>, grid, kRowsTogether * kWarp, 0, rows);
  else
    launch_early(quantise_groups_kernel<true>, grid, kRowsTogether * kWarp, 0, rows);
  return room;
}

CudaBackend::QuantisedOperand CudaBackend::take_operand(Tensor x, const Weight& w) {
  const QuantisedOperand made = std::exchange(micro_batch_->operand, {});
  if (!made.x) return quantise_rows(x, w);
  check(made.x == x.data && made.reader == w.data.data, ErrorKind::engine,
        "gemm: the operation before has quantised rows for another product than that of {}",
        x.describe());
  return made;
}

}  // namespace nanovllm
