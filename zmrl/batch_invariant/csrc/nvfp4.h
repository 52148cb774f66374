// NVFP4: groups of sixteen e2m1 codes with one e4m3 scale, e4m3(max(amax / 6, 2^-9)). A product of code and scale has at most six
// significant bits and is exact in BF16. A group that holds NaN has the NaN scale and zero codes, so that NaN is never lost.
#pragma once
#include "fp4.h"
#include "fp8.h"

namespace zm {

constexpr int64_t NVFP4_GROUP = 16;

// Group s has its scale at this place among those of n groups: n/4 consecutive ones belong to every fourth group (FlashMLA's
// order, 8 * (s & 3) + (s >> 2) of 32). n is a multiple of four.
inline int64_t nvfp4_place(int64_t s, int64_t n) { return n / 4 * (s & 3) + (s >> 2); }

// The scale's code; it is never zero.
inline uint8_t nvfp4_scale(const float* x) {
    bool nan;
    const float wanted = group_amax(x, NVFP4_GROUP, nan) / 6.0f;
    return nan ? 0x7f : to_e4m3(wanted > 0.001953125f ? wanted : 0.001953125f);
}

}  // namespace zm
