// Access to rows whose length is no multiple of 16: the body by whole vectors, the tail padded with +0.0.
#pragma once
#include "vec.h"

namespace zm {

// Lanes i..i+15 of a row of n elements; lanes beyond the row are +0.0.
inline f16 row_load(const float* p, int64_t i, int64_t n) {
    return i + LANES <= n ? load(p + i) : load_n(p + i, int(n - i));
}
inline f16 row_load(const bf16* p, int64_t i, int64_t n) {
    return i + LANES <= n ? load_bf16(p + i) : load_bf16_n(p + i, int(n - i));
}
inline void row_store(float* p, int64_t i, int64_t n, f16 a) {
    if (i + LANES <= n) store(p + i, a); else store_n(p + i, a, int(n - i));
}
inline void row_store(bf16* p, int64_t i, int64_t n, f16 a) {
    if (i + LANES <= n) store_bf16(p + i, a); else store_bf16_n(p + i, a, int(n - i));
}

// numerics.md rule 4 for a product: lane j is the chain of fma(a[i], b[i], .) over i = j, j+16, ... from +0.0.
template <class A, class B>
inline float dot_lanes(const A* a, const B* b, int64_t n) {
    f16 sum = zero();
    for (int64_t i = 0; i < n; i += LANES) sum = fma(row_load(a, i, n), row_load(b, i, n), sum);
    return sum_lanes(sum);
}

// True if a < b in any lane.
inline bool any_lt(f16 a, f16 b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ) != 0;
#elif defined(__AVX2__)
    __m256 m = _mm256_or_ps(_mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ), _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ));
    return _mm256_movemask_ps(m) != 0;
#else
    bool any = false;
    for (int i = 0; i < LANES; ++i) any |= a.x[i] < b.x[i];
    return any;
#endif
}

// True if any lane is NaN.
inline bool any_nan(f16 a) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a.a, a.a, _CMP_UNORD_Q),
                                           _mm256_cmp_ps(a.b, a.b, _CMP_UNORD_Q))) != 0;
#else
    bool any = false;
    for (int i = 0; i < LANES; ++i) any |= a.x[i] != a.x[i];
    return any;
#endif
}

}  // namespace zm
