// Prints how long a mixture of experts takes at the shapes of Qwen3-30B-A3B, for information:
// ops_timing_moe. Times are medians of graph replays; successive calls choose other experts, so
// that their weights come from memory.
#include <cstdio>
#include <numeric>
#include <set>

#include "gpu/timing.h"

namespace nanovllm {
namespace {

constexpr int64_t kHidden = 2048, kInner = 768, kExperts = 128, kChosen = 8;

/// A stack of experts that all have the values of the first: the addresses matter.
Weight stack(Rig& rig, WeightFormat format, int64_t n, int64_t k) {
  if (format.rows == WeightFormat::Rows::token) format.group = k;
  const auto elements = static_cast<int64_t>(rig.backend.weight_bytes(format, n, k) / 2);
  const Tensor all = rig.empty(DType::bf16, {kExperts, elements});
  const Weight first = rig.backend.weight_view(all.data, format, n, k);
  if (format.is_quantised()) {
    QuantizedRows rows;
    std::mt19937 random(1);
    for (int64_t i = 0; i < n * k; ++i)
      rows.numbers.push_back(static_cast<int8_t>(static_cast<int>(random() % 16) - 8));
    rows.scales.assign(static_cast<size_t>(n * format.groups(k)), 0x1p-8f);
    if (format.has_zeros()) rows.zeros.assign(rows.scales.size(), 0);
    rig.backend.load_quantised(first, rows);
  } else {
    rig.backend.copy(all[0], rig.upload(normal_values(n * k, 1, 0.02f), DType::bf16, {n * k}));
  }
  for (int64_t e = 1; e < kExperts; ++e) rig.backend.copy(all[e], all[0]);
  return stack_of(first, kExperts, static_cast<size_t>(elements) * 2);
}

void time_moe(Backend& gpu, WeightFormat format) {
  Rig rig(gpu);
  const Weight gate_up = stack(rig, format, 2 * kInner, kHidden),
               down = stack(rig, format, kHidden, kInner);
  const Weight router =
      rig.weight(normal_values(kExperts * kHidden, 2), DType::bf16, kExperts, kHidden);
  const double expert_parameters = 3.0 * kHidden * kInner,
               expert_bytes = static_cast<double>(gate_up[0].bytes() + down[0].bytes());
  std::printf("mixture of experts, %d bits%s, 128 experts of 768 in 2048, 8 for each token\n",
              format.bits(), format.quantises_rows() ? ", rows quantised" : "");
  for (const int64_t tokens : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192, 16384}) {
    const int sets = tokens <= 16 ? 16 : 2;
    const int64_t pairs = tokens * kChosen;
    std::vector<Tensor> chosen;
    double bytes = 0;
    std::mt19937 random(7);
    std::vector<int32_t> experts(kExperts);
    std::iota(experts.begin(), experts.end(), 0);
    for (int s = 0; s < sets; ++s) {
      std::vector<int32_t> ids;
      for (int64_t t = 0; t < tokens; ++t) {
        if (tokens > 1 || s == 0) std::shuffle(experts.begin(), experts.end(), random);
        const auto begin = experts.begin() + (tokens == 1 ? s * kChosen : 0);
        ids.insert(ids.end(), begin, begin + kChosen);
      }
      bytes += expert_bytes * static_cast<double>(std::set<int32_t>(ids.begin(), ids.end()).size());
      chosen.push_back(rig.upload(ids, {tokens, kChosen}));
    }
    const Tensor x = rig.upload(normal_values(tokens * kHidden, 3), DType::bf16, {tokens, kHidden}),
                 y = rig.empty(DType::bf16, {tokens, kHidden});
    const Tensor weights =
        rig.upload(std::vector<float>(static_cast<size_t>(pairs), 1.0f / kChosen), DType::f32,
                   {tokens, kChosen});
    const Tensor logits = rig.empty(DType::f32, {tokens, kExperts}),
                 ids = rig.empty(DType::i32, {tokens, kChosen});
    const MoeWorkspace work{rig.empty(DType::bf16, {pairs, kInner}),
                            rig.empty(DType::bf16, {pairs, kHidden}),
                            rig.empty(DType::i32, {moe_plan_size(pairs, kExperts)})};
    gpu.gemm(logits, x, router);
    gpu.synchronize();
    const int count = tokens <= 64 ? 32 : 4;
    const double route = microseconds(
        gpu, count, [&](int) { gpu.moe_router(weights, ids, logits, x, router, true, {}); });
    const double mlp = microseconds(gpu, count, [&](int i) {
      gpu.moe_mlp(y, x, weights, chosen[static_cast<size_t>(i % sets)], gate_up, down, work);
    });
    const double mean_bytes = bytes / sets;
    std::printf(
        "  tokens %5ld  router %6.1f us, experts %8.1f us  %6.0f GB/s of weights  %6.1f TFLOP/s\n",
        static_cast<long>(tokens), route, mlp, mean_bytes / mlp * 1e-3,
        2 * expert_parameters * static_cast<double>(pairs) / mlp * 1e-6);
  }
}

}  // namespace
}  // namespace nanovllm

int main() {
  using namespace nanovllm;
  std::unique_ptr<Backend> gpu;
  try {
    gpu = make_backend("cuda", {});
  } catch (const Error& error) {
    std::printf("skipped: %s\n", error.what());
    return 0;
  }
  std::printf("%s\n", gpu->name().c_str());
  time_moe(*gpu, WeightFormat::bf16);
  for (const WeightFormat format : {WeightFormat(WeightFormat::int4, 128),
                                    {WeightFormat::int8, 128},
                                    {WeightFormat::int8, kHidden, WeightFormat::Rows::token},
                                    {WeightFormat::e4m3, kRowGroup, WeightFormat::Rows::group}})
    if (gpu->keeps(format, 2 * kInner, kHidden, true)) time_moe(*gpu, format);
}
