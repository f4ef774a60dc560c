#include "server/pool.h"

#include <system_error>

#include <gtest/gtest.h>

#include "unit/one_thread.h"

namespace nanovllm::server {
namespace {

TEST(Pool, AThreadThatCannotStartIsAnErrorOfTheCallers) {
  const OneThread limit;
  EXPECT_THROW(Pool(2), std::system_error);
}

}  // namespace
}  // namespace nanovllm::server
