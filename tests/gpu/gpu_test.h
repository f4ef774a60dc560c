// The fixture of tests that need a GPU: without one they are skipped, with the reason.
#pragma once

#include <memory>
#include <string>

#include <gtest/gtest.h>

#include "gpu/rig.h"

namespace nanovllm {

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    gpu_ = open_gpu(why);
    if (!gpu_) GTEST_SKIP() << why;
  }
  std::unique_ptr<Backend> gpu_;
};

}  // namespace nanovllm
