#include "io/tokenizer/token_bytes.h"

#include <string>
#include <vector>

#include "io/tokenizer/nesting.h"

namespace nanovllm {
namespace {

/// Bytes of text that one byte behind this normalizer can stand for; 0: any number.
size_t shrinks_by(const Entry& step, bool& drops_space) {
  const std::string& type = step.type();
  if (type == "Prepend") return 1;
  if (type == "Strip") {
    drops_space = true;
    return 1;
  }
  // Composing shrinks by 3.5 at most (to U+0390), compatibility forms by 4 (to a digit), lower case
  // by 3 (the Kelvin sign).
  for (const char* form : {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"})
    if (type == form) return 4;
  if (type != "Replace") return 0;
  const Json& pattern = *step.find("pattern");
  const size_t after = step.string("content").size();
  if (!pattern.contains("String") || after == 0) return 0;
  const size_t before = pattern["String"].get_ref<const std::string&>().size();
  return before <= after ? 1 : (before + after - 1) / after;
}

/// Whether a pre-tokenizer keeps every byte, or every one that is no white space.
bool keeps_text(const Entry& step, bool& drops_space) {
  const std::string& type = step.type();
  if (type == "WhitespaceSplit" || type == "Whitespace") drops_space = true;
  if (type == "Split" || type == "Punctuation")
    return !step.find("behavior") || step.string("behavior") != "Removed";
  for (const char* kind : {"ByteLevel", "Metaspace", "Digits", "WhitespaceSplit", "Whitespace"})
    if (type == kind) return true;
  return false;
}

}  // namespace

TokenBytes bytes_of_longest_token(const Entry& root, size_t longest) {
  TokenBytes bytes{.most = longest};
  std::vector<Entry> steps;
  if (const auto entry = root.member("normalizer")) flatten_sequence(*entry, "normalizers", steps);
  for (const Entry& step : steps) {
    const size_t factor = shrinks_by(step, bytes.drops_space);
    bytes.most = factor == 0 || bytes.most > (size_t{1} << 32) / factor ? 0 : bytes.most * factor;
  }
  steps.clear();
  if (const auto entry = root.member("pre_tokenizer"))
    flatten_sequence(*entry, "pretokenizers", steps);
  for (const Entry& step : steps)
    if (!keeps_text(step, bytes.drops_space)) bytes.most = 0;
  return bytes;
}

}  // namespace nanovllm
