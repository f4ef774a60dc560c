// Parts of a sum over the ranks that go from a product's registers straight to the GPUs that add
// them (sent_sums.cuh), without a kernel or memory of this GPU between.
//
// A place that waits for results holds kAbsent, and who has read it wipes it with that. No result
// looks so: rounding gives one NaN, which is another. So a piece of 8 or 16 bytes, written at once,
// says by itself that it is there. Places alternate between two halves by the number of the sum:
// who sends into a half again has ended the sum between, for which every rank sent after it had
// wiped that half.
#pragma once

#include "ops/cuda/comm/peer_exchange.cuh"

namespace nanovllm {

constexpr uint32_t kAbsent = 0xffffffffu;  // two bf16, or one f32
constexpr int kMostSentRows = 256;
/// A rank's places for its share of all ranks' rows of so many bytes, or for their sums: in both
/// halves.
constexpr int64_t kSentRowBytes = 16 << 10, kSentBytes = 2 * kMostSentRows * kSentRowBytes;

// Over the wire a piece of a line of 128 bytes costs as much as the line. What a warp stores at
// once, eight rows by 32 columns, therefore lies together: parts are tiles of that, row after row
// of them.
constexpr int kSentTileRows = 8, kSentTileColumns = 32;
/// Where [row, column] of a rank's parts lies, in elements.
__device__ inline int place_of_part(int row, int column, int share) {
  return (row / kSentTileRows * (share / kSentTileColumns) + column / kSentTileColumns) *
             (kSentTileRows * kSentTileColumns) +
         row % kSentTileRows * kSentTileColumns + column % kSentTileColumns;
}

struct SentParts {
  int rank = 0, world = 1;
  int columns = 0;            // of a row, in bf16
  int share = 0;              // of them that a rank adds for all
  unsigned* round = nullptr;  // own: the number of sums before
  /// Of every rank: [2 halves][world senders][kMostSentRows][share], in tiles.
  std::byte* parts[kMaxPeers] = {};
};

/// Half as much as a uint4, also in one piece.
__device__ inline void send_piece(void* to, uint2 piece) {
  const uint64_t bits = static_cast<uint64_t>(piece.y) << 32 | piece.x;
  asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(to), "l"(bits) : "memory");
}

/// A product's side: where the results of a tile go, which begins at `column` and is no wider than
/// a share. To be made after wait_for_previous().
class PartSender {
 public:
  __device__ PartSender(const SentParts& to, int column)
      : to_(to),
        owner_(column / to.share),
        sender_(static_cast<int>(*static_cast<volatile unsigned*>(to.round) & 1) * to.world +
                to.rank) {}
  /// The results from [row, column] on.
  template <class Piece>
  __device__ void send(int row, int column, Piece piece) const {
    const int owner = owner_ + (column >= (owner_ + 1) * to_.share ? 1 : 0);
    const int at = sender_ * (kMostSentRows * to_.share) +
                   place_of_part(row, column - owner * to_.share, to_.share);
    send_piece(to_.parts[owner] + 2 * int64_t{at}, piece);
  }

 private:
  const SentParts& to_;
  int owner_, sender_;
};

}  // namespace nanovllm
