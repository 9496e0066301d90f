// The rotation of qsdp/kernels/transform.py: groups of ROTATION values, forth and back.

namespace {
namespace QSDP_NAMESPACE {

constexpr int ROTATION_VECTORS = ROTATION / LANES;

// At distance D of values in one vector, or of vectors, each pair becomes its sum and difference.
template <int DISTANCE>
INLINE void butterflies(Floats v[ROTATION_VECTORS]) {
  if constexpr (DISTANCE < LANES) {
    for (int i = 0; i < ROTATION_VECTORS; i++)
      v[i] = add_exact(v[i], load<Floats>(PAIR_SIGNS<DISTANCE>.of), swap<DISTANCE>(v[i]));
  } else {
    constexpr int APART = DISTANCE / LANES;
    for (int i = 0; i < ROTATION_VECTORS; i++) {
      if (i & APART) continue;
      const Floats a = v[i], b = v[i + APART];
      v[i] = a + b, v[i + APART] = a - b;
    }
  }
}

INLINE void butterflies(Floats v[ROTATION_VECTORS]) {
  butterflies<1>(v), butterflies<2>(v), butterflies<4>(v), butterflies<8>(v), butterflies<16>(v);
}

// The inverse of the rotation.
INLINE void rotate_back(Floats v[ROTATION_VECTORS]) {
  butterflies(v);
  for (int i = 0; i < ROTATION_VECTORS; i++) v[i] *= load<Floats>(SIGNS.of + i * LANES);
}

// `n` values as float32; but for a rest of less than ROTATION, rotated.
template <class T>
INLINE void rotate(const char* x, int64_t n, float* y) {
  prefetch_pages(x, n * T::SIZE);
  int64_t i = 0;
  for (; i + ROTATION <= n; i += ROTATION) {
    Floats v[ROTATION_VECTORS];
    for (int k = 0; k < ROTATION_VECTORS; k++)
      v[k] = T::get(x + (i + k * LANES) * T::SIZE) * load<Floats>(SCALED_SIGNS.of + k * LANES);
    butterflies(v);
    for (int k = 0; k < ROTATION_VECTORS; k++) store(y + i + k * LANES, v[k]);
  }
  char padded[LANES * T::SIZE];
  for (; i < n; i += LANES) {
    const char* from = x + i * T::SIZE;
    store(y + i, T::get(n - i < LANES ? pad<T>(from, n - i, padded, LANES) : from));
  }
}

}  // namespace QSDP_NAMESPACE
}  // namespace
