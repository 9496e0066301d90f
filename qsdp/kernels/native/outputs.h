// Sums of decoded values: what full precision adds to them, and how they are written.

namespace {
namespace QSDP_NAMESPACE {

// `n` values of a full-precision segment, as the first ones of a sum or added to it.
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

// What was finite stays so: its error may have taken it past the largest float16.
INLINE void limit_to_float16(float* sum, int64_t n) {
  constexpr float LARGEST = 65504.0f;
  for (int64_t i = 0; i < n; i += LANES) {
    const Floats x = load<Floats>(sum + i);
    const Floats limited = greater(all(-LARGEST), smaller(all(LARGEST), x));
    store(sum + i, x - x == Floats{} ? limited : x);
  }
}

INLINE void finish_tile(const DecodeJob& job, bool quantized, float* sum, int64_t n, char* out) {
  if (job.multiply != 1.0f || job.divide != 1.0f)
    for (int64_t i = 0; i < n; i += LANES)
      store(sum + i, load<Floats>(sum + i) * job.multiply / job.divide);
  if (job.dtype == BFLOAT16) return write_tile<Bfloat16>(sum, n, out);
  if (job.dtype == FLOAT16) {
    if (quantized) limit_to_float16(sum, n);
    return write_tile<Float16>(sum, n, out);
  }
  if (job.streaming && reinterpret_cast<uintptr_t>(out) % 4 == 0) return stream_tile(sum, n, out);
  write_tile<Float32>(sum, n, out);
}

}  // namespace QSDP_NAMESPACE
}  // namespace
