// Attention residuals: the softmax-weighted mix of block vectors, forward and backward (norm and projection are frozen).
// The kernels return the number of threads used, or -1 for more than 64 sources.
#include <algorithm>
#include <cmath>

#include "blocks.h"
#include "math.h"
#include "row.h"

using namespace zm;

namespace {

constexpr int MAX_SOURCES = 64;

struct Sources {
    const bf16* const* data;
    const int64_t* strides;
    int64_t count;
    const bf16* row(int64_t j, int64_t t) const { return data[j] + t * strides[j]; }
};

// q = norm*proj, the product of two BF16 vectors: exact in FP32.
struct Query {
    const bf16 *norm, *proj;
    f16 at(int64_t i, int64_t n) const { return mul(row_load(norm, i, n), row_load(proj, i, n)); }
};

// inv_j = 1/sqrt(lanes(v_j*v_j)/n + eps), a_j = lanes(v_j*q)*inv_j, p = exp(a - max) / lanes(exp(a - max)).
void weights(const Sources& v, int64_t t, Query query, int64_t n, float eps, float* inv, float* a, float* p) {
    const int64_t count = v.count;
    for (int64_t j = 0; j < count; ++j) {
        const bf16* row = v.row(j, t);
        f16 square = zero(), dot = zero();
        for (int64_t i = 0; i < n; i += LANES) {
            f16 x = row_load(row, i, n);
            square = fma(x, x, square);
            dot = fma(x, query.at(i, n), dot);
        }
        inv[j] = 1.0f / std::sqrt(sum_lanes(square) / float(n) + eps);
        a[j] = sum_lanes(dot) * inv[j];
    }
    float largest = a[0];
    for (int64_t j = 1; j < count; ++j) largest = a[j] > largest ? a[j] : largest;
    const f16 m = set1(largest);
    f16 sum = zero();
    for (int64_t j = 0; j < count; j += LANES) {
        f16 e = exp(sub(row_load(a, j, count), m));
        if (j + LANES > count) {  // the tail adds +0.0, not exp(-max)
            float masked[LANES] = {0};
            store_n(masked, e, int(count - j));
            e = load(masked);
        }
        row_store(p, j, count, e);
        sum = add(sum, e);
    }
    const f16 total = set1(sum_lanes(sum));
    for (int64_t j = 0; j < count; j += LANES) row_store(p, j, count, div(row_load(p, j, count), total));
}

}  // namespace

// y = bf16(chain over j of fma(p_j, v_j, .)), p = weights(). sources: count of [rows, n] BF16.
ZM_API int64_t zm_attn_res_mix(const bf16* const* sources, const int64_t* strides, int64_t count, const bf16* norm, const bf16* proj,
                               bf16* y, int64_t rows, int64_t n, float eps, int64_t threads) {
    if (count < 1 || count > MAX_SOURCES) return -1;
    const Sources v{sources, strides, count};
    const Query query{norm, proj};
    return parallel_blocks(rows, n * count * 6, int(threads), [&](int64_t t) {
        float inv[MAX_SOURCES], a[MAX_SOURCES], p[MAX_SOURCES];
        weights(v, t, query, n, eps, inv, a, p);
        for (int64_t i = 0; i < n; i += LANES) {
            f16 sum = zero();
            for (int64_t j = 0; j < count; ++j) sum = fma(set1(p[j]), row_load(v.row(j, t), i, n), sum);
            row_store(y + t * n, i, n, sum);
        }
    });
}

// r_j = lanes(dy*v_j), c = chain over j of fma(p_j, r_j, .), da_j = p_j*(r_j - c);
// dv_j = bf16(fma(p_j, dy, fma(da_j*inv_j, q, -(da_j*a_j*inv_j*inv_j/n) * v_j))). grads: count tensors [rows, n].
ZM_API int64_t zm_attn_res_mix_backward(const bf16* dy, int64_t dy_stride, const bf16* const* sources, const int64_t* strides,
                                        int64_t count, const bf16* norm, const bf16* proj, bf16* const* grads, int64_t rows,
                                        int64_t n, float eps, int64_t threads) {
    if (count < 1 || count > MAX_SOURCES) return -1;
    const Sources v{sources, strides, count};
    const Query query{norm, proj};
    return parallel_blocks(rows, n * count * 16, int(threads), [&](int64_t t) {
        float inv[MAX_SOURCES], a[MAX_SOURCES], p[MAX_SOURCES], r[MAX_SOURCES];
        weights(v, t, query, n, eps, inv, a, p);
        const bf16* grad = dy + t * dy_stride;
        float c = 0.0f;
        for (int64_t j = 0; j < count; ++j) {
            r[j] = dot_lanes(grad, v.row(j, t), n);
            c = std::fma(p[j], r[j], c);
        }
        for (int64_t j = 0; j < count; ++j) {
            const float da = p[j] * (r[j] - c);
            const f16 weight = set1(p[j]), of_query = set1(da * inv[j]);
            const f16 of_source = set1(-(da * a[j] * inv[j] * inv[j] / float(n)));
            const bf16* row = v.row(j, t);
            for (int64_t i = 0; i < n; i += LANES) {
                f16 d = fma(of_query, query.at(i, n), mul(of_source, row_load(row, i, n)));
                row_store(grads[j] + t * n, i, n, fma(weight, row_load(grad, i, n), d));
            }
        }
    });
}

// y = bf16(a + b)
ZM_API int64_t zm_residual_add(const bf16* a, int64_t a_stride, const bf16* b, int64_t b_stride, bf16* y, int64_t rows, int64_t n,
                               int64_t threads) {
    return parallel_blocks(rows, n * 4, int(threads), [&](int64_t t) {
        for (int64_t i = 0; i < n; i += LANES)
            row_store(y + t * n, i, n, add(row_load(a + t * a_stride, i, n), row_load(b + t * b_stride, i, n)));
    });
}

// y [rows, n+m] = [a | b], a [rows, n], b [rows, m]
ZM_API int64_t zm_join_columns(const bf16* a, int64_t a_stride, int64_t n, const bf16* b, int64_t b_stride, int64_t m, bf16* y,
                               int64_t rows, int64_t threads) {
    return parallel_blocks(rows, n + m, int(threads), [&](int64_t t) {
        std::memcpy(y + t * (n + m), a + t * a_stride, size_t(n) * 2);
        std::memcpy(y + t * (n + m) + n, b + t * b_stride, size_t(m) * 2);
    });
}
