// The main function of nanovllm-grammar-compiler, the helper process. It reads a vocabulary, then
// sources of grammars, and answers with their compiled forms; it ends with its standard input.
#include <cerrno>
#include <new>
#include <string>
#include <thread>

#include <sys/resource.h>
#include <unistd.h>
#include <xgrammar/xgrammar.h>

#include "constrain/limits.h"
#include "constrain/module/messages.h"
#include "constrain/module/tokenizer_info.h"

namespace nanovllm {
namespace {

// XGrammar gives a third of it to masks of rules; the rest is for whole grammars, and stays unused.
constexpr int64_t kKeptBytes = int64_t{24} << 20;

bool read_exactly(char* to, size_t size) {
  for (size_t got = 0; got < size;) {
    const ssize_t part = ::read(STDIN_FILENO, to + got, size - got);
    if (part == 0 || (part < 0 && errno != EINTR)) return false;
    if (part > 0) got += static_cast<size_t>(part);
  }
  return true;
}

bool receive(std::string& message) {
  uint64_t size = 0;
  if (!read_exactly(reinterpret_cast<char*>(&size), sizeof size)) return false;
  message.resize(size);
  return read_exactly(message.data(), size);
}

bool send(const std::string& message) {
  MessageWriter out;
  out.add(message);
  const std::string& bytes = out.bytes();
  for (size_t sent = 0; sent < bytes.size();) {
    const ssize_t part = ::write(STDOUT_FILENO, bytes.data() + sent, bytes.size() - sent);
    if (part < 0 && errno != EINTR) return false;
    if (part > 0) sent += static_cast<size_t>(part);
  }
  return true;
}

std::string reply(CompileStatus status, const std::string& text) {
  MessageWriter out;
  out.add(static_cast<uint64_t>(status));
  out.add(text);
  return out.bytes();
}

xgrammar::Grammar parse(const GrammarSource& source, const xgrammar::TokenizerInfo& info) {
  if (source.kind == GrammarSource::Kind::ebnf) return xgrammar::Grammar::FromEBNF(source.text);
  auto made = xgrammar::Grammar::FromStructuralTag(source.text, info);
  if (auto* grammar = std::get_if<xgrammar::Grammar>(&made)) return *grammar;
  std::string reason;
  std::visit([&](const auto& error) { reason = error.what(); },
             std::get<xgrammar::StructuralTagError>(made));
  throw std::runtime_error(reason);
}

std::string compile(const std::string& message, const xgrammar::TokenizerInfo& info,
                    xgrammar::GrammarCompiler& compiler) {
  try {
    MessageReader in(message);
    GrammarSource source;
    source.kind = static_cast<GrammarSource::Kind>(in.number());
    source.after_reasoning = in.number() != 0;
    source.text = in.text();
    xgrammar::Grammar grammar = parse(source, info);
    if (source.after_reasoning)
      grammar = xgrammar::Grammar::Concat(
          {xgrammar::Grammar::FromEBNF("root ::= \"\" | \"\\n\" | \"\\n\\n\""), grammar});
    return reply(CompileStatus::done, compiler.CompileGrammar(grammar).SerializeJSON());
  } catch (const std::bad_alloc&) {
    return reply(CompileStatus::out_of_memory, "");
  } catch (const std::exception& error) {
    return reply(CompileStatus::refused, error.what());
  }
}

void limit_resources() {
  const rlimit none{0, 0};
  (void)::setrlimit(RLIMIT_CORE, &none);
#ifndef __SANITIZE_ADDRESS__  // whose shadow memory is larger than any limit
  const rlimit memory{kMaxCompileBytes + kKeptBytes, kMaxCompileBytes + kKeptBytes};
  (void)::setrlimit(RLIMIT_AS, &memory);
#endif
}

int run() {
  limit_resources();
  std::string message;
  if (!receive(message)) return 0;
  const TokenTable vocabulary = read_token_table(message);
  const xgrammar::TokenizerInfo info = tokenizer_info(vocabulary);
  const unsigned threads = std::min(std::max(std::thread::hardware_concurrency(), 1U), 4U);
  xgrammar::GrammarCompiler compiler(info, static_cast<int>(threads), true, kKeptBytes);
  (void)compiler.CompileGrammar(xgrammar::Grammar::FromEBNF(vocabulary.common_rules));
  xgrammar::StopKeepingMasks();
  if (!send("")) return 0;
  while (receive(message))
    if (!send(compile(message, info, compiler))) break;
  return 0;
}

}  // namespace
}  // namespace nanovllm

extern "C" __attribute__((visibility("default"))) int nanovllm_compile_grammars() {
  try {
    return nanovllm::run();
  } catch (...) {
    return 1;
  }
}
