#include "weights/weight_loader.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numbers>

#include "io/quantised/quantization.h"
#include "ops/noise.h"
#include "weights/weight_sources.h"

namespace nanovllm {
namespace {

/// Normal numbers of sigma 0.02 in the model's dtype: `count`, which is even.
std::vector<std::byte> normal_table(uint64_t seed, int64_t count, DType dtype) {
  std::vector<std::byte> table(static_cast<size_t>(count) * size_of(dtype));
  dispatch_float(dtype, [&]<class T>() {
    T* out = reinterpret_cast<T*>(table.data());
    for (int64_t i = 0; i < count; i += 2) {  // Box-Muller
      const Philox4 bits = noise_bits(seed, 0, static_cast<uint32_t>(i));
      const float radius = 0.02f * std::sqrt(-2.0f * std::log(noise_uniform(bits.x[0])));
      const float angle = 2.0f * std::numbers::pi_v<float> * noise_uniform(bits.x[1]);
      out[i] = static_cast<T>(radius * std::cos(angle));
      out[i + 1] = static_cast<T>(radius * std::sin(angle));
    }
  });
  return table;
}

}  // namespace

int64_t Shard::divide(int64_t total, const char* what) const {
  check(total % world_size == 0, ErrorKind::invalid_argument,
        "tensor_parallel_size {} does not divide {} ({})", world_size, what, total);
  return total / world_size;
}

std::byte* WeightLoader::place(size_t bytes) {
  std::byte* const data = storage_ ? storage_ + used_ : nullptr;
  used_ += (bytes + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
  return data;
}

Weight WeightLoader::matrix(WeightFormat format, std::vector<WeightPart> parts, int64_t n,
                            int64_t k, size_t place_in_stack) {
  const Weight weight =
      backend_.weight_view(place(backend_.weight_bytes(format, n, k)), format, n, k);
  num_parameters_ += n * k;
  if (format.is_quantised()) num_quantised_ += n * k;
  if (format.quantises_rows()) {
    num_row_quantising_ += n * k;
    quantised_columns_ = std::max(quantised_columns_, k);
  }
  parameters_.push_back(
      {weight.data, std::move(parts), true, format, parameters_.size() - place_in_stack});
  return weight;
}

Weight WeightLoader::matrix(std::vector<WeightPart> parts, int64_t n, int64_t k) {
  return matrix(plain_format(dtype_), std::move(parts), n, k);
}

Weight WeightLoader::linear(std::vector<WeightPart> parts, int64_t n, int64_t k) {
  const WeightFormat format = format_of({&parts, 1}, n, k, false);
  return matrix(format, std::move(parts), n, k);
}

Weight WeightLoader::row_parallel(const std::string& prefix, int64_t n, int64_t k, bool may_halve) {
  const int64_t size = shard_.divide(k, prefix.c_str()), first = shard_.rank * size;
  std::vector<WeightPart> parts{{prefix + ".weight", {n, k}, 0, -1, first, first + size}};
  const bool in_halves = may_halve && shard_.world_size == 1 && multiplies_in_halves(n, k);
  const WeightFormat format = format_of({&parts, 1}, n, size, false, in_halves);
  return matrix(format, std::move(parts), n, size);
}

Weight WeightLoader::matrices(int64_t count,
                              const std::function<std::vector<WeightPart>(int64_t i)>& parts_of,
                              int64_t n, int64_t k) {
  std::vector<std::vector<WeightPart>> parts;
  for (int64_t i = 0; i < count; ++i) parts.push_back(parts_of(i));
  const WeightFormat format = format_of(parts, n, k, true);
  if (format.quantises_rows()) quantised_expert_columns_ = std::max(quantised_expert_columns_, k);
  Weight stack;
  for (int64_t i = 0; i < count; ++i) {
    const size_t begin = used_;
    const auto at = static_cast<size_t>(i);
    const Weight one = matrix(format, std::move(parts[at]), n, k, at);
    if (i == 0) stack = stack_of(one, count, used_ - begin);
  }
  return stack;
}

Tensor WeightLoader::vector(std::vector<WeightPart> parts, int64_t n) {
  const Tensor dst(place(static_cast<size_t>(n) * size_of(dtype_)), dtype_, {n}, backend_.device());
  num_parameters_ += n;
  parameters_.push_back({dst, std::move(parts), false, plain_format(dtype_), parameters_.size()});
  return dst;
}

void WeightLoader::for_each_matrix(
    const std::function<void(const std::string&, const Weight&)>& visit) const {
  for (const Parameter& p : parameters_)
    if (p.is_matrix) visit(p.parts.front().name, {p.dst, p.format});
}

int64_t WeightLoader::bytes_of(size_t i) const {
  const std::byte* end =
      i + 1 < parameters_.size() ? parameters_[i + 1].dst.data : storage_ + used_;
  return end - parameters_[i].dst.data;
}

void WeightLoader::load(const Sources& sources, const SourceReader& read,
                        const std::function<void(size_t)>& dropped, const LoadProgress& progress) {
  std::vector<WeightSource> weights;
  std::vector<size_t> plain;  // the parameters that they fill
  int64_t done = parameters_[sources.first].dst.data - storage_;
  const auto loaded = [&](size_t i) {
    dropped(i);
    done += bytes_of(i);
    if (progress) progress(done, static_cast<int64_t>(used_));
  };
  for (size_t i = 0; i < sources.of.size(); ++i) {
    const Parameter& p = parameters_[sources.first + i];
    if (p.format.is_quantised()) {
      backend_.load_quantised({p.dst, p.format}, sources.rows.at(sources.first + i));
      loaded(sources.first + i);
    } else {
      weights.push_back({p.dst, sources.of[i]});
      plain.push_back(sources.first + i);
    }
  }
  if (!weights.empty()) backend_.load_all(weights, read, [&](size_t i) { loaded(plain[i]); });
  backend_.synchronize();
}

namespace {

uint32_t hash_of(const std::string& name) {
  uint32_t hash = 2166136261;  // FNV-1a
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619;
  return hash;
}

constexpr uint64_t kDummyNumbers = 65537;  // a prime: rows begin at ever other places of a table

/// Evenly distributed numbers, a table of kDummyNumbers. Of E4M3 without subnormal numbers: few of
/// a checkpoint's are, and some processors are slow there.
std::vector<int8_t> dummy_numbers(WeightFormat::Numbers numbers, uint64_t seed) {
  std::vector<int8_t> table;
  for (uint32_t i = 0; i < kDummyNumbers; ++i) {
    const uint32_t q = noise_bits(seed, 0, i).x[0] >> 24;
    // From -7: a mean that is not zero would soon be all that rows of activations have.
    int number = numbers == WeightFormat::int4 ? static_cast<int>(q % 15) - 7 : static_cast<int>(q);
    if (numbers == WeightFormat::e4m3 && (q & 0x7f) == 0x7f) number = 0;  // no NaN
    if (numbers == WeightFormat::e4m3 && (q & 0x78) == 0) number |= 8;
    table.push_back(static_cast<int8_t>(number));
  }
  return table;
}

/// A random weight [n, k] that stays quantised: numbers of `table` under one scale.
QuantizedRows dummy_rows(WeightFormat format, const std::vector<WeightPart>& parts, int64_t n,
                         int64_t k, const std::vector<int8_t>& table) {
  QuantizedRows rows;
  const auto scales = static_cast<size_t>(n * format.groups(k));
  // The numbers' own deviations: of 15 and 256 integers, and of all E4M3 numbers.
  const float scale = 0.02f / (format.numbers == WeightFormat::int4   ? 4.3f
                               : format.numbers == WeightFormat::int8 ? 73.9f
                                                                      : 112.0f);
  rows.scales.assign(scales, static_cast<float>(bf16(scale)));  // as most checkpoints' scales
  if (format.has_zeros()) rows.zeros.assign(scales, 0);
  if (format.rows == WeightFormat::Rows::tensor) rows.input_scale = 0.01f;
  // A tensor's elements are the table's, over and over, from a place that its name says.
  rows.numbers.reserve(static_cast<size_t>(n * k));
  for (const WeightPart& part : parts)
    for (int64_t row = part.row_begin, end = part.row_end < 0 ? part.shape[0] : part.row_end;
         row < end; ++row) {
      uint64_t at =
          hash_of(part.name) + static_cast<uint64_t>(row * part.shape[1] + part.col_begin);
      for (auto left = static_cast<uint64_t>(k); left > 0;) {
        const uint64_t from = at % kDummyNumbers, count = std::min(left, kDummyNumbers - from);
        const auto first = table.begin() + static_cast<std::ptrdiff_t>(from);
        rows.numbers.insert(rows.numbers.end(), first, first + static_cast<std::ptrdiff_t>(count));
        at += count;
        left -= count;
      }
    }
  return rows;
}

/// The random matrix that stands for a checkpoint's tensor: blocks of rows, each read from `table`
/// at an offset that follows from the tensor's name. Appends what `part` has of it.
void append_dummy(const WeightPart& part, uint64_t seed, std::span<std::byte> table, DType dtype,
                  std::vector<Tensor>& sources) {
  const auto table_size = static_cast<int64_t>(table.size() / size_of(dtype));
  const int64_t n = part.shape[0], k = part.shape[1],
                block = std::clamp<int64_t>(table_size / 2 / k, 1, n);
  const uint32_t name = hash_of(part.name);
  const int64_t end = part.row_end < 0 ? n : part.row_end;
  for (int64_t row = part.row_begin; row < end;) {
    const int64_t first = row / block * block, last = std::min(first + block, end);
    const int64_t offset = noise_bits(seed, name, static_cast<uint32_t>(row / block)).x[0] %
                           static_cast<uint32_t>(table_size - block * k + 1);
    const Tensor whole(table.data() + static_cast<size_t>(offset) * size_of(dtype), dtype,
                       {last - first, k});
    WeightPart rows = part;
    rows.row_begin = row - first;
    rows.row_end = last - first;
    sources.push_back(slice(whole, rows));
    row = last;
  }
}

}  // namespace

// Random weights of the right spread at memory speed: one table of normal numbers, read from a
// different offset for every block of rows. The ranks of a model have slices of the same matrices.
void WeightLoader::load_dummy(uint64_t seed, const LoadProgress& progress) {
  check(storage_ != nullptr, "weights cannot be loaded in the counting pass");
  int64_t widest = 0, longest = 0;
  for (const Parameter& p : parameters_) {
    for (const WeightPart& part : p.parts)
      widest = std::max(widest, p.is_matrix ? part.shape[1] : 0);
    longest = std::max(longest, p.is_matrix ? 0 : p.dst.shape[0]);
  }
  const int64_t table_size = std::max<int64_t>(int64_t{1} << 22, 2 * widest);
  std::vector<std::byte> table = normal_table(seed, table_size, dtype_);
  std::map<WeightFormat::Numbers, std::vector<int8_t>> tables;
  std::vector<float> zeros(static_cast<size_t>(longest), 0), ones(zeros.size(), 1);
  const auto read = [](std::span<std::byte> to, const std::byte* from) {
    std::memcpy(to.data(), from, to.size());
  };
  Sources sources;
  std::vector<std::vector<float>> padding(parameters_.size());
  const auto flush = [&] {  // so that one quantised weight at a time is in memory
    if (!sources.of.empty())
      load(
          sources, read, [](size_t) {}, progress);
    sources = {.of = {}, .rows = {}, .first = sources.first + sources.of.size()};
  };
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& p = parameters_[i];
    if (p.format.is_quantised()) flush();
    auto& of = sources.of.emplace_back();
    if (p.format.is_quantised()) {
      std::vector<int8_t>& numbers = tables[p.format.numbers];
      if (numbers.empty()) numbers = dummy_numbers(p.format.numbers, seed);
      sources.rows[i] = dummy_rows(p.format, p.parts, p.dst.shape[0], p.dst.shape[1], numbers);
      flush();
    } else if (p.is_matrix) {
      for (const WeightPart& part : p.parts) append_dummy(part, seed, table, dtype_, of);
      pad_rows(of, p.dst, padding[i]);
    } else {
      const bool is_bias = p.parts.front().name.ends_with(".bias");
      of.emplace_back((is_bias ? zeros : ones).data(), DType::f32,
                      std::initializer_list<int64_t>{p.dst.shape[0]});
    }
  }
  flush();
}

}  // namespace nanovllm
