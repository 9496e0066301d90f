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

// The same with Rice numbers of what exceeds `less`, and the parameter that makes it shortest.
INLINE int64_t rice_size(const uint8_t* magnitude, int64_t n, int64_t counted, int less, int top,
                         int* parameter) {
  int64_t best = INT64_MAX;
  for (int r = 0; r == 0 || top >> (r - 1); r++) {
    int64_t sum = 0;
    for (int64_t at = 0; at < n; at += CHUNK) {
      uint16_t some = 0;
      for (int k = 0; k < CHUNK; k++) {
        const uint8_t m = magnitude[at + k];
        some = uint16_t(some + (uint8_t(m - (m >= less ? less : 0)) >> r));
      }
      sum += some;
    }
    const int64_t bits = counted * (1 + r) + sum;
    if (bits >= best) break;  // differences from r to r grow
    best = bits, *parameter = r;
  }
  return best;
}

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

// `magnitude` has zeros behind the block up to a whole chunk.
INLINE Sizes sizes_of(const uint8_t* magnitude, int64_t n, int top, int32_t coding) {
  Sizes sizes = {n, 0, {0, INT64_MAX / 2}, {0, 0}, 0};
  for (int64_t at = 0; at < n; at += CHUNK) {
    uint8_t few = 0;
    for (int k = 0; k < CHUNK; k++) few = uint8_t(few + (magnitude[at + k] != 0));
    sizes.nonzero += few;
  }
  if (coding == ELIAS) {
    sizes.bits[0] = elias_size(magnitude, n, n, 1, top) + sizes.nonzero;
  } else {
    int r = 0;
    sizes.bits[0] = 4 + sizes.nonzero + rice_size(magnitude, n, n, 0, top, &r);
    sizes.number[0] = 1 + r;
  }
  if (4 * sizes.nonzero > 3 * n) return sizes;
  sizes.bits[1] = 0;
  if (!sizes.nonzero) return sizes;
  int64_t last = -1, gaps = 0;
  if (coding == ELIAS) {
    const uint8_t* bits = tables().elias_bits;
    for_nonzero(magnitude, n, [&](int64_t place) {
      gaps += bits[log2_of(uint32_t(place - last))];
      last = place;
    });
    sizes.bits[1] = sizes.nonzero + gaps + elias_size(magnitude, n, sizes.nonzero, 0, top);
    return sizes;
  }
  const int64_t zeros = n - sizes.nonzero;
  const int64_t ratio = 77 * (2 * zeros + sizes.nonzero) / (160 * sizes.nonzero);
  const int r = int(minimum(15, log2_of(uint32_t(maximum(1, ratio)))));
  for_nonzero(magnitude, n, [&](int64_t place) {
    gaps += (place - last - 1) >> r;
    last = place;
  });
  int own = 0;
  const int64_t magnitudes = rice_size(magnitude, n, sizes.nonzero, 1, top, &own);
  sizes.bits[1] = 8 + sizes.nonzero * (2 + r) + gaps + magnitudes;
  sizes.number[1] = 1 + own, sizes.gap_parameter = r;
  return sizes;
}

// Two integers from -8 to 7 in a byte, the first in its low half.
INLINE uint8_t nibbles(int8_t low, int8_t high) { return uint8_t((low & 15) | (high & 15) << 4); }

// `k` has zeros behind the block, for a pair.
INLINE uint8_t* write_dense(const int8_t* k, int64_t n, int number, bool small, uint8_t* to) {
  BitWriter writer(to);
  if (number) writer.add(uint64_t(number - 1), 4);
  const Word *const one = tables().one[number], *const two = tables().two[number];
  const auto write_one = [&](int8_t value) {
    const Word word = one[uint8_t(value)];
    if (word.size) return writer.add(word.bits, int(word.size));
    const uint32_t magnitude = uint32_t(value < 0 ? -value : value);  // a long Rice number
    writer.add_rice(magnitude, number - 1);
    writer.add(value < 0, 1);
  };
  int64_t i = 0;
  for (; small && i + 4 <= n; i += 4) {
    const Word a = two[nibbles(k[i], k[i + 1])];
    const Word b = two[nibbles(k[i + 2], k[i + 3])];
    if (a.size && b.size && a.size + b.size <= 56) {
      writer.add(a.bits | uint64_t(b.bits) << a.size, int(a.size + b.size));
      continue;
    }
    for (int j = 0; j < 4; j++) write_one(k[i + j]);
  }
  for (; small && i + 2 <= n; i += 2) {
    const uint8_t pair = nibbles(k[i], k[i + 1]);
    const Word word = two[pair];
    if (word.size)
      writer.add(word.bits, int(word.size));
    else
      write_one(k[i]), write_one(k[i + 1]);
  }
  for (; i + 2 <= n; i += 2) {
    const Word a = one[uint8_t(k[i])], b = one[uint8_t(k[i + 1])];
    if (a.size && b.size && a.size + b.size <= 56)
      writer.add(a.bits | uint64_t(b.bits) << a.size, int(a.size + b.size));
    else
      write_one(k[i]), write_one(k[i + 1]);
  }
  for (; i < n; i++) write_one(k[i]);
  return writer.end();
}

INLINE uint8_t* write_sparse(const int8_t* k, const uint8_t* magnitude, const Sizes& sizes,
                             uint8_t* to) {
  if (!sizes.nonzero) return to;
  BitWriter writer(to);
  const int number = sizes.number[1], r = sizes.gap_parameter;
  if (number) writer.add(uint64_t(r | (number - 1) << 4), 8);
  int64_t last = -1;
  const Number* const elias = tables().elias;
  for_nonzero(magnitude, sizes.numel, [&](int64_t place) {
    const uint32_t gap = uint32_t(place - last), own = magnitude[place];
    last = place;
    const Number far = number        ? rice_number(gap - 1, r)
                       : gap < KNOWN ? elias[gap]
                                     : elias_number(gap);
    const Number near = number ? rice_number(own - 1, number - 1) : elias[own];
    if (far.size + 1 + near.size <= 56) {
      const uint64_t negative = k[place] < 0;
      writer.add(far.bits | (negative | near.bits << 1) << far.size, far.size + 1 + near.size);
      return;
    }
    if (far.size <= 48)
      writer.add(far.bits, far.size);
    else
      writer.add_rice(gap - 1, r);  // Elias numbers are shorter
    writer.add(k[place] < 0, 1);
    if (!number)
      writer.add(near.bits, near.size);
    else
      writer.add_rice(own - 1, number - 1);
  });
  return writer.end();
}

// Writes a block's stream, or its packed codes, to `to`, and its header; returns the end.
INLINE uint8_t* code_block(const uint8_t* packed, int64_t n, const Planes& planes, int bits,
                           int32_t coding, int8_t* k, uint8_t* magnitude, uint8_t* header,
                           uint8_t* to) {
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
    const Sizes sizes = sizes_of(magnitude, n, top, coding);
    const int which = sizes.bytes(1) < sizes.bytes(0);
    const int64_t size = sizes.bytes(which);
    if (size < planes.bytes && size < 1 << 14) {
      word = uint16_t(size | (1 + which) << 14);
      memcpy(header, &word, 2);
      return which ? write_sparse(k, magnitude, sizes, to)
                   : write_dense(k, n, sizes.number[0], bits <= 4, to);
    }
  }
  memcpy(header, &word, 2);
  memcpy(to, packed, size_t(planes.bytes));
  return to + planes.bytes;
}

}  // namespace QSDP_NAMESPACE
}  // namespace
