// What a block's values say about it: finds its Extremes in one pass.

namespace {
namespace QSDP_NAMESPACE {

// How many of `n` values are not finite.
template <class T>
int64_t not_finite(const char* x, int64_t n) {
  Ints found = {};
  char padded[LANES * T::SIZE];
  for (int64_t i = 0; i < n; i += LANES) {
    const char* from = x + i * T::SIZE;
    if (n - i < LANES) from = pad<T>(from, n - i, padded, LANES);
    found -= ((Words)T::get(from) & 0x7f800000) == 0x7f800000;
  }
  return reduce(found, [](auto a, auto b) { return a + b; });
}

// Running extremes, witness and content of the vectors seen.
template <bool CONTENT>
struct Scan {
  Floats lo, hi, seen = {};
  Words content = {};

  explicit Scan(Floats first) : lo(first), hi(first) {}

  INLINE void add(Floats x) {
    lo = smaller(x, lo), hi = greater(x, hi);
    if (CONTENT) content += (Words)x;
  }

  INLINE void join(const Scan& other) {
    lo = smaller(other.lo, lo), hi = greater(other.hi, hi);
    seen += other.seen, content += other.content;
  }
};

// Extremes of `n` values; their content only if CONTENT. A NaN or infinity shows in the witness; so
// may an overflow of the witness alone, and then not_finite decides.
template <bool CONTENT, class T>
INLINE Extremes scan(const char* x, int64_t n) {
  constexpr int VECTOR = LANES * T::SIZE;
  float lo = __builtin_inff(), hi = -__builtin_inff(), sum = 0.0f;
  uint32_t content = 0;
  int64_t i = 0;
  if (n >= LANES) {
    Scan<CONTENT> even(T::get(x)), odd = even;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
      const char* from = x + i * T::SIZE;
      const Floats a = T::get(from), b = T::get(from + VECTOR);
      const Floats c = T::get(from + 2 * VECTOR), d = T::get(from + 3 * VECTOR);
      even.add(a), odd.add(b), even.add(c), odd.add(d);
      even.seen = witness(a, b, even.seen), odd.seen = witness(c, d, odd.seen);
    }
    for (; i + LANES <= n; i += LANES) {
      const Floats a = T::get(x + i * T::SIZE);
      even.add(a);
      even.seen = witness(a, a, even.seen);
    }
    even.join(odd);
    lo = reduce(even.lo, [](auto a, auto b) { return a < b ? a : b; });
    hi = reduce(even.hi, [](auto a, auto b) { return a > b ? a : b; });
    sum = reduce(even.seen, [](auto a, auto b) { return a + b; });
    content = reduce(even.content, [](auto a, auto b) { return a + b; });
  }
  if (i < n) {
    char padded[VECTOR];
    float rest[LANES];
    store(rest, T::get(pad<T>(x + i * T::SIZE, n - i, padded, LANES)));
    for (int64_t k = 0; k < n - i; k++) {
      lo = rest[k] < lo ? rest[k] : lo, hi = rest[k] > hi ? rest[k] : hi;
      sum += rest[k], content += bit_cast<uint32_t>(rest[k]);
    }
  }
  const bool finite = __builtin_fabsf(sum) <= MAX_FLOAT || !not_finite<T>(x, n);
  return {lo, hi, content, finite};
}

// Sum of floor(|x| * p * factor) over `n` values, each of which is below 2^23.
template <class T>
int64_t sum_magnitudes(const char* x, int64_t n, float p, float factor) {
  constexpr int64_t FEW = 128 * LANES;  // 30 bits a lane
  int64_t total = 0;
  char padded[LANES * T::SIZE];
  for (int64_t at = 0; at < n; at += FEW) {
    Words sum = {};
    for (int64_t i = at; i < minimum(at + FEW, n); i += LANES) {
      const char* from = x + i * T::SIZE;
      if (n - i < LANES) from = pad<T>(from, n - i, padded, LANES);
      const Floats magnitude = (Floats)((Words)T::get(from) & 0x7fffffff);
      sum += (Words)__builtin_convertvector(magnitude * p * factor, Ints);
    }
    for (int k = 0; k < LANES; k++) total += sum[k];
  }
  return total;
}

}  // namespace QSDP_NAMESPACE
}  // namespace
