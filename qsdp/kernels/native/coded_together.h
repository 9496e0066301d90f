// Streams that are read four at a time: each waits for its own last number, none for another's.

namespace {
namespace QSDP_NAMESPACE {

constexpr int TOGETHER = 4;
constexpr int LOOKUPS = 4;  // of one 57-bit window

// How often up to `bits` bits may be taken, each time from a whole window.
INLINE int64_t safe_steps(const BitReader& reader, int bits) {
  const int64_t there = minimum(reader.size, 8 * (reader.readable - reader.from) - 64);
  return (there - reader.at) / bits;
}

// Blocks by the table that `of` gives of each, with a look at what is left only now and then. Stops
// where one is nearly done.
template <int BITS, int MOST, int COUNT, class Table>
INLINE void read_by_table(Dense (&blocks)[COUNT], const Table& of) {
  for (;;) {
    int64_t steps = INT64_MAX;
    for (const Dense& block : blocks)
      steps = minimum(steps, minimum(safe_steps(block.reader, LOOKUPS * BITS),
                                     divide_up(block.n - block.i, int64_t(LOOKUPS * MOST))));
    if (steps <= 0) return;
    // Copies: what is written to bytes might change anything else, as far as a compiler knows.
    const uint8_t* const from = blocks[0].reader.from;  // of all, so that registers suffice
    decltype(of(blocks[0])) table[COUNT];
    int8_t* k[COUNT];
    int64_t at[COUNT];
    for (int s = 0; s < COUNT; s++) {
      at[s] = 8 * (blocks[s].reader.from - from) + blocks[s].reader.at;
      table[s] = of(blocks[s]), k[s] = blocks[s].k + blocks[s].i;
    }
    bool whole = true;
    const auto read = [&](int s) {
      uint64_t bits = load<uint64_t>(from + (at[s] >> 3)) >> (at[s] & 7);
      for (int lookup = 0; lookup < LOOKUPS; lookup++) {
        const auto& next = table[s][bits & ((1 << BITS) - 1)];
        store(k[s], next.values);
        k[s] += next.count, at[s] += next.size, bits >>= next.size;
        if (lookup == LOOKUPS - 1) whole &= next.count != 0;  // 0 for all that follow, too
      }
    };
    for (; steps > 0 && whole; steps--)
      for (int s = 0; s < COUNT; s++) read(s);
    for (int s = 0; s < COUNT; s++) {
      blocks[s].reader.at = at[s] - 8 * (blocks[s].reader.from - from);
      blocks[s].i = k[s] - blocks[s].k;
    }
    for (Dense& block : blocks)  // a long number of one of them
      if (!whole && !block.done() && !block.step()) return;
    for (const Dense& block : blocks)
      if (block.done()) return;
  }
}

// Several blocks together, then each to its end.
template <int BITS, int MOST, class Table>
INLINE void read_all(Dense (&blocks)[TOGETHER], const Table& of) {
  read_by_table<BITS, MOST>(blocks, of);
  for (Dense& block : blocks)
    if (!block.done()) read_by_table<BITS, MOST>(reinterpret_cast<Dense(&)[1]>(block), of);
}

INLINE void read_found(Dense (&blocks)[TOGETHER]) {
  read_all<WINDOW, AT_ONCE>(blocks, [](const Dense& block) { return block.found; });
}

INLINE void read_few(Dense (&blocks)[TOGETHER]) {
  read_all<FEW_WINDOW, FEW_AT_ONCE>(blocks, [](const Dense& block) { return block.few; });
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

// The groups of a row.
struct Groups {
  Group<Dense> short_numbers, long_numbers;
  Group<Sparse> sparse;

  INLINE void read() { short_numbers.read(), long_numbers.read(), sparse.read(); }
};

}  // namespace QSDP_NAMESPACE
}  // namespace
