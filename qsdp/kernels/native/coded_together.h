// Streams that are read four at a time: each waits for its own last number, none for another's.

namespace {
namespace QSDP_NAMESPACE {

constexpr int TOGETHER = 4;

// How often up to `bits` bits may be taken, each time from a whole window.
INLINE int64_t safe_steps(const BitReader& reader, int bits) {
  const int64_t there = minimum(reader.size, 8 * (reader.readable - reader.from) - 64);
  return (there - reader.at) / bits;
}

// By the table, with a look at what is left only now and then. Stops where one is nearly done.
INLINE void read_by_table(Dense (&blocks)[TOGETHER]) {
  for (;;) {
    int64_t steps = INT64_MAX;
    for (const Dense& block : blocks)
      steps = minimum(steps, minimum(safe_steps(block.reader, WINDOW),
                                     divide_up(block.n - block.i, int64_t(AT_ONCE))));
    if (steps <= 0) return;
    const uint8_t* from[TOGETHER];
    const Found* found[TOGETHER];
    int8_t* k[TOGETHER];
    int64_t at[TOGETHER];
    for (int s = 0; s < TOGETHER; s++) {
      from[s] = blocks[s].reader.from, at[s] = blocks[s].reader.at;
      found[s] = blocks[s].found, k[s] = blocks[s].k + blocks[s].i;
    }
    bool whole = true;
    const auto read = [&](int s) {
      const uint64_t bits = load<uint64_t>(from[s] + (at[s] >> 3)) >> (at[s] & 7);
      const Found& next = found[s][bits & ((1 << WINDOW) - 1)];
      store(k[s], next.values);
      k[s] += next.count, at[s] += next.size, whole &= next.count != 0;
    };
    for (; steps > 0 && whole; steps--) read(0), read(1), read(2), read(3);
    for (int s = 0; s < TOGETHER; s++)
      blocks[s].reader.at = at[s], blocks[s].i = k[s] - blocks[s].k;
    for (Dense& block : blocks)  // a long number of one of them
      if (!whole && !block.done() && !block.step()) return;
    for (const Dense& block : blocks)
      if (block.done()) return;
  }
}

// Blocks that all `fits_window`. Stops where one is nearly done or has what no encoder writes.
INLINE void read_from_windows(Dense (&blocks)[TOGETHER]) {
  // Copies: what is written to bytes might change anything else, as far as a compiler knows.
  const uint8_t* from[TOGETHER];
  int8_t* k[TOGETHER];
  int64_t at[TOGETHER];
  int64_t r[TOGETHER];
  uint64_t most[TOGETHER];  // a bit at one more than the ones of any magnitude
  for (int s = 0; s < TOGETHER; s++) {
    from[s] = blocks[s].reader.from, r[s] = blocks[s].number - 1;
    most[s] = uint64_t(1) << ((blocks[s].top >> r[s]) + 1);
  }
  for (;;) {
    int64_t steps = INT64_MAX;
    for (const Dense& block : blocks)
      steps = minimum(steps, minimum(safe_steps(block.reader, 57),
                                     (block.n - block.i) / AT_A_TIME));
    if (steps <= 0) return;
    int64_t over = 0;
    for (int s = 0; s < TOGETHER; s++)
      at[s] = blocks[s].reader.at, k[s] = blocks[s].k + blocks[s].i;
    const auto read = [&](int s) {
      const uint64_t low = (uint64_t(1) << r[s]) - 1, any = 2 * low + 1;
      uint64_t bits = load<uint64_t>(from[s] + (at[s] >> 3)) >> (at[s] & 7);
      for (int v = 0; v < AT_A_TIME; v++) {
        const int64_t ones = __builtin_ctzll(~bits | most[s]), there = (bits & any) != 0;
        const uint64_t rest = bits >> (ones + 1);
        const int64_t magnitude = ones << r[s] | int64_t(rest & low);
        const int64_t negative = int64_t(rest >> r[s]) & there, size = ones + 1 + r[s] + there;
        over |= magnitude;
        k[s][v] = int8_t((magnitude ^ -negative) + negative);
        bits >>= size, at[s] += size;
      }
      k[s] += AT_A_TIME;
    };
    for (int64_t step = 0; step < steps; step++) read(0), read(1), read(2), read(3);
    if (over > INT8_MAX) return;  // smaller ones that are too large are found by good()
    for (int s = 0; s < TOGETHER; s++)
      blocks[s].reader.at = at[s], blocks[s].i = k[s] - blocks[s].k;
  }
}

// Collects blocks of one kind until there are TOGETHER, reads and packs them.
template <class Block>
struct Group {
  struct Place {
    const Planes* planes;
    uint8_t* packed;
  };
  alignas(8) unsigned char memory[TOGETHER][sizeof(Block)];
  Place places[TOGETHER];
  int count = 0;

  INLINE Block& at(int i) { return *reinterpret_cast<Block*>(memory[i]); }

  // `fast` reads what it can of TOGETHER blocks.
  template <class Fast>
  INLINE void add(const Block& block, const Planes& planes, uint8_t* packed, const Fast& fast) {
    memcpy(memory[count], &block, sizeof(Block));
    places[count++] = {&planes, packed};
    if (count == TOGETHER) {
      fast(reinterpret_cast<Block(&)[TOGETHER]>(memory));
      read();
    }
  }
  INLINE void read() {
    bool more[TOGETHER];
    for (int i = 0; i < count; i++) more[i] = !at(i).done();
    if (count == TOGETHER) {
      Block a = at(0), b = at(1), c = at(2), d = at(3);
      while (more[0] && more[1] && more[2] && more[3])
        more[0] = a.step(), more[1] = b.step(), more[2] = c.step(), more[3] = d.step();
      const Block* const all[] = {&a, &b, &c, &d};
      for (int i = 0; i < TOGETHER; i++) memcpy(memory[i], all[i], sizeof(Block));
    }
    for (int i = 0; i < count; i++) {
      while (more[i]) more[i] = at(i).step();
      pack_values(at(i).k, at(i).good(), at(i).n, *places[i].planes, at(i).top, places[i].packed);
    }
    count = 0;
  }
};

// The groups of a row: what tables are for, what windows are for, sparse ones.
struct Groups {
  Group<Dense> by_table, from_windows;
  Group<Sparse> sparse;

  INLINE void read() { by_table.read(), from_windows.read(), sparse.read(); }
};

}  // namespace QSDP_NAMESPACE
}  // namespace
