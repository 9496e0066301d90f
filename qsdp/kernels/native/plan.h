// How a block is quantized, from its extremes, and what the wire says about it: scale and offset.

#pragma once

#include "types.h"

namespace {

constexpr int META_ALIGNMENT = 4;
constexpr float HUGE_VALUE = 0x1p126f;
constexpr float TINY_RANGE = 0x1p-64f;

// What a block's values say about it. `content` is the sum of their float32 bit patterns.
struct Extremes {
  float lo, hi;
  uint32_t content;
  bool finite;
  float twice_mean = 0.0f;  // of [Note: mean scaling], where it is needed

  void join(const Extremes& other) {
    lo = other.lo < lo ? other.lo : lo, hi = other.hi > hi ? other.hi : hi;
    content += other.content, finite &= other.finite;
  }
};

// How a block is quantized (p, base, inverse) and what the wire says about it (scale, offset).
struct Plan {
  float p, base, inverse;
  float scale, offset;
  uint8_t limit;  // the highest code
};

INLINE float down_to_bfloat16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  return bit_cast<float>((x < 0.0f ? bits + 0xffff : bits) & 0xffff0000);
}
INLINE float up_to_bfloat16(float x) {  // x >= 0
  return bit_cast<float>((bit_cast<uint32_t>(x) + 0xffff) & 0xffff0000);
}

// Steps 2 and 5 of [Note: quantizing a block] in reference.py, as block_grid has them. `shift` is
// r, or negative for none.
INLINE Plan plan_block(const Extremes& x, const Span& span, int32_t shift) {
  const float top = float(span.steps);
  float lo = x.lo + 0.0f, hi = x.hi + 0.0f;
  if (span.symmetric) {
    hi = __builtin_fabsf(lo) > __builtin_fabsf(hi) ? __builtin_fabsf(lo) : __builtin_fabsf(hi);
    lo = -hi;
  }
  const bool extreme = __builtin_fabsf(lo) > HUGE_VALUE || __builtin_fabsf(hi) > HUGE_VALUE;
  if (extreme) lo *= 0.25f, hi *= 0.25f;
  if (span.short_meta && !span.symmetric) lo = down_to_bfloat16(lo);
  const float spread = hi - lo;
  const bool constant = spread == 0.0f;
  const bool huge = extreme && !constant, tiny = spread < TINY_RANGE && !constant;
  const float restored = extreme && constant ? 4.0f : tiny ? 1 / TINY_RANGE : 1.0f;
  Plan plan;
  plan.base = lo * restored;
  float dp = span.mean ? x.twice_mean : hi * restored - plan.base;
  float unit = dp / top;
  plan.scale = tiny ? unit * TINY_RANGE : unit;
  if (span.short_meta) {
    plan.scale = up_to_bfloat16(plan.scale);
    unit = tiny ? plan.scale * (1 / TINY_RANGE) : plan.scale;
    dp = unit * top;
    if (span.symmetric) plan.base = -(unit * (top * 0.5f));
  }
  plan.p = span.mean ? 1.0f : huge ? 0.25f : tiny ? 1 / TINY_RANGE : 1.0f;  // of signs, nothing
  plan.inverse = dp == 0.0f ? 0.0f : FRACTION * top / dp;
  plan.offset = tiny ? lo : plan.base;
  plan.limit = uint8_t(span.levels ? (1 << span.bits) - 1 : span.steps);
  if (shift >= 0) plan.offset = plan.offset + plan.scale * (float(65535 - 2 * shift) * 0x1p-17f);
  if (huge) plan.scale = -plan.scale;
  return plan;
}

// A block's scale and, unless it follows from the scale, its offset, as the wire has them.
INLINE int64_t meta_bytes(const Span& span) {
  return (span.symmetric ? 1 : 2) * (span.short_meta ? 2 : 4);
}

// Through words and not through an array: what was stored in parts must not be loaded as a whole
// at once, which waits for the stores.
INLINE void write_meta(const Span& span, float scale, float offset, uint8_t* meta) {
  const uint32_t s = bit_cast<uint32_t>(scale), o = bit_cast<uint32_t>(offset);
  if (span.short_meta) {
    const uint32_t pair = s >> 16 | (o & 0xffff0000);
    memcpy(meta, &pair, 2);
    if (!span.symmetric) memcpy(meta, &pair, 4);
  } else {
    const uint64_t pair = s | uint64_t(o) << 32;
    memcpy(meta, &pair, 4);
    if (!span.symmetric) memcpy(meta, &pair, 8);
  }
}

struct Meta {
  float scale, offset;

  INLINE Meta(const Span& span, const uint8_t* meta) {
    scale = number(span, meta, 0);
    offset = span.symmetric ? -(__builtin_fabsf(scale) * (float(span.steps) * 0.5f))
                            : number(span, meta, 1);
  }

  static INLINE float number(const Span& span, const uint8_t* meta, int which) {
    uint32_t word;
    uint16_t half;
    if (span.short_meta) {
      memcpy(&half, meta + 2 * which, sizeof half);
      return bit_cast<float>(uint32_t(half) << 16);
    }
    memcpy(&word, meta + 4 * which, sizeof word);
    return bit_cast<float>(word);
  }
};

}  // namespace
