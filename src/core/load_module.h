// Modules: the libraries that the program looks for at run time and does not link (CUDA, MPI). The
// same program runs where they, or what they need, are missing.
#pragma once

#include <array>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>

#include "core/check.h"

namespace nanovllm {

/// A digest of the headers that the program and its modules share: a module of another build, whose
/// classes may be laid out otherwise, has another one and refuses.
const char* module_version();

/// Opens `file` beside the program or library that this code is linked into, in the folder of an
/// installation, or wherever the system looks, with dlopen()'s `mode`. It stays loaded: the code of
/// all that it makes lies in it. Null, with the reason in `why`, where there is none or it is
/// broken.
void* load_module(const char* file, int mode, std::string& why);
/// A function of such a module by its name.
void* module_function(const char* file, const char* name, int mode, std::string& why);

/// The object that a module's function `entry`, of type Open, makes of the version, the arguments
/// and room for one line about what went wrong. Null, with the reason in `why`, where it makes
/// nothing.
template <class Open, class... Args>
auto make_in_module(const char* file, const char* entry, int mode, std::string& why,
                    const Args&... args) {
  std::array<char, 512> error{};
  using Made = std::invoke_result_t<Open*, const char*, const Args&..., char*, size_t>;
  std::unique_ptr<std::remove_pointer_t<Made>> made;
  auto* open = reinterpret_cast<Open*>(module_function(file, entry, mode, why));
  if (!open) return made;
  made.reset(open(module_version(), args..., error.data(), error.size()));
  if (!made) why = error.data();
  return made;
}

/// The module's side of that: the object that `make` returns the owner of. Null, with one line in
/// `error`, where `version` is another build's or make() throws.
template <class Make>
auto made_by_module(const char* file, const char* version, char* error, size_t error_size,
                    const Make& make) -> decltype(make().release()) {
  try {
    check(std::string_view(version) == module_version(),
          "{} belongs to another build of the program: install both from one build", file);
    return make().release();
  } catch (const std::exception& failure) {
    std::snprintf(error, error_size, "%s", failure.what());
  } catch (...) {
    std::snprintf(error, error_size, "%s failed", file);
  }
  return nullptr;
}

}  // namespace nanovllm
