#include "nanovllm/params.h"

#include <array>

namespace nanovllm {

const char* to_string(FinishReason reason) {
  constexpr std::array kNames{"", "stop", "length", "error", "abort"};  // in the enum's order
  return kNames.at(static_cast<size_t>(reason));
}

}  // namespace nanovllm
