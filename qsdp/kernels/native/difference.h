// What values differ by from what a wire holds, what was sent before, and sums that say how much.
//
// A row is worked on in stages of STAGE values, whoever works on them, and every segment's part of a
// stage has a Partial of its own, so that sums do not depend on the number of threads. Partial
// stage + segment is taken once: where the next part begins, at least one of the two is larger.

namespace {
namespace QSDP_NAMESPACE {

// Running sums of up to TILE values, small enough for float32.
struct Moved {
  Floats change = {}, values = {};
  Ints differing = {}, special = {};

  INLINE void add_to(double* stats) const {
    const auto plus = [](auto a, auto b) { return a + b; };
    stats[0] += double(reduce(change, plus)), stats[1] += double(reduce(values, plus));
    stats[2] += double(reduce(differing, plus)), stats[3] += double(reduce(special, plus));
  }
};

// LANES values; `kept` is subtracted where it is finite. In full precision nothing is.
template <bool RAW, class T>
INLINE void move(const char* values, const char* kept, char* sent, char* change, Moved& moved) {
  const Floats x = T::get(values);
  moved.differing -= x != T::get(sent);
  memcpy(sent, values, LANES * T::SIZE);
  if (RAW) {
    memcpy(change, values, LANES * T::SIZE);
    return;
  }
  T::put(x - finite_or_zero(T::get(kept)), change);
  const Floats rounded = T::get(change);
  moved.change += rounded * rounded, moved.values += x * x;
  moved.special -= ((Words)rounded & 0x7f800000) == 0x7f800000;
}

template <bool RAW, class T>
INLINE void move_values(const char* values, const char* kept, char* sent, char* change, int64_t n,
                        double* stats) {
  constexpr int VECTOR = LANES * T::SIZE;
  for (int64_t at = 0; at < n; at += TILE) {
    const int64_t end = minimum(at + TILE, n);
    Moved moved;
    int64_t i = at * T::SIZE;
    for (; i + VECTOR <= end * T::SIZE; i += VECTOR)
      move<RAW, T>(values + i, kept + i, sent + i, change + i, moved);
    const int64_t left = end * T::SIZE - i;
    if (left) {
      char padded[4][VECTOR] = {};
      memcpy(padded[0], values + i, size_t(left));
      if (!RAW) memcpy(padded[1], kept + i, size_t(left));
      memcpy(padded[2], sent + i, size_t(left));
      move<RAW, T>(padded[0], padded[1], padded[2], padded[3], moved);
      memcpy(sent + i, padded[2], size_t(left));
      memcpy(change + i, padded[3], size_t(left));
    }
    moved.add_to(stats);
  }
}

// Stages `begin` to `end`.
template <class T>
void difference_stages(const DifferenceJob& job, int64_t begin, int64_t end) {
  const Layout& layout = *job.layout;
  const int64_t longest = STAGE + longest_block(layout);
  const std::unique_ptr<char[]> kept(new char[size_t(longest * T::SIZE)]);
  const Rows<const uint8_t> before = {job.before, 1, 0, 0};
  for (int64_t stage = begin; stage < end; stage++) {
    const int64_t at = stage * STAGE, to = minimum(at + STAGE, layout.numel);
    const Rows<char> staged = {kept.get(), 1, 0, 0, at * T::SIZE};
    decode({&layout, before, staged, 1, 1.0f, 1.0f, job.dtype, false, job.dtype == FLOAT32, 0, 1},
           at, to);
    for_blocks(layout, at, to, [&](int64_t, int64_t index, int64_t first, int64_t last) {
      const Span& span = layout.spans[index];
      const int64_t size = span.bits ? span.block_size : 1;
      const int64_t from = span.value_offset + first * size;
      const int64_t n = minimum(last * size, span.numel) - first * size, i = from * T::SIZE;
      Partial& partial = job.partials[stage + index];
      partial.segment = index;
      const char *x = job.values + i, *known = kept.get() + (i - at * T::SIZE);
      if (span.bits)
        move_values<false, T>(x, known, job.sent + i, job.change + i, n, partial.stats);
      else
        move_values<true, T>(x, known, job.sent + i, job.change + i, n, partial.stats);
    });
  }
}

void difference(const DifferenceJob& job, int64_t begin, int64_t end) {
  if (job.dtype == FLOAT32) return difference_stages<Float32>(job, begin, end);
  if (job.dtype == BFLOAT16) return difference_stages<Bfloat16>(job, begin, end);
  difference_stages<Float16>(job, begin, end);
}

}  // namespace QSDP_NAMESPACE
}  // namespace
