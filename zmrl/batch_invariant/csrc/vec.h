// The one vector type of every kernel: 16 FP32 lanes.
//
// AVX-512 holds them in one register, AVX2 in two, the scalar build in an array. All three run the same IEEE operations
// in the same order per lane, so the bits do not depend on the instruction set. Rules that make this true:
//   * fused multiply-adds are written out (fma); the build forbids contraction of a*b+c;
//   * max/min follow x86: the second operand is returned when either is NaN;
//   * horizontal sums have one order (numerics.md rule 4): halving distance 8, 4, 2, 1;
//   * no approximate instruction (rcp, rsqrt) is used.
// Every instruction set is built into its own shared object, so templates of the standard library never mix.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // false alarms inside gcc 12's AVX-512 header (bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace zm {

using bf16 = uint16_t;
constexpr int LANES = 16;

inline float bits_to_float(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
inline uint32_t float_to_bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }
inline float to_float(bf16 b) { return bits_to_float(uint32_t(b) << 16); }
// Round to nearest, ties to even; NaN becomes a quiet NaN of the same sign.
inline bf16 to_bf16(float f) {
    uint32_t u = float_to_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return bf16((u >> 16) | 0x40u);
    return bf16((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

#if defined(__AVX512F__)
#define ZM_ISA_NAME "avx512"

struct f16 { __m512 v; };
inline f16 zero() { return {_mm512_setzero_ps()}; }
inline f16 set1(float x) { return {_mm512_set1_ps(x)}; }
inline f16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, f16 a) { _mm512_storeu_ps(p, a.v); }
inline f16 add(f16 a, f16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline f16 sub(f16 a, f16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline f16 mul(f16 a, f16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline f16 div(f16 a, f16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline f16 fma(f16 a, f16 b, f16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline f16 max(f16 a, f16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline f16 min(f16 a, f16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline f16 sqrt(f16 a) { return {_mm512_sqrt_ps(a.v)}; }
inline f16 load_bf16(const bf16* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16))};
}
// load_bf16 with the lanes in the order in which they come cheapest; split() brings lanes into that order, join() out of it.
inline f16 load_bf16_split(const bf16* p) { return load_bf16(p); }
inline f16 split(f16 a) { return a; }
inline f16 join(f16 a) { return a; }
inline void store_bf16(bf16* p, f16 a) {
    __m512i u = _mm512_castps_si512(a.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd)), 16);
    __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
    __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(r, nan, quiet)));
}
// Past the caches: for what is not read again soon. p: a multiple of 32 bytes.
inline void stream(float* p, f16 a) {
    _mm256_stream_ps(p, _mm512_castps512_ps256(a.v));
    _mm256_stream_ps(p + 8, _mm512_extractf32x8_ps(a.v, 1));
}
// bf16(a) as FP32
inline f16 round_bf16(f16 a) {
    const __m512i u = _mm512_castps_si512(a.v), high = _mm512_set1_epi32(int(0xffff0000u));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i r = _mm512_and_si512(_mm512_add_epi32(u, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd)), high);
    const __m512i quiet = _mm512_or_si512(_mm512_and_si512(u, high), _mm512_set1_epi32(0x400000));
    return {_mm512_castsi512_ps(_mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), quiet))};
}
// whether a < b in every lane (false for NaN)
inline bool all_lt(f16 a, f16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ) == 0xffff; }
// c where a < b, else d (false for NaN)
inline f16 select_lt(f16 a, f16 b, f16 c, f16 d) {
    return {_mm512_mask_mov_ps(d.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), c.v)};
}
// c where a is NaN, else d
inline f16 select_nan(f16 a, f16 c, f16 d) {
    return {_mm512_mask_mov_ps(d.v, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), c.v)};
}
inline f16 abs(f16 a) { return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff)))}; }
// magnitude of a with the sign of b
inline f16 copysign(f16 a, f16 b) {
    const __m512i m = _mm512_set1_epi32(0x7fffffff);
    return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_and_si512(m, _mm512_castps_si512(a.v)),
                                                _mm512_andnot_si512(m, _mm512_castps_si512(b.v))))};
}
// 2^n for integral n in [-126, 127]
inline f16 exp2i(f16 n) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
// x = m * 2^e with m in [0.5, 1) for positive normal x
inline void frexp(f16 x, f16& m, f16& e) {
    __m512i u = _mm512_castps_si512(x.v);
    e.v = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_srli_epi32(u, 23), _mm512_set1_epi32(126)));
    m.v = _mm512_castsi512_ps(_mm512_or_si512(_mm512_and_si512(u, _mm512_set1_epi32(0x007fffff)), _mm512_set1_epi32(0x3f000000)));
}

#elif defined(__AVX2__)
#define ZM_ISA_NAME "avx2"

struct f16 { __m256 a, b; };
inline f16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline f16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline f16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, f16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline void stream(float* p, f16 x) { _mm256_stream_ps(p, x.a); _mm256_stream_ps(p + 8, x.b); }
#define ZM_BINARY(name, op) inline f16 name(f16 x, f16 y) { return {op(x.a, y.a), op(x.b, y.b)}; }
ZM_BINARY(add, _mm256_add_ps)
ZM_BINARY(sub, _mm256_sub_ps)
ZM_BINARY(mul, _mm256_mul_ps)
ZM_BINARY(div, _mm256_div_ps)
ZM_BINARY(max, _mm256_max_ps)
ZM_BINARY(min, _mm256_min_ps)
#undef ZM_BINARY
inline f16 fma(f16 x, f16 y, f16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline f16 sqrt(f16 x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
inline __m256 half_from_bf16(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
inline f16 load_bf16(const bf16* p) {
    return {half_from_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            half_from_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
// Even lanes, then odd lanes: a shift and a mask convert two.
inline f16 load_bf16_split(const bf16* p) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000u))))};
}
inline f16 split(f16 x) {
    const __m256 low = _mm256_permute2f128_ps(x.a, x.b, 0x20), high = _mm256_permute2f128_ps(x.a, x.b, 0x31);
    return {_mm256_shuffle_ps(low, high, 0x88), _mm256_shuffle_ps(low, high, 0xdd)};
}
inline f16 join(f16 x) {
    const __m256 low = _mm256_unpacklo_ps(x.a, x.b), high = _mm256_unpackhi_ps(x.a, x.b);
    return {_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31)};
}
inline __m256i half_to_bf16(__m256 x) {  // 8 x 32-bit, value in the low 16 bits
    __m256i u = _mm256_castps_si256(x);
    __m256i hi = _mm256_srli_epi32(u, 16);
    __m256i odd = _mm256_and_si256(hi, _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd)), 16);
    __m256i quiet = _mm256_or_si256(hi, _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(r, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
inline void store_bf16(bf16* p, f16 x) {
    __m256i packed = _mm256_packus_epi32(half_to_bf16(x.a), half_to_bf16(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline __m256 half_round_bf16(__m256 x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(half_to_bf16(x), 16));
}
inline f16 round_bf16(f16 x) { return {half_round_bf16(x.a), half_round_bf16(x.b)}; }
inline bool all_lt(f16 a, f16 b) {
    return _mm256_movemask_ps(_mm256_and_ps(_mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ), _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))) == 0xff;
}
inline f16 select_lt(f16 a, f16 b, f16 c, f16 d) {
    return {_mm256_blendv_ps(d.a, c.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(d.b, c.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
inline f16 select_nan(f16 a, f16 c, f16 d) {
    return {_mm256_blendv_ps(d.a, c.a, _mm256_cmp_ps(a.a, a.a, _CMP_UNORD_Q)),
            _mm256_blendv_ps(d.b, c.b, _mm256_cmp_ps(a.b, a.b, _CMP_UNORD_Q))};
}
inline f16 abs(f16 x) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_and_ps(m, x.a), _mm256_and_ps(m, x.b)};
}
inline f16 copysign(f16 x, f16 y) {
    const __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    return {_mm256_or_ps(_mm256_and_ps(m, x.a), _mm256_andnot_ps(m, y.a)),
            _mm256_or_ps(_mm256_and_ps(m, x.b), _mm256_andnot_ps(m, y.b))};
}
inline __m256 half_exp2i(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline f16 exp2i(f16 n) { return {half_exp2i(n.a), half_exp2i(n.b)}; }
inline void half_frexp(__m256 x, __m256& m, __m256& e) {
    __m256i u = _mm256_castps_si256(x);
    e = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(u, 23), _mm256_set1_epi32(126)));
    m = _mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(u, _mm256_set1_epi32(0x007fffff)), _mm256_set1_epi32(0x3f000000)));
}
inline void frexp(f16 x, f16& m, f16& e) { half_frexp(x.a, m.a, e.a); half_frexp(x.b, m.b, e.b); }

#else
#define ZM_ISA_NAME "scalar"

struct f16 { float x[LANES]; };
#define ZM_LANES(expr) f16 r; for (int i = 0; i < LANES; ++i) r.x[i] = (expr); return r
inline f16 zero() { ZM_LANES(0.0f); }
inline f16 set1(float v) { ZM_LANES(v); }
inline f16 load(const float* p) { ZM_LANES(p[i]); }
inline void store(float* p, f16 a) { for (int i = 0; i < LANES; ++i) p[i] = a.x[i]; }
inline void stream(float* p, f16 a) { store(p, a); }
inline f16 add(f16 a, f16 b) { ZM_LANES(a.x[i] + b.x[i]); }
inline f16 sub(f16 a, f16 b) { ZM_LANES(a.x[i] - b.x[i]); }
inline f16 mul(f16 a, f16 b) { ZM_LANES(a.x[i] * b.x[i]); }
inline f16 div(f16 a, f16 b) { ZM_LANES(a.x[i] / b.x[i]); }
inline f16 fma(f16 a, f16 b, f16 c) { ZM_LANES(std::fma(a.x[i], b.x[i], c.x[i])); }
inline f16 max(f16 a, f16 b) { ZM_LANES(a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
inline f16 min(f16 a, f16 b) { ZM_LANES(a.x[i] < b.x[i] ? a.x[i] : b.x[i]); }
inline f16 sqrt(f16 a) { ZM_LANES(std::sqrt(a.x[i])); }
inline f16 load_bf16(const bf16* p) { ZM_LANES(to_float(p[i])); }
inline f16 load_bf16_split(const bf16* p) { return load_bf16(p); }
inline f16 split(f16 a) { return a; }
inline f16 join(f16 a) { return a; }
inline void store_bf16(bf16* p, f16 a) { for (int i = 0; i < LANES; ++i) p[i] = to_bf16(a.x[i]); }
inline f16 round_bf16(f16 a) { ZM_LANES(to_float(to_bf16(a.x[i]))); }
inline bool all_lt(f16 a, f16 b) {
    for (int i = 0; i < LANES; ++i)
        if (!(a.x[i] < b.x[i])) return false;
    return true;
}
inline f16 select_lt(f16 a, f16 b, f16 c, f16 d) { ZM_LANES(a.x[i] < b.x[i] ? c.x[i] : d.x[i]); }
inline f16 select_nan(f16 a, f16 c, f16 d) { ZM_LANES(a.x[i] != a.x[i] ? c.x[i] : d.x[i]); }
inline f16 abs(f16 a) { ZM_LANES(bits_to_float(float_to_bits(a.x[i]) & 0x7fffffffu)); }
inline f16 copysign(f16 a, f16 b) {
    ZM_LANES(bits_to_float((float_to_bits(a.x[i]) & 0x7fffffffu) | (float_to_bits(b.x[i]) & 0x80000000u)));
}
inline f16 exp2i(f16 n) { ZM_LANES(bits_to_float(uint32_t(int32_t(n.x[i]) + 127) << 23)); }
inline void frexp(f16 x, f16& m, f16& e) {
    for (int i = 0; i < LANES; ++i) {
        uint32_t u = float_to_bits(x.x[i]);
        e.x[i] = float(int32_t(u >> 23) - 126);
        m.x[i] = bits_to_float((u & 0x007fffffu) | 0x3f000000u);
    }
}
#undef ZM_LANES
#endif

// ---- shared by all instruction sets -------------------------------------------------------------------------------

// As store_bf16, past the caches. p: a multiple of 32 bytes.
inline void stream_bf16(bf16* p, f16 a) {
#if defined(__AVX2__)
    alignas(32) bf16 t[LANES];
    store_bf16(t, a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm256_load_si256(reinterpret_cast<const __m256i*>(t)));
#else
    store_bf16(p, a);
#endif
}

// The first n (0..16) lanes; the others are +0.0.
inline f16 load_n(const float* p, int n) {
    float t[LANES] = {0};
    std::memcpy(t, p, size_t(n) * 4);
    return load(t);
}
inline f16 load_bf16_n(const bf16* p, int n) {
    bf16 t[LANES] = {0};
    std::memcpy(t, p, size_t(n) * 2);
    return load_bf16(t);
}
inline void store_n(float* p, f16 a, int n) {
    float t[LANES];
    store(t, a);
    std::memcpy(p, t, size_t(n) * 4);
}
inline void store_bf16_n(bf16* p, f16 a, int n) {
    bf16 t[LANES];
    store_bf16(t, a);
    std::memcpy(p, t, size_t(n) * 2);
}
// numerics.md rule 4: lanes combined by halving distance 8, 4, 2, 1.
inline float sum_lanes(f16 a) {
#if defined(__AVX512F__) || defined(__AVX2__)
#if defined(__AVX512F__)
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
#else
    __m256 h = _mm256_add_ps(a.a, a.b);
#endif
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
#else
    float t[LANES];
    store(t, a);
    for (int d = 8; d; d >>= 1)
        for (int i = 0; i < d; ++i) t[i] = t[i] + t[i + d];
    return t[0];
#endif
}
// NaN if any lane is NaN.
inline float max_lanes(f16 a) {
    float t[LANES];
    store(t, a);
    float m = t[0];
    for (int i = 1; i < LANES; ++i) m = (t[i] > m || t[i] != t[i]) ? t[i] : m;
    return m;
}

}  // namespace zm
