// Puts host values on a backend and takes results off it, for tests that run one piece of code on
// two backends or in two ways.
#pragma once

#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "ops/backend.h"

namespace nanovllm {

inline std::vector<float> normal_values(int64_t count, uint32_t seed, float sigma = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

class Rig {
 public:
  explicit Rig(Backend& b) : backend(b) {}
  Backend& backend;

  Tensor empty(DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t(nullptr, dtype, shape, backend.device());
    buffers_.push_back(backend.allocate(t.bytes() + 256));
    t.data = buffers_.back().get();
    return t;
  }
  Tensor upload(std::span<const float> values, DType dtype, std::initializer_list<int64_t> shape) {
    std::vector<std::byte> bytes(values.size() * size_of(dtype));
    dispatch_float(dtype, [&]<class T>() {
      for (size_t i = 0; i < values.size(); ++i) {
        const T value = static_cast<T>(values[i]);
        std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof value);
      }
    });
    return place(bytes.data(), bytes.size(), dtype, shape);
  }
  Tensor upload(std::span<const int32_t> values, std::initializer_list<int64_t> shape) {
    return place(values.data(), values.size_bytes(), DType::i32, shape);
  }
  Tensor upload(std::span<const int64_t> values, std::initializer_list<int64_t> shape) {
    return place(values.data(), values.size_bytes(), DType::i64, shape);
  }
  Tensor ints(std::initializer_list<int32_t> values) {
    return upload(std::span<const int32_t>(values.begin(), values.size()),
                  {static_cast<int64_t>(values.size())});
  }
  /// [rows, columns] inside rows that are `pad` elements longer.
  Tensor padded(std::span<const float> values, DType dtype, int64_t rows, int64_t columns,
                int64_t pad) {
    std::vector<float> wide(static_cast<size_t>(rows * (columns + pad)), kSentinel);
    for (int64_t i = 0; i < rows; ++i)
      std::copy_n(values.begin() + i * columns, columns, wide.begin() + i * (columns + pad));
    return upload(wide, dtype, {rows, columns + pad}).cols(0, columns);
  }
  Weight weight(std::span<const float> values, DType dtype, int64_t n, int64_t k,
                bool in_halves = false) {
    WeightFormat format = plain_format(dtype);
    format.in_halves = in_halves;
    buffers_.push_back(backend.allocate(backend.weight_bytes(format, n, k)));
    const Weight w = backend.weight_view(buffers_.back().get(), format, n, k);
    std::vector<float> copy(values.begin(), values.end());
    const Tensor host(copy.data(), DType::f32, {n, k});
    backend.load(w.data, std::span(&host, 1));
    return w;
  }
  /// Random numbers of 8 bits; scales differ from block to block, where rows have groups.
  Weight quantised_weight(const WeightFormat& format, int64_t n, int64_t k, uint32_t seed) {
    std::mt19937 random(seed);
    QuantizedRows rows;
    for (int64_t i = 0; i < n * k; ++i)
      rows.numbers.push_back(
          static_cast<int8_t>(random() % 2 ? random() % 127 : 128 + random() % 127));
    for (int64_t i = 0; i < n * format.groups(k); ++i)
      rows.scales.push_back(0.001f +
                            0x1p-12f * static_cast<float>(i / format.groups(k) / kRowGroup % 7 +
                                                          i % format.groups(k)));
    rows.input_scale = format.rows == WeightFormat::Rows::tensor ? 0.01f : 0.0f;
    buffers_.push_back(backend.allocate(backend.weight_bytes(format, n, k)));
    const Weight w = backend.weight_view(buffers_.back().get(), format, n, k);
    backend.load_quantised(w, rows);
    return w;
  }

  /// The bytes from the first element to the last, gaps of strided rows included.
  std::vector<std::byte> bytes(const Tensor& t) {
    int64_t last = 0;
    for (size_t axis = 0; axis < static_cast<size_t>(t.rank); ++axis)
      last += (t.shape[axis] - 1) * t.stride[axis];
    std::vector<std::byte> host(t.numel() == 0 ? 0
                                               : static_cast<size_t>(last + 1) * size_of(t.dtype));
    const int64_t units = static_cast<int64_t>(host.size() / size_of(t.dtype));
    backend.copy(Tensor(host.data(), t.dtype, {units}), Tensor(t.data, t.dtype, {units}, t.device));
    backend.synchronize();
    return host;
  }
  /// The elements in row-major order, as floats.
  std::vector<float> floats(const Tensor& t) {
    const std::vector<std::byte> host = bytes(t);
    std::vector<float> values;
    values.reserve(static_cast<size_t>(t.numel()));
    std::array<int64_t, 4> at{};
    for (int64_t n = 0; n < t.numel(); ++n) {
      int64_t offset = 0;
      for (size_t axis = 0; axis < 4; ++axis) offset += at[axis] * t.stride[axis];
      const std::byte* p = host.data() + static_cast<size_t>(offset) * size_of(t.dtype);
      values.push_back(element(p, t.dtype));
      for (size_t axis = static_cast<size_t>(t.rank); axis-- > 0;) {
        if (++at[axis] < t.shape[axis]) break;
        at[axis] = 0;
      }
    }
    return values;
  }
  static constexpr float kSentinel = 1984.0f;  // exact in bf16

 private:
  static float element(const std::byte* p, DType dtype) {
    const auto as = [&]<class T>(T value) {
      std::memcpy(&value, p, sizeof value);
      return static_cast<float>(value);
    };
    switch (dtype) {
      case DType::f32:
        return as(float{});
      case DType::bf16:
        return as(bf16{});
      case DType::f16:
        return as(f16{});
      case DType::i32:
        return as(int32_t{});
      case DType::i64:
        return as(int64_t{});
      case DType::e4m3:
        break;
    }
    return 0;
  }
  Tensor place(const void* data, size_t size, DType dtype, std::initializer_list<int64_t> shape) {
    const Tensor t = empty(dtype, shape);
    check(t.bytes() == size, "rig: {} bytes for {}", size, t.describe());
    Tensor source = t;
    source.data = static_cast<std::byte*>(const_cast<void*>(data));
    source.device = {};
    backend.copy(t, source);
    backend.synchronize();
    return t;
  }
  std::vector<Buffer> buffers_;
};

/// The GPU, or null where there is none: then the test is skipped.
inline std::unique_ptr<Backend> open_gpu(std::string& why) {
  try {
    return make_backend("cuda", {});
  } catch (const Error& error) {
    why = error.what();
    return nullptr;
  }
}

/// A decode step of sequences of these lengths, the last token of each being the step's; 0:
/// padding. `tables`: [sequences, width], row after row.
inline Batch decode_batch(Rig& rig, const std::vector<int32_t>& contexts,
                          const std::vector<int32_t>& tables, int64_t block_size,
                          int64_t max_context) {
  const auto seqs = static_cast<int64_t>(contexts.size()),
             width = static_cast<int64_t>(tables.size()) / seqs;
  std::vector<int32_t> positions, slots, starts{0};
  for (int64_t s = 0; s < seqs; ++s) {
    const int64_t last = int64_t{contexts[static_cast<size_t>(s)]} - 1;
    const auto block = [&] { return tables[static_cast<size_t>(s * width + last / block_size)]; };
    positions.push_back(static_cast<int32_t>(std::max<int64_t>(last, 0)));
    slots.push_back(last < 0 ? -1 : static_cast<int32_t>(block() * block_size + last % block_size));
    starts.push_back(static_cast<int32_t>(s + 1));
  }
  Batch batch;
  batch.positions = batch.tokens = rig.upload(positions, {seqs});
  batch.slot_mapping = rig.upload(slots, {seqs});
  batch.cu_seqlens_q = rig.upload(starts, {seqs + 1});
  batch.context_lens = rig.upload(contexts, {seqs});
  batch.block_tables = rig.upload(tables, {seqs, width});
  batch.max_seqlen_q = 1;
  batch.num_decodes = seqs;
  batch.max_context_len = max_context;
  return batch;
}

/// Pages of E4M3 of which no number nor scale is one.
inline Tensor e4m3_pages(Rig& rig, std::initializer_list<int64_t> shape) {
  const Tensor layout = kv_pages(nullptr, DType::e4m3, shape, rig.backend.device());
  const int64_t words = layout.shape[0] * layout.stride[0] / 4;
  const std::vector<int32_t> none(static_cast<size_t>(words), -1);
  return kv_pages(rig.upload(none, {words}).data, DType::e4m3, shape, rig.backend.device());
}

/// A paged cache with sequences in it, laid out in a shuffled order of blocks.
struct PagedSequences {
  int64_t block_size, kv_heads, head_dim;
  std::vector<int> lengths;
  KvCache cache;
  std::vector<std::vector<int32_t>> blocks;

  /// Keys and values of sequence s are rows of normal_values(.., seed + s): the same for every
  /// block size. The cache has `dtype` or, with `e4m3`, E4M3.
  PagedSequences(Rig& rig, DType dtype, int64_t block, int64_t heads, int64_t d,
                 std::vector<int> lens, uint32_t seed, bool e4m3 = false)
      : block_size(block), kv_heads(heads), head_dim(d), lengths(std::move(lens)) {
    int32_t count = 1;
    for (const int length : lengths) {
      blocks.emplace_back();
      for (int64_t b = 0; b * block < length; ++b) blocks.back().push_back(count++);
    }
    std::vector<int32_t> order(static_cast<size_t>(count));
    for (int32_t i = 0; i < count; ++i) order[static_cast<size_t>(i)] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    for (auto& list : blocks)
      for (int32_t& b : list) b = order[static_cast<size_t>(b)];
    // Slots that no sequence has written are NaN: whoever reads it shows.
    const std::vector<float> nan(static_cast<size_t>(count * heads * block * d),
                                 std::numeric_limits<float>::quiet_NaN());
    const auto pages = [&] {
      if (!e4m3) return rig.upload(nan, dtype, {count, heads, block, d});
      return e4m3_pages(rig, {count, heads, block, d});
    };
    const Tensor k = pages();
    cache = {k, pages()};
    for (size_t s = 0; s < lengths.size(); ++s) {
      std::vector<int32_t> slots;
      for (int i = 0; i < lengths[s]; ++i)
        slots.push_back(
            static_cast<int32_t>(blocks[s][static_cast<size_t>(i / block)] * block + i % block));
      const auto values =
          normal_values(2 * lengths[s] * heads * d, seed + static_cast<uint32_t>(s));
      const Tensor kv = rig.upload(values, dtype, {lengths[s], 2 * heads * d});
      rig.backend.store_kv(cache, kv.cols(0, heads * d).split(d),
                           kv.cols(heads * d, 2 * heads * d).split(d),
                           rig.upload(slots, {lengths[s]}));
    }
  }

  struct Part {
    int sequence, begin, end;  // query rows begin .. end, by position
  };
  /// The batch of these parts; positions are absolute.
  Batch batch(Rig& rig, const std::vector<Part>& parts) const {
    std::vector<int32_t> positions, starts{0}, contexts, slots;
    size_t width = 1;
    for (const Part& p : parts)
      width = std::max(width, blocks[static_cast<size_t>(p.sequence)].size());
    std::vector<int32_t> tables(parts.size() * width, -1);
    Batch batch;
    for (size_t i = 0; i < parts.size(); ++i) {
      const Part& p = parts[i];
      for (int at = p.begin; at < p.end; ++at) positions.push_back(at);
      starts.push_back(static_cast<int32_t>(positions.size()));
      contexts.push_back(p.end);
      const auto& list = blocks[static_cast<size_t>(p.sequence)];
      std::copy(list.begin(), list.end(), tables.begin() + static_cast<std::ptrdiff_t>(i * width));
      batch.max_seqlen_q = std::max<int64_t>(batch.max_seqlen_q, p.end - p.begin);
      batch.max_context_len = std::max<int64_t>(batch.max_context_len, p.end);
      if (p.end - p.begin == 1 && batch.num_decodes == static_cast<int64_t>(i)) ++batch.num_decodes;
    }
    const auto size = [](const auto& v) { return static_cast<int64_t>(v.size()); };
    slots.assign(positions.size(), -1);
    batch.positions = batch.tokens = rig.upload(positions, {size(positions)});
    batch.slot_mapping = rig.upload(slots, {size(slots)});
    batch.cu_seqlens_q = rig.upload(starts, {size(starts)});
    batch.context_lens = rig.upload(contexts, {size(contexts)});
    batch.block_tables = rig.upload(tables, {size(parts), static_cast<int64_t>(width)});
    return batch;
  }
};

}  // namespace nanovllm
