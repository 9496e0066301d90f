// Values to the wire: codes, scale and offset of every block. All that the encoder knows of the
// roundings is here: draws_per_value, needs_content and draft_block say what each of them draws,
// quantize what becomes of it.

namespace {
namespace QSDP_NAMESPACE {

constexpr int ROTATED = 4096;  // rotated values of a block that are kept: 16 KiB, half of an L1
constexpr int BATCH = 8;  // blocks that go through a kernel stage by stage: none waits for another

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
  if (span.mean) {
    quantize_signs<T>(x, codes);
  } else if (span.levels && span.bits <= MAX_TREE_BITS) {
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

// Whether what it draws is keyed by the block's content.
INLINE bool needs_content(const Span& span) {
  return span.rounding == STOCHASTIC || span.rounding == SHIFT;
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
    start_dither(draft.stream, span, counter.block, counter.segment, job.sender, plan.scale,
                 plan.offset);
}

// Rotates a block and scans it. The last ROTATED values stay in y.
template <bool CONTENT, class T>
INLINE Extremes rotate_and_scan(const char* x, int64_t n, float* y) {
  Extremes extremes = {__builtin_inff(), -__builtin_inff(), 0, true};
  for (int64_t at = 0; at < n; at += ROTATED) {
    const int64_t count = minimum(n - at, ROTATED);
    rotate<T>(x + at * T::SIZE, count, y);
    extremes.join(scan<CONTENT, Float32>(reinterpret_cast<const char*>(y), count));
  }
  return extremes;
}

// The block's norm in place of its extremes. `y`: what rotate_and_scan has left there.
template <class T>
INLINE void take_norm(const Span& span, const char* x, int64_t n, float* y, Extremes& extremes) {
  if (!span.rotated)
    return stretch_to_norm<T>(extremes, [&](const auto& add) { add(x, n); });
  stretch_to_norm<Float32>(extremes, [&](const auto& add) {
    for (int64_t at = 0; at < n; at += ROTATED) {
      const int64_t count = minimum(n - at, ROTATED);
      if (n > ROTATED) rotate<T>(x + at * T::SIZE, count, y);
      add(reinterpret_cast<const char*>(y), count);
    }
  });
}

// dp of [Note: mean scaling] in blocks.py, of a block with these extremes. Of a rotated one, y has
// the last ROTATED values.
template <class T>
INLINE float twice_the_mean(const Extremes& extremes, const Span& span, const char* x, int64_t n,
                            float* y) {
  const float lo = __builtin_fabsf(extremes.lo), hi = __builtin_fabsf(extremes.hi);
  const float largest = lo > hi ? lo : hi;
  if (!extremes.finite || largest == 0.0f) return 0.0f;
  const float p = largest > HUGE_VALUE ? 0.25f : 2 * largest < TINY_RANGE ? 1 / TINY_RANGE : 1.0f;
  const uint32_t exponent = bit_cast<uint32_t>(largest * p) >> 23;
  const float down = bit_cast<float>((276 - exponent) << 23);
  const float up = bit_cast<float>((exponent - 21) << 23);
  int64_t total = 0;
  if (!span.rotated) total = sum_magnitudes<T>(x, n, p, down);
  for (int64_t at = 0; span.rotated && at < n; at += ROTATED) {
    const int64_t count = minimum(n - at, ROTATED);
    if (n > ROTATED) rotate<T>(x + at * T::SIZE, count, y);
    total += sum_magnitudes<Float32>(reinterpret_cast<const char*>(y), count, p, down);
  }
  return float(total) / float(n) * up;
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
  const bool content = needs_content(span);
  alignas(64) float y[ROTATED];
  Draft drafts[BATCH];
  for (int64_t k = 0; k < blocks.count; k++) {
    const int64_t n = minimum(size, blocks.numel - k * size);
    const char* x = blocks.x + k * size * T::SIZE;
    Extremes extremes = span.rotated && content ? rotate_and_scan<true, T>(x, n, y + k * size)
                        : span.rotated          ? rotate_and_scan<false, T>(x, n, y + k * size)
                        : content               ? scan<true, T>(x, n)
                                                : scan<false, T>(x, n);
    if (span.symmetric == TWO_NORM) take_norm<T>(span, x, n, y + k * size, extremes);
    if (span.mean) extremes.twice_mean = twice_the_mean<T>(extremes, span, x, n, y + k * size);
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
    const char* x = job.values.at(row, span.value_offset * T::SIZE);
    uint8_t* to = job.wire.at(row, 0);
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
      if (span.map_offset >= 0)
        map_zeros<typename T::Bits>(x, span.numel, block * size, block * size + numel,
                                    to + span.map_offset);
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

}  // namespace QSDP_NAMESPACE
}  // namespace
