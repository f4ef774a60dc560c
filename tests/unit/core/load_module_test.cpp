// A module is looked for beside the library that asks for it, which need not be the program: in a
// Python extension, the program is the interpreter.
#include "core/load_module.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

namespace nanovllm {
namespace {

// Of tests/unit/CMakeLists.txt: two libraries that lie together, away from this program. The first
// has a copy of load_module() and calls it.
constexpr const char* kAsking = NANOVLLM_BINARY_DIR "/tests/unit/module/libasking.so";
constexpr const char* kAskedFor = "libasked-for.so";

TEST(LoadModule, FindsWhatLiesBesideTheLibraryThatAsks) {
  void* library = dlopen(kAsking, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << dlerror();
  using Ask = bool(const char* file);
  auto* ask = reinterpret_cast<Ask*>(dlsym(library, "ask"));
  ASSERT_NE(ask, nullptr);
  EXPECT_TRUE(ask(kAskedFor));
  EXPECT_FALSE(ask("libabsent.so"));
}

TEST(LoadModule, SaysWhyThereIsNone) {
  std::string why;
  EXPECT_EQ(load_module(kAskedFor, RTLD_NOW, why), nullptr);
  EXPECT_EQ(why, "no libasked-for.so beside the program");
}

TEST(LoadModule, AModuleRefusesAnotherBuildsProgramAndSaysWhatWentWrong) {
  std::array<char, 100> error{};
  const auto make = [&](const char* version, auto maker) {
    return std::unique_ptr<int>(
        made_by_module("libx.so", version, error.data(), error.size(), maker));
  };
  const auto five = [] { return std::make_unique<int>(5); };
  EXPECT_EQ(*make(module_version(), five), 5);
  EXPECT_EQ(make("another", five), nullptr);
  EXPECT_STREQ(error.data(),
               "libx.so belongs to another build of the program: install both from one build");
  const auto fails = []() -> std::unique_ptr<int> { throw std::runtime_error("no such device"); };
  EXPECT_EQ(make(module_version(), fails), nullptr);
  EXPECT_STREQ(error.data(), "no such device");
}

}  // namespace
}  // namespace nanovllm
