// MXFP4 rows: groups of 32 e2m1 codes, element 2j in the low nibble of byte j, and one e8m0 scale a group,
// 2^ceil(log2(max(amax, 6 * 2^-126) / 6)): no finite value is ever clipped. A group that holds NaN has the NaN scale and zero codes.
#pragma once
#include "fp4.h"

namespace zm {

constexpr int64_t MXFP4_GROUP = 32;

inline uint8_t mxfp4_scale(const float* x) {
    bool nan;
    const float amax = group_amax(x, MXFP4_GROUP, nan), least = 6 * 1.17549435e-38f;
    return nan ? 255 : uint8_t((float_to_bits((amax > least ? amax : least) / 6.0f) + 0x007fffffu) >> 23);
}

// d values, a multiple of 32 -> d/2 bytes of codes, d/32 scales.
inline void encode_mxfp4(const float* x, int64_t d, uint8_t* codes, uint8_t* scales) {
    for (int64_t g = 0; g < d / MXFP4_GROUP; ++g) {
        const float* group = x + g * MXFP4_GROUP;
        scales[g] = mxfp4_scale(group);
        store_e2m1_pairs(group, MXFP4_GROUP, e8m0_value(scales[g]), codes + g * MXFP4_GROUP / 2);
    }
}

inline void decode_mxfp4(const uint8_t* codes, const uint8_t* scales, int64_t d, float* out) {
    for (int64_t i = 0; i < d; i += LANES)
        store(out + i, mul(load_e2m1_pairs(codes + i / 2), set1(e8m0_value(scales[i / MXFP4_GROUP]))));
}

}  // namespace zm
