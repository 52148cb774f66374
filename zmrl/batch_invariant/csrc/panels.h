// Weights in panels (docs/operators.md, Layouts) and their conversion to FP32 blocks [n][16] that the micro-kernel of product.h
// multiplies. Every conversion is exact, so the product does not know which one fed it.
//
// A source of weights offers
//   convert(p, k0, n, out)   rows k0..k0+n of its panel p as FP32 [n][16]
//   DIRECT                   whether the micro-kernel may read BF16 from row(p, k) itself (used for a few rows of x)
// Bf16Weights and Mxfp4Weights are W: panels over its outputs, chain over its inputs. Bf16Transposed and Mxfp4Transposed
// read the same buffers as W transposed: panels over the inputs (16 at a time), chain over the outputs of one part.
#pragma once
#include "fp4.h"

namespace zm {

inline int64_t ceil16(int64_t n) { return (n + 15) / 16; }
inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- transposition ----------------------------------------------------------------------------------------------------

// out[j][i] = in[i][j], 16 x 16.
inline void transpose16(const bf16* in, bf16* out) {
#if defined(__AVX2__)
    for (int a = 0; a < 2; ++a)
        for (int b = 0; b < 2; ++b) {
            __m128i r[8], s[8];
            for (int i = 0; i < 8; ++i) r[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + (8 * a + i) * 16 + 8 * b));
            for (int i = 0; i < 4; ++i) {
                s[2 * i] = _mm_unpacklo_epi16(r[i], r[i + 4]);
                s[2 * i + 1] = _mm_unpackhi_epi16(r[i], r[i + 4]);
            }
            for (int i = 0; i < 4; ++i) {
                r[2 * i] = _mm_unpacklo_epi16(s[i], s[i + 4]);
                r[2 * i + 1] = _mm_unpackhi_epi16(s[i], s[i + 4]);
            }
            for (int i = 0; i < 4; ++i) {
                s[2 * i] = _mm_unpacklo_epi16(r[i], r[i + 4]);
                s[2 * i + 1] = _mm_unpackhi_epi16(r[i], r[i + 4]);
            }
            for (int i = 0; i < 8; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + (8 * b + i) * 16 + 8 * a), s[i]);
        }
#else
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 16; ++j) out[j * 16 + i] = in[i * 16 + j];
#endif
}

// ---- sources ----------------------------------------------------------------------------------------------------------

struct Bf16Weights {  // [panels, inputs, 16]
    static constexpr bool DIRECT = true;
    const bf16* data;
    int64_t inputs;

    const bf16* row(int64_t p, int64_t k) const { return data + (p * inputs + k) * 16; }
    void convert(int64_t p, int64_t k0, int64_t n, float* out) const {
        const bf16 *in = row(p, k0), *next = in + inputs * 16;  // of the panel that is converted after this one
        for (int64_t i = 0; i < n; ++i) {
            if (i % 2 == 0) __builtin_prefetch(next + i * 16);
            store(out + i * 16, load_bf16(in + i * 16));
        }
    }
};

struct Mxfp4Weights {  // codes [panels, inputs, 8], scales [panels, inputs/32, 16]; k0 is a multiple of 32
    static constexpr bool DIRECT = false;
    const uint8_t* codes;
    const uint8_t* scales;
    int64_t inputs;

    void convert(int64_t p, int64_t k0, int64_t n, float* out) const {
        const uint8_t* code = codes + (p * inputs + k0) * 8;
        for (int64_t i = 0; i < n; i += 32) {
            const f16 scale = load_e8m0(scales + (p * (inputs / 32) + (k0 + i) / 32) * 16);
            const int64_t end = min64(i + 32, n);
            for (int64_t j = i; j < end; ++j) store(out + j * 16, mul(load_e2m1(code + j * 8), scale));
        }
    }
};

// Copies outputs n0..n0+n of W transposed to FP32: block(p, out) gives panel p of W as BF16 [16 outputs][16 inputs] and returns
// scaled(output, values), which makes 16 inputs of an output what they are.
template <class Block>
inline void convert_transposed(int64_t n0, int64_t n, float* out, Block block) {
    bf16 wide[256];
    for (int64_t done = 0; done < n;) {
        const int64_t lane = (n0 + done) % 16, count = min64(16 - lane, n - done);
        const auto scaled = block((n0 + done) / 16, wide);
        for (int64_t i = 0; i < count; ++i) store(out + (done + i) * 16, scaled(lane + i, load_bf16(wide + (lane + i) * 16)));
        done += count;
    }
}

struct Bf16Transposed {  // W^T: panel q holds inputs 16q..16q+15 (+0.0 beyond `inputs`)
    static constexpr bool DIRECT = false;
    const bf16* data;
    int64_t inputs;

    void convert(int64_t q, int64_t n0, int64_t n, float* out) const {
        const int64_t valid = min64(inputs - q * 16, 16);
        convert_transposed(n0, n, out, [&](int64_t p, bf16* wide) {
            const bf16* in = data + (p * inputs + q * 16) * 16;
            bf16 padded[256];
            if (valid < 16) {
                std::memset(padded, 0, sizeof padded);
                std::memcpy(padded, in, size_t(valid) * 32);
                in = padded;
            }
            transpose16(in, wide);
            return [](int64_t, f16 values) { return values; };
        });
    }
};

struct Mxfp4Transposed {  // `inputs` is a multiple of 32; a code is exact in BF16, and the inputs of a panel share an output's scale
    static constexpr bool DIRECT = false;
    const uint8_t* codes;
    const uint8_t* scales;
    int64_t inputs;

    void convert(int64_t q, int64_t n0, int64_t n, float* out) const {
        float scale[16];
        convert_transposed(n0, n, out, [&](int64_t p, bf16* wide) {
            const uint8_t* code = codes + (p * inputs + q * 16) * 8;
            store(scale, load_e8m0(scales + (p * (inputs / 32) + q / 2) * 16));
            bf16 plain[256];
            for (int j = 0; j < 16; ++j) unpack_e2m1(code + j * 8, plain + j * 16);
            transpose16(plain, wide);
            return [&](int64_t output, f16 values) { return mul(values, set1(scale[output])); };
        });
    }
};

}  // namespace zm
