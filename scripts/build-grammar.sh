#!/usr/bin/env bash
# scripts/build-grammar.sh: XGrammar's C++ core, which libnanovllm-grammar.so is made of, as a static library in build/xgrammar. Its source
# release comes from PyPI, with a pinned version and hash. What is there already is kept. Exit 1, with a note, where it cannot be had: all
# but structured output works without it.
set -euo pipefail
cd "$(dirname "$0")/.."

version=0.2.8
sha256=8305646fd2b319d6c3003f51a1665e54cbbe9cba1fb636bc41d0b46434ccbb80
url=https://files.pythonhosted.org/packages/03/0f/29f521535729be740779c2c98b630ef6607cf28be9b669895dd2b821ff63/xgrammar-$version.tar.gz
# Changes with anything that the library is made from: the release, this script, and the additions.
additions=$PWD/src/constrain/module/xgrammar_additions.h
recipe="$version $(cat scripts/build-grammar.sh "$additions" | sha256sum)"
prefix=$PWD/build/xgrammar
if [ "$(cat "$prefix/recipe" 2>/dev/null)" = "$recipe" ]; then
  echo "XGrammar $version is in build/xgrammar."
  exit 0
fi

skip() {
  echo "note: $1: built without structured output (JSON schemas, grammars). scripts/build-grammar.sh tries again." >&2
  exit 1
}
work=$PWD/build/xgrammar-work
rm -rf "$work" "$prefix"
mkdir -p "$work/build" "$prefix"
trap 'rm -rf "$work"' EXIT
archive=$work/xgrammar.tar.gz
if ! curl -fsSL --retry 2 --connect-timeout 10 --max-time 300 -o "$archive" "$url"; then skip "XGrammar's source release cannot be fetched from PyPI"; fi
echo "$sha256  $archive" | sha256sum --check --quiet || skip "XGrammar's source release has another hash than expected"
tar -xzf "$archive" -C "$work"
source=$work/xgrammar-$version

# The parser counts its work, so that a mask that would take too long ends in an exception (kMaxMaskSteps in src/constrain/module/matcher.cpp).
parser=$source/cpp/earley_parser
perl -0pi -e 's/(#include <queue>\n)/$1#include <stdexcept>\n/;
  s/(class EarleyParser \{\n)/$1 public:\n  int64_t steps_left_ = INT64_MAX;\n  void CountStep() {\n    if (--steps_left_ < 0) throw std::length_error("too many steps");\n  }\n\n private:\n/' "$parser.h"
perl -0pi -e 's/(    tmp_process_state_queue_\.pop\(\);\n)/$1    CountStep();\n/g; s/(  for \(const auto& (?:state : latest_states|\[ref_id, parent_state\] : parent_states_map)\) \{\n)/$1    CountStep();\n/g' "$parser.cc"
perl -0pi -e 's/(  void Rollback\(int num_tokens = 1\);\n)/$1  void SetMaxSteps(long long steps);\n/' "$source/include/xgrammar/matcher.h"
echo 'namespace xgrammar { void GrammarMatcher::SetMaxSteps(long long steps) { pimpl_->steps_left_ = steps; } }' >>"$source/cpp/grammar_matcher.cc"

# Masks that travel as packed words, are kept for our own rules alone, and are made faster for the rules of keys: see the additions.
cp "$additions" "$source/cpp/"
perl -0pi -e 's/XGRAMMAR_MEMBER_TABLE\(\s*AdaptiveTokenMask,.*?\);\n/}  \/\/ namespace xgrammar\n#include "xgrammar_additions.h"\nnamespace xgrammar {\n/s' "$source/cpp/compiled_grammar_impl.h"
perl -0pi -e 's/(bool RuleLevelCache::Impl::AddCache\([^{]*&& token_mask\n\) \{\n)/$1  if (!keep_masks) return false;\n/' "$source/cpp/grammar_functor.cc"
perl -0pi -e 's/(auto \[speculative_calculation, speculative_mask\] = GetSpeculativeCalculation\(\);\n)/$1  std::bitset<256> speculative_first = speculative_mask;\n  if (!speculative_calculation && !grammar_->GetRule(init_rule_id_).is_lazy)\n    speculative_calculation =\n        LeadsToRepeatedBytes(grammar_, init_rule_id_, initial_state_.element_id, &speculative_first, &speculative_mask);\n/;
  s/for \(char ch : token\) \{(.*?)!speculative_mask\[static_cast<uint8_t>\(ch\)\]/for (const char& ch : token) {$1!(&ch == token.data() ? speculative_first : speculative_mask)[static_cast<uint8_t>(ch)]/s' "$source/cpp/grammar_compiler.cc"
# Its cache of whole grammars compiles their printed forms, in which "\xdf" takes a letter behind it that is a digit too.
perl -0pi -e 's/(GrammarCompiler::Impl::CompileGrammar\(const Grammar& grammar\) \{\n  if \()!cache_enabled_/$1true/' "$source/cpp/grammar_compiler.cc"
# No class of characters has a surrogate, whose bytes are no UTF-8.
perl -0pi -e 's/  for \(const auto& range : elements\) \{\n    data\.push_back\(range\.lower\);\n    data\.push_back\(range\.upper\);\n  \}\n/  AddRanges(&data, elements, is_negative);\n/g;
  s/(int32_t GrammarBuilder::AddCharacterClass\()/static void AddRanges(\n    std::vector<int32_t>* data, const std::vector<GrammarBuilder::CharacterClassElement>& elements, bool is_negative\n) {\n  const auto add = [data](int32_t lower, int32_t upper) {\n    if (lower <= upper) data->insert(data->end(), {lower, upper});\n  };\n  for (const auto& range : elements) {\n    if (is_negative) {\n      add(range.lower, range.upper);\n    } else {\n      add(range.lower, std::min<int32_t>(range.upper, 0xD7FF));\n      add(std::max<int32_t>(range.lower, 0xE000), range.upper);\n    }\n  }\n  if (is_negative) add(0xD800, 0xDFFF);\n}\n\n$1/' "$source/cpp/grammar_builder.cc"
perl -0pi -e 's/(class GrammarCompiler \{)/void StopKeepingMasks();\n\n$1/' "$source/include/xgrammar/compiler.h"
echo 'namespace xgrammar { void StopKeepingMasks() { keep_masks = false; } }' >>"$source/cpp/grammar_compiler.cc"

for change in 'CountStep();:earley_parser.cc' 'steps_left_ =:earley_parser.h' 'SetMaxSteps:../include/xgrammar/matcher.h' \
  'xgrammar_additions.h:compiled_grammar_impl.h' '!keep_masks:grammar_functor.cc' 'LeadsToRepeatedBytes:grammar_compiler.cc' \
  '? speculative_first:grammar_compiler.cc' 'if (true):grammar_compiler.cc' 'AddRanges(&data:grammar_builder.cc' 'StopKeepingMasks:../include/xgrammar/compiler.h'; do
  grep -qF "${change%%:*}" "$source/cpp/${change#*:}" || skip "XGrammar's parser is not as expected"
done

# Without this file its CMake builds Python bindings. Its warnings are not ours, and link-time optimisation would bind the library to one compiler.
echo 'set(XGRAMMAR_BUILD_PYTHON_BINDINGS OFF)' >"$work/build/config.cmake"
launcher=()
if command -v ccache >/dev/null; then launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
cmake -S "$source" -B "$work/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX="$prefix" -DCMAKE_INSTALL_LIBDIR=lib \
  -DCMAKE_CXX_FLAGS="-w -DXGRAMMAR_LOG_CUSTOMIZE=1 -fno-lto -fvisibility=hidden -ffunction-sections -fdata-sections -ffile-prefix-map=$source=xgrammar" "${launcher[@]}" >"$work/log" 2>&1 &&
  cmake --build "$work/build" --target install >>"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; skip "XGrammar does not build"; }
{ cat "$source/LICENSE"; printf '\n---- NOTICE ----\n'; cat "$source/NOTICE"; printf '\n---- picojson ----\n'
  sed -n '1,/\*\//p' "$source/3rdparty/picojson/picojson.h"; } >"$prefix/LICENSE"
echo "$recipe" >"$prefix/recipe"
echo "XGrammar $version is in build/xgrammar."
