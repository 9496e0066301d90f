// Codes to bit planes and back, CHUNK of them at a time.

namespace {
namespace QSDP_NAMESPACE {

// pack_4, pack_2 and pack_1 take CHUNK codes to one plane of CHUNK * width / 8 bytes; unpack_4,
// unpack_2 and unpack_1 add a plane to CHUNK codes. The plane of 4 bits is always the first.

#if QSDP_LANES == 16

INLINE void pack_4(const uint8_t* codes, uint8_t* to) {
  for (int i = 0; i < CHUNK; i += 64) {
    const __m512i x = _mm512_and_si512(load<__m512i>(codes + i), _mm512_set1_epi8(0x0f));
    const __m512i pairs = _mm512_maddubs_epi16(x, _mm512_set1_epi16(0x1001));  // x0 + 16 x1
    store(to + i / 2, _mm512_cvtepi16_epi8(pairs));
  }
}
INLINE void pack_2(const uint8_t* codes, int shift, uint8_t* to) {
  for (int i = 0; i < CHUNK; i += 64) {
    const __m512i shifted = _mm512_srl_epi16(load<__m512i>(codes + i), _mm_cvtsi32_si128(shift));
    const __m512i x = _mm512_and_si512(shifted, _mm512_set1_epi8(0x03));
    const __m512i pairs = _mm512_maddubs_epi16(x, _mm512_set1_epi16(0x0401));  // x0 + 4 x1
    const __m512i fours = _mm512_madd_epi16(pairs, _mm512_set1_epi32(0x00100001));
    store(to + i / 4, _mm512_cvtepi32_epi8(fours));
  }
}
INLINE void pack_1(const uint8_t* codes, int shift, uint8_t* to) {
  const __m512i bit = _mm512_set1_epi8(char(1 << shift));
  for (int i = 0; i < CHUNK; i += 64)
    store(to + i / 8, uint64_t(_mm512_test_epi8_mask(load<__m512i>(codes + i), bit)));
}
INLINE void unpack_1(const uint8_t* from, int shift, uint8_t* codes) {
  const __m512i bit = _mm512_set1_epi8(char(1 << shift));
  for (int i = 0; i < CHUNK; i += 64) {
    const __m512i x = _mm512_maskz_mov_epi8(load<uint64_t>(from + i / 8), bit);
    store(codes + i, _mm512_or_si512(load<__m512i>(codes + i), x));
  }
}

#elif QSDP_LANES == 8

INLINE void pack_4(const uint8_t* codes, uint8_t* to) {
  for (int i = 0; i < CHUNK; i += 64) {
    __m256i pairs[2];
    for (int k = 0; k < 2; k++) {
      const __m256i x = load<__m256i>(codes + i + 32 * k);
      pairs[k] = _mm256_maddubs_epi16(_mm256_and_si256(x, _mm256_set1_epi8(0x0f)),
                                      _mm256_set1_epi16(0x1001));  // x0 + 16 x1
    }
    store(to + i / 2, _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs[0], pairs[1]), 0xd8));
  }
}
INLINE void pack_2(const uint8_t* codes, int shift, uint8_t* to) {
  Ints fours[4];
  for (int k = 0; k < 4; k++) {
    const __m256i shifted =
        _mm256_srl_epi16(load<__m256i>(codes + 32 * k), _mm_cvtsi32_si128(shift));
    const __m256i x = _mm256_and_si256(shifted, _mm256_set1_epi8(0x03));
    const __m256i pairs = _mm256_maddubs_epi16(x, _mm256_set1_epi16(0x0401));  // x0 + 4 x1
    fours[k] = (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi32(0x00100001));
  }
  narrow_to_bytes(fours, 255, to);
}
INLINE void pack_1(const uint8_t* codes, int shift, uint8_t* to) {
  const __m128i up = _mm_cvtsi32_si128(7 - shift);  // to the sign of every byte
  for (int i = 0; i < CHUNK; i += 32)
    store(to + i / 8, _mm256_movemask_epi8(_mm256_sll_epi16(load<__m256i>(codes + i), up)));
}
INLINE void unpack_1(const uint8_t* from, int shift, uint8_t* codes) {
  const __m256i bit = _mm256_set1_epi8(char(1 << shift));
  const __m256i own_bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  const __m256i own_byte =
      _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  for (int i = 0; i < CHUNK; i += 32) {
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(load<int>(from + i / 8)), own_byte);
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, own_bit), own_bit);
    const __m256i x = _mm256_and_si256(set, bit);
    store(codes + i, _mm256_or_si256(load<__m256i>(codes + i), x));
  }
}

#else  // every round of shifts joins neighbours in wider lanes

INLINE void pack_4(const uint8_t* __restrict codes, uint8_t* __restrict to) {
  for (int i = 0; i < CHUNK / 2; i++) {
    const uint16_t x = load<uint16_t>(codes + 2 * i) & 0x0f0f;
    to[i] = uint8_t(x | x >> 4);
  }
}
INLINE void pack_2(const uint8_t* __restrict codes, int shift, uint8_t* __restrict to) {
  for (int i = 0; i < CHUNK / 4; i++) {
    uint32_t x = (load<uint32_t>(codes + 4 * i) >> shift) & 0x03030303;
    x = (x | x >> 6) & 0x000f000f;
    to[i] = uint8_t(x | x >> 12);
  }
}
INLINE void pack_1(const uint8_t* __restrict codes, int shift, uint8_t* __restrict to) {
  for (int i = 0; i < CHUNK / 8; i++) {
    uint64_t x = (load<uint64_t>(codes + 8 * i) >> shift) & 0x0101010101010101;
    x = (x | x >> 7) & 0x0003000300030003;
    x = (x | x >> 14) & 0x0000000f0000000f;
    to[i] = uint8_t(x | x >> 28);
  }
}
INLINE void unpack_1(const uint8_t* __restrict from, int shift, uint8_t* __restrict codes) {
  for (int i = 0; i < CHUNK / 8; i++) {
    uint64_t x = from[i];
    x = (x | x << 28) & 0x0000000f0000000f;
    x = (x | x << 14) & 0x0003000300030003;
    x = (x | x << 7) & 0x0101010101010101;
    store(codes + 8 * i, load<uint64_t>(codes + 8 * i) | x << shift);
  }
}

#endif

INLINE void unpack_4(const uint8_t* __restrict from, uint8_t* __restrict codes) {
  for (int i = 0; i < CHUNK / 2; i++) {
    const uint16_t x = from[i];
    store(codes + 2 * i, uint16_t((x | x << 4) & 0x0f0f));
  }
}
INLINE void unpack_2(const uint8_t* __restrict from, int shift, uint8_t* __restrict codes) {
  const uint32_t keep = shift ? ~0u : 0;  // the first plane clears what was there
  for (int i = 0; i < CHUNK / 4; i++) {
    uint32_t x = from[i];
    x = (x | x << 12) & 0x000f000f;
    x = (x | x << 6) & 0x03030303;
    store(codes + 4 * i, (load<uint32_t>(codes + 4 * i) & keep) | x << shift);
  }
}

INLINE void pack_plane(const uint8_t* codes, int width, int shift, uint8_t* to) {
  if (width == 4) return pack_4(codes, to);
  if (width == 2) return pack_2(codes, shift, to);
  pack_1(codes, shift, to);
}

INLINE void unpack_plane(const uint8_t* from, int width, int shift, uint8_t* codes) {
  if (width == 4) return unpack_4(from, codes);
  if (width == 2) return unpack_2(from, shift, codes);
  if (!shift) memset(codes, 0, CHUNK);  // the first plane clears what was there
  unpack_1(from, shift, codes);
}

// `n` codes, and zeros up to CHUNK, into the planes of a block at value `at`, a multiple of CHUNK.
INLINE void pack(const uint8_t* codes, int64_t n, const Planes& planes, int64_t at, uint8_t* to) {
  for (int i = 0; i < planes.count; i++) {
    const int width = planes.width[i];
    uint8_t* plane = to + planes.start[i] + at * width / 8;
    if (width == 8) {
      memcpy(plane, codes, size_t(n));
    } else if (n == CHUNK) {
      pack_plane(codes, width, planes.shift[i], plane);
    } else {
      uint8_t padded[CHUNK];
      pack_plane(codes, width, planes.shift[i], padded);
      memcpy(plane, padded, size_t(divide_up(n * width, 8)));
    }
  }
}

INLINE void unpack(const uint8_t* from, int64_t n, const Planes& planes, int64_t at,
                   uint8_t* codes) {
  for (int i = 0; i < planes.count; i++) {
    const int width = planes.width[i];
    const uint8_t* plane = from + planes.start[i] + at * width / 8;
    uint8_t padded[CHUNK] = {};
    if (n < CHUNK) {
      memcpy(padded, plane, size_t(divide_up(n * width, 8)));
      plane = padded;
    }
    if (width == 8)
      memcpy(codes, plane, CHUNK);
    else
      unpack_plane(plane, width, planes.shift[i], codes);
  }
}

}  // namespace QSDP_NAMESPACE
}  // namespace
