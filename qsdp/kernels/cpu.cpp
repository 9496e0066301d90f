// The native CPU backend: encode, decode and decode_sum of qsdp/kernels/reference.py, same bytes.
//
// A plain C interface on raw pointers: no torch headers, no allocation, no exceptions. The file
// includes itself once per instruction set (see the end); the fastest one that the machine runs is
// chosen at the first call. Between "once per instruction set" and the end of that part everything
// is written once, for vectors of LANES 32-bit lanes, on a dozen primitives.
//
// Arithmetic is float32 with one rounding an operation, as the reference says: build it with
// -ffp-contract=off and never with -ffast-math (qsdp/kernels/build.py does).

#ifndef QSDP_LANES  // ------------------------------------------------------- shared declarations

#include <cstdint>
#include <cstring>
#include <memory>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

// Bumped whenever a struct or a signature below changes: cpu.py refuses a stale library.
constexpr int ABI = 4;

enum Dtype : int32_t { FLOAT32, BFLOAT16, FLOAT16 };
enum Rounding : int32_t { NEAREST, STOCHASTIC, SHIFT, DITHER };

// The types from here to DecodeJob mirror the ctypes structures in cpu.py.
struct Span {
  int64_t numel, value_offset, meta_offset, data_offset;
  int64_t block_size;
  int32_t bits;  // 0: full precision
  int32_t rounding;
  int32_t steps;      // of the grid: L in reference.py
  int32_t symmetric;  // no offset on the wire
  int32_t short_meta;  // scales and offsets are bfloat16
  int32_t rotated;    // the transform: groups of ROTATION values
  const float* levels;         // 2^bits numbers, or null for the uniform grid
  const int32_t* level_tree;   // thresholds as quantize_few_levels wants them, up to 4 bits
  const uint8_t* level_codes;  // the code of each of the 65537 positions, from 5 bits on
};

struct Layout {
  const Span* spans;
  int64_t num_spans, numel, row_bytes, payload_bytes;
  int32_t dtype;  // of full-precision segments
};

struct EncodeJob {
  const Layout* layout;
  const char* values;
  uint8_t* wire;
  int64_t num_rows, first_row;
  uint64_t key;
  int32_t dtype;
};

// `num_outputs` sums of `rows_per_output` rows each: decode has one row an output.
struct DecodeJob {
  const Layout* layout;
  const uint8_t* wire;
  char* out;
  int64_t num_outputs, rows_per_output;
  float multiply, divide;
  int32_t dtype;
  bool streaming;  // past the caches, where the output is float32
  bool plain;      // the output is float32, nothing is summed, multiplied or divided
  int64_t first = 0;  // flat index of the value that `out` starts with
};

// Values, what `before` holds of them added; encoded to `wire`, and what that holds of them.
struct AccumulateJob {
  const Layout* layout;
  char* values;
  const uint8_t* before;
  uint8_t* wire;
  int64_t num_rows;
  int32_t dtype;
};

constexpr int CHUNK = 128;   // values quantized or unpacked together: one stretch of random bits
constexpr int TILE = 1024;   // values decoded together: their float32 sum stays in L1
constexpr int STAGE = 8192;  // values that go through decoding, adding, encoding while in L2
constexpr int ROTATION = 32;    // values of a segment that are rotated together
constexpr int ROTATED = 4096;   // rotated values of a block that are kept: 16 KiB, half of an L1
constexpr int META_ALIGNMENT = 4;
constexpr int MAX_PLANES = 3;
constexpr int BATCH = 8;    // blocks that go through a kernel stage by stage: none waits for another
constexpr int MAX_TREE_BITS = 4;  // 8 nodes at the last depth: one vector of AVX2

constexpr float HUGE_VALUE = 0x1p126f;
constexpr float TINY_RANGE = 0x1p-64f;
constexpr float FRACTION = 65536.0f;
constexpr float MAX_FLOAT = 0x1.fffffep127f;
constexpr uint32_t NAN_BITS = 0x7fc00000;

constexpr uint32_t MULTIPLIERS[2] = {0xD2511F53, 0xCD9E8D57};
constexpr uint32_t WEYL[2] = {0x9E3779B9, 0xBB67AE85};

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
  uint64_t k0[10], k1[10];

  void start(const Counter& at, const PhiloxKey& key) {
    for (uint32_t round = 0; round < 10; round++) {
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

// Word 0 of Philox4x32-10 for the block's first counter; its low half is the block's random shift.
uint32_t philox_word0(const Counter& at, const PhiloxKey& key) {
  uint32_t c0 = 0, c1 = at.block, c2 = at.segment, c3 = at.row, k0 = key.k0, k1 = key.k1;
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = uint64_t(MULTIPLIERS[0]) * c0, p1 = uint64_t(MULTIPLIERS[1]) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1), c3 = uint32_t(p0);
    k0 += WEYL[0], k1 += WEYL[1];
  }
  return c0;
}

// What a block's values say about it. `content` is the sum of their float32 bit patterns.
struct Extremes {
  float lo, hi;
  uint32_t content;
  bool finite;

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
  float dp = hi * restored - plan.base;
  float unit = dp / top;
  plan.scale = tiny ? unit * TINY_RANGE : unit;
  if (span.short_meta) {
    plan.scale = up_to_bfloat16(plan.scale);
    unit = tiny ? plan.scale * (1 / TINY_RANGE) : plan.scale;
    dp = unit * top;
    if (span.symmetric) plan.base = -(unit * (top * 0.5f));
  }
  plan.p = huge ? 0.25f : tiny ? 1 / TINY_RANGE : 1.0f;
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

// Dither draws from what encoder and decoder both know of a block: the row is not part of it.
INLINE void start_dither(BlockStream& stream, const Span& span, uint32_t block, uint32_t segment,
                         float scale, float offset) {
  const uint32_t sent_offset = span.symmetric ? 0 : bit_cast<uint32_t>(offset);
  stream.start({block, segment, 0}, {bit_cast<uint32_t>(scale), sent_offset});
}

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

}  // namespace

// ------------------------------------------------------------------ the instruction sets, by width

#define QSDP_LANES 4
#define QSDP_NAMESPACE baseline
#include "cpu.cpp"
#undef QSDP_LANES
#undef QSDP_NAMESPACE

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
#define QSDP_LANES 8
#define QSDP_NAMESPACE avx2
#include "cpu.cpp"
#undef QSDP_LANES
#undef QSDP_NAMESPACE
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push( \
    __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define QSDP_LANES 16
#define QSDP_NAMESPACE avx512
#include "cpu.cpp"
#undef QSDP_LANES
#undef QSDP_NAMESPACE
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__

#define QSDP_LANES 0  // the guard of the shared part stays closed

// --------------------------------------------------------------------------------- the interface

namespace {

struct Isa {
  const char* name;
  bool (*supported)();
  void (*encode)(const EncodeJob&, int64_t begin, int64_t end);
  void (*decode)(const DecodeJob&, int64_t begin, int64_t end);
  void (*accumulate)(const AccumulateJob&, int64_t begin, int64_t end);
};

bool always() { return true; }

#if defined(__x86_64__)
bool has_avx2() {
  unsigned a, b, c = 0, d;
  return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Best first.
const Isa ISAS[] = {
#if defined(__x86_64__)
    {"avx512", has_avx512, avx512::encode, avx512::decode, avx512::accumulate},
    {"avx2", has_avx2, avx2::encode, avx2::decode, avx2::accumulate},
#endif
    {"baseline", always, baseline::encode, baseline::decode, baseline::accumulate},
};

const Isa* forced = nullptr;

const Isa& isa() {
  if (forced) return *forced;
  static const Isa* const best = [] {
    const Isa* found = ISAS;
    while (!found->supported()) found++;
    return found;
  }();
  return *best;
}

// Below this many values a thread costs more than it saves.
constexpr int64_t VALUES_PER_THREAD = 16384;

// From here on the output is larger than what the caches keep for its reader anyway, and stores
// that bypass them save the read of every line before it is overwritten.
constexpr int64_t STREAMING_BYTES = 4 << 20;

template <class Job>
void run(void (*kernel)(const Job&, int64_t, int64_t), const Job& job, int64_t total, int threads) {
  if (total == 0) return;  // no values: only padding, which the caller has written
  const int64_t useful = minimum(threads, divide_up(total, VALUES_PER_THREAD));
#ifdef _OPENMP
  if (useful > 1) {
#pragma omp parallel num_threads(int(useful))
    {
      const int64_t me = omp_get_thread_num(), count = omp_get_num_threads();
      kernel(job, total * me / count, total * (me + 1) / count);
    }
    return;
  }
#endif
  (void)useful;
  kernel(job, 0, total);
}

}  // namespace

extern "C" {

int qsdp_abi() { return ABI; }

const char* qsdp_isa() { return isa().name; }

// Use the named instruction set from now on, or the best one for null. 0 if this machine runs it.
int qsdp_set_isa(const char* name) {
  if (!name) {
    forced = nullptr;
    return 0;
  }
  for (const Isa& candidate : ISAS) {
    if (!strcmp(candidate.name, name) && candidate.supported()) {
      forced = &candidate;
      return 0;
    }
  }
  return 1;
}

void qsdp_encode(const Layout* layout, const char* values, uint8_t* wire, int64_t num_rows,
                 int64_t first_row, uint64_t key, int32_t dtype, int32_t threads) {
  const int64_t rest = layout->row_bytes - layout->payload_bytes;
  for (int64_t row = 0; rest && row < num_rows; row++)
    memset(wire + row * layout->row_bytes + layout->payload_bytes, 0, size_t(rest));
  const EncodeJob job{layout, values, wire, num_rows, first_row, key, dtype};
  run(isa().encode, job, num_rows * layout->numel, threads);
}

// decode: num_outputs rows of one row each. decode_sum: one output of rows_per_output rows.
void qsdp_decode(const Layout* layout, const uint8_t* wire, char* out, int64_t num_outputs,
                 int64_t rows_per_output, float multiply, float divide, int32_t dtype,
                 int32_t threads) {
  const int64_t total = num_outputs * layout->numel;
  const bool streaming = total * item_size(dtype) >= STREAMING_BYTES;
  const bool plain =
      dtype == FLOAT32 && rows_per_output == 1 && multiply == 1.0f && divide == 1.0f;
  const DecodeJob job{layout,   wire,   out,   num_outputs, rows_per_output,
                      multiply, divide, dtype, streaming,   plain};
  run(isa().decode, job, total, threads);
}

void qsdp_accumulate(const Layout* layout, char* values, const uint8_t* before, uint8_t* wire,
                     int64_t num_rows, int32_t dtype, int32_t threads) {
  const int64_t rest = layout->row_bytes - layout->payload_bytes;
  for (int64_t row = 0; rest && row < num_rows; row++)
    memset(wire + row * layout->row_bytes + layout->payload_bytes, 0, size_t(rest));
  const AccumulateJob job{layout, values, before, wire, num_rows, dtype};
  run(isa().accumulate, job, num_rows * layout->numel, threads);
}

}  // extern "C"

#elif QSDP_LANES > 0  // ------------------------------------------------ once per instruction set

namespace {
namespace QSDP_NAMESPACE {

constexpr int LANES = QSDP_LANES;
constexpr int GROUP = 4 * LANES;  // values narrowed to bytes together
constexpr int CHAINS = LANES == 8 ? 2 : 4;  // Philox vectors in flight: one would wait for itself
constexpr int REFILL = maximum(CHUNK, 8 * CHAINS * LANES / 2);  // values served by one refill
static_assert(REFILL == CHUNK || 8 * CHAINS / 2 * LANES / 2 == CHUNK, "half the chains: a chunk");

typedef float Floats __attribute__((vector_size(4 * QSDP_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * QSDP_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * QSDP_LANES)));
typedef uint64_t Longs __attribute__((vector_size(4 * QSDP_LANES)));

template <class V>
INLINE V load(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

template <class V>
INLINE void store(void* to, V v) {
  __builtin_memcpy(to, &v, sizeof(V));
}

// Joins the lanes of a vector, in a tree: in a chain, every block would wait for it.
template <class V, class Join>
INLINE auto reduce(V v, const Join& join) -> decltype(v[0] + v[0]) {
  typedef decltype(v[0] + v[0]) Lane;
  typedef Lane Quarter __attribute__((vector_size(16)));
  const char* lanes = reinterpret_cast<const char*>(&v);
  Quarter four = load<Quarter>(lanes);
  for (int i = 1; i < LANES / 4; i++) four = join(four, load<Quarter>(lanes + 16 * i));
  return join(join(four[0], four[2]), join(four[1], four[3]));
}

INLINE Floats all(float x) { return x - Floats{}; }  // x - 0.0 keeps even -0.0, unlike x + 0.0
INLINE Words all(uint32_t x) { return x + Words{}; }

// Primitives. smaller(a, b) is a < b ? a : b and greater(a, b) is a > b ? a : b, so a NaN in `b`
// stays. round_to_int rounds half to even. multiply_low multiplies the low halves of 64-bit lanes,
// interleave puts the low halves of `odd` between those of `even`.
// lookup reads a table of up to 8. witness is NaN or infinite if `a`, `b` or `seen` is. add_exact
// is a * b + c for an exact a * b, so that it may be fused. swap<D> exchanges the lanes D apart.

#if QSDP_LANES == 16

INLINE Floats smaller(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
INLINE Floats greater(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE Ints round_to_int(Floats x) { return (Ints)_mm512_cvtps_epi32((__m512)x); }
INLINE Floats witness(Floats a, Floats b, Floats seen) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)seen);
}
INLINE Floats add_exact(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
template <int DISTANCE>
INLINE Floats swap(Floats x) {
  constexpr int ODD = 0xb1, HALF = 0x4e;  // of every four: 1 0 3 2, and 2 3 0 1
  if constexpr (DISTANCE <= 2)
    return (Floats)_mm512_permute_ps((__m512)x, DISTANCE == 1 ? ODD : HALF);
  else
    return (Floats)_mm512_shuffle_f32x4((__m512)x, (__m512)x, DISTANCE == 4 ? ODD : HALF);
}
INLINE Ints lookup(const int32_t* table, Ints index) {
  return (Ints)_mm512_permutexvar_epi32((__m512i)index, load<__m512i>(table));
}
INLINE Longs multiply_low(Longs a, Longs b) {
  return (Longs)_mm512_mul_epu32((__m512i)a, (__m512i)b);
}
INLINE Longs xor3(Longs a, Longs b, Longs c) {
  return (Longs)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
}
INLINE Words interleave(Longs even, Longs odd) {
  return (Words)_mm512_mask_shuffle_epi32((__m512i)even, 0xaaaa, (__m512i)odd, _MM_PERM_CCAA);
}
INLINE void narrow_to_bytes(const Ints v[4], uint8_t limit, uint8_t* to) {
  const __m512i a = _mm512_packus_epi32((__m512i)v[0], (__m512i)v[1]);
  const __m512i b = _mm512_packus_epi32((__m512i)v[2], (__m512i)v[3]);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_min_epu8(_mm512_packus_epi16(a, b), _mm512_set1_epi8(char(limit)));
  store(to, _mm512_permutexvar_epi32(order, bytes));
}
INLINE Ints widen_bytes(const uint8_t* from) {
  return (Ints)_mm512_cvtepu8_epi32(load<__m128i>(from));
}
INLINE Words widen_halves(const char* from) {
  return (Words)_mm512_cvtepu16_epi32(load<__m256i>(from));
}
INLINE void narrow_to_halves(Words v, char* to) {
  store(to, _mm512_cvtepi32_epi16((__m512i)v));
}
INLINE Floats float16_to_float(const char* from) {
  return (Floats)_mm512_cvtph_ps(load<__m256i>(from));
}
INLINE void float_to_float16(Floats x, char* to) {
  store(to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE void stream(char* to, Floats x) { _mm512_stream_ps((float*)to, (__m512)x); }

#elif QSDP_LANES == 8

INLINE Floats smaller(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }
INLINE Floats greater(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE Ints round_to_int(Floats x) { return (Ints)_mm256_cvtps_epi32((__m256)x); }
INLINE Floats witness(Floats a, Floats b, Floats seen) { return seen + a + b; }
INLINE Floats add_exact(Floats a, Floats b, Floats c) { return a * b + c; }
template <int DISTANCE>
INLINE Floats swap(Floats x) {
  if constexpr (DISTANCE <= 2)
    return (Floats)_mm256_permute_ps((__m256)x, DISTANCE == 1 ? 0xb1 : 0x4e);
  else
    return (Floats)_mm256_permute2f128_ps((__m256)x, (__m256)x, 1);
}
INLINE Ints lookup(const int32_t* table, Ints index) {
  return (Ints)_mm256_permutevar8x32_epi32(load<__m256i>(table), (__m256i)index);
}
INLINE Longs multiply_low(Longs a, Longs b) {
  return (Longs)_mm256_mul_epu32((__m256i)a, (__m256i)b);
}
INLINE Longs xor3(Longs a, Longs b, Longs c) { return a ^ b ^ c; }
INLINE Words interleave(Longs even, Longs odd) {
  return (Words)_mm256_blend_epi32((__m256i)even, _mm256_slli_epi64((__m256i)odd, 32), 0xaa);
}
INLINE void narrow_to_bytes(const Ints v[4], uint8_t limit, uint8_t* to) {
  const __m256i a = _mm256_packus_epi32((__m256i)v[0], (__m256i)v[1]);
  const __m256i b = _mm256_packus_epi32((__m256i)v[2], (__m256i)v[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_min_epu8(_mm256_packus_epi16(a, b), _mm256_set1_epi8(char(limit)));
  store(to, _mm256_permutevar8x32_epi32(bytes, order));
}
INLINE Ints widen_bytes(const uint8_t* from) {
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
}
INLINE Words widen_halves(const char* from) {
  return (Words)_mm256_cvtepu16_epi32(load<__m128i>(from));
}
INLINE void narrow_to_halves(Words v, char* to) {
  const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  store(to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}
INLINE Floats float16_to_float(const char* from) {
  return (Floats)_mm256_cvtph_ps(load<__m128i>(from));
}
INLINE void float_to_float16(Floats x, char* to) {
  store(to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE void stream(char* to, Floats x) { _mm256_stream_ps((float*)to, (__m256)x); }

#else  // any machine, through the compiler's vectors

INLINE Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
INLINE Floats greater(Floats a, Floats b) { return a > b ? a : b; }
INLINE Floats witness(Floats a, Floats b, Floats seen) { return seen + a + b; }
INLINE Floats add_exact(Floats a, Floats b, Floats c) { return a * b + c; }
#if defined(__x86_64__)
template <int DISTANCE>
INLINE Floats swap(Floats x) {
  return (Floats)_mm_shuffle_ps((__m128)x, (__m128)x, DISTANCE == 1 ? 0xb1 : 0x4e);
}
#else
template <int DISTANCE>
INLINE Floats swap(Floats x) {
  return Floats{x[DISTANCE], x[1 ^ DISTANCE], x[2 ^ DISTANCE], x[3 ^ DISTANCE]};
}
#endif
INLINE Ints lookup(const int32_t* table, Ints index) {
  return Ints{table[index[0]], table[index[1]], table[index[2]], table[index[3]]};
}
INLINE Longs xor3(Longs a, Longs b, Longs c) { return a ^ b ^ c; }
INLINE Words interleave(Longs even, Longs odd) {
  return (Words)((even & 0xffffffff) | odd << 32);
}
#if defined(__x86_64__)
INLINE Ints round_to_int(Floats x) { return (Ints)_mm_cvtps_epi32((__m128)x); }
INLINE Longs multiply_low(Longs a, Longs b) { return (Longs)_mm_mul_epu32((__m128i)a, (__m128i)b); }
INLINE void stream(char* to, Floats x) { _mm_stream_ps((float*)to, (__m128)x); }
#else
INLINE Ints round_to_int(Floats x) {  // 0 <= x <= 2^24; from 2^23 on every float is an integer
  const Floats magic = all(0x1p23f);
  return __builtin_convertvector(x < magic ? (x + magic) - magic : x, Ints);
}
INLINE Longs multiply_low(Longs a, Longs b) { return (a & 0xffffffff) * (b & 0xffffffff); }
INLINE void stream(char* to, Floats x) { store(to, x); }
#endif
#if defined(__x86_64__)
INLINE void narrow_to_bytes(const Ints v[4], uint8_t limit, uint8_t* to) {
  const __m128i a = _mm_packs_epi32((__m128i)v[0], (__m128i)v[1]);
  const __m128i b = _mm_packs_epi32((__m128i)v[2], (__m128i)v[3]);
  store(to, _mm_min_epu8(_mm_packus_epi16(a, b), _mm_set1_epi8(char(limit))));
}
#else
INLINE void narrow_to_bytes(const Ints v[4], uint8_t limit, uint8_t* to) {
  for (int i = 0; i < GROUP; i++)
    to[i] = uint8_t(maximum(0, minimum(v[i / LANES][i % LANES], limit)));
}
#endif
INLINE Ints widen_bytes(const uint8_t* from) {
  return Ints{from[0], from[1], from[2], from[3]};
}
INLINE Words widen_halves(const char* from) {
  uint16_t half[LANES];
  memcpy(half, from, sizeof half);
  return Words{half[0], half[1], half[2], half[3]};
}
INLINE void narrow_to_halves(Words v, char* to) {
  const uint16_t half[LANES] = {uint16_t(v[0]), uint16_t(v[1]), uint16_t(v[2]), uint16_t(v[3])};
  memcpy(to, half, sizeof half);
}
INLINE Floats float16_to_float(const char* from) {
  const Words half = widen_halves(from), sign = (half & 0x8000) << 16;
  const Words magnitude = (half & 0x7fff) << 13, exponent = magnitude & 0x0f800000;
  const Words rebias = magnitude + (112u << 23);
  const Words denormal = (Words)((Floats)(rebias + (1u << 23)) - all(0x1p-14f));
  const Words special = rebias + (112u << 23);
  const Words bits = exponent == 0x0f800000 ? special : exponent == 0 ? denormal : rebias;
  return (Floats)(bits | sign);
}
INLINE void float_to_float16(Floats x, char* to) {
  const Words bits = (Words)x, magnitude = bits & 0x7fffffff, sign = (bits ^ magnitude) >> 16;
  // Adding 0.5 to a value below 2^-14 leaves the float16 denormal, rounded, in the lowest bits.
  const Words denormal = (Words)((Floats)magnitude + all(0.5f)) - 0x3f000000;
  const Words normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const Words finite = magnitude < 0x38800000 ? denormal : normal;
  const Words special = magnitude > 0x7f800000 ? all(0x7e00u) : all(0x7c00u);
  narrow_to_halves((magnitude < 0x47800000 ? finite : special) | sign, to);
}

#endif

// The value types: a vector of float32 from and to memory, rounded as torch rounds.

struct Float32 {
  static constexpr int SIZE = 4;
  static INLINE Floats get(const char* from) { return load<Floats>(from); }
  static INLINE void put(Floats x, char* to) { store(to, x); }
};

struct Bfloat16 {
  static constexpr int SIZE = 2;
  static INLINE Floats get(const char* from) { return (Floats)(widen_halves(from) << 16); }
  static INLINE void put(Floats x, char* to) {
    const Words bits = (Words)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    narrow_to_halves(x == x ? rounded : all(NAN_BITS >> 16), to);
  }
};

struct Float16 {
  static constexpr int SIZE = 2;
  static INLINE Floats get(const char* from) { return float16_to_float(from); }
  static INLINE void put(Floats x, char* to) { float_to_float16(x, to); }
};

// -------------------------------------------------------------------------------------- rotation

constexpr int ROTATION_VECTORS = ROTATION / LANES;

// At distance D of values in one vector, or of vectors, each pair becomes its sum and difference.
template <int DISTANCE>
INLINE void butterflies(Floats v[ROTATION_VECTORS]) {
  if constexpr (DISTANCE < LANES) {
    for (int i = 0; i < ROTATION_VECTORS; i++)
      v[i] = add_exact(v[i], load<Floats>(PAIR_SIGNS<DISTANCE>.of), swap<DISTANCE>(v[i]));
  } else {
    constexpr int APART = DISTANCE / LANES;
    for (int i = 0; i < ROTATION_VECTORS; i++) {
      if (i & APART) continue;
      const Floats a = v[i], b = v[i + APART];
      v[i] = a + b, v[i + APART] = a - b;
    }
  }
}

INLINE void butterflies(Floats v[ROTATION_VECTORS]) {
  butterflies<1>(v), butterflies<2>(v), butterflies<4>(v), butterflies<8>(v), butterflies<16>(v);
}

// The inverse of the rotation.
INLINE void rotate_back(Floats v[ROTATION_VECTORS]) {
  butterflies(v);
  for (int i = 0; i < ROTATION_VECTORS; i++) v[i] *= load<Floats>(SIGNS.of + i * LANES);
}

// ------------------------------------------------------------------------------------ bit planes

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

// ---------------------------------------------------------------------------------------- encode

// Copies `n` < `capacity` values and zeros behind them.
template <class T>
INLINE const char* pad(const char* x, int64_t n, char* padded, int64_t capacity) {
  memcpy(padded, x, size_t(n * T::SIZE));
  memset(padded + n * T::SIZE, 0, size_t((capacity - n) * T::SIZE));
  return padded;
}

// The same with the values themselves, again and again: they lie on the block's grid.
template <class T>
INLINE const char* repeat(const char* x, int64_t n, char* padded, int64_t capacity) {
  memcpy(padded, x, size_t(n * T::SIZE));
  for (int64_t filled = n; filled < capacity; filled *= 2)
    memcpy(padded + filled * T::SIZE, padded,
           size_t(minimum(filled, capacity - filled) * T::SIZE));
  return padded;
}

template <class T>
bool all_finite(const char* x, int64_t n) {
  Ints special = {};
  char padded[LANES * T::SIZE];
  for (int64_t i = 0; i < n; i += LANES) {
    const char* from = x + i * T::SIZE;
    if (n - i < LANES) from = pad<T>(from, n - i, padded, LANES);
    special |= ((Words)T::get(from) & 0x7f800000) == 0x7f800000;
  }
  int32_t any = 0;
  for (int i = 0; i < LANES; i++) any |= special[i];
  return !any;
}

// Running extremes, witness and content of the vectors seen.
template <bool CONTENT>
struct Scan {
  Floats lo, hi, seen = {};
  Words content = {};

  explicit Scan(Floats first) : lo(first), hi(first) {}

  INLINE void add(Floats x) {
    lo = smaller(x, lo), hi = greater(x, hi);
    if (CONTENT) content += (Words)x;
  }

  INLINE void join(const Scan& other) {
    lo = smaller(other.lo, lo), hi = greater(other.hi, hi);
    seen += other.seen, content += other.content;
  }
};

// Extremes of `n` values; their content only if CONTENT. A NaN or infinity shows in the witness; so
// may an overflow of the witness alone, and then all_finite decides.
template <bool CONTENT, class T>
INLINE Extremes scan(const char* x, int64_t n) {
  constexpr int VECTOR = LANES * T::SIZE;
  float lo = __builtin_inff(), hi = -__builtin_inff(), sum = 0.0f;
  uint32_t content = 0;
  int64_t i = 0;
  if (n >= LANES) {
    Scan<CONTENT> even(T::get(x)), odd = even;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
      const char* from = x + i * T::SIZE;
      const Floats a = T::get(from), b = T::get(from + VECTOR);
      const Floats c = T::get(from + 2 * VECTOR), d = T::get(from + 3 * VECTOR);
      even.add(a), odd.add(b), even.add(c), odd.add(d);
      even.seen = witness(a, b, even.seen), odd.seen = witness(c, d, odd.seen);
    }
    for (; i + LANES <= n; i += LANES) {
      const Floats a = T::get(x + i * T::SIZE);
      even.add(a);
      even.seen = witness(a, a, even.seen);
    }
    even.join(odd);
    lo = reduce(even.lo, [](auto a, auto b) { return a < b ? a : b; });
    hi = reduce(even.hi, [](auto a, auto b) { return a > b ? a : b; });
    sum = reduce(even.seen, [](auto a, auto b) { return a + b; });
    content = reduce(even.content, [](auto a, auto b) { return a + b; });
  }
  if (i < n) {
    char padded[VECTOR];
    float rest[LANES];
    store(rest, T::get(pad<T>(x + i * T::SIZE, n - i, padded, LANES)));
    for (int64_t k = 0; k < n - i; k++) {
      lo = rest[k] < lo ? rest[k] : lo, hi = rest[k] > hi ? rest[k] : hi;
      sum += rest[k], content += bit_cast<uint32_t>(rest[k]);
    }
  }
  const bool finite = __builtin_fabsf(sum) <= MAX_FLOAT || all_finite<T>(x, n);
  return {lo, hi, content, finite};
}

// Philox for LANES / 2 counters, in the low halves of 64-bit lanes, where the multiplication wants
// them; what is in the high halves never reaches a low half.
struct Philox {
  Longs c0, c1, c2, c3;

  INLINE void rounds_0_and_1(const BlockStream& stream, uint64_t counter) {
    static constexpr uint64_t EVEN[8] = {0, 2, 4, 6, 8, 10, 12, 14};
    const Longs p0 = multiply_low(load<Longs>(EVEN) + counter, Longs{} + MULTIPLIERS[0]);
    const Longs p1 = multiply_low(p0 >> 32 ^ stream.round0_c2, Longs{} + MULTIPLIERS[1]);
    c0 = p1 >> 32 ^ stream.round1_c0;
    c1 = p1;
    c2 = p0 ^ stream.round1_c2;
  }

  INLINE void round_2(const BlockStream& stream) {
    const Longs p0 = multiply_low(c0, Longs{} + MULTIPLIERS[0]);
    const Longs p1 = multiply_low(c2, Longs{} + MULTIPLIERS[1]);
    c0 = xor3(p1 >> 32, c1, Longs{} + stream.k0[2]);
    c2 = p0 >> 32 ^ stream.round2_c2;
    c1 = p1, c3 = p0;
  }

  INLINE void round(uint64_t k0, uint64_t k1) {
    const Longs p0 = multiply_low(c0, Longs{} + MULTIPLIERS[0]);
    const Longs p1 = multiply_low(c2, Longs{} + MULTIPLIERS[1]);
    c0 = xor3(p1 >> 32, c1, Longs{} + k0);
    c2 = xor3(p0 >> 32, c3, Longs{} + k1);
    c1 = p1, c3 = p0;
  }
};

// Random bits of CHAINS * LANES / 2 counters from `counter` on, `r` being that of its first value;
// with TWO, of half as many of two streams, a chunk each. Its own function without a loop over
// counters: inlined into one, its keys leave the registers.
template <int CHAINS, bool TWO>
__attribute__((noinline)) void random16(const BlockStream& stream, const BlockStream& second,
                                        uint64_t counter, int32_t* r) {
  Philox chain[CHAINS];  // even counters, odd counters, the next even ones
  const auto of = [&](int i) -> const BlockStream& {
    return TWO && i >= CHAINS / 2 ? second : stream;
  };
#pragma GCC unroll 4
  for (int i = 0; i < CHAINS; i++)
    chain[i].rounds_0_and_1(of(i), counter + uint64_t(TWO ? i % 2 : i / 2 * LANES + i % 2));
#pragma GCC unroll 4
  for (int i = 0; i < CHAINS; i++) chain[i].round_2(of(i));
#pragma GCC unroll 7
  for (int round = 3; round < 10; round++)
#pragma GCC unroll 4
    for (int i = 0; i < CHAINS; i++) chain[i].round(of(i).k0[round], of(i).k1[round]);
#pragma GCC unroll 2
  for (int i = 0; i < CHAINS; i += 2) {
    const Words words[4] = {
        interleave(chain[i].c0, chain[i + 1].c0), interleave(chain[i].c1, chain[i + 1].c1),
        interleave(chain[i].c2, chain[i + 1].c2), interleave(chain[i].c3, chain[i + 1].c3)};
    int32_t* to = r + i / 2 * LANES / 16 * CHUNK + i / 2 * LANES % 16;
#pragma GCC unroll 4
    for (int word = 0; word < 4; word++) {
      store(to + 32 * word, words[word] & 0xffff);
      store(to + 32 * word + 16, words[word] >> 16);
    }
  }
}

// r of REFILL values, or of the `n` that are left, from value `at` of a block on:
// [Note: where the random bits come from].
INLINE void random16_per_value(int64_t at, int64_t n, const BlockStream& stream, int32_t* r) {
  if (REFILL > CHUNK && n <= CHUNK)
    return random16<CHAINS / 2, false>(stream, stream, uint64_t(at / 8), r);
  for (int first = 0; first < REFILL / 8; first += CHAINS * LANES / 2)
    random16<CHAINS, false>(stream, stream, uint64_t(at / 8 + first),
                            r + first / 16 * CHUNK + first % 16);
}

// r of the first chunks of two blocks.
INLINE void random16_of_two(const BlockStream& first, const BlockStream& second, int32_t* r) {
  if (REFILL > CHUNK) return random16<CHAINS, true>(first, second, 0, r);
  random16_per_value(0, CHUNK, first, r);
  random16_per_value(0, CHUNK, second, r + CHUNK);
}

// q of LANES values: the position on the grid with 16 fractional bits. Roundings may take it a
// little below zero or above its largest value, so codes have to be limited: narrow_to_bytes does.
// base - x and a negative factor instead of x - base: the same numbers, and x may stay in memory.
struct Grid {
  Floats base, minus_inverse;

  explicit Grid(const Plan& plan) : base(all(plan.base)), minus_inverse(all(-plan.inverse)) {}

  template <class T>
  INLINE Ints position(const char* x) const {
    return round_to_int((base - T::get(x)) * minus_inverse);
  }

  // The same within 0 and 65536, for tables of levels.
  template <class T>
  INLINE Ints limited_position(const char* x) const {
    const Ints q = position<T>(x);
    return q < 0 ? Ints{} : q > 65536 ? Ints{} + 65536 : q;
  }
};

// Codes of CHUNK values; `r` for each, or one for all.
template <bool EACH, class T>
INLINE void quantize_uniform(const char* x, const Plan& plan, const int32_t* r, uint8_t* codes) {
  // Copies, because for all the compiler knows `codes` lie over the originals.
  const Grid grid(plan);
  const Ints r_of_all = *r + Ints{};
  const uint8_t limit = plan.limit;
  for (int i = 0; i < CHUNK; i += GROUP) {
    Ints code[4];
    for (int k = 0; k < 4; k++) {
      const int at = i + k * LANES;
      const Ints q = grid.position<T>(x + at * T::SIZE);
      code[k] = (q + (EACH ? load<Ints>(r + at) : r_of_all)) >> 16;
    }
    narrow_to_bytes(code, limit, codes + i);
  }
}

// Up to 16 levels: a binary search in all lanes at once. tree[2^d - 1 + i] is the threshold of node
// i at depth d.
template <class T>
INLINE void quantize_few_levels(const char* x, const Plan& plan, const int32_t* tree, int depth,
                                uint8_t* codes) {
  const Grid grid(plan);
  for (int i = 0; i < CHUNK; i += GROUP) {
    Ints q[4], code[4] = {};
    for (int k = 0; k < 4; k++) q[k] = grid.limited_position<T>(x + (i + k * LANES) * T::SIZE);
    for (int d = 0; d < depth; d++)
      for (int k = 0; k < 4; k++)
        code[k] += code[k] - (q[k] >= lookup(tree + (1 << d) - 1, code[k]));
    narrow_to_bytes(code, plan.limit, codes + i);
  }
}

template <class T>
INLINE void quantize_many_levels(const char* x, const Plan& plan, const uint8_t* level_codes,
                                 uint8_t* codes) {
  alignas(64) int32_t q[CHUNK];
  const Grid grid(plan);
  for (int i = 0; i < CHUNK; i += LANES) store(q + i, grid.limited_position<T>(x + i * T::SIZE));
#pragma GCC unroll 16
  for (int i = 0; i < CHUNK; i++) codes[i] = level_codes[q[i]];
}

// Where the codes of a block come from, beside its values.
struct Source {
  const Span& span;
  const Plan& plan;
  const BlockStream* stream;  // of each value's r, or null, and then
  int32_t shift;              // r of all values
  const int32_t* drawn;       // each value's r if the stream was read before, or null
};

// Codes of CHUNK values of a block from value `at` on, of which `n` values are left. `r` keeps
// random bits from call to call.
template <class T>
INLINE void quantize(const char* x, int64_t at, int64_t n, const Source& source, int32_t* r,
                     uint8_t* codes) {
  const Span& span = source.span;
  if (span.levels && span.bits <= MAX_TREE_BITS) {
    quantize_few_levels<T>(x, source.plan, span.level_tree, span.bits, codes);
  } else if (span.levels) {
    quantize_many_levels<T>(x, source.plan, span.level_codes, codes);
  } else if (source.drawn) {
    quantize_uniform<true, T>(x, source.plan, source.drawn, codes);
  } else if (source.stream) {
    if (at % REFILL == 0) random16_per_value(at, n, *source.stream, r);
    quantize_uniform<true, T>(x, source.plan, r + at % REFILL, codes);
  } else {
    quantize_uniform<false, T>(x, source.plan, &source.shift, codes);
  }
}

// The same for a block whose range needs scaling. Rare, so not worth a multiplication elsewhere.
template <class T>
void quantize_scaled(const char* x, int64_t at, int64_t n, const Source& source, int32_t* r,
                     uint8_t* codes) {
  alignas(64) float scaled[CHUNK];
  for (int i = 0; i < CHUNK; i += LANES)
    store(scaled + i, T::get(x + i * T::SIZE) * source.plan.p);
  quantize<Float32>(reinterpret_cast<const char*>(scaled), at, n, source, r, codes);
}

// Hardware prefetchers stop at the end of a page. Two lines of the page after the next start them
// there, in time; more lines, or nearer ones, measured slower.
INLINE void prefetch_pages(const char* x, int64_t bytes) {
  constexpr uintptr_t PAGE = 4096;
  const uintptr_t from = reinterpret_cast<uintptr_t>(x), to = from + uintptr_t(bytes);
  if (from / PAGE == to / PAGE) return;
  const char* ahead = reinterpret_cast<const char*>((to / PAGE + 1) * PAGE);
  __builtin_prefetch(ahead, 0, 2), __builtin_prefetch(ahead + 64, 0, 2);
}

// Codes of values `begin` to `end` of a block, packed to `to`. `x` is the first one of them and
// `begin` a multiple of REFILL.
template <class T>
INLINE void quantize_block(const char* x, int64_t begin, int64_t end, const Source& source,
                           const Planes& planes, uint8_t* to) {
  alignas(64) int32_t r[REFILL];
  char padded[CHUNK * T::SIZE];
  alignas(64) uint8_t buffer[CHUNK];
  for (int64_t at = begin; at < end; at += CHUNK) {
    const int64_t count = minimum(end - at, CHUNK);
    const bool direct = planes.width[0] == 8 && count == CHUNK;
    const char* from = x + (at - begin) * T::SIZE;
    uint8_t* codes = direct ? to + at : buffer;
    prefetch_pages(from, count * T::SIZE);
    if (count < CHUNK) from = repeat<T>(from, count, padded, CHUNK);
    if (source.plan.p == 1.0f)
      quantize<T>(from, at, end - at, source, r, codes);
    else
      quantize_scaled<T>(from, at, end - at, source, r, codes);
    if (direct) continue;
    if (count < CHUNK) memset(codes + count, 0, size_t(CHUNK - count));
    pack(codes, count, planes, at, to);
  }
}

// What the codes of a block follow from, beside its values.
struct Draft {
  Plan plan;
  BlockStream stream;  // where each value has its own r
  int32_t shift;       // r of all values otherwise
  bool finite;
};

INLINE bool draws_per_value(const Span& span) {
  return span.rounding == STOCHASTIC || span.rounding == DITHER;
}

// Drafts a block and writes its scale and offset.
INLINE void draft_block(const EncodeJob& job, const Span& span, const Counter& counter,
                        const Extremes& extremes, Draft& draft, uint8_t* meta) {
  draft.finite = extremes.finite;
  if (!extremes.finite) {
    draft.stream.start({}, {});  // it is read, for nothing
    const float nan = bit_cast<float>(NAN_BITS);
    return write_meta(span, nan, nan, meta);
  }
  const PhiloxKey key = {uint32_t(job.key), uint32_t(job.key >> 32) ^ extremes.content};
  const bool shifted = span.rounding == SHIFT;
  draft.shift = shifted ? int32_t(philox_word0(counter, key) & 0xffff) : 32768;
  const Plan plan = plan_block(extremes, span, shifted ? draft.shift : -1);
  draft.plan = plan;
  write_meta(span, plan.scale, plan.offset, meta);
  if (span.rounding == STOCHASTIC) draft.stream.start(counter, key);
  if (span.rounding == DITHER)
    start_dither(draft.stream, span, counter.block, counter.segment, plan.scale, plan.offset);
}

// `n` values, up to ROTATED, as float32; but for a rest of less than ROTATION, rotated.
template <class T>
INLINE void rotate(const char* x, int64_t n, float* y) {
  prefetch_pages(x, n * T::SIZE);
  int64_t i = 0;
  for (; i + ROTATION <= n; i += ROTATION) {
    Floats v[ROTATION_VECTORS];
    for (int k = 0; k < ROTATION_VECTORS; k++)
      v[k] = T::get(x + (i + k * LANES) * T::SIZE) * load<Floats>(SCALED_SIGNS.of + k * LANES);
    butterflies(v);
    for (int k = 0; k < ROTATION_VECTORS; k++) store(y + i + k * LANES, v[k]);
  }
  char padded[LANES * T::SIZE];
  for (; i < n; i += LANES) {
    const char* from = x + i * T::SIZE;
    store(y + i, T::get(n - i < LANES ? pad<T>(from, n - i, padded, LANES) : from));
  }
}

// Rotates a block and scans it. The last ROTATED values stay in y.
template <class T>
INLINE Extremes rotate_and_scan(const char* x, int64_t n, float* y) {
  Extremes extremes = {__builtin_inff(), -__builtin_inff(), 0, true};
  for (int64_t at = 0; at < n; at += ROTATED) {
    const int64_t count = minimum(n - at, ROTATED);
    rotate<T>(x + at * T::SIZE, count, y);
    extremes.join(scan<true, Float32>(reinterpret_cast<const char*>(y), count));
  }
  return extremes;
}

// Codes of a rotated block; of one that is larger than y, with its values rotated once more.
template <class T>
INLINE void quantize_rotated(const char* x, int64_t n, const Source& source, const Planes& planes,
                             float* y, uint8_t* codes) {
  for (int64_t at = 0; at < n; at += ROTATED) {
    const int64_t end = minimum(n, at + ROTATED);
    if (n > ROTATED) rotate<T>(x + at * T::SIZE, end - at, y);
    quantize_block<Float32>(reinterpret_cast<const char*>(y), at, end, source, planes, codes);
  }
}

// Neighbouring blocks of a row: where they come from and go to.
struct Blocks {
  const Span& span;
  Counter first;
  int64_t count;
  int64_t numel;  // of all of them; only the segment's last block is shorter than the others
  const char* x;
  uint8_t* meta;
  uint8_t* codes;
};

// Up to BATCH blocks. Rotated ones have at most ROTATED values together, or there is one alone,
// whose rotated values are computed twice.
template <class T>
INLINE void encode_blocks(const EncodeJob& job, const Blocks& blocks, const Planes& full,
                          const Planes& rest) {
  const Span& span = blocks.span;
  const int64_t size = span.block_size, meta_size = meta_bytes(span);
  const bool content = span.rounding == STOCHASTIC || span.rounding == SHIFT;
  alignas(64) float y[ROTATED];
  Draft drafts[BATCH];
  for (int64_t k = 0; k < blocks.count; k++) {
    const int64_t n = minimum(size, blocks.numel - k * size);
    const char* x = blocks.x + k * size * T::SIZE;
    const Extremes extremes = span.rotated ? rotate_and_scan<T>(x, n, y + k * size)
                              : content    ? scan<true, T>(x, n)
                                           : scan<false, T>(x, n);
    const Counter counter = {blocks.first.block + uint32_t(k), blocks.first.segment,
                             blocks.first.row};
    draft_block(job, span, counter, extremes, drafts[k], blocks.meta + k * meta_size);
  }
  alignas(64) int32_t r[BATCH * CHUNK];
  const bool drawn = draws_per_value(span) && size <= CHUNK;
  for (int64_t k = 0; drawn && k < blocks.count; k += 2) {
    const int64_t second = minimum(k + 1, blocks.count - 1);
    random16_of_two(drafts[k].stream, drafts[second].stream, r + k * CHUNK);
  }
  for (int64_t k = 0; k < blocks.count; k++) {
    const int64_t n = minimum(size, blocks.numel - k * size);
    const Planes& planes = n == size ? full : rest;
    const Draft& draft = drafts[k];
    const char* x = blocks.x + k * size * T::SIZE;
    uint8_t* codes = blocks.codes + k * full.bytes;
    const Source source = {span, draft.plan, draws_per_value(span) ? &draft.stream : nullptr,
                           draft.shift, drawn ? r + k * CHUNK : nullptr};
    if (!draft.finite)
      memset(codes, 0, size_t(planes.bytes));
    else if (!span.rotated)
      quantize_block<T>(x, 0, n, source, planes, codes);
    else
      quantize_rotated<T>(x, n, source, planes, y + k * size, codes);
  }
}

template <class T>
void encode_values(const EncodeJob& job, int64_t begin, int64_t end) {
  const Layout& layout = *job.layout;
  for_blocks(layout, begin, end, [&](int64_t row, int64_t index, int64_t first, int64_t last) {
    const Span& span = layout.spans[index];
    const char* x = job.values + (row * layout.numel + span.value_offset) * T::SIZE;
    uint8_t* to = job.wire + row * layout.row_bytes;
    if (!span.bits) {
      memcpy(to + span.data_offset + first * T::SIZE, x + first * T::SIZE,
             size_t((last - first) * T::SIZE));
      return;
    }
    const int64_t size = span.block_size;
    const Planes full(span.bits, size), rest(span.bits, span.numel % size);
    const int64_t batch = maximum(1, minimum(BATCH, TILE / size));
    for (int64_t block = first; block < last; block += batch) {
      const Counter counter = {uint32_t(block), uint32_t(index), uint32_t(job.first_row + row)};
      const int64_t count = minimum(batch, last - block);
      const int64_t numel = minimum(count * size, span.numel - block * size);
      encode_blocks<T>(job,
                       {span, counter, count, numel, x + block * size * T::SIZE,
                        to + span.meta_offset + meta_bytes(span) * block,
                        to + span.data_offset + full.bytes * block},
                       full, rest);
    }
    if (last * size >= span.numel) {  // with the segment's last block go the zeros behind its meta
      const int64_t used = meta_bytes(span) * last;
      memset(to + span.meta_offset + used, 0,
             size_t(divide_up(used, META_ALIGNMENT) * META_ALIGNMENT - used));
    }
  });
}

void encode(const EncodeJob& job, int64_t begin, int64_t end) {
  if (job.dtype == FLOAT32) return encode_values<Float32>(job, begin, end);
  if (job.dtype == BFLOAT16) return encode_values<Bfloat16>(job, begin, end);
  encode_values<Float16>(job, begin, end);
}

// ---------------------------------------------------------------------------------------- decode

// Where decoded values lie between their block's lowest and highest, in steps: LANES at a time.

struct CodeGrid {
  const uint8_t* codes;
  INLINE Floats get(int i) const {
    return __builtin_convertvector(widen_bytes(codes + i), Floats);
  }
};

struct LevelGrid {
  const float* levels;
  INLINE Floats get(int i) const { return load<Floats>(levels + i); }
};

// code + (65535 - 2r) / 131072: the integer has 24 bits and a sign, so there is one rounding.
struct DitherGrid {
  const uint8_t* codes;
  const int32_t* r;
  INLINE Floats get(int i) const {
    const Ints steps = (widen_bytes(codes + i) << 16) - load<Ints>(r + i);
    const Floats grid = __builtin_convertvector(steps, Floats);
    return add_exact(grid, all(1 / FRACTION), all(65535 * 0x1p-17f));
  }
};

// What becomes of decoded values: they are written, written past the caches, or added.
enum class Sink { WRITE, STREAM, ADD };

// CHUNK values as float32; the first `rotated` of them are rotated back, after an addition.
template <Sink SINK, bool HUGE, bool ROTATE, class Grid>
INLINE void dequantize(const Grid& grid, float scale, float offset, int64_t rotated, char* to) {
  constexpr int VECTORS = ROTATE ? ROTATION_VECTORS : 1;
  for (int i = 0; i < CHUNK; i += VECTORS * LANES) {
    Floats value[VECTORS];
    for (int k = 0; k < VECTORS; k++) {
      const int at = i + k * LANES;
      value[k] = grid.get(at) * scale + offset;
      if (HUGE)
        value[k] = greater(all(-MAX_FLOAT), smaller(all(MAX_FLOAT), value[k] * 4.0f));
      if (SINK == Sink::ADD) value[k] = load<Floats>(to + 4 * at) + value[k];
    }
    if (ROTATE && i < rotated) rotate_back(value);
    for (int k = 0; k < VECTORS; k++) {
      char* const place = to + 4 * (i + k * LANES);
      if (SINK == Sink::STREAM)
        stream(place, value[k]);
      else
        store(place, value[k]);
    }
  }
}

template <Sink SINK, bool HUGE, class Grid>
INLINE void dequantize(const Grid& grid, float scale, float offset, int64_t rotated, char* to) {
  if (rotated)
    dequantize<SINK, HUGE, true>(grid, scale, offset, rotated, to);
  else
    dequantize<SINK, HUGE, false>(grid, scale, offset, 0, to);
}

template <Sink SINK, class Grid>
INLINE void dequantize(const Grid& grid, const Meta& meta, int64_t rotated, char* to) {
  if (meta.scale < 0.0f)
    dequantize<SINK, true>(grid, -meta.scale, meta.offset, rotated, to);
  else
    dequantize<SINK, false>(grid, __builtin_fabsf(meta.scale), meta.offset, rotated, to);
}

template <class Grid>
INLINE void dequantize(Sink sink, const Grid& grid, const Meta& meta, int64_t rotated, char* to) {
  if (sink == Sink::WRITE) return dequantize<Sink::WRITE>(grid, meta, rotated, to);
  if (sink == Sink::STREAM) return dequantize<Sink::STREAM>(grid, meta, rotated, to);
  dequantize<Sink::ADD>(grid, meta, rotated, to);
}

// What is decoded together: values `at` to `at + n` of a block, or several whole blocks.
struct Tile {
  const Span& span;
  const Planes& planes;
  uint32_t block, segment;
  int64_t at, n;
};

// A part of a block of one row to `to`; nobody cares what comes behind it up to a whole chunk.
// `drawn`: each value's r, or null. `rotate`: back, the sum if there is one.
INLINE void decode_part(const Tile& part, const Meta& meta, const uint8_t* packed,
                        const int32_t* drawn, Sink sink, bool rotate, char* to) {
  const Span& span = part.span;
  alignas(64) uint8_t buffer[CHUNK];
  const auto chunks = [&](const auto& decode_chunk) {
    for (int64_t i = 0; i < part.n; i += CHUNK) {
      const int64_t count = minimum(part.n - i, CHUNK);
      const uint8_t* codes = packed + part.at + i;
      if (part.planes.width[0] != 8 || count < CHUNK) {
        unpack(packed, count, part.planes, part.at + i, buffer);
        codes = buffer;
      }
      decode_chunk(codes, i, rotate ? count / ROTATION * ROTATION : 0);
    }
  };
  if (span.levels) {
    chunks([&](const uint8_t* codes, int64_t i, int64_t rotated) {
      alignas(64) float grid[CHUNK];
#pragma GCC unroll 16
      for (int k = 0; k < CHUNK; k++) grid[k] = span.levels[codes[k]];
      dequantize(sink, LevelGrid{grid}, meta, rotated, to + 4 * i);
    });
  } else if (span.rounding == DITHER) {
    BlockStream stream;
    if (!drawn) start_dither(stream, span, part.block, part.segment, meta.scale, meta.offset);
    alignas(64) int32_t r[REFILL];
    chunks([&](const uint8_t* codes, int64_t i, int64_t rotated) {
      if (!drawn && i % REFILL == 0) random16_per_value(part.at + i, part.n - i, stream, r);
      const int32_t* own = drawn ? drawn : r + i % REFILL;
      dequantize(sink, DitherGrid{codes, own}, meta, rotated, to + 4 * i);
    });
  } else {
    chunks([&](const uint8_t* codes, int64_t i, int64_t rotated) {
      dequantize(sink, CodeGrid{codes}, meta, rotated, to + 4 * i);
    });
  }
}

// A tile of one row.
INLINE void decode_tile(const Tile& tile, const uint8_t* wire_meta, const uint8_t* packed,
                        Sink sink, bool rotate, char* to) {
  const Span& span = tile.span;
  const int64_t size = span.block_size, meta_size = meta_bytes(span);
  if (tile.n <= size) {
    const Meta meta(span, wire_meta);
    return decode_part(tile, meta, packed, nullptr, sink, rotate, to);
  }
  const int64_t count = tile.n / size;
  const bool in_pairs = span.rounding == DITHER && size == CHUNK && !span.levels;
  alignas(64) int32_t r[2 * CHUNK];
  for (int64_t k = 0; k < count; k++) {
    const Meta meta(span, wire_meta + k * meta_size);
    if (in_pairs && k % 2 == 0) {
      BlockStream streams[2];
      for (int64_t i = 0; i < 2; i++) {
        const int64_t which = minimum(k + i, count - 1);
        const Meta own(span, wire_meta + which * meta_size);
        start_dither(streams[i], span, tile.block + uint32_t(which), tile.segment, own.scale,
                     own.offset);
      }
      random16_of_two(streams[0], streams[1], r);
    }
    const Tile part = {span, tile.planes, tile.block + uint32_t(k), tile.segment, 0, size};
    decode_part(part, meta, packed + k * tile.planes.bytes,
                in_pairs ? r + k % 2 * CHUNK : nullptr, sink, rotate, to + 4 * k * size);
  }
}

// The same for a tile of a full-precision segment.
template <class T>
INLINE void widen_tile(const char* x, int64_t n, bool first, float* sum) {
  char padded[LANES * T::SIZE];
  for (int64_t i = 0; i < n; i += LANES) {
    const char* from = x + i * T::SIZE;
    if (n - i < LANES) from = pad<T>(from, n - i, padded, LANES);
    const Floats value = T::get(from);
    store(sum + i, first ? value : load<Floats>(sum + i) + value);
  }
}

INLINE void widen_tile(int32_t dtype, const char* x, int64_t n, bool first, float* sum) {
  if (dtype == FLOAT32) return widen_tile<Float32>(x, n, first, sum);
  if (dtype == BFLOAT16) return widen_tile<Bfloat16>(x, n, first, sum);
  widen_tile<Float16>(x, n, first, sum);
}

// Writes `n` values from `sum` to `out` in its dtype.
template <class T>
INLINE void write_tile(const float* sum, int64_t n, char* out) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) T::put(load<Floats>(sum + i), out + i * T::SIZE);
  if (i == n) return;
  char padded[LANES * T::SIZE];
  T::put(load<Floats>(sum + i), padded);
  memcpy(out + i * T::SIZE, padded, size_t((n - i) * T::SIZE));
}

// The same for float32, past the caches. Whole cache lines only: a line written in part costs more.
INLINE void stream_tile(const float* sum, int64_t n, char* out) {
  constexpr int LINE = 64 / sizeof(float);
  const int64_t head = minimum(n, int64_t(-(reinterpret_cast<uintptr_t>(out) / 4) % LINE));
  write_tile<Float32>(sum, head, out);
  int64_t i = head;
  for (; i + LINE <= n; i += LINE)
    for (int k = 0; k < LINE; k += LANES) stream(out + 4 * (i + k), load<Floats>(sum + i + k));
  write_tile<Float32>(sum + i, n - i, out + i * 4);
}

INLINE void finish_tile(const DecodeJob& job, float* sum, int64_t n, char* out) {
  if (job.multiply != 1.0f || job.divide != 1.0f)
    for (int64_t i = 0; i < n; i += LANES)
      store(sum + i, load<Floats>(sum + i) * job.multiply / job.divide);
  if (job.dtype == BFLOAT16) return write_tile<Bfloat16>(sum, n, out);
  if (job.dtype == FLOAT16) return write_tile<Float16>(sum, n, out);
  if (job.streaming && reinterpret_cast<uintptr_t>(out) % 4 == 0) return stream_tile(sum, n, out);
  write_tile<Float32>(sum, n, out);
}

// A tile of a segment, for one output; of a full-precision segment too, as block 0.
INLINE void decode_one(const DecodeJob& job, int64_t output, const Tile& tile, int64_t code_bytes) {
  const Layout& layout = *job.layout;
  const Span& span = tile.span;
  const int64_t value = span.value_offset + tile.block * span.block_size + tile.at;
  char* out = job.out + (output * layout.numel + value - job.first) * item_size(job.dtype);
  const uint8_t* row = job.wire + output * job.rows_per_output * layout.row_bytes;
  const uint8_t* codes = row + span.data_offset + tile.block * code_bytes;
  const uint8_t* meta = row + span.meta_offset + tile.block * meta_bytes(span);
  const bool aligned = reinterpret_cast<uintptr_t>(out) % 64 == 0;
  if (job.plain && span.bits && tile.n % CHUNK == 0 && (aligned || !job.streaming)) {
    const Sink sink = job.streaming ? Sink::STREAM : Sink::WRITE;
    return decode_tile(tile, meta, codes, sink, span.rotated, out);
  }
  alignas(64) float sum[TILE];
  for (int64_t i = 0; i < job.rows_per_output; i++) {
    const int64_t skip = i * layout.row_bytes;
    if (span.bits)
      decode_tile(tile, meta + skip, codes + skip, i ? Sink::ADD : Sink::WRITE,
                  span.rotated && i == job.rows_per_output - 1, reinterpret_cast<char*>(sum));
    else
      widen_tile(layout.dtype,
                 reinterpret_cast<const char*>(row + span.data_offset + skip) +
                     tile.at * item_size(layout.dtype),
                 tile.n, i == 0, sum);
  }
  finish_tile(job, sum, tile.n, out);
}

void decode(const DecodeJob& job, int64_t begin, int64_t end) {
  const Layout& layout = *job.layout;
  for_blocks(layout, begin, end, [&](int64_t output, int64_t index, int64_t first, int64_t last) {
    const Span& span = layout.spans[index];
    const int64_t size = span.block_size;
    const uint32_t segment = uint32_t(index);
    const Planes full(span.bits, size), rest(span.bits, span.numel % size);
    if (!span.bits) {
      for (int64_t at = first; at < last; at += TILE)
        decode_one(job, output, {span, full, 0, segment, at, minimum(last - at, TILE)}, 0);
      return;
    }
    const bool whole_chunks = size % CHUNK == 0;  // or one block would write into the next
    const int64_t batch = whole_chunks ? maximum(1, TILE / size) : 1;
    for (int64_t block = first; block < last;) {
      const int64_t left = span.numel - block * size;
      const int64_t count = maximum(1, minimum(minimum(batch, last - block), left / size));
      const int64_t n = minimum(count * size, left);
      const Planes& planes = n < size ? rest : full;
      for (int64_t at = 0; at < n; at += TILE)
        decode_one(job, output,
                   {span, planes, uint32_t(block), segment, at, minimum(n - at, TILE)}, full.bytes);
      block += count;
    }
  });
#if defined(__x86_64__)
  if (job.streaming) _mm_sfence();
#endif
}

// ------------------------------------------------------------------------------------ accumulate

// Adds `n` values to others; of those that are not finite, nothing.
template <class T>
INLINE void add_finite(const char* more, int64_t n, char* to) {
  const auto sum = [](Floats kept, Floats x) {
    return x + (Floats)((Words)kept & (Words)(kept - kept == Floats{}));
  };
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    T::put(sum(T::get(more + i * T::SIZE), T::get(to + i * T::SIZE)), to + i * T::SIZE);
  if (i == n) return;
  char padded[2][LANES * T::SIZE];
  const Floats kept = T::get(pad<T>(more + i * T::SIZE, n - i, padded[0], LANES));
  const Floats x = T::get(pad<T>(to + i * T::SIZE, n - i, padded[1], LANES));
  T::put(sum(kept, x), padded[0]);
  memcpy(to + i * T::SIZE, padded[0], size_t((n - i) * T::SIZE));
}

template <class T>
void accumulate_values(const AccumulateJob& job, int64_t begin, int64_t end) {
  const Layout& layout = *job.layout;
  int64_t largest = 1;
  for (int64_t i = 0; i < layout.num_spans; i++)
    if (layout.spans[i].bits) largest = maximum(largest, layout.spans[i].block_size);
  // A stage ends with the last block that begins in it.
  const std::unique_ptr<char[]> kept(new char[size_t((STAGE + largest) * T::SIZE)]);
  const bool plain = job.dtype == FLOAT32;
  for (int64_t at = begin; at < end; at += STAGE) {
    const int64_t to = minimum(at + STAGE, end);
    decode({&layout, job.before, kept.get(), job.num_rows, 1, 1.0f, 1.0f, job.dtype, false, plain, at},
           at, to);
    for_blocks(layout, at, to, [&](int64_t row, int64_t index, int64_t first, int64_t last) {
      const Span& span = layout.spans[index];
      if (!span.bits) return;
      const int64_t from = first * span.block_size;
      const int64_t n = minimum(last * span.block_size, span.numel) - from;
      const int64_t value = row * layout.numel + span.value_offset + from;
      add_finite<T>(kept.get() + (value - at) * T::SIZE, n, job.values + value * T::SIZE);
    });
    encode({&layout, job.values, job.wire, job.num_rows, 0, 0, job.dtype}, at, to);
    decode({&layout, job.wire, job.values, job.num_rows, 1, 1.0f, 1.0f, job.dtype, false, plain},
           at, to);
  }
}

void accumulate(const AccumulateJob& job, int64_t begin, int64_t end) {
  if (job.dtype == FLOAT32) return accumulate_values<Float32>(job, begin, end);
  if (job.dtype == BFLOAT16) return accumulate_values<Bfloat16>(job, begin, end);
  accumulate_values<Float16>(job, begin, end);
}

}  // namespace QSDP_NAMESPACE
}  // namespace

#endif
