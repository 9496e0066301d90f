// Which groups of values are all zero: the map of zeros in qsdp/wire.py. Written once for all
// instruction sets: it is as fast as memory.

#pragma once

#include "types.h"

namespace {

constexpr int ZERO_GROUP = 32;  // values that share a bit

// Bits of eight groups from value `at` on. Zeros of both signs count, so the sign bit does not.
template <class Word>
uint8_t zero_groups(const Word* x, int64_t at, int64_t numel) {
  constexpr Word MAGNITUDE = Word(~Word(0)) >> 1;
  uint8_t bits = 0;
  for (int group = 0; group < 8 && at < numel; group++, at += ZERO_GROUP) {
    Word any = 0;
    if (at + ZERO_GROUP <= numel)
      for (int i = 0; i < ZERO_GROUP; i++) any |= x[at + i];
    else
      for (int64_t i = at; i < numel; i++) any |= x[i];
    bits |= uint8_t((any & MAGNITUDE) == 0) << group;
  }
  return bits;
}

template <class Word>
void map_zeros(const Word* x, int64_t numel, uint8_t* map, int threads) {
  const int64_t bytes = divide_up(numel, 8 * ZERO_GROUP);
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (threads > 1 && bytes > 256)
#endif
  for (int64_t i = 0; i < bytes; i++) map[i] = zero_groups(x, 8 * ZERO_GROUP * i, numel);
  (void)threads;
}

}  // namespace
