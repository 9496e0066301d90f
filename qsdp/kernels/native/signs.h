// The signs that the rotation multiplies with, ready to be loaded as vectors.

#pragma once

#include "types.h"

namespace {

constexpr int ROTATION = 32;  // values of a segment that are rotated together

// What is multiplied with in qsdp/kernels/transform.py, whose SIGN_BITS these are; `of` starts at
// the first value of a rotated group.
struct Signs {
  float of[ROTATION];

  constexpr explicit Signs(float magnitude) : of{} {
    for (int i = 0; i < ROTATION; i++)
      of[i] = 0x6627e8d5u >> i & 1 ? -magnitude : magnitude;
  }
};

alignas(64) constexpr Signs SIGNS(1.0f), SCALED_SIGNS(1.0f / ROTATION);

// 1 in the lanes whose bit `distance` is clear, -1 in the others.
struct PairSigns {
  float of[16];

  constexpr explicit PairSigns(int distance) : of{} {
    for (int i = 0; i < 16; i++) of[i] = i & distance ? -1.0f : 1.0f;
  }
};

template <int DISTANCE>
alignas(64) constexpr PairSigns PAIR_SIGNS(DISTANCE);

}  // namespace
