// The sampling parameters that are numbers within limits, in one table: the engine's check, the
// JSON form of a request and the program's options all go through it.
#pragma once

#include <cmath>

#include "nanovllm/params.h"

#include "core/limits.h"

namespace nanovllm {

struct NumberField {
  const char* name;  // in JSON; options have dashes
  double SamplingParams::*value;
  double low, high;
  bool above_low;    // low itself is not allowed
  const char* rule;  // "must be ..."
  const char* help;  // of the option, with the default

  bool allows(double number) const {
    return std::isfinite(number) && number <= high && (above_low ? number > low : number >= low);
  }
};

inline constexpr NumberField kNumberFields[] = {
    {"temperature", &SamplingParams::temperature, 0, kMaxTemperature, false, "from 0 to 10000",
     "0 is greedy (1)"},
    {"top_p", &SamplingParams::top_p, 0, 1, true, "in (0, 1]",
     "likeliest tokens that reach this probability (1)"},
    {"min_p", &SamplingParams::min_p, 0, 1, false, "in [0, 1]",
     "tokens at least this many times as likely as the likeliest (0)"},
    {"presence_penalty", &SamplingParams::presence_penalty, -kMaxPenalty, kMaxPenalty, false,
     "from -2 to 2", "off the logits of tokens that the answer has (0)"},
    {"frequency_penalty", &SamplingParams::frequency_penalty, -kMaxPenalty, kMaxPenalty, false,
     "from -2 to 2", "the same for each time that it has them (0)"},
    {"repetition_penalty", &SamplingParams::repetition_penalty, 1 / kMaxRepetitionPenalty,
     kMaxRepetitionPenalty, false, "from 0.0001 to 10000",
     "above 1: tokens of prompt and answer become less likely (1)"},
};

}  // namespace nanovllm
