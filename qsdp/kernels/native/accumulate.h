// Adds what one wire holds to values and encodes the sum to another one, in one pass over memory.
// Blocks to which only zeros are added keep their bytes: encoding what was decoded may move them.

namespace {
namespace QSDP_NAMESPACE {

INLINE Floats finite_or_zero(Floats x) { return (Floats)((Words)x & (Words)(x - x == Floats{})); }

// Adds `n` values to others; of those that are not finite, nothing.
template <class T>
INLINE void add_finite(const char* more, int64_t n, char* to) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    T::put(T::get(to + i * T::SIZE) + finite_or_zero(T::get(more + i * T::SIZE)),
           to + i * T::SIZE);
  if (i == n) return;
  char padded[2][LANES * T::SIZE];
  const Floats kept = T::get(pad<T>(more + i * T::SIZE, n - i, padded[0], LANES));
  const Floats x = T::get(pad<T>(to + i * T::SIZE, n - i, padded[1], LANES));
  T::put(x + finite_or_zero(kept), padded[0]);
  memcpy(to + i * T::SIZE, padded[0], size_t((n - i) * T::SIZE));
}

// Adds what is kept of blocks, `kept` from flat index `at` on, to values. `idle` says of the value
// that a block begins with whether only zeros came for the block; these are left as they are. Block
// by block: looking at all of them before would read memory in leaps. Whether any block is idle.
template <class T>
INLINE bool add_blocks(const AccumulateJob& job, int64_t at, int64_t to, const char* kept,
                       bool* idle) {
  const Layout& layout = *job.layout;
  bool any_idle = false;
  for_blocks(layout, at, to, [&](int64_t row, int64_t index, int64_t first, int64_t last) {
    const Span& span = layout.spans[index];
    if (!span.bits) return;
    char* x = job.values.at(row, span.value_offset * T::SIZE);
    const int64_t end = minimum(last * span.block_size, span.numel);
    const int64_t start = row * layout.numel + span.value_offset - at;
    for (int64_t from = first * span.block_size; from < end; from += span.block_size) {
      const int64_t n = minimum(span.block_size, end - from);
      const bool zero = all_zero<typename T::Bits>(x + from * T::SIZE, n);
      idle[start + from] = zero, any_idle |= zero;
      if (!zero) add_finite<T>(kept + (start + from) * T::SIZE, n, x + from * T::SIZE);
    }
  });
  return any_idle;
}

// Copies the bytes of idle blocks.
INLINE void keep_idle(const AccumulateJob& job, int64_t at, int64_t to, const bool* idle) {
  const Layout& layout = *job.layout;
  for_blocks(layout, at, to, [&](int64_t row, int64_t index, int64_t first, int64_t last) {
    const Span& span = layout.spans[index];
    if (!span.bits) return;
    const uint8_t* before = job.before.at(row, 0);
    uint8_t* wire = job.wire.at(row, 0);
    const Planes full(span.bits, span.block_size), rest(span.bits, span.numel % span.block_size);
    for (int64_t block = first; block < last; block++) {
      const int64_t from = block * span.block_size;
      if (!idle[row * layout.numel + span.value_offset - at + from]) continue;
      const bool whole = from + span.block_size <= span.numel;
      const int64_t meta = span.meta_offset + block * meta_bytes(span);
      const int64_t codes = span.data_offset + block * full.bytes;
      memcpy(wire + meta, before + meta, size_t(meta_bytes(span)));
      memcpy(wire + codes, before + codes, size_t(whole ? full.bytes : rest.bytes));
    }
  });
}

template <class T>
void accumulate_values(const AccumulateJob& job, int64_t begin, int64_t end) {
  const Layout& layout = *job.layout;
  // A stage ends with the last block that begins in it.
  const int64_t longest = STAGE + longest_block(layout);
  const std::unique_ptr<char[]> kept(new char[size_t(longest * T::SIZE)]);
  bool idle[STAGE];
  const Rows<uint8_t>& wire = job.wire;
  const Rows<char>& values = job.values;
  const bool plain = job.dtype == FLOAT32;
  for (int64_t at = begin; at < end; at += STAGE) {
    const int64_t to = minimum(at + STAGE, end), row_step = layout.numel * T::SIZE;
    const Rows<char> staged = {kept.get(), INT64_MAX, 0, row_step, at * T::SIZE};
    decode({&layout, job.before, staged, 1, 1.0f, 1.0f, job.dtype, false, plain, 0, 1}, at, to);
    const bool any_idle = add_blocks<T>(job, at, to, kept.get(), idle);
    const Rows<const char> sums = {values.start, values.inner, values.outer_step,
                                   values.inner_step};
    encode({&layout, sums, wire, 0, 0, job.dtype, 0}, at, to);
    if (any_idle) keep_idle(job, at, to, idle);
    const Rows<const uint8_t> after = {wire.start, wire.inner, wire.outer_step, wire.inner_step};
    decode({&layout, after, values, 1, 1.0f, 1.0f, job.dtype, false, plain, 0, 1}, at, to);
  }
}

void accumulate(const AccumulateJob& job, int64_t begin, int64_t end) {
  if (job.dtype == FLOAT32) return accumulate_values<Float32>(job, begin, end);
  if (job.dtype == BFLOAT16) return accumulate_values<Bfloat16>(job, begin, end);
  accumulate_values<Float16>(job, begin, end);
}

}  // namespace QSDP_NAMESPACE
}  // namespace
