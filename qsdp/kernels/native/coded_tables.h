// Tables of numbers of variable length, for coded.h: what to write for an integer or for two, and
// what stands in the next bits of a stream. Made once, at the first use.

#pragma once

#include "types.h"

namespace {

enum Coding : int32_t { ELIAS, RICE };

constexpr int PARAMETERS = 8;         // of Rice numbers that are magnitudes
constexpr int NUMBERS = 1 + PARAMETERS;  // Elias, then Rice by parameter
constexpr int WINDOW = 11;            // bits of a stream that a table is looked up by
constexpr int AT_ONCE = 8;            // values that it gives at most
constexpr int FEW_WINDOW = 12;        // bits that a table of longer numbers is looked up by
constexpr int FEW_AT_ONCE = 2;        // values that it gives at most
constexpr int FEW_FROM = 4;           // the first of NUMBERS that has such a table
constexpr uint32_t KNOWN = 512;       // Elias numbers below it are in a table
constexpr uint32_t KNOWN_GAPS = 128;  // gaps below it are in a table
constexpr int ELIAS_GAPS = 16;        // beside the Rice parameters of gaps

// A number, first bit lowest. Of more than 64 bits, the size alone.
struct Number {
  uint64_t bits;
  int size;
};

INLINE int log2_of(uint32_t n) { return 31 - __builtin_clz(n); }

// E(n) for 1 <= n < 2^17.
inline Number elias_number(uint32_t n) {
  Number all = {0, 1};
  while (n > 1) {
    const int last = log2_of(n);
    uint64_t group = 0;
    for (int i = 0; i <= last; i++) group |= uint64_t(n >> (last - i) & 1) << i;
    all = {group | all.bits << (last + 1), all.size + last + 1};
    n = uint32_t(last);
  }
  return all;
}

inline Number rice_number(uint32_t n, int r) {
  const uint32_t ones = n >> r;
  if (ones + 1 + uint32_t(r) > 64) return {0, int(ones) + 1 + r};
  const uint64_t unary = (uint64_t(1) << ones) - 1, low = n & ((1u << r) - 1);
  return {unary | (r ? low << (ones + 1) : 0), int(ones) + 1 + r};
}

// Of one of NUMBERS, a magnitude with its sign.
inline Number signed_number(int number, int k) {
  const uint32_t magnitude = uint32_t(k < 0 ? -k : k);
  Number n = number ? rice_number(magnitude, number - 1) : elias_number(magnitude + 1);
  if (k && n.size < 64) n.bits |= uint64_t(k < 0) << n.size;
  n.size += k != 0;
  return n;
}

// What to write: at most 32 bits. Where they are more, LONG, so that no sum with it fits a writer.
struct Word {
  uint32_t bits, size;
};

constexpr uint32_t LONG = 64;

inline Word word_of(const Number& n) {
  return n.size > 32 ? Word{0, LONG} : Word{uint32_t(n.bits), uint32_t(n.size)};
}

// The values that stand complete in the next WINDOW bits, as int8, and the bits that they take.
struct Found {
  uint64_t values;
  uint32_t count, size;
};

// The values that stand complete in the next FEW_WINDOW bits, two at most, and the bits that they
// take.
struct Few {
  uint16_t values;
  uint8_t count, size;
};

// An Elias number that a window begins with; size 0 where it is longer.
struct Read {
  uint8_t number, size;
};

struct Tables {
  Word one[NUMBERS][256];              // by a value as uint8
  Word two[NUMBERS][256];              // by the low four bits of one value, and of the next
  Word gap[ELIAS_GAPS + 1][KNOWN_GAPS];  // by Rice parameter or for Elias, and by a gap - 1
  Word kept[NUMBERS][256];             // a value's sign and its magnitude, for sparse streams
  Found found[FEW_FROM][1 << WINDOW];
  Few few[NUMBERS][1 << FEW_WINDOW];   // from FEW_FROM on; nothing stands in those before
  uint8_t elias_bits[18];              // of numbers with so many bits after the first
  Number elias[KNOWN];
  Read elias_read[1 << WINDOW];

  Tables() {
    for (int i = 0; i < 17; i++) elias_bits[i] = uint8_t(elias_number(1u << i).size);
    elias_bits[17] = 0;
    memset(elias_read, 0, sizeof elias_read);
    for (uint32_t n = 1; n < KNOWN; n++) {
      elias[n] = elias_number(n);
      const int size = elias[n].size;
      for (uint64_t more = 0; size <= WINDOW && more < 1u << (WINDOW - size); more++)
        elias_read[elias[n].bits | more << size] = {uint8_t(n), uint8_t(size)};
    }
    for (int number = 0; number < NUMBERS; number++) fill(number);
    for (uint32_t n = 0; n < KNOWN_GAPS; n++) {
      for (int r = 0; r < ELIAS_GAPS; r++) gap[r][n] = word_of(rice_number(n, r));
      gap[ELIAS_GAPS][n] = word_of(elias_number(n + 1));
    }
    for (int number = 0; number < NUMBERS; number++)
      for (int k = -128; k < 128; k++) kept[number][k & 255] = kept_word(k, number);
  }

 private:
  void fill(int number) {
    Number signed_of[256];
    for (int k = -127; k < 128; k++)
      one[number][k & 255] = word_of(signed_of[k & 255] = signed_number(number, k));
    one[number][128] = {0, LONG};  // no integer of a block
    for (int pair = 0; pair < 256; pair++) {
      const Number a = signed_of[low_nibble(pair)], b = signed_of[low_nibble(pair >> 4)];
      two[number][pair] = a.size + b.size > 32
                              ? Word{0, LONG}
                              : Word{uint32_t(a.bits | b.bits << a.size), uint32_t(a.size + b.size)};
    }
    memset(few[number], 0, sizeof few[number]);
    if (number < FEW_FROM)
      fill_windows<WINDOW, AT_ONCE>(signed_of, found[number]);
    else
      fill_windows<FEW_WINDOW, FEW_AT_ONCE>(signed_of, few[number]);
  }

  template <int BITS, int MOST, class Entry>
  static void fill_windows(const Number (&signed_of)[256], Entry (&entries)[1 << BITS]) {
    int first[1 << BITS];  // the value that a window begins with; 128 if none is complete
    for (int& k : first) k = 128;
    for (int k = -127; k < 128; k++) {
      const Number& n = signed_of[k & 255];
      for (uint64_t more = 0; n.size <= BITS && more < 1u << (BITS - n.size); more++)
        first[n.bits | more << n.size] = k;
    }
    for (int window = 0; window < 1 << BITS; window++) {
      uint64_t values = 0;
      int count = 0, size = 0;
      while (count < MOST && size < BITS) {
        const int k = first[window >> size];
        if (k == 128 || size + signed_of[k & 255].size > BITS) break;
        values |= uint64_t(uint8_t(k)) << 8 * count++;
        size += signed_of[k & 255].size;
      }
      entries[window] = {decltype(Entry::values)(values), decltype(Entry::count)(count),
                         decltype(Entry::size)(size)};
    }
  }

  static Word kept_word(int k, int number) {
    if (!k || k == -128) return {0, LONG};  // no value that is kept
    const uint32_t magnitude = uint32_t(k < 0 ? -k : k);
    const Number n = number ? rice_number(magnitude - 1, number - 1) : elias_number(magnitude);
    return n.size > 31 ? Word{0, LONG}
                       : Word{uint32_t(n.bits << 1 | (k < 0)), uint32_t(n.size + 1)};
  }

  // Four bits with their sign, as an index by uint8.
  static int low_nibble(int bits) { return (((bits & 15) ^ 8) - 8) & 255; }
};

inline const Tables& tables() {
  static const Tables made;
  return made;
}

}  // namespace
