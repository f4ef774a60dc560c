// nanovllm-grammar-compiler: runs the compiler that lies in libnanovllm-grammar.so, beside this
// program: one copy of XGrammar is installed.
#include <string>

#include <dlfcn.h>
#include <unistd.h>

int main() {
  char path[4096];
  const ssize_t size = ::readlink("/proc/self/exe", path, sizeof path);
  if (size <= 0 || size == sizeof path) return 1;
  const std::string self(path, static_cast<size_t>(size));
  const std::string module = self.substr(0, self.rfind('/') + 1) + "libnanovllm-grammar.so";
  void* library = ::dlopen(module.c_str(), RTLD_NOW | RTLD_LOCAL);
  auto* run = library ? reinterpret_cast<int (*)()>(::dlsym(library, "nanovllm_compile_grammars"))
                      : nullptr;
  return run ? run() : 1;
}
