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

void expand(const ExpandJob& job, int64_t begin, int64_t end, const uint8_t* from) {
  alignas(64) static thread_local int8_t k[CODED_BLOCK];
  for_coded_blocks(*job.layout, begin, end,
                   [&](const CodedSpan& span, const Planes& planes, int64_t block, int64_t n,
                       int64_t place) {
    const uint16_t word = header_at(job.headers, block);
    const int64_t size = word >> 14 ? word & MAX_LENGTH : planes.bytes;
    if (word >> 14)
      read_block(word >> 14, from, size, job.end, n, planes, span.bits, span.coding, k,
                 job.row + place);
    else
      memcpy(job.row + place, from, size_t(size));
    from += size;
  });
}

}  // namespace QSDP_NAMESPACE
}  // namespace
