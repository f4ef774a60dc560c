// Batch: all that a forward pass knows about its sequences. KvCache: one layer's paged keys and
// values.
#pragma once

#include "core/tensor.h"

namespace nanovllm {

/// One step's rows: the tokens of all scheduled sequences, one after another. The tensors live on
/// the backend's device and are contiguous i32. Sequence s has the query rows cu_seqlens_q[s] ..
/// cu_seqlens_q[s + 1); its keys are the positions 0 .. context_lens[s), the last of which are
/// those of its query rows (causal: a row at position p sees keys 0 .. p).
struct Batch {
  Tensor tokens, positions, slot_mapping;  // [num_tokens]; slot = block * block_size + offset; -1:
                                           // store nothing (padding)
  Tensor cu_seqlens_q, context_lens;       // [num_seqs + 1], [num_seqs]
  Tensor block_tables;  // [num_seqs, max_blocks_per_seq]; entries past a sequence's blocks are not
                        // read
  Tensor logits_rows;   // [num_logits_rows]: rows of the hidden states that need logits
  int64_t max_seqlen_q = 0,
          max_context_len = 0;  // over the batch; bounds for grids, never for results
  /// The first num_decodes sequences have one row each, and their other keys have been in the cache
  /// since earlier steps: this step computes none of those for another sequence.
  int64_t num_decodes = 0;

  int64_t num_tokens() const { return tokens.shape[0]; }
  int64_t num_seqs() const { return context_lens.shape[0]; }
  bool is_decode() const { return num_decodes == num_seqs(); }
};

/// Keys and values of one layer, each [num_blocks, num_kv_heads, block_size, head_dim]; the last
/// two axes are dense. Their dtype is that of activations or e4m3: a row of a head is then numbers
/// times a scale (docs/contract.md), and the f32 scales of a head's rows lie behind those of its
/// part of a block, in their order.
struct KvCache {
  Tensor k, v;
  // f32 [kv_heads], of all rows of a head; none: a row's own, by its largest magnitude
  Tensor k_scales{}, v_scales{};
};

/// Bytes of a head's row of keys or values.
constexpr size_t kv_row_bytes(DType dtype, int64_t head_dim) {
  return static_cast<size_t>(head_dim) * size_of(dtype) + (dtype == DType::e4m3 ? 4 : 0);
}
/// A view of `data`, whose rows have so many bytes, as keys or values of this shape.
inline Tensor kv_pages(void* data, DType dtype, std::initializer_list<int64_t> shape,
                       Device device) {
  Tensor t(data, dtype, shape, device);
  if (dtype != DType::e4m3) return t;
  t.stride[1] = t.shape[2] * static_cast<int64_t>(kv_row_bytes(dtype, t.shape[3]));
  t.stride[0] = t.shape[1] * t.stride[1];
  return t;
}

}  // namespace nanovllm
