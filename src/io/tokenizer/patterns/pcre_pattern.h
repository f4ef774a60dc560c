// Regular expressions on PCRE2, for the patterns that ClassPattern does not know. Their \p{...}
// follow PCRE2's Unicode version.
#pragma once

#include "io/tokenizer/patterns/pattern.h"

namespace nanovllm {

class PcrePattern final : public Pattern {
 public:
  /// Takes the Oniguruma dialect of tokenizer.json, rewritten where PCRE2 means something else.
  /// Throws Error(model) with PCRE2's reason.
  PcrePattern(std::string_view regex, const std::string& where);
  ~PcrePattern() override;
  PcrePattern(const PcrePattern&) = delete;
  PcrePattern& operator=(const PcrePattern&) = delete;

  void find_all(std::string_view text, std::vector<Span>& matches,
                SearchBudget& budget) const override;

 private:
  struct Code;
  std::unique_ptr<const Code> code_;
};

}  // namespace nanovllm
