// Numbers of variable length back to blocks: qsdp/kernels/coded.py has the specification.

namespace {
namespace QSDP_NAMESPACE {

// Reads a stream bit by bit, and by the table many at once. Bytes behind the stream up to
// `readable` may be read, and then count for nothing.
struct BitReader {
  const uint8_t* from;
  const uint8_t* readable;
  int64_t at = 0, size;  // bits
  bool over = false;     // something was read that is not there

  BitReader(const uint8_t* start, int64_t bytes, const uint8_t* end)
      : from(start), readable(end), size(8 * bytes) {}

  // From the next bit on: 57 bits at least, if as many are readable.
  INLINE uint64_t window() const {
    const uint8_t* byte = from + (at >> 3);
    uint64_t word = 0;
    if (readable - byte >= 8)
      memcpy(&word, byte, 8);
    else
      memcpy(&word, byte, size_t(readable - byte));
    return word >> (at & 7);
  }
  INLINE uint32_t take(int count) {
    if (at + count > size) over = true;
    if (over) return 0;
    const uint32_t bits = uint32_t(window() & ((uint64_t(1) << count) - 1));
    at += count;
    return bits;
  }
  INLINE uint32_t elias() {
    uint32_t n = 1;
    while (take(1)) {
      if (n > 16) over = true;
      if (over) return 0;
      const uint32_t group = take(int(n));
      uint32_t value = 1;
      for (uint32_t i = 0; i < n; i++) value = value << 1 | (group >> i & 1);
      n = value;
    }
    return n;
  }
  INLINE uint32_t rice(int r) {
    uint32_t ones = 0;
    const uint64_t bits = window();
    const int few = __builtin_ctzll(~bits | uint64_t(1) << 40);
    if (few + 1 + r <= 40 && at + few + 1 + r <= size) {  // all of it is in the window
      at += few + 1 + r;
      return uint32_t(few) << r | (uint32_t(bits >> (few + 1)) & ((1u << r) - 1));
    }
    while (take(1)) ones++;
    const uint32_t low = take(r);
    // No block has as many values: too large for any place or magnitude.
    return ones > 1u << 16 ? 1u << 17 : ones << r | low;
  }
};

// A dense stream and its values, as int8 around zero.
struct Dense {
  BitReader reader;
  int number, top;
  const Found* found;    // for numbers below FEW_FROM
  const Few* few;        // for others
  int8_t* k;
  int64_t n, i = 0;      // i: how many values there are; up to 31 more than n
  bool stopped = false;  // at what no encoder writes

  Dense(const BitReader& bits, int64_t numel, int32_t coding, int top_, int8_t* to)
      : reader(bits), number(0), top(top_), k(to), n(numel) {
    if (coding == RICE) number = 1 + int(reader.take(4));
    found = tables().found[long_numbers() ? 0 : number];
    few = tables().few[number < NUMBERS ? number : 0];
  }

  INLINE bool long_numbers() const { return number >= FEW_FROM; }
  INLINE bool done() const { return i >= n || stopped; }

  // Reads some values, or one; whether there were any and more are wanted.
  INLINE bool step() {
    if (!long_numbers()) {
      const Found next = found[reader.window() & ((1 << WINDOW) - 1)];
      if (next.count && reader.at + next.size <= reader.size) {
        store(k + i, next.values);
        i += next.count, reader.at += next.size;
        return i < n;
      }
    }
    if (number && short_rice()) return i < n;
    const uint32_t magnitude = number ? reader.rice(number - 1) : reader.elias() - 1;
    const bool negative = !reader.over && magnitude && reader.take(1);
    stopped = reader.over || magnitude > uint32_t(top);
    if (stopped) return false;
    k[i++] = int8_t(negative ? -int(magnitude) : int(magnitude));
    return i < n;
  }

  // One Rice number and its sign, if both are in the window.
  INLINE bool short_rice() {
    const uint64_t bits = reader.window();
    const int r = number - 1, ones = __builtin_ctzll(~bits | uint64_t(1) << 40), at = ones + 1;
    const uint32_t magnitude =
        uint32_t(ones) << r | (uint32_t(bits >> at) & ((uint32_t(1) << r) - 1));
    const int sign = magnitude != 0, size = at + r + sign;
    if (ones == 40 || size > 56 || reader.at + size > reader.size || magnitude > uint32_t(top))
      return false;
    const int negative = int(bits >> (at + r) & 1) & sign;
    k[i++] = int8_t((int(magnitude) ^ -negative) + negative);
    reader.at += size;
    return true;
  }

  // The values that no encoder writes end it: how many come before. Behind `i` there is room for a
  // whole chunk.
  INLINE int64_t good() const {
    const int64_t count = minimum(i, n);
    uint8_t beyond = 0;
    memset(k + count, 0, size_t(divide_up(count, CHUNK) * CHUNK - count));
    for (int64_t at = 0; at < count; at += CHUNK)
      for (int j = 0; j < CHUNK; j++) beyond |= uint8_t(uint8_t(k[at + j] + top) > 2 * top);
    for (int64_t at = 0; beyond && at < count; at++)
      if (k[at] > top || k[at] < -top) return at;
    return count;
  }
};

// A sparse stream and its values.
struct Sparse {
  BitReader reader;
  bool elias;
  int top, r = 0, own = 0;  // parameters of gaps and of magnitudes
  int8_t* k;
  int64_t n, at = -1;

  Sparse(const BitReader& bits, int64_t numel, int32_t coding, int top_, int8_t* to)
      : reader(bits), elias(coding == ELIAS), top(top_), k(to), n(numel) {
    memset(k, 0, size_t(n));
    if (!elias && reader.size) r = int(reader.take(4)), own = int(reader.take(4));
  }
  INLINE bool done() const { return at + 1 >= n || !reader.size; }
  INLINE int64_t good() const { return n; }

  // Reads a value; whether there was one and more are wanted.
  INLINE bool step() {
    const uint64_t bits = reader.window();
    int64_t gap, magnitude;
    int size;
    bool negative;
    if (elias) {
      const Read* const known = tables().elias_read;
      const Read far = known[bits & ((1 << WINDOW) - 1)];
      const Read near = known[bits >> (far.size + 1) & ((1 << WINDOW) - 1)];
      gap = far.number, magnitude = near.number, negative = bits >> far.size & 1;
      size = far.size && near.size ? far.size + 1 + near.size : 64;
    } else {
      const int ones = __builtin_ctzll(~bits | uint64_t(1) << 20), far = ones + 1 + r;
      const uint64_t rest = bits >> (far + 1);
      const int few = __builtin_ctzll(~rest | uint64_t(1) << 10);
      gap = (int64_t(ones) << r) + int64_t(bits >> (ones + 1) & ((1u << r) - 1)) + 1;
      magnitude = (int64_t(few) << own) + int64_t(rest >> (few + 1) & ((1u << own) - 1)) + 1;
      negative = bits >> far & 1;
      size = ones < 20 && few < 10 ? far + 1 + few + 1 + own : 64;
    }
    if (size <= 56 && reader.at + size <= reader.size) {
      reader.at += size;
    } else {
      gap = elias ? reader.elias() : int64_t(reader.rice(r)) + 1;
      negative = reader.take(1);
      magnitude = elias ? reader.elias() : int64_t(reader.rice(own)) + 1;
    }
    at += gap;
    if (reader.over || magnitude > top || at >= n) return false;
    k[at] = int8_t(negative ? -magnitude : magnitude);
    return at + 1 < n;
  }
};

// Packs integers, of which the first `good` are there and the others are 0.
INLINE void pack_values(int8_t* k, int64_t good, int64_t n, const Planes& planes, int top,
                        uint8_t* packed) {
  memset(k + good, 0, size_t(divide_up(n, CHUNK) * CHUNK - good));
  for (int64_t at = 0; at < n; at += CHUNK) {
    const int64_t count = minimum(n - at, CHUNK);
    uint8_t codes[CHUNK];
    for (int i = 0; i < CHUNK; i++) codes[i] = uint8_t(k[at + i] + top);
    if (count < CHUNK) memset(codes + count, 0, size_t(CHUNK - count));
    pack(codes, count, planes, at, packed);
  }
}

}  // namespace QSDP_NAMESPACE
}  // namespace
