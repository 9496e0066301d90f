// What cpu.cpp and all its parts share: layouts as cpu.py hands them over, the jobs made of them,
// sizes and numbers, small helpers. A rounding gets its number here; what it does is in encode.h
// and, where the decoder has to know, in decode.h.

#pragma once

#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))

namespace {

// Bumped whenever Span, Layout or a signature in cpu.cpp changes: cpu.py refuses a stale library.
constexpr int ABI = 9;

enum Dtype : int32_t { FLOAT32, BFLOAT16, FLOAT16 };
enum Rounding : int32_t { NEAREST, STOCHASTIC, SHIFT, DITHER };
constexpr int32_t TWO_NORM = 2;

// Span and Layout mirror the ctypes structures in cpu.py.
struct Span {
  int64_t numel, value_offset, meta_offset, data_offset;
  int64_t block_size;
  int32_t bits;        // 0: full precision
  int32_t rounding;
  int32_t steps;       // of the grid: L in reference.py
  int32_t symmetric;   // no offset on the wire; TWO_NORM: the scale follows from the norm
  int32_t short_meta;  // scales and offsets are bfloat16
  int32_t rotated;     // the transform: groups of ROTATION values
  int32_t mean;        // codes are signs, and the scale follows from the mean magnitude
  const float* levels;         // 2^bits numbers, or null for the uniform grid
  const int32_t* level_tree;   // thresholds as quantize_few_levels wants them, up to 4 bits
  const uint8_t* level_codes;  // the code of each of the 65537 positions, from 5 bits on
  int64_t map_offset;          // of the map of zeros; negative: there is none
};

struct Layout {
  const Span* spans;
  int64_t num_spans, numel, row_bytes, payload_bytes;
  int32_t dtype;  // of full-precision segments
};

// Mirrors of the ctypes structures in cpu_coded.py: a row's coded segments, and its other bytes.
struct CodedSpan {
  int64_t numel, block_size, data_offset;
  int32_t bits, coding;
};

struct CodedLayout {
  const CodedSpan* spans;
  const int64_t* places;  // pairs: where bytes that are not coded begin, and how many
  int64_t num_spans, num_places, num_blocks, plain_bytes;
};

// Rows in memory, of one or two leading dimensions; they count in row-major order. Steps are bytes.
template <class Byte>
struct Rows {
  Byte* start;
  int64_t inner, outer_step, inner_step;  // rows of the inner dimension, from row to row
  int64_t skipped = 0;                    // bytes before `start` that are not there

  // Offset from `start` of byte `byte` of a row.
  int64_t offset(int64_t row, int64_t byte) const {
    const int64_t outer = row < inner ? 0 : row / inner;
    return outer * outer_step + (row - outer * inner) * inner_step + byte - skipped;
  }
  Byte* at(int64_t row, int64_t byte) const { return start + offset(row, byte); }
};

struct EncodeJob {
  const Layout* layout;
  Rows<const char> values;
  Rows<uint8_t> wire;
  int64_t first_row;
  uint64_t key;
  int32_t dtype;
  uint32_t sender;  // of all rows: see start_dither
};

// Sums of `rows_per_output` rows each: decode has one row an output.
struct DecodeJob {
  const Layout* layout;
  Rows<const uint8_t> wire;
  Rows<char> out;
  int64_t rows_per_output;
  float multiply, divide;
  int32_t dtype;
  bool streaming;  // past the caches, where the output is float32
  bool plain;      // the output is float32, nothing is summed, multiplied or divided
  uint32_t first_sender, sender_step;  // of the rows

  // Full-precision segments keep their bits: nothing is computed.
  bool exact() const {
    return dtype == layout->dtype && rows_per_output == 1 && multiply == 1.0f && divide == 1.0f;
  }
};

// Of a part of a segment: what `stats` has of segments in changes.py.
struct Partial {
  int64_t segment = -1;
  double change = 0, values = 0, special = 0;
  uint64_t digest = 0;
};

// What one row's `values` differ by from what `kept` holds of them, encoded to `wire`.
struct ChangeJob {
  const Layout *layout, *kept_layout;
  const char* values;
  const uint8_t* kept;
  uint8_t* wire;
  Partial* partials;  // see changes.h
  int64_t first_row;
  uint64_t key;
  int32_t dtype;
  uint32_t sender;
};

// Rows of changes, added to what `kept` holds, encoded there, and what that holds then.
struct UpdateJob {
  const Layout *layout, *kept_layout;
  Rows<const uint8_t> wire;
  Rows<uint8_t> kept;
  Rows<char> values;
  int64_t total;  // values of all rows
  int32_t dtype;
  uint32_t first_sender, sender_step;
};

constexpr int CHUNK = 128;  // values quantized or unpacked together: one stretch of random bits
constexpr int TILE = 1024;  // values decoded together: their float32 sum stays in L1
constexpr int STAGE = 8192;  // values that go through decoding and what follows it while in L2

constexpr float FRACTION = 65536.0f;
constexpr float MAX_FLOAT = 0x1.fffffep127f;
constexpr uint32_t NAN_BITS = 0x7fc00000;

template <class To, class From>
INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

INLINE constexpr int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE constexpr int64_t maximum(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t item_size(int32_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

}  // namespace
