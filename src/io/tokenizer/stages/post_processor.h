// Post-processors: the special tokens around an encoded text.
#pragma once

#include <cstdint>
#include <vector>

#include "io/tokenizer/entry.h"

namespace nanovllm {

class PostProcessor {
 public:
  PostProcessor() = default;
  /// Throws Error(model) for kinds that are not known, and for templates without the text.
  PostProcessor(const Entry& entry, int32_t vocab_size);

  const std::vector<int32_t>& before() const { return before_; }
  const std::vector<int32_t>& after() const { return after_; }

 private:
  void add_template(const Entry& entry, int32_t vocab_size);
  std::vector<int32_t> before_;
  std::vector<int32_t> after_;
};

}  // namespace nanovllm
