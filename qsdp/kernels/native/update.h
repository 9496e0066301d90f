// Adds changes that arrived to what is kept, in one pass over memory: in stages, as changes.h says.

namespace {
namespace QSDP_NAMESPACE {

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

// Whole blocks of plain formats: decoded, added and scanned in one loop, encoded and decoded
// in another, while the block stays in an L1 cache.
template <class T>
class Fast {
 public:
  static bool takes(const UpdateJob& job, int64_t index) {
    const Span &span = job.layout->spans[index], &kept = job.kept_layout->spans[index];
    return job.dtype != FLOAT16 && is_plain(span) && is_plain(kept) && kept.rounding == NEAREST &&
           !kept.mean && kept.block_size <= ROTATED && kept.block_size % span.block_size == 0;
  }

  Fast(const UpdateJob& job, int64_t row, int64_t index)
      : span_(job.layout->spans[index]),
        kept_(job.kept_layout->spans[index]),
        planes_(span_.bits, span_.block_size),
        kept_planes_(kept_.bits, kept_.block_size),
        wire_(job.wire.at(row, 0)),
        row_(job.kept.at(row, 0)),
        values_(job.values.at(row, span_.value_offset * T::SIZE)) {}

  // One block of what is kept; false, and nothing has changed, if it is one of the rare ones: only
  // zeros are added, a number is not finite, or the range is very large or small.
  INLINE bool add(int64_t block) {
    alignas(64) float sums[ROTATED];
    uint8_t* const meta = row_ + kept_.meta_offset + block * meta_bytes(kept_);
    uint8_t* const codes = row_ + kept_.data_offset + block * kept_planes_.bytes;
    const Meta known(kept_, meta);
    if (!(known.scale >= 0.0f)) return false;
    const float infinity = __builtin_inff();
    Floats lo = all(infinity), hi = all(-infinity), seen = {};
    Words any = {};
    for (int64_t at = 0; at < kept_.block_size; at += CHUNK) {
      const int64_t value = block * kept_.block_size + at, changed = value / span_.block_size;
      const Meta change(span_, wire_ + span_.meta_offset + changed * meta_bytes(span_));
      if (!(change.scale >= 0.0f)) return false;
      alignas(64) uint8_t buffers[2][CHUNK];
      const uint8_t* moved = wire_ + span_.data_offset + changed * planes_.bytes;
      const uint8_t* before = codes + at;
      moved = unpacked(moved, planes_, value - changed * span_.block_size, buffers[0]);
      if (kept_planes_.width[0] != 8) before = unpacked(codes, kept_planes_, at, buffers[1]);
      for (int i = 0; i < CHUNK; i += LANES) {
        const Floats step = rounded<T>(value_of(moved + i, change));
        const Floats old = finite_or_zero(rounded<T>(value_of(before + i, known)));
        const Floats sum = rounded<T>(step + old);
        any |= (Words)step << 1;
        lo = smaller(sum, lo), hi = greater(sum, hi), seen = witness(sum, sum, seen);
        store(sums + at + i, sum);
      }
    }
    const auto join = [](auto a, auto b) { return a | b; };
    const float least = reduce(lo, [](auto a, auto b) { return a < b ? a : b; });
    const float most = reduce(hi, [](auto a, auto b) { return a > b ? a : b; });
    const float witness = reduce(seen, [](auto a, auto b) { return a + b; });
    if (!reduce(any, join) || !(__builtin_fabsf(witness) <= MAX_FLOAT)) return false;
    Extremes extremes = {least, most, 0, true};
    if (kept_.symmetric == TWO_NORM)
      stretch_to_norm<Float32>(extremes, [&](const auto& add) {
        add(reinterpret_cast<const char*>(sums), kept_.block_size);
      });
    const Plan plan = plan_block(extremes, kept_, -1);
    if (plan.p != 1.0f) return false;
    write_meta(kept_, plan.scale, plan.offset, meta);
    char* const out = values_ + block * kept_.block_size * T::SIZE;
    encode_and_decode(sums, plan, Meta(kept_, meta), codes, out);
    return true;
  }

 private:
  INLINE void encode_and_decode(const float* sums, const Plan& plan, const Meta& meta,
                                uint8_t* codes, char* out) const {
    constexpr int32_t HALF = 32768;
    for (int64_t at = 0; at < kept_.block_size; at += CHUNK) {
      alignas(64) uint8_t buffer[CHUNK];
      quantize_uniform<false, Float32>(reinterpret_cast<const char*>(sums + at), plan, &HALF,
                                       buffer);
      if (kept_planes_.width[0] == 8)
        memcpy(codes + at, buffer, CHUNK);
      else
        pack(buffer, CHUNK, kept_planes_, at, codes);
      for (int i = 0; i < CHUNK; i += LANES)
        T::put(value_of(buffer + i, meta), out + (at + i) * T::SIZE);
    }
  }

  const Span &span_, &kept_;
  const Planes planes_, kept_planes_;
  const uint8_t* const wire_;
  uint8_t* const row_;
  char* const values_;
};

// Whatever the formats are: step by step.
template <class T>
class Slow {
 public:
  Slow(const UpdateJob& job, int64_t room)
      : job_(job), idle_(job, room), known_(new char[size_t(room * T::SIZE)]) {}

  // Values `at` to `to`, whole blocks of both layouts.
  void add(int64_t at, int64_t to) {
    const Layout &layout = *job_.layout, &kept_layout = *job_.kept_layout;
    const bool plain = job_.dtype == FLOAT32;
    const Rows<char>& values = job_.values;
    const Rows<const char> sums = {values.start, values.inner, values.outer_step,
                                   values.inner_step};
    const Rows<uint8_t>& rows = job_.kept;
    const Rows<const uint8_t> kept = {rows.start, rows.inner, rows.outer_step, rows.inner_step};
    const Rows<char> staged = {known_.get(), INT64_MAX, 0, layout.numel * T::SIZE, at * T::SIZE};
    decode({&layout, job_.wire, values, 1, 1.0f, 1.0f, job_.dtype, false, plain, job_.first_sender,
            job_.sender_step},
           at, to);
    decode({&kept_layout, kept, staged, 1, 1.0f, 1.0f, job_.dtype, false, plain, 0, 1}, at, to);
    idle_.template add<T>(at, to, known_.get());
    encode({&kept_layout, sums, rows, 0, 0, job_.dtype, 0}, at, to);
    idle_.put_back(at, to);
    decode({&kept_layout, kept, values, 1, 1.0f, 1.0f, job_.dtype, false, plain, 0, 1}, at, to);
  }

 private:
  const UpdateJob& job_;
  Idle idle_;
  const std::unique_ptr<char[]> known_;
};

template <class T>
void add_stages(const UpdateJob& job, int64_t begin, int64_t end) {
  const Layout &layout = *job.layout, &kept_layout = *job.kept_layout;
  Slow<T> slow(job, STAGE + longest_joint_block(layout, kept_layout));
  for_stages(layout, kept_layout, job.total, begin, end, [&](int64_t, int64_t at, int64_t to) {
    for_blocks(kept_layout, at, to, [&](int64_t row, int64_t index, int64_t first, int64_t last) {
      const Span& span = kept_layout.spans[index];
      const int64_t start = row * layout.numel + span.value_offset;
      const int64_t size = span.bits ? span.block_size : 1;
      const auto add_slowly = [&](int64_t from, int64_t to_) {
        if (from < to_) slow.add(start + from * size, start + minimum(to_ * size, span.numel));
      };
      if (!Fast<T>::takes(job, index)) return add_slowly(first, last);
      Fast<T> fast(job, row, index);
      const int64_t full = minimum(last, span.numel / size);
      for (int64_t block = first; block < full; block++)
        if (!fast.add(block)) add_slowly(block, block + 1);
      add_slowly(maximum(first, full), last);
    });
  });
}

void add_changes(const UpdateJob& job, int64_t begin, int64_t end) {
  if (job.dtype == FLOAT32) return add_stages<Float32>(job, begin, end);
  if (job.dtype == BFLOAT16) return add_stages<Bfloat16>(job, begin, end);
  add_stages<Float16>(job, begin, end);
}

}  // namespace QSDP_NAMESPACE
}  // namespace
