// A model's directory, written anew with its weights quantised: shards and their index,
// config.json, and the files that stay as they are.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "core/check.h"
#include "io/quantised/quantization.h"
#include "io/quantised/quantize.h"
#include "io/quantised/quantized_weight.h"
#include "io/run_all.h"

namespace nanovllm {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBytesAtOnce = size_t{8} << 20;
constexpr int64_t kRowsAtOnce = 128;

/// A new directory beside `to`, which becomes `to` at the end; until then it goes with this.
class NewDirectory {
 public:
  explicit NewDirectory(const std::string& to) : to_(to) {
    if (!to_.has_filename()) to_ = to_.parent_path();  // "out/"
    std::error_code error;
    check(fs::symlink_status(to_, error).type() == fs::file_type::not_found,
          ErrorKind::invalid_argument, "{} exists: give the name of a directory that does not", to);
    path_ = to_;
    path_ += fmt::format(".partial-{}", ::getpid());
    check(fs::create_directory(path_, error), ErrorKind::invalid_argument,
          "{} cannot be created: {}", path_.string(), error ? error.message() : "it exists");
  }
  ~NewDirectory() {
    std::error_code error;
    if (!done_) fs::remove_all(path_, error);
  }
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;

  fs::path operator/(const std::string& name) const { return path_ / name; }
  void finish() {
    std::error_code error;
    fs::rename(path_, to_, error);
    check(!error, ErrorKind::invalid_argument, "{} cannot be created: {}", to_.string(),
          error.message());
    done_ = true;
  }

 private:
  fs::path to_, path_;
  bool done_ = false;
};

class NewFile {
 public:
  explicit NewFile(const fs::path& path) : path_(path), out_(path, std::ios::binary) { confirm(); }
  void write(const void* from, size_t bytes) {
    out_.write(static_cast<const char*>(from), static_cast<std::streamsize>(bytes));
    confirm();
  }
  void write_at(int64_t offset, const void* from, size_t bytes) {
    out_.seekp(offset);
    write(from, bytes);
  }
  void close() {
    out_.close();
    confirm();
  }

 private:
  void confirm() {
    check(out_.good(), ErrorKind::unavailable, "{} cannot be written: {}", path_.string(),
          std::strerror(errno));
  }
  fs::path path_;
  std::ofstream out_;
};

void write_json(const fs::path& path, const Json& json) {
  const std::string text = json.dump(2) + "\n";
  NewFile file(path);
  file.write(text.data(), text.size());
  file.close();
}

/// A tensor of the new files.
struct NewTensor {
  std::string name, dtype;
  std::vector<int64_t> shape;
  int64_t element = 1;  // bytes
  int64_t offset = 0;   // in the file

  int64_t bytes() const {
    int64_t all = element;
    for (const int64_t size : shape) all *= size;
    return all;
  }
};

/// One tensor of the checkpoint, and the tensors that it becomes.
struct Entry {
  std::string source;
  const QuantScheme* scheme = nullptr;  // null: it is copied
  std::vector<NewTensor> to;            // the copy; or numbers, scales and perhaps sizes
};

std::string module_of(const std::string& weight) { return weight.substr(0, weight.rfind('.')); }

class QuantisedWriter {
 public:
  QuantisedWriter(const Checkpoint& checkpoint, const QuantizationConfig& quantization,
                  const std::function<void(int64_t, int64_t)>& progress, int64_t max_shard_bytes)
      : checkpoint_(checkpoint), progress_(progress), max_shard_bytes_(max_shard_bytes) {
    bool any = false;
    for (const std::string& name : checkpoint.names()) {
      const StoredTensor& tensor = *checkpoint.find(name);
      const bool is_matrix =
          name.ends_with(".weight") && tensor.shape.size() == 2 && !tensor.data.empty();
      const QuantScheme* scheme = is_matrix ? quantization.find(module_of(name)) : nullptr;
      any = any || scheme;
      add(scheme ? quantised(tensor, *scheme) : plain(tensor));
    }
    check(any, ErrorKind::model, "{}: has no linear layer to quantise", checkpoint.directory());
  }

  void write(const NewDirectory& to) {
    Json map = Json::object();
    int64_t bytes = 0;
    for (size_t i = 0; i < shards_.size(); ++i) {
      const std::string name = shards_.size() == 1 ? "model.safetensors"
                                                   : fmt::format("model-{:05}-of-{:05}.safetensors",
                                                                 i + 1, shards_.size());
      write_shard(to / name, shards_[i]);
      for (const Entry& entry : shards_[i])
        for (const NewTensor& tensor : entry.to) {
          map[tensor.name] = name;
          bytes += tensor.bytes();
        }
    }
    if (shards_.size() > 1)
      write_json(to / "model.safetensors.index.json",
                 {{"metadata", {{"total_size", bytes}}}, {"weight_map", map}});
    checkpoint_.check_unchanged();
  }

 private:
  Entry plain(const StoredTensor& tensor) const {
    int64_t elements = 1;
    for (const int64_t size : tensor.shape) elements *= size;
    const auto bytes = static_cast<int64_t>(tensor.data.size());
    return {tensor.name,
            nullptr,
            {{tensor.name, tensor.dtype, tensor.shape, elements > 0 ? bytes / elements : 1}}};
  }

  Entry quantised(const StoredTensor& tensor, const QuantScheme& scheme) const {
    const int64_t n = tensor.shape[0], k = tensor.shape[1], per_word = 32 / scheme.bits;
    (void)QuantizedWeight(checkpoint_, module_of(tensor.name), scheme, n, k);  // checks it
    const int64_t groups = scheme.kept_format(0, k).value().groups(k);
    const std::string module = module_of(tensor.name);
    NewTensor scales{module + ".weight_scale", "BF16", {n, groups}, 2};
    if (scheme.storage != QuantStorage::packed) {
      const char* dtype = scheme.storage == QuantStorage::int8 ? "I8" : "F8_E4M3";
      return {tensor.name, &scheme, {{tensor.name, dtype, {n, k}, 1}, std::move(scales)}};
    }
    check(k % per_word == 0, ErrorKind::model,
          "{}: tensor {} has {} columns, not a multiple of {}: use int8 or fp8",
          checkpoint_.file_of(tensor.name), tensor.name, k, per_word);
    return {tensor.name,
            &scheme,
            {{module + ".weight_packed", "I32", {n, k / per_word}, 4},
             std::move(scales),
             {module + ".weight_shape", "I64", {2}, 8}}};
  }

  /// The tensors of an entry lie in one file.
  void add(Entry entry) {
    int64_t bytes = 0;
    for (const NewTensor& tensor : entry.to) bytes += tensor.bytes();
    if (shards_.empty() || (shard_bytes_ > 0 && shard_bytes_ + bytes > max_shard_bytes_)) {
      shards_.emplace_back();
      shard_bytes_ = 0;
    }
    shard_bytes_ += bytes;
    total_ += static_cast<int64_t>(checkpoint_.find(entry.source)->data.size());
    shards_.back().push_back(std::move(entry));
  }

  void write_shard(const fs::path& path, std::vector<Entry>& entries) {
    // The largest elements first: so each tensor begins at a multiple of its own.
    std::vector<NewTensor*> order;
    for (Entry& entry : entries)
      for (NewTensor& tensor : entry.to) order.push_back(&tensor);
    std::stable_sort(order.begin(), order.end(), [](const NewTensor* a, const NewTensor* b) {
      return a->element > b->element;
    });
    Json header = {{"__metadata__", {{"format", "pt"}}}};
    int64_t at = 0;
    for (NewTensor* tensor : order) {
      tensor->offset = at;
      at += tensor->bytes();
      header[tensor->name] = {{"dtype", tensor->dtype},
                              {"shape", tensor->shape},
                              {"data_offsets", {tensor->offset, at}}};
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');
    const uint64_t size = text.size();
    NewFile file(path);
    file.write(&size, sizeof size);
    file.write(text.data(), text.size());
    for (NewTensor* tensor : order) tensor->offset += static_cast<int64_t>(sizeof size + size);
    for (const Entry& entry : entries) {
      const StoredTensor& source = *checkpoint_.find(entry.source);
      if (entry.scheme)
        write_quantised(file, entry, source);
      else
        copy(file, entry.to.front(), source);
      checkpoint_.release(entry.source);
    }
    file.close();
  }

  void copy(NewFile& file, const NewTensor& to, const StoredTensor& source) {
    std::vector<std::byte> some(std::min(source.data.size(), kBytesAtOnce));
    for (size_t i = 0; i < source.data.size(); i += some.size()) {
      some.resize(std::min(some.size(), source.data.size() - i));
      checkpoint_.read(some, source.data.data() + i);
      file.write_at(to.offset + static_cast<int64_t>(i), some.data(), some.size());
      report(some.size());
    }
  }

  void write_quantised(NewFile& file, const Entry& entry, const StoredTensor& source) {
    const QuantizedWeight weight(checkpoint_, module_of(entry.source), *entry.scheme,
                                 source.shape[0], source.shape[1]);
    const int64_t n = source.shape[0], k = source.shape[1], groups = entry.to[1].shape[1],
                  width = entry.to[0].bytes() / n;
    // As many rows as all threads take at once: few bytes, however large the weight is.
    const int64_t step = kRowsAtOnce * std::max<int64_t>(1, static_cast<int64_t>(8 * kBytesAtOnce) /
                                                                k / kRowsAtOnce);
    for (int64_t first = 0; first < n; first += step) {
      const int64_t rows = std::min(step, n - first);
      std::vector<uint8_t> numbers(static_cast<size_t>(rows * width));
      std::vector<bf16> scales(static_cast<size_t>(rows * groups));
      std::vector<std::function<void()>> work;
      for (int64_t row = 0; row < rows; row += kRowsAtOnce)
        work.push_back([&, row] {
          const WeightBlock some{first + row, first + std::min(row + kRowsAtOnce, rows), 0, k};
          encode(weight, *entry.scheme, some, numbers.data() + row * width,
                 scales.data() + row * groups);
        });
      run_all(work);
      file.write_at(entry.to[0].offset + first * width, numbers.data(), numbers.size());
      file.write_at(entry.to[1].offset + first * groups * 2, scales.data(), scales.size() * 2);
      report(static_cast<size_t>(rows) * (source.data.size() / static_cast<size_t>(n)));
    }
    if (entry.to.size() > 2)
      file.write_at(entry.to[2].offset, source.shape.data(), 2 * sizeof(int64_t));
  }

  /// Some rows as compressed-tensors stores them: bytes as they are; packed int4 from 0 on, the
  /// first of a word in its lowest bits.
  static void encode(const QuantizedWeight& weight, const QuantScheme& scheme,
                     const WeightBlock& block, uint8_t* numbers, bf16* scales) {
    const WeightFormat format = scheme.kept_format(0, block.cols()).value();
    const auto count = static_cast<size_t>(block.rows() * block.cols());
    QuantizedRows rows;
    rows.numbers.resize(count);
    rows.scales.resize(static_cast<size_t>(block.rows() * format.groups(block.cols())));
    if (format.has_zeros()) rows.zeros.resize(rows.scales.size());
    weight.copy_rows(rows, 0, block);
    for (size_t i = 0; i < rows.scales.size(); ++i) scales[i] = bf16(rows.scales[i]);
    const int8_t* q = rows.numbers.data();
    if (scheme.storage == QuantStorage::packed)
      for (size_t i = 0; i < count; i += 2)
        numbers[i / 2] = static_cast<uint8_t>((q[i] + 8) | (q[i + 1] + 8) << 4);
    else
      std::memcpy(numbers, q, count);
  }

  void report(size_t bytes) {
    done_ += static_cast<int64_t>(bytes);
    if (progress_) progress_(done_, total_);
  }

  const Checkpoint& checkpoint_;
  const std::function<void(int64_t, int64_t)>& progress_;
  const int64_t max_shard_bytes_;
  std::vector<std::vector<Entry>> shards_;
  int64_t shard_bytes_ = 0, done_ = 0, total_ = 0;
};

/// Weights, in whatever form, and hidden files are not for the new directory; config.json is
/// written anew.
bool is_copied(const fs::directory_entry& entry) {
  const std::string name = entry.path().filename().string();
  for (const char* end : {".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".msgpack",
                          ".h5", ".onnx", ".ot"})
    if (name.ends_with(end)) return false;
  return (entry.is_regular_file() && !name.starts_with('.') && name != "config.json") ||
         name == "additional_chat_templates";
}

}  // namespace

void write_quantised(const std::string& from, const std::string& to, const std::string& format,
                     const FindConfigDefaults& defaults,
                     const std::function<void(int64_t done, int64_t total)>& progress,
                     int64_t max_shard_bytes) {
  ModelConfig model = load_model_config(from, defaults);
  check(!model.quantization, ErrorKind::model, "{}: the checkpoint is quantised already, {}", from,
        model.quantization ? model.quantization->describe() : "");
  Json config = read_json_file((fs::path(from) / "config.json").string());
  config["quantization_config"] = quantization_json(model, format);
  choose_quantization(model, format, false);
  const Checkpoint checkpoint(from);
  QuantisedWriter writer(checkpoint, *model.quantization, progress, max_shard_bytes);
  NewDirectory directory(to);
  writer.write(directory);
  write_json(directory / "config.json", config);
  try {
    for (const fs::directory_entry& entry : fs::directory_iterator(from))
      if (is_copied(entry)) fs::copy(entry.path(), directory / entry.path().filename().string());
  } catch (const fs::filesystem_error& error) {
    fail(ErrorKind::invalid_argument, "{} cannot be copied: {}", error.path1().string(),
         error.code().message());
  }
  directory.finish();
}

}  // namespace nanovllm
