// All routed experts of all tokens in one call, backward (docs/operators.md, Linear and experts). An expert's block is what the
// forward pass kept, or is computed again: the same bits. And the experts of one rank for the tokens of all (zmrl/parallel/experts.py).
#include "experts.h"

using namespace zm;

namespace {

struct Gradients {  // of slot 0, each may be null
    float *a1, *b1, *a3, *b3, *a2, *b2;
};

// Rows of one expert's block, FP32, `spread` floats apart. What one chain runs over lies side by side.
struct BackwardBlock {
    ExpertBlock s;
    int64_t ld_out, ld_in;
    float* dr;      // [dr L | dt2 rank]
    float* d;       // [dg I | dt1 rank | du I | dt3 rank], without an adapter [dg I | du I]
    float *dz;      // [m, L]
    float *scaled_r, *scaled_g, *scaled_u;  // scale * dr, dg, du

    BackwardBlock(int64_t latent, int64_t width, int64_t rank)
        : s(latent, width, rank), ld_out(spread(latent + rank)), ld_in(spread(2 * (width + rank))) {}
    int64_t floats(int64_t m) const {
        return s.floats(m) + m * (ld_out + ld_in + 2 * s.latent + s.ld_latent + 2 * s.ld_width);
    }
    // Panels that backward_rows() goes through.
    static int64_t steps(int64_t latent, int64_t width, int64_t rank) { return (2 * latent + 3 * width + 6 * rank) / 16; }
    // Returns the place of r [m, L].
    float* carve(float* at, int64_t m) {
        dr = s.carve(at, m), d = dr + m * ld_out, scaled_r = d + m * ld_in, scaled_g = scaled_r + m * s.ld_latent;
        scaled_u = scaled_g + m * s.ld_width, dz = scaled_u + m * s.ld_width;
        return dz + m * s.latent;
    }
    BackwardBlock from_row(int64_t i) const {
        BackwardBlock b = *this;
        b.s.z += i * s.ld_latent, b.s.g += i * s.ld_width, b.s.u += i * s.ld_width, b.s.h += i * s.ld_width;
        b.s.t1 += i * s.ld_rank, b.s.t3 += i * s.ld_rank, b.s.t2 += i * s.ld_rank;
        b.dr += i * ld_out, b.d += i * ld_in, b.dz += i * s.latent;
        b.scaled_r += i * s.ld_latent, b.scaled_g += i * s.ld_width, b.scaled_u += i * s.ld_width;
        return b;
    }
};

// dz (FP32) = W1^T dg, A1^T dt1, W3^T du, A3^T dt3 in one chain, for m rows of one slot; with slot 0 adapter gradients of this expert.
template <class Experts>
void backward_rows(const Experts& w, const ExpertAdapters& lora, int64_t e, int64_t slot, int64_t m, const BackwardBlock& b,
                   const Situ& situ, const Gradients& grads, Prefetch& prefetch) {
    using Transposed = typename Experts::Transposed;
    const ExpertBlock& s = b.s;
    const int64_t L = w.latent, I = w.width, rank = lora.rank, low = rank / 16;
    const bool adapted = slot >= 0;
    const Scaled scaled{lora.scale};
    const auto a = [&](const bf16* base, int64_t inputs) { return Steps{lora.a<Bf16Transposed>(base, inputs, slot, e), rank}; };
    const auto into_rank = [&](const bf16* base, const float* dy, int64_t ld, int64_t outputs, float* dt) {
        product(dy, ld, m, low, dt, ld, scaled, prefetch, Steps{lora.b<Bf16Transposed>(base, outputs, slot, e), outputs});
    };
    const Steps w2{w.template w2<Transposed>(e), L}, w1{w.template w1<Transposed>(e), I}, w3{w.template w3<Transposed>(e), I};
    float *dg = b.d, *dt1 = dg + I, *du = dt1 + (adapted ? rank : 0), *dt3 = du + I, *dt2 = b.dr + L;
    if (adapted) {
        into_rank(lora.b2, b.dr, b.ld_out, L, dt2);
        product(b.dr, b.ld_out, m, I / 16, dg, b.ld_in, Stored{}, prefetch, w2, a(lora.a2, I));
    } else {
        product(b.dr, b.ld_out, m, I / 16, dg, b.ld_in, Stored{}, prefetch, w2);
    }
    const f16 scale = set1(lora.scale);
    for (int64_t i = 0; i < m; ++i)
        for (int64_t n = 0; n < I; n += 16) {
            const int64_t at = i * s.ld_width + n;
            f16 gate, up;
            const f16 h = situ.backward(load(s.g + at), load(s.u + at), load(dg + i * b.ld_in + n), gate, up);
            store(dg + i * b.ld_in + n, gate), store(du + i * b.ld_in + n, up);
            store(s.h + at, round_bf16(h));
            store(b.scaled_g + at, mul(scale, gate)), store(b.scaled_u + at, mul(scale, up));
        }
    if (adapted) {
        into_rank(lora.b1, dg, b.ld_in, I, dt1);
        into_rank(lora.b3, du, b.ld_in, I, dt3);
        product(dg, b.ld_in, m, L / 16, b.dz, L, Stored{}, prefetch, w1, a(lora.a1, L), w3, a(lora.a3, L));
    } else {
        product(dg, b.ld_in, m, L / 16, b.dz, L, Stored{}, prefetch, w1, w3);
    }
    if (slot != 0) return;
    const auto a_gradient = [&](float* grad, const float* x, int64_t ld, int64_t inputs, const float* dt, int64_t ld_dt) {
        if (!grad) return;
        accumulate(x, ld, dt, ld_dt, m, inputs, low, grad + e * rank * inputs, inputs * 16);
        prefetch(low);
    };
    const auto b_gradient = [&](float* grad, const float* t, const float* dy, int64_t ld, int64_t outputs) {
        if (!grad) return;
        accumulate(t, s.ld_rank, dy, ld, m, rank, outputs / 16, grad + e * rank * outputs, rank * 16);
        prefetch(outputs / 16);
    };
    a_gradient(grads.a2, s.h, s.ld_width, I, dt2, b.ld_out);
    b_gradient(grads.b2, s.t2, b.scaled_r, s.ld_latent, L);
    a_gradient(grads.a1, s.z, s.ld_latent, L, dt1, b.ld_in);
    b_gradient(grads.b1, s.t1, b.scaled_g, s.ld_width, I);
    a_gradient(grads.a3, s.z, s.ld_latent, L, dt3, b.ld_in);
    b_gradient(grads.b3, s.t3, b.scaled_u, s.ld_width, I);
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

// What backward_experts will read next: the gradients of expert e, what the pairs from `next` on have kept, and their expert's weights.
template <class Experts>
void prefetch_next(const Pairs& pairs, const Experts& w, const ExpertAdapters& lora, int64_t e, int64_t next, const Gradients& grads,
                   const uint8_t* kept, Prefetch& prefetch) {
    const auto gradient = [&](const float* grad, int64_t size) {
        if (grad) prefetch.add(grad + e * lora.rank * size, lora.rank * size * 4);
    };
    gradient(grads.a2, w.width), gradient(grads.b2, w.latent), gradient(grads.a1, w.latent), gradient(grads.b1, w.width);
    gradient(grads.a3, w.latent), gradient(grads.b3, w.width);
    if (next == pairs.start[size_t(lora.experts)]) return;
    int64_t then = e;
    while (pairs.start[size_t(then) + 1] <= next) ++then;
    const int64_t kept_bytes = ExpertBlock::kept_bytes(w.latent, w.width, lora.rank);
    if (kept) prefetch.add(kept + next * kept_bytes, min64(ROW_BLOCK, pairs.start[size_t(then) + 1] - next) * kept_bytes);
    if (then == e) return;
    w.prefetch(then, prefetch);
    if (lora.a1) lora.prefetch(0, then, prefetch);
}

// dz (rows, or sums over tokens t0..), dweights[place] and the adapter gradients of all pairs, an expert at a time.
template <class Experts>
void backward_experts(const Pairs& pairs, const Experts& w, const ExpertAdapters& lora, const Rows& z_rows, const Rows& du_rows,
                      const float* weights, int64_t t0, const Situ& situ, const Gradients& grads, int workers, float* dweights,
                      const PairRows& dz, const uint8_t* kept) {
    const int64_t latent = w.latent, kept_bytes = ExpertBlock::kept_bytes(latent, w.width, lora.rank);
    const f16 scale = set1(lora.scale);
    parallel_for(lora.experts, workers, [&](int64_t e) {
        for (int64_t begin = pairs.start[size_t(e)]; begin < pairs.start[size_t(e) + 1]; begin += ROW_BLOCK) {
            const int64_t m = min64(ROW_BLOCK, pairs.start[size_t(e) + 1] - begin);
            Prefetch prefetch(BackwardBlock::steps(latent, w.width, lora.rank));
            prefetch_next(pairs, w, lora, e, begin + m, grads, kept, prefetch);
            BlockRuns runs;
            if (lora.a1) pairs.runs(begin, m, runs);
            else runs.run[runs.count++] = {0, m, -1};
            BackwardBlock b(latent, w.width, lora.rank);
            float* computed = b.carve(scratch<EXPERT_BLOCK>(b.floats(m)), m);
            if (dz.sorted) b.dz = dz.sorted + begin * latent;
            b.s.gather(z_rows, begin, m);
            if (!kept) b.s.forward(w, lora, e, m, runs, situ, computed, prefetch);
            const float* r = kept ? b.s.restore(m, kept + begin * kept_bytes) : computed;
            const int32_t* places = pairs.place.data() + begin;
            for (int64_t i = 0; i < m; ++i) {
                if (const int64_t later = i + ROWS_AHEAD; later < m) {
                    prefetch_row(du_rows.at(du_rows.row(begin + later), 0), latent * 2);
                    prefetch_row(r + later * latent, latent * 4);
                    __builtin_prefetch(weights + places[later]);
                    __builtin_prefetch(dweights + places[later], 1);
                }
                float *row = b.dr + i * b.ld_out, *scaled = b.scaled_r + i * b.s.ld_latent;
                du_rows.pack(begin + i, 0, latent, row);
                const int64_t place = places[i];
                const f16 weight = set1(weights[place]);
                f16 sum = zero();
                for (int64_t n = 0; n < latent; n += 16) {
                    const f16 d = load(row + n), dr = mul(weight, d);
                    sum = fma(d, load(r + i * latent + n), sum);
                    store(row + n, dr), store(scaled + n, mul(scale, dr));
                }
                dweights[place] = sum_lanes(sum);
            }
            for (const Run& run : runs)
                backward_rows(w, lora, e, run.slot, run.end - run.begin, b.from_row(run.begin), situ, grads, prefetch);
            dz.each_sum(pairs, begin, m, t0, latent, [&](int64_t i, float* sum) {
                for (int64_t n = 0; n < latent; n += 16) store(sum + n, add(load(sum + n), load(b.dz + i * latent + n)));
            });
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
        const PairRows rows(t1 - t0, k, latent, workers);
        const Rows z_rows{x.z, x.z_stride, false, pairs.token.data()}, du_rows{x.du, x.du_stride, false, pairs.token.data()};
        backward_experts(pairs, w, lora, z_rows, du_rows, x.weights, t0, situ, grads, workers, dweights, rows,
                         kept ? kept + t0 * k * kept_bytes : nullptr);
        const int64_t chunk = 64;
        parallel_for((t1 - t0 + chunk - 1) / chunk, workers, [&](int64_t c) {
            for (int64_t t = t0 + c * chunk; t < min64(t0 + (c + 1) * chunk, t1); ++t)
                for (int64_t n = 0; n < latent; n += 16) {
                    f16 sum = rows.sums ? load(rows.sums + (t - t0) * latent + n) : zero();
                    for (int64_t j = 0; rows.sorted && j < k; ++j)
                        sum = add(sum, load(rows.sorted + pairs.position[size_t((t - t0) * k + j)] * latent + n));
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
        backward_experts(pairs, w, lora, z_rows, du_rows, x.weights, t0, situ, grads, workers, dweights, PairRows(sorted), nullptr);
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
