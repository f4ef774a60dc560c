// Reads a quantised weight's tensors: scales, zero points and numbers.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/check.h"
#include "io/quantised/quantized_weight.h"

namespace nanovllm {
namespace {

/// AutoAWQ's gemm: where in an int32 a column of eight lies, in nibbles.
constexpr int kAwqPlace[8] = {0, 4, 1, 5, 2, 6, 3, 7};

/// FP8 E4M3 as checkpoints have it (OCP's 8-bit floating point, "e4m3fn"): a sign, four bits of
/// exponent with a bias of 7, three of mantissa; no infinities, and one NaN of either sign.
bool is_nan(uint8_t bits) { return (bits & 0x7f) == 0x7f; }
float e4m3_value(uint8_t bits) {
  const int exponent = bits >> 3 & 0xf, mantissa = bits & 7;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

/// The eight numbers of four bits, the lowest first, a byte each.
uint64_t bytes_of(uint32_t word) {
  uint64_t x = word;
  x = (x | x << 16) & 0x0000ffff0000ffff;
  x = (x | x << 8) & 0x00ff00ff00ff00ff;
  return (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
}

uint32_t word_at(const std::vector<std::byte>& bytes, int64_t i) {
  uint32_t word = 0;
  std::memcpy(&word, bytes.data() + static_cast<size_t>(i) * sizeof word, sizeof word);
  return word;
}

}  // namespace

int64_t QuantizedWeight::group_of(int64_t column) const {
  if (!order_.empty()) return order_[static_cast<size_t>(column)];
  if (scheme_.scales == QuantScales::group) return column / scheme_.group_size;
  return scheme_.scales == QuantScales::block ? column / kQuantBlock : 0;
}

/// How many columns from this one on are of its group for certain.
int64_t QuantizedWeight::run_from(int64_t column) const {
  if (!order_.empty()) return 1;
  if (scheme_.scales == QuantScales::group) return scheme_.group_size - column % scheme_.group_size;
  return scheme_.scales == QuantScales::block ? kQuantBlock - column % kQuantBlock : k_ - column;
}

/// The elements of `block` of a stored matrix, row after row.
std::vector<std::byte> QuantizedWeight::read(const Place& place, const WeightBlock& block) const {
  const auto width = static_cast<size_t>(block.cols()) * place.size;
  std::vector<std::byte> bytes(static_cast<size_t>(block.rows()) * width);
  const std::byte* from = place.tensor->data.data();
  const auto at = [&](int64_t row) {
    return from + static_cast<size_t>(row * place.cols + block.col_begin) * place.size;
  };
  if (block.cols() == place.cols) {
    checkpoint_->read(bytes, at(block.row_begin));
    return bytes;
  }
  for (int64_t r = 0; r < block.rows(); ++r)
    checkpoint_->read({bytes.data() + static_cast<size_t>(r) * width, width},
                      at(block.row_begin + r));
  return bytes;
}

/// The same of scales, checked.
std::vector<float> QuantizedWeight::read_floats(const Place& place,
                                                const WeightBlock& block) const {
  const std::vector<float> values = place.tensor->to_floats(read(place, block));
  for (const float value : values)
    check(std::isfinite(value) && value > 0, ErrorKind::model,
          "{}: tensor {} has a scale of {}: scales are finite and above 0",
          checkpoint_->file_of(place.name), place.name, value);
  return values;
}

/// The same of the weight's own scales.
std::vector<float> QuantizedWeight::read_scales(const WeightBlock& block) const {
  std::vector<float> scales = read_floats(scales_, block);
  for (const float scale : scales)
    check(scale >= kLeastScale && scale < kMostScale, ErrorKind::model,
          "{}: tensor {} has a scale of {}: scales of weights are from 2^-100 to below 2^7",
          checkpoint_->file_of(scales_.name), scales_.name, scale);
  return scales;
}

/// [rows, groups] of the block's rows.
std::vector<float> QuantizedWeight::group_scales(const WeightBlock& block) const {
  const int64_t rows = block.rows();
  std::vector<float> out(static_cast<size_t>(rows * groups_));
  const bool transposed =
      scheme_.storage == QuantStorage::gptq || scheme_.storage == QuantStorage::awq;
  if (transposed) {
    const auto stored = read_scales({0, groups_, block.row_begin, block.row_end});
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t g = 0; g < groups_; ++g)
        out[static_cast<size_t>(r * groups_ + g)] = stored[static_cast<size_t>(g * rows + r)];
    return out;
  }
  const int64_t per_scale = scheme_.scales == QuantScales::tensor  ? n_
                            : scheme_.scales == QuantScales::block ? kQuantBlock
                                                                   : 1;
  const int64_t first = block.row_begin / per_scale, last = divide_up(block.row_end, per_scale);
  const auto stored = read_scales({first, last, 0, groups_});
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t from = ((block.row_begin + r) / per_scale - first) * groups_;
    std::copy_n(stored.begin() + from, groups_, out.begin() + r * groups_);
  }
  return out;
}

/// The zero points of the block's rows, [rows, groups].
std::vector<float> QuantizedWeight::group_zeros(const WeightBlock& block) const {
  const int64_t rows = block.rows();
  const int middle = 1 << (scheme_.bits - 1);
  std::vector<float> out(static_cast<size_t>(rows * groups_), static_cast<float>(middle));
  if (zeros_.tensor == nullptr) return out;
  if (zeros_are_bytes_) {
    const auto bytes = read(zeros_, {block.row_begin, block.row_end, 0, groups_});
    for (size_t i = 0; i < out.size(); ++i) {
      const int zero = static_cast<int8_t>(bytes[i]);
      check(zero >= -middle && zero < middle, ErrorKind::model,
            "{}: tensor {} has a zero point of {}, beyond {} bits",
            checkpoint_->file_of(zeros_.name), zeros_.name, zero, scheme_.bits);
      out[i] = static_cast<float>(zero + middle);
    }
    return out;
  }
  const uint32_t mask = (1u << scheme_.bits) - 1;
  const int64_t first = block.row_begin / per_word_, last = divide_up(block.row_end, per_word_);
  const bool is_packed = scheme_.storage == QuantStorage::packed;  // words [n / 8, groups]
  const auto words =
      is_packed ? read(zeros_, {first, last, 0, groups_}) : read(zeros_, {0, groups_, first, last});
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t g = 0; g < groups_; ++g) {
      const int64_t row = block.row_begin + r, word = row / per_word_ - first;
      const auto digit = static_cast<size_t>(row % per_word_);
      const int place =
          scheme_.storage == QuantStorage::awq ? kAwqPlace[digit] : static_cast<int>(digit);
      const uint32_t stored =
          word_at(words, is_packed ? word * groups_ + g : g * (last - first) + word) >>
              (place * scheme_.bits) &
          mask;
      const auto zero = static_cast<int>(stored) + scheme_.zero_offset;
      check(scheme_.storage != QuantStorage::gptq || !scheme_.symmetric || zero == middle,
            ErrorKind::model, "{}: tensor {} has a zero point of {}, but config.json's sym is true",
            checkpoint_->file_of(zeros_.name), zeros_.name, zero);
      // Readers of the first format take a stored 15 for 16 or for 0.
      check(scheme_.zero_offset == 0 || stored != mask, ErrorKind::model,
            "{}: tensor {} has a zero point that its format cannot express: use one saved as "
            "gptq_v2",
            checkpoint_->file_of(zeros_.name), zeros_.name);
      out[static_cast<size_t>(r * groups_ + g)] = static_cast<float>(zero);
    }
  return out;
}

/// The block's numbers as they are stored, a byte each.
std::vector<uint8_t> QuantizedWeight::integers(const WeightBlock& block) const {
  const int64_t rows = block.rows(), cols = block.cols();
  std::vector<uint8_t> out(static_cast<size_t>(rows * cols));
  if (scheme_.is_bytes()) {
    const auto bytes = read(numbers_, block);
    std::memcpy(out.data(), bytes.data(), bytes.size());
    check(scheme_.storage == QuantStorage::int8 || std::none_of(out.begin(), out.end(), is_nan),
          ErrorKind::model, "{}: tensor {} has a NaN", checkpoint_->file_of(numbers_.name),
          numbers_.name);
    const int most = (1 << (scheme_.bits - 1)) - 1;
    for (const uint8_t stored_as : out)
      if (const int q = static_cast<int8_t>(stored_as); scheme_.bits < 8 && (q > most || q < ~most))
        fail(ErrorKind::model, "{}: tensor {} has a number of {}, beyond {} bits",
             checkpoint_->file_of(numbers_.name), numbers_.name, q, scheme_.bits);
    return out;
  }
  // A word's numbers go to out[at], out[at + step], ..., but for those outside the block.
  const uint32_t mask = (1u << scheme_.bits) - 1;
  const bool is_awq = scheme_.storage == QuantStorage::awq;
  const auto spread = [&](uint32_t word, int64_t at, int64_t step, int64_t low, int64_t high) {
    if (!is_awq && low == 0 && high == 8) {
      const uint64_t bytes = bytes_of(word);
      std::memcpy(out.data() + at, &bytes, sizeof bytes);
      return;
    }
    for (int64_t i = low; i < high; ++i) {
      const int place = is_awq ? kAwqPlace[i] : static_cast<int>(i);
      out[static_cast<size_t>(at + i * step)] =
          static_cast<uint8_t>(word >> (place * scheme_.bits) & mask);
    }
  };
  const int64_t begin = is_awq ? block.row_begin : block.col_begin,
                end = is_awq ? block.row_end : block.col_end;
  const int64_t first = begin / per_word_, last = divide_up(end, per_word_), width = last - first;
  const auto words = is_awq ? read(numbers_, {block.col_begin, block.col_end, first, last})
                     : scheme_.storage == QuantStorage::gptq
                         ? read(numbers_, {first, last, block.row_begin, block.row_end})
                         : read(numbers_, {block.row_begin, block.row_end, first, last});
  for (int64_t w = 0; w < width; ++w) {
    const int64_t at = (first + w) * per_word_ - begin;  // of its first number, in the block
    const int64_t low = std::max<int64_t>(0, -at),
                  high = std::min<int64_t>(per_word_, end - begin - at);
    if (is_awq)
      for (int64_t c = 0; c < cols; ++c)
        spread(word_at(words, c * width + w), at * cols + c, cols, low, high);
    else if (scheme_.storage == QuantStorage::gptq)
      for (int64_t r = 0; r < rows; ++r)
        spread(word_at(words, w * rows + r), r * cols + at, 1, low, high);
    else
      for (int64_t r = 0; r < rows; ++r)
        spread(word_at(words, r * width + w), r * cols + at, 1, low, high);
  }
  return out;
}

void QuantizedWeight::copy_rows(QuantizedRows& to, int64_t first, const WeightBlock& block) const {
  const WeightFormat format = scheme_.kept_format(block.col_begin, block.col_end).value();
  const int64_t rows = block.rows(), cols = block.cols(), groups = format.groups(cols);
  const int middle = scheme_.middle();
  const auto [numbers, scales, zeros] = stored(block);
  std::transform(numbers.begin(), numbers.end(), to.numbers.begin() + first * cols,
                 [&](uint8_t q) { return static_cast<int8_t>(q - middle); });
  const int64_t before = group_of(block.col_begin);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t g = 0; g < groups; ++g) {
      const auto from = static_cast<size_t>(r * groups_ + before + g),
                 at = static_cast<size_t>((first + r) * groups + g);
      to.scales[at] = scales[from];
      if (!to.zeros.empty())
        to.zeros[at] = static_cast<int8_t>(zeros[from] - static_cast<float>(middle));
    }
}

template <class T>
void QuantizedWeight::dequantise(T* to, const WeightBlock& block) const {
  const int64_t rows = block.rows(), cols = block.cols();
  const bool is_e4m3 = scheme_.storage == QuantStorage::e4m3;
  const bool is_bytes = scheme_.is_bytes();
  const auto [numbers, scales, zeros] = stored(block);
  float value[256];
  for (int q = 0; q < 256; ++q)
    value[q] = is_e4m3    ? e4m3_value(static_cast<uint8_t>(q))
               : is_bytes ? static_cast<float>(static_cast<int8_t>(q))
                          : static_cast<float>(q);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols;) {  // runs of one group
      const int64_t column = block.col_begin + c, group = group_of(column);
      const auto place = static_cast<size_t>(r * groups_ + group);
      const float scale = scales[place], zero = zeros[place];
      const uint8_t* q = numbers.data() + r * cols + c;
      T* out = to + r * cols + c;
      const int64_t run = std::min(cols - c, run_from(column));
      const auto number = [&](int stored_as) {
        return static_cast<T>(scale * (value[stored_as] - zero));
      };
      if (const int count = is_bytes ? 256 : 1 << scheme_.bits; run >= count) {
        T table[256];
        for (int i = 0; i < count; ++i) table[i] = number(i);
        for (int64_t i = 0; i < run; ++i) out[i] = table[q[i]];
      } else {
        for (int64_t i = 0; i < run; ++i) out[i] = number(q[i]);
      }
      c += run;
    }
}

void QuantizedWeight::dequantise(std::byte* to, DType dtype, const WeightBlock& block) const {
  dispatch_float(dtype, [&]<class T>() { dequantise(reinterpret_cast<T*>(to), block); });
}

}  // namespace nanovllm
