// The result of cmake --install: a tree that can be moved, whose program runs and against whose
// library a user's program is compiled.

#include <cctype>
#include <set>

#include <gtest/gtest.h>

#include "e2e/process.h"
#include "unit/temp_directory.h"

namespace nanovllm {
namespace {

namespace fs = std::filesystem;

const std::string kSource = NANOVLLM_SOURCE_DIR, kBuild = NANOVLLM_BINARY_DIR;
const std::string kQuestion =
    "<|im_start|>user\nWhat is 23 + 45?<|im_end|>\n<|im_start|>assistant\n";

/// A shell's command line, where something must be found through PATH.
ProcessResult shell(const std::string& command,
                    std::map<std::string, std::string> environment = {}) {
  environment["OMP_NUM_THREADS"] = "1";
  ProcessOptions options;
  options.environment = std::move(environment);
  options.time_limit = std::chrono::seconds(300);
  return run_process("/bin/sh", {"-c", command}, options);
}

/// Everything but the modules, which the tests do not build, installed and then moved elsewhere.
class Install : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    directory_ = new TempDirectory;
    const std::string first = (directory_->path() / "first").string();
    for (const std::string component : {"program", "development"}) {
      const auto result =
          shell("cmake --install " + kBuild + " --prefix " + first + " --component " + component);
      ASSERT_EQ(result.exit_code, 0) << result.output << result.errors;
    }
    fs::rename(first, prefix());
  }
  static void TearDownTestSuite() { delete directory_; }

  static fs::path prefix() { return directory_->path() / "moved"; }
  static fs::path temporary(const std::string& name) { return directory_->path() / name; }
  /// The file of the tree that has this name; empty if there is none.
  static fs::path find(const std::string& name) {
    for (const auto& entry : fs::recursive_directory_iterator(prefix()))
      if (entry.path().filename() == name) return entry.path();
    return {};
  }
  static std::string library_folder() { return find("libnanovllm.so").parent_path().string(); }

 private:
  static inline TempDirectory* directory_ = nullptr;
};

void expect_the_answer(const ProcessResult& result) {
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_NE(result.output.find("68"), std::string::npos) << result.output;
}

TEST_F(Install, TheProgramRunsFromThePathAndThroughALink) {
  const std::string ask =
      " generate " + demo_model() + " --quiet --chat --temperature 0 --prompt 'What is 23 + 45?'";
  expect_the_answer(
      shell("nanovllm" + ask, {{"PATH", (prefix() / "bin").string() + ":/usr/bin:/bin"}}));
  fs::create_symlink(prefix() / "bin" / "nanovllm", temporary("link"));
  expect_the_answer(shell(temporary("link").string() + ask));
}

TEST_F(Install, TheCommandsOfTheReadmeRunAsPrinted) {
  const fs::path folder = temporary("clone");
  fs::create_directory(folder);
  for (const char* name : {"models", "examples"})
    fs::create_symlink(fs::path(kSource) / name, folder / name);
  const std::string readme = file_text(kSource + "/README.md");
  size_t begin = readme.find("\n```\n", readme.find("\n## Use\n")) + 5,
         end = readme.find("\n```\n", begin);
  int commands = 0;
  for (size_t next; begin < end; begin = next + 1) {
    next = readme.find('\n', begin);
    const std::string command = readme.substr(begin, next - begin);
    if (!command.starts_with("nanovllm ")) continue;
    ++commands;
    const auto result = shell("cd " + folder.string() + " && " + command,
                              {{"PATH", (prefix() / "bin").string() + ":/usr/bin:/bin"}});
    EXPECT_EQ(result.exit_code, 0) << command << "\n" << result.errors;
  }
  EXPECT_EQ(commands, 7);
  const std::vector<Json> answers = json_lines(file_text(folder / "answers.jsonl"));
  ASSERT_EQ(answers.size(), 3u);
  EXPECT_NE(answers[0]["text"].get<std::string>().find("82"), std::string::npos);  // 37 + 45
}

TEST_F(Install, TheExamplesCompileByFindPackageAndRun) {
  const std::string build = temporary("by_cmake").string();
  const auto made =
      shell("cmake -S " + kSource + "/examples -B " + build +
            " -DCMAKE_CXX_COMPILER=" NANOVLLM_CXX " -DCMAKE_PREFIX_PATH=" + prefix().string() +
            " && cmake --build " + build);
  ASSERT_EQ(made.exit_code, 0) << made.output << made.errors;
  expect_the_answer(run_process(fs::path(build) / "ten_lines", {demo_model(), kQuestion}));
  const auto both =
      run_process(fs::path(build) / "twenty_lines", {demo_model(), kQuestion, "23 + 58 ="});
  EXPECT_EQ(both.exit_code, 0) << both.errors;
  EXPECT_NE(both.output.find("0: "), std::string::npos) << both.output;
  EXPECT_NE(both.output.find("1:  81"), std::string::npos) << both.output;
}

TEST_F(Install, TheExampleCompilesByPkgConfigAndRuns) {
  if (shell("pkg-config --version").exit_code != 0) GTEST_SKIP() << "no pkg-config here";
  const std::string program = temporary("by_pkg_config").string();
  const std::map<std::string, std::string> environment = {
      {"PKG_CONFIG_PATH", library_folder() + "/pkgconfig"}, {"LD_LIBRARY_PATH", library_folder()}};
  const auto made = shell(NANOVLLM_CXX " -std=c++20 " + kSource + "/examples/ten_lines.cpp -o " +
                              program + " $(pkg-config --cflags --libs nanovllm)",
                          environment);
  ASSERT_EQ(made.exit_code, 0) << made.output << made.errors;
  expect_the_answer(shell(program + " " + demo_model() + " '" + kQuestion + "'", environment));
}

TEST_F(Install, NoFileNamesThePlacesItCameFrom) {
  for (const auto& entry : fs::recursive_directory_iterator(prefix())) {
    if (!entry.is_regular_file()) continue;
    const std::string text = file_text(entry.path());
    for (const std::string& place : {temporary("first").string(), kBuild})
      EXPECT_EQ(text.find(place), text.npos) << entry.path() << " names " << place;
  }
}

TEST_F(Install, PagesLieWhereTheirReadersLook) {
  for (const char* file :
       {"share/man/man1/nanovllm.1", "share/bash-completion/completions/nanovllm",
        "share/zsh/site-functions/_nanovllm", "share/fish/vendor_completions.d/nanovllm.fish",
        "share/doc/nanovllm/LICENSE"})
    EXPECT_GT(fs::file_size(prefix() / file), 1000u) << file;
}

TEST_F(Install, DebianPackagesHoldTheFilesAndNameTheLibrariesTheyNeed) {
  if (shell("dpkg-shlibdeps --version").exit_code != 0) GTEST_SKIP() << "no dpkg-shlibdeps here";
  const std::string packages = temporary("packages").string();
  const auto made = shell("cd " + kBuild + " && cpack -G DEB -B " + packages +
                          " -D 'CPACK_COMPONENTS_ALL=program;development'");
  ASSERT_EQ(made.exit_code, 0) << made.output << made.errors;
  const auto list = [&](const std::string& package, const char* what) {
    return shell("dpkg-deb " + std::string(what) + " " + packages + "/" + package + "_*.deb")
        .output;
  };
  const std::string program = list("nanovllm", "--contents"),
                    development = list("libnanovllm-dev", "--contents");
  for (const char* file :
       {" ./usr/bin/nanovllm\n", "/libnanovllm.so.", " ./usr/share/man/man1/nanovllm.1",
        "/bash-completion/completions/nanovllm", "/vendor-completions/_nanovllm"})
    EXPECT_NE(program.find(file), program.npos) << file << " is not in\n" << program;
  EXPECT_EQ(program.find("include"), program.npos);
  for (const char* file : {" ./usr/include/nanovllm/llm.h", "/nanovllm-config.cmake",
                           "/nanovllm.pc", "/libnanovllm.so -> "})
    EXPECT_NE(development.find(file), development.npos) << file << " is not in\n" << development;
  for (const char* library : {"libdnnl", "libpcre2-8", "libutf8proc", "libgomp1", "libc6"})
    EXPECT_NE(list("nanovllm", "--field").find(library), std::string::npos) << library;
  EXPECT_NE(list("libnanovllm-dev", "--field").find("Depends: nanovllm (= "), std::string::npos);
}

/// The classes and functions that a public header declares: lines that begin at the margin.
std::set<std::string> declared_names(const std::string& header) {
  std::set<std::string> names;
  size_t begin = 0;
  for (size_t end; (end = header.find('\n', begin)) != header.npos; begin = end + 1) {
    const std::string line = header.substr(begin, end - begin);
    if (line.starts_with("class ") && line.ends_with(" {")) {
      const std::string name = line.substr(6, line.find_first_of(" :", 6) - 6);
      if (line.find("std::runtime_error") == line.npos) names.insert(name + "::" + name);
      continue;
    }
    const size_t parenthesis = line.find('(');
    if (line.empty() || !std::isalpha(static_cast<unsigned char>(line[0])) ||
        parenthesis == line.npos || line.starts_with("inline"))
      continue;
    const size_t space = line.rfind(' ', parenthesis);
    names.insert(line.substr(space + 1, parenthesis - space - 1));
  }
  return names;
}

TEST_F(Install, TheLibraryShowsAllOfThePublicApiAndNothingElse) {
  const auto symbols = shell("nm -D -C --defined-only " + library_folder() + "/libnanovllm.so");
  ASSERT_EQ(symbols.exit_code, 0) << symbols.errors;
  std::set<std::string> names;
  for (const auto& header : fs::directory_iterator(prefix() / "include" / "nanovllm"))
    names.merge(declared_names(file_text(header.path())));
  EXPECT_GE(names.size(), 6u);  // LLM, Tokenizer, IncrementalDetokenizer, inspect, ...
  for (const std::string& name : names)
    EXPECT_NE(symbols.output.find(" nanovllm::" + name + "("), std::string::npos)
        << name << " is not in api/exports.map";
  for (const char* hidden :
       {"nanovllm::Backend", "nanovllm::Scheduler", "nanovllm::Tensor::", " fmt::"})
    EXPECT_EQ(symbols.output.find(hidden), std::string::npos) << hidden;
}

}  // namespace
}  // namespace nanovllm
