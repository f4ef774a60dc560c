// Sampling: masks, biases, penalties, sample, top_logprobs. Rows are independent, one thread each.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <span>

#include "ops/cpu/cpu_backend.h"
#include "ops/cpu/shapes.h"
#include "ops/cpu/threads.h"
#include "ops/noise.h"
#include "ops/penalties.h"

namespace nanovllm::cpu {
namespace {

/// A token and its logit as one integer that sorts by logit, then by lower id: larger is earlier.
using SortKey = uint64_t;

SortKey sort_key(float logit, int64_t id) {
  const uint32_t bits = std::bit_cast<uint32_t>(logit == 0 ? 0.0f : logit);  // -0 and 0 tie
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t{ordered} << 32 | (0xffffffffu - static_cast<uint32_t>(id));
}
int32_t id_of(SortKey key) {
  return static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(key));
}

struct RowParams {
  float temperature, top_p, min_p;
  int32_t top_k;
  uint64_t seed;
  uint32_t position;
};

/// Moves the `count` earliest keys to the front, in order.
void sort_head(std::span<SortKey> keys, size_t count) {
  const auto middle = keys.begin() + static_cast<std::ptrdiff_t>(count);
  if (count < keys.size()) std::nth_element(keys.begin(), middle, keys.end(), std::greater<>());
  std::sort(keys.begin(), middle, std::greater<>());
}

/// The tokens that top_k, then top_p, then min_p leave, in any order. `room` has space for a key
/// per token.
std::span<SortKey> surviving_tokens(std::span<SortKey> room, const float* logits,
                                    const RowParams& row, RowStats stats, const Kernels& kernels) {
  const float shift = stats.max / row.temperature;
  const auto weight = [&](SortKey key) {
    return std::exp(static_cast<double>(logits[id_of(key)] / row.temperature - shift));
  };
  size_t count = 0;
  for (size_t i = 0; i < room.size(); ++i)
    if (logits[i] > -std::numeric_limits<float>::infinity())
      room[count++] = sort_key(logits[i], static_cast<int64_t>(i));
  std::span<SortKey> keys = room.first(count);

  const bool has_top_k = row.top_k > 0 && static_cast<size_t>(row.top_k) < count;
  if (has_top_k) {
    sort_head(keys, static_cast<size_t>(row.top_k));
    keys = keys.first(static_cast<size_t>(row.top_k));
  }
  if (row.top_p < 1) {
    double total = 0;
    if (has_top_k)
      for (const SortKey key : keys) total += weight(key);
    else
      total = kernels.sum_exp(logits, static_cast<int64_t>(room.size()), row.temperature, shift);
    const double wanted = static_cast<double>(row.top_p) * total;
    // Only a head is sorted, longer and longer until it holds the mass: a full sort is the rare,
    // flat case.
    for (size_t head = has_top_k ? keys.size() : 256;; head *= 8) {
      head = std::min(head, keys.size());
      if (!has_top_k) sort_head(keys, head);
      double mass = 0;
      size_t kept = 0;
      while (kept < head && mass < wanted) mass += weight(keys[kept++]);
      if (mass < wanted && head < keys.size()) continue;
      keys = keys.first(std::max<size_t>(kept, 1));
      break;
    }
  }
  if (row.min_p > 0) {  // relative to the likeliest, whose weight is 1
    if (row.top_p >= 1 && !has_top_k) {
      const auto end = std::partition(keys.begin(), keys.end(), [&](SortKey key) {
        return weight(key) >= static_cast<double>(row.min_p);
      });
      return {keys.begin(), end};
    }
    while (keys.size() > 1 && weight(keys.back()) < static_cast<double>(row.min_p))
      keys = keys.first(keys.size() - 1);
  }
  return keys;
}

float gumbel(uint64_t seed, uint32_t position, int32_t id) {
  const Philox4 bits = noise_bits(seed, position, static_cast<uint32_t>(id) / 4);
  return -std::log(-std::log(noise_uniform(bits.x[id % 4])));
}

int32_t sample_row(std::span<SortKey> room, const float* logits, const RowParams& row,
                   const Kernels& kernels) {
  const int64_t vocab = static_cast<int64_t>(room.size());
  const RowStats stats = kernels.row_stats(logits, vocab);
  if (stats.argmax < 0 || !(row.temperature > 0)) return stats.argmax;
  const bool filtered = row.top_k > 0 || row.top_p < 1 || row.min_p > 0;
  if (!filtered || !std::isfinite(stats.max / row.temperature))
    return kernels.gumbel_argmax(logits, vocab, row.temperature, row.seed, row.position, stats);
  int32_t winner = stats.argmax;
  float best = -std::numeric_limits<float>::infinity();
  for (const SortKey key : surviving_tokens(room, logits, row, stats, kernels)) {
    const int32_t id = id_of(key);
    const float score = logits[id] / row.temperature + gumbel(row.seed, row.position, id);
    if (score > best || (score == best && id < winner)) best = score, winner = id;
  }
  return winner;
}

}  // namespace

void CpuBackend::bias_logits(Tensor logits, Tensor biases, const Batch& batch, int64_t first_row) {
  check(logits.rank == 2 && has_dense_rows(logits) && biases.rank == 2 && biases.shape[1] == 4 &&
            biases.contiguous(),
        "bias_logits {} by {}", logits, biases);
  constexpr float kMasked = -std::numeric_limits<float>::infinity();
  const int32_t* entry = biases.ptr<int32_t>();
  for (int64_t i = 0; i < biases.shape[0]; ++i, entry += 4) {
    const int64_t row = entry[0] - first_row;
    if (row < 0 || row >= logits.shape[0]) continue;
    if (entry[3] >= 0 &&
        batch.tokens.ptr<int32_t>()[batch.logits_rows.ptr<int32_t>()[entry[0]]] != entry[3])
      continue;
    float& logit = logits.ptr<float>()[row * logits.stride[0] + entry[1]];
    const auto bias = std::bit_cast<float>(entry[2]);
    logit = bias == kMasked ? kMasked : logit + bias;
  }
}

void CpuBackend::apply_token_masks(Tensor logits, Tensor mask_rows, Tensor masks) {
  const int64_t rows = logits.shape[0], vocab = logits.shape[1], words = (vocab + 31) / 32;
  expect_matrix("apply_token_masks logits", logits, rows, vocab);
  expect_vector("apply_token_masks mask_rows", mask_rows, DType::i32, rows);
  check(masks.rank == 2 && masks.shape[1] == words && masks.contiguous(),
        "apply_token_masks: masks {} for {}", masks, logits);
  float* data = logits.ptr<float>();
  parallel_for(threads_, rows, rows * vocab, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      const int32_t mask_row = mask_rows.ptr<int32_t>()[i];
      if (mask_row < 0) continue;
      const int32_t* mask = masks.ptr<int32_t>() + mask_row * words;
      float* row = data + i * logits.stride[0];
      for (int64_t t = 0; t < vocab; ++t)
        if ((static_cast<uint32_t>(mask[t / 32]) >> t % 32 & 1) == 0)
          row[t] = -std::numeric_limits<float>::infinity();
    }
  });
}

void CpuBackend::apply_penalties(Tensor logits, const SamplingBatch& params, Tensor slot_tokens,
                                 Tensor block_tables) {
  const int64_t rows = logits.shape[0], vocab = logits.shape[1];
  expect_matrix("apply_penalties logits", logits, rows, vocab);
  expect_vector("apply_penalties sequence", params.sequence, DType::i32, rows);
  check(slot_tokens.contiguous() && block_tables.rank == 2, "apply_penalties {} by {}", slot_tokens,
        block_tables);
  reserve_scratch(vocab);
  parallel_for(threads_, rows, rows * vocab, [&](int64_t begin, int64_t end, int thread) {
    // Of each token: 1 if the prompt has it, and 2 for each time that the answer has it.
    const std::span<uint32_t> seen(reinterpret_cast<uint32_t*>(scratch(thread)),
                                   static_cast<size_t>(vocab));
    for (int64_t i = begin; i < end; ++i) {
      const Penalties penalties{params.repetition_penalty.ptr<float>()[i],
                                params.frequency_penalty.ptr<float>()[i],
                                params.presence_penalty.ptr<float>()[i]};
      if (penalties.none()) continue;
      std::ranges::fill(seen, 0u);
      const int32_t* table = block_tables[params.sequence.ptr<int32_t>()[i]].ptr<int32_t>();
      const int32_t prompt = params.num_prompt_tokens.ptr<int32_t>()[i];
      const int64_t block_size = slot_tokens.shape[1];
      for (int32_t p = 0; p < params.position.ptr<int32_t>()[i]; ++p) {
        const int32_t token =
            slot_tokens.ptr<int32_t>()[table[p / block_size] * block_size + p % block_size];
        if (token < 0 || token >= vocab) continue;  // -1 of a row that failed
        uint32_t& times = seen[static_cast<size_t>(token)];
        times = p < prompt ? times | 1u : times + 2;
      }
      float* row = logits.ptr<float>() + i * logits.stride[0];
      for (int64_t id = 0; id < vocab; ++id)
        if (const uint32_t times = seen[static_cast<size_t>(id)])
          row[id] = penalties.apply(row[id], times / 2);
    }
  });
}

void CpuBackend::sample(Tensor token_ids, Tensor logits, const SamplingBatch& params) {
  const int64_t rows = logits.shape[0], vocab = logits.shape[1];
  expect_matrix("sample logits", logits, rows, vocab);
  expect_vector("sample token_ids", token_ids, DType::i32, rows);
  const float* data = logits.ptr<float>();
  int32_t* ids = token_ids.ptr<int32_t>();
  reserve_scratch(2 * vocab);
  parallel_for(threads_, rows, rows * vocab, [&](int64_t begin, int64_t end, int thread) {
    const std::span<SortKey> room(reinterpret_cast<SortKey*>(scratch(thread)),
                                  static_cast<size_t>(vocab));
    for (int64_t i = begin; i < end; ++i) {
      RowParams row{.temperature = 0, .top_p = 1, .min_p = 0, .top_k = 0, .seed = 0, .position = 0};
      if (params.has(kSampleRandom)) {
        row.temperature = params.temperature.ptr<float>()[i];
        row.seed = static_cast<uint64_t>(params.seed.ptr<int64_t>()[i]);
        row.position = static_cast<uint32_t>(params.position.ptr<int32_t>()[i]);
      }
      if (params.has(kSampleFiltered)) {
        row.top_k = params.top_k.ptr<int32_t>()[i];
        row.top_p = params.top_p.ptr<float>()[i];
        row.min_p = params.min_p.ptr<float>()[i];
      }
      ids[i] = sample_row(room, data + i * logits.stride[0], row, kernels_);
    }
  });
}

void CpuBackend::top_logprobs(Tensor ids, Tensor logprobs, Tensor ranks, Tensor logits,
                              Tensor chosen) {
  const int64_t rows = logits.shape[0], vocab = logits.shape[1], columns = ids.shape[1];
  expect_matrix("top_logprobs logits", logits, rows, vocab);
  expect_matrix("top_logprobs ids", ids, rows, columns);
  expect_matrix("top_logprobs logprobs", logprobs, rows, columns);
  expect_vector("top_logprobs ranks", ranks, DType::i32, rows);
  expect_vector("top_logprobs chosen", chosen, DType::i32, rows);
  check(columns >= 1 && columns - 1 <= vocab, "top_logprobs of {} out of {} tokens", columns - 1,
        vocab);
  const float* data = logits.ptr<float>();
  int32_t *id_data = ids.ptr<int32_t>(), *rank_data = ranks.ptr<int32_t>();
  float* out_data = logprobs.ptr<float>();
  const int32_t* chosen_ids = chosen.ptr<int32_t>();
  reserve_scratch(2 * vocab);
  parallel_for(threads_, rows, rows * vocab, [&](int64_t begin, int64_t end, int thread) {
    const std::span<SortKey> keys(reinterpret_cast<SortKey*>(scratch(thread)),
                                  static_cast<size_t>(vocab));
    for (int64_t i = begin; i < end; ++i) {
      const float* row = data + i * logits.stride[0];
      const float top = kernels_.row_stats(row, vocab).max;
      const double log_sum =
          static_cast<double>(top) + std::log(kernels_.sum_exp(row, vocab, 1.0f, top));
      const auto put = [&](int64_t column, int32_t id) {
        id_data[i * ids.stride[0] + column] = id;
        out_data[i * logprobs.stride[0] + column] =
            static_cast<float>(static_cast<double>(row[id]) - log_sum);
      };
      for (int64_t j = 0; j < vocab; ++j) keys[static_cast<size_t>(j)] = sort_key(row[j], j);
      // A failed row has -1.
      const int32_t id = chosen_ids[i] >= 0 && chosen_ids[i] < vocab ? chosen_ids[i] : 0;
      put(0, id);
      const SortKey mine = sort_key(row[id], id);
      rank_data[i] = static_cast<int32_t>(
          std::count_if(keys.begin(), keys.end(), [&](SortKey key) { return key >= mine; }));
      sort_head(keys, static_cast<size_t>(columns - 1));
      for (int64_t column = 1; column < columns; ++column)
        put(column, id_of(keys[static_cast<size_t>(column - 1)]));
    }
  });
}

}  // namespace nanovllm::cpu
