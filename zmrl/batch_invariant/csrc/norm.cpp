// Row norms: rms_norm, rms_norm_gated and layer_norm, with the backward pass of the first two (weights are frozen).
// Every kernel returns the number of threads that it used.
#include "blocks.h"
#include "math.h"
#include "norm.h"

using namespace zm;

namespace {

template <class W>
int64_t rms_norm(const bf16* x, int64_t x_stride, const W* w, bf16* y, int64_t rows, int64_t n, float eps, int threads) {
    return parallel_blocks(rows, n * 8, threads, [&](int64_t t) {
        const bf16* row = x + t * x_stride;
        bf16* out = y + t * n;
        const f16 inv = set1(inverse_rms(row, n, eps));
        for (int64_t i = 0; i < n; i += LANES) row_store(out, i, n, mul(mul(row_load(row, i, n), inv), row_load(w, i, n)));
    });
}

template <class W>
int64_t rms_norm_backward(const bf16* dy, int64_t dy_stride, const bf16* x, int64_t x_stride, const W* w, bf16* dx,
                          int64_t rows, int64_t n, float eps, int threads) {
    return parallel_blocks(rows, n * 16, threads, [&](int64_t t) {
        const bf16 *row = x + t * x_stride, *grad = dy + t * dy_stride;
        bf16* out = dx + t * n;
        const float inv = inverse_rms(row, n, eps);
        f16 dot = zero();
        for (int64_t i = 0; i < n; i += LANES)
            dot = fma(mul(row_load(grad, i, n), row_load(w, i, n)), row_load(row, i, n), dot);
        const f16 c = set1(sum_lanes(dot) * inv * inv / float(n)), scale = set1(inv);
        for (int64_t i = 0; i < n; i += LANES) {
            f16 g = mul(row_load(grad, i, n), row_load(w, i, n));
            row_store(out, i, n, mul(sub(g, mul(row_load(row, i, n), c)), scale));
        }
    });
}

}  // namespace

// y = bf16((x * inv) * w), inv = 1/sqrt(lanes(x*x)/n + eps). x [rows, n] BF16, w [n] FP32 (w_fp32) or BF16, y contiguous.
ZM_API int64_t zm_rms_norm(const bf16* x, int64_t x_stride, const void* w, int64_t w_fp32, bf16* y, int64_t rows, int64_t n,
                           float eps, int64_t threads) {
    if (w_fp32) return rms_norm(x, x_stride, static_cast<const float*>(w), y, rows, n, eps, int(threads));
    return rms_norm(x, x_stride, static_cast<const bf16*>(w), y, rows, n, eps, int(threads));
}

// g = dy*w; dx = bf16((g - x * (lanes(g*x)*inv*inv/n)) * inv)
ZM_API int64_t zm_rms_norm_backward(const bf16* dy, int64_t dy_stride, const bf16* x, int64_t x_stride, const void* w,
                                    int64_t w_fp32, bf16* dx, int64_t rows, int64_t n, float eps, int64_t threads) {
    const int workers = int(threads);
    if (w_fp32)
        return rms_norm_backward(dy, dy_stride, x, x_stride, static_cast<const float*>(w), dx, rows, n, eps, workers);
    return rms_norm_backward(dy, dy_stride, x, x_stride, static_cast<const bf16*>(w), dx, rows, n, eps, workers);
}

// Per head h: y = bf16(((o * inv) * w) * sigmoid(z)), inv over the d elements of the head. w FP32 [d].
ZM_API int64_t zm_rms_norm_gated(const bf16* o, int64_t o_stride, const float* w, const bf16* z, int64_t z_stride, bf16* y,
                                 int64_t rows, int64_t heads, int64_t d, float eps, int64_t threads) {
    return parallel_blocks(rows, heads * d * 40, int(threads), [&](int64_t t) {
        for (int64_t h = 0; h < heads; ++h) {
            const bf16 *x = o + t * o_stride + h * d, *gate = z + t * z_stride + h * d;
            bf16* out = y + (t * heads + h) * d;
            const f16 inv = set1(inverse_rms(x, d, eps));
            for (int64_t i = 0; i < d; i += LANES) {
                f16 normed = mul(mul(row_load(x, i, d), inv), row_load(w, i, d));
                row_store(out, i, d, mul(normed, sigmoid(row_load(gate, i, d))));
            }
        }
    });
}

// s = sigmoid(z), g = (dy*s)*w: do as rms_norm_backward with this g; dz = bf16((dy*((o*inv)*w)) * (s*(1-s)))
ZM_API int64_t zm_rms_norm_gated_backward(const bf16* dy, int64_t dy_stride, const bf16* o, int64_t o_stride, const float* w,
                                          const bf16* z, int64_t z_stride, bf16* grad_o, bf16* grad_z, int64_t rows,
                                          int64_t heads, int64_t d, float eps, int64_t threads) {
    return parallel_blocks(rows, heads * d * 64, int(threads), [&](int64_t t) {
        const f16 one = set1(1.0f);
        for (int64_t h = 0; h < heads; ++h) {
            const bf16 *x = o + t * o_stride + h * d, *gate = z + t * z_stride + h * d, *grad = dy + t * dy_stride + h * d;
            bf16 *out_o = grad_o + (t * heads + h) * d, *out_z = grad_z + (t * heads + h) * d;
            const float inv = inverse_rms(x, d, eps);
            const f16 scale = set1(inv);
            f16 dot = zero();
            for (int64_t i = 0; i < d; i += LANES) {
                f16 s = sigmoid(row_load(gate, i, d)), v = row_load(x, i, d), g = row_load(grad, i, d), wi = row_load(w, i, d);
                dot = fma(mul(mul(g, s), wi), v, dot);
                row_store(out_z, i, d, mul(mul(g, mul(mul(v, scale), wi)), mul(s, sub(one, s))));
            }
            const f16 c = set1(sum_lanes(dot) * inv * inv / float(d));
            for (int64_t i = 0; i < d; i += LANES) {
                f16 s = sigmoid(row_load(gate, i, d)), v = row_load(x, i, d);
                f16 g = mul(mul(row_load(grad, i, d), s), row_load(w, i, d));
                row_store(out_o, i, d, mul(sub(g, mul(v, c)), scale));
            }
        }
    });
}

// FP32 y by layer_norm_row (norm.h); w, b [n], FP32 (w_fp32) or BF16.
ZM_API int64_t zm_layer_norm(const bf16* x, int64_t x_stride, const void* w, const void* b, int64_t w_fp32, float* y,
                             int64_t rows, int64_t n, float eps, int64_t threads) {
    return parallel_blocks(rows, n * 16, int(threads), [&](int64_t t) {
        const bf16* row = x + t * x_stride;
        if (w_fp32)
            layer_norm_row(row, static_cast<const float*>(w), static_cast<const float*>(b), y + t * n, n, eps);
        else
            layer_norm_row(row, static_cast<const bf16*>(w), static_cast<const bf16*>(b), y + t * n, n, eps);
    });
}
