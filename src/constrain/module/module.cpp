// libnanovllm-grammar.so: token masks by XGrammar.
#include <filesystem>
#include <stdexcept>

#include <dlfcn.h>
#include <xgrammar/xgrammar.h>

#include "constrain/grammar_module.h"
#include "constrain/module/compiler_process.h"
#include "constrain/module/messages.h"
#include "constrain/module/tokenizer_info.h"
#include "core/check.h"
#include "core/load_module.h"

namespace nanovllm {
namespace {

// Of XGrammar's parser, for one mask or one token: some 100 ms. A count and no clock, so that the
// same request ends the same everywhere.
constexpr long long kMaxMaskSteps = 2'000'000;

class XGrammarMatcher final : public TokenMatcher {
 public:
  explicit XGrammarMatcher(const xgrammar::CompiledGrammar& grammar) : matcher_(grammar) {}

  void fill_mask(std::span<uint32_t> mask) override {
    auto words = static_cast<int64_t>(mask.size());
    DLTensor tensor{.data = mask.data(),
                    .device = {kDLCPU, 0},
                    .ndim = 1,
                    .dtype = xgrammar::GetBitmaskDLType(),
                    .shape = &words,
                    .strides = nullptr,
                    .byte_offset = 0};
    bounded([&] { return matcher_.FillNextTokenBitmask(&tensor); });
    uint32_t any = 0;
    for (const uint32_t word : mask) any |= word;
    check(any != 0, "no token of this model can continue the text");
  }

  bool accept(int32_t token) override {
    return bounded([&] { return matcher_.AcceptToken(token); });
  }

 private:
  template <class Work>
  bool bounded(Work work) {
    matcher_.SetMaxSteps(kMaxMaskSteps);
    try {
      return work();
    } catch (const std::length_error&) {
      fail(ErrorKind::invalid_argument,
           "the grammar is too ambiguous: a mask takes more than kMaxMaskSteps, {}", kMaxMaskSteps);
    }
  }

  xgrammar::GrammarMatcher matcher_;
};

class XGrammarGrammar final : public Grammar {
 public:
  explicit XGrammarGrammar(xgrammar::CompiledGrammar compiled) : compiled_(std::move(compiled)) {}
  std::unique_ptr<TokenMatcher> new_matcher() const override {
    return std::make_unique<XGrammarMatcher>(compiled_);
  }

 private:
  const xgrammar::CompiledGrammar compiled_;
};

class XGrammarModule final : public GrammarModule {
 public:
  XGrammarModule(const TokenTable& vocabulary, std::string program)
      : info_(tokenizer_info(vocabulary)), pool_(std::move(program), to_message(vocabulary)) {}

  CompiledGrammar compile(const GrammarSource& source) override {
    const std::string serialised = pool_.compile(source);
    auto read = xgrammar::CompiledGrammar::DeserializeJSON(serialised, info_);
    auto* compiled = std::get_if<xgrammar::CompiledGrammar>(&read);
    check(compiled != nullptr, "{} sent a grammar that cannot be read", kGrammarCompilerFile);
    const size_t bytes = compiled->MemorySizeBytes();
    return {std::make_shared<XGrammarGrammar>(std::move(*compiled)), bytes};
  }

 private:
  const xgrammar::TokenizerInfo info_;
  CompilerPool pool_;
};

/// The helper lies beside the module.
std::string compiler_program() {
  Dl_info info{};
  check(::dladdr(reinterpret_cast<const void*>(&compiler_program), &info) != 0 &&
            info.dli_fname != nullptr,
        "{} does not know where it lies", kGrammarModuleFile);
  const auto program =
      std::filesystem::canonical(info.dli_fname).parent_path() / kGrammarCompilerFile;
  check(std::filesystem::exists(program), "{} is not beside {}: install both", kGrammarCompilerFile,
        kGrammarModuleFile);
  return program;
}

}  // namespace
}  // namespace nanovllm

extern "C" __attribute__((visibility("default"))) const char* const nanovllm_grammar_library;
const char* const nanovllm_grammar_library = "XGrammar " NANOVLLM_XGRAMMAR_VERSION;

extern "C" __attribute__((visibility("default"))) nanovllm::GrammarModule* nanovllm_open_grammar(
    const char* version, const nanovllm::TokenTable& vocabulary, char* error, size_t error_size) {
  return nanovllm::made_by_module(nanovllm::kGrammarModuleFile, version, error, error_size, [&] {
    return std::make_unique<nanovllm::XGrammarModule>(vocabulary, nanovllm::compiler_program());
  });
}
