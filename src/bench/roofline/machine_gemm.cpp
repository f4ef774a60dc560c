// The matrix-product rate, straight from oneDNN: independent of how the engine uses the library.
#include <algorithm>
#include <chrono>
#include <cstring>

#include <oneapi/dnnl/dnnl.hpp>

#include "bench/roofline/machine.h"
#include "core/seconds.h"
#include "ops/cpu/threads.h"

namespace nanovllm::cli {
namespace {

dnnl::matmul::primitive_desc describe(const dnnl::engine& engine, const dnnl::memory::desc& x,
                                      const dnnl::memory::desc& w, const dnnl::memory::desc& y) {
#if DNNL_VERSION_MAJOR >= 3
  return {engine, x, w, y};
#else
  return {dnnl::matmul::desc(x, w, y), engine};
#endif
}

double rate_of(int threads, dnnl::memory::data_type type) {
  using dnnl::memory;
  constexpr int64_t kRows = 512, kInner = 2048, kColumns = 4096;
  const cpu::ThreadCount scope(threads);
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const memory::desc x({kRows, kInner}, type, memory::format_tag::ab);
  const memory::desc y({kRows, kColumns}, type, memory::format_tag::ab);
  const memory::desc any({kInner, kColumns}, type, memory::format_tag::any);
  const auto product = describe(engine, x, any, y);
  const dnnl::matmul matmul(product);

  // Values do not matter for the speed, but zeros may: a small pattern of normal numbers.
  const auto filled = [&](const memory::desc& desc) {
    memory m(desc, engine);
    std::memset(m.get_data_handle(), 0x3c, desc.get_size());
    return m;
  };
  const memory in = filled(x), weights = filled(product.weights_desc()), out = filled(y);
  double best = 0;
  for (int pass = 0; pass < 10; ++pass) {
    const auto start = std::chrono::steady_clock::now();
    matmul.execute(stream, {{DNNL_ARG_SRC, in}, {DNNL_ARG_WEIGHTS, weights}, {DNNL_ARG_DST, out}});
    stream.wait();
    const double seconds = seconds_since(start);
    best = std::max(best, 2.0 * kRows * kInner * kColumns / seconds);
  }
  return best;
}

}  // namespace

double measure_gemm_rate(int threads, const std::string& dtype) {
  using dnnl::memory;
  if (dtype == "f32") return rate_of(threads, memory::data_type::f32);
  try {
    return rate_of(threads, memory::data_type::bf16);
  } catch (const dnnl::error& error) {
    // Below AVX-512 oneDNN has no product of bf16, and the engine's own is one of f32.
    if (error.status != dnnl_unimplemented) throw;
    return rate_of(threads, memory::data_type::f32);
  }
}

}  // namespace nanovllm::cli
