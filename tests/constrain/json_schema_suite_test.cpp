// The JSON-Schema-Test-Suite, draft 2020-12 (scripts/fetch-schema-suite.sh): of each schema that is
// accepted every valid instance is accepted token by token and every invalid one refused.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include <nlohmann/json.hpp>

#include "nanovllm/error.h"

#include "constrain/instances.h"
#include "constrain/rig.h"
#include "io/json.h"

namespace nanovllm {
namespace {

namespace fs = std::filesystem;

struct Tally {
  int schemas = 0, accepted = 0, instances = 0, excluded = 0;
  std::vector<std::string> wrong{};
  std::map<std::string, std::vector<std::string>> refused{};  // by reason
};

std::string name_of(const fs::path& file, const Json& group) {
  return file.stem().string() + ": " + group["description"].get<std::string>();
}

void run_group(GrammarRig& rig, const fs::path& file, const Json& group, Tally& tally) {
  ++tally.schemas;
  std::shared_ptr<const Grammar> grammar;
  bool never = false;
  try {
    grammar = rig.compile(schema(group["schema"].dump()));
  } catch (const Error& error) {
    // A schema that nothing satisfies is refused too, and rightly.
    never = std::string(error.what()).find("no text can satisfy") != std::string::npos;
    tally.refused[error.what()].push_back(name_of(file, group));
    if (!never) return;
  }
  if (!never) ++tally.accepted;
  for (const Json& test : group["tests"]) {
    if (has_whole_float(test["data"])) {
      ++tally.excluded;
      continue;
    }
    ++tally.instances;
    const bool valid = test["valid"].get<bool>();
    const bool takes = !never && takes_in_some_order(rig, *grammar, test["data"]);
    if (takes != valid)
      tally.wrong.push_back(name_of(file, group) + " / " + test["description"].get<std::string>() +
                            (valid ? ": valid, refused: " : ": invalid, accepted: ") +
                            test["data"].dump());
  }
}

TEST(JsonSchemaSuite, NoInvalidInstanceIsAcceptedAndNoValidOneRefused) {
  const fs::path folder = fs::path(NANOVLLM_JSON_SCHEMA_SUITE) / "tests/draft2020-12";
  if (!fs::exists(folder)) GTEST_SKIP() << "scripts/fetch-schema-suite.sh was not run";
  GrammarRig rig;
  if (!rig.has_module()) GTEST_SKIP() << "without the grammar module";
  Tally tally;
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().extension() == ".json" && entry.path().stem() != "format")
      files.push_back(entry.path());
  std::ranges::sort(files);
  for (const fs::path& file : files)
    for (const Json& group : read_json_file(file)) run_group(rig, file, group, tally);
  for (const std::string& wrong : tally.wrong) ADD_FAILURE() << wrong;
  std::string report;
  for (const auto& [reason, names] : tally.refused) {
    report += reason + "\n";
    for (const std::string& name : names) report += "    " + name + "\n";
  }
  if (const char* out = std::getenv("NANOVLLM_SUITE_REPORT")) std::ofstream(out) << report;
  std::printf("%d schemas, %d accepted (%d %%); %d instances, %d with whole floats left out\n",
              tally.schemas, tally.accepted, 100 * tally.accepted / tally.schemas, tally.instances,
              tally.excluded);
  EXPECT_GE(tally.accepted * 100, tally.schemas * 35);
  EXPECT_GT(tally.schemas, 300);
}

}  // namespace
}  // namespace nanovllm
