// The exit codes that scripts rely on.
#pragma once

#include "nanovllm/error.h"

namespace nanovllm::cli {

enum ExitCode : int {
  kExitDone = 0,
  /// Some requests failed or were aborted, results could not be written, or a server did not
  /// answer.
  kExitRequestsFailed = 1,
  kExitUsage = 2,   ///< an option, a file name, a missing argument
  kExitModel = 3,   ///< the model cannot be loaded
  kExitDevice = 4,  ///< no such device, or not enough memory
  kExitEngine = 5,  ///< the engine failed while running
};

/// The exit code of a program that an Error of this kind ends.
inline ExitCode exit_code(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::invalid_argument:
      return kExitUsage;
    case ErrorKind::model:
      return kExitModel;
    case ErrorKind::device:
      return kExitDevice;
    case ErrorKind::unavailable:
      return kExitRequestsFailed;
    case ErrorKind::engine:
      break;
  }
  return kExitEngine;
}

}  // namespace nanovllm::cli
