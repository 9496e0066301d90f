// What follows from a layout: where the bits of a block's codes lie, and which blocks are whose.

#pragma once

#include "types.h"

namespace {

constexpr int MAX_PLANES = 3;

// The bit planes of a block's packed codes, lowest bits first: see qsdp/wire.py.
struct Planes {
  int count = 0;
  int width[MAX_PLANES], shift[MAX_PLANES];
  int64_t start[MAX_PLANES];  // byte of the block's codes at which the plane starts
  int64_t bytes = 0;          // of all planes

  Planes(int bits, int64_t numel) {
    int at = 0;
    for (int w = 8; w; w >>= 1) {
      if (!(bits & w)) continue;
      width[count] = w, shift[count] = at, start[count] = bytes;
      bytes += divide_up(numel * w, 8);
      at += w;
      count++;
    }
  }
};

// Calls body(row, span index, first block, last block) for all blocks whose first value has its
// flat index (row * numel + value) in [begin, end): every block falls into one thread's range.
// A full-precision segment counts as blocks of one value.
template <class Body>
INLINE void for_blocks(const Layout& layout, int64_t begin, int64_t end, const Body& body) {
  for (int64_t row = begin / layout.numel; row * layout.numel < end; row++) {
    const int64_t from = maximum(begin - row * layout.numel, 0);
    const int64_t to = minimum(end - row * layout.numel, layout.numel);
    for (int64_t i = 0; i < layout.num_spans; i++) {
      const Span& span = layout.spans[i];
      if (span.value_offset + span.numel <= from) continue;
      if (span.value_offset >= to) break;
      const int64_t size = span.bits ? span.block_size : 1;
      const int64_t first = divide_up(maximum(from - span.value_offset, 0), size);
      const int64_t last = divide_up(minimum(to - span.value_offset, span.numel), size);
      if (first < last) body(row, i, first, last);
    }
  }
}

// After how many values blocks of both begin, in two layouts of one segment.
INLINE int64_t joint_block(const Span& a, const Span& b) {
  const int64_t one = a.bits ? a.block_size : 1, other = b.bits ? b.block_size : 1;
  int64_t divisor = one, rest = other % one;
  while (rest) {
    const int64_t next = divisor % rest;
    divisor = rest, rest = next;
  }
  return one / divisor * other;
}

// Values of the longest of these, and at least 1.
inline int64_t longest_joint_block(const Layout& a, const Layout& b) {
  int64_t longest = 1;
  for (int64_t i = 0; i < a.num_spans; i++)
    longest = maximum(longest, minimum(joint_block(a.spans[i], b.spans[i]), a.spans[i].numel));
  return longest;
}

}  // namespace
