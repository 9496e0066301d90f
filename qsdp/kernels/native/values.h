// Values in memory: a vector of them from and to each dtype, the ends of arrays, prefetching.

namespace {
namespace QSDP_NAMESPACE {

// The value types: a vector of float32 from and to memory, rounded as torch rounds.

struct Float32 {
  static constexpr int SIZE = 4;
  typedef uint32_t Bits;
  static INLINE Floats get(const char* from) { return load<Floats>(from); }
  static INLINE void put(Floats x, char* to) { store(to, x); }
};

struct Bfloat16 {
  static constexpr int SIZE = 2;
  typedef uint16_t Bits;
  static INLINE Floats get(const char* from) { return (Floats)(widen_halves(from) << 16); }
  static INLINE void put(Floats x, char* to) {
    const Words bits = (Words)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    narrow_to_halves(x == x ? rounded : all(NAN_BITS >> 16), to);
  }
};

struct Float16 {
  static constexpr int SIZE = 2;
  typedef uint16_t Bits;
  static INLINE Floats get(const char* from) { return float16_to_float(from); }
  static INLINE void put(Floats x, char* to) { float_to_float16(x, to); }
};

// Copies `n` < `capacity` values and zeros behind them.
template <class T>
INLINE const char* pad(const char* x, int64_t n, char* padded, int64_t capacity) {
  memcpy(padded, x, size_t(n * T::SIZE));
  memset(padded + n * T::SIZE, 0, size_t((capacity - n) * T::SIZE));
  return padded;
}

// The same with the values themselves, again and again: they lie on the block's grid.
template <class T>
INLINE const char* repeat(const char* x, int64_t n, char* padded, int64_t capacity) {
  memcpy(padded, x, size_t(n * T::SIZE));
  for (int64_t filled = n; filled < capacity; filled *= 2)
    memcpy(padded + filled * T::SIZE, padded,
           size_t(minimum(filled, capacity - filled) * T::SIZE));
  return padded;
}

// Hardware prefetchers stop at the end of a page. Two lines of the page after the next start them
// there, in time; more lines, or nearer ones, measured slower.
INLINE void prefetch_pages(const char* x, int64_t bytes) {
  constexpr uintptr_t PAGE = 4096;
  const uintptr_t from = reinterpret_cast<uintptr_t>(x), to = from + uintptr_t(bytes);
  if (from / PAGE == to / PAGE) return;
  const char* ahead = reinterpret_cast<const char*>((to / PAGE + 1) * PAGE);
  __builtin_prefetch(ahead, 0, 2), __builtin_prefetch(ahead + 64, 0, 2);
}

}  // namespace QSDP_NAMESPACE
}  // namespace
