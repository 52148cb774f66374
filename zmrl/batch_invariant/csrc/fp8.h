// e4m3 (float8_e4m3fn): conversion to nearest even, saturating at 448; NaN to the NaN code. Every value is exact in FP32.
#pragma once
#include "vec.h"

namespace zm {

// Beyond 448 (infinity too) the result is +-448: torch and ml_dtypes give NaN there.
inline uint8_t to_e4m3(float x) {
    uint32_t u = float_to_bits(x) & 0x7fffffffu;
    const uint32_t sign = float_to_bits(x) >> 31 << 7;
    if (u > 0x7f800000u) return uint8_t(sign | 0x7f);
    if (u >= 0x43e00000u) return uint8_t(sign | 0x7e);
    if (u < 0x3c800000u)  // below 2^-6: multiples of 2^-9, which is the spacing of FP32 at 2^14
        return uint8_t(sign | (float_to_bits(bits_to_float(u) + 16384.0f) - 0x46800000u));
    u += 0x7ffffu + ((u >> 20) & 1u);
    return uint8_t(sign | ((u - 0x3c000000u) >> 20));
}

struct E4m3Table {
    float value[256];
    E4m3Table() {
        for (uint32_t code = 0; code < 256; ++code) {
            const uint32_t sign = code >> 7 << 31, rest = code & 0x7f;
            const float magnitude = rest < 8 ? float(rest) * 0.001953125f : bits_to_float((rest << 20) + 0x3c000000u);
            value[code] = bits_to_float(rest == 0x7f ? sign | 0x7fc00000u : sign | float_to_bits(magnitude));
        }
    }
};
inline const E4m3Table E4M3;

// The scale of a quantised vector: 2^ceil(log2(max(amax, 1e-4) / 448)). amax is finite.
inline float e4m3_scale(float amax) {
    const uint32_t u = float_to_bits((amax > 1e-4f ? amax : 1e-4f) / 448.0f);
    return bits_to_float((u + 0x007fffffu) & 0xff800000u);
}

// The values of sixteen codes.
#if defined(__AVX512F__)
inline f16 decode_e4m3(__m128i codes) {
    const __m512i wide = _mm512_cvtepu8_epi32(codes), rest = _mm512_and_si512(wide, _mm512_set1_epi32(0x7f));
    const __m512i shifted = _mm512_slli_epi32(rest, 20);
    const __mmask16 small = _mm512_cmplt_epi32_mask(rest, _mm512_set1_epi32(8));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(rest, _mm512_set1_epi32(0x7f));
    __m512 x = _mm512_castsi512_ps(_mm512_add_epi32(shifted, _mm512_set1_epi32(0x3c000000)));
    // below 2^-6: 2^-6 (1 + m/8) - 2^-6
    const __m512 base = _mm512_castsi512_ps(_mm512_add_epi32(shifted, _mm512_set1_epi32(0x3c800000)));
    x = _mm512_mask_sub_ps(x, small, base, _mm512_set1_ps(0.015625f));
    x = _mm512_mask_mov_ps(x, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
    const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(wide, 7), 31);
    return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(x), sign))};
}
#elif defined(__AVX2__)
inline __m256 decode_e4m3_half(__m128i codes) {
    const __m256i wide = _mm256_cvtepu8_epi32(codes), rest = _mm256_and_si256(wide, _mm256_set1_epi32(0x7f));
    const __m256i shifted = _mm256_slli_epi32(rest, 20);
    const __m256 small = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(8), rest));
    const __m256 nan = _mm256_castsi256_ps(_mm256_cmpeq_epi32(rest, _mm256_set1_epi32(0x7f)));
    __m256 x = _mm256_castsi256_ps(_mm256_add_epi32(shifted, _mm256_set1_epi32(0x3c000000)));
    const __m256 base = _mm256_castsi256_ps(_mm256_add_epi32(shifted, _mm256_set1_epi32(0x3c800000)));
    x = _mm256_blendv_ps(x, _mm256_sub_ps(base, _mm256_set1_ps(0.015625f)), small);
    x = _mm256_blendv_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), nan);
    const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(wide, 7), 31);
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_castps_si256(x), sign));
}
inline f16 decode_e4m3(__m128i codes) { return {decode_e4m3_half(codes), decode_e4m3_half(_mm_srli_si128(codes, 8))}; }
#endif

// Whether rounding with an unbounded exponent would have left the range: 464 lies half-way to 480, and 448 is the even one.
inline bool clips_e4m3(float x) { return std::fabs(x) > 464.0f; }

// out[j][i] = row[i][j] for sixteen rows of sixteen bytes.
inline void transpose_bytes(const uint8_t* const* row, uint8_t (*out)[16]) {
#if defined(__AVX2__)
    __m128i r[16], s[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row[i]));
    auto interleave = [](const __m128i* in, __m128i* to) {  // four times: the transposed bytes
        for (int i = 0; i < 8; ++i) {
            to[2 * i] = _mm_unpacklo_epi8(in[i], in[i + 8]);
            to[2 * i + 1] = _mm_unpackhi_epi8(in[i], in[i + 8]);
        }
    };
    interleave(r, s);
    interleave(s, r);
    interleave(r, s);
    interleave(s, r);
    for (int j = 0; j < 16; ++j) _mm_store_si128(reinterpret_cast<__m128i*>(out[j]), r[j]);
#else
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 16; ++j) out[j][i] = row[i][j];
#endif
}

// The values of sixteen codes at p.
inline f16 load_e4m3(const uint8_t* p) {
#if defined(__AVX2__)
    return decode_e4m3(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    float t[LANES];
    for (int i = 0; i < LANES; ++i) t[i] = E4M3.value[p[i]];
    return load(t);
#endif
}

}  // namespace zm
