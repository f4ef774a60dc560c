// XGrammar's view of a vocabulary.
#pragma once

#include <xgrammar/xgrammar.h>

#include "constrain/grammar_module.h"

namespace nanovllm {

inline xgrammar::TokenizerInfo tokenizer_info(const TokenTable& vocabulary) {
  return xgrammar::TokenizerInfo(vocabulary.texts, xgrammar::VocabType::RAW, std::nullopt,
                                 vocabulary.stop_ids);
}

}  // namespace nanovllm
