#include "constrain/grammar_compiler.h"

#include <dlfcn.h>
#include <nlohmann/json.hpp>

#include "constrain/ebnf_check.h"
#include "constrain/expr.h"
#include "constrain/json_rules.h"
#include "constrain/limits.h"
#include "constrain/reasoning.h"
#include "constrain/schema/schema_compiler.h"
#include "constrain/structural_tag.h"
#include "core/check.h"
#include "core/load_module.h"
#include "io/json.h"
#include "io/utf8.h"

namespace nanovllm {
namespace {

constexpr size_t kMaxCacheBytes = size_t{256} << 20;
// Has the rules that most schemas are made of: strings, numbers, lists, objects, other keys.
constexpr const char* kCommonSchema =
    R"({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "number"},
      "d": {"type": "array", "items": {"type": "string"}}, "e": true, "f": {"type": "integer", "minimum": 1, "maximum": 99}}, "required": ["a"]})";

GrammarSource made_of(Rules rules, std::string_view what) {
  return {.text = rules_to_ebnf(std::move(rules), what)};
}

Rules choices(const std::vector<std::string>& texts) {
  check(std::ssize(texts) <= kMaxEnumValues, ErrorKind::invalid_argument,
        "choice: has {} texts, the limit kMaxEnumValues is {}", texts.size(), kMaxEnumValues);
  Rules rules;
  std::vector<Expr> all;
  size_t bytes = 0;
  for (const std::string& choice : texts) {
    check(find_invalid_utf8(choice) == std::string::npos, ErrorKind::invalid_argument,
          "choice: {} is not valid UTF-8", quote(choice));
    bytes += choice.size();
    all.push_back(text(choice));
  }
  check(bytes <= kMaxStructureBytes, ErrorKind::invalid_argument,
        "choice: has {} bytes, the limit kMaxStructureBytes is {}", bytes, kMaxStructureBytes);
  rules.add(choice(std::move(all)));
  return rules;
}

int num_set(const StructuredOutputs& asked) {
  return !asked.json.empty() + asked.json_object + !asked.regex.empty() + !asked.choice.empty() +
         !asked.grammar.empty() + !asked.structural_tag.empty();
}

/// The key of a structure, as it was given: a second request is not read again.
std::string key_of(const StructuredOutputs& asked, bool after_reasoning) {
  std::string key = after_reasoning ? "1" : "0";
  if (asked.json_object) key += '{';
  for (const std::string* text : {&asked.json, &asked.regex, &asked.grammar, &asked.structural_tag})
    key += fmt::format("{} {}", text->size(), *text);
  for (const std::string& text : asked.choice) key += fmt::format("{} {}", text.size(), text);
  return key;
}

}  // namespace

GrammarSource grammar_source(const StructuredOutputs& asked) {
  check(num_set(asked) == 1, ErrorKind::invalid_argument,
        "structured_outputs: {} of json, json_object, regex, choice, grammar and structural_tag "
        "are given, must be one",
        num_set(asked));
  if (!asked.json.empty()) return {.text = schema_to_ebnf(asked.json)};
  if (!asked.choice.empty()) return made_of(choices(asked.choice), "choice");
  if (!asked.grammar.empty()) {
    check_ebnf(asked.grammar, "grammar");
    return {.text = asked.grammar};
  }
  if (!asked.structural_tag.empty())
    return {.kind = GrammarSource::Kind::structural_tag,
            .text = checked_structural_tag(asked.structural_tag)};
  if (!asked.regex.empty()) return {.text = regex_to_ebnf(asked.regex, "regex")};
  Rules rules;
  const int root = rules.reserve();
  JsonRules json(rules);
  rules.define(root, json.object());
  return made_of(std::move(rules), "json_object");
}

GrammarCompiler::GrammarCompiler(std::shared_ptr<const Tokenizer> tokenizer, int64_t vocab_size,
                                 std::vector<int32_t> eos)
    : tokenizer_(std::move(tokenizer)), vocab_size_(vocab_size), eos_(std::move(eos)) {}

GrammarCompiler::~GrammarCompiler() = default;

std::shared_ptr<const Grammar> GrammarCompiler::compile(const StructuredOutputs& asked) {
  if (asked.empty()) return nullptr;
  check(tokenizer_ != nullptr, ErrorKind::invalid_argument,
        "structured_outputs needs the tokenizer: drop skip_tokenizer_init");
  const bool has_structure = num_set(asked) > 0;
  if (asked.reasoning_end.empty()) return structure(asked, false);
  // An answer that opens no reasoning has no line feeds before its structure.
  const bool may_be_at_once = has_structure && !asked.reasoning_begin.empty();
  return after_reasoning(has_structure ? structure(asked, true) : nullptr,
                         may_be_at_once ? structure(asked, false) : nullptr, asked);
}

std::shared_ptr<const Grammar> GrammarCompiler::structure(const StructuredOutputs& asked,
                                                          bool after_reasoning) {
  const std::string key = key_of(asked, after_reasoning);
  if (auto grammar = cached(key)) return grammar;
  GrammarSource source = grammar_source(asked);
  source.after_reasoning = after_reasoning;
  const CompiledGrammar compiled = module().compile(source);
  keep(key, compiled);
  return compiled.grammar;
}

std::shared_ptr<const Grammar> GrammarCompiler::after_reasoning(
    std::shared_ptr<const Grammar> grammar, std::shared_ptr<const Grammar> at_once,
    const StructuredOutputs& asked) const {
  const std::vector<int32_t> begin = tokenizer_->encode(asked.reasoning_begin, false),
                             end = tokenizer_->encode(asked.reasoning_end, false);
  check(!end.empty(), ErrorKind::invalid_argument, "structured_outputs: reasoning_end is empty");
  return std::make_shared<ReasoningGrammar>(
      std::move(grammar),
      Reasoning{.begin = begin,
                .end = end,
                .token_budget = asked.thinking_token_budget,
                .eos = eos_,
                .vocab_size = std::min(tokenizer_->vocab_size(), vocab_size_)},
      std::move(at_once));
}

GrammarModule& GrammarCompiler::module() {
  const std::lock_guard lock(mutex_);
  if (module_) return *module_;
  std::string why;
  constexpr int kMode = RTLD_NOW | RTLD_LOCAL;
  if (load_module(kGrammarModuleFile, kMode, why)) {
    TokenTable vocabulary = token_table_of(*tokenizer_, vocab_size_, eos_);
    vocabulary.common_rules = schema_to_ebnf(kCommonSchema);
    module_ = make_in_module<OpenGrammarFunction>(kGrammarModuleFile, kGrammarModuleEntry, kMode,
                                                  why, vocabulary);
  }
  check(module_ != nullptr, ErrorKind::invalid_argument,
        "structured_outputs needs {}: {}; scripts/build-grammar.sh makes what it is built from",
        kGrammarModuleFile, why);
  return *module_;
}

std::shared_ptr<const Grammar> GrammarCompiler::cached(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto known = by_key_.find(key);
  if (known == by_key_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, known->second);
  return known->second->compiled.grammar;
}

void GrammarCompiler::keep(const std::string& key, const CompiledGrammar& compiled) {
  const std::lock_guard lock(mutex_);
  if (by_key_.count(key) > 0) return;
  const auto size = [](const Entry& entry) { return entry.key.size() + entry.compiled.bytes; };
  entries_.push_front({key, compiled});
  by_key_.emplace(entries_.front().key, entries_.begin());
  bytes_ += size(entries_.front());
  while (bytes_ > kMaxCacheBytes && entries_.size() > 1) {
    bytes_ -= size(entries_.back());
    by_key_.erase(entries_.back().key);
    entries_.pop_back();
  }
}

TokenTable token_table_of(const Tokenizer& tokenizer, int64_t vocab_size,
                          const std::vector<int32_t>& eos) {
  TokenTable vocabulary;
  vocabulary.stop_ids = eos;
  const int64_t known = std::min(tokenizer.vocab_size(), vocab_size);
  for (int64_t id = 0; id < known; ++id)
    vocabulary.texts.push_back(tokenizer.is_special(static_cast<int32_t>(id))
                                   ? std::string()
                                   : tokenizer.token_bytes(static_cast<int32_t>(id)));
  vocabulary.texts.resize(static_cast<size_t>(vocab_size));
  return vocabulary;
}

std::string grammar_library(std::string& why) {
  const auto* name = static_cast<const char* const*>(
      module_function(kGrammarModuleFile, kGrammarModuleLibrary, RTLD_NOW | RTLD_LOCAL, why));
  return name ? *name : "";
}

}  // namespace nanovllm
