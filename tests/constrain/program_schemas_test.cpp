// Schemas as real programs write them (make_program_schemas.py drew them, jsonschema judged the
// instances).
#include <fstream>

#include <nlohmann/json.hpp>

#include "constrain/instances.h"
#include "constrain/rig.h"

namespace nanovllm {
namespace {

TEST(ProgramSchemas, EveryValidInstanceIsTakenAndNoInvalidOne) {
  GrammarRig rig;
  if (!rig.has_module()) GTEST_SKIP() << "without the grammar module";
  std::ifstream in(std::string(NANOVLLM_SOURCE_DIR) + "/tests/data/schemas/programs.jsonl");
  int count = 0, compiled = 0, late = 0, instances = 0;
  for (std::string line; std::getline(in, line); ++count) {
    // Each test run takes a share of them: all take minutes.
    if (count % 25 != 0 && std::getenv("NANOVLLM_ALL_SCHEMAS") == nullptr) continue;
    const Json entry = Json::parse(line);
    const auto grammar = rig.compile_in_time(schema(entry["schema"].dump()));
    ++(grammar ? compiled : late);
    if (!grammar) continue;
    instances += static_cast<int>(entry["valid"].size() + entry["invalid"].size());
    for (const Json& value : entry["valid"])
      EXPECT_TRUE(takes_in_some_order(rig, *grammar, value))
          << "line " << count + 1 << ": valid, refused: " << value.dump();
    for (const Json& value : entry["invalid"])
      EXPECT_FALSE(takes_in_some_order(rig, *grammar, value))
          << "line " << count + 1 << ": invalid, accepted: " << value.dump();
  }
  std::printf("%d schemas compiled, %d not in time; %d instances\n", compiled, late, instances);
  EXPECT_GT(compiled, 0);
  EXPECT_EQ(count, 500);
}

}  // namespace
}  // namespace nanovllm
