#include "io/safetensors/checkpoint.h"

#include <cstring>
#include <filesystem>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "io/json.h"
#include "io/json_object.h"
#include "io/model_directory.h"

namespace nanovllm {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

/// Says why a directory without safetensors weights cannot be loaded.
[[noreturn]] void refuse_directory(const std::string& directory) {
  check_model_directory(directory);
  std::error_code error;
  // Sorted: the message does not depend on the file system.
  std::set<std::string> pickles, ggufs, others;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename(), extension = entry->path().extension();
    if (extension == ".bin" || extension == ".pt" || extension == ".pth") pickles.insert(name);
    if (extension == ".gguf") ggufs.insert(name);
    if (extension == ".safetensors") others.insert(name);
  }
  if (error) fail(ErrorKind::model, "{}: cannot be read: {}", directory, error.message());
  if (!others.empty())
    fail(ErrorKind::model, "{}: has {} but neither {} nor {}: {}", directory,
         quote(*others.begin()), kSingleFile, kIndexFile,
         others.contains("adapter_model.safetensors")
             ? "an adapter (LoRA) is merged into its model first"
         : others.contains("consolidated.safetensors")
             ? "Mistral's own format is not read; download the files of those names"
         : others.size() == 1
             ? "the download is incomplete, or that file needs the name of the first"
             : "the download is incomplete");
  if (!pickles.empty())
    fail(ErrorKind::model, "{}: only {}: pickle weights are not loaded; convert to safetensors",
         directory, quote(*pickles.begin()));
  if (!ggufs.empty())
    fail(ErrorKind::model, "{}: only {}: GGUF is not read; use the model's safetensors", directory,
         quote(*ggufs.begin()));
  fail(ErrorKind::model, "{}: no weights: expected {} or {}; load_format dummy takes random ones",
       directory, kSingleFile, kIndexFile);
}

/// An index may come from anywhere: a shard is a file of this directory and nothing else.
bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.size() <= 255 &&
         name.find_first_of(std::string_view("/\\\0", 3)) == name.npos;
}

/// The shards that an index names. Their headers say which tensors are in them: indexes of merged
/// and requantised models are often those of another model.
std::set<std::string> read_index(const std::string& path) {
  const Json json = read_json_file(path);
  const std::optional<JsonObject> weight_map =
      JsonObject(json, path, ErrorKind::model).optional_object("weight_map");
  check(weight_map.has_value(), ErrorKind::model, "{}: weight_map is missing", path);
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : weight_map->json().get_ref<const Json::object_t&>()) {
    if (!shard.is_string())
      fail(ErrorKind::model, "{}: weight_map: the shard of {} must be a string, got {}", path,
           quote(tensor), describe(shard));
    const auto& name = shard.get_ref<const std::string&>();
    check(is_plain_name(name), ErrorKind::model, "{}: shard {} must be a plain file name", path,
          quote(name));
    shards.insert(name);
  }
  check(!shards.empty(), ErrorKind::model, "{}: weight_map is empty", path);
  return shards;
}

}  // namespace

Checkpoint::Checkpoint(const std::string& directory) : directory_(directory) {
  // As Hugging Face does: the single file first. A dangling link counts as present, so that the
  // error names it.
  const auto present = [](const fs::path& path) {
    std::error_code error;
    return fs::symlink_status(path, error).type() != fs::file_type::not_found && !error;
  };
  const fs::path single = fs::path(directory) / kSingleFile,
                 index = fs::path(directory) / kIndexFile;
  if (present(single))
    add_file(SafetensorsFile(single));
  else if (present(index))
    open_shards(directory, index);
  else
    refuse_directory(directory);
  check(!names_.empty(), ErrorKind::model, "{}: the checkpoint holds no tensors", directory);
}

void Checkpoint::open_shards(const std::string& directory, const std::string& index_path) {
  for (const std::string& shard : read_index(index_path)) {
    const fs::path path = fs::path(directory) / shard;
    std::error_code error;
    check(fs::exists(path, error), ErrorKind::model, "{}: shard {} is missing: download it",
          index_path, quote(shard));
    add_file(SafetensorsFile(path));
  }
}

void Checkpoint::add_file(SafetensorsFile file) {
  files_.push_back(std::move(file));
  const auto& tensors = files_.back().tensors();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto [place, is_new] = places_.emplace(tensors[i].name, Place{files_.size() - 1, i});
    check(is_new, ErrorKind::model, "tensor {} is in two files: {} and {}", quote(tensors[i].name),
          files_[place->second.file].path(), files_.back().path());
    names_.push_back(tensors[i].name);
    bytes_ += tensors[i].data.size();
  }
}

const Checkpoint::Place* Checkpoint::place_of(std::string_view name) const {
  const auto found = places_.find(std::string(name));
  return found == places_.end() ? nullptr : &found->second;
}

const StoredTensor* Checkpoint::find(std::string_view name) const {
  const Place* place = place_of(name);
  return place ? &files_[place->file].tensors()[place->tensor] : nullptr;
}

const std::string& Checkpoint::file_of(std::string_view name) const {
  const Place* place = place_of(name);
  check(place != nullptr, "no tensor {} in the checkpoint", quote(name));
  return files_[place->file].path();
}

void Checkpoint::read(std::span<std::byte> to, const std::byte* from) const {
  for (const SafetensorsFile& file : files_)
    if (file.read(to, from)) return;
  std::memcpy(to.data(), from, to.size());  // an aligned copy
}

void Checkpoint::release(std::string_view name) const {
  if (const Place* place = place_of(name))
    files_[place->file].release(files_[place->file].tensors()[place->tensor]);
}

void Checkpoint::check_unchanged() const {
  for (const SafetensorsFile& file : files_) file.check_unchanged();
}

}  // namespace nanovllm
