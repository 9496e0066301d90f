// The 2-norm of a block in place of its extremes: two_norm in qsdp/kernels/blocks.py.

namespace {
namespace QSDP_NAMESPACE {

// Sum of squares of magnitudes, each cut to an integer: below 2^62, in any order.
template <class T>
INLINE uint64_t squares(const char* x, int64_t n, float small, float up) {
  Longs sums = {};
  char padded[LANES * T::SIZE];
  for (int64_t i = 0; i < n; i += LANES) {
    const char* from = x + i * T::SIZE;
    if (n - i < LANES) from = pad<T>(from, n - i, padded, LANES);
    const Floats magnitude = (Floats)((Words)T::get(from) & 0x7fffffff);
    const Longs cut = (Longs)__builtin_convertvector(magnitude * small * up, Ints);
    const Longs odd = cut >> 32;
    sums += multiply_low(cut, cut) + multiply_low(odd, odd);
  }
  uint64_t sum = 0;
  for (int i = 0; i < LANES / 2; i++) sum += sums[i];
  return sum;
}

// `parts` calls its argument with the block's values, in one part or several: add(x, n).
template <class T, class Parts>
INLINE void stretch_to_norm(Extremes& extremes, const Parts& parts) {
  const float least = __builtin_fabsf(extremes.lo), other = __builtin_fabsf(extremes.hi);
  const float most = least > other ? least : other;
  extremes.lo = -most, extremes.hi = most;
  if (!extremes.finite || most == 0.0f || most > HUGE_VALUE) return;
  const bool tiny = most < TINY_RANGE;
  const float small = tiny ? 1 / TINY_RANGE : 1.0f;
  const uint32_t exponent = bit_cast<uint32_t>(most * small) >> 23;  // 2^(exponent - 126) > most
  const float up = bit_cast<float>((276 - exponent) << 23);
  const float down = bit_cast<float>((exponent - 22) << 23);
  uint64_t sum = 0;
  parts([&](const char* x, int64_t n) { sum += squares<T>(x, n, small, up); });
  const float root = float(__builtin_sqrt(double(int64_t(sum))));
  float norm = root * down * (tiny ? TINY_RANGE : 1.0f);
  norm = norm > HUGE_VALUE ? HUGE_VALUE : norm;
  norm = norm > most ? norm : most;
  extremes.lo = -norm, extremes.hi = norm;
}

}  // namespace QSDP_NAMESPACE
}  // namespace
