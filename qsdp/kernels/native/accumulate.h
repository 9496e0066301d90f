// Adds what one wire holds to values and encodes the sum to another one, in one pass over memory.

namespace {
namespace QSDP_NAMESPACE {

constexpr int STAGE = 8192;  // values that go through decoding, adding, encoding while in L2

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
    decode({&layout, job.before, kept.get(), 1, 1.0f, 1.0f, job.dtype, false, plain, 0, 1, at}, at,
           to);
    for_blocks(layout, at, to, [&](int64_t row, int64_t index, int64_t first, int64_t last) {
      const Span& span = layout.spans[index];
      if (!span.bits) return;
      const int64_t from = first * span.block_size;
      const int64_t n = minimum(last * span.block_size, span.numel) - from;
      const int64_t value = row * layout.numel + span.value_offset + from;
      add_finite<T>(kept.get() + (value - at) * T::SIZE, n, job.values + value * T::SIZE);
    });
    encode({&layout, job.values, job.wire, 0, 0, job.dtype, 0}, at, to);
    decode({&layout, job.wire, job.values, 1, 1.0f, 1.0f, job.dtype, false, plain, 0, 1}, at, to);
  }
}

void accumulate(const AccumulateJob& job, int64_t begin, int64_t end) {
  if (job.dtype == FLOAT32) return accumulate_values<Float32>(job, begin, end);
  if (job.dtype == BFLOAT16) return accumulate_values<Bfloat16>(job, begin, end);
  accumulate_values<Float16>(job, begin, end);
}

}  // namespace QSDP_NAMESPACE
}  // namespace
