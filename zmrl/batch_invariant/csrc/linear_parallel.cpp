// Linear layers whose outputs or inputs are spread over ranks, in the pieces between which the ranks exchange
// (zmrl/parallel/linear.py). A rank's part of a product in FP32 is zm_linear with its share of the slices.
#include "linear.h"

using namespace zm;

// out[i] = scale * (the tree of rule 2 over parts [world][n]), world = 1, 2, 4, 8; out may be parts. scale 1: the sum itself.
ZM_API int64_t zm_tree_sum(const float* parts, int64_t world, int64_t n, float scale, float* out, int64_t threads) {
    const int64_t chunk = 4096;
    const int workers = threads_for(n * world, int(threads));
    parallel_for((n + chunk - 1) / chunk, workers, [&](int64_t c) {
        for (int64_t i = c * chunk; i < min64(n, (c + 1) * chunk); ++i) {
            float x[8];
            for (int64_t w = 0; w < world; ++w) x[w] = parts[w * n + i];
            for (int64_t left = world; left > 1; left /= 2)  // neighbours: ((0+1)+(2+3))+...
                for (int64_t w = 0; w < left / 2; ++w) x[w] = x[2 * w] + x[2 * w + 1];
            out[i] = scale == 1.0f ? x[0] : scale * x[0];
        }
    });
    return workers;
}

// y[t] = bf16(fma(scale, delta[t], base[t])) where slots[t] >= 0, else bf16(base[t]); all [rows, n]. delta null: bf16(base).
ZM_API int64_t zm_add_adapter(const float* base, int64_t base_stride, const float* delta, const int32_t* slots, int64_t rows,
                              int64_t n, float scale, bf16* y, int64_t threads) {
    const int workers = threads_for(rows * n, int(threads));
    parallel_for(rows, workers, [&](int64_t t) {
        const bool adapted = delta && slots[t] >= 0;
        for (int64_t i = 0; i < n; i += 16) {
            const int lanes = int(min64(16, n - i));
            f16 v = load_n(base + t * base_stride + i, lanes);
            if (adapted) v = fma(set1(scale), load_n(delta + t * n + i, lanes), v);
            store_bf16_n(y + t * n + i, v, lanes);
        }
    });
    return workers;
}

// out [rows, k] = W^T dy over the outputs own[i][0]..own[i][0]+own[i][1] of every part i, in `slices` chains and their tree: slice s is
// slice s of each of those ranges, parts in order. start (FP32, rows start_stride apart; slices 1) or null: the chain continues it.
// out: FP32 or BF16.
ZM_API int64_t zm_linear_gradient(const void* dy, int64_t dy_stride, int64_t dy_fp32, int64_t rows, int64_t k, const bf16* w,
                                  const int64_t* splits, int64_t parts_count, const int64_t* own, int64_t slices, const float* start,
                                  int64_t start_stride, void* out, int64_t out_fp32, int64_t threads) {
    const Parts parts(splits, parts_count);
    const Rows dy_rows{dy, dy_stride, dy_fp32 != 0};
    const int workers = product_threads(rows, parts.columns, k, threads);
    for_items(rows, ceil16(k), ITEM_PANELS, workers, [&](int64_t i0, int64_t m, int64_t q0, int64_t q1) {
        const int64_t ldc = (q1 - q0) * 16;
        float* c = scratch<OUTPUT_TILE>(4 * m * ldc);
        if (start) {
            clear(c, ldc, m, ldc);
            for (int64_t i = 0; i < m; ++i)
                std::memcpy(c + i * ldc, start + (i0 + i) * start_stride + q0 * 16, size_t(min64(ldc, k - q0 * 16)) * 4);
        }
        combine_shards(slices, c, m * ldc, [&](int64_t s, float* to) {
            for (int64_t i = 0; i < parts_count; ++i) {
                const Part& part = parts.part[size_t(i)];
                const int64_t first = own[2 * i], size = own[2 * i + 1];
                chain(dy_rows.columns(part.column), i0, m, Bf16Transposed{w + part.panel * k * 16, k}, q0, q1, first + s * size / slices,
                      first + (s + 1) * size / slices, to, ldc, i != 0 || start);
            }
        });
        for (int64_t i = 0; i < m; ++i)
            for (int64_t q = q0; q < q1; ++q) {
                const int64_t at = (i0 + i) * k + q * 16;
                const int lanes = int(min64(16, k - q * 16));
                const f16 v = load(c + i * ldc + (q - q0) * 16);
                if (out_fp32) store_n(static_cast<float*>(out) + at, v, lanes);
                else store_bf16_n(static_cast<bf16*>(out) + at, v, lanes);
            }
    });
    return workers;
}

// grad [ceil(n/16), inputs, 16] continues the chain over the rows t with slots[t] == 0 (all if null) of fma(x[t][i], scale * v[t][j], .);
// x [rows, inputs] BF16 or FP32, v [rows, n] BF16 or FP32.
ZM_API int64_t zm_outer(const void* x, int64_t x_stride, int64_t x_fp32, int64_t inputs, const void* v, int64_t v_stride,
                        int64_t v_fp32, int64_t n, int64_t rows, const int32_t* slots, float scale, float* grad, int64_t threads) {
    const Rows x_rows{x, x_stride, x_fp32 != 0}, v_rows{v, v_stride, v_fp32 != 0};
    std::vector<int32_t> chosen;
    for (int64_t t = 0; t < rows; ++t)
        if (!slots || slots[t] == 0) chosen.push_back(int32_t(t));
    const int workers = product_threads(rows, n, inputs, threads);
    const int64_t blocks = (inputs + K_BLOCK - 1) / K_BLOCK, group = 16, groups = (ceil16(n) + group - 1) / group;
    parallel_for(blocks * groups, workers, [&](int64_t item) {
        const int64_t k0 = item / groups * K_BLOCK, count = min64(K_BLOCK, inputs - k0);
        const int64_t p0 = item % groups * group, p1 = min64(ceil16(n), p0 + group), ld = (p1 - p0) * 16;
        float *packed = scratch<GRADIENT_ROWS>(ROW_BLOCK * X_STRIDE), *wide = scratch<GRADIENT_COLUMNS>(ROW_BLOCK * ld);
        for (size_t i0 = 0; i0 < chosen.size(); i0 += ROW_BLOCK) {
            const int64_t m = min64(ROW_BLOCK, int64_t(chosen.size() - i0));
            clear(wide, ld, m, ld);
            for (int64_t i = 0; i < m; ++i) {
                const int64_t t = chosen[i0 + size_t(i)];
                x_rows.pack(t, k0, count, packed + i * X_STRIDE);
                v_rows.pack(t, p0 * 16, min64(ld, n - p0 * 16), wide + i * ld);
                for (int64_t j = 0; j < ld; j += 16) store(wide + i * ld + j, mul(set1(scale), load(wide + i * ld + j)));
            }
            accumulate(packed, X_STRIDE, wide, ld, m, count, p1 - p0, grad + (p0 * inputs + k0) * 16, inputs * 16);
        }
    });
    return workers;
}
