// The formats of a latent row in a page (docs/cache.md), `rank` latent and `pe` further values:
//   BF16   the values
//   FP8    rank + pe e4m3 codes of value / scale; one scale for the whole tensor, kept outside
//   NVFP4  rank/2 bytes of e2m1 codes (element 2j in the low nibble of byte j), pe e4m3 codes without a scale, rank/16 e4m3
//          scales, permuted (nvfp4.h)
// A row decodes to BF16 values, which attention reads as it reads a BF16 row.
#pragma once
#include "nvfp4.h"

namespace zm {

enum LatentFormat : int64_t { LATENT_BF16, LATENT_FP8, LATENT_NVFP4 };

struct LatentRow {
    int64_t format, rank, pe;
    float scale;  // FP8 only

    int64_t width() const { return rank + pe; }
    int64_t bytes() const {
        return format == LATENT_BF16 ? 2 * width() : format == LATENT_FP8 ? width() : rank / 2 + pe + rank / NVFP4_GROUP;
    }

    void encode(const bf16* x, uint8_t* out) const {
        if (format == LATENT_BF16) return void(std::memcpy(out, x, size_t(bytes())));
        if (format == LATENT_FP8) return encode_e4m3(x, width(), scale, out);
        encode_e4m3(x + rank, pe, 1.0f, out + rank / 2);
        for (int64_t s = 0; s < groups(); ++s) {
            float group[NVFP4_GROUP];
            const uint8_t code = group_scale(x, s, group);
            scales(out)[nvfp4_place(s, groups())] = code;
            store_e2m1_pairs(group, NVFP4_GROUP, E4M3.value[code], out + s * NVFP4_GROUP / 2);
        }
    }

    void decode(const uint8_t* in, bf16* out) const {
        if (format == LATENT_BF16) return void(std::memcpy(out, in, size_t(bytes())));
        if (format == LATENT_FP8) return decode_e4m3_row(in, width(), scale, out);
        decode_e4m3_row(in + rank / 2, pe, 1.0f, out + rank);
        for (int64_t s = 0; s < groups(); ++s) {
            const f16 unit = set1(E4M3.value[scales(in)[nvfp4_place(s, groups())]]);
            store_bf16(out + s * NVFP4_GROUP, mul(load_e2m1_pairs(in + s * NVFP4_GROUP / 2), unit));
        }
    }

    // The straight-through gradient of decode(encode(x)): +0 where a value was clipped, `grad` elsewhere.
    void gradient(const bf16* x, const bf16* grad, bf16* out) const {
        std::memcpy(out, grad, size_t(width()) * 2);
        if (format == LATENT_BF16) return;
        const bool fp8 = format == LATENT_FP8;
        for (int64_t i = fp8 ? 0 : rank; i < width(); ++i)
            if (clips_e4m3(to_float(x[i]) / (fp8 ? scale : 1.0f))) out[i] = 0;
        for (int64_t s = 0; !fp8 && s < groups(); ++s) {
            float group[NVFP4_GROUP];
            const float unit = E4M3.value[group_scale(x, s, group)];
            for (int64_t i = 0; i < NVFP4_GROUP; ++i)
                if (clips_e2m1(group[i] / unit)) out[s * NVFP4_GROUP + i] = 0;
        }
    }

  private:
    int64_t groups() const { return rank / NVFP4_GROUP; }
    template <class Byte>
    Byte* scales(Byte* row) const { return row + rank / 2 + pe; }

    // The code of group s's scale; the group's values go to `group`.
    static uint8_t group_scale(const bf16* x, int64_t s, float* group) {
        store(group, load_bf16(x + s * NVFP4_GROUP));
        return nvfp4_scale(group);
    }
    static void encode_e4m3(const bf16* x, int64_t n, float scale, uint8_t* out) {
        for (int64_t i = 0; i < n; ++i) out[i] = to_e4m3(to_float(x[i]) / scale);
    }
    static void decode_e4m3_row(const uint8_t* in, int64_t n, float scale, bf16* out) {
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) store_bf16(out + i, mul(load_e4m3(in + i), set1(scale)));
        for (; i < n; ++i) out[i] = to_bf16(E4M3.value[in[i]] * scale);
    }
};

}  // namespace zm
