// The cost of a token mask and of a compilation with a model's tokenizer: mask_timing
// TOKENIZER_DIRECTORY [VOCABULARY]. Prints microseconds: one table line a structure.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

#include "constrain/grammar_compiler.h"

namespace {

using namespace nanovllm;
using Clock = std::chrono::steady_clock;

double since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

struct Example {
  const char* name;
  StructuredOutputs asked;
  std::string text;
};

void measure(GrammarCompiler& compiler, const Tokenizer& tokenizer, int64_t vocabulary,
             const Example& example) {
  auto begin = Clock::now();
  const auto grammar = compiler.compile(example.asked);
  const double first = since(begin);
  begin = Clock::now();
  (void)compiler.compile(example.asked);
  const double cached = since(begin);
  const std::vector<int32_t> tokens = tokenizer.encode(example.text, false);
  std::vector<uint32_t> mask(static_cast<size_t>((vocabulary + 31) / 32));
  std::vector<double> times;
  for (int round = 0; round < 20; ++round) {
    const auto matcher = grammar->new_matcher();
    for (const int32_t token : tokens) {
      begin = Clock::now();
      matcher->fill_mask(mask);
      times.push_back(since(begin));
      if (!matcher->accept(token)) {
        std::printf("%s: the example is not taken\n", example.name);
        return;
      }
    }
  }
  std::ranges::sort(times);
  std::printf(
      "%-16s compile %9.0f  cached %6.1f  mask median %7.1f  90 %% %7.1f  most %8.1f  (%zu "
      "tokens)\n",
      example.name, first, cached, times[times.size() / 2], times[times.size() * 9 / 10],
      times.back(), tokens.size());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const auto tokenizer = std::make_shared<const Tokenizer>(argv[1]);
  const int64_t vocabulary = argc > 2 ? std::stoll(argv[2]) : 151936;
  GrammarCompiler compiler(tokenizer, vocabulary, {*tokenizer->eos_token_id()});
  auto begin = Clock::now();
  (void)compiler.compile({.choice = {"a", "b"}});
  std::printf("start of the module and its helper: %.0f\n", since(begin));
  const std::string tool =
      R"({"type": "object", "properties": {"location": {"type": "string", "description": "City and country"},
      "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
      "required": ["location", "unit", "days"], "additionalProperties": false})";
  const std::string nested =
      R"({"type": "object", "properties": {"id": {"type": "integer"}, "user": {"type": "object", "properties":
      {"name": {"type": "string"}, "email": {"type": "string", "format": "email"}, "tags": {"type": "array", "items": {"type": "string"}},
      "address": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "string", "pattern": "^\\d{5}$"}},
      "required": ["city", "zip"], "additionalProperties": false}}, "required": ["name", "tags", "address"], "additionalProperties": false},
      "items": {"type": "array", "items": {"type": "object", "properties": {"price": {"type": "number"}, "name": {"type": "string"}},
      "required": ["price", "name"], "additionalProperties": false}}}, "required": ["id", "user", "items"], "additionalProperties": false})";
  const std::string nested_text =
      R"({"id": 4711, "user": {"name": "Ada Lovelace", "tags": ["first", "programmer", "analytical engine"], "address": {"city": "London", "zip": "12345"}}, "items": [{"price": 12.5, "name": "A difference engine, second hand"}, {"price": 3, "name": "Punched cards"}]})";
  std::string open = nested;
  for (size_t at; (at = open.find(", \"additionalProperties\": false")) != std::string::npos;)
    open.erase(at, 31);
  for (const Example& example :
       {Example{"tool",
                {.json = tool},
                R"({"location": "Paris, France", "unit": "celsius", "days": 3})"},
        Example{"nested", {.json = nested}, nested_text},
        Example{"nested, open", {.json = open}, nested_text},
        Example{"any object", {.json_object = true}, nested_text},
        Example{"regex", {.regex = "[a-z]+@[a-z]+\\.(com|org)"}, "someone@example.com"}})
    measure(compiler, *tokenizer, vocabulary, example);
  return 0;
}
