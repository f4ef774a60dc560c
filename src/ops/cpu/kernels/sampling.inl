// Passes over one row of logits.

namespace {

RowStats row_stats(const float* logits, int64_t n) {
  const float infinity = __builtin_inff();
  Vec top = splat(-infinity);
  VecI bad{};
  along_row(
      n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        Vec v = get(logits + i, count);
        if (count < kLanes)
          for (int64_t j = count; j < kLanes; ++j) v[j] = -infinity;
        bad |= ~(v < infinity);  // +inf and NaN
        top = max(top, v);
      });
  RowStats stats{max(top), -1};
  for (int i = 0; i < kLanes; ++i)
    if (bad[i]) return stats;
  if (stats.max == -infinity) return stats;
  for (int64_t i = 0; stats.argmax < 0; ++i)
    if (logits[i] == stats.max) stats.argmax = static_cast<int32_t>(i);
  return stats;
}

double sum_exp(const float* logits, int64_t n, float temperature, float shift) {
  constexpr int64_t kPiece = 1024;
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kPiece) {
    Vec part{};
    along_row(
        n - begin < kPiece ? n - begin : kPiece, [&](int64_t i, int64_t count)
                                                     __attribute__((always_inline)) {
                                                       Vec v = get(logits + begin + i, count);
                                                       if (count < kLanes)
                                                         for (int64_t j = count; j < kLanes; ++j)
                                                           v[j] = -__builtin_inff();
                                                       part += exp(v / temperature - shift);
                                                     });
    total += static_cast<double>(sum(part));
  }
  return total;
}

/// Philox4x32-10 (ops/noise.h) of sixteen neighbouring groups of four tokens, as bits[word][group].
void noise_bits16(uint64_t seed, uint32_t position, uint32_t first_group, uint32_t (&bits)[4][16]) {
  for (uint32_t i = 0; i < 16; ++i) {
    bits[0][i] = first_group + i;
    bits[1][i] = position;
    bits[2][i] = bits[3][i] = 0;
  }
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
    for (int i = 0; i < 16; ++i) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * bits[0][i],
                     p1 = uint64_t{0xCD9E8D57u} * bits[2][i];
      bits[0][i] = static_cast<uint32_t>(p1 >> 32) ^ bits[1][i] ^ key0;
      bits[1][i] = static_cast<uint32_t>(p1);
      bits[2][i] = static_cast<uint32_t>(p0 >> 32) ^ bits[3][i] ^ key1;
      bits[3][i] = static_cast<uint32_t>(p0);
    }
  }
}

int32_t gumbel_argmax(const float* logits, int64_t n, float temperature, uint64_t seed,
                      uint32_t position, RowStats stats) {
  // The likeliest token scores at least this much: a start that lets whole stretches be skipped.
  float best = stats.max / temperature + kMinGumbel;
  if (best == __builtin_inff() || best == -__builtin_inff())
    return stats.argmax;  // a temperature that is all but 0
  int32_t winner = stats.argmax;
  bool found = false;
  for (int64_t begin = 0; begin < n; begin += 64) {
    const int64_t count = n - begin < 64 ? n - begin : 64;
    float scaled[64];
    for (int64_t i = 0; i < 64; ++i)
      scaled[i] = i < count ? logits[begin + i] / temperature : -__builtin_inff();
    Vec top = load(scaled);
    for (int i = 1; i < 4; ++i) top = max(top, load(scaled + i * kLanes));
    if (max(top) + kMaxGumbel < best) continue;
    uint32_t bits[4][16];
    noise_bits16(seed, position, static_cast<uint32_t>(begin / 4), bits);
    // -log(-log(u)) > c only if 1 - u < exp(-c): one exponential rules out nearly all before any
    // logarithm.
    float limit[64];
    for (int i = 0; i < 4; ++i)
      store(limit + i * kLanes, exp(load(scaled + i * kLanes) - best) * 1.001f);
    for (int64_t i = 0; i < count; ++i) {
      const float u = (static_cast<float>(bits[i % 4][i / 4] >> 9) + 0.5f) * 0x1p-23f;
      if (!(1.0f - u <= limit[i]) || scaled[i] == -__builtin_inff()) continue;
      const float score = scaled[i] - __builtin_logf(-__builtin_logf(u));
      if (score > best || (!found && score == best))
        best = score, winner = static_cast<int32_t>(begin + i), found = true;
    }
  }
  return winner;
}

}  // namespace
