// All routed experts of all tokens in one call, backward (docs/operators.md, Linear and experts). An expert's block is what the
// forward pass kept, or is computed again: the same bits. And the experts of one rank for the tokens of all (zmrl/parallel/experts.py).
#include "experts.h"

using namespace zm;

namespace {

struct Gradients {  // of slot 0, each may be null
    float *a1, *b1, *a3, *b3, *a2, *b2;
};

struct BackwardBlock {
    ExpertBlock s;
    float* own_r;
    const float* r;
    float *dr, *z, *dg, *du, *dt, *dt3, *scaled;

    static int64_t floats(int64_t m, int64_t L, int64_t I, int64_t rank) {
        return ExpertBlock::floats(m, L, I, rank) + m * (3 * L + 2 * I + 2 * rank + (L > I ? L : I));
    }
    BackwardBlock(float* at, int64_t m, int64_t L, int64_t I, int64_t rank) {
        own_r = s.carve(at, m, I, rank, L);
        r = own_r, dr = own_r + m * L, z = dr + m * L, dg = z + m * L, du = dg + m * I, dt = du + m * I, dt3 = dt + m * rank, scaled = dt3 + m * rank;
    }
};

// dt = scale * (B^T dy)
void into_rank(const float* dy, int64_t m, int64_t outputs, const Bf16Transposed& b, int64_t rank, f16 scale, float* dt) {
    chain(Rows{dy, outputs, true}, 0, m, b, 0, rank / 16, 0, outputs, dt, rank);
    for (int64_t i = 0; i < m * rank; i += 16) store(dt + i, mul(scale, load(dt + i)));
}

// grad_a continues sum of dt x, grad_b sum of (scale dy) t, over m tokens.
void adapter_gradients(const float* x, int64_t inputs, const float* t, const float* dt, const float* dy, int64_t outputs,
                       int64_t rank, int64_t m, f16 scale, float* scaled, float* grad_a, float* grad_b) {
    if (grad_a) accumulate(x, inputs, dt, rank, m, inputs, rank / 16, grad_a, inputs * 16);
    if (!grad_b) return;
    for (int64_t i = 0; i < m * outputs; i += 16) store(scaled + i, mul(scale, load(dy + i)));
    accumulate(t, rank, scaled, outputs, m, rank, outputs / 16, grad_b, rank * 16);
}

// dz (FP32, one row per sorted pair) = W1^T dg, A1^T dt1, W3^T du, A3^T dt3 in one chain; adapter gradients of this expert.
template <class Experts>
void backward_block(const Experts& w, const ExpertAdapters& lora, int64_t e, int64_t m, const BlockRuns& runs,
                    const BackwardBlock& b, const Situ& situ, const Gradients& grads, float* dz) {
    using Transposed = typename Experts::Transposed;
    const int64_t L = w.latent, I = w.width, rank = lora.rank;
    const f16 scale = set1(lora.scale);
    const auto at = [&](float* grad, int64_t size) { return grad ? grad + e * rank * size : nullptr; };
    chain(Rows{b.dr, L, true}, 0, m, w.template w2<Transposed>(e), 0, I / 16, 0, L, b.dg, I);
    for_adapters(runs, 0, m, [&](int64_t i, int64_t end, int64_t slot) {
        const int64_t n = end - i;
        float *dt = b.dt + i * rank, *dr = b.dr + i * L;
        into_rank(dr, n, L, lora.b<Bf16Transposed>(lora.b2, L, slot, e), rank, scale, dt);
        chain(Rows{dt, rank, true}, 0, n, lora.a<Bf16Transposed>(lora.a2, I, slot, e), 0, I / 16, 0, rank, b.dg + i * I, I, true);
        if (slot == 0)
            adapter_gradients(b.s.h + i * I, I, b.s.t2 + i * rank, dt, dr, L, rank, n, scale, b.scaled, at(grads.a2, I),
                              at(grads.b2, L));
    });
    for (int64_t i = 0; i < m * I; i += 16) {
        f16 dg, du;
        situ.backward(load(b.s.g + i), load(b.s.u + i), load(b.dg + i), dg, du);
        store(b.dg + i, dg), store(b.du + i, du);
    }
    const Rows dg{b.dg, I, true}, du{b.du, I, true};
    chain(dg, 0, m, w.template w1<Transposed>(e), 0, L / 16, 0, I, dz, L);
    for_adapters(runs, 0, m, [&](int64_t i, int64_t end, int64_t slot) {
        const int64_t n = end - i;
        float *dt1 = b.dt + i * rank, *dt3 = b.dt3 + i * rank;
        into_rank(b.dg + i * I, n, I, lora.b<Bf16Transposed>(lora.b1, I, slot, e), rank, scale, dt1);
        into_rank(b.du + i * I, n, I, lora.b<Bf16Transposed>(lora.b3, I, slot, e), rank, scale, dt3);
        chain(Rows{dt1, rank, true}, 0, n, lora.a<Bf16Transposed>(lora.a1, L, slot, e), 0, L / 16, 0, rank, dz + i * L, L, true);
        if (slot == 0) {
            adapter_gradients(b.z + i * L, L, b.s.t1 + i * rank, dt1, b.dg + i * I, I, rank, n, scale, b.scaled, at(grads.a1, L),
                              at(grads.b1, I));
            adapter_gradients(b.z + i * L, L, b.s.t3 + i * rank, dt3, b.du + i * I, I, rank, n, scale, b.scaled, at(grads.a3, L),
                              at(grads.b3, I));
        }
    });
    chain(du, 0, m, w.template w3<Transposed>(e), 0, L / 16, 0, I, dz, L, true);
    for_adapters(runs, 0, m, [&](int64_t i, int64_t end, int64_t slot) {
        chain(Rows{b.dt3 + i * rank, rank, true}, 0, end - i, lora.a<Bf16Transposed>(lora.a3, L, slot, e), 0, L / 16, 0, rank,
              dz + i * L, L, true);
    });
}

struct Tokens {
    const bf16* du;
    int64_t du_stride;
    const bf16* z;
    int64_t z_stride, count;
    const int32_t* ids;
    const float* weights;
    int64_t k;
};

struct TokenPairs {
    const bf16* du;
    int64_t du_stride;
    const bf16* z;
    int64_t z_stride;
    const int32_t* rows_of;
    int64_t count;
    const int32_t* ids;
    const float* weights;
};

// dz [sorted pair][L] FP32, dweights[place] and the adapter gradients of all pairs, an expert at a time.
template <class Experts>
void backward_experts(const Pairs& pairs, const Experts& w, const ExpertAdapters& lora, const Rows& z_rows, const Rows& du_rows,
                      const float* weights, const Situ& situ, const Gradients& grads, int workers, float* dweights, float* dz,
                      const uint8_t* kept) {
    const int64_t latent = w.latent, width = w.width, kept_bytes = ExpertBlock::kept_bytes(latent, width, lora.rank);
    parallel_for(lora.experts, workers, [&](int64_t e) {
        for (int64_t begin = pairs.start[size_t(e)]; begin < pairs.start[size_t(e) + 1]; begin += ROW_BLOCK) {
            const int64_t m = min64(ROW_BLOCK, pairs.start[size_t(e) + 1] - begin);
            BlockRuns runs;
            if (lora.a1) pairs.runs(begin, m, runs);
            BackwardBlock b(scratch<EXPERT_BLOCK>(BackwardBlock::floats(m, latent, width, lora.rank)), m, latent, width, lora.rank);
            if (kept) b.r = b.s.restore(m, width, lora.rank, kept + begin * kept_bytes);
            else b.s.forward(w, lora, e, z_rows, begin, m, runs, situ, b.own_r);
            for (int64_t i = 0; i < m; ++i) {
                float* row = b.dr + i * latent;
                const float* r = b.r + i * latent;
                du_rows.pack(begin + i, 0, latent, row);
                z_rows.pack(begin + i, 0, latent, b.z + i * latent);
                const int64_t place = pairs.place[size_t(begin + i)];
                const f16 weight = set1(weights[place]);
                f16 sum = zero();
                for (int64_t n = 0; n < latent; n += 16) {
                    const f16 d = load(row + n);
                    sum = fma(d, load(r + n), sum);
                    store(row + n, mul(weight, d));
                }
                dweights[place] = sum_lanes(sum);
            }
            backward_block(w, lora, e, m, runs, b, situ, grads, dz + begin * latent);
        }
    });
}

template <class Experts>
int64_t run(const Experts& w, const ExpertAdapters& lora, const Tokens& x, const int32_t* slots, int64_t slot_count, const Situ& situ,
            const Gradients& grads, const uint8_t* kept, bf16* dz, float* dweights, int64_t threads) {
    const int64_t latent = w.latent, k = x.k, kept_bytes = ExpertBlock::kept_bytes(latent, w.width, lora.rank);
    Pairs pairs(lora.experts, lora.a1 ? slots : nullptr);
    const int workers = expert_threads(x.count, k, lora.experts, w, lora.rank, threads);
    const int64_t at_once = tokens_at_once(k, latent);
    for (int64_t t0 = 0; t0 < x.count; t0 += at_once) {
        const int64_t t1 = min64(t0 + at_once, x.count);
        pairs.sort(x.ids, k, t0, t1, slot_count);
        float* results = scratch<PAIR_RESULTS>((t1 - t0) * k * latent);
        const Rows z_rows{x.z, x.z_stride, false, pairs.token.data()}, du_rows{x.du, x.du_stride, false, pairs.token.data()};
        backward_experts(pairs, w, lora, z_rows, du_rows, x.weights, situ, grads, workers, dweights, results,
                         kept ? kept + t0 * k * kept_bytes : nullptr);
        const int64_t chunk = 64;
        parallel_for((t1 - t0 + chunk - 1) / chunk, workers, [&](int64_t c) {
            for (int64_t t = t0 + c * chunk; t < min64(t0 + (c + 1) * chunk, t1); ++t)
                for (int64_t n = 0; n < latent; n += 16) {
                    f16 sum = zero();
                    for (int64_t j = 0; j < k; ++j)
                        sum = add(sum, load(results + pairs.position[size_t((t - t0) * k + j)] * latent + n));
                    store_bf16(dz + t * latent + n, sum);
                }
        });
    }
    return workers;
}

template <class Experts>
int64_t run_pairs(const Experts& w, const ExpertAdapters& lora, const TokenPairs& x, const int32_t* slots, int64_t slot_count,
                  const Situ& situ, const Gradients& grads, float* dz, float* dweights, int64_t threads) {
    const int64_t latent = w.latent;
    Pairs pairs(lora.experts, lora.a1 ? slots : nullptr);
    const int workers = expert_threads(x.count, 1, lora.experts, w, lora.rank, threads);
    const int64_t at_once = tokens_at_once(1, latent);
    for (int64_t t0 = 0; t0 < x.count; t0 += at_once) {
        const int64_t t1 = min64(t0 + at_once, x.count);
        pairs.sort(x.ids, 1, t0, t1, slot_count);
        std::vector<int32_t> row(size_t(t1 - t0));
        for (size_t i = 0; i < row.size(); ++i) row[i] = x.rows_of[pairs.token[i]];
        float* sorted = scratch<PAIR_RESULTS>((t1 - t0) * latent);
        const Rows z_rows{x.z, x.z_stride, false, row.data()}, du_rows{x.du, x.du_stride, false, row.data()};
        backward_experts(pairs, w, lora, z_rows, du_rows, x.weights, situ, grads, workers, dweights, sorted, nullptr);
        for (int64_t i = t0; i < t1; ++i)
            std::memcpy(dz + i * latent, sorted + int64_t(pairs.position[size_t(i - t0)]) * latent, size_t(latent) * 4);
    }
    return workers;
}

}  // namespace

// dz [tokens, L] = bf16(sum over j, ascending, of the experts' FP32 input gradients); dweights [tokens, k] = lanes(du . r_j), one fma
// per lane and element. Weights as in zm_experts. a1 != null: through the adapters; the gradients of slot 0 continue their chains
// in the given buffers. kept: what zm_experts wrote for the same arguments, or null: computed again. Returns the threads used, or check_pairs' error.
ZM_API int64_t zm_experts_backward(const bf16* du, int64_t du_stride, const bf16* z, int64_t z_stride, int64_t tokens,
                                   const int32_t* ids, const float* weights, int64_t k, const void* c1, const uint8_t* s1,
                                   const void* c3, const uint8_t* s3, const void* c2, const uint8_t* s2, int64_t experts,
                                   int64_t latent, int64_t width, float beta, float linear_beta, const bf16* a1, const bf16* b1,
                                   const bf16* a3, const bf16* b3, const bf16* a2, const bf16* b2, const int32_t* slots,
                                   int64_t slot_count, int64_t rank, float scale, float* grad_a1, float* grad_b1, float* grad_a3,
                                   float* grad_b3, float* grad_a2, float* grad_b2, const uint8_t* kept, bf16* dz, float* dweights,
                                   int64_t threads) {
    const ExpertAdapters lora{a1, b1, a3, b3, a2, b2, a1 ? rank : 0, experts, latent, width, scale};
    const Gradients grads{grad_a1, grad_b1, grad_a3, grad_b3, grad_a2, grad_b2};
    if (const int64_t error = check_pairs(ids, tokens, k, experts, slots, slot_count)) return error;
    return with_experts(c1, s1, c3, s3, c2, s2, latent, width, [&](const auto& w) {
        return run(w, lora, {du, du_stride, z, z_stride, tokens, ids, weights, k}, slots, slot_count, Situ(beta, linear_beta), grads,
                   kept, dz, dweights, threads);
    });
}

// dz [pairs, L] FP32 and dweights [pairs] of zm_expert_results, pair by pair, for the gradient du of the combined outputs: pair i has
// row rows_of[i] of z and du, and the weight weights[i]. The other arguments: zm_experts_backward. Returns as zm_experts_backward.
ZM_API int64_t zm_expert_results_backward(const bf16* du, int64_t du_stride, const bf16* z, int64_t z_stride, const int32_t* rows_of,
                                          int64_t count, const int32_t* ids, const float* weights, const void* c1, const uint8_t* s1,
                                          const void* c3, const uint8_t* s3, const void* c2, const uint8_t* s2, int64_t experts,
                                          int64_t latent, int64_t width, float beta, float linear_beta, const bf16* a1, const bf16* b1,
                                          const bf16* a3, const bf16* b3, const bf16* a2, const bf16* b2, const int32_t* slots,
                                          int64_t slot_count, int64_t rank, float scale, float* grad_a1, float* grad_b1, float* grad_a3,
                                          float* grad_b3, float* grad_a2, float* grad_b2, float* dz, float* dweights, int64_t threads) {
    const ExpertAdapters lora{a1, b1, a3, b3, a2, b2, a1 ? rank : 0, experts, latent, width, scale};
    const Gradients grads{grad_a1, grad_b1, grad_a3, grad_b3, grad_a2, grad_b2};
    if (const int64_t error = check_pairs(ids, count, 1, experts, slots, slot_count)) return error;
    return with_experts(c1, s1, c3, s3, c2, s2, latent, width, [&](const auto& w) {
        return run_pairs(w, lora, {du, du_stride, z, z_stride, rows_of, count, ids, weights}, slots, slot_count,
                         Situ(beta, linear_beta), grads, dz, dweights, threads);
    });
}
