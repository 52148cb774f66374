// Kimi Delta Attention, one token of one head: what forward and backward share. numerics.md: the token-by-token FP32
// recurrence is the definition.
//
// A state S [K, V] (K = V = D <= 128) is walked in column blocks of N vectors: columns of S never mix, so a block can be
// taken through many tokens while it lies in the L1 cache, and the block width changes no bit.
#pragma once
#include <cmath>
#include <type_traits>

#include "math.h"
#include "row.h"

namespace zm {

constexpr int64_t KDA_MAX_DIM = 128;
constexpr float KDA_L2_EPS = 1e-6f;

// One call's inputs: q, k, v, f [T, H*D] and b [T, H], BF16 with row strides.
struct KdaInputs {
    const bf16 *q, *k, *v, *f, *b;
    int64_t q_stride, k_stride, v_stride, f_stride, b_stride;
    const float *a_log, *dt_bias;
    float lower_bound;  // negative; 0: no bound
    int64_t heads, dim;

    bool bounded() const { return lower_bound < 0; }
    // Logarithm of the decay of a head of rate exp(a_log), x = f + dt_bias. It is only ever exponentiated, to [0, 1]: no bound is
    // needed for the recurrence to stay finite.
    f16 log_decay(f16 rate, f16 x) const {
        return bounded() ? mul(set1(lower_bound), sigmoid(mul(rate, x))) : mul(sub(zero(), rate), softplus(x));
    }
    // d log_decay / dx = slope * shape(x): the constant and the varying factor
    float slope(float rate) const { return bounded() ? lower_bound * rate : -rate; }
    f16 shape(f16 rate, f16 x) const {
        if (!bounded()) return sigmoid(x);
        f16 s = sigmoid(mul(rate, x));
        return mul(s, sub(set1(1.0f), s));
    }
};

// Per token: qn = q * (D^-0.5 / sqrt(lanes(q*q) + 1e-6)), kn = k * (1 / sqrt(lanes(k*k) + 1e-6)),
// beta = sigmoid(b), alpha = exp(lower_bound * sigmoid(exp(a_log) * (f + dt_bias))), or, without a bound,
// exp(-exp(a_log) * softplus(f + dt_bias)).
struct KdaToken {
    alignas(64) float qn[KDA_MAX_DIM], kn[KDA_MAX_DIM], alpha[KDA_MAX_DIM];
    float beta;
};

inline void kda_prepare(const KdaInputs& in, int64_t t, int64_t h, float rate, KdaToken& to) {
    const int64_t d = in.dim;
    const bf16 *q = in.q + t * in.q_stride + h * d, *k = in.k + t * in.k_stride + h * d;
    const bf16* f = in.f + t * in.f_stride + h * d;
    const f16 q_scale = set1(1.0f / std::sqrt(float(d)) / std::sqrt(dot_lanes(q, q, d) + KDA_L2_EPS));
    const f16 k_scale = set1(1.0f / std::sqrt(dot_lanes(k, k, d) + KDA_L2_EPS));
    const f16 a = set1(rate);
    for (int64_t i = 0; i < d; i += LANES) {
        store(to.qn + i, mul(row_load(q, i, d), q_scale));
        store(to.kn + i, mul(row_load(k, i, d), k_scale));
        store(to.alpha + i, exp(in.log_decay(a, add(row_load(f, i, d), row_load(in.dt_bias + h * d, i, d)))));
    }
    to.beta = sigmoid1(to_float(in.b[t * in.b_stride + h]));
}

// S~ = alpha*S; error = v - chain over k of S~ kn; u = beta*error; S' = fma(kn, u, S~). `from` and `to` may be the same.
// Column block of N vectors: rows of `from` and `to` lie from_ld and to_ld floats apart. Returns error and u.
// With WithOutput: out = chain over k of S' qn.
template <int N, bool WithOutput>
inline void kda_step(const float* from, int64_t from_ld, float* to, int64_t to_ld, int64_t dim, const KdaToken& token,
                     const f16* v, f16* error, f16* u, f16* out) {
    f16 predicted[N], sum[N], step[N];
    for (int n = 0; n < N; ++n) predicted[n] = zero();
    for (int64_t k = 0; k < dim; ++k) {
        const f16 alpha = set1(token.alpha[k]), key = set1(token.kn[k]);
        for (int n = 0; n < N; ++n)
            predicted[n] = fma(mul(alpha, load(from + k * from_ld + n * LANES)), key, predicted[n]);
    }
    const f16 beta = set1(token.beta);
    for (int n = 0; n < N; ++n) {
        error[n] = sub(v[n], predicted[n]);
        step[n] = mul(beta, error[n]);
        sum[n] = zero();
    }
    for (int64_t k = 0; k < dim; ++k) {
        const f16 alpha = set1(token.alpha[k]), key = set1(token.kn[k]), query = set1(token.qn[k]);
        for (int n = 0; n < N; ++n) {
            f16 s = fma(key, step[n], mul(alpha, load(from + k * from_ld + n * LANES)));
            store(to + k * to_ld + n * LANES, s);
            if (WithOutput) sum[n] = fma(s, query, sum[n]);
        }
    }
    for (int n = 0; n < N; ++n) {
        u[n] = step[n];
        if (WithOutput) out[n] = sum[n];
    }
}

// Calls f(N as integral constant, first column) for blocks of at most Max vectors over `width` columns (a multiple of 16).
template <int Max, class F>
inline void kda_column_blocks(int64_t width, F f) {
    static_assert(Max >= 1 && Max <= 4, "");
    for (int64_t c = 0; c < width; c += Max * LANES) {
        const int64_t vectors = (width - c) / LANES < Max ? (width - c) / LANES : Max;
        if constexpr (Max >= 4) if (vectors == 4) f(std::integral_constant<int, 4>(), c);
        if constexpr (Max >= 3) if (vectors == 3) f(std::integral_constant<int, 3>(), c);
        if constexpr (Max >= 2) if (vectors == 2) f(std::integral_constant<int, 2>(), c);
        if (vectors == 1) f(std::integral_constant<int, 1>(), c);
    }
}

inline int64_t kda_width(int64_t dim) { return (dim + LANES - 1) / LANES * LANES; }

}  // namespace zm
