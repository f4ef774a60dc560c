// Half of load_module_test.cpp: a library with a copy of load_module().
#include <string>

#include <dlfcn.h>

#include "core/load_module.h"

extern "C" bool ask(const char* file) {
  std::string why;
  return nanovllm::load_module(file, RTLD_NOW | RTLD_LOCAL, why) != nullptr;
}
