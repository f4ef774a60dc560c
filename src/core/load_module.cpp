#include "core/load_module.h"

#include <filesystem>

#include <dlfcn.h>
#include <fmt/format.h>

namespace nanovllm {
namespace {

/// The directory of the program or library that this code is linked into; empty if unknown.
std::filesystem::path own_directory() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&load_module), &info) == 0 || info.dli_fname == nullptr)
    return {};
  std::error_code error;
  std::filesystem::path file = std::filesystem::canonical(info.dli_fname, error);
  // A program found through PATH: dladdr knows its bare name only.
  if (error) file = std::filesystem::canonical("/proc/self/exe", error);
  return error ? std::filesystem::path{} : file.parent_path();
}

}  // namespace

const char* module_version() { return NANOVLLM_MODULE_VERSION; }

void* load_module(const char* file, int mode, std::string& why) {
  const std::filesystem::path here = own_directory();
  std::error_code error;
  // A build has all in one folder; in an installation the library lies in lib, the program in bin.
  for (const auto& folder : {here, here / "nanovllm", here / NANOVLLM_MODULES_FROM_PROGRAM}) {
    const std::filesystem::path place = folder / file;
    if (here.empty() || !std::filesystem::exists(place, error)) continue;
    // The module that came with this program; where it is broken, another one would only hide that.
    void* module = dlopen(place.c_str(), mode | RTLD_NODELETE);
    if (!module) why = fmt::format("{} cannot be loaded: {}", file, dlerror());
    return module;
  }
  void* module = dlopen(file, mode | RTLD_NODELETE);
  if (!module) why = fmt::format("no {} beside the program", file);
  return module;
}

void* module_function(const char* file, const char* name, int mode, std::string& why) {
  void* module = load_module(file, mode, why);
  void* function = module ? dlsym(module, name) : nullptr;
  if (module && !function)
    why = fmt::format("{} has no {}: it belongs to another program", file, name);
  return function;
}

}  // namespace nanovllm
