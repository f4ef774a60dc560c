#include "io/safetensors/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "io/json.h"
#include "io/json_object.h"

namespace nanovllm {
namespace {

static_assert(std::endian::native == std::endian::little,
              "safetensors stores little-endian numbers");

constexpr size_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;

struct StoredType {
  std::string_view name;
  uint64_t bits;
};
constexpr std::array<StoredType, 22> kStoredTypes{{
    {"BOOL", 8}, {"F4", 4},          {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},   {"F8_E5M2", 8},     {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"I16", 16}, {"F8_E5M2FNUZ", 8}, {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32}, {"U32", 32},        {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64}, {"U64", 64},
}};

/// a * b unless that overflows.
std::optional<uint64_t> checked_multiply(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

/// Reads one header; holds what error messages need.
class HeaderReader {
 public:
  HeaderReader(std::span<const std::byte> file, std::string_view what) : file_(file), what_(what) {}

  SafetensorsContents read() {
    const std::string_view header = header_text();
    // Each tensor takes some 60 bytes and 8 nodes; the bound on nodes bounds the memory of the
    // parsed header.
    const JsonLimits limits{.max_bytes = kMaxHeaderBytes, .max_depth = 8, .max_nodes = 8'000'000};
    const Json json = parse_json(header, what_, ErrorKind::model, limits);
    data_ = file_.subspan(kLengthBytes + header.size());

    SafetensorsContents contents;
    std::vector<Entry> entries;
    entries.reserve(json.size());
    for (const auto& [name, value] : json.get_ref<const Json::object_t&>()) {
      if (name == "__metadata__")
        contents.metadata = read_metadata(value);
      else
        entries.push_back(read_entry(name, value));
    }
    std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    check_layout(entries);
    contents.tensors.reserve(entries.size());
    for (Entry& entry : entries) {
      entry.tensor.data = data_.subspan(entry.begin, entry.end - entry.begin);
      contents.tensors.push_back(std::move(entry.tensor));
    }
    return contents;
  }

 private:
  struct Entry {
    StoredTensor tensor;
    uint64_t begin = 0, end = 0;  // offsets behind the header
  };

  template <class... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail(ErrorKind::model, "{}: {}", what_, fmt::format(format, std::forward<Args>(args)...));
  }

  std::string_view header_text() const {
    if (file_.size() < kLengthBytes)
      refuse("{} bytes long, too short for a safetensors file: it is truncated", file_.size());
    uint64_t length = 0;
    std::memcpy(&length, file_.data(), sizeof length);
    constexpr std::string_view kPointer = "version https://git-lfs";
    if (std::string_view(reinterpret_cast<const char*>(file_.data()), file_.size())
            .starts_with(kPointer))
      refuse("is a Git LFS pointer, not the weights: run \"git lfs pull\" where it came from");
    if (length > kMaxHeaderBytes)
      refuse("header length {} exceeds the format's limit of {}: not a safetensors file", length,
             kMaxHeaderBytes);
    if (length > file_.size() - kLengthBytes)
      refuse("header length {}, but the file has only {} bytes: it is truncated", length,
             file_.size());
    const std::string_view header(reinterpret_cast<const char*>(file_.data()) + kLengthBytes,
                                  length);
    if (!header.starts_with('{'))
      refuse("the header does not start with '{{': not a safetensors file");
    return header;
  }

  std::vector<std::pair<std::string, std::string>> read_metadata(const Json& value) const {
    std::vector<std::pair<std::string, std::string>> metadata;
    if (value.is_null()) return metadata;
    if (!value.is_object()) refuse("__metadata__ must be an object of strings");
    for (const auto& [key, text] : value.get_ref<const Json::object_t&>()) {
      if (!text.is_string()) refuse("__metadata__ {} must be a string", quote(key));
      metadata.emplace_back(key, text.get<std::string>());
    }
    return metadata;
  }

  Entry read_entry(const std::string& name, const Json& value) const {
    if (!value.is_object()) refuse("tensor {} must be an object", quote(name));
    const auto field = [&](const char* key) -> const Json& {
      const auto found = value.find(key);
      if (found == value.end()) refuse("tensor {} has no {}", quote(name), key);
      return *found;
    };
    Entry entry;
    entry.tensor.name = name;

    const Json& dtype = field("dtype");
    const auto* type = std::find_if(
        kStoredTypes.begin(), kStoredTypes.end(),
        [&](const StoredType& known) { return dtype.is_string() && dtype == known.name; });
    if (type == kStoredTypes.end())
      refuse("tensor {} has the unknown dtype {}", quote(name), nanovllm::describe(dtype));
    entry.tensor.dtype = type->name;

    const Json& shape = field("shape");
    if (!shape.is_array()) refuse("tensor {}: shape must be a list of integers", quote(name));
    entry.tensor.shape.reserve(shape.size());
    for (const Json& size : shape) {
      if (!size.is_number_unsigned() || size.get<uint64_t>() > std::numeric_limits<int64_t>::max())
        refuse("tensor {}: shape must be a list of integers >= 0", quote(name));
      entry.tensor.shape.push_back(size.get<int64_t>());
    }

    const Json& offsets = field("data_offsets");
    if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
        !offsets[1].is_number_unsigned())
      refuse("tensor {}: data_offsets must be two integers >= 0", quote(name));
    entry.begin = offsets[0].get<uint64_t>();
    entry.end = offsets[1].get<uint64_t>();
    check_size(entry, type->bits);
    return entry;
  }

  /// The bytes that shape and dtype need are the bytes that the offsets span.
  void check_size(const Entry& entry, uint64_t bits_per_element) const {
    const StoredTensor& tensor = entry.tensor;
    if (entry.end < entry.begin)
      refuse("tensor {}: data_offsets [{}, {}] are reversed", quote(tensor.name), entry.begin,
             entry.end);
    std::optional<uint64_t> bits = 1;
    for (const int64_t size : tensor.shape)
      bits = bits ? checked_multiply(*bits, static_cast<uint64_t>(size)) : bits;
    if (bits) bits = checked_multiply(*bits, bits_per_element);
    if (!bits) refuse("tensor {}: {} overflows", quote(tensor.name), tensor.describe());
    if (*bits % 8 != 0)
      refuse("tensor {}: {} does not fill whole bytes", quote(tensor.name), tensor.describe());
    if (entry.end - entry.begin != *bits / 8)
      refuse("tensor {}: {} needs {} bytes, data_offsets [{}, {}] span {}", quote(tensor.name),
             tensor.describe(), *bits / 8, entry.begin, entry.end, entry.end - entry.begin);
  }

  /// Sorted by offset, each tensor begins where the one before it ends, and the last ends with the
  /// file.
  void check_layout(const std::vector<Entry>& entries) const {
    uint64_t end = 0;
    for (const Entry& entry : entries) {
      if (entry.begin != end)
        refuse("tensor {} begins at byte {} of the data, the one before it ends at {}: {}",
               quote(entry.tensor.name), entry.begin, end,
               entry.begin > end ? "a hole" : "they overlap");
      end = entry.end;
    }
    const uint64_t before = file_.size() - data_.size();
    if (end > data_.size())
      refuse("expected {} bytes, file has {}: it is truncated", end <= ~before ? before + end : end,
             file_.size());
    if (end < data_.size())
      refuse("expected {} bytes, file has {}: data follows the last tensor", before + end,
             file_.size());
  }

  std::span<const std::byte> file_;
  std::span<const std::byte> data_;
  std::string_view what_;
};

}  // namespace

std::optional<DType> StoredTensor::loadable_dtype() const {
  if (dtype == "F32") return DType::f32;
  if (dtype == "F16") return DType::f16;
  if (dtype == "BF16") return DType::bf16;
  return std::nullopt;
}

std::vector<float> StoredTensor::to_floats(std::span<const std::byte> bytes) const {
  const DType type = loadable_dtype().value();
  std::vector<float> values(bytes.size() / size_of(type));
  for (size_t i = 0; i < values.size(); ++i) {
    const std::byte* from = bytes.data() + i * size_of(type);
    if (type == DType::f32) {
      std::memcpy(&values[i], from, sizeof(float));
    } else {
      uint16_t bits = 0;
      std::memcpy(&bits, from, sizeof bits);
      values[i] = type == DType::f16 ? static_cast<float>(f16{bits})
                                     : static_cast<float>(std::bit_cast<bf16>(bits));
    }
  }
  return values;
}

std::string StoredTensor::describe() const {
  constexpr size_t kMost = 8;  // a file may claim thousands of dimensions
  if (shape.size() <= kMost) return fmt::format("{}[{}]", dtype, fmt::join(shape, ", "));
  return fmt::format("{}[{}, ...]", dtype, fmt::join(shape.begin(), shape.begin() + kMost, ", "));
}

Tensor StoredTensor::view() const {
  const std::optional<DType> type = loadable_dtype();
  check(type.has_value(), ErrorKind::model,
        "tensor {} is {}: only F32, F16 and BF16 weights are supported", quote(name), dtype);
  Tensor tensor;
  check(!shape.empty() && shape.size() <= tensor.shape.size(), ErrorKind::model,
        "tensor {} is {}: weights of 1 to {} dimensions are supported", quote(name), describe(),
        tensor.shape.size());
  // Tensor has no const form; the mapping itself is read-only.
  tensor.data = const_cast<std::byte*>(data.data());
  tensor.dtype = *type;
  tensor.rank = static_cast<int8_t>(shape.size());
  int64_t step = 1;
  int64_t extent = 1;  // as if no dimension were 0, so that an empty view cannot overflow either
  bool overflow = false;
  for (size_t axis = shape.size(); axis-- > 0;) {
    tensor.shape[axis] = shape[axis];
    tensor.stride[axis] = step;
    overflow =
        overflow || __builtin_mul_overflow(extent, std::max<int64_t>(shape[axis], 1), &extent);
    check(!overflow, ErrorKind::model, "tensor {}: {} overflows", quote(name), describe());
    step *= shape[axis];
  }
  return tensor;
}

SafetensorsContents parse_safetensors(std::span<const std::byte> file, std::string_view what) {
  return HeaderReader(file, what).read();
}

SafetensorsFile::SafetensorsFile(const std::string& path)
    : file_(path), contents_(parse_safetensors(file_.bytes(), path)) {
  align();
}

/// The format does not promise alignment, though all common writers pad for it. What lies askew is
/// copied once here, so that views can be read through pointers of their type.
void SafetensorsFile::align() {
  for (StoredTensor& tensor : contents_.tensors) {
    const std::optional<DType> type = tensor.loadable_dtype();
    if (!type || tensor.data.empty()) continue;
    if (reinterpret_cast<uintptr_t>(tensor.data.data()) % size_of(*type) == 0) continue;
    const size_t bytes = tensor.data.size();
    Buffer copy(new std::byte[bytes], std::default_delete<std::byte[]>());
    std::memcpy(copy.get(), tensor.data.data(), bytes);
    file_.release(tensor.data);
    tensor.data = {copy.get(), bytes};
    aligned_copies_.push_back(std::move(copy));
  }
}

bool SafetensorsFile::maps(const std::byte* address) const {
  const std::byte* begin = file_.bytes().data();
  return address >= begin && address < begin + file_.bytes().size();
}

bool SafetensorsFile::read(std::span<std::byte> to, const std::byte* from) const {
  if (!maps(from)) return false;
  file_.read(to, from);
  return true;
}

void SafetensorsFile::release(const StoredTensor& tensor) const {
  if (maps(tensor.data.data())) file_.release(tensor.data);
}

}  // namespace nanovllm
