// BlockEvent: what entered or left the prefix cache, for those who send requests to where their
// prefix is.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace nanovllm {

struct BlockEvent {
  enum class Kind : uint8_t { stored, removed, cleared };
  Kind kind = Kind::cleared;
  /// Of the blocks. A hash stands for all tokens up to the block's end, and for the salt.
  std::vector<uint64_t> hashes{};
  // Of stored blocks, each of which follows the one before it:
  std::optional<uint64_t> parent{};  ///< of the first one; none: it begins a sequence
  std::vector<int32_t> tokens{};
};

}  // namespace nanovllm
