// parse_safetensors: any bytes give an Error, or tensors that cover the data of the file exactly
// once.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>

#include "io/safetensors/safetensors.h"

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void check_covered(std::span<const std::byte> file,
                   const std::vector<nanovllm::StoredTensor>& tensors) {
  const std::byte* at = tensors.empty() ? file.data() + file.size() : tensors.front().data.data();
  for (const nanovllm::StoredTensor& tensor : tensors) {
    require(tensor.data.data() == at);
    at += tensor.data.size();
  }
  require(at == file.data() + file.size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nanovllm;
  const std::span<const std::byte> file(reinterpret_cast<const std::byte*>(data), size);
  try {
    const SafetensorsContents contents = parse_safetensors(file, "input");
    check_covered(file, contents.tensors);
    for (const StoredTensor& tensor : contents.tensors) {
      require(!tensor.describe().empty());
      try {
        const Tensor view = tensor.view();
        require(view.bytes() == tensor.data.size() && view.contiguous());
      } catch (const Error&) {
        require(!tensor.loadable_dtype() || tensor.shape.empty() || tensor.shape.size() > 4 ||
                tensor.data.empty());
      }
    }
  } catch (const Error& error) {
    require(error.kind() == ErrorKind::model);
    require(std::string_view(error.what()).size() < 1000);
  }
  return 0;
}
