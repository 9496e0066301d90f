// Vectors of LANES 32-bit lanes, and a dozen primitives on them. Here and in planes.h the
// instruction sets differ; all other parts are written once, on what these two define.

namespace {
namespace QSDP_NAMESPACE {

constexpr int LANES = QSDP_LANES;
constexpr int GROUP = 4 * LANES;  // values narrowed to bytes together

typedef float Floats __attribute__((vector_size(4 * QSDP_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * QSDP_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * QSDP_LANES)));
typedef uint64_t Longs __attribute__((vector_size(4 * QSDP_LANES)));

template <class V>
INLINE V load(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

template <class V>
INLINE void store(void* to, V v) {
  __builtin_memcpy(to, &v, sizeof(V));
}

// Joins the lanes of a vector, in a tree: in a chain, every block would wait for it.
template <class V, class Join>
INLINE auto reduce(V v, const Join& join) -> decltype(v[0] + v[0]) {
  typedef decltype(v[0] + v[0]) Lane;
  typedef Lane Quarter __attribute__((vector_size(16)));
  const char* lanes = reinterpret_cast<const char*>(&v);
  Quarter four = load<Quarter>(lanes);
  for (int i = 1; i < LANES / 4; i++) four = join(four, load<Quarter>(lanes + 16 * i));
  return join(join(four[0], four[2]), join(four[1], four[3]));
}

INLINE Floats all(float x) { return x - Floats{}; }  // x - 0.0 keeps even -0.0, unlike x + 0.0
INLINE Words all(uint32_t x) { return x + Words{}; }

// Primitives. smaller(a, b) is a < b ? a : b and greater(a, b) is a > b ? a : b, so a NaN in `b`
// stays. round_to_int rounds half to even. multiply_low multiplies the low halves of 64-bit lanes,
// interleave puts the low halves of `odd` between those of `even`.
// lookup reads a table of up to 8. witness is NaN or infinite if `a`, `b` or `seen` is. add_exact
// is a * b + c for an exact a * b, so that it may be fused. swap<D> exchanges the lanes D apart.

#if QSDP_LANES == 16

INLINE Floats smaller(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE Floats greater(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE Ints round_to_int(Floats x) { return (Ints)_mm512_cvtps_epi32((__m512)x); }
INLINE Floats witness(Floats a, Floats b, Floats seen) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)seen);
}
INLINE Floats add_exact(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
template <int DISTANCE>
INLINE Floats swap(Floats x) {
  constexpr int ODD = 0xb1, HALF = 0x4e;  // of every four: 1 0 3 2, and 2 3 0 1
  if constexpr (DISTANCE <= 2)
    return (Floats)_mm512_permute_ps((__m512)x, DISTANCE == 1 ? ODD : HALF);
  else
    return (Floats)_mm512_shuffle_f32x4((__m512)x, (__m512)x, DISTANCE == 4 ? ODD : HALF);
}
INLINE Ints lookup(const int32_t* table, Ints index) {
  return (Ints)_mm512_permutexvar_epi32((__m512i)index, load<__m512i>(table));
}
INLINE Longs multiply_low(Longs a, Longs b) {
  return (Longs)_mm512_mul_epu32((__m512i)a, (__m512i)b);
}
INLINE Longs xor3(Longs a, Longs b, Longs c) {
  return (Longs)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
}
INLINE Words interleave(Longs even, Longs odd) {
  return (Words)_mm512_mask_shuffle_epi32((__m512i)even, 0xaaaa, (__m512i)odd, _MM_PERM_CCAA);
}
INLINE void narrow_to_bytes(const Ints v[4], uint8_t limit, uint8_t* to) {
  const __m512i a = _mm512_packus_epi32((__m512i)v[0], (__m512i)v[1]);
  const __m512i b = _mm512_packus_epi32((__m512i)v[2], (__m512i)v[3]);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_min_epu8(_mm512_packus_epi16(a, b), _mm512_set1_epi8(char(limit)));
  store(to, _mm512_permutexvar_epi32(order, bytes));
}
INLINE Ints widen_bytes(const uint8_t* from) {
  return (Ints)_mm512_cvtepu8_epi32(load<__m128i>(from));
}
INLINE Words widen_halves(const char* from) {
  return (Words)_mm512_cvtepu16_epi32(load<__m256i>(from));
}
INLINE void narrow_to_halves(Words v, char* to) {
  store(to, _mm512_cvtepi32_epi16((__m512i)v));
}
INLINE Floats float16_to_float(const char* from) {
  return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
}
INLINE void float_to_float16(Floats x, char* to) {
  store(to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE void stream(char* to, Floats x) { _mm512_stream_ps((float*)to, (__m512)x); }

#elif QSDP_LANES == 8

INLINE Floats smaller(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE Floats greater(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE Ints round_to_int(Floats x) { return (Ints)_mm256_cvtps_epi32((__m256)x); }
INLINE Floats witness(Floats a, Floats b, Floats seen) { return seen + a + b; }
INLINE Floats add_exact(Floats a, Floats b, Floats c) { return a * b + c; }
template <int DISTANCE>
INLINE Floats swap(Floats x) {
  if constexpr (DISTANCE <= 2)
    return (Floats)_mm256_permute_ps((__m256)x, DISTANCE == 1 ? 0xb1 : 0x4e);
  else
    return (Floats)_mm256_permute2f128_ps((__m256)x, (__m256)x, 1);
}
INLINE Ints lookup(const int32_t* table, Ints index) {
  return (Ints)_mm256_permutevar8x32_epi32(load<__m256i>(table), (__m256i)index);
}
INLINE Longs multiply_low(Longs a, Longs b) {
  return (Longs)_mm256_mul_epu32((__m256i)a, (__m256i)b);
}
INLINE Longs xor3(Longs a, Longs b, Longs c) { return a ^ b ^ c; }
INLINE Words interleave(Longs even, Longs odd) {
  return (Words)_mm256_blend_epi32((__m256i)even, _mm256_slli_epi64((__m256i)odd, 32), 0xaa);
}
INLINE void narrow_to_bytes(const Ints v[4], uint8_t limit, uint8_t* to) {
  const __m256i a = _mm256_packus_epi32((__m256i)v[0], (__m256i)v[1]);
  const __m256i b = _mm256_packus_epi32((__m256i)v[2], (__m256i)v[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_min_epu8(_mm256_packus_epi16(a, b), _mm256_set1_epi8(char(limit)));
  store(to, _mm256_permutevar8x32_epi32(bytes, order));
}
INLINE Ints widen_bytes(const uint8_t* from) {
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
}
INLINE Words widen_halves(const char* from) {
  return (Words)_mm256_cvtepu16_epi32(load<__m128i>(from));
}
INLINE void narrow_to_halves(Words v, char* to) {
  const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  store(to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}
INLINE Floats float16_to_float(const char* from) {
  return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
}
INLINE void float_to_float16(Floats x, char* to) {
  store(to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE void stream(char* to, Floats x) { _mm256_stream_ps((float*)to, (__m256)x); }

#else  // any machine, through the compiler's vectors

INLINE Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
INLINE Floats greater(Floats a, Floats b) { return a > b ? a : b; }
INLINE Floats witness(Floats a, Floats b, Floats seen) { return seen + a + b; }
INLINE Floats add_exact(Floats a, Floats b, Floats c) { return a * b + c; }
#if defined(__x86_64__)
template <int DISTANCE>
INLINE Floats swap(Floats x) {
  return (Floats)_mm_shuffle_ps((__m128)x, (__m128)x, DISTANCE == 1 ? 0xb1 : 0x4e);
}
#else
template <int DISTANCE>
INLINE Floats swap(Floats x) {
  return Floats{x[DISTANCE], x[1 ^ DISTANCE], x[2 ^ DISTANCE], x[3 ^ DISTANCE]};
}
#endif
INLINE Ints lookup(const int32_t* table, Ints index) {
  return Ints{table[index[0]], table[index[1]], table[index[2]], table[index[3]]};
}
INLINE Longs xor3(Longs a, Longs b, Longs c) { return a ^ b ^ c; }
INLINE Words interleave(Longs even, Longs odd) {
  return (Words)((even & 0xffffffff) | odd << 32);
}
#if defined(__x86_64__)
INLINE Ints round_to_int(Floats x) { return (Ints)_mm_cvtps_epi32((__m128)x); }
INLINE Longs multiply_low(Longs a, Longs b) { return (Longs)_mm_mul_epu32((__m128i)a, (__m128i)b); }
INLINE void stream(char* to, Floats x) { _mm_stream_ps((float*)to, (__m128)x); }
#else
INLINE Ints round_to_int(Floats x) {  // 0 <= x <= 2^24; from 2^23 on every float is an integer
  const Floats magic = all(0x1p23f);
  return __builtin_convertvector(x < magic ? (x + magic) - magic : x, Ints);
}
INLINE Longs multiply_low(Longs a, Longs b) { return (a & 0xffffffff) * (b & 0xffffffff); }
INLINE void stream(char* to, Floats x) { store(to, x); }
#endif
#if defined(__x86_64__)
INLINE void narrow_to_bytes(const Ints v[4], uint8_t limit, uint8_t* to) {
  const __m128i a = _mm_packs_epi32((__m128i)v[0], (__m128i)v[1]);
  const __m128i b = _mm_packs_epi32((__m128i)v[2], (__m128i)v[3]);
  store(to, _mm_min_epu8(_mm_packus_epi16(a, b), _mm_set1_epi8(char(limit))));
}
#else
INLINE void narrow_to_bytes(const Ints v[4], uint8_t limit, uint8_t* to) {
  for (int i = 0; i < GROUP; i++)
    to[i] = uint8_t(maximum(0, minimum(v[i / LANES][i % LANES], limit)));
}
#endif
INLINE Ints widen_bytes(const uint8_t* from) {
  return Ints{from[0], from[1], from[2], from[3]};
}
INLINE Words widen_halves(const char* from) {
  uint16_t half[LANES];
  memcpy(half, from, sizeof half);
  return Words{half[0], half[1], half[2], half[3]};
}
INLINE void narrow_to_halves(Words v, char* to) {
  const uint16_t half[LANES] = {uint16_t(v[0]), uint16_t(v[1]), uint16_t(v[2]), uint16_t(v[3])};
  memcpy(to, half, sizeof half);
}
INLINE Floats float16_to_float(const char* from) {
  const Words half = widen_halves(from), sign = (half & 0x8000) << 16;
  const Words magnitude = (half & 0x7fff) << 13, exponent = magnitude & 0x0f800000;
  const Words rebias = magnitude + (112u << 23);
  const Words denormal = (Words)((Floats)(rebias + (1u << 23)) - all(0x1p-14f));
  const Words special = rebias + (112u << 23);
  const Words bits = exponent == 0x0f800000 ? special : exponent == 0 ? denormal : rebias;
  return (Floats)(bits | sign);
}
INLINE void float_to_float16(Floats x, char* to) {
  const Words bits = (Words)x, magnitude = bits & 0x7fffffff, sign = (bits ^ magnitude) >> 16;
  // Adding 0.5 to a value below 2^-14 leaves the float16 denormal, rounded, in the lowest bits.
  const Words denormal = (Words)((Floats)magnitude + all(0.5f)) - 0x3f000000;
  const Words normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const Words finite = magnitude < 0x38800000 ? denormal : normal;
  const Words special = magnitude > 0x7f800000 ? all(0x7e00u) : all(0x7c00u);
  narrow_to_halves((magnitude < 0x47800000 ? finite : special) | sign, to);
}

#endif

}  // namespace QSDP_NAMESPACE
}  // namespace
