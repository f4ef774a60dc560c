// Tokens by id and by text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nanovllm {

class Vocabulary {
 public:
  static constexpr int32_t kNone = -1;
  /// Ids are bounded so that a hostile file cannot make us allocate for ids nobody uses.
  static constexpr int64_t kMaxId = (int64_t{1} << 22) - 1;

  explicit Vocabulary(size_t expected_tokens = 0);

  /// False, and nothing is added, where the text is there already. An id may have several texts;
  /// text() gives the first.
  bool add(std::string_view text, int32_t id);

  /// kNone where there is no such token.
  int32_t find(std::string_view text) const;
  /// Empty where the id is unused.
  std::string_view text(int32_t id) const;
  bool contains(int32_t id) const;
  /// One more than the largest id.
  int32_t size() const { return static_cast<int32_t>(entry_of_id_.size()); }

 private:
  struct Entry {
    uint64_t hash;
    uint32_t offset;  // into bytes_
    uint32_t length;
    int32_t id;
  };
  static uint64_t hash_of(std::string_view text);
  std::string_view text_of(const Entry& entry) const {
    return std::string_view(bytes_).substr(entry.offset, entry.length);
  }
  /// The slot that holds `text`, or the free one where it belongs.
  size_t slot_of(std::string_view text, uint64_t hash) const;
  void grow();

  struct Slot {
    uint32_t tag;    // upper half of the hash: spares most looks at other tokens
    uint32_t entry;  // index + 1; 0 where free
  };
  std::string bytes_;
  std::vector<Entry> entries_;
  std::vector<Slot> slots_;            // a power of two, at most half full
  std::vector<uint32_t> entry_of_id_;  // index + 1; 0 where unused
  size_t longest_text_ = 0;
};

}  // namespace nanovllm
