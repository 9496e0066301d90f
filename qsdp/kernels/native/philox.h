// Philox4x32-7, as far as all its users share it: keys and counters, what is the same for a whole
// block, one number alone. The numbers of many values are drawn in random.h.

#pragma once

#include "types.h"

namespace {

constexpr uint32_t MULTIPLIERS[2] = {0xD2511F53, 0xCD9E8D57};
constexpr uint32_t ROUNDS = 7;  // [Note: rounds] in philox.py
constexpr uint32_t WEYL[2] = {0x9E3779B9, 0xBB67AE85};

struct PhiloxKey {
  uint32_t k0, k1;
};

struct Counter {
  uint32_t block, segment, row;
};

// Philox for one block as far as it is the same for all its values. In rounds 0 to 2 only some of
// the four words depend on the value's counter; what they are xored with is computed here, in the
// low halves of 64-bit words, and for the other rounds the keys.
struct BlockStream {
  uint64_t round0_c2, round1_c0, round1_c2, round2_c2;
  uint64_t k0[ROUNDS], k1[ROUNDS];

  void start(const Counter& at, const PhiloxKey& key) {
    for (uint32_t round = 0; round < ROUNDS; round++) {
      k0[round] = key.k0 + round * WEYL[0];
      k1[round] = key.k1 + round * WEYL[1];
    }
    const uint64_t round0_p1 = uint64_t(MULTIPLIERS[1]) * at.segment;
    const uint32_t round0_c0 = uint32_t(round0_p1 >> 32) ^ at.block ^ uint32_t(k0[0]);
    const uint64_t round1_p0 = uint64_t(MULTIPLIERS[0]) * round0_c0;
    round0_c2 = at.row ^ k1[0];
    round1_c0 = uint32_t(round0_p1) ^ k0[1];
    round1_c2 = (round1_p0 >> 32) ^ k1[1];
    round2_c2 = uint32_t(round1_p0) ^ k1[2];
  }
};

// Word 0 of Philox4x32-7 for the block's first counter; its low half is the block's random shift.
uint32_t philox_word0(const Counter& at, const PhiloxKey& key) {
  uint32_t c0 = 0, c1 = at.block, c2 = at.segment, c3 = at.row, k0 = key.k0, k1 = key.k1;
  for (uint32_t round = 0; round < ROUNDS; round++) {
    const uint64_t p0 = uint64_t(MULTIPLIERS[0]) * c0, p1 = uint64_t(MULTIPLIERS[1]) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1), c3 = uint32_t(p0);
    k0 += WEYL[0], k1 += WEYL[1];
  }
  return c0;
}

// Dither draws from what encoder and decoder both know of a block: what the wire holds of it, and
// who sent it, so that equal blocks of several ranks draw differently.
INLINE void start_dither(BlockStream& stream, const Span& span, uint32_t block, uint32_t segment,
                         uint32_t sender, float scale, float offset) {
  const uint32_t sent_offset = span.symmetric ? 0 : bit_cast<uint32_t>(offset);
  stream.start({block, segment, sender}, {bit_cast<uint32_t>(scale), sent_offset});
}

}  // namespace
