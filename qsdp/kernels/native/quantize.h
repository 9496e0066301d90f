// Values to positions on a grid, and these to codes, CHUNK values at a time.

namespace {
namespace QSDP_NAMESPACE {

constexpr int MAX_TREE_BITS = 4;  // 8 nodes at the last depth: one vector of AVX2

// q of LANES values: the position on the grid with 16 fractional bits. Roundings may take it a
// little below zero or above its largest value, so codes have to be limited: narrow_to_bytes does.
// base - x and a negative factor instead of x - base: the same numbers, and x may stay in memory.
struct Grid {
  Floats base, minus_inverse;

  explicit Grid(const Plan& plan) : base(all(plan.base)), minus_inverse(all(-plan.inverse)) {}

  template <class T>
  INLINE Ints position(const char* x) const {
    return round_to_int((base - T::get(x)) * minus_inverse);
  }

  // The same within 0 and 65536, for tables of levels.
  template <class T>
  INLINE Ints limited_position(const char* x) const {
    const Ints q = position<T>(x);
    return q < 0 ? Ints{} : q > 65536 ? Ints{} + 65536 : q;
  }
};

// Codes of CHUNK values; `r` for each, or one for all.
template <bool EACH, class T>
INLINE void quantize_uniform(const char* x, const Plan& plan, const int32_t* r, uint8_t* codes) {
  // Copies, because for all the compiler knows `codes` lie over the originals.
  const Grid grid(plan);
  const Ints r_of_all = *r + Ints{};
  const uint8_t limit = plan.limit;
  for (int i = 0; i < CHUNK; i += GROUP) {
    Ints code[4];
    for (int k = 0; k < 4; k++) {
      const int at = i + k * LANES;
      const Ints q = grid.position<T>(x + at * T::SIZE);
      code[k] = (q + (EACH ? load<Ints>(r + at) : r_of_all)) >> 16;
    }
    narrow_to_bytes(code, limit, codes + i);
  }
}

// Signs: 1 from zero on.
template <class T>
INLINE void quantize_signs(const char* x, uint8_t* codes) {
  for (int i = 0; i < CHUNK; i += GROUP) {
    Ints code[4];
    for (int k = 0; k < 4; k++) code[k] = (T::get(x + (i + k * LANES) * T::SIZE) >= Floats{}) & 1;
    narrow_to_bytes(code, 1, codes + i);
  }
}

// Up to 16 levels: a binary search in all lanes at once. tree[2^d - 1 + i] is the threshold of node
// i at depth d.
template <class T>
INLINE void quantize_few_levels(const char* x, const Plan& plan, const int32_t* tree, int depth,
                                uint8_t* codes) {
  const Grid grid(plan);
  for (int i = 0; i < CHUNK; i += GROUP) {
    Ints q[4], code[4] = {};
    for (int k = 0; k < 4; k++) q[k] = grid.limited_position<T>(x + (i + k * LANES) * T::SIZE);
    for (int d = 0; d < depth; d++)
      for (int k = 0; k < 4; k++)
        code[k] += code[k] - (q[k] >= lookup(tree + (1 << d) - 1, code[k]));
    narrow_to_bytes(code, plan.limit, codes + i);
  }
}

template <class T>
INLINE void quantize_many_levels(const char* x, const Plan& plan, const uint8_t* level_codes,
                                 uint8_t* codes) {
  alignas(64) int32_t q[CHUNK];
  const Grid grid(plan);
  for (int i = 0; i < CHUNK; i += LANES) store(q + i, grid.limited_position<T>(x + i * T::SIZE));
#pragma GCC unroll 16
  for (int i = 0; i < CHUNK; i++) codes[i] = level_codes[q[i]];
}

}  // namespace QSDP_NAMESPACE
}  // namespace
