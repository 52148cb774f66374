// The formats of an index key in a page (docs/cache.md): block_size rows of codes, then block_size rows of scales.
//   FP8    d e4m3 codes and one FP32 scale
//   MXFP4  d/2 bytes of e2m1 codes and d/32 e8m0 scales
#pragma once
#include "fp8.h"
#include "mxfp4.h"
#include "panels.h"

namespace zm {

enum IndexFormat : int64_t { INDEX_FP8, INDEX_MXFP4 };

struct IndexKey {
    int64_t format, d;

    int64_t code_bytes() const { return format == INDEX_FP8 ? d : d / 2; }
    int64_t scale_bytes() const { return format == INDEX_FP8 ? 4 : d / MXFP4_GROUP; }

    // Where the scales of place `place` lie in a page.
    template <class Byte>
    Byte* scales(Byte* page, int64_t block_size, int64_t place) const {
        return page + block_size * code_bytes() + place * scale_bytes();
    }

    // Codes and scales of one vector. FP8: NaN does not count in the scale, infinity counts as the largest finite number.
    void encode(const float* x, uint8_t* codes, uint8_t* scales) const {
        if (format == INDEX_MXFP4) return encode_mxfp4(x, d, codes, scales);
        bool nan;
        const float scale = e4m3_scale(group_amax(x, d, nan));
        for (int64_t i = 0; i < d; ++i) codes[i] = to_e4m3(x[i] / scale);
        std::memcpy(scales, &scale, 4);
    }

    // The values that dot products see, [d]; returns what multiplies the finished product: FP8's scale, 1 for MXFP4.
    float decode(const uint8_t* codes, const uint8_t* scales, float* out) const {
        if (format == INDEX_MXFP4) {
            decode_mxfp4(codes, scales, d, out);
            return 1.0f;
        }
        for (int64_t i = 0; i < d; ++i) out[i] = E4M3.value[codes[i]];
        float scale;
        std::memcpy(&scale, scales, 4);
        return scale;
    }

    // The same for sixteen keys, transposed: out[feature][key], features up to the next multiple of 16 are +0.0; scale [16].
    void decode_transposed(const uint8_t* const* codes, const uint8_t* const* scales, float* out, float* scale) const {
        if (format == INDEX_MXFP4) return decode_mxfp4_transposed(codes, scales, out, scale);
        for (int i = 0; i < LANES; ++i) std::memcpy(scale + i, scales[i], 4);
        alignas(16) uint8_t columns[16][16];
        for (int64_t k = 0; k < d; k += 16) {
            transpose(codes, k, d, columns);
            for (int j = 0; j < 16; ++j) store(out + (k + j) * 16, load_e4m3(columns[j]));
        }
    }

  private:
    void decode_mxfp4_transposed(const uint8_t* const* codes, const uint8_t* const* scales, float* out, float* scale) const {
        for (int i = 0; i < LANES; ++i) scale[i] = 1.0f;
        alignas(16) uint8_t columns[16][16];
        for (int64_t g = 0; g < d / MXFP4_GROUP; ++g) {
            uint8_t exponents[LANES];
            for (int i = 0; i < LANES; ++i) exponents[i] = scales[i][g];
            const f16 unit = load_e8m0(exponents);
            transpose(codes, g * 16, d / 2, columns);
            for (int j = 0; j < 16; ++j) {
                float* pair = out + (g * MXFP4_GROUP + 2 * j) * LANES;
                uint8_t high[16];
                for (int i = 0; i < 16; ++i) high[i] = columns[j][i] >> 4;
                store(pair, mul(nibbles(columns[j]), unit));
                store(pair + LANES, mul(nibbles(high), unit));
            }
        }
    }

    // Bytes k..k+16 of sixteen rows of `bytes`; beyond the end they are zero.
    static void transpose(const uint8_t* const* rows, int64_t k, int64_t bytes, uint8_t (*out)[16]) {
        const uint8_t* at[16];
        uint8_t padded[16][16];
        for (int i = 0; i < 16; ++i) at[i] = rows[i] + k;
        if (k + 16 > bytes)
            for (int i = 0; i < 16; ++i) {
                std::memset(padded[i], 0, 16);
                std::memcpy(padded[i], at[i], size_t(bytes - k));
                at[i] = padded[i];
            }
        transpose_bytes(at, out);
    }

    // The values of the low nibbles of sixteen bytes.
    static f16 nibbles(const uint8_t* p) {
#if defined(__AVX2__)
        return decode_e2m1(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
        float t[LANES];
        for (int i = 0; i < LANES; ++i) t[i] = E2M1[p[i] & 15];
        return load(t);
#endif
    }
};

}  // namespace zm
