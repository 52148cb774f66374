// Kimi Delta Attention backward. Sequences start from a zero state. Per (sequence, head): a forward sweep keeps the state at
// every 32nd token; then, segment by segment from the last, the states of the segment are recomputed and the gradient of the
// state is carried back through them. Nothing is divided by a decay.
//
// Sums over the columns of S (gradients of qn, kn, alpha, beta) are rule-4 lanes within a block of up to 64 columns, blocks
// added in ascending order.
#include <cstring>
#include <vector>

#include "kda.h"
#include "parallel.h"
#include "sequences.h"

using namespace zm;

namespace {

constexpr int64_t SEGMENT = 32;
constexpr int VECTORS = 4;  // part of the order of the sums over columns
constexpr int64_t MAX_BLOCK = VECTORS * LANES;

struct Outputs {
    bf16 *dq, *dk, *dv, *df, *db;  // contiguous
};

// Gradients of one token's qn, kn, alpha and beta.
struct TokenGradient {
    float qn[KDA_MAX_DIM], kn[KDA_MAX_DIM], alpha[KDA_MAX_DIM];
    float beta;
};

struct Scratch {
    std::vector<float> checkpoints;                                // [segments, D, width]
    std::vector<float> states;                                     // [SEGMENT + 1, D, block]
    std::vector<float> gradient;                                   // dS [D, width]
    std::vector<KdaToken> tokens = std::vector<KdaToken>(SEGMENT);
    std::vector<TokenGradient> grads = std::vector<TokenGradient>(SEGMENT);
    std::vector<float> errors = std::vector<float>(SEGMENT * MAX_BLOCK), steps = errors;  // v - prediction, and u
};

// One column block of a segment of `count` tokens from row `first`: recompute the states, carry dS back.
template <int N>
void segment_block(const KdaInputs& in, const bf16* grad_o, int64_t grad_o_stride, int64_t first, int64_t count, int64_t h,
                   const float* checkpoint, int64_t c, Scratch& scratch, bf16* dv) {
    const int64_t d = in.dim, width = kda_width(d), block = N * LANES, state_size = d * block;
    float* states = scratch.states.data();
    float* ds = scratch.gradient.data() + c;
    for (int64_t k = 0; k < d; ++k) std::memcpy(states + k * block, checkpoint + k * width + c, block * sizeof(float));
    for (int64_t i = 0; i < count; ++i) {
        f16 v[N], error[N], u[N];
        for (int n = 0; n < N; ++n) v[n] = row_load(in.v + (first + i) * in.v_stride + h * d, c + n * LANES, d);
        kda_step<N, false>(states + i * state_size, block, states + (i + 1) * state_size, block, d, scratch.tokens[i], v,
                           error, u, nullptr);
        for (int n = 0; n < N; ++n) {
            store(&scratch.errors[i * MAX_BLOCK + n * LANES], error[n]);
            store(&scratch.steps[i * MAX_BLOCK + n * LANES], u[n]);
        }
    }
    for (int64_t i = count - 1; i >= 0; --i) {
        const KdaToken& token = scratch.tokens[i];
        TokenGradient& grad = scratch.grads[i];
        const float *before = states + i * state_size, *after = before + state_size;
        const int64_t t = first + i;
        f16 go[N], du[N], u[N], dpred[N];
        for (int n = 0; n < N; ++n) {
            go[n] = row_load(grad_o + t * grad_o_stride + h * d, c + n * LANES, d);
            u[n] = load(&scratch.steps[i * MAX_BLOCK + n * LANES]);
            du[n] = zero();
        }
        for (int64_t k = 0; k < d; ++k) {  // o = S' qn; u enters S' as kn u
            const f16 query = set1(token.qn[k]), key = set1(token.kn[k]);
            f16 dqn = zero();
            for (int n = 0; n < N; ++n) {
                f16 g = fma(query, go[n], load(ds + k * width + n * LANES));
                store(ds + k * width + n * LANES, g);
                dqn = fma(load(after + k * block + n * LANES), go[n], dqn);
                du[n] = fma(g, key, du[n]);
            }
            grad.qn[k] += sum_lanes(dqn);
        }
        const f16 beta = set1(token.beta);
        f16 dbeta = zero();
        for (int n = 0; n < N; ++n) {
            dbeta = fma(du[n], load(&scratch.errors[i * MAX_BLOCK + n * LANES]), dbeta);
            f16 g = mul(beta, du[n]);
            row_store(dv + t * in.heads * d + h * d, c + n * LANES, d, g);
            dpred[n] = sub(zero(), g);
        }
        grad.beta += sum_lanes(dbeta);
        for (int64_t k = 0; k < d; ++k) {  // S' = S~ + kn u, prediction = S~ kn, S~ = alpha S
            const f16 alpha = set1(token.alpha[k]), key = set1(token.kn[k]);
            f16 dkn = zero(), dalpha = zero();
            for (int n = 0; n < N; ++n) {
                f16 g = load(ds + k * width + n * LANES), s = load(before + k * block + n * LANES);
                dkn = fma(mul(alpha, s), dpred[n], fma(g, u[n], dkn));
                g = fma(key, dpred[n], g);
                dalpha = fma(g, s, dalpha);
                store(ds + k * width + n * LANES, mul(alpha, g));
            }
            grad.kn[k] += sum_lanes(dkn);
            grad.alpha[k] += sum_lanes(dalpha);
        }
    }
}

// y = x * (scale / sqrt(lanes(x*x) + eps)): dx = bf16(r * (dy - x * (lanes(x*dy) / (lanes(x*x) + eps)))), r the factor.
void l2_backward(const bf16* x, const float* dy, int64_t d, float scale, bf16* dx) {
    const float square = dot_lanes(x, x, d) + KDA_L2_EPS;
    const f16 r = set1(scale / std::sqrt(square)), c = set1(dot_lanes(x, dy, d) / square);
    for (int64_t i = 0; i < d; i += LANES)
        row_store(dx, i, d, mul(r, sub(row_load(dy, i, d), mul(row_load(x, i, d), c))));
}

void token_backward(const KdaInputs& in, int64_t t, int64_t h, float rate, const KdaToken& token, const TokenGradient& grad,
                    const Outputs& out) {
    const int64_t d = in.dim, at = (t * in.heads + h) * d;
    l2_backward(in.q + t * in.q_stride + h * d, grad.qn, d, 1.0f / std::sqrt(float(d)), out.dq + at);
    l2_backward(in.k + t * in.k_stride + h * d, grad.kn, d, 1.0f, out.dk + at);
    const f16 a = set1(rate), slope = set1(in.slope(rate));
    const bf16* f = in.f + t * in.f_stride + h * d;
    for (int64_t i = 0; i < d; i += LANES) {
        f16 x = add(row_load(f, i, d), row_load(in.dt_bias + h * d, i, d));
        f16 dg = mul(row_load(grad.alpha, i, d), load(token.alpha + i));
        row_store(out.df + at, i, d, mul(mul(dg, slope), in.shape(a, x)));
    }
    out.db[t * in.heads + h] = to_bf16(grad.beta * (token.beta * (1.0f - token.beta)));
}

void sequence_head(const KdaInputs& in, const bf16* grad_o, int64_t grad_o_stride, int64_t start, int64_t length, int64_t h,
                   Scratch& scratch, const Outputs& out) {
    const int64_t d = in.dim, width = kda_width(d), segments = (length + SEGMENT - 1) / SEGMENT, size = d * width;
    const float rate = exp1(in.a_log[h]);
    scratch.checkpoints.resize(size_t(segments * size));
    scratch.states.resize(size_t((SEGMENT + 1) * d * MAX_BLOCK));
    scratch.gradient.assign(size_t(size), 0.0f);
    auto prepare = [&](int64_t first, int64_t count) {
        for (int64_t i = 0; i < count; ++i) kda_prepare(in, first + i, h, rate, scratch.tokens[i]);
    };
    std::memset(scratch.checkpoints.data(), 0, size_t(size) * sizeof(float));
    for (int64_t g = 0; g + 1 < segments; ++g) {
        const int64_t first = start + g * SEGMENT;
        const float* from = &scratch.checkpoints[g * size];
        float* to = &scratch.checkpoints[(g + 1) * size];
        prepare(first, SEGMENT);
        kda_column_blocks<VECTORS>(width, [&](auto block, int64_t c) {
            constexpr int N = decltype(block)::value;
            for (int64_t i = 0; i < SEGMENT; ++i) {
                f16 v[N], error[N], u[N];
                for (int n = 0; n < N; ++n) v[n] = row_load(in.v + (first + i) * in.v_stride + h * d, c + n * LANES, d);
                kda_step<N, false>((i ? to : from) + c, width, to + c, width, d, scratch.tokens[i], v, error, u, nullptr);
            }
        });
    }
    for (int64_t g = segments - 1; g >= 0; --g) {
        const int64_t first = start + g * SEGMENT;
        const int64_t count = length - g * SEGMENT < SEGMENT ? length - g * SEGMENT : SEGMENT;
        prepare(first, count);
        for (int64_t i = 0; i < count; ++i) std::memset(&scratch.grads[i], 0, sizeof(TokenGradient));
        kda_column_blocks<VECTORS>(width, [&](auto block, int64_t c) {
            segment_block<decltype(block)::value>(in, grad_o, grad_o_stride, first, count, h,
                                                  &scratch.checkpoints[g * size], c, scratch, out.dv);
        });
        for (int64_t i = 0; i < count; ++i)
            token_backward(in, first + i, h, rate, scratch.tokens[i], scratch.grads[i], out);
    }
}

}  // namespace

// Gradients dq, dk, dv, df [T, H*D] and db [T, H], BF16 contiguous, of zm_kda without states. Returns the threads used, or a
// SequenceStatus.
ZM_API int64_t zm_kda_backward(const bf16* grad_o, int64_t grad_o_stride, const bf16* q, int64_t q_stride, const bf16* k,
                               int64_t k_stride, const bf16* v, int64_t v_stride, const bf16* f, int64_t f_stride,
                               const bf16* b, int64_t b_stride, const float* a_log, const float* dt_bias, float lower_bound,
                               const int32_t* cu, bf16* dq, bf16* dk, bf16* dv, bf16* df, bf16* db, int64_t rows,
                               int64_t heads, int64_t dim, int64_t requests, int64_t threads) {
    const Sequences seqs{cu, nullptr, nullptr, requests};
    if (SequenceStatus status = seqs.check(rows, 0)) return status;
    const KdaInputs in{q, k, v, f, b, q_stride, k_stride, v_stride, f_stride, b_stride, a_log, dt_bias, lower_bound,
                       heads, dim};
    const Outputs out{dq, dk, dv, df, db};
    const int workers = threads_for(rows * heads * dim * dim * 30, int(threads));
    parallel_for(requests * heads, workers, [&](int64_t item) {
        static thread_local Scratch scratch;
        const int64_t r = item / heads, length = cu[r + 1] - cu[r];
        if (length > 0) sequence_head(in, grad_o, grad_o_stride, cu[r], length, item % heads, scratch, out);
    });
    return requests * heads > 1 ? workers : 1;
}
