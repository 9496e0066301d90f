// The native CPU backend: the operations of qsdp/kernels/reference.py, same bytes.
//
// A plain C interface on raw pointers: no torch headers, no exceptions; only work on changes
// allocates. This file and the folder native/ are one translation unit. The kernels are written
// once, for vectors of LANES 32-bit lanes, and compiled here once per instruction set; the fastest
// one that the machine runs is chosen at the first call.
//
// Arithmetic is float32 with one rounding an operation, as the reference says: build it with
// -ffp-contract=off and never with -ffast-math (qsdp/kernels/build.py does).

// Some of these are for the parts that kernels.h includes: see there.
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

#include "native/coded_layout.h"
#include "native/coded_tables.h"
#include "native/layout.h"
#include "native/philox.h"
#include "native/plan.h"
#include "native/signs.h"
#include "native/types.h"
#include "native/zeros.h"

// ------------------------------------------------------------------ the instruction sets, by width

#define QSDP_LANES 4
#define QSDP_NAMESPACE baseline
#include "native/kernels.h"
#undef QSDP_LANES
#undef QSDP_NAMESPACE

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c,bmi,bmi2")
#endif
#define QSDP_LANES 8
#define QSDP_NAMESPACE avx2
#include "native/kernels.h"
#undef QSDP_LANES
#undef QSDP_NAMESPACE
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push( \
    __attribute__((target("avx2,f16c,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,f16c,bmi,bmi2,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define QSDP_LANES 16
#define QSDP_NAMESPACE avx512
#include "native/kernels.h"
#undef QSDP_LANES
#undef QSDP_NAMESPACE
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__

// --------------------------------------------------------------------------------- the interface

namespace {

struct Isa {
  const char* name;
  bool (*supported)();
  void (*encode)(const EncodeJob&, int64_t begin, int64_t end);
  void (*decode)(const DecodeJob&, int64_t begin, int64_t end);
  void (*encode_changes)(const ChangeJob&, int64_t begin, int64_t end);
  void (*add_changes)(const UpdateJob&, int64_t begin, int64_t end);
  uint8_t* (*compact)(const CompactJob&, int64_t begin, int64_t end, uint8_t* to);
  void (*expand)(const ExpandJob&, int64_t begin, int64_t end, const uint8_t* from);
};

bool always() { return true; }

#if defined(__x86_64__)
bool has_avx2() {
  unsigned a, b, c = 0, d;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Best first.
const Isa ISAS[] = {
#if defined(__x86_64__)
    {"avx512", has_avx512, avx512::encode, avx512::decode, avx512::encode_changes,
     avx512::add_changes, avx512::compact, avx512::expand},
    {"avx2", has_avx2, avx2::encode, avx2::decode, avx2::encode_changes, avx2::add_changes,
     avx2::compact, avx2::expand},
#endif
    {"baseline", always, baseline::encode, baseline::decode, baseline::encode_changes,
     baseline::add_changes, baseline::compact, baseline::expand},
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

// Runs `kernel` on 0 to `total`, values or stages, `per_thread` of them being worth a thread.
template <class Job>
void run(void (*kernel)(const Job&, int64_t, int64_t), const Job& job, int64_t total, int threads,
         int64_t per_thread = VALUES_PER_THREAD) {
  if (total == 0) return;  // no values: only padding, which the caller has written
  const int64_t useful = minimum(threads, divide_up(total, per_thread));
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

constexpr uint64_t DIGEST_MASK = (uint64_t(1) << 48) - 1;

// Zeros behind what encoding writes of rows.
void clear_padding(const Layout& layout, const Rows<uint8_t>& wire, int64_t num_rows) {
  const int64_t rest = layout.row_bytes - layout.payload_bytes;
  for (int64_t row = 0; rest && row < num_rows; row++)
    memset(wire.at(row, layout.payload_bytes), 0, size_t(rest));
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

// Rows have `inner` to a row of rows; steps of values count values, those of the wire bytes.
void qsdp_encode(const Layout* layout, const char* values, uint8_t* wire, int64_t num_rows,
                 int64_t inner, int64_t values_outer, int64_t values_inner, int64_t wire_outer,
                 int64_t wire_inner, int64_t first_row, uint64_t key, int64_t sender, int32_t dtype,
                 int32_t threads) {
  const int64_t item = item_size(dtype);
  const EncodeJob job{layout,
                      {values, inner, values_outer * item, values_inner * item},
                      {wire, inner, wire_outer, wire_inner},
                      first_row,
                      key,
                      dtype,
                      uint32_t(sender)};
  clear_padding(*layout, job.wire, num_rows);
  run(isa().encode, job, num_rows * layout->numel, threads);
}

// decode: num_outputs rows of one row each. decode_sum: one output of rows_per_output rows.
void qsdp_decode(const Layout* layout, const uint8_t* wire, char* out, int64_t num_outputs,
                 int64_t rows_per_output, int64_t inner, int64_t wire_outer, int64_t wire_inner,
                 int64_t out_outer, int64_t out_inner, float multiply, float divide,
                 int64_t first_sender, int64_t sender_step, int32_t dtype, int32_t threads) {
  const int64_t total = num_outputs * layout->numel, item = item_size(dtype);
  const bool streaming = total * item >= STREAMING_BYTES;
  const bool plain =
      dtype == FLOAT32 && rows_per_output == 1 && multiply == 1.0f && divide == 1.0f;
  const DecodeJob job{layout,
                      {wire, inner, wire_outer, wire_inner},
                      {out, inner, out_outer * item, out_inner * item},
                      rows_per_output,
                      multiply,
                      divide,
                      dtype,
                      streaming,
                      plain,
                      uint32_t(first_sender),
                      uint32_t(sender_step)};
  run(isa().decode, job, total, threads);
}

// `stats`: four numbers for each span.
void qsdp_encode_changes(const Layout* layout, const Layout* kept_layout, const char* values,
                         uint8_t* wire, const uint8_t* kept, double* stats, int64_t first_row,
                         uint64_t key, int64_t sender, int32_t dtype, int32_t threads) {
  const int64_t stages = divide_up(layout->numel, STAGE), count = stages + layout->num_spans;
  const std::unique_ptr<Partial[]> partials(new Partial[size_t(count)]);
  const ChangeJob job{layout,         kept_layout, values, kept,  wire,
                      partials.get(), first_row,   key,    dtype, uint32_t(sender)};
  clear_padding(*layout, {wire, 1, 0, 0}, 1);
  run(isa().encode_changes, job, stages, threads, VALUES_PER_THREAD / STAGE);
  const std::unique_ptr<uint64_t[]> digests(new uint64_t[size_t(layout->num_spans)]());
  memset(stats, 0, size_t(layout->num_spans) * 4 * sizeof(double));
  for (int64_t i = 0; i < count; i++) {
    const Partial& part = partials[i];
    if (part.segment < 0) continue;
    double* const of = stats + 4 * part.segment;
    of[0] += part.change, of[1] += part.values, of[3] += part.special;
    digests[part.segment] += part.digest;
    of[2] = double(digests[part.segment] & DIGEST_MASK);
  }
}

void qsdp_add_changes(const Layout* layout, const Layout* kept_layout, const uint8_t* wire,
                      uint8_t* kept, char* values, int64_t num_rows, int64_t wire_step,
                      int64_t kept_step, int64_t values_step, int64_t first_sender,
                      int64_t sender_step, int32_t dtype, int32_t threads) {
  const int64_t total = num_rows * layout->numel;
  const UpdateJob job{layout,
                      kept_layout,
                      {wire, num_rows, 0, wire_step},
                      {kept, num_rows, 0, kept_step},
                      {values, num_rows, 0, values_step * item_size(dtype)},
                      total,
                      dtype,
                      uint32_t(first_sender),
                      uint32_t(sender_step)};
  run(isa().add_changes, job, divide_up(total, STAGE), threads, VALUES_PER_THREAD / STAGE);
}

// The coded form of a row, to `coded`; returns its bytes. Threads write their blocks apart, and then
// these are put together.
int64_t qsdp_compact(const CodedLayout* layout, const uint8_t* row, uint8_t* coded,
                     int32_t threads) {
  uint8_t* const headers = copy_plain(*layout, row, coded + LENGTH_BYTES);
  uint8_t* const streams = headers + HEADER_BYTES * layout->num_blocks;
  const CompactJob job{layout, row, headers};
  int64_t begins[MAX_CODERS], ends[MAX_CODERS];
  const int64_t parts = coders(*layout, threads);
#ifdef _OPENMP
#pragma omp parallel for num_threads(int(parts)) if (parts > 1)
#endif
  for (int64_t i = 0; i < parts; i++) {
    const int64_t first = layout->num_blocks * i / parts, last = layout->num_blocks * (i + 1) / parts;
    begins[i] = fixed_bytes(*layout, first) + CODER_GAP * i;
    ends[i] = isa().compact(job, first, last, streams + begins[i]) - streams;
  }
  int64_t size = ends[0];
  for (int64_t i = 1; i < parts; i++) {
    memmove(streams + size, streams + begins[i], size_t(ends[i] - begins[i]));
    size += ends[i] - begins[i];
  }
  const int64_t length = streams + size - coded;
  memcpy(coded, &length, LENGTH_BYTES);
  return length;
}

// The row of a coded one of `length` bytes; 0 if these are not as they should be.
int32_t qsdp_expand(const CodedLayout* layout, const uint8_t* coded, int64_t length, uint8_t* row,
                    int32_t threads) {
  int64_t begins[MAX_CODERS];
  const int64_t parts = coders(*layout, threads);
  if (!read_lengths(*layout, coded, length, parts, begins)) return 0;
  const uint8_t* const headers = coded + LENGTH_BYTES + layout->plain_bytes;
  const uint8_t* const streams = headers + HEADER_BYTES * layout->num_blocks;
  paste_plain(*layout, coded + LENGTH_BYTES, row);
  const ExpandJob job{layout, row, headers, coded + length};
#ifdef _OPENMP
#pragma omp parallel for num_threads(int(parts)) if (parts > 1)
#endif
  for (int64_t i = 0; i < parts; i++)
    isa().expand(job, layout->num_blocks * i / parts, layout->num_blocks * (i + 1) / parts,
                 streams + begins[i]);
  return 1;
}

}  // extern "C"
