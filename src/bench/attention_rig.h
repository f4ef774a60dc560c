// A paged cache with sequences in it, to measure attention alone.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "ops/backend.h"

namespace nanovllm::cli {

struct AttentionShape {
  int64_t seqs = 1;
  int64_t queries = 1;  ///< rows of each sequence: its last ones
  int64_t context = 1;  ///< keys of each sequence
  int64_t heads = 16, kv_heads = 8, head_dim = 128;
  int64_t block_size = 64;
  DType dtype = DType::bf16, cache_dtype = DType::bf16;

  int64_t blocks_per_seq() const { return (context + block_size - 1) / block_size; }
  /// Bytes of all keys and values: what a decode step has to read.
  double cache_bytes() const;
  /// FLOPs of the products, over the keys that each row sees.
  double flops() const;
};

class AttentionRig {
 public:
  /// `layers` caches, so that no one finds its keys in a cache of the device.
  AttentionRig(Backend& device, const AttentionShape& shape, int64_t layers, int64_t calls);

  /// The calls that a model's step issues: so many calls of attention over the pages, one after
  /// another. The caches take turns.
  void paged();
  /// The same where every query row is a sequence of its own: nothing is shared between rows.
  void row_by_row();
  /// The same where each layer's pages are first copied into one contiguous cache.
  void gathered();

 private:
  Tensor memory(DType dtype, std::initializer_list<int64_t> shape);
  Tensor upload(const std::vector<int32_t>& values, std::initializer_list<int64_t> shape);
  void fill(Tensor t, uint64_t seed);  // [t, heads, head_dim]
  KvCache empty_cache();
  KvCache filled_cache();
  Batch batch(const std::vector<int32_t>& starts, const std::vector<int32_t>& contexts,
              Tensor tables);
  /// `before` prepares a layer's cache and says where it is.
  void run(const Batch& batch, const std::function<const KvCache&(const KvCache&)>& before);

  Backend& device_;
  const AttentionShape shape_;
  const int64_t calls_;
  std::vector<Buffer> buffers_;
  std::vector<KvCache> layers_;
  Tensor q_, out_, page_rows_;
  Batch whole_, rows_, in_order_;
  KvCache contiguous_;  // made by the first gathered()
};

}  // namespace nanovllm::cli
