#include "io/tokenizer/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>

#include "core/check.h"

namespace nanovllm {
namespace {

constexpr uint32_t kNoRank = std::numeric_limits<uint32_t>::max();
constexpr int32_t kEnd = -1;
constexpr char32_t kIndexedChars = 0x10000;
/// Up to here a scan for the best merge is faster than a heap.
constexpr size_t kShortSegment = 48;

}  // namespace

struct Bpe::Symbol {
  int32_t id;
  uint32_t rank = kNoRank;  // of merging with the next symbol
  int32_t merged = 0;       // what that merge gives
  int32_t previous = kEnd;  // merge_long only
  int32_t next = kEnd;
};

Bpe::Scratch::Scratch() = default;
Bpe::Scratch::~Scratch() = default;
Bpe::~Bpe() = default;

Bpe::PairTable::PairTable(size_t expected)
    : entries_(std::bit_ceil(std::max<size_t>(16, 2 * expected))),
      shift_(64 - std::countr_zero(entries_.size())) {}

size_t Bpe::PairTable::slot_of(uint64_t pair) const {
  const size_t mask = entries_.size() - 1;
  size_t at = (pair * 0x9E3779B97F4A7C15) >> shift_;
  while (entries_[at].pair != pair && entries_[at].pair != kFree) at = (at + 1) & mask;
  return at;
}

void Bpe::PairTable::set(int32_t left, int32_t right, uint32_t rank, int32_t merged) {
  if (2 * (used_ + 1) > entries_.size()) {
    PairTable larger(entries_.size());
    for (const Entry& entry : entries_)
      if (entry.pair != kFree) larger.entries_[larger.slot_of(entry.pair)] = entry;
    larger.used_ = used_;
    *this = std::move(larger);
  }
  const uint64_t pair = uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  Entry& entry = entries_[slot_of(pair)];
  used_ += entry.pair == kFree;
  entry = {pair, rank, merged};
}

const Bpe::PairTable::Entry* Bpe::PairTable::find(int32_t left, int32_t right) const {
  const uint64_t pair = uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  const Entry& entry = entries_[slot_of(pair)];
  return entry.pair == kFree ? nullptr : &entry;
}

Bpe::Bpe(const Vocabulary& vocabulary, const std::vector<Merge>& merges, const BpeOptions& options,
         const ByteAlphabet& alphabet, const std::string& where)
    : vocabulary_(vocabulary),
      alphabet_(alphabet),
      options_(options),
      pairs_(merges.size()),
      whole_(std::make_unique<std::atomic<Whole>[]>(static_cast<size_t>(vocabulary.size()))) {
  if (options_.unk_token) {
    unk_id_ = vocabulary_.find(*options_.unk_token);
    check(unk_id_ != Vocabulary::kNone, ErrorKind::model,
          "{}.unk_token: \"{}\" is not in the vocabulary", where, *options_.unk_token);
  }
  for (unsigned byte = 0; byte < 256; ++byte)
    fallback_ids_[byte] = vocabulary_.find(fmt::format("<0x{:02X}>", byte));
  add_merges(merges, where);
  options_.byte_level ? index_bytes() : index_text();
}

void Bpe::add_merges(const std::vector<Merge>& merges, const std::string& where) {
  std::string merged;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const auto [left, right] = merges[rank];
    check(!left.empty() && !right.empty(), ErrorKind::model, "{}.merges[{}]: a part is empty",
          where, rank);
    merged.assign(left).append(right);
    const int32_t left_id = vocabulary_.find(left);
    const int32_t right_id = vocabulary_.find(right);
    const int32_t merged_id = vocabulary_.find(merged);
    for (const auto& [id, text] : {std::pair{left_id, left}, std::pair{right_id, right},
                                   std::pair{merged_id, std::string_view(merged)}})
      check(id != Vocabulary::kNone, ErrorKind::model,
            "{}.merges[{}]: \"{}\" is not in the vocabulary", where, rank, text);
    pairs_.set(left_id, right_id, static_cast<uint32_t>(rank), merged_id);
    if (!options_.byte_level) index_neighbours(merged);
  }
}

void Bpe::index_bytes() {
  byte_tokens_ = Vocabulary(static_cast<size_t>(vocabulary_.size()));
  for (int32_t id = 0; id < vocabulary_.size(); ++id)
    if (const auto bytes = alphabet_.bytes_of(vocabulary_.text(id)); bytes && !bytes->empty())
      byte_tokens_.add(*bytes, id);
  for (unsigned byte = 0; byte < 256; ++byte) {
    const char text = static_cast<char>(byte);
    byte_ids_[byte] = byte_tokens_.find({&text, 1});
  }
}

void Bpe::index_text() {
  char_ids_.assign(kIndexedChars, Vocabulary::kNone);
  for (int32_t id = 0; id < vocabulary_.size(); ++id) {
    const std::string_view text = vocabulary_.text(id);
    if (text.empty()) continue;
    const DecodedChar c = decode_utf8(text.data());
    if (c.length == text.size() && c.value < kIndexedChars) char_ids_[c.value] = id;
  }
}

void Bpe::index_neighbours(std::string_view text) {
  DecodedChar left = decode_utf8(text.data());
  for (size_t at = left.length; at < text.size();) {
    const DecodedChar right = decode_utf8(text.data() + at);
    neighbours_.set(static_cast<int32_t>(left.value), static_cast<int32_t>(right.value), 0, 0);
    at += right.length;
    left = right;
  }
}

int32_t Bpe::char_id(std::string_view text, size_t at, const DecodedChar& c) const {
  if (c.value < char_ids_.size()) return char_ids_[c.value];
  return vocabulary_.find(text.substr(at, c.length));
}

void Bpe::encode(std::string_view piece, std::vector<int32_t>& ids, Scratch& scratch) const {
  if (piece.empty()) return;
  if (options_.ignore_merges) {
    const int32_t id = (options_.byte_level ? byte_tokens_ : vocabulary_).find(piece);
    if (id != Vocabulary::kNone) return ids.push_back(id);
  }
  for (size_t at = 0; at < piece.size();) {
    const size_t end = options_.byte_level ? piece.size() : segment_end(piece, at);
    encode_segment(piece.substr(at, end - at), ids, scratch);
    at = end;
  }
}

size_t Bpe::segment_end(std::string_view piece, size_t begin) const {
  DecodedChar left = decode_utf8(piece.data() + begin);
  bool left_known = char_id(piece, begin, left) != Vocabulary::kNone;
  for (size_t at = begin + left.length; at < piece.size();) {
    const DecodedChar right = decode_utf8(piece.data() + at);
    const bool right_known = char_id(piece, at, right) != Vocabulary::kNone;
    if (left_known && right_known &&
        !neighbours_.find(static_cast<int32_t>(left.value), static_cast<int32_t>(right.value)))
      return at;
    at += right.length;
    left = right;
    left_known = right_known;
  }
  return piece.size();
}

void Bpe::encode_segment(std::string_view segment, std::vector<int32_t>& ids,
                         Scratch& scratch) const {
  const int32_t whole_id = (options_.byte_level ? byte_tokens_ : vocabulary_).find(segment);
  std::atomic<Whole>* whole =
      whole_id == Vocabulary::kNone ? nullptr : &whole_[static_cast<size_t>(whole_id)];
  const Whole known = whole ? whole->load(std::memory_order_relaxed) : Whole::no;
  if (known == Whole::yes) return ids.push_back(whole_id);

  start_symbols(segment, scratch);
  merge(scratch);
  const auto& symbols = scratch.symbols_;
  if (known == Whole::unknown) {
    const bool yes = symbols.size() == 1 && symbols.front().id == whole_id;
    whole->store(yes ? Whole::yes : Whole::no, std::memory_order_relaxed);
  }
  for (const Symbol& symbol : symbols) ids.push_back(symbol.id);
}

void Bpe::start_symbols(std::string_view segment, Scratch& scratch) const {
  auto& symbols = scratch.symbols_;
  symbols.clear();
  if (!options_.byte_level) return start_text_symbols(segment, scratch);
  for (const char c : segment) {
    const int32_t id = byte_ids_[static_cast<unsigned char>(c)];
    // An incomplete byte alphabet: its characters are treated as text is.
    if (id == Vocabulary::kNone) {
      symbols.clear();
      return start_text_symbols(alphabet_.spell(segment), scratch);
    }
    symbols.push_back({id});
  }
}

void Bpe::start_text_symbols(std::string_view segment, Scratch& scratch) const {
  auto& symbols = scratch.symbols_;
  bool unknown = false;  // an unk that waits for a neighbour to be fused with
  const auto flush_unknown = [&] {
    if (unknown) symbols.push_back({unk_id_});
    unknown = false;
  };
  for (size_t at = 0; at < segment.size();) {
    const DecodedChar c = decode_utf8(segment.data() + at);
    const std::string_view bytes = segment.substr(at, c.length);
    at += c.length;
    if (const int32_t id = char_id(segment, at - c.length, c); id != Vocabulary::kNone) {
      flush_unknown();
      symbols.push_back({id});
      continue;
    }
    const auto fallback = [this](char byte) {
      return fallback_ids_[static_cast<unsigned char>(byte)];
    };
    if (options_.byte_fallback && std::all_of(bytes.begin(), bytes.end(), [&](char byte) {
          return fallback(byte) != Vocabulary::kNone;
        })) {
      // As in the reference library, an unk that waits is not put out before these.
      for (const char byte : bytes) symbols.push_back({fallback(byte)});
    } else if (unk_id_ != Vocabulary::kNone) {
      if (!options_.fuse_unk) flush_unknown();
      unknown = true;
    }
  }
  flush_unknown();
}

void Bpe::find_merge(Symbol& left, int32_t right) const {
  const PairTable::Entry* entry = pairs_.find(left.id, right);
  left.rank = entry ? entry->rank : kNoRank;
  left.merged = entry ? entry->merged : 0;
}

void Bpe::merge(Scratch& scratch) const {
  auto& symbols = scratch.symbols_;
  for (size_t i = 0; i + 1 < symbols.size(); ++i) find_merge(symbols[i], symbols[i + 1].id);
  symbols.size() <= kShortSegment ? merge_short(scratch) : merge_long(scratch);
}

void Bpe::merge_short(Scratch& scratch) const {
  auto& symbols = scratch.symbols_;
  while (symbols.size() > 1) {
    const auto best =
        std::min_element(symbols.begin(), symbols.end(),
                         [](const Symbol& a, const Symbol& b) { return a.rank < b.rank; });
    if (best->rank == kNoRank) break;
    best->id = best->merged;
    const auto next = symbols.erase(best + 1);
    if (next != symbols.end()) {
      find_merge(*best, next->id);
    } else {
      best->rank = kNoRank;
    }
    if (best != symbols.begin()) find_merge(*(best - 1), best->id);
  }
}

void Bpe::merge_long(Scratch& scratch) const {
  auto& symbols = scratch.symbols_;
  auto& heap = scratch.heap_;
  const auto key_of = [&symbols](int32_t at) {
    return uint64_t{symbols[static_cast<size_t>(at)].rank} << 32 | static_cast<uint32_t>(at);
  };
  heap.clear();
  const auto count = static_cast<int32_t>(symbols.size());
  for (int32_t i = 0; i < count; ++i) {
    Symbol& symbol = symbols[static_cast<size_t>(i)];
    symbol.previous = i - 1;
    symbol.next = i + 1 < count ? i + 1 : kEnd;
    if (symbol.rank != kNoRank) heap.push_back({key_of(i)});
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>{});
  const auto update = [&](int32_t at) {
    Symbol& symbol = symbols[static_cast<size_t>(at)];
    if (symbol.next == kEnd) {
      symbol.rank = kNoRank;
      return;
    }
    find_merge(symbol, symbols[static_cast<size_t>(symbol.next)].id);
    if (symbol.rank == kNoRank) return;
    heap.push_back({key_of(at)});
    std::push_heap(heap.begin(), heap.end(), std::greater<>{});
  };
  while (!heap.empty()) {
    const auto at = static_cast<int32_t>(heap.front().key & 0xFFFFFFFF);
    const auto rank = static_cast<uint32_t>(heap.front().key >> 32);
    std::pop_heap(heap.begin(), heap.end(), std::greater<>{});
    heap.pop_back();
    Symbol& symbol = symbols[static_cast<size_t>(at)];
    if (symbol.rank != rank) continue;  // another merge came first
    symbol.id = symbol.merged;
    Symbol& consumed = symbols[static_cast<size_t>(symbol.next)];
    consumed.rank = kNoRank;
    consumed.id = kEnd;
    symbol.next = consumed.next;
    if (symbol.next != kEnd) symbols[static_cast<size_t>(symbol.next)].previous = at;
    update(at);
    if (symbol.previous != kEnd) update(symbol.previous);
  }
  std::erase_if(symbols, [](const Symbol& symbol) { return symbol.id == kEnd; });
}

}  // namespace nanovllm
