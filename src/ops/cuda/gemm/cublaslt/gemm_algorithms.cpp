#include "ops/cuda/gemm/cublaslt/gemm_algorithms.h"

#include <algorithm>
#include <array>
#include <bit>
#include <fstream>
#include <span>
#include <sstream>
#include <utility>

#include "ops/cuda/core/cache_file.h"

namespace nanovllm {
namespace {

using Preference = Owner<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

constexpr int kCandidates = 32;
constexpr int64_t kFewestRows = 16, kManyRows = 256;

template <class T>
T config_of(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  T value{};
  size_t written = 0;
  cublas_check(
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof value, &written));
  return value;
}

bool splits_no_sum(const cublasLtMatmulAlgo_t& algorithm) {
  return config_of<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1 &&
         config_of<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) ==
             CUBLASLT_REDUCTION_SCHEME_NONE;
}

Preference make_preference(bool splits) {
  cublasLtMatmulPreference_t raw = nullptr;
  cublas_check(cublasLtMatmulPreferenceCreate(&raw));
  Preference preference(raw);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    cublas_check(cublasLtMatmulPreferenceSetAttribute(raw, attribute, &value, sizeof value));
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{GemmAlgorithms::kWorkspace});
  if (!splits)
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE));
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
    set(attribute, uint32_t{16});
  return preference;
}

/// The layouts of a product whose rows begin on 16 bytes, as those do that cuBLASLt is given: for
/// others it proposes kernels that add in other orders.
struct Layouts {
  static constexpr int64_t kAlign = 8;
  BlasLayout w, x, y;
  explicit Layouts(const GemmKey& key)
      : w(CUDA_R_16BF, key.k, key.n, key.k),
        x(CUDA_R_16BF, key.k, key.rows, key.k),
        y(key.f32_out ? CUDA_R_32F : CUDA_R_16BF, key.n, key.rows, y_stride(key)) {
    if (!key.twice) return;
    w.repeat(key.k);
    x.repeat(key.k);
    y.repeat(key.rows * y_stride(key));
  }
  static int64_t y_stride(const GemmKey& key) { return (key.n + kAlign - 1) / kAlign * kAlign; }
};

/// Choices measured on an H100 with cuBLASLt 13.1, where its first proposal is slower by 3 % to
/// 37 %. Tile, cluster and custom option are cuBLASLt's numbers; they are looked for among its
/// proposals.
struct Measured {
  int64_t n, k, from_rows, to_rows;
  int32_t tile, cluster, custom;
  bool twice = false;
};
constexpr int64_t kAny = int64_t{1} << 40;
constexpr Measured kMeasured[] = {
    {4096, 1024, 1024, 1024, 20, 3, 1},        {4096, 1024, 3072, 6144, 201, 5, 2},
    {4096, 1024, 8192, kAny, 29, 3, 1},        {6144, 1024, 768, 768, 184, 5, 2},
    {6144, 1024, 1024, 1024, 20, 3, 1},        {6144, 1024, 1536, 2048, 29, 3, 1},
    {6144, 1024, 3072, kAny, 201, 5, 2},       {1024, 3072, 768, 768, 164, 9, 2},
    {1024, 3072, 1024, 1024, 200, 9, 2},       {6144, 4096, 3072, 4096, 197, 5, 2},
    {6144, 4096, 6144, kAny, 201, 5, 2},       {24576, 4096, 96, 128, 208, 5, 3},
    {24576, 4096, 1024, 1024, 197, 5, 2},      {24576, 4096, 1536, kAny, 201, 5, 2},
    {4096, 12288, 192, 192, 18, 4, 1},         {4096, 12288, 256, 256, 135, 7, 2},
    {4096, 12288, 384, 384, 165, 4, 0},        {1024, 1024, 12288, kAny, 201, 5, 2, true},
    {1024, 1536, 12288, kAny, 20, 3, 1, true},
};

/// A file of this GPU and this cuBLASLt.
std::filesystem::path file_of(const char* kind, const std::string& device,
                              const std::string& driver = {}) {
  return cache_file(kind + device + driver + "-cublaslt" + std::to_string(cublasLtGetVersion()));
}

/// "-driver13000-580.65.06"; without the part that only the driver's own file tells, elsewhere.
std::string driver_name() {
  int version = 0;
  cuda_check(cudaDriverGetVersion(&version));
  std::string release;
  std::ifstream("/sys/module/nvidia/version") >> release;
  return "-driver" + std::to_string(version) + "-" + release;
}

cudaDataType_t type_of(const Tensor& t) { return t.dtype == DType::f32 ? CUDA_R_32F : CUDA_R_16BF; }

constexpr size_t kMostFileBytes = size_t{1} << 20;

}  // namespace

int64_t row_bucket(int64_t rows) {
  const int64_t power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
  return std::max(kFewestRows, rows <= power / 4 * 3 ? power / 4 * 3 : power);
}

BlasOperation::BlasOperation() {
  cublas_check(cublasLtMatmulDescInit(&opaque_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const cublasOperation_t transposed = CUBLAS_OP_T;
  cublas_check(cublasLtMatmulDescSetAttribute(&opaque_, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                              sizeof transposed));
}

GemmAlgorithms::GemmAlgorithms(cublasLtHandle_t blas, const std::string& device)
    : blas_(blas),
      families_(file_of("gemm-families-", device, driver_name())),
      file_(file_of("gemm-", device)) {}

int32_t GemmAlgorithms::family_of(const cublasLtMatmulAlgo_t& algorithm) {
  return config_of<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_ID);
}

bool GemmAlgorithms::adds_in_order(const cublasLtMatmulAlgo_t& algorithm) const {
  return families_.may_use(family_of(algorithm)) && splits_no_sum(algorithm);
}

std::vector<cublasLtMatmulAlgo_t> GemmAlgorithms::propose(const GemmKey& key, GemmOrder order) {
  const auto is_wanted = [&](const cublasLtMatmulAlgo_t& algorithm) {
    return order == GemmOrder::any || (order == GemmOrder::in_order && adds_in_order(algorithm)) ||
           (order == GemmOrder::candidates && GemmFamilies::is_candidate(family_of(algorithm)) &&
            splits_no_sum(algorithm));
  };
  Layouts layouts(key);
  const Preference preference = make_preference(order == GemmOrder::any);
  std::array<cublasLtMatmulHeuristicResult_t, kCandidates> results;
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      blas_, operation_.get(), layouts.w.get(), layouts.x.get(), layouts.y.get(), layouts.y.get(),
      preference.get(), kCandidates, results.data(), &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return {};
  cublas_check(status);
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  for (const auto& result : std::span(results).first(static_cast<size_t>(count)))
    if (result.state == CUBLAS_STATUS_SUCCESS && is_wanted(result.algo))
      algorithms.push_back(result.algo);
  return algorithms;
}

bool GemmAlgorithms::run(const Tensor& y, const Tensor& x, const Tensor& w,
                         const cublasLtMatmulAlgo_t& algorithm, std::byte* workspace,
                         cudaStream_t stream) {
  // Column-major, as cuBLASLt sees it: y^T [n, m] = (w^T)^T x^T.
  const bool twice = y.rank == 3;
  const int64_t m = x.shape[0], n = w.shape[0], k = x.shape[1] / (twice ? 2 : 1);
  BlasLayout w_layout(type_of(w), k, n, w.stride[0]), x_layout(type_of(x), k, m, x.stride[0]),
      y_layout(type_of(y), n, m, y.stride[twice ? 1 : 0]);
  if (twice) {
    w_layout.repeat(k);
    x_layout.repeat(k);
    y_layout.repeat(y.stride[0]);
  }
  const float one = 1.0f, zero = 0.0f;
  const cublasStatus_t status = cublasLtMatmul(
      blas_, operation_.get(), &one, w.data, w_layout.get(), x.data, x_layout.get(), &zero, y.data,
      y_layout.get(), y.data, y_layout.get(), &algorithm, workspace, kWorkspace, stream);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return false;
  cublas_check(status);
  return true;
}

std::optional<cublasLtMatmulAlgo_t> GemmAlgorithms::first_choice(const GemmKey& key) {
  for (const Measured& m : kMeasured) {
    if (m.twice != key.twice || m.n != key.n || m.k != key.k || key.rows < m.from_rows ||
        key.rows > m.to_rows)
      continue;
    for (const auto& algorithm : propose(key, GemmOrder::in_order))
      if (config_of<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID) == m.tile &&
          config_of<uint16_t>(algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID) == m.cluster &&
          config_of<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION) == m.custom)
        return algorithm;
  }
  // Where cuBLASLt would split K, what is left of its proposals is poor (eight times too slow at
  // worst). The wgmma kernel that it proposes for more rows serves well there.
  std::optional<cublasLtMatmulAlgo_t> choice;
  GemmKey more = key;
  for (; more.rows == key.rows || more.rows <= kManyRows; more.rows = row_bucket(more.rows + 1)) {
    const auto algorithms = propose(more, GemmOrder::in_order);
    if (algorithms.empty()) continue;
    const bool good = family_of(algorithms.front()) == GemmFamilies::kWgmma;
    if (good || !choice) choice = algorithms.front();
    if (good) break;
  }
  return choice;
}

const cublasLtMatmulAlgo_t* GemmAlgorithms::choose(const GemmKey& key) {
  auto place = choices_.find(key);
  if (place == choices_.end()) {
    read_file();
    const auto known = measured_.find(key);
    place =
        choices_.emplace(key, known != measured_.end() ? known->second : first_choice(key)).first;
  }
  return place->second ? &*place->second : nullptr;
}

// A line: rows, n, k, whether y is f32, and the algorithm's words in hexadecimal.
void GemmAlgorithms::read_file() {
  if (std::exchange(file_was_read_, true)) return;
  std::istringstream in(read_cache(file_, kMostFileBytes));
  GemmKey key{};
  cublasLtMatmulAlgo_t algorithm{};
  while (in >> std::dec >> key.rows >> key.n >> key.k >> key.f32_out) {
    for (auto& word : algorithm.data) in >> std::hex >> word;
    // Whoever wrote the file: what does not run here, or adds in another order, is not taken.
    Layouts layouts(key);
    cublasLtMatmulHeuristicResult_t result{};
    if (in &&
        cublasLtMatmulAlgoCheck(blas_, operation_.get(), layouts.w.get(), layouts.x.get(),
                                layouts.y.get(), layouts.y.get(), &algorithm,
                                &result) == CUBLAS_STATUS_SUCCESS &&
        result.workspaceSize <= kWorkspace && adds_in_order(algorithm))
      measured_.insert_or_assign(key, algorithm);
  }
}

void GemmAlgorithms::keep(const GemmKey& key, const cublasLtMatmulAlgo_t& algorithm) {
  read_file();
  measured_.insert_or_assign(key, algorithm);
  choices_.insert_or_assign(key, algorithm);
  std::ostringstream out;
  for (const auto& [k, a] : measured_) {
    out << std::dec << k.rows << ' ' << k.n << ' ' << k.k << ' ' << k.f32_out;
    for (const auto word : a.data) out << ' ' << std::hex << word;
    out << '\n';
  }
  write_cache(file_, out.str());
}

}  // namespace nanovllm
