// Blocks of a row to their coded form and back.

namespace {
namespace QSDP_NAMESPACE {

// Streams of blocks `begin` to `end` go to `to`, one after another; returns where they end. Up to 8
// bytes behind them are written.
uint8_t* compact(const CompactJob& job, int64_t begin, int64_t end, uint8_t* to) {
  alignas(64) static thread_local int8_t k[CODED_BLOCK];
  alignas(64) static thread_local uint8_t magnitude[CODED_BLOCK];
  for_coded_blocks(*job.layout, begin, end,
                   [&](const CodedSpan& span, const Planes& planes, int64_t block, int64_t n,
                       int64_t place) {
    to = code_block(job.row + place, n, planes, span.bits, span.coding, k, magnitude,
                    job.headers + HEADER_BYTES * block, to);
  });
  return to;
}

// Dense blocks that are read together: each waits for its own last number, none for another's.
struct DenseBlocks {
  static constexpr int MOST = 4;
  struct Place {
    const Planes* planes;
    uint8_t* packed;
  };
  alignas(8) unsigned char memory[MOST][sizeof(Dense)];
  Place places[MOST];
  int count = 0;

  INLINE Dense& at(int i) { return *reinterpret_cast<Dense*>(memory[i]); }

  INLINE void add(const Dense& block, const Planes& planes, uint8_t* packed) {
    memcpy(memory[count], &block, sizeof(Dense));
    places[count++] = {&planes, packed};
  }
  INLINE void read() {
    bool more[MOST];
    for (int i = 0; i < count; i++) more[i] = at(i).n > 0;
    if (count == MOST) {
      Dense a = at(0), b = at(1), c = at(2), d = at(3);
      while (more[0] && more[1] && more[2] && more[3])
        more[0] = a.step(), more[1] = b.step(), more[2] = c.step(), more[3] = d.step();
      const Dense* const all[] = {&a, &b, &c, &d};
      for (int i = 0; i < MOST; i++) memcpy(memory[i], all[i], sizeof(Dense));
    }
    for (int i = 0; i < count; i++) {
      while (more[i]) more[i] = at(i).step();
      pack_values(at(i).k, at(i).good(), at(i).n, *places[i].planes, at(i).top, places[i].packed);
    }
    count = 0;
  }
};

void expand(const ExpandJob& job, int64_t begin, int64_t end, const uint8_t* from) {
  alignas(64) static thread_local int8_t values[DenseBlocks::MOST][CODED_BLOCK];
  DenseBlocks waiting;
  for_coded_blocks(*job.layout, begin, end,
                   [&](const CodedSpan& span, const Planes& planes, int64_t block, int64_t n,
                       int64_t place) {
    const uint16_t word = header_at(job.headers, block);
    const int mode = word >> 14, top = (1 << (span.bits - 1)) - 1;
    const int64_t size = mode ? word & MAX_LENGTH : planes.bytes;
    uint8_t* const packed = job.row + place;
    int8_t* const k = values[waiting.count];
    if (mode == 0) {
      memcpy(packed, from, size_t(size));
    } else if (mode == 1) {
      waiting.add(Dense(BitReader(from, size, job.end), n, span.coding, top, k), planes, packed);
      if (waiting.count == DenseBlocks::MOST) waiting.read();
    } else {
      BitReader reader(from, size, job.end);
      read_sparse(reader, n, span.coding, top, k);
      pack_values(k, n, n, planes, top, packed);
    }
    from += size;
  }, [&] { waiting.read(); });
}

}  // namespace QSDP_NAMESPACE
}  // namespace
