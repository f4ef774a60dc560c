// Sequences inside sequences of tokenizer.json, flattened.
#pragma once

#include <string_view>
#include <vector>

#include "io/tokenizer/entry.h"

namespace nanovllm {

inline constexpr size_t kMaxSteps = 256;  // a text goes through all of them

/// The entries of a chain of steps: `entry` itself, or the members of a "Sequence" under
/// `list_key`, at any depth (the JSON reader bounds it). Throws Error(model) for more than
/// kMaxSteps.
inline void flatten_sequence(const Entry& entry, std::string_view list_key,
                             std::vector<Entry>& steps) {
  if (entry.type() != "Sequence") {
    check(steps.size() < kMaxSteps, ErrorKind::model, "{}: a Sequence of more than {} steps",
          entry.place(), kMaxSteps);
    steps.push_back(entry);
    return;
  }
  for (const Entry& member : entry.required(list_key).elements())
    flatten_sequence(member, list_key, steps);
}

}  // namespace nanovllm
