// The findings of `nanovllm doctor`: line by line, what is there, what is missing, and the
// remedy.
#pragma once

#include <string>
#include <vector>

#include "cli/about/system_facts.h"

namespace nanovllm::cli {

/// `absent`: not here, and nothing that is here needs it. `fault`: something that is here cannot be
/// used.
enum class Status { ok, absent, fault };
const char* to_string(Status status);  ///< "ok", "absent", "fault"

struct Finding {
  Status status = Status::ok;
  std::string name{}, text{};
  std::string remedy{};  ///< what to do; empty where there is nothing to do
};

std::vector<Finding> findings(const SystemFacts& facts);

// How versions are written.
std::string cuda_version(int version);     ///< 12040: "12.4"
std::string library_version(int version);  ///< cuBLASLt's 120402: "12.4.2", NCCL's 22703: "2.27.3"
/// "toolkit 13.0, code for sm_80 sm_90, NCCL 2.27.3"
std::string module_contents(const CudaModuleFacts& facts);

}  // namespace nanovllm::cli
