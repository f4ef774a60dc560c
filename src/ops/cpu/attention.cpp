// The operations on q, k and v: rotary embedding, the KV cache, attention.
#include <bit>
#include <cstring>
#include <vector>

#include "ops/cpu/cpu_backend.h"
#include "ops/cpu/shapes.h"
#include "ops/cpu/threads.h"

namespace nanovllm::cpu {
namespace {

/// Cosines and sines by position.
struct RotaryTable {
  const float* data;
  int64_t rotary_dim, stride;

  explicit RotaryTable(const Tensor& t)
      : data(t.ptr<float>()), rotary_dim(t.shape[1]), stride(t.stride[0]) {
    check(t.rank == 2 && has_dense_rows(t) && rotary_dim % 2 == 0, "rotary table {}", t);
  }
  const float* cos(int64_t position) const { return data + position * stride; }
  const float* sin(int64_t position) const { return cos(position) + rotary_dim / 2; }
};

/// Where a slot's rows are in one layer's cache.
struct CacheView {
  int64_t kv_heads, block_size, head_dim;
  bool is_e4m3;

  explicit CacheView(const KvCache& cache)
      : kv_heads(cache.k.shape[1]),
        block_size(cache.k.shape[2]),
        head_dim(cache.k.shape[3]),
        is_e4m3(cache.k.dtype == DType::e4m3) {
    const auto is_right = [this](const Tensor& t) {
      return t.rank == 4 && t.stride[2] == head_dim && t.stride[3] == 1 &&
             (!is_e4m3 || t.stride[1] >= block_size * (head_dim + 4));
    };
    check(is_right(cache.k) && is_right(cache.v) && cache.k.shape == cache.v.shape &&
              cache.k.dtype == cache.v.dtype &&
              std::has_single_bit(static_cast<uint64_t>(block_size)),
          "KV cache {} and {}", cache.k, cache.v);
    for (const Tensor& scales : {cache.k_scales, cache.v_scales})
      if (scales.defined()) expect_vector("KV scales", scales, DType::f32, kv_heads);
  }
  /// Of queries, keys and values like `rows` beside it.
  DType dtype_beside(const KvCache& cache, const Tensor& rows) const {
    return is_e4m3 ? rows.dtype : cache.k.dtype;
  }

  /// Puts one token's heads into its slot.
  template <class T>
  void store(const FloatKernels<T>& kernels, const KvCache& cache, const T* k, int64_t k_stride,
             const T* v, int64_t v_stride, int32_t slot) const {
    if (slot < 0) return;
    const int64_t block = slot / block_size, inside = slot % block_size;
    const auto put = [&](const Tensor& rows, int64_t h, const T* from, float scale) {
      std::byte* part = part_of(rows, block, h);
      if (is_e4m3)
        kernels.store_e4m3(reinterpret_cast<E4m3*>(part) + inside * head_dim,
                           reinterpret_cast<float*>(part + block_size * head_dim) + inside, from,
                           head_dim, scale);
      else
        std::memcpy(static_cast<void*>(reinterpret_cast<T*>(part) + inside * head_dim), from,
                    static_cast<size_t>(head_dim) * sizeof(T));
    };
    for (int64_t h = 0; h < kv_heads; ++h) {
      put(cache.k, h, k + h * k_stride, scale_of(cache.k_scales, h));
      put(cache.v, h, v + h * v_stride, scale_of(cache.v_scales, h));
    }
  }
  /// Of a head's rows; 0: each row's own.
  static float scale_of(const Tensor& scales, int64_t head) {
    return scales.defined() ? scales.ptr<float>()[head] : 0;
  }
  /// A head's part of a block.
  static std::byte* part_of(const Tensor& rows, int64_t block, int64_t head) {
    return rows.data + static_cast<size_t>(block * rows.stride[0] + head * rows.stride[1]) *
                           size_of(rows.dtype);
  }
};

}  // namespace

// As many tokens a unit as fill a piece, or fewer if threads were without work; the longest
// contexts of a sequence first.
void CpuBackend::divide_attention(const Batch& batch, int64_t tokens, int64_t group,
                                  int64_t kv_heads, DType dtype) {
  const int32_t *starts = batch.cu_seqlens_q.ptr<int32_t>(),
                *lengths = batch.context_lens.ptr<int32_t>();
  int64_t rows = attention_rows(dtype);
  while (rows > kAttentionRows && tokens * group * kv_heads < 4 * threads_ * rows) rows /= 2;
  const int64_t step = std::max<int64_t>(1, rows / group);
  attention_units_.clear();
  for (int64_t s = 0; s < batch.num_seqs(); ++s) {
    const int64_t count = starts[s + 1] - starts[s];
    check(count >= 0 && starts[s + 1] <= tokens && lengths[s] >= count,
          "attention: sequence {} has rows {}..{} and {} keys", s, starts[s], starts[s + 1],
          lengths[s]);
    for (int64_t first = (count - 1) / step * step; first >= 0 && count > 0; first -= step)
      attention_units_.push_back({s, first, std::min(step, count - first)});
  }
}

void CpuBackend::rotary_embedding(Tensor q, Tensor k, Tensor positions, Tensor cos_sin) {
  const int64_t tokens = q.shape[0], d = q.shape[2];
  expect_heads("rotary q", q, q.dtype, tokens, q.shape[1], d);
  expect_heads("rotary k", k, q.dtype, tokens, k.shape[1], d);
  expect_vector("rotary positions", positions, DType::i32, tokens);
  const RotaryTable table(cos_sin);
  check(table.rotary_dim <= d, "rotary_dim {} exceeds head_dim {}", table.rotary_dim, d);
  const int32_t* position = positions.ptr<int32_t>();
  dispatch_float(q.dtype, [&]<class T>() {
    T *q_data = q.ptr<T>(), *k_data = k.ptr<T>();
    parallel_for(threads_, tokens, q.numel() + k.numel(), [&](int64_t begin, int64_t end, int) {
      const auto rotate = [&](T* row, int64_t heads, int64_t stride, int64_t at) {
        for (int64_t h = 0; h < heads; ++h)
          kernels_.of<T>().rope(row + h * stride, table.cos(at), table.sin(at),
                                table.rotary_dim / 2);
      };
      for (int64_t i = begin; i < end; ++i) {
        rotate(q_data + i * q.stride[0], q.shape[1], q.stride[1], position[i]);
        rotate(k_data + i * k.stride[0], k.shape[1], k.stride[1], position[i]);
      }
    });
  });
}

void CpuBackend::store_kv(KvCache cache, Tensor k, Tensor v, Tensor slot_mapping) {
  const CacheView view(cache);
  const int64_t tokens = k.shape[0];
  const DType dtype = view.dtype_beside(cache, k);
  expect_heads("store_kv k", k, dtype, tokens, view.kv_heads, view.head_dim);
  expect_heads("store_kv v", v, dtype, tokens, view.kv_heads, view.head_dim);
  expect_vector("store_kv slot_mapping", slot_mapping, DType::i32, tokens);
  const int32_t* slots = slot_mapping.ptr<int32_t>();
  dispatch_float(k.dtype, [&]<class T>() {
    const T *from_k = k.ptr<T>(), *from_v = v.ptr<T>();
    parallel_for(threads_, tokens, k.numel(), [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i)
        view.store(kernels_.of<T>(), cache, from_k + i * k.stride[0], k.stride[1],
                   from_v + i * v.stride[0], v.stride[1], slots[i]);
    });
  });
}

void CpuBackend::qk_norm_rope_store(Tensor q, Tensor k, Tensor v, Tensor q_norm, Tensor k_norm,
                                    float eps, const Batch& batch, Tensor cos_sin, KvCache cache) {
  const CacheView view(cache);
  const RotaryTable table(cos_sin);
  const int64_t tokens = q.shape[0], d = view.head_dim;
  const DType dtype = view.dtype_beside(cache, q);
  expect_heads("qk_norm_rope_store q", q, dtype, tokens, q.shape[1], d);
  expect_heads("qk_norm_rope_store k", k, dtype, tokens, view.kv_heads, d);
  expect_heads("qk_norm_rope_store v", v, dtype, tokens, view.kv_heads, d);
  expect_vector("qk_norm_rope_store q_norm", q_norm, q.dtype, d);
  expect_vector("qk_norm_rope_store k_norm", k_norm, q.dtype, d);
  expect_vector("qk_norm_rope_store positions", batch.positions, DType::i32, tokens);
  expect_vector("qk_norm_rope_store slot_mapping", batch.slot_mapping, DType::i32, tokens);
  check(table.rotary_dim <= d, "rotary_dim {} exceeds head_dim {}", table.rotary_dim, d);
  const int32_t *positions = batch.positions.ptr<int32_t>(),
                *slots = batch.slot_mapping.ptr<int32_t>();
  dispatch_float(q.dtype, [&]<class T>() {
    T *q_data = q.ptr<T>(), *k_data = k.ptr<T>();
    const T *v_data = v.ptr<T>(), *q_weight = q_norm.ptr<T>(), *k_weight = k_norm.ptr<T>();
    const FloatKernels<T>& kernels = kernels_.of<T>();
    parallel_for(
        threads_, tokens, (q.numel() + k.numel()) * 4, [&](int64_t begin, int64_t end, int) {
          const auto prepare = [&](T* row, int64_t heads, int64_t stride, const T* weight,
                                   int64_t position) {
            for (int64_t h = 0; h < heads; ++h) {
              T* head = row + h * stride;
              kernels.rms_norm(head, head, weight, d, eps);
              kernels.rope(head, table.cos(position), table.sin(position), table.rotary_dim / 2);
            }
          };
          for (int64_t i = begin; i < end; ++i) {
            T* k_row = k_data + i * k.stride[0];
            prepare(q_data + i * q.stride[0], q.shape[1], q.stride[1], q_weight, positions[i]);
            prepare(k_row, view.kv_heads, k.stride[1], k_weight, positions[i]);
            view.store(kernels, cache, k_row, k.stride[1], v_data + i * v.stride[0], v.stride[1],
                       slots[i]);
          }
        });
  });
}

void CpuBackend::attention(Tensor out, Tensor q, KvCache cache, const Batch& batch, float scale,
                           int64_t window) {
  check(window >= 0, "attention: a window of {}", window);
  const CacheView view(cache);
  const int64_t tokens = q.shape[0], heads = q.shape[1], sequences = batch.num_seqs(),
                group = heads / view.kv_heads;
  const DType dtype = view.dtype_beside(cache, q);
  expect_heads("attention q", q, dtype, tokens, heads, view.head_dim);
  expect_heads("attention out", out, dtype, tokens, heads, view.head_dim);
  expect_vector("attention cu_seqlens_q", batch.cu_seqlens_q, DType::i32, sequences + 1);
  expect_vector("attention context_lens", batch.context_lens, DType::i32, sequences);
  check(group * view.kv_heads == heads, "{} heads over {} KV heads", heads, view.kv_heads);
  const int32_t *starts = batch.cu_seqlens_q.ptr<int32_t>(),
                *lengths = batch.context_lens.ptr<int32_t>();
  const int32_t* tables = batch.block_tables.ptr<int32_t>();
  reserve_scratch(attention_scratch_floats(view.head_dim, attention_rows(q.dtype)));

  divide_attention(batch, tokens, group, view.kv_heads, q.dtype);
  const std::vector<AttentionUnit>& units = attention_units_;
  dispatch_float(q.dtype, [&]<class T>() {
    const T* q_data = q.ptr<T>();
    T* out_data = out.ptr<T>();
    const FloatKernels<T>& kernels = kernels_.of<T>();
    parallel_each(threads_, static_cast<int64_t>(units.size()) * view.kv_heads,
                  [&](int64_t i, int thread) {
                    const AttentionUnit& unit = units[static_cast<size_t>(i / view.kv_heads)];
                    const int64_t s = unit.sequence, kv_head = i % view.kv_heads,
                                  token = starts[s] + unit.first;
                    kernels.attention(
                        {.q = q_data + token * q.stride[0] + kv_head * group * q.stride[1],
                         .out = out_data + token * out.stride[0] + kv_head * group * out.stride[1],
                         .q_token_stride = q.stride[0],
                         .q_head_stride = q.stride[1],
                         .out_token_stride = out.stride[0],
                         .out_head_stride = out.stride[1],
                         .k = view.part_of(cache.k, 0, kv_head),
                         .v = view.part_of(cache.v, 0, kv_head),
                         .k_block_stride = view.part_of(cache.k, 1, 0) - cache.k.data,
                         .v_block_stride = view.part_of(cache.v, 1, 0) - cache.v.data,
                         .is_e4m3 = view.is_e4m3,
                         .block_table = tables + s * batch.block_tables.stride[0],
                         .block_shift = std::countr_zero(static_cast<uint64_t>(view.block_size)),
                         .head_dim = view.head_dim,
                         .group = group,
                         .num_tokens = unit.count,
                         .first_position = lengths[s] - (starts[s + 1] - starts[s]) + unit.first,
                         .window = window,
                         .scale = scale,
                         .scratch = scratch(thread)});
                  });
  });
}

}  // namespace nanovllm::cpu
