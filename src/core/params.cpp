#include "nanovllm/params.h"

namespace nanovllm {

const char* to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::none:
      return "";
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
    case FinishReason::error:
      return "error";
    case FinishReason::abort:
      return "abort";
  }
  return "";
}

}  // namespace nanovllm
