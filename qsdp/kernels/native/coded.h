// Blocks to numbers of variable length: qsdp/kernels/coded.py has the specification.

namespace {
namespace QSDP_NAMESPACE {

constexpr int CODED_BLOCK = 65536 + CHUNK;  // values of the largest block, and what goes beyond

// Appends bits to bytes; writes up to 8 bytes beyond what counts.
struct BitWriter {
  uint8_t* to;
  uint64_t waiting = 0;
  int count = 0;  // below 8 between calls

  explicit BitWriter(uint8_t* start) : to(start) {}

  INLINE void add(uint64_t bits, int size) {  // up to 56
    waiting |= bits << count;
    count += size;
    store(to, waiting);
    to += count >> 3;
    waiting >>= count & ~7;
    count &= 7;
  }
  INLINE void add_ones(uint32_t ones) {
    for (; ones > 32; ones -= 32) add(0xffffffff, 32);
    add((uint64_t(1) << ones) - 1, int(ones));
  }
  INLINE void add_rice(uint32_t n, int r) {
    add_ones(n >> r);
    add(uint64_t(n & ((1u << r) - 1)) << 1, 1 + r);
  }
  // The last byte is filled with ones.
  INLINE uint8_t* end() {
    if (count) *to++ = uint8_t(waiting | 0xffu << count);
    return to;
  }
};

// What a block's integers say about the size of its streams.
struct Sizes {
  int64_t numel, nonzero, bits[2];  // of dense and sparse, bits
  int number[2], gap_parameter;     // which of NUMBERS each takes

  INLINE int64_t bytes(int which) const { return divide_up(bits[which], 8); }
};

// Bits of the integers' magnitudes as E(magnitude + add), of those that are not 0 where add is 0.
INLINE int64_t elias_size(const uint8_t* magnitude, int64_t n, int64_t counted, int add, int top) {
  const uint8_t* sizes = tables().elias_bits;
  int64_t bits = counted * sizes[0];
  for (int i = 1; (1 << i) - add <= top; i++) {
    int64_t reach = 0;
    const uint8_t from = uint8_t((1 << i) - add);
    for (int64_t at = 0; at < n; at += CHUNK) {
      uint8_t few = 0;
      for (int k = 0; k < CHUNK; k++) few = uint8_t(few + (magnitude[at + k] >= from));
      reach += few;
    }
    if (!reach) break;
    bits += reach * (sizes[i] - sizes[i - 1]);
  }
  return bits;
}

INLINE int64_t ones_in(const uint64_t* masks) {
  int64_t ones = 0;
  for (int word = 0; word < CHUNK / 64; word++) ones += __builtin_popcountll(masks[word]);
  return ones;
}

// Of magnitudes up to `top`, how many have each bit, and how many are not 0. With `less` they are
// counted as one less, but for those that are 0.
struct BitCounts {
  int64_t of[8] = {}, nonzero = 0;

  INLINE BitCounts(const uint8_t* magnitude, int64_t n, int top, bool less) {
    for (int64_t at = 0; at < n; at += CHUNK) {
      alignas(64) uint8_t lowered[CHUNK];
      for (int k = 0; less && k < CHUNK; k++) {
        const uint8_t m = magnitude[at + k];
        lowered[k] = uint8_t(m - (m != 0));
      }
      const uint8_t* const own = less ? lowered : magnitude + at;
      uint64_t any[CHUNK / 64] = {}, masks[CHUNK / 64];
      for (int bit = 0; top >> bit; bit++) {
        pack_1(own, bit, reinterpret_cast<uint8_t*>(masks));
        of[bit] += ones_in(masks);
        for (int word = 0; word < CHUNK / 64; word++) any[word] |= masks[word];
      }
      nonzero += ones_in(any);
    }
  }

  // Sum of magnitudes without their r lowest bits.
  INLINE int64_t shifted(int r) const {
    int64_t sum = 0;
    for (int bit = r; bit < 8; bit++) sum += of[bit] << (bit - r);
    return sum;
  }

  // At least as many bits as `counted` magnitudes take as Rice numbers of one less: those that are
  // not below a parameter's step lose at most 1 of what is above it.
  INLINE int64_t least_lowered(int64_t counted, int top) const {
    int64_t least = INT64_MAX;
    for (int r = 0; r == 0 || top >> (r - 1); r++) {
      const int64_t above = shifted(r);
      least = minimum(least, counted * (1 + r) + above - minimum(counted, above));
    }
    return least;
  }

  // Bits of `counted` magnitudes as Rice numbers, and the parameter that makes them shortest.
  INLINE int64_t rice_size(int64_t counted, int top, int* parameter) const {
    int64_t best = INT64_MAX;
    for (int r = 0; r == 0 || top >> (r - 1); r++) {
      const int64_t bits = counted * (1 + r) + shifted(r);
      if (bits >= best) break;  // differences from r to r grow
      best = bits, *parameter = r;
    }
    return best;
  }
};

// Calls body(place) for every value that is not 0.
template <class Body>
INLINE void for_nonzero(const uint8_t* magnitude, int64_t n, const Body& body) {
  for (int64_t at = 0; at < n; at += CHUNK) {
    alignas(64) uint8_t is[CHUNK];
    uint64_t masks[CHUNK / 64];
    for (int i = 0; i < CHUNK; i++) is[i] = magnitude[at + i] != 0;
    pack_1(is, 0, reinterpret_cast<uint8_t*>(masks));
    for (int word = 0; word < CHUNK / 64; word++)
      for (uint64_t mask = masks[word]; mask; mask &= mask - 1)
        body(at + 64 * word + __builtin_ctzll(mask));
  }
}

// Places of values that are not 0.
INLINE void list_nonzero(const uint8_t* magnitude, int64_t n, uint16_t* places) {
  for_nonzero(magnitude, n, [&](int64_t place) { *places++ = uint16_t(place); });
}

// Of an Elias stream. `magnitude` has zeros behind the block up to a whole chunk.
INLINE void elias_sizes(const uint8_t* magnitude, int top, uint16_t* places, Sizes& sizes) {
  const int64_t n = sizes.numel, nonzero = sizes.nonzero;
  sizes.bits[0] = elias_size(magnitude, n, n, 1, top) + nonzero;
  if (!places) return;
  list_nonzero(magnitude, n, places);
  const uint8_t* bits = tables().elias_bits;
  int64_t last = -1, gaps = 0;
  for (int64_t i = 0; i < nonzero; i++) {
    gaps += bits[log2_of(uint32_t(places[i] - last))];
    last = places[i];
  }
  sizes.bits[1] = nonzero + gaps + elias_size(magnitude, n, nonzero, 0, top);
}

// At least as many bits as gaps take beyond their first ones and parameters: exact for r = 0.
INLINE int64_t least_gaps(const uint8_t* magnitude, int64_t n, int64_t nonzero, int r) {
  int64_t end = n;
  while (!magnitude[end - 1]) end--;
  const int64_t zeros_between = end - nonzero, rounded_off = nonzero * ((1 << r) - 1);
  return maximum(0, zeros_between - rounded_off) >> r;
}

// Sizes of a block's Rice streams; that of the sparse one only where it can be the shorter.
INLINE void rice_sizes(const uint8_t* magnitude, int top, const BitCounts& counts,
                       uint16_t* places, Sizes& sizes) {
  const int64_t n = sizes.numel, nonzero = sizes.nonzero;
  int own = 0;
  sizes.bits[0] = 4 + nonzero + counts.rice_size(n, top, &own);
  sizes.number[0] = 1 + own;
  if (!places) return;
  const int64_t ratio = 77 * (2 * (n - nonzero) + nonzero) / (160 * nonzero);
  const int r = int(minimum(15, log2_of(uint32_t(maximum(1, ratio)))));
  const int64_t others = 8 + nonzero * (2 + r);
  const int64_t least = counts.least_lowered(nonzero, top);
  if (others + least_gaps(magnitude, n, nonzero, r) + least >= sizes.bits[0]) return;
  list_nonzero(magnitude, n, places);
  int64_t gaps = places[0] >> r;
  for (int64_t i = 1; i < nonzero; i++) gaps += (places[i] - places[i - 1] - 1) >> r;
  const BitCounts lowered(magnitude, n, top, true);
  sizes.bits[1] = others + gaps + lowered.rice_size(nonzero, top, &own);
  sizes.number[1] = 1 + own, sizes.gap_parameter = r;
}

// `magnitude` has zeros behind the block up to a whole chunk. Lists the places that a sparse stream
// keeps, unless it is longer for certain.
INLINE Sizes sizes_of(const uint8_t* magnitude, int64_t n, int top, int32_t coding,
                      uint16_t* places) {
  const BitCounts counts(magnitude, n, top, false);
  Sizes sizes = {n, counts.nonzero, {0, INT64_MAX / 2}, {0, 0}, 0};
  const bool sparse = 4 * sizes.nonzero <= 3 * n;
  if (sparse && !sizes.nonzero) sizes.bits[1] = 0;
  uint16_t* const kept = sparse && sizes.nonzero ? places : nullptr;
  if (coding == ELIAS)
    elias_sizes(magnitude, top, kept, sizes);
  else
    rice_sizes(magnitude, top, counts, kept, sizes);
  return sizes;
}

// Two integers from -8 to 7 in a byte, the first in its low half.
INLINE uint8_t nibbles(int8_t low, int8_t high) { return uint8_t((low & 15) | (high & 15) << 4); }

// Two values each as Rice numbers with their signs, bits and sizes as a Word's; vectorized.
INLINE void rice_pairs(const int8_t* k, int r, uint64_t* pairs, uint32_t* sizes) {
  alignas(64) uint32_t bits[CHUNK], own[CHUNK];
  for (int i = 0; i < CHUNK; i++) {
    const uint32_t negative = k[i] < 0, magnitude = uint32_t(k[i] < 0 ? -k[i] : k[i]);
    const uint32_t ones = magnitude >> r, there = magnitude != 0, size = ones + 1 + r + there;
    const uint32_t fits = size <= 32, few = ones & (0u - fits), low = magnitude & ((1u << r) - 1);
    bits[i] = ((1u << few) - 1) | low << (few + 1) | negative << ((few + 1 + r) & 31);
    own[i] = fits ? size : LONG;
  }
  for (int i = 0; i < CHUNK / 2; i++) {
    pairs[i] = bits[2 * i] | uint64_t(bits[2 * i + 1]) << (own[2 * i] & 63);
    sizes[i] = own[2 * i] + own[2 * i + 1];
  }
}

INLINE uint8_t* write_dense(const int8_t* k, int64_t n, int number, bool small, uint8_t* to) {
  BitWriter writer(to);
  if (number) writer.add(uint64_t(number - 1), 4);
  const Word *const one = tables().one[number], *const two = tables().two[number];
  const auto write_one = [&](int8_t value) {
    const Word word = one[uint8_t(value)];
    if (word.size != LONG) return writer.add(word.bits, int(word.size));
    const uint32_t magnitude = uint32_t(value < 0 ? -value : value);  // a long Rice number
    writer.add_rice(magnitude, number - 1);
    writer.add(value < 0, 1);
  };
  // Four values at once, unless they are long.
  const auto write_four = [&](int64_t i, uint64_t a, uint32_t a_size, uint64_t b, uint32_t b_size) {
    if (a_size + b_size <= 56)
      writer.add(a | b << a_size, int(a_size + b_size));
    else
      for (int j = 0; j < 4; j++) write_one(k[i + j]);
  };
  int64_t i = 0;
  if (small) {
    for (; i + 4 <= n; i += 4) {
      const Word a = two[nibbles(k[i], k[i + 1])], b = two[nibbles(k[i + 2], k[i + 3])];
      write_four(i, a.bits, a.size, b.bits, b.size);
    }
  } else if (number) {
    for (; i + CHUNK <= n; i += CHUNK) {
      alignas(64) uint64_t pairs[CHUNK / 2];
      alignas(64) uint32_t sizes[CHUNK / 2];
      rice_pairs(k + i, number - 1, pairs, sizes);
      for (int j = 0; j < CHUNK / 2; j += 2)
        write_four(i + 2 * j, pairs[j], sizes[j], pairs[j + 1], sizes[j + 1]);
    }
  }
  for (; i < n; i++) write_one(k[i]);
  return writer.end();
}

// A value that is not 0 and what lies between it and the one before.
INLINE void write_kept(BitWriter& writer, uint32_t gap, int8_t value, int number, int r) {
  const uint32_t own = uint32_t(value < 0 ? -value : value);
  if (number) {
    writer.add_rice(gap - 1, r);
    writer.add(value < 0, 1);
    return writer.add_rice(own - 1, number - 1);
  }
  const Number far = gap < KNOWN ? tables().elias[gap] : elias_number(gap);
  const Number near = tables().elias[own];
  const uint64_t signed_near = uint64_t(value < 0) | near.bits << 1;
  writer.add(far.bits | signed_near << far.size, far.size + 1 + near.size);
}

INLINE uint8_t* write_sparse(const int8_t* k, const uint16_t* places, const Sizes& sizes,
                             uint8_t* to) {
  if (!sizes.nonzero) return to;
  BitWriter writer(to);
  const int number = sizes.number[1], r = sizes.gap_parameter;
  int64_t last = -1, i = 0;
  if (number) writer.add(uint64_t(r | (number - 1) << 4), 8);
  const Word* const gaps = tables().gap[number ? r : ELIAS_GAPS];
  const Word* const kept = tables().kept[number];
  const Word far = {0, LONG};
  for (; i + 2 <= sizes.nonzero; i += 2) {  // two at once, unless they are long
    const int64_t here = places[i], next = places[i + 1];
    const uint64_t gap = uint64_t(here - last - 1), second = uint64_t(next - here - 1);
    const Word words[] = {gap < KNOWN_GAPS ? gaps[gap] : far, kept[uint8_t(k[here])],
                          second < KNOWN_GAPS ? gaps[second] : far, kept[uint8_t(k[next])]};
    const uint32_t a = words[0].size + words[1].size, b = words[2].size + words[3].size;
    if (a + b <= 56) {
      const uint64_t low = words[0].bits | uint64_t(words[1].bits) << words[0].size;
      const uint64_t high = words[2].bits | uint64_t(words[3].bits) << words[2].size;
      writer.add(low | high << a, int(a + b));
    } else {
      write_kept(writer, uint32_t(gap + 1), k[here], number, r);
      write_kept(writer, uint32_t(second + 1), k[next], number, r);
    }
    last = next;
  }
  for (; i < sizes.nonzero; last = places[i++])
    write_kept(writer, uint32_t(places[i] - last), k[places[i]], number, r);
  return writer.end();
}

// Writes a block's stream, or its packed codes, to `to`, and its header; returns the end.
INLINE uint8_t* code_block(const uint8_t* packed, int64_t n, const Planes& planes, int bits,
                           int32_t coding, int8_t* k, uint8_t* magnitude, uint16_t* places,
                           uint8_t* header, uint8_t* to) {
  const int top = (1 << (bits - 1)) - 1;
  uint8_t largest = 0;
  for (int64_t at = 0; at < n; at += CHUNK) {
    const int64_t count = minimum(n - at, CHUNK);
    uint8_t codes[CHUNK];
    unpack(packed, count, planes, at, codes);
    if (count < CHUNK) memset(codes + count, top, size_t(CHUNK - count));
    for (int i = 0; i < CHUNK; i++) {
      const uint8_t code = codes[i];
      const uint8_t size = uint8_t(code > top ? code - top : top - code);
      k[at + i] = int8_t(code - top), magnitude[at + i] = size;
      largest = largest < size ? size : largest;
    }
  }
  uint16_t word = 0;
  if (largest <= top) {
    const Sizes sizes = sizes_of(magnitude, n, top, coding, places);
    const int which = sizes.bytes(1) < sizes.bytes(0);
    const int64_t size = sizes.bytes(which);
    if (size < planes.bytes && size < 1 << 14) {
      word = uint16_t(size | (1 + which) << 14);
      memcpy(header, &word, 2);
      return which ? write_sparse(k, places, sizes, to)
                   : write_dense(k, n, sizes.number[0], bits <= 4, to);
    }
  }
  memcpy(header, &word, 2);
  memcpy(to, packed, size_t(planes.bytes));
  return to + planes.bytes;
}

}  // namespace QSDP_NAMESPACE
}  // namespace
