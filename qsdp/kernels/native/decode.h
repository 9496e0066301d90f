// The wire to values, and to sums of several rows. All that the decoder knows of the roundings is
// in decode_part and decode_tile: dither is taken off again, the others look alike.

namespace {
namespace QSDP_NAMESPACE {

// Where decoded values lie between their block's lowest and highest, in steps: LANES at a time.

struct CodeGrid {
  const uint8_t* codes;
  INLINE Floats get(int i) const {
    return __builtin_convertvector(widen_bytes(codes + i), Floats);
  }
};

struct LevelGrid {
  const float* levels;
  INLINE Floats get(int i) const { return load<Floats>(levels + i); }
};

// code + (65535 - 2r) / 131072: the integer has 24 bits and a sign, so there is one rounding.
struct DitherGrid {
  const uint8_t* codes;
  const int32_t* r;
  INLINE Floats get(int i) const {
    const Ints steps = (widen_bytes(codes + i) << 16) - load<Ints>(r + i);
    const Floats grid = __builtin_convertvector(steps, Floats);
    return add_exact(grid, all(1 / FRACTION), all(65535 * 0x1p-17f));
  }
};

// What becomes of decoded values: they are written, written past the caches, or added.
enum class Sink { WRITE, STREAM, ADD };

// CHUNK values as float32; the first `rotated` of them are rotated back, after an addition.
template <Sink SINK, bool HUGE, bool ROTATE, class Grid>
INLINE void dequantize(const Grid& grid, float scale, float offset, int64_t rotated, char* to) {
  constexpr int VECTORS = ROTATE ? ROTATION_VECTORS : 1;
  for (int i = 0; i < CHUNK; i += VECTORS * LANES) {
    Floats value[VECTORS];
    for (int k = 0; k < VECTORS; k++) {
      const int at = i + k * LANES;
      value[k] = grid.get(at) * scale + offset;
      if (HUGE)
        value[k] = greater(all(-MAX_FLOAT), smaller(all(MAX_FLOAT), value[k] * 4.0f));
      if (SINK == Sink::ADD) value[k] = load<Floats>(to + 4 * at) + value[k];
    }
    if (ROTATE && i < rotated) rotate_back(value);
    for (int k = 0; k < VECTORS; k++) {
      char* const place = to + 4 * (i + k * LANES);
      if (SINK == Sink::STREAM)
        stream(place, value[k]);
      else
        store(place, value[k]);
    }
  }
}

template <Sink SINK, bool HUGE, class Grid>
INLINE void dequantize(const Grid& grid, float scale, float offset, int64_t rotated, char* to) {
  if (rotated)
    dequantize<SINK, HUGE, true>(grid, scale, offset, rotated, to);
  else
    dequantize<SINK, HUGE, false>(grid, scale, offset, 0, to);
}

template <Sink SINK, class Grid>
INLINE void dequantize(const Grid& grid, const Meta& meta, int64_t rotated, char* to) {
  if (meta.scale < 0.0f)
    dequantize<SINK, true>(grid, -meta.scale, meta.offset, rotated, to);
  else
    dequantize<SINK, false>(grid, __builtin_fabsf(meta.scale), meta.offset, rotated, to);
}

template <class Grid>
INLINE void dequantize(Sink sink, const Grid& grid, const Meta& meta, int64_t rotated, char* to) {
  if (sink == Sink::WRITE) return dequantize<Sink::WRITE>(grid, meta, rotated, to);
  if (sink == Sink::STREAM) return dequantize<Sink::STREAM>(grid, meta, rotated, to);
  dequantize<Sink::ADD>(grid, meta, rotated, to);
}

// What is decoded together: values `at` to `at + n` of a block, or several whole blocks.
struct Tile {
  const Span& span;
  const Planes& planes;
  uint32_t block, segment;
  int64_t at, n;
  uint32_t sender = 0;  // of the row
};

// A part of a block of one row to `to`; nobody cares what comes behind it up to a whole chunk.
// `drawn`: each value's r, or null. `rotate`: back, the sum if there is one.
INLINE void decode_part(const Tile& part, const Meta& meta, const uint8_t* packed,
                        const int32_t* drawn, Sink sink, bool rotate, char* to) {
  const Span& span = part.span;
  alignas(64) uint8_t buffer[CHUNK];
  const auto chunks = [&](const auto& decode_chunk) {
    for (int64_t i = 0; i < part.n; i += CHUNK) {
      const int64_t count = minimum(part.n - i, CHUNK);
      const uint8_t* codes = packed + part.at + i;
      if (part.planes.width[0] != 8 || count < CHUNK) {
        unpack(packed, count, part.planes, part.at + i, buffer);
        codes = buffer;
      }
      decode_chunk(codes, i, rotate ? count / ROTATION * ROTATION : 0);
    }
  };
  if (span.levels) {
    chunks([&](const uint8_t* codes, int64_t i, int64_t rotated) {
      alignas(64) float grid[CHUNK];
#pragma GCC unroll 16
      for (int k = 0; k < CHUNK; k++) grid[k] = span.levels[codes[k]];
      dequantize(sink, LevelGrid{grid}, meta, rotated, to + 4 * i);
    });
  } else if (span.rounding == DITHER) {
    BlockStream stream;
    if (!drawn)
      start_dither(stream, span, part.block, part.segment, part.sender, meta.scale, meta.offset);
    alignas(64) int32_t r[REFILL];
    chunks([&](const uint8_t* codes, int64_t i, int64_t rotated) {
      if (!drawn && i % REFILL == 0) random16_per_value(part.at + i, part.n - i, stream, r);
      const int32_t* own = drawn ? drawn : r + i % REFILL;
      dequantize(sink, DitherGrid{codes, own}, meta, rotated, to + 4 * i);
    });
  } else {
    chunks([&](const uint8_t* codes, int64_t i, int64_t rotated) {
      dequantize(sink, CodeGrid{codes}, meta, rotated, to + 4 * i);
    });
  }
}

// A tile of one row.
INLINE void decode_tile(const Tile& tile, const uint8_t* wire_meta, const uint8_t* packed,
                        Sink sink, bool rotate, char* to) {
  const Span& span = tile.span;
  const int64_t size = span.block_size, meta_size = meta_bytes(span);
  if (tile.n <= size) {
    const Meta meta(span, wire_meta);
    return decode_part(tile, meta, packed, nullptr, sink, rotate, to);
  }
  const int64_t count = tile.n / size;
  const bool in_pairs = span.rounding == DITHER && size == CHUNK && !span.levels;
  alignas(64) int32_t r[2 * CHUNK];
  for (int64_t k = 0; k < count; k++) {
    const Meta meta(span, wire_meta + k * meta_size);
    if (in_pairs && k % 2 == 0) {
      BlockStream streams[2];
      for (int64_t i = 0; i < 2; i++) {
        const int64_t which = minimum(k + i, count - 1);
        const Meta own(span, wire_meta + which * meta_size);
        start_dither(streams[i], span, tile.block + uint32_t(which), tile.segment, tile.sender,
                     own.scale, own.offset);
      }
      random16_of_two(streams[0], streams[1], r);
    }
    const Tile part = {span, tile.planes, tile.block + uint32_t(k), tile.segment, 0, size,
                       tile.sender};
    decode_part(part, meta, packed + k * tile.planes.bytes,
                in_pairs ? r + k % 2 * CHUNK : nullptr, sink, rotate, to + 4 * k * size);
  }
}

// A segment's place in one output: the first row that is added up there, and where its values go,
// in bytes from the start of all.
struct Place {
  int64_t output;
  const uint8_t* row;
  int64_t out;
};

// A tile of a segment, for one output; of a full-precision segment too, as block 0.
INLINE void decode_one(const DecodeJob& job, const Place& place, Tile tile, int64_t code_bytes,
                       char* out) {
  const Layout& layout = *job.layout;
  const Span& span = tile.span;
  const uint8_t* codes = place.row + span.data_offset + tile.block * code_bytes;
  const uint8_t* meta = place.row + span.meta_offset + tile.block * meta_bytes(span);
  const auto sender = [&](int64_t i) {
    return job.first_sender + uint32_t(place.output * job.rows_per_output + i) * job.sender_step;
  };
  tile.sender = sender(0);
  const bool aligned = reinterpret_cast<uintptr_t>(out) % 64 == 0;
  if (job.plain && span.bits && tile.n % CHUNK == 0 && (aligned || !job.streaming)) {
    const Sink sink = job.streaming ? Sink::STREAM : Sink::WRITE;
    return decode_tile(tile, meta, codes, sink, span.rotated, out);
  }
  alignas(64) float sum[TILE];
  for (int64_t i = 0; i < job.rows_per_output; i++) {
    const int64_t skip = i * job.wire.inner_step;
    tile.sender = sender(i);
    if (span.bits)
      decode_tile(tile, meta + skip, codes + skip, i ? Sink::ADD : Sink::WRITE,
                  span.rotated && i == job.rows_per_output - 1, reinterpret_cast<char*>(sum));
    else
      widen_tile(layout.dtype,
                 reinterpret_cast<const char*>(codes + skip) + tile.at * item_size(layout.dtype),
                 tile.n, i == 0, sum);
  }
  finish_tile(job, span.bits, sum, tile.n, out);
}

// The same, and zeros where all rows have zeros.
INLINE void decode_and_clear(const DecodeJob& job, const Place& place, const Tile& tile,
                             int64_t code_bytes) {
  const Span& span = tile.span;
  const int64_t from = tile.block * span.block_size + tile.at, item = item_size(job.dtype);
  char* out = job.out.start + (place.out + from * item);
  decode_one(job, place, tile, code_bytes, out);
  if (span.map_offset >= 0)
    write_zeros(place.row + span.map_offset, job.rows_per_output, job.wire.inner_step, from, tile.n,
                item, out);
}

void decode(const DecodeJob& job, int64_t begin, int64_t end) {
  const Layout& layout = *job.layout;
  for_blocks(layout, begin, end, [&](int64_t output, int64_t index, int64_t first, int64_t last) {
    const Span& span = layout.spans[index];
    const int64_t size = span.block_size, item = item_size(job.dtype);
    const uint32_t segment = uint32_t(index);
    const Planes full(span.bits, size), rest(span.bits, span.numel % size);
    const Place place = {output, job.wire.at(output * job.rows_per_output, 0),
                         job.out.offset(output, span.value_offset * item)};
    if (!span.bits && job.exact()) {
      memcpy(job.out.start + (place.out + first * item), place.row + span.data_offset + first * item,
             size_t((last - first) * item));
      return;
    }
    if (!span.bits) {
      for (int64_t at = first; at < last; at += TILE)
        decode_and_clear(job, place, {span, full, 0, segment, at, minimum(last - at, TILE)}, 0);
      return;
    }
    const bool whole_chunks = size % CHUNK == 0;  // or one block would write into the next
    const int64_t batch = whole_chunks ? maximum(1, TILE / size) : 1;
    for (int64_t block = first; block < last;) {
      const int64_t left = span.numel - block * size;
      const int64_t count = maximum(1, minimum(minimum(batch, last - block), left / size));
      const int64_t n = minimum(count * size, left);
      const Planes& planes = n < size ? rest : full;
      for (int64_t at = 0; at < n; at += TILE)
        decode_and_clear(job, place,
                         {span, planes, uint32_t(block), segment, at, minimum(n - at, TILE)},
                         full.bytes);
      block += count;
    }
  });
#if defined(__x86_64__)
  if (job.streaming) _mm_sfence();
#endif
}

}  // namespace QSDP_NAMESPACE
}  // namespace
