#include "bench/attention_rig.h"

#include <cmath>
#include <numeric>

#include "ops/noise.h"

namespace nanovllm::cli {
namespace {

/// Pages as rows, for copies.
Tensor rows_of(const Tensor& pages) {
  return {
      pages.data,
      DType::bf16,
      {pages.shape[0], pages.stride[0] * static_cast<int64_t>(size_of(pages.dtype)) / int64_t{2}},
      pages.device};
}

}  // namespace

double AttentionShape::cache_bytes() const {
  return 2.0 * double(seqs * context * kv_heads) * double(kv_row_bytes(cache_dtype, head_dim));
}

double AttentionShape::flops() const {
  const double n = double(queries);
  const double pairs = n * double(context - queries) + n * (n + 1) / 2;  // causal
  return 4.0 * double(seqs * heads * head_dim) * pairs;
}

AttentionRig::AttentionRig(Backend& device, const AttentionShape& shape, int64_t layers,
                           int64_t calls)
    : device_(device), shape_(shape), calls_(calls) {
  const int64_t each = shape.blocks_per_seq(), blocks = shape.seqs * each,
                tokens = shape.seqs * shape.queries;
  for (int64_t i = 0; i < layers; ++i) layers_.push_back(filled_cache());
  // A sequence's pages lie scattered: the step is prime, so that every page is some block's.
  std::vector<int32_t> tables(static_cast<size_t>(blocks));
  for (int64_t b = 0; b < blocks; ++b)
    tables[static_cast<size_t>(b)] =
        static_cast<int32_t>(std::gcd(blocks, int64_t{7919}) == 1 ? b * 7919 % blocks : b);
  page_rows_ = upload(tables, {blocks});

  std::vector<int32_t> starts, contexts, row_starts{0}, row_contexts, row_tables;
  for (int64_t s = 0; s <= shape.seqs; ++s)
    starts.push_back(static_cast<int32_t>(s * shape.queries));
  contexts.assign(static_cast<size_t>(shape.seqs), static_cast<int32_t>(shape.context));
  whole_ = batch(starts, contexts, page_rows_.reshape({shape.seqs, each}));
  std::vector<int32_t> order(static_cast<size_t>(blocks));
  std::iota(order.begin(), order.end(), 0);
  in_order_ = batch(starts, contexts, upload(order, {shape.seqs, each}));
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t s = t / shape.queries, row = t % shape.queries;
    row_starts.push_back(static_cast<int32_t>(t + 1));
    row_contexts.push_back(static_cast<int32_t>(shape.context - shape.queries + row + 1));
    row_tables.insert(row_tables.end(), tables.begin() + static_cast<std::ptrdiff_t>(s * each),
                      tables.begin() + static_cast<std::ptrdiff_t>((s + 1) * each));
  }
  rows_ = batch(row_starts, row_contexts, upload(row_tables, {tokens, each}));
  rows_.max_seqlen_q = 1;
  rows_.num_decodes = tokens;

  q_ = memory(shape.dtype, {tokens, shape.heads, shape.head_dim});
  out_ = memory(shape.dtype, {tokens, shape.heads, shape.head_dim});
  fill(q_, 3);
  device_.synchronize();
}

Tensor AttentionRig::memory(DType dtype, std::initializer_list<int64_t> shape) {
  Tensor t(nullptr, dtype, shape, device_.device());
  buffers_.push_back(device_.allocate(t.bytes()));
  t.data = buffers_.back().get();
  return t;
}

Tensor AttentionRig::upload(const std::vector<int32_t>& values,
                            std::initializer_list<int64_t> shape) {
  const Tensor t = memory(DType::i32, shape);
  device_.copy(t, Tensor(const_cast<int32_t*>(values.data()), DType::i32, shape));
  device_.synchronize();
  return t;
}

void AttentionRig::fill(Tensor t, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(t.numel()));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = 2 * noise_uniform(noise_bits(seed, 0, static_cast<uint32_t>(i)).x[0]) - 1;
  const Tensor host(values.data(), DType::f32, {t.shape[0], t.shape[1], t.shape[2]});
  device_.load(t, std::span(&host, 1));
  device_.synchronize();
}

KvCache AttentionRig::empty_cache() {
  const auto pages = [&] {
    Tensor t = kv_pages(nullptr, shape_.cache_dtype,
                        {shape_.seqs * shape_.blocks_per_seq(), shape_.kv_heads, shape_.block_size,
                         shape_.head_dim},
                        device_.device());
    t.data = memory(shape_.cache_dtype, {t.shape[0], t.stride[0]}).data;
    return t;
  };
  const Tensor k = pages();
  return {k, pages()};
}

// Every page holds the same numbers: the values do not matter, the addresses do.
KvCache AttentionRig::filled_cache() {
  const KvCache cache = empty_cache();
  const std::initializer_list<int64_t> rows = {shape_.block_size, shape_.kv_heads, shape_.head_dim};
  std::vector<int32_t> slots(static_cast<size_t>(shape_.block_size));
  std::iota(slots.begin(), slots.end(), 0);
  const Tensor k = memory(shape_.dtype, rows), v = memory(shape_.dtype, rows);
  fill(k, 1);
  fill(v, 2);
  device_.store_kv(cache, k, v, upload(slots, {shape_.block_size}));
  for (const Tensor& t : {rows_of(cache.k), rows_of(cache.v)})
    for (int64_t b = 1; b < t.shape[0]; ++b) device_.copy(t[b], t[0]);
  device_.synchronize();
  return cache;
}

Batch AttentionRig::batch(const std::vector<int32_t>& starts, const std::vector<int32_t>& contexts,
                          Tensor tables) {
  Batch b;
  const auto seqs = static_cast<int64_t>(contexts.size());
  b.tokens = b.positions = b.slot_mapping = memory(DType::i32, {starts.back()});
  b.cu_seqlens_q = upload(starts, {seqs + 1});
  b.context_lens = upload(contexts, {seqs});
  b.block_tables = tables;
  b.max_seqlen_q = shape_.queries;
  b.max_context_len = shape_.context;
  if (shape_.queries == 1) b.num_decodes = seqs;
  return b;
}

void AttentionRig::run(const Batch& batch,
                       const std::function<const KvCache&(const KvCache&)>& before) {
  const float scale = 1 / std::sqrt(static_cast<float>(shape_.head_dim));
  device_.begin_step(batch);
  for (size_t i = 0; i < static_cast<size_t>(calls_); ++i)
    device_.attention(out_, q_, before(layers_[i % layers_.size()]), batch, scale, 0);
}

void AttentionRig::paged() {
  run(whole_, [](const KvCache& layer) -> const KvCache& { return layer; });
}

void AttentionRig::row_by_row() {
  run(rows_, [](const KvCache& layer) -> const KvCache& { return layer; });
}

void AttentionRig::gathered() {
  if (!contiguous_.k.defined()) contiguous_ = empty_cache();
  run(in_order_, [&](const KvCache& layer) -> const KvCache& {
    device_.gather_rows(rows_of(contiguous_.k), rows_of(layer.k), page_rows_);
    device_.gather_rows(rows_of(contiguous_.v), rows_of(layer.v), page_rows_);
    return contiguous_;
  });
}

}  // namespace nanovllm::cli
