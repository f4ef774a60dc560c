#include "api/find_model.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <optional>

#include "nanovllm/llm.h"

#include "core/check.h"
#include "io/json.h"

namespace nanovllm {
namespace {

namespace fs = std::filesystem;

/// A name of a repository's or a commit's, which cannot lead anywhere else.
bool is_plain(const std::string& name) {
  return !name.empty() && name.front() != '.' && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.';
  });
}

/// The snapshot that refs/main names or, without that file (a download of one revision leaves
/// none), the only one there is.
std::optional<fs::path> snapshot_of(const fs::path& repository) {
  std::error_code error;
  const fs::path snapshots = repository / "snapshots", main = repository / "refs" / "main";
  std::string commit;
  if (fs::exists(main, error)) {
    commit = read_file(main.string(), 4096);  // a regular file: a pipe would be waited for
    commit.erase(std::min(commit.find_first_of(" \t\r\n"), commit.size()));
  } else {
    for (const auto& entry : fs::directory_iterator(snapshots, error)) {
      check(commit.empty(), ErrorKind::model,
            "{} has several snapshots and no refs/main: give the directory of one as MODEL",
            repository.string());
      commit = entry.path().filename().string();
    }
  }
  if (!is_plain(commit) || !fs::is_directory(snapshots / commit, error)) return std::nullopt;
  return snapshots / commit;
}

}  // namespace

fs::path hub_cache() {  // as huggingface_hub has it, which expands "~", too
  using Place = std::pair<const char*, const char*>;
  for (const auto& [variable, below] :
       {Place("HF_HUB_CACHE", ""), Place("HUGGINGFACE_HUB_CACHE", ""), Place("HF_HOME", "/hub"),
        Place("XDG_CACHE_HOME", "/huggingface/hub"), Place("HOME", "/.cache/huggingface/hub")}) {
    const char *value = std::getenv(variable), *home = std::getenv("HOME");
    std::string path = value ? value : "";
    if (path.starts_with("~/") && home) path.replace(0, 1, home);
    if (!path.empty()) return path + below;
  }
  return ".cache/huggingface/hub";
}

std::string find_model(const std::string& model) {
  std::error_code error;
  const size_t slash = model.find('/');
  if (slash == model.npos || fs::exists(model, error)) return model;
  const std::string owner = model.substr(0, slash), name = model.substr(slash + 1);
  if (!is_plain(owner) || !is_plain(name)) return model;
  const fs::path repository = hub_cache() / ("models--" + owner + "--" + name);
  if (const auto snapshot = snapshot_of(repository)) return snapshot->string();
  fail(ErrorKind::model,
       "{}: no such directory, nor in Hugging Face's cache, {}; \"hf download {}\" puts a model "
       "there (nothing is downloaded here)",
       model, hub_cache().string(), model);
}

}  // namespace nanovllm
