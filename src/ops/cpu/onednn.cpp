#include "ops/cpu/onednn.h"

#include <cstring>
#include <list>
#include <map>
#include <string_view>
#include <tuple>
#include <vector>

#include <fmt/format.h>
#include <oneapi/dnnl/dnnl.hpp>

#include "ops/cpu/memory.h"
#include "ops/cpu/threads.h"

namespace nanovllm::cpu {
namespace {

using dnnl::memory;

memory::data_type type_of(DType dtype) {
  return dtype == DType::f32 ? memory::data_type::f32 : memory::data_type::bf16;
}

// -- The two generations of the API

dnnl::matmul::primitive_desc describe_matmul(const dnnl::engine& engine, const memory::desc& x,
                                             const memory::desc& w, const memory::desc& y) {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
#if DNNL_VERSION_MAJOR >= 3
  return {engine, x, w, y, attributes};
#else
  return {dnnl::matmul::desc(x, w, y), attributes, engine};
#endif
}

/// The blocked layout behind a memory descriptor of [k, n] weights, or one with bytes = 0 if it is
/// of another kind.
WeightLayout read_layout(const memory::desc& desc, int64_t n, int64_t k, size_t element) {
#if DNNL_VERSION_MAJOR >= 3
  if (desc.get_format_kind() != memory::format_kind::blocked) return {};
  const std::vector<int64_t> strides = desc.get_strides(), sizes = desc.get_inner_blks(),
                             axes = desc.get_inner_idxs();
#else
  if (desc.data.format_kind != dnnl_blocked) return {};
  const dnnl_blocking_desc_t& blocking = desc.data.format_desc.blocking;
  const std::vector<int64_t> strides(blocking.strides, blocking.strides + 2);
  const std::vector<int64_t> sizes(blocking.inner_blks, blocking.inner_blks + blocking.inner_nblks);
  const std::vector<int64_t> axes(blocking.inner_idxs, blocking.inner_idxs + blocking.inner_nblks);
#endif
  BlockedAxis axis[2];  // k, n
  axis[0].outer_stride = strides[0];
  axis[1].outer_stride = strides[1];
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes[i])
    axis[axes[i]].digits.push_back({sizes[i], stride});

  WeightLayout layout;
  layout.n = n;
  layout.k = k;
  layout.bytes = desc.get_size();
  layout.padded = layout.bytes != static_cast<size_t>(n * k) * element;
  layout.rows = axis[1];
  for (int64_t i = 0; i < k; ++i) layout.columns.push_back(axis[0].offset(i));
  return layout;
}

struct Weight {
  memory::desc desc;
  WeightLayout layout;
};

struct Product {
  dnnl::matmul primitive;
  memory x, w, y, scratch;
};

/// A primitive depends on these. x and y are always dense.
struct ProductKey {
  int64_t m, n, k;
  DType dtype, y_dtype;
  auto operator<=>(const ProductKey&) const = default;
};

/// The least recently used product is dropped beyond this many. A step uses about five per number
/// of rows, so that some two hundred batch sizes stay; one holds some 60 KB of code and takes 0.1
/// to 0.3 ms to make anew.
constexpr size_t kMaxProducts = 1024;

}  // namespace

std::string onednn_version() {
  const dnnl_version_t& version = *dnnl_version();
  return fmt::format("{}.{}.{}", version.major, version.minor, version.patch);
}

struct OneDnn::State {
  int threads = 1;
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  bool f32 = false, bf16 = false;
  std::map<std::tuple<DType, int64_t, int64_t>, Weight> weights;
  using Entry = std::pair<ProductKey, Product>;
  std::list<Entry> products;  // most recently used first
  std::map<ProductKey, std::list<Entry>::iterator> index;
  std::vector<std::byte> scratch, rows, results;

  dnnl::matmul::primitive_desc describe(const ProductKey& key, const memory::desc& w) const {
    const memory::desc x({key.m, key.k}, type_of(key.dtype), memory::dims{key.k, 1});
    const memory::desc y({key.m, key.n}, type_of(key.y_dtype), memory::dims{key.n, 1});
    return describe_matmul(engine, x, w, y);
  }

  const Weight& weight(DType dtype, int64_t n, int64_t k) {
    const auto [it, is_new] = weights.try_emplace({dtype, n, k});
    if (is_new) {
      const ThreadCount scope(threads);
      const memory::desc any({k, n}, type_of(dtype), memory::format_tag::any);
      constexpr int64_t kTypicalRows = 512;
      it->second.desc = describe({kTypicalRows, n, k, dtype, dtype}, any).weights_desc();
      it->second.layout = read_layout(it->second.desc, n, k, size_of(dtype));
    }
    return it->second;
  }

  Product& product(const ProductKey& key) {
    if (const auto it = index.find(key); it != index.end()) {
      products.splice(products.begin(), products, it->second);
      return it->second->second;
    }
    const auto desc = describe(key, weight(key.dtype, key.n, key.k).desc);
    products.push_front(
        {key,
         {dnnl::matmul(desc), memory(desc.src_desc(), engine, nullptr),
          memory(desc.weights_desc(), engine, nullptr), memory(desc.dst_desc(), engine, nullptr),
          memory(desc.scratchpad_desc(), engine, nullptr)}});
    scratch.resize(std::max(scratch.size(), desc.scratchpad_desc().get_size() + 64));
    index[key] = products.begin();
    if (products.size() > kMaxProducts) {
      index.erase(products.back().first);
      products.pop_back();
    }
    return products.front().second;
  }

  /// Rows of x and y that stand apart are copied together: for them the library sums in another
  /// order than for dense ones, so that a row alone (always dense) and the same row among others
  /// would differ in the last bits.
  Tensor dense(const Tensor& x) {
    const int64_t m = x.shape[0], k = x.shape[1];
    if (m == 1 || x.stride[0] == k) return x;
    const size_t row = static_cast<size_t>(k) * size_of(x.dtype);
    rows.resize(std::max(rows.size(), static_cast<size_t>(m) * row));
    for (int64_t i = 0; i < m; ++i)
      std::memcpy(rows.data() + static_cast<size_t>(i) * row, x.rows(i, i + 1).data, row);
    return Tensor(rows.data(), x.dtype, {m, k}, x.device);
  }

  /// Room for y, if it is not dense.
  Tensor dense_result(const Tensor& y) {
    const int64_t m = y.shape[0], n = y.shape[1];
    if (m == 1 || y.stride[0] == n) return y;
    results.resize(std::max(results.size(), static_cast<size_t>(m * n) * size_of(y.dtype)));
    return Tensor(results.data(), y.dtype, {m, n}, y.device);
  }

  bool is_row_invariant(DType dtype);
};

bool onednn_allows_amx() {
  constexpr auto kAmx = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_amx);
  return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & kAmx) == kAmx;
}

OneDnn::OneDnn(int threads) {
  // oneDNN does not survive an allocation of its own that fails, and takes some 40 MB here.
  constexpr size_t kAtStart = size_t{96} << 20;
  (void)allocate(kAtStart);
  state_ = std::make_unique<State>();
  state_->threads = threads;
  const auto usable = [&](DType dtype) {
    try {
      return state_->is_row_invariant(dtype);
    } catch (const dnnl::error&) {
      return false;  // no implementation for this type on this processor
    }
  };
  state_->f32 = usable(DType::f32);
  state_->bf16 = usable(DType::bf16);
}

OneDnn::~OneDnn() = default;

bool OneDnn::supports(DType dtype) const {
  return dtype == DType::f32 ? state_->f32 : dtype == DType::bf16 && state_->bf16;
}

const WeightLayout& OneDnn::layout(DType dtype, int64_t n, int64_t k) const {
  return state_->weight(dtype, n, k).layout;
}

void OneDnn::gemm(const Tensor& strided_y, const Tensor& strided_x, const Tensor& w) {
  const int64_t m = strided_x.shape[0], n = w.shape[0], k = w.shape[1];
  const Tensor x = state_->dense(strided_x), y = state_->dense_result(strided_y);
  const ThreadCount scope(state_->threads);
  Product& product = state_->product({m, n, k, x.dtype, y.dtype});
  product.x.set_data_handle(x.data);
  product.w.set_data_handle(w.data);
  product.y.set_data_handle(y.data);
  const size_t misaligned = reinterpret_cast<size_t>(state_->scratch.data()) % 64;
  product.scratch.set_data_handle(state_->scratch.data() + (misaligned ? 64 - misaligned : 0));
  product.primitive.execute(state_->stream, {{DNNL_ARG_SRC, product.x},
                                             {DNNL_ARG_WEIGHTS, product.w},
                                             {DNNL_ARG_DST, product.y},
                                             {DNNL_ARG_SCRATCHPAD, product.scratch}});
  state_->stream.wait();
  if (y.data == strided_y.data) return;
  const size_t row = static_cast<size_t>(n) * size_of(y.dtype);
  for (int64_t i = 0; i < m; ++i)
    std::memcpy(strided_y.rows(i, i + 1).data, y.data + static_cast<size_t>(i) * row, row);
}

/// Multiplies a small awkward problem with different numbers of rows and compares bits. A few
/// milliseconds.
bool OneDnn::State::is_row_invariant(DType dtype) {
  constexpr int64_t kRows = 130, n = 72, k = 4200;
  const auto fill = [&](std::vector<std::byte>& bytes, int64_t count, uint32_t state) {
    bytes.resize(static_cast<size_t>(count) * size_of(dtype));
    for (int64_t i = 0; i < count; ++i) {
      state = state * 1664525u + 1013904223u;
      const float value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
      convert(bytes.data() + static_cast<size_t>(i) * size_of(dtype), dtype,
              reinterpret_cast<const std::byte*>(&value), DType::f32, 1);
    }
  };
  const Weight& w = weight(dtype, n, k);
  const std::string_view name = describe({kRows, n, k, dtype, dtype}, w.desc).impl_info_str();
  if (!name.starts_with("brg") || w.layout.bytes == 0) return false;

  std::vector<std::byte> x, plain, packed(w.layout.bytes);
  fill(x, kRows * k, 1);
  fill(plain, n * k, 2);
  pack_rows(packed.data(), dtype, w.layout, 0, Tensor(plain.data(), dtype, {n, k}), 1);
  std::vector<float> all(static_cast<size_t>(kRows * n)), some(all.size());
  const ThreadCount scope(threads);
  for (const int64_t m : {int64_t{130}, int64_t{64}, int64_t{17}, int64_t{3}, int64_t{1}}) {
    Product& p = product({m, n, k, dtype, DType::f32});
    auto& y = m == kRows ? all : some;
    p.x.set_data_handle(x.data());
    p.w.set_data_handle(packed.data());
    p.y.set_data_handle(y.data());
    memory pad(p.scratch.get_desc(), engine);
    p.primitive.execute(stream, {{DNNL_ARG_SRC, p.x},
                                 {DNNL_ARG_WEIGHTS, p.w},
                                 {DNNL_ARG_DST, p.y},
                                 {DNNL_ARG_SCRATCHPAD, pad}});
    stream.wait();
    if (std::memcmp(all.data(), y.data(), static_cast<size_t>(m * n) * sizeof(float)) != 0)
      return false;
  }
  return true;
}

}  // namespace nanovllm::cpu
