// The choice of kernels for quantised weights, beside choose.cpp.
#pragma once

#include <string>

#include "ops/cuda/gemm/choose.h"

namespace nanovllm {

/// Null: the kernel serves, and its plan is made.
using Why = const char*;
inline constexpr Why kServes = nullptr;

/// The SMs that a product's blocks may have.
inline int sms_of(const GemmGpu& gpu) { return gpu.divides_sms() ? gpu.own_sms : gpu.num_sms; }

/// A product that sends its results ends later than one that does not with fewer rows: two H200s.
inline constexpr int64_t kFewestSentRows = 97;

Why try_packed(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_mma(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_fp8(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_int8(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_fp8_to_send(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_int8_to_send(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);
Why try_w8a8(const GemmProblem& p, const GemmGpu& gpu, GemmChoice& choice);

/// The tiles, for people.
std::string describe(const Fp8Plan& plan, bool integers);
std::string describe(const W8a8Plan& plan);

}  // namespace nanovllm
