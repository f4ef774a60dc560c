#include "parity/harness.h"

#include <cmath>
#include <map>

#include "ops/cpu/cpu_backend.h"

namespace nanovllm::parity {
namespace {

constexpr std::byte kSentinel{0xA5};
constexpr int64_t kMargin = 256;  // bytes before and behind; keeps alignment

std::unique_ptr<Backend> make(const std::string& name) try {
  // More threads than a small test has rows, and another number than oneDNN would take by itself.
  const BackendOptions options{.num_threads = 3};
  if (name == "cpu") return make_cpu_backend(options);
  if (name.starts_with("cpu_")) return std::make_unique<cpu::CpuBackend>(options, name.substr(4));
  return make_backend(name, options);
} catch (const Error& error) {
  if (error.kind() == ErrorKind::device) return nullptr;
  throw;
}

}  // namespace

std::vector<BackendCase> backend_cases() {
  return {{"cpu"}, {"cpu_base"}, {"cpu_avx2"}, {"cpu_avx512"}, {"cpu_avx512_bf16"}, {"cuda"}};
}

Backend* open_backend(const BackendCase& which) {
  static std::map<std::string, std::unique_ptr<Backend>>
      opened;  // a device is opened once per test program
  const auto [it, is_new] = opened.try_emplace(which.name);
  if (is_new) it->second = make(which.name);
  return it->second.get();
}

std::string case_name(const testing::TestParamInfo<Case>& info) {
  return std::get<0>(info.param).name + "_" + std::string(name_of(std::get<1>(info.param)));
}
std::string backend_name(const testing::TestParamInfo<BackendCase>& info) {
  return info.param.name;
}

double round_to(DType dtype, double value) {
  const float f = static_cast<float>(value);
  return dtype == DType::bf16 ? static_cast<double>(static_cast<float>(bf16(f)))
                              : static_cast<double>(f);
}

Values random_values(DType dtype, int64_t count, uint32_t seed, double scale) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal(0.0, scale);
  Values values(static_cast<size_t>(count));
  for (double& v : values) v = round_to(dtype, normal(generator));
  return values;
}

Values uniform_values(DType dtype, int64_t count, uint32_t seed, double low, double high) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<double> uniform(low, high);
  Values values(static_cast<size_t>(count));
  for (double& v : values) v = round_to(dtype, uniform(generator));
  return values;
}

Operand::Operand(Backend& ops, DType dtype, std::vector<int64_t> shape, Layout layout) : ops_(ops) {
  rows_ = shape[0];
  for (size_t axis = 1; axis < shape.size(); ++axis) row_ *= shape[axis];
  const int64_t step = layout.lead + row_ + layout.trail,
                element = static_cast<int64_t>(size_of(dtype));
  bytes_ = static_cast<size_t>(2 * kMargin + rows_ * step * element);
  buffer_ = ops.allocate(bytes_);
  whole_ = Tensor(buffer_.get(), DType::bf16, {static_cast<int64_t>(bytes_ / 2)}, ops.device());
  view_.data = buffer_.get() + kMargin + layout.lead * element;
  view_.dtype = dtype;
  view_.device = ops.device();
  view_.rank = static_cast<int8_t>(shape.size());
  int64_t stride = 1;
  for (size_t axis = shape.size(); axis-- > 0; stride *= shape[axis]) {
    view_.shape[axis] = shape[axis];
    view_.stride[axis] = axis == 0 && shape.size() > 1 ? step : stride;
  }
  check(shape.size() > 1 || (layout.lead == 0 && layout.trail == 0),
        "a vector has no rows to keep apart");
  std::vector<std::byte> sentinels(bytes_, kSentinel);
  ops_.copy(whole_, Tensor(sentinels.data(), DType::bf16, {static_cast<int64_t>(bytes_ / 2)}));
  ops_.synchronize();
}

Operand::Operand(Backend& ops, DType dtype, std::vector<int64_t> shape, const Values& values,
                 Layout layout)
    : Operand(ops, dtype, std::move(shape), layout) {
  set(values);
}

std::vector<std::byte> Operand::download() const {
  std::vector<std::byte> bytes(bytes_);
  ops_.copy(Tensor(bytes.data(), DType::bf16, {static_cast<int64_t>(bytes_ / 2)}), whole_);
  ops_.synchronize();
  return bytes;
}

void Operand::set(const Values& values) {
  check(static_cast<int64_t>(values.size()) == numel(), "{} values for {}", values.size(),
        view_.describe());
  std::vector<std::byte> bytes = download();
  const size_t element = size_of(view_.dtype);
  std::byte* first = bytes.data() + (view_.data - buffer_.get());
  for (int64_t r = 0; r < rows_; ++r)
    for (int64_t c = 0; c < row_; ++c) {
      const double value = values[static_cast<size_t>(r * row_ + c)];
      std::byte* at =
          first + static_cast<size_t>(r * (view_.rank > 1 ? view_.stride[0] : 1) + c) * element;
      const auto write = [&](auto typed) { std::memcpy(at, &typed, sizeof typed); };
      switch (view_.dtype) {
        case DType::f32:
          write(static_cast<float>(value));
          break;
        case DType::bf16:
          write(bf16(static_cast<float>(value)));
          break;
        case DType::i32:
          write(static_cast<int32_t>(value));
          break;
        case DType::i64:
          write(static_cast<int64_t>(value));
          break;
        default:
          FAIL() << "no operand of " << name_of(view_.dtype);
      }
    }
  ops_.copy(whole_, Tensor(bytes.data(), DType::bf16, {static_cast<int64_t>(bytes_ / 2)}));
  ops_.synchronize();
}

std::vector<std::byte> Operand::bits() const {
  const std::vector<std::byte> bytes = download();
  const size_t element = size_of(view_.dtype), row = static_cast<size_t>(row_) * element;
  std::vector<std::byte> result;
  for (int64_t r = 0; r < rows_; ++r) {
    const auto first =
        bytes.begin() + (view_.data - buffer_.get()) +
        static_cast<int64_t>(static_cast<size_t>(r * (view_.rank > 1 ? view_.stride[0] : 1)) *
                             element);
    result.insert(result.end(), first, first + static_cast<int64_t>(row));
  }
  return result;
}

Values Operand::get() const {
  const std::vector<std::byte> bytes = bits();
  Values values(static_cast<size_t>(numel()));
  for (size_t i = 0; i < values.size(); ++i) {
    const std::byte* at = bytes.data() + i * size_of(view_.dtype);
    const auto read = [&]<class T>() {
      T typed;
      std::memcpy(static_cast<void*>(&typed), at, sizeof typed);
      if constexpr (std::is_same_v<T, bf16>)
        return static_cast<double>(static_cast<float>(typed));
      else
        return static_cast<double>(typed);
    };
    switch (view_.dtype) {
      case DType::f32:
        values[i] = read.operator()<float>();
        break;
      case DType::bf16:
        values[i] = read.operator()<bf16>();
        break;
      case DType::i32:
        values[i] = read.operator()<int32_t>();
        break;
      default:
        values[i] = read.operator()<int64_t>();
        break;
    }
  }
  return values;
}

void Operand::expect_guards(const char* name) const {
  std::vector<std::byte> bytes = download();
  const int64_t element = static_cast<int64_t>(size_of(view_.dtype));
  for (int64_t r = 0; r < rows_; ++r) {
    const auto first = bytes.begin() + (view_.data - buffer_.get()) +
                       r * (view_.rank > 1 ? view_.stride[0] : 1) * element;
    std::fill(first, first + row_ * element, kSentinel);
  }
  for (size_t i = 0; i < bytes.size(); ++i)
    if (bytes[i] != kSentinel) {
      ADD_FAILURE() << name << " " << view_.describe() << ": byte "
                    << static_cast<int64_t>(i) - (view_.data - buffer_.get())
                    << " from its first element was overwritten";
      return;
    }
}

Operand ints(Backend& ops, const std::vector<int32_t>& values) {
  return {
      ops, DType::i32, {static_cast<int64_t>(values.size())}, Values(values.begin(), values.end())};
}

Weight::Weight(Backend& ops, WeightFormat plain, int64_t n, int64_t k, const Values& values)
    : buffer_(ops.allocate(ops.weight_bytes(plain, n, k))) {
  view_ = ops.weight_view(buffer_.get(), plain, n, k);
  std::vector<float> host(values.begin(), values.end());
  const Tensor part(host.data(), DType::f32, {n, k});
  ops.load(view_.data, {&part, 1});
  ops.synchronize();
}

void expect_close(const Values& got, const Values& want, const std::function<double(size_t)>& bound,
                  const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  size_t worst = got.size();
  double worst_ratio = 1.0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(want[i]) && std::isnan(got[i])) continue;
    if (got[i] == want[i]) continue;
    const double error = std::abs(got[i] - want[i]), limit = bound(i);
    const double ratio = error <= limit                      ? 0.0
                         : std::isfinite(error) && limit > 0 ? error / limit
                                                             : INFINITY;
    if (ratio > worst_ratio) worst = i, worst_ratio = ratio;
  }
  if (worst < got.size())
    ADD_FAILURE() << what << ": element " << worst << " is " << got[worst] << ", expected "
                  << want[worst] << " within " << bound(worst) << " (" << worst_ratio
                  << " times the bound)";
}

void expect_equal(const Values& got, const Values& want, const std::string& what) {
  expect_close(
      got, want, [](size_t) { return 0.0; }, what);
}

}  // namespace nanovllm::parity
