// Blocks of a row to their coded form and back.

namespace {
namespace QSDP_NAMESPACE {

// Streams of blocks `begin` to `end` go to `to`, one after another; returns where they end. Up to 8
// bytes behind them are written.
uint8_t* compact(const CompactJob& job, int64_t begin, int64_t end, uint8_t* to) {
  alignas(64) static thread_local int8_t k[CODED_BLOCK];
  alignas(64) static thread_local uint8_t magnitude[CODED_BLOCK];
  static thread_local uint16_t places[CODED_BLOCK];
  for_coded_blocks(*job.layout, begin, end,
                   [&](const CodedSpan& span, const Planes& planes, int64_t block, int64_t n,
                       int64_t place) {
    to = code_block(job.row + place, n, planes, span.bits, span.coding, k, magnitude,
                    places, job.headers + HEADER_BYTES * block, to);
  });
  return to;
}

void expand(const ExpandJob& job, int64_t begin, int64_t end, const uint8_t* from) {
  alignas(64) static thread_local int8_t values[3][TOGETHER][CODED_BLOCK];
  Groups groups;
  for_coded_blocks(*job.layout, begin, end,
                   [&](const CodedSpan& span, const Planes& planes, int64_t block, int64_t n,
                       int64_t place) {
    const uint16_t word = header_at(job.headers, block);
    const int mode = word >> 14, top = (1 << (span.bits - 1)) - 1;
    const int64_t size = mode ? word & MAX_LENGTH : planes.bytes;
    const BitReader reader(from, size, job.end);
    uint8_t* const packed = job.row + place;
    if (mode == 0) {
      memcpy(packed, from, size_t(size));
    } else if (mode == 1) {
      Dense dense(reader, n, span.coding, top, nullptr);
      const bool few = dense.long_numbers();
      Group<Dense>& group = few ? groups.long_numbers : groups.short_numbers;
      dense.k = values[few][group.count];
      if (few)
        group.add(dense, planes, packed, read_few);
      else
        group.add(dense, planes, packed, read_found);
    } else {
      const Sparse sparse(reader, n, span.coding, top, values[2][groups.sparse.count]);
      groups.sparse.add(sparse, planes, packed, [](Sparse(&)[TOGETHER]) {});
    }
    from += size;
  }, [&] { groups.read(); });
}

}  // namespace QSDP_NAMESPACE
}  // namespace
