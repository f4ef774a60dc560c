// Additions of scripts/build-grammar.sh to XGrammar: without them its compilation, and the journey
// of compiled grammars from the helper process, would take most of a first request's time.
// XGrammar's own sources alone see them, behind the declaration of AdaptiveTokenMask.
#pragma once

#include <algorithm>
#include <atomic>
#include <bitset>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace xgrammar {

/// Whether the masks of a grammar's rules are kept for the rules of others. They are found by a
/// hash that a client could meet on purpose: only grammars of our own may leave any.
inline std::atomic<bool> keep_masks{true};

// Masks travel as one text: numbers of five bits a character, the lowest first, the sixth bit where
// more follow; lists of indices as their differences. JSON numbers take many times as long.

inline void PackNumber(std::string& text, uint32_t value) {
  for (bool more = true; more; value >>= 5) {
    more = value >= 32;
    const auto c = static_cast<char>('0' + (value & 31U) + (more ? 32 : 0));
    text += c >= '\\' ? static_cast<char>(c + 1) : c;
  }
}

/// 0 at the end of the text.
inline uint32_t UnpackNumber(const std::string& text, size_t& at) {
  uint32_t value = 0;
  for (int shift = 0; at < text.size() && shift < 35; shift += 5) {
    const char c = text[at++];
    const auto bits = static_cast<uint32_t>((c > '\\' ? c - 1 : c) - '0');
    value |= (bits & 31U) << shift;
    if (bits < 32) break;
  }
  return value;
}

inline picojson::value SerializeJSONValue(const AdaptiveTokenMask& mask) {
  std::string text;
  PackNumber(text, static_cast<uint32_t>(mask.store_type));
  for (const auto* indices :
       {&mask.accepted_indices, &mask.rejected_indices, &mask.uncertain_indices}) {
    PackNumber(text, static_cast<uint32_t>(indices->size()));
    uint32_t before = 0;
    for (const int32_t index : *indices) {
      PackNumber(text, static_cast<uint32_t>(index) - before);
      before = static_cast<uint32_t>(index);
    }
  }
  const int bits = mask.accepted_bitset.Size();
  PackNumber(text, static_cast<uint32_t>(bits));
  std::vector<uint32_t> words(static_cast<size_t>(DynamicBitset::GetBufferSize(bits)));
  DynamicBitset view(bits, words.data());
  if (bits > 0) view = mask.accepted_bitset;
  for (const uint32_t word : words) PackNumber(text, word);
  return picojson::value(std::move(text));
}

inline std::optional<SerializationError> DeserializeJSONValue(AdaptiveTokenMask* mask,
                                                              const picojson::value& value,
                                                              const std::string& type_name) {
  if (!value.is<std::string>()) return ConstructDeserializeError("Expect a text", type_name);
  const auto& text = value.get<std::string>();
  size_t at = 0;
  const auto next = [&] { return UnpackNumber(text, at); };
  mask->store_type = static_cast<AdaptiveTokenMask::StoreType>(next());
  for (auto* indices :
       {&mask->accepted_indices, &mask->rejected_indices, &mask->uncertain_indices}) {
    indices->resize(std::min<size_t>(next(), text.size() - at));
    uint32_t before = 0;
    for (int32_t& index : *indices) index = static_cast<int32_t>(before += next());
  }
  const auto bits = static_cast<int>(std::min<size_t>(next(), 32 * (text.size() - at)));
  std::vector<uint32_t> words(static_cast<size_t>(DynamicBitset::GetBufferSize(bits)));
  for (uint32_t& word : words) word = next();
  mask->accepted_bitset = DynamicBitset(bits);
  const DynamicBitset view(bits, words.data());
  if (bits > 0) mask->accepted_bitset = view;  // a copy: a view that is moved stays one
  return std::nullopt;
}

/// The bytes behind which a rule is again where it began, as the rule of a string's characters:
/// any text of these is the beginning of a text of the rule.
inline std::bitset<256> RepeatedBytes(const Grammar& grammar, int rule_id) {
  std::bitset<256> bytes;
  const auto& rule_fsm = grammar->per_rule_fsms[rule_id];
  if (!rule_fsm.has_value() || grammar->GetRule(rule_id).is_lazy) return bytes;
  const auto& fsm = rule_fsm->GetFsm();
  for (const auto& edge : fsm.GetFsm().GetEdges(fsm.GetStart())) {
    if (!edge.IsCharRange()) continue;
    bool repeats = edge.target == fsm.GetStart();
    for (const auto& next : fsm.GetFsm().GetEdges(edge.target))
      repeats |= next.IsRuleRef() && next.GetRefRuleId() == rule_id;
    if (!repeats) continue;
    for (int byte = edge.min; byte <= edge.max; ++byte) bytes.set(static_cast<size_t>(byte));
  }
  return bytes;
}

/// Where one byte leads from a state to a rule that repeats bytes: sets `first` to the bytes that
/// lead there, `rest` to those that may follow in any number, and returns true. A token of such
/// bytes is accepted without the parser.
inline bool LeadsToRepeatedBytes(const Grammar& grammar, int rule_id, int state,
                                 std::bitset<256>* first, std::bitset<256>* rest) {
  const auto& fsm = grammar->per_rule_fsms[rule_id]->GetFsm().GetFsm();
  first->reset();
  rest->reset();
  int followed = -1;
  for (const auto& edge : fsm.GetEdges(state)) {
    if (!edge.IsCharRange()) continue;
    for (const auto& next : fsm.GetEdges(edge.target)) {
      if (!next.IsRuleRef() || (followed >= 0 && next.GetRefRuleId() != followed)) continue;
      if (followed < 0) {
        *rest = RepeatedBytes(grammar, next.GetRefRuleId());
        if (rest->none()) continue;
        followed = next.GetRefRuleId();
      }
      for (int byte = edge.min; byte <= edge.max; ++byte) first->set(static_cast<size_t>(byte));
    }
  }
  return followed >= 0;
}

}  // namespace xgrammar
