// Elementwise activations over rows: SiTU and the sigmoid output gate, forward and backward.
// Every kernel returns the number of threads that it used.
#include "blocks.h"
#include "math.h"
#include "row.h"
#include "situ.h"

using namespace zm;

// y = bf16(situ(g, u)) of x = [g | u], each n wide; infinite betas: SiLU(g)*u.
ZM_API int64_t zm_situ(const bf16* x, int64_t x_stride, bf16* y, int64_t rows, int64_t n, float beta, float linear_beta,
                       int64_t threads) {
    const Situ situ(beta, linear_beta);
    return parallel_blocks(rows, n * 100, int(threads), [&](int64_t t) {
        const bf16 *g = x + t * x_stride, *u = g + n;
        for (int64_t i = 0; i < n; i += LANES) row_store(y + t * n, i, n, situ(row_load(g, i, n), row_load(u, i, n)));
    });
}

// dx = [dg | du] in BF16, by Situ::backward.
ZM_API int64_t zm_situ_backward(const bf16* dy, int64_t dy_stride, const bf16* x, int64_t x_stride, bf16* dx, int64_t rows,
                                int64_t n, float beta, float linear_beta, int64_t threads) {
    const Situ situ(beta, linear_beta);
    return parallel_blocks(rows, n * 120, int(threads), [&](int64_t t) {
        const bf16 *g = x + t * x_stride, *u = g + n;
        bf16* out = dx + t * 2 * n;
        for (int64_t i = 0; i < n; i += LANES) {
            f16 dg, du;
            situ.backward(row_load(g, i, n), row_load(u, i, n), row_load(dy + t * dy_stride, i, n), dg, du);
            row_store(out, i, n, dg);
            row_store(out + n, i, n, du);
        }
    });
}

// y = bf16(o * sigmoid(z))
ZM_API int64_t zm_gate_mul(const bf16* o, int64_t o_stride, const bf16* z, int64_t z_stride, bf16* y, int64_t rows, int64_t n,
                           int64_t threads) {
    return parallel_blocks(rows, n * 40, int(threads), [&](int64_t t) {
        for (int64_t i = 0; i < n; i += LANES)
            row_store(y + t * n, i, n, mul(row_load(o + t * o_stride, i, n), sigmoid(row_load(z + t * z_stride, i, n))));
    });
}

// s = sigmoid(z): grad_o = bf16(dy * s), grad_z = bf16((dy*o) * (s*(1-s)))
ZM_API int64_t zm_gate_mul_backward(const bf16* dy, int64_t dy_stride, const bf16* o, int64_t o_stride, const bf16* z,
                                    int64_t z_stride, bf16* grad_o, bf16* grad_z, int64_t rows, int64_t n, int64_t threads) {
    const f16 one = set1(1.0f);
    return parallel_blocks(rows, n * 48, int(threads), [&](int64_t t) {
        for (int64_t i = 0; i < n; i += LANES) {
            f16 s = sigmoid(row_load(z + t * z_stride, i, n)), g = row_load(dy + t * dy_stride, i, n);
            row_store(grad_o + t * n, i, n, mul(g, s));
            row_store(grad_z + t * n, i, n, mul(mul(g, row_load(o + t * o_stride, i, n)), mul(s, sub(one, s))));
        }
    });
}
