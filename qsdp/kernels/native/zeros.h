// Which values are zero: the map of zeros in qsdp/wire.py, forth and back. Written once for all
// instruction sets: of values that are not zero, hardly any is looked at.

#pragma once

#include "types.h"

namespace {

constexpr int ZERO_GROUP = 32;               // values that share a bit
constexpr int MAP_VALUES = 8 * ZERO_GROUP;  // and a byte

template <class Word>
INLINE Word word_at(const char* x, int64_t i) {
  Word word;
  memcpy(&word, x + i * int64_t(sizeof(Word)), sizeof(Word));
  return word;
}

// Whether value `i` of floats whose bits are Words is zero. Both signs count, so the sign does not.
template <class Word>
INLINE bool is_zero(const char* x, int64_t i) {
  return Word(word_at<Word>(x, i) << 1) == 0;
}

// Whether `n` > 0 values are zero.
template <class Word>
INLINE bool all_zero(const char* x, int64_t n) {
  if (!is_zero<Word>(x, 0)) return false;  // as nearly always
  for (int64_t at = 0; at < n; at += ZERO_GROUP) {
    Word any = 0;
    if (at + ZERO_GROUP <= n)
      for (int i = 0; i < ZERO_GROUP; i++) any |= word_at<Word>(x, at + i);
    else
      for (int64_t i = at; i < n; i++) any |= word_at<Word>(x, i);
    if (!is_zero<Word>(reinterpret_cast<const char*>(&any), 0)) return false;
  }
  return true;
}

// A byte of a map: of `n` values, 8 groups at most.
template <class Word>
INLINE uint8_t zero_groups(const char* x, int64_t n) {
  uint8_t bits = 0;
  if (n >= MAP_VALUES) {
    for (int group = 0; group < 8; group++)
      bits |= uint8_t(is_zero<Word>(x, group * ZERO_GROUP)) << group;
    if (!bits) return 0;  // as nearly always
  }
  bits = 0;
  for (int64_t group = 0, at = 0; group < 8 && at < n; group++, at += ZERO_GROUP)
    bits |= uint8_t(all_zero<Word>(x + at * int64_t(sizeof(Word)), minimum(ZERO_GROUP, n - at)))
            << group;
  return bits;
}

// Writes those bytes of a segment's map that start with values `from` to `to` of the segment; the
// groups of the last byte may lie behind these. `x`: all `numel` values.
template <class Word>
INLINE void map_zeros(const char* x, int64_t numel, int64_t from, int64_t to, uint8_t* map) {
  for (int64_t byte = divide_up(from, MAP_VALUES); byte * MAP_VALUES < to; byte++)
    map[byte] = zero_groups<Word>(x + byte * MAP_VALUES * int64_t(sizeof(Word)),
                                  numel - byte * MAP_VALUES);
}

// Zeros to those of `n` values of `item` bytes each whose groups' bits are set in all of `count`
// maps, `step` bytes apart. `out` is value `from` of the segment, a multiple of ZERO_GROUP.
INLINE void write_zeros(const uint8_t* map, int64_t count, int64_t step, int64_t from, int64_t n,
                        int64_t item, char* out) {
  for (int64_t byte = from / MAP_VALUES; byte * MAP_VALUES < from + n; byte++) {
    uint8_t bits = map[byte];
    for (int64_t i = 1; bits && i < count; i++) bits &= map[byte + i * step];
    for (int group = 0; bits >> group; group++) {
      const int64_t at = byte * MAP_VALUES + group * ZERO_GROUP - from;
      if (bits >> group & 1 && at >= 0 && at < n)
        memset(out + at * item, 0, size_t(minimum(ZERO_GROUP, n - at) * item));
    }
  }
}

}  // namespace
