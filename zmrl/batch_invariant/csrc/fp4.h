// e2m1 (float4_e2m1fn) and e8m0: four-bit numbers and power-of-two scales. Every value is exact in FP32.
#pragma once
#include "vec.h"

namespace zm {

constexpr float E2M1[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// To nearest, ties to the even code, saturating at 6. There is no NaN code: NaN gives +0, and its group a NaN scale.
inline uint8_t to_e2m1(float x) {
    const float a = std::fabs(x);
    const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return x != x ? 0 : uint8_t(code | int(float_to_bits(x) >> 31 << 3));
}

// Whether rounding with an unbounded exponent would have left the range: 7 lies half-way to 8, the even one.
inline bool clips_e2m1(float x) { return std::fabs(x) >= 7.0f; }

#if defined(__AVX2__)
// Sixteen codes, one a byte, as BF16. All values have a zero low byte or 0x40, 0x80, 0xc0: two table look-ups of bytes.
inline void e2m1_to_bf16(__m128i codes, __m128i& first, __m128i& last) {
    const __m128i high = _mm_setr_epi8(0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, char(0x80), char(0xbf), char(0xbf),
                                       char(0xbf), char(0xc0), char(0xc0), char(0xc0), char(0xc0));
    const __m128i low = _mm_setr_epi8(0x00, 0x00, char(0x80), char(0xc0), 0x00, 0x40, char(0x80), char(0xc0), 0x00, 0x00,
                                      char(0x80), char(0xc0), 0x00, 0x40, char(0x80), char(0xc0));
    codes = _mm_and_si128(codes, _mm_set1_epi8(15));
    const __m128i h = _mm_shuffle_epi8(high, codes), l = _mm_shuffle_epi8(low, codes);
    first = _mm_unpacklo_epi8(l, h), last = _mm_unpackhi_epi8(l, h);
}
#endif

// The values of sixteen codes; the high nibble of a byte is ignored.
#if defined(__AVX512F__)
inline f16 decode_e2m1(__m128i codes) {  // vpermps reads the low four bits only
    return {_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), _mm512_loadu_ps(E2M1))};
}
#elif defined(__AVX2__)
inline f16 decode_e2m1(__m128i codes) {
    __m128i first, last;
    e2m1_to_bf16(codes, first, last);
    return {half_from_bf16(first), half_from_bf16(last)};
}
#endif

// 16 codes of a weight panel: byte j holds lane j in its low and lane j+8 in its high nibble.
inline f16 load_e2m1(const uint8_t* p) {
#if defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return decode_e2m1(_mm_unpacklo_epi64(bytes, _mm_srli_epi16(bytes, 4)));
#else
    float t[LANES];
    for (int j = 0; j < 8; ++j) t[j] = E2M1[p[j] & 15], t[j + 8] = E2M1[p[j] >> 4];
    return load(t);
#endif
}

// The same as BF16.
inline void unpack_e2m1(const uint8_t* p, bf16* out) {
#if defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    __m128i first, last;
    e2m1_to_bf16(_mm_unpacklo_epi64(bytes, _mm_srli_epi16(bytes, 4)), first, last);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), first), _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 8), last);
#else
    store_bf16(out, load_e2m1(p));
#endif
}

// 16 codes of a packed row: byte j holds element 2j in its low and element 2j+1 in its high nibble.
inline f16 load_e2m1_pairs(const uint8_t* p) {
#if defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return decode_e2m1(_mm_unpacklo_epi8(bytes, _mm_srli_epi16(bytes, 4)));
#else
    float t[LANES];
    for (int j = 0; j < 8; ++j) t[2 * j] = E2M1[p[j] & 15], t[2 * j + 1] = E2M1[p[j] >> 4];
    return load(t);
#endif
}

// out[j]: elements 2j (low nibble) and 2j+1 of x / scale, for n values.
inline void store_e2m1_pairs(const float* x, int64_t n, float scale, uint8_t* out) {
    for (int64_t j = 0; j < n / 2; ++j) out[j] = uint8_t(to_e2m1(x[2 * j] / scale) | to_e2m1(x[2 * j + 1] / scale) << 4);
}

// 2^(s - 127); 255 is NaN.
inline float e8m0_value(uint32_t s) { return bits_to_float(s == 0 ? 0x00400000u : (s == 255 ? 0x7fc00000u : s << 23)); }
#if defined(__AVX2__)
inline __m256 half_e8m0(__m128i bytes) {
    const __m256i s = _mm256_cvtepu8_epi32(bytes);
    const __m256i special = _mm256_or_si256(_mm256_cmpeq_epi32(s, _mm256_setzero_si256()), _mm256_cmpeq_epi32(s, _mm256_set1_epi32(255)));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_slli_epi32(s, 23), _mm256_and_si256(special, _mm256_set1_epi32(0x00400000))));
}
#endif
inline f16 load_e8m0(const uint8_t* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {half_e8m0(bytes), half_e8m0(_mm_srli_si128(bytes, 8))};
#else
    float t[LANES];
    for (int j = 0; j < LANES; ++j) t[j] = e8m0_value(p[j]);
    return load(t);
#endif
}

// The largest magnitude of a group: NaN does not count (`nan` tells of it), infinity is the largest finite number.
inline float group_amax(const float* x, int64_t n, bool& nan) {
    float amax = 0.0f;
    nan = false;
    for (int64_t i = 0; i < n; ++i) {
        const float a = std::fabs(x[i]);
        nan |= a != a;
        amax = a > amax ? a : amax;
    }
    return amax > 3.402823466e38f ? 3.402823466e38f : amax;
}

}  // namespace zm
