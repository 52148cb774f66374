// Norms of one row, shared by the norm operators and by operators that fuse them.
#pragma once
#include <cmath>

#include "row.h"

namespace zm {

// 1 / sqrt(lanes(x*x) / n + eps)
inline float inverse_rms(const bf16* x, int64_t n, float eps) {
    return 1.0f / std::sqrt(dot_lanes(x, x, n) / float(n) + eps);
}

// y = fma((x - mean) / sqrt(lanes((x - mean)^2)/n + eps), w, b) in FP32, mean = lanes(x)/n; W: FP32 or BF16.
template <class W>
inline void layer_norm_row(const bf16* x, const W* w, const W* b, float* y, int64_t n, float eps) {
    f16 sum = zero();
    for (int64_t i = 0; i < n; i += LANES) sum = add(sum, row_load(x, i, n));
    const f16 mean = set1(sum_lanes(sum) / float(n));
    f16 square = zero();
    for (int64_t i = 0; i < n; i += LANES) {
        f16 centred = sub(row_load(x, i, n), mean);
        if (i + LANES > n) {  // the tail adds +0.0, not mean^2
            float masked[LANES] = {0};
            store_n(masked, centred, int(n - i));
            centred = load(masked);
        }
        square = fma(centred, centred, square);
    }
    const f16 root = set1(std::sqrt(sum_lanes(square) / float(n) + eps));
    for (int64_t i = 0; i < n; i += LANES)
        row_store(y, i, n, fma(div(sub(row_load(x, i, n), mean), root), row_load(w, i, n), row_load(b, i, n)));
}

}  // namespace zm
