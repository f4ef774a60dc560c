// nanovllm generate on the bundled model, for the tests of its texts and of its JSON lines.
#pragma once

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "e2e/process.h"

namespace nanovllm {

using Arguments = std::vector<std::string>;

inline Arguments generate(Arguments more) {
  Arguments arguments = {"generate", demo_model(), "--quiet"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

/// The answers of a file of requests, all of which have to be done.
inline std::vector<Json> answers(const std::string& requests, Arguments more = {}) {
  more.insert(more.begin(), {"--input", "-"});
  ProcessOptions options;
  options.input = requests;
  const ProcessResult result = nanovllm_program(generate(more), options);
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  return result.lines();
}

inline std::string chat_line(const std::string& text, const Json& params = Json::object(),
                             int id = 0) {
  Json line = {{"id", id}, {"sampling_params", params}};
  line["messages"] = Json::array({{{"role", "user"}, {"content", text}}});
  return line.dump() + "\n";
}

}  // namespace nanovllm
