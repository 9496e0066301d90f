// Where the parts of a coded row lie, and what its headers say: qsdp/wire.py, kernels/coded.py.

#pragma once

#include "layout.h"

namespace {

constexpr int64_t LENGTH_BYTES = 8, HEADER_BYTES = 2, MAX_LENGTH = (1 << 14) - 1;
constexpr int64_t MAX_CODERS = 32;            // threads
constexpr int64_t CODER_GAP = 16;             // between what two threads write; in wire.py's slack
constexpr int64_t BLOCKS_PER_CODER = 32;      // below which a thread costs more than it saves

struct CompactJob {
  const CodedLayout* layout;
  const uint8_t* row;
  uint8_t* headers;
};

struct ExpandJob {
  const CodedLayout* layout;
  uint8_t* row;
  const uint8_t* headers;
  const uint8_t* end;  // of the coded row
};

inline int64_t coders(const CodedLayout& layout, int32_t threads) {
  const int64_t useful = minimum(threads, divide_up(layout.num_blocks, BLOCKS_PER_CODER));
  return maximum(1, minimum(useful, MAX_CODERS));
}

INLINE int64_t blocks_of(const CodedSpan& span) { return divide_up(span.numel, span.block_size); }

// Calls body(span, planes, block of the layout, values, byte of the row) for blocks `begin` to
// `end`, and after(), if there is one, while the planes of a span are still there.
template <class Body, class After>
INLINE void for_coded_blocks(const CodedLayout& layout, int64_t begin, int64_t end,
                             const Body& body, const After& after) {
  int64_t before = 0;
  for (int64_t i = 0; i < layout.num_spans && before < end; i++) {
    const CodedSpan& span = layout.spans[i];
    const int64_t count = blocks_of(span), size = span.block_size;
    const Planes full(span.bits, size), rest(span.bits, span.numel % size);
    for (int64_t k = maximum(begin - before, 0); k < minimum(end - before, count); k++) {
      const int64_t n = minimum(size, span.numel - k * size);
      body(span, n == size ? full : rest, before + k, n, span.data_offset + k * full.bytes);
    }
    after();
    before += count;
  }
}

template <class Body>
INLINE void for_coded_blocks(const CodedLayout& layout, int64_t begin, int64_t end,
                             const Body& body) {
  for_coded_blocks(layout, begin, end, body, [] {});
}

// Bytes of the packed codes of the first blocks.
inline int64_t fixed_bytes(const CodedLayout& layout, int64_t blocks) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < layout.num_spans && blocks > 0; i++) {
    const CodedSpan& span = layout.spans[i];
    const int64_t full = minimum(blocks, span.numel / span.block_size);
    bytes += full * Planes(span.bits, span.block_size).bytes;
    if (blocks > full) bytes += Planes(span.bits, span.numel % span.block_size).bytes;
    blocks -= blocks_of(span);
  }
  return bytes;
}

inline uint8_t* copy_plain(const CodedLayout& layout, const uint8_t* row, uint8_t* to) {
  for (int64_t i = 0; i < layout.num_places; i++) {
    const int64_t size = layout.places[2 * i + 1];
    memcpy(to, row + layout.places[2 * i], size_t(size));
    to += size;
  }
  return to;
}

inline void paste_plain(const CodedLayout& layout, const uint8_t* from, uint8_t* row) {
  for (int64_t i = 0; i < layout.num_places; i++) {
    const int64_t size = layout.places[2 * i + 1];
    memcpy(row + layout.places[2 * i], from, size_t(size));
    from += size;
  }
}

INLINE uint16_t header_at(const uint8_t* headers, int64_t block) {
  uint16_t word;
  memcpy(&word, headers + HEADER_BYTES * block, sizeof word);
  return word;
}

// Whether a row's lengths are as they should be; and where the streams of each of `parts` begin.
inline bool read_lengths(const CodedLayout& layout, const uint8_t* coded, int64_t length,
                         int64_t parts, int64_t* begins) {
  int64_t said = 0;
  const int64_t before = LENGTH_BYTES + layout.plain_bytes + HEADER_BYTES * layout.num_blocks;
  if (length < before) return false;
  memcpy(&said, coded, LENGTH_BYTES);
  if (said != length) return false;
  const uint8_t* const headers = coded + LENGTH_BYTES + layout.plain_bytes;
  int64_t at = 0, part = 0;
  bool good = true;
  for_coded_blocks(layout, 0, layout.num_blocks,
                   [&](const CodedSpan&, const Planes& planes, int64_t block, int64_t, int64_t) {
    while (part < parts && block == layout.num_blocks * part / parts) begins[part++] = at;
    const uint16_t word = header_at(headers, block);
    const int64_t size = word & MAX_LENGTH;
    if (word >> 14 == 0)
      good &= size == 0, at += planes.bytes;
    else
      good &= word >> 14 < 3 && size < planes.bytes, at += size;
  });
  return good && before + at == length;
}

}  // namespace
