#include "cli/model_directory.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "core/check.h"

namespace nanovllm::cli {
namespace {

namespace fs = std::filesystem;

/// The folder of models--ORG--NAME folders. The rules are huggingface_hub's (constants.py).
fs::path hub_cache() {
  const auto folder = [](const char* variable) {
    const char* value = std::getenv(variable);
    return fs::path(value ? value : "");
  };
  if (const fs::path hub = folder("HF_HUB_CACHE"); !hub.empty()) return hub;
  if (const fs::path home = folder("HF_HOME"); !home.empty()) return home / "hub";
  if (const fs::path cache = folder("XDG_CACHE_HOME"); !cache.empty())
    return cache / "huggingface" / "hub";
  return folder("HOME") / ".cache" / "huggingface" / "hub";
}

/// A name of a repository's or a commit's, which cannot lead anywhere else.
bool is_plain(const std::string& name) {
  return !name.empty() && name.front() != '.' && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.';
  });
}

}  // namespace

std::string find_model(const std::string& model) {
  std::error_code error;
  const size_t slash = model.find('/');
  if (slash == model.npos || fs::exists(model, error)) return model;
  const std::string owner = model.substr(0, slash), name = model.substr(slash + 1);
  if (!is_plain(owner) || !is_plain(name)) return model;
  const fs::path repository = hub_cache() / ("models--" + owner + "--" + name);
  std::string commit;
  std::ifstream(repository / "refs" / "main") >> commit;
  const fs::path snapshot = repository / "snapshots" / commit;
  check(is_plain(commit) && fs::is_directory(snapshot, error), ErrorKind::model,
        "{}: no such directory, nor in Hugging Face's cache, {}; \"hf download {}\" puts a model "
        "there (nothing is downloaded here)",
        model, hub_cache().string(), model);
  return snapshot.string();
}

}  // namespace nanovllm::cli
