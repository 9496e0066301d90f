// Random bits for every value of a block, for several counters of Philox at once.

namespace {
namespace QSDP_NAMESPACE {

constexpr int CHAINS = LANES == 8 ? 2 : 4;  // Philox vectors in flight: one would wait for itself
constexpr int REFILL = maximum(CHUNK, 8 * CHAINS * LANES / 2);  // values served by one refill
static_assert(REFILL == CHUNK || 8 * CHAINS / 2 * LANES / 2 == CHUNK, "half the chains: a chunk");

// Philox for LANES / 2 counters, in the low halves of 64-bit lanes, where the multiplication wants
// them; what is in the high halves never reaches a low half.
struct Philox {
  Longs c0, c1, c2, c3;

  INLINE void rounds_0_and_1(const BlockStream& stream, uint64_t counter) {
    static constexpr uint64_t EVEN[8] = {0, 2, 4, 6, 8, 10, 12, 14};
    const Longs p0 = multiply_low(load<Longs>(EVEN) + counter, Longs{} + MULTIPLIERS[0]);
    const Longs p1 = multiply_low(p0 >> 32 ^ stream.round0_c2, Longs{} + MULTIPLIERS[1]);
    c0 = p1 >> 32 ^ stream.round1_c0;
    c1 = p1;
    c2 = p0 ^ stream.round1_c2;
  }

  INLINE void round_2(const BlockStream& stream) {
    const Longs p0 = multiply_low(c0, Longs{} + MULTIPLIERS[0]);
    const Longs p1 = multiply_low(c2, Longs{} + MULTIPLIERS[1]);
    c0 = xor3(p1 >> 32, c1, Longs{} + stream.k0[2]);
    c2 = p0 >> 32 ^ stream.round2_c2;
    c1 = p1, c3 = p0;
  }

  INLINE void round(uint64_t k0, uint64_t k1) {
    const Longs p0 = multiply_low(c0, Longs{} + MULTIPLIERS[0]);
    const Longs p1 = multiply_low(c2, Longs{} + MULTIPLIERS[1]);
    c0 = xor3(p1 >> 32, c1, Longs{} + k0);
    c2 = xor3(p0 >> 32, c3, Longs{} + k1);
    c1 = p1, c3 = p0;
  }
};

// Random bits of CHAINS * LANES / 2 counters from `counter` on, `r` being that of its first value;
// with TWO, of half as many of two streams, a chunk each. Its own function without a loop over
// counters: inlined into one, its keys leave the registers.
template <int CHAINS, bool TWO>
__attribute__((noinline)) void random16(const BlockStream& stream, const BlockStream& second,
                                        uint64_t counter, int32_t* r) {
  Philox chain[CHAINS];  // even counters, odd counters, the next even ones
  const auto of = [&](int i) -> const BlockStream& {
    return TWO && i >= CHAINS / 2 ? second : stream;
  };
#pragma GCC unroll 4
  for (int i = 0; i < CHAINS; i++)
    chain[i].rounds_0_and_1(of(i), counter + uint64_t(TWO ? i % 2 : i / 2 * LANES + i % 2));
#pragma GCC unroll 4
  for (int i = 0; i < CHAINS; i++) chain[i].round_2(of(i));
#pragma GCC unroll 4
  for (uint32_t round = 3; round < ROUNDS; round++)
#pragma GCC unroll 4
    for (int i = 0; i < CHAINS; i++) chain[i].round(of(i).k0[round], of(i).k1[round]);
#pragma GCC unroll 2
  for (int i = 0; i < CHAINS; i += 2) {
    const Words words[4] = {
        interleave(chain[i].c0, chain[i + 1].c0), interleave(chain[i].c1, chain[i + 1].c1),
        interleave(chain[i].c2, chain[i + 1].c2), interleave(chain[i].c3, chain[i + 1].c3)};
    int32_t* to = r + i / 2 * LANES / 16 * CHUNK + i / 2 * LANES % 16;
#pragma GCC unroll 4
    for (int word = 0; word < 4; word++) {
      store(to + 32 * word, words[word] & 0xffff);
      store(to + 32 * word + 16, words[word] >> 16);
    }
  }
}

// r of REFILL values, or of the `n` that are left, from value `at` of a block on:
// [Note: where the random bits come from].
INLINE void random16_per_value(int64_t at, int64_t n, const BlockStream& stream, int32_t* r) {
  if (REFILL > CHUNK && n <= CHUNK)
    return random16<CHAINS / 2, false>(stream, stream, uint64_t(at / 8), r);
  for (int first = 0; first < REFILL / 8; first += CHAINS * LANES / 2)
    random16<CHAINS, false>(stream, stream, uint64_t(at / 8 + first),
                            r + first / 16 * CHUNK + first % 16);
}

// r of the first chunks of two blocks.
INLINE void random16_of_two(const BlockStream& first, const BlockStream& second, int32_t* r) {
  if (REFILL > CHUNK) return random16<CHAINS, true>(first, second, 0, r);
  random16_per_value(0, CHUNK, first, r);
  random16_per_value(0, CHUNK, second, r + CHUNK);
}

}  // namespace QSDP_NAMESPACE
}  // namespace
