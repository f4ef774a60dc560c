// Checkpoint on a directory made from the input: an index, then the shards "a" and "b", separated
// by the line "----".
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include <unistd.h>

#include "io/safetensors/checkpoint.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nanovllm;
  namespace fs = std::filesystem;
  // One directory for the whole run: what a run writes, the next overwrites.
  static const fs::path directory =
      fs::temp_directory_path() / ("nanovllm_fuzz_" + std::to_string(::getpid()));
  fs::create_directories(directory);

  std::string_view rest(reinterpret_cast<const char*>(data), size);
  for (const char* name : {"model.safetensors.index.json", "a", "b"}) {
    const size_t end = rest.find("----");
    std::ofstream(directory / name, std::ios::binary) << rest.substr(0, end);
    rest = end == rest.npos ? std::string_view() : rest.substr(end + 4);
  }
  try {
    const Checkpoint checkpoint(directory.string());
    size_t bytes = 0;
    for (const std::string& name : checkpoint.names()) bytes += checkpoint.find(name)->data.size();
    if (bytes != checkpoint.bytes()) std::abort();
    checkpoint.check_unchanged();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::model) std::abort();
  }
  return 0;
}
