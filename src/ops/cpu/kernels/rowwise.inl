// One row at a time: add, RMSNorm, rotary embedding, SiLU.

namespace {

/// body(i, load, store) style loops would hide the arithmetic; so each op is a step on 16 lanes,
/// and this runs it along a row.
template <class Step>
NANOVLLM_INLINE void along_row(int64_t n, Step&& step) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) step(i, kLanes);
  if (i < n) step(i, n - i);
}

template <class T>
NANOVLLM_INLINE Vec get(const T* p, int64_t count) {
  return count == kLanes ? load(p) : load_some(p, count);
}
template <class T>
NANOVLLM_INLINE void put(T* p, Vec v, int64_t count) {
  if (count == kLanes)
    store(p, v);
  else
    store_some(p, v, count);
}

template <class T>
void add(T* x, const T* y, int64_t n) {
  along_row(
      n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        put(x + i, get(x + i, count) + get(y + i, count), count);
      });
}

template <class T>
void rms_norm(T* y, const T* x, const T* w, int64_t n, float eps) {
  Vec squares{};
  along_row(
      n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const Vec v = get(x + i, count);
        squares += v * v;
      });
  const Vec scale = splat(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(n) + eps));
  along_row(
      n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const Vec normalised = rounded_to<T>(get(x + i, count) * scale);
        put(y + i, normalised * get(w + i, count), count);
      });
}

template <class T>
void rope(T* head, const float* cos, const float* sin, int64_t half) {
  along_row(
      half, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const Vec a = get(head + i, count), b = get(head + half + i, count);
        const Vec c = get(cos + i, count), s = get(sin + i, count);
        put(head + i, a * c - b * s, count);
        put(head + half + i, b * c + a * s, count);
      });
}

template <class T>
void silu_and_mul(T* y, const T* gate, const T* up, int64_t n) {
  along_row(
      n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        const Vec g = get(gate + i, count);
        put(y + i, g / (1.0f + exp(-g)) * get(up + i, count), count);
      });
}

}  // namespace
