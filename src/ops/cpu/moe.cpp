// Mixture of experts: moe_route, moe_mlp. Tokens are grouped by expert, so that an expert's weights
// are read once per step and only those of experts that somebody chose.
#include <cmath>
#include <cstring>
#include <limits>

#include "ops/cpu/cpu_backend.h"
#include "ops/cpu/shapes.h"
#include "ops/cpu/threads.h"

namespace nanovllm::cpu {
namespace {

/// One token: the k likeliest of n logits, and softmax over all of them.
void route(float* weights, int32_t* ids, const float* logits, int64_t n, int64_t k,
           bool normalise) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  const auto key = [&](int64_t e) { return std::isnan(logits[e]) ? kLowest : logits[e]; };
  for (int64_t i = 0; i < k; ++i) {
    int64_t best = -1;
    for (int64_t e = 0; e < n; ++e) {
      // The experts after the last one chosen, in the order of falling logits and rising ids.
      const bool is_left =
          i == 0 || key(e) < key(ids[i - 1]) || (key(e) == key(ids[i - 1]) && e > ids[i - 1]);
      if (is_left && (best < 0 || key(e) > key(best))) best = e;
    }
    ids[i] = static_cast<int32_t>(best);
  }
  const float top = key(ids[0]);
  double total = 0, chosen = 0;
  for (int64_t e = 0; e < n; ++e) total += static_cast<double>(std::exp(logits[e] - top));
  for (int64_t i = 0; i < k; ++i) {
    weights[i] = static_cast<float>(static_cast<double>(std::exp(logits[ids[i]] - top)) / total);
    chosen += static_cast<double>(weights[i]);
  }
  for (int64_t i = 0; normalise && i < k; ++i)
    weights[i] = static_cast<float>(static_cast<double>(weights[i]) / chosen);
}

/// Where the pairs (token, its i-th expert) lie when they are sorted by expert.
struct Grouping {
  int32_t* first;     // [experts + 1]: expert e has the places first[e] .. first[e + 1]
  int32_t* token_at;  // [pairs]: whose row a place holds
  int32_t* place_of;  // [pairs]

  Grouping(const Tensor& plan, const int32_t* ids, int64_t pairs, int64_t k, int64_t experts)
      : first(plan.ptr<int32_t>()), token_at(first + experts + 1), place_of(token_at + pairs) {
    std::fill(first, first + experts + 1, 0);
    for (int64_t p = 0; p < pairs; ++p) {
      check(0 <= ids[p] && ids[p] < experts, "moe_mlp: expert {} of {}", ids[p], experts);
      ++first[ids[p] + 1];
    }
    for (int64_t e = 0; e < experts; ++e) first[e + 1] += first[e];
    int32_t* next = place_of + pairs;
    std::copy(first, first + experts, next);
    for (int64_t p = 0; p < pairs; ++p) {
      place_of[p] = next[ids[p]]++;
      token_at[place_of[p]] = static_cast<int32_t>(p / k);
    }
  }
};

/// y = sum of weights[i] * out[place[i]], element by element in the order of i.
template <class T>
void add_experts(T* y, const T* out, int64_t out_stride, const float* weights, const int32_t* place,
                 int64_t k, int64_t n) {
  constexpr int64_t kPiece = 256;
  float sum[kPiece];
  for (int64_t begin = 0; begin < n; begin += kPiece) {
    const int64_t count = std::min(kPiece, n - begin);
    std::fill(sum, sum + count, 0.0f);
    for (int64_t i = 0; i < k; ++i) {
      const T* row = out + place[i] * out_stride + begin;
      for (int64_t j = 0; j < count; ++j) sum[j] += weights[i] * static_cast<float>(row[j]);
    }
    for (int64_t j = 0; j < count; ++j) y[begin + j] = static_cast<T>(sum[j]);
  }
}

}  // namespace

void CpuBackend::moe_route(Tensor weights, Tensor ids, Tensor logits, bool normalise) {
  const int64_t tokens = logits.shape[0], experts = logits.shape[1], k = ids.shape[1];
  expect_matrix("moe_route logits", logits, tokens, experts);
  expect_matrix("moe_route ids", ids, tokens, k);
  expect_matrix("moe_route weights", weights, tokens, k);
  check(1 <= k && k <= experts, "moe_route: {} of {} experts", k, experts);
  const float* values = logits.ptr<float>();
  float* weight = weights.ptr<float>();
  int32_t* id = ids.ptr<int32_t>();
  parallel_for(threads_, tokens, tokens * experts * (k + 4), [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t)
      route(weight + t * weights.stride[0], id + t * ids.stride[0], values + t * logits.stride[0],
            experts, k, normalise);
  });
}

void CpuBackend::moe_mlp(Tensor y, Tensor x, Tensor weights, Tensor ids, Weight gate_up,
                         Weight down, const MoeWorkspace& work) {
  const int64_t tokens = x.shape[0], h = x.shape[1], k = ids.shape[1], pairs = tokens * k;
  const int64_t experts = gate_up.count(), n = down.k();
  expect_matrix("moe_mlp x", x, tokens, h);
  expect_matrix("moe_mlp y", y, tokens, h);
  expect_matrix("moe_mlp act", work.act, pairs, n);
  expect_matrix("moe_mlp out", work.out, pairs, h);
  expect_vector("moe_mlp plan", work.plan, DType::i32, moe_plan_size(pairs, experts));
  check(gate_up.is_stack() && down.is_stack() && down.count() == experts && gate_up.n() == 2 * n &&
            gate_up.k() == h && down.n() == h && ids.contiguous() && weights.contiguous() &&
            weights.shape[1] == k && y.dtype == x.dtype,
        "moe_mlp: {} and {} of {}", gate_up.data, down.data, x);
  const Grouping groups(work.plan, ids.ptr<int32_t>(), pairs, k, experts);

  const size_t element = size_of(x.dtype), row = static_cast<size_t>(h) * element;
  expert_rows_.reserve(expert_bytes({.dtype = x.dtype, .hidden = h, .expert_inner = n}));
  for (int64_t e = 0; e < experts; ++e)
    for (int64_t begin = groups.first[e]; begin < groups.first[e + 1]; begin += kExpertRows) {
      const int64_t end = std::min<int64_t>(begin + kExpertRows, groups.first[e + 1]);
      const Tensor rows(expert_rows_.get(), x.dtype, {end - begin, h});
      const Tensor both(expert_rows_.get() + static_cast<size_t>(kExpertRows) * row, x.dtype,
                        {end - begin, 2 * n});
      for (int64_t i = begin; i < end; ++i)
        std::memcpy(rows.data + static_cast<size_t>(i - begin) * row,
                    x.data + static_cast<size_t>(groups.token_at[i] * x.stride[0]) * element, row);
      gemm(both, rows, gate_up[e]);
      silu_and_mul(work.act.rows(begin, end), both);
      gemm(work.out.rows(begin, end), work.act.rows(begin, end), down[e]);
    }
  dispatch_float(x.dtype, [&]<class T>() {
    T* to = y.ptr<T>();
    const T* out = work.out.ptr<T>();
    const float* weight = weights.ptr<float>();
    parallel_for(threads_, tokens, pairs * h, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t)
        add_experts(to + t * y.stride[0], out, work.out.stride[0], weight + t * k,
                    groups.place_of + t * k, k, h);
    });
  });
}

}  // namespace nanovllm::cpu
