// Changes of remembered rows: encodes what values differ by from what is kept. In one pass over
// memory, in stages of about STAGE values that stay in the caches; update.h adds them.
//
// Two layouts meet here, and a stage holds whole blocks of both: it begins and ends where blocks of
// both begin. So stages do not depend on the number of threads, and neither do sums.

namespace {
namespace QSDP_NAMESPACE {

INLINE Floats finite_or_zero(Floats x) { return (Floats)((Words)x & (Words)(x - x == Floats{})); }

// Most of what presets keep: a uniform grid whose decoder draws nothing.
INLINE bool is_plain(const Span& span) {
  return span.bits && !span.levels && !span.rotated && span.rounding != DITHER &&
         span.block_size % CHUNK == 0;
}

// LANES values of a plain block whose scale is not negative.
INLINE Floats value_of(const uint8_t* codes, const Meta& meta) {
  return CodeGrid{codes}.get(0) * __builtin_fabsf(meta.scale) + meta.offset;
}

// As the dtype rounds; not for float16.
template <class T>
INLINE Floats rounded(Floats x) {
  if (T::SIZE == 4) return x;
  const Words bits = (Words)x;
  return (Floats)(x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000 : bits);
}

// CHUNK codes of a block from value `at` on.
INLINE const uint8_t* unpacked(const uint8_t* codes, const Planes& planes, int64_t at,
                               uint8_t* buffer) {
  if (planes.width[0] == 8) return codes + at;
  unpack(codes, CHUNK, planes, at, buffer);
  return buffer;
}

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

// Calls body(stage, from, to) for stages `begin` to `end` of rows of `total` values.
template <class Body>
INLINE void for_stages(const Layout& a, const Layout& b, int64_t total, int64_t begin, int64_t end,
                       const Body& body) {
  for (int64_t stage = begin; stage < end; stage++) {
    const int64_t next = (stage + 1) * STAGE, at = stage_start(a, b, stage * STAGE);
    const int64_t to = next < total ? stage_start(a, b, next) : total;
    if (at < to) body(stage, at, to);
  }
}

// What a segment's values are told from others by: changes.py has the sum.
struct Digest {
  Longs even_key, odd_key, total = {};  // of neighbours: 32 bits each
  static constexpr uint32_t PLACE = 0x9E3779B9;

  static INLINE uint32_t key(int64_t place) { return uint32_t(2 * place + 1) * PLACE; }

  // From value `at` of the segment on.
  explicit Digest(int64_t at) {
    for (int i = 0; i < LANES / 2; i++)
      even_key[i] = key(at + 2 * i), odd_key[i] = key(at + 2 * i + 1);
  }

  static INLINE uint64_t of_one(float x, int64_t at) {
    return uint64_t(x == x ? bit_cast<uint32_t>(x) : NAN_BITS) * key(at);
  }

  INLINE void add(Floats x) {
    constexpr uint64_t STEP = uint32_t(2 * LANES) * PLACE;
    const Longs bits = (Longs)(x == x ? (Words)x : all(NAN_BITS));
    total += multiply_low(bits, even_key) + multiply_low(bits >> 32, odd_key);
    even_key += STEP, odd_key += STEP;  // what overflows is not multiplied
  }

  INLINE uint64_t sum() const {
    uint64_t found = 0;
    for (int i = 0; i < LANES / 2; i++) found += total[i];
    return found;
  }
};

// Running sums of up to TILE values, small enough for float32.
struct Moved {
  Floats change = {}, values = {};

  INLINE void add(Floats moved, Floats x) { change += moved * moved, values += x * x; }

  // Whether all that moved may be finite.
  INLINE bool add_to(Partial& partial) const {
    const auto plus = [](auto a, auto b) { return a + b; };
    const float moved = reduce(change, plus);
    partial.change += double(moved), partial.values += double(reduce(values, plus));
    return moved <= MAX_FLOAT;
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
    if (!AS_IS && !moved.add_to(partial))
      partial.special += double(not_finite<T>(change + at * SIZE, end - at));
  }
  if (AS_IS) memcpy(change, values, size_t(n * SIZE));
}

// The same for a whole block of a plain format, which is decoded meanwhile; false if it is huge or
// holds no finite number.
template <class T>
INLINE bool subtract_block(const Span& span, const Planes& planes, const uint8_t* row,
                           int64_t block, const char* values, char* change, Partial& partial) {
  const Meta meta(span, row + span.meta_offset + block * meta_bytes(span));
  if (!(meta.scale >= 0.0f)) return false;
  const uint8_t* codes = row + span.data_offset + block * planes.bytes;
  constexpr int SIZE = T::SIZE;
  for (int64_t at = 0; at < span.block_size; at += TILE) {
    const int64_t end = minimum(at + TILE, span.block_size);
    Moved moved;
    Digest digest(block * span.block_size + at);
    for (int64_t chunk = at; chunk < end; chunk += CHUNK) {
      alignas(64) uint8_t buffer[CHUNK];
      const uint8_t* known = unpacked(codes, planes, chunk, buffer);
      for (int i = 0; i < CHUNK; i += LANES) {
        const Floats x = T::get(values + (chunk + i) * SIZE);
        digest.add(x);
        const Floats step = rounded<T>(x - finite_or_zero(rounded<T>(value_of(known + i, meta))));
        T::put(step, change + (chunk + i) * SIZE);
        moved.add(step, x);
      }
    }
    partial.digest += digest.sum();
    if (!moved.add_to(partial))
      partial.special += double(not_finite<T>(change + at * SIZE, end - at));
  }
  return true;
}

// Stages `begin` to `end`. Every segment's part of a stage has a Partial of its own, stage +
// segment: it is taken once, because where the next part begins one of the two is larger.
template <class T>
void encode_stages(const ChangeJob& job, int64_t begin, int64_t end) {
  const Layout &layout = *job.layout, &kept_layout = *job.kept_layout;
  const size_t room = size_t((STAGE + longest_joint_block(layout, kept_layout)) * T::SIZE);
  const std::unique_ptr<char[]> known(new char[room]), change(new char[room]);
  const Rows<const uint8_t> kept = {job.kept, 1, 0, 0};
  const auto encode_stage = [&](int64_t stage, int64_t at, int64_t to) {
    const int64_t skipped = at * T::SIZE;
    for_blocks(kept_layout, at, to, [&](int64_t, int64_t index, int64_t first, int64_t last) {
      const Span& span = kept_layout.spans[index];
      const int64_t size = span.bits ? span.block_size : 1;
      const Planes planes(span.bits, size);
      Partial& partial = job.partials[stage + index];
      partial.segment = index;
      const auto place = [&](int64_t block) { return span.value_offset + block * size; };
      const auto subtract_slowly = [&](int64_t from, int64_t behind) {
        const int64_t start = place(from), end_ = span.value_offset + span.numel;
        const int64_t n = minimum(place(behind), end_) - start;
        if (n <= 0) return;
        const char* x = job.values + start * T::SIZE;
        char* moved = change.get() + (start * T::SIZE - skipped);
        const char* before = known.get() + (start * T::SIZE - skipped);
        if (!span.bits) return subtract<true, T>(x, before, moved, from, n, partial);
        decode({&kept_layout, kept, {known.get(), 1, 0, 0, skipped}, 1, 1.0f, 1.0f, job.dtype,
                false, job.dtype == FLOAT32, 0, 1},
               start, start + n);
        subtract<false, T>(x, before, moved, from * size, n, partial);
      };
      if (job.dtype == FLOAT16 || !is_plain(span)) return subtract_slowly(first, last);
      const int64_t full = minimum(last, span.numel / size);
      for (int64_t block = first; block < full; block++) {
        const int64_t i = place(block) * T::SIZE;
        if (!subtract_block<T>(span, planes, job.kept, block, job.values + i,
                               change.get() + (i - skipped), partial))
          subtract_slowly(block, block + 1);
      }
      subtract_slowly(maximum(first, full), last);
    });
    encode({&layout, {change.get(), 1, 0, 0, skipped}, {job.wire, 1, 0, 0}, job.first_row, job.key,
            job.dtype, job.sender},
           at, to);
  };
  for_stages(layout, kept_layout, layout.numel, begin, end, encode_stage);
}

void encode_changes(const ChangeJob& job, int64_t begin, int64_t end) {
  if (job.dtype == FLOAT32) return encode_stages<Float32>(job, begin, end);
  if (job.dtype == BFLOAT16) return encode_stages<Bfloat16>(job, begin, end);
  encode_stages<Float16>(job, begin, end);
}

}  // namespace QSDP_NAMESPACE
}  // namespace
