// The native CPU backend: the operations of qsdp/kernels/reference.py and accumulate, same bytes.
//
// A plain C interface on raw pointers: no torch headers, no exceptions, and only accumulate
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
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif
#define QSDP_LANES 8
#define QSDP_NAMESPACE avx2
#include "native/kernels.h"
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
                 int64_t first_row, uint64_t key, int64_t sender, int32_t dtype, int32_t threads) {
  const int64_t rest = layout->row_bytes - layout->payload_bytes;
  for (int64_t row = 0; rest && row < num_rows; row++)
    memset(wire + row * layout->row_bytes + layout->payload_bytes, 0, size_t(rest));
  const EncodeJob job{layout, values, wire, first_row, key, dtype, uint32_t(sender)};
  run(isa().encode, job, num_rows * layout->numel, threads);
}

// decode: num_outputs rows of one row each. decode_sum: one output of rows_per_output rows.
void qsdp_decode(const Layout* layout, const uint8_t* wire, char* out, int64_t num_outputs,
                 int64_t rows_per_output, float multiply, float divide, int64_t first_sender,
                 int64_t sender_step, int32_t dtype, int32_t threads) {
  const int64_t total = num_outputs * layout->numel;
  const bool streaming = total * item_size(dtype) >= STREAMING_BYTES;
  const bool plain =
      dtype == FLOAT32 && rows_per_output == 1 && multiply == 1.0f && divide == 1.0f;
  const DecodeJob job{layout,
                      wire,
                      out,
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

void qsdp_accumulate(const Layout* layout, char* values, const uint8_t* before, uint8_t* wire,
                     int64_t num_rows, int32_t dtype, int32_t threads) {
  const int64_t rest = layout->row_bytes - layout->payload_bytes;
  for (int64_t row = 0; rest && row < num_rows; row++)
    memset(wire + row * layout->row_bytes + layout->payload_bytes, 0, size_t(rest));
  const AccumulateJob job{layout, values, before, wire, dtype};
  run(isa().accumulate, job, num_rows * layout->numel, threads);
}

// A bit for every 32 of `numel` values, set where all of them are zero.
void qsdp_map_zeros(const char* values, int64_t numel, uint8_t* map, int32_t dtype,
                    int32_t threads) {
  if (dtype == FLOAT32)
    map_zeros(reinterpret_cast<const uint32_t*>(values), numel, map, threads);
  else
    map_zeros(reinterpret_cast<const uint16_t*>(values), numel, map, threads);
}

}  // extern "C"
