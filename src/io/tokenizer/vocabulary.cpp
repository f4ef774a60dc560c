#include "io/tokenizer/vocabulary.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "core/check.h"

namespace nanovllm {

Vocabulary::Vocabulary(size_t expected_tokens)
    : slots_(std::bit_ceil(std::max<size_t>(16, 2 * expected_tokens))) {
  entries_.reserve(expected_tokens);
}

uint64_t Vocabulary::hash_of(std::string_view text) {
  constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;
  uint64_t hash = text.size() * kFactor;
  const auto mix = [&hash](uint64_t word) {
    hash = (hash ^ word) * kFactor;
    hash ^= hash >> 29;
  };
  while (text.size() >= sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, text.data(), sizeof word);
    mix(word);
    text.remove_prefix(sizeof word);
  }
  uint64_t tail = 0;
  for (const char c : text) tail = tail << 8 | static_cast<unsigned char>(c);
  mix(tail);
  return hash ^ hash >> 32;
}

size_t Vocabulary::slot_of(std::string_view text, uint64_t hash) const {
  const size_t mask = slots_.size() - 1;
  const auto tag = static_cast<uint32_t>(hash >> 32);
  size_t at = hash & mask;
  while (slots_[at].entry != 0 &&
         (slots_[at].tag != tag || text_of(entries_[slots_[at].entry - 1]) != text))
    at = (at + 1) & mask;
  return at;
}

void Vocabulary::grow() {
  slots_.assign(slots_.size() * 2, Slot{});
  const size_t mask = slots_.size() - 1;
  for (uint32_t i = 0; i < entries_.size(); ++i) {
    size_t at = entries_[i].hash & mask;
    while (slots_[at].entry != 0) at = (at + 1) & mask;
    slots_[at] = {static_cast<uint32_t>(entries_[i].hash >> 32), i + 1};
  }
}

bool Vocabulary::add(std::string_view text, int32_t id) {
  check(id >= 0 && id <= kMaxId, "token id {} is out of range", id);
  check(bytes_.size() + text.size() <= std::numeric_limits<uint32_t>::max(),
        "the vocabulary has more than 4 GiB of text");
  if (2 * (entries_.size() + 1) > slots_.size()) grow();
  const uint64_t hash = hash_of(text);
  const size_t at = slot_of(text, hash);
  if (slots_[at].entry != 0) return false;
  entries_.push_back(
      {hash, static_cast<uint32_t>(bytes_.size()), static_cast<uint32_t>(text.size()), id});
  bytes_ += text;
  const auto entry = static_cast<uint32_t>(entries_.size());
  slots_[at] = {static_cast<uint32_t>(hash >> 32), entry};
  const auto index = static_cast<size_t>(id);
  if (index >= entry_of_id_.size()) entry_of_id_.resize(index + 1);
  if (entry_of_id_[index] == 0) entry_of_id_[index] = entry;
  longest_text_ = std::max(longest_text_, text.size());
  return true;
}

int32_t Vocabulary::find(std::string_view text) const {
  if (text.size() > longest_text_) return kNone;
  const Slot slot = slots_[slot_of(text, hash_of(text))];
  return slot.entry == 0 ? kNone : entries_[slot.entry - 1].id;
}

bool Vocabulary::contains(int32_t id) const {
  return id >= 0 && id < size() && entry_of_id_[static_cast<size_t>(id)] != 0;
}

std::string_view Vocabulary::text(int32_t id) const {
  if (!contains(id)) return {};
  return text_of(entries_[entry_of_id_[static_cast<size_t>(id)] - 1]);
}

}  // namespace nanovllm
