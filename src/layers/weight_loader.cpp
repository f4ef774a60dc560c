#include "layers/weight_loader.h"

#include <cmath>
#include <numbers>

#include "io/checkpoint.h"
#include "ops/noise.h"

namespace nanovllm {
namespace {

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += fmt::format("{}{}", i ? ", " : "", shape[i]);
  return text + "]";
}

Tensor slice(Tensor t, const WeightPart& part) {
  t = t.rows(part.row_begin, part.row_end < 0 ? t.shape[0] : part.row_end);
  if (t.rank > 1 && (part.col_begin != 0 || part.col_end >= 0))
    t = t.cols(part.col_begin, part.col_end < 0 ? t.shape[1] : part.col_end);
  return t;
}

}  // namespace

int64_t Shard::divide(int64_t total, const char* what) const {
  check(total % world_size == 0, ErrorKind::invalid_argument,
        "tensor_parallel_size {} does not divide {} ({})", world_size, what, total);
  return total / world_size;
}

Tensor WeightLoader::place(size_t bytes, const std::function<Tensor(std::byte*)>& view) {
  const Tensor t = view(storage_ ? storage_ + used_ : nullptr);
  used_ += (bytes + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
  return t;
}

Tensor WeightLoader::matrix(std::vector<WeightPart> parts, int64_t n, int64_t k) {
  const Tensor dst = place(backend_.weight_bytes(dtype_, n, k), [&](std::byte* data) {
    return backend_.weight_view(data, dtype_, n, k);
  });
  num_parameters_ += n * k;
  parameters_.push_back({dst, std::move(parts), true});
  return dst;
}

Tensor WeightLoader::vector(std::vector<WeightPart> parts, int64_t n) {
  const Tensor dst = place(static_cast<size_t>(n) * size_of(dtype_), [&](std::byte* data) {
    return Tensor(data, dtype_, {n}, backend_.device());
  });
  num_parameters_ += n;
  parameters_.push_back({dst, std::move(parts), false});
  return dst;
}

void WeightLoader::check_complete(const Checkpoint& checkpoint) const {
  std::unordered_set<std::string> wanted;
  for (const Parameter& parameter : parameters_) {
    for (const WeightPart& part : parameter.parts) {
      wanted.insert(part.name);
      const StoredTensor* found = checkpoint.find(part.name);
      check(found != nullptr, ErrorKind::model,
            "the checkpoint lacks tensor {}, which config.json's architecture needs", part.name);
      check(found->shape == part.shape, ErrorKind::model,
            "{}: tensor {} has shape {}, config.json asks for {}", checkpoint.file_of(part.name),
            part.name, shape_text(found->shape), shape_text(part.shape));
      check(found->loadable_dtype().has_value(), ErrorKind::model,
            "{}: tensor {} is {}; only F32, F16 and BF16 weights can be loaded",
            checkpoint.file_of(part.name), part.name, found->dtype);
    }
  }
  for (const std::string& name : checkpoint.names())
    check(wanted.contains(name) || ignored_.contains(name), ErrorKind::model,
          "{}: tensor {} has no place in this architecture; is config.json of another model?",
          checkpoint.file_of(name), name);
}

void WeightLoader::report(size_t loaded, const LoadProgress& progress) const {
  const auto total = static_cast<int64_t>(used_);
  if (progress)
    progress(loaded < parameters_.size() ? parameters_[loaded].dst.data - storage_ : total, total);
}

void WeightLoader::load(const Checkpoint& checkpoint, const LoadProgress& progress) {
  check(storage_ != nullptr, "weights cannot be loaded in the counting pass");
  check_complete(checkpoint);
  size_t loaded = 0;
  std::vector<Tensor> sources;
  for (const Parameter& parameter : parameters_) {
    sources.clear();
    for (const WeightPart& part : parameter.parts)
      sources.push_back(slice(checkpoint.find(part.name)->view(), part));
    backend_.load(parameter.dst, sources);
    for (const WeightPart& part : parameter.parts) checkpoint.release(part.name);
    report(++loaded, progress);
  }
  backend_.synchronize();
  checkpoint.check_unchanged();
}

// Random weights of the right spread at memory speed: one table of normal numbers, read from a
// different offset for every block of rows.
void WeightLoader::load_dummy(uint64_t seed, const LoadProgress& progress) {
  check(storage_ != nullptr, "weights cannot be loaded in the counting pass");
  int64_t widest = 0;
  for (const Parameter& p : parameters_)
    widest = std::max(widest, p.is_matrix ? p.dst.shape[1] : 0);
  const int64_t table_size = std::max<int64_t>(int64_t{1} << 22, 2 * widest);
  std::vector<float> table(static_cast<size_t>(table_size));
  for (int64_t i = 0; i < table_size; i += 2) {  // Box-Muller
    const Philox4 bits = noise_bits(seed, 0, static_cast<uint32_t>(i));
    const float radius = 0.02f * std::sqrt(-2.0f * std::log(noise_uniform(bits.x[0])));
    const float angle = 2.0f * std::numbers::pi_v<float> * noise_uniform(bits.x[1]);
    table[static_cast<size_t>(i)] = radius * std::cos(angle);
    table[static_cast<size_t>(i) + 1] = radius * std::sin(angle);
  }
  size_t loaded = 0;
  uint32_t draw = 0;
  for (const Parameter& p : parameters_) {
    std::vector<float> constant;
    std::vector<Tensor> sources;
    if (p.is_matrix) {
      const int64_t n = p.dst.shape[0], k = p.dst.shape[1],
                    block = std::max<int64_t>(1, table_size / 2 / k);
      for (int64_t row = 0; row < n; row += block) {
        const int64_t rows = std::min(block, n - row);
        const int64_t offset =
            noise_bits(seed, 1, draw++).x[0] % static_cast<uint32_t>(table_size - rows * k + 1);
        sources.emplace_back(table.data() + offset, DType::f32,
                             std::initializer_list<int64_t>{rows, k});
      }
    } else {
      const bool is_bias = p.parts.front().name.ends_with(".bias");
      constant.assign(static_cast<size_t>(p.dst.shape[0]), is_bias ? 0.0f : 1.0f);
      sources.emplace_back(constant.data(), DType::f32,
                           std::initializer_list<int64_t>{p.dst.shape[0]});
    }
    backend_.load(p.dst, sources);
    report(++loaded, progress);
  }
  backend_.synchronize();
}

}  // namespace nanovllm
