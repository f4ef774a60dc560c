// A safetensors file that a test takes apart and puts together again, with something wrong in it.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "io/json.h"

namespace nanovllm {

struct StoredBytes {
  std::string name, dtype, bytes;
  std::vector<int64_t> shape;
};

inline std::vector<StoredBytes> read_tensors(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string file{std::istreambuf_iterator<char>(in), {}};
  uint64_t header_size = 0;
  std::memcpy(&header_size, file.data(), sizeof header_size);
  const Json header = Json::parse(file.substr(8, header_size));
  std::vector<StoredBytes> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const auto begin = entry["data_offsets"][0].get<size_t>(),
               end = entry["data_offsets"][1].get<size_t>();
    tensors.push_back({name, entry["dtype"].get<std::string>(),
                       file.substr(8 + header_size + begin, end - begin),
                       entry["shape"].get<std::vector<int64_t>>()});
  }
  return tensors;
}

inline void write_tensors(const std::filesystem::path& path,
                          const std::vector<StoredBytes>& tensors) {
  Json header = Json::object();
  std::string data;
  for (const StoredBytes& t : tensors) {
    header[t.name] = {{"dtype", t.dtype},
                      {"shape", t.shape},
                      {"data_offsets", {data.size(), data.size() + t.bytes.size()}}};
    data += t.bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t size = text.size();
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&size), sizeof size);
  out << text << data;
}

}  // namespace nanovllm
