// ForwardingBackend against the catalogue: an operation that it forgets would be done by the body
// of Backend, and the device's kernel would never run.
#include <fstream>
#include <regex>
#include <set>
#include <sstream>

#include <gtest/gtest.h>

namespace nanovllm {
namespace {

std::string text_of(const std::string& header) {
  std::stringstream text;
  text << std::ifstream(std::string(NANOVLLM_SOURCE_DIR) + "/src/ops/" + header).rdbuf();
  return std::regex_replace(text.str(), std::regex("//[^\n]*"), "");
}

/// The names that stand before a "(" in what `declaration` matches.
std::set<std::string> names(const std::string& text, const char* declaration) {
  std::set<std::string> found;
  const std::regex pattern(declaration);
  for (std::sregex_iterator i(text.begin(), text.end(), pattern), end; i != end; ++i)
    found.insert((*i)[1]);
  return found;
}

TEST(ForwardingBackend, HandsOnEveryOperationOfTheCatalogue) {
  std::string catalogue = text_of("backend.h");
  catalogue.erase(0, catalogue.find("class Backend {"));
  auto operations = names(catalogue, R"(virtual [^;{(]*?(\w+)\()");
  operations.erase("Backend");  // the destructor
  const auto forwarded = names(text_of("forwarding_backend.h"), R"((\w+)\([^;{]*\)[^;{]*override)");
  EXPECT_GT(operations.size(), 40u);
  for (const std::string& name : operations) EXPECT_TRUE(forwarded.contains(name)) << name;
}

}  // namespace
}  // namespace nanovllm
