// Preloaded into a program: it stops itself where it maps the first file of weights.
#include <cstdio>
#include <string_view>

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

extern "C" void* mmap(void* address, size_t length, int protection, int flags, int file,
                      off_t offset) noexcept {
  char link[32], name[4096];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t size = file < 0 ? -1 : ::readlink(link, name, sizeof name);
  if (size > 0 && std::string_view(name, static_cast<size_t>(size)).ends_with(".safetensors"))
    ::raise(SIGSTOP);
  return reinterpret_cast<decltype(&mmap)>(::dlsym(RTLD_NEXT, "mmap"))(address, length, protection,
                                                                       flags, file, offset);
}
