// Changes of remembered rows: encoded from what values differ by from what is kept, and added to it.
// Each in one pass over memory, in stages of about STAGE values that stay in the caches.
//
// Two layouts meet here, and a stage holds whole blocks of both: it begins and ends where blocks of
// both begin. So stages do not depend on the number of threads, and neither do sums.

namespace {
namespace QSDP_NAMESPACE {

INLINE Floats finite_or_zero(Floats x) { return (Floats)((Words)x & (Words)(x - x == Floats{})); }

// Where the next stage begins: at flat index `flat` (row * numel + value) or behind it.
inline int64_t stage_start(const Layout& a, const Layout& b, int64_t flat) {
  const int64_t row = flat / a.numel, value = flat - row * a.numel;
  for (int64_t i = 0; i < a.num_spans; i++) {
    const Span& span = a.spans[i];
    if (value >= span.value_offset + span.numel) continue;
    const int64_t size = joint_block(span, b.spans[i]), at = value - span.value_offset;
    return row * a.numel + span.value_offset + minimum(divide_up(at, size) * size, span.numel);
  }
  return flat;
}

// What a segment's values are told from others by: changes.py has the sum, its last bits alone count.
struct Digest {
  Words place, low = {}, high = {};
  static constexpr uint32_t PLACE = 0x9E3779B9, FACTOR = 0x85EBCA6B, OTHER_FACTOR = 0xC2B2AE35;

  // From value `at` of the segment on.
  explicit Digest(int64_t at) {
    for (int i = 0; i < LANES; i++) place[i] = uint32_t(at + i) * PLACE;
  }

  static INLINE uint32_t of_one(float x, int64_t at) {
    const uint32_t bits = x == x ? bit_cast<uint32_t>(x) : NAN_BITS;
    return mix(bits ^ uint32_t(at) * PLACE);
  }

  template <class V>
  static INLINE V mix(V x) {
    x = (x ^ x >> 16) * FACTOR;
    x = (x ^ x >> 13) * OTHER_FACTOR;
    return x ^ x >> 16;
  }

  INLINE void add(Floats x) {
    const Words mixed = mix((x == x ? (Words)x : all(NAN_BITS)) ^ place);
    low += mixed & 0xffff, high += mixed >> 16;
    place += uint32_t(LANES) * PLACE;
  }

  INLINE uint64_t sum() const {
    const auto plus = [](auto a, auto b) { return a + b; };
    return uint64_t(reduce(low, plus)) + (uint64_t(reduce(high, plus)) << 16);
  }
};

// Running sums of up to TILE values, small enough for float32.
struct Moved {
  Floats change = {}, values = {};
  Ints special = {};

  INLINE void add(Floats moved, Floats x) {
    change += moved * moved, values += x * x;
    special -= ((Words)moved & 0x7f800000) == 0x7f800000;
  }

  INLINE void add_to(Partial& partial) const {
    const auto plus = [](auto a, auto b) { return a + b; };
    partial.change += double(reduce(change, plus)), partial.values += double(reduce(values, plus));
    partial.special += double(reduce(special, plus));
  }
};

// `n` values of a segment, the first one being its value `first`, to what they differ by from
// `kept` where that is finite. With AS_IS nothing is subtracted.
template <bool AS_IS, class T>
INLINE void subtract(const char* values, const char* kept, char* change, int64_t first, int64_t n,
                     Partial& partial) {
  constexpr int SIZE = T::SIZE;
  for (int64_t at = 0; at < n; at += TILE) {
    const int64_t end = minimum(at + TILE, n);
    Moved moved;
    Digest digest(first + at);
    int64_t i = at;
    for (; i + LANES <= end; i += LANES) {
      const Floats x = T::get(values + i * SIZE);
      digest.add(x);
      if (AS_IS) continue;
      T::put(x - finite_or_zero(T::get(kept + i * SIZE)), change + i * SIZE);
      moved.add(T::get(change + i * SIZE), x);
    }
    partial.digest += digest.sum();
    if (i < end) {
      char padded[3][LANES * SIZE];
      const int64_t left = end - i;
      const Floats x = T::get(pad<T>(values + i * SIZE, left, padded[0], LANES));
      for (int64_t k = 0; k < left; k++) partial.digest += Digest::of_one(x[k], first + i + k);
      if (!AS_IS) {
        const Floats known = T::get(pad<T>(kept + i * SIZE, left, padded[1], LANES));
        T::put(x - finite_or_zero(known), padded[2]);
        moved.add(T::get(padded[2]), x);
        memcpy(change + i * SIZE, padded[2], size_t(left * SIZE));
      }
    }
    if (!AS_IS) moved.add_to(partial);
  }
  if (AS_IS) memcpy(change, values, size_t(n * SIZE));
}

// Stages `begin` to `end`. Every segment's part of a stage has a Partial of its own, stage + segment:
// it is taken once, because where the next part begins at least one of the two is larger.
template <class T>
void encode_stages(const ChangeJob& job, int64_t begin, int64_t end) {
  const Layout &layout = *job.layout, &kept_layout = *job.kept_layout;
  const size_t room = size_t((STAGE + longest_joint_block(layout, kept_layout)) * T::SIZE);
  const std::unique_ptr<char[]> known(new char[room]), change(new char[room]);
  const Rows<const uint8_t> kept = {job.kept, 1, 0, 0};
  for (int64_t stage = begin; stage < end; stage++) {
    const int64_t at = stage_start(layout, kept_layout, stage * STAGE);
    const int64_t next = minimum((stage + 1) * STAGE, layout.numel);
    const int64_t to = next == layout.numel ? next : stage_start(layout, kept_layout, next);
    if (at >= to) continue;
    const int64_t skipped = at * T::SIZE;
    decode({&kept_layout, kept, {known.get(), 1, 0, 0, skipped}, 1, 1.0f, 1.0f, job.dtype, false,
            job.dtype == FLOAT32, 0, 1},
           at, to);
    for_blocks(layout, at, to, [&](int64_t, int64_t index, int64_t first, int64_t last) {
      const Span& span = layout.spans[index];
      const int64_t size = span.bits ? span.block_size : 1, from = first * size;
      const int64_t n = minimum(last * size, span.numel) - from;
      const int64_t i = (span.value_offset + from) * T::SIZE;
      Partial& partial = job.partials[stage + index];
      partial.segment = index;
      const char *x = job.values + i, *before = known.get() + (i - skipped);
      char* moved = change.get() + (i - skipped);
      if (kept_layout.spans[index].bits)
        subtract<false, T>(x, before, moved, from, n, partial);
      else
        subtract<true, T>(x, before, moved, from, n, partial);
    });
    encode({&layout, {change.get(), 1, 0, 0, skipped}, {job.wire, 1, 0, 0}, job.first_row, job.key,
            job.dtype, job.sender},
           at, to);
  }
}

void encode_changes(const ChangeJob& job, int64_t begin, int64_t end) {
  if (job.dtype == FLOAT32) return encode_stages<Float32>(job, begin, end);
  if (job.dtype == BFLOAT16) return encode_stages<Bfloat16>(job, begin, end);
  encode_stages<Float16>(job, begin, end);
}

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

// Blocks to which only zeros are added keep their bytes: encoding what was decoded may move them.
// These are put aside while their stage is encoded.
class Idle {
 public:
  Idle(const UpdateJob& job, int64_t room)
      : job_(job), flags_(new bool[size_t(room)]), bytes_(new uint8_t[size_t(12 * room)]) {}

  // Adds what is kept of a stage, `known`, to values, but for idle blocks, which it puts aside.
  // Block by block: looking at all of them before would read memory in leaps.
  template <class T>
  INLINE void add(int64_t at, int64_t to, const char* known) {
    const Layout& layout = *job_.kept_layout;
    any_ = false;
    for_blocks(layout, at, to, [&](int64_t row, int64_t index, int64_t first, int64_t last) {
      const Span& span = layout.spans[index];
      if (!span.bits) return;
      const int64_t size = span.block_size, end = minimum(last * size, span.numel);
      const int64_t start = row * layout.numel + span.value_offset - at;
      char* x = job_.values.at(row, span.value_offset * T::SIZE);
      for (int64_t from = first * size; from < end; from += size) {
        const int64_t n = minimum(size, end - from);
        const bool idle = all_zero<typename T::Bits>(x + from * T::SIZE, n);
        flags_[start + from] = idle, any_ |= idle;
        if (!idle) add_finite<T>(known + (start + from) * T::SIZE, n, x + from * T::SIZE);
      }
    });
    if (any_) move<true>(at, to);
  }

  INLINE void put_back(int64_t at, int64_t to) {
    if (any_) move<false>(at, to);
  }

 private:
  // Copies scale, offset and codes of idle blocks, out of the kept rows or into them.
  template <bool OUT>
  void move(int64_t at, int64_t to) {
    uint8_t* aside = bytes_.get();
    const auto copy = [&](uint8_t* kept, int64_t n) {
      memcpy(OUT ? aside : kept, OUT ? kept : aside, size_t(n));
      aside += n;
    };
    const Layout& layout = *job_.kept_layout;
    for_blocks(layout, at, to, [&](int64_t row, int64_t index, int64_t first, int64_t last) {
      const Span& span = layout.spans[index];
      if (!span.bits) return;
      uint8_t* kept = job_.kept.at(row, 0);
      const Planes full(span.bits, span.block_size), rest(span.bits, span.numel % span.block_size);
      for (int64_t block = first; block < last; block++) {
        const int64_t from = block * span.block_size;
        if (!flags_[row * layout.numel + span.value_offset - at + from]) continue;
        const bool whole = from + span.block_size <= span.numel;
        copy(kept + span.meta_offset + block * meta_bytes(span), meta_bytes(span));
        copy(kept + span.data_offset + block * full.bytes, whole ? full.bytes : rest.bytes);
      }
    });
  }

  const UpdateJob& job_;
  const std::unique_ptr<bool[]> flags_;  // of the value that a block begins with
  const std::unique_ptr<uint8_t[]> bytes_;
  bool any_ = false;
};

template <class T>
void add_stages(const UpdateJob& job, int64_t begin, int64_t end) {
  const Layout &layout = *job.layout, &kept_layout = *job.kept_layout;
  const int64_t room = STAGE + longest_joint_block(layout, kept_layout);
  const std::unique_ptr<char[]> known(new char[size_t(room * T::SIZE)]);
  Idle idle(job, room);
  const bool plain = job.dtype == FLOAT32;
  const Rows<char>& values = job.values;
  const Rows<const char> sums = {values.start, values.inner, values.outer_step, values.inner_step};
  const Rows<const uint8_t> kept = {job.kept.start, job.kept.inner, job.kept.outer_step,
                                    job.kept.inner_step};
  for (int64_t stage = begin; stage < end; stage++) {
    const int64_t at = stage_start(layout, kept_layout, stage * STAGE);
    const int64_t next = minimum((stage + 1) * STAGE, job.total);
    const int64_t to = next == job.total ? next : stage_start(layout, kept_layout, next);
    if (at >= to) continue;
    // A stage may go on in the next row.
    const Rows<char> staged = {known.get(), INT64_MAX, 0, layout.numel * T::SIZE, at * T::SIZE};
    decode({&layout, job.wire, values, 1, 1.0f, 1.0f, job.dtype, false, plain, job.first_sender,
            job.sender_step},
           at, to);
    decode({&kept_layout, kept, staged, 1, 1.0f, 1.0f, job.dtype, false, plain, 0, 1}, at, to);
    idle.add<T>(at, to, known.get());
    encode({&kept_layout, sums, job.kept, 0, 0, job.dtype, 0}, at, to);
    idle.put_back(at, to);
    decode({&kept_layout, kept, values, 1, 1.0f, 1.0f, job.dtype, false, plain, 0, 1}, at, to);
  }
}

void add_changes(const UpdateJob& job, int64_t begin, int64_t end) {
  if (job.dtype == FLOAT32) return add_stages<Float32>(job, begin, end);
  if (job.dtype == BFLOAT16) return add_stages<Bfloat16>(job, begin, end);
  add_stages<Float16>(job, begin, end);
}

}  // namespace QSDP_NAMESPACE
}  // namespace
