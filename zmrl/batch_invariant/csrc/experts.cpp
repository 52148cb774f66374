// All routed experts of all tokens in one call, forward (docs/operators.md, Linear and experts); and the experts of one rank for
// the tokens of all, whose owners combine the results (zmrl/parallel/experts.py).
#include "experts.h"

using namespace zm;

namespace {

struct Tokens {
    const bf16* z;
    int64_t z_stride, count;
    const int32_t* ids;
    const float* weights;
    int64_t k;
};

struct TokenPairs {
    const bf16* z;
    int64_t z_stride;
    const int32_t* rows_of;
    int64_t count;
    const int32_t* ids;
};

// Every pair's expert applied to its row of z: the rows of results, or their sums over tokens t0.. weighted by `weights`.
// kept: ExpertBlock::keep of every block, or null.
template <class Experts>
void apply_experts(const Pairs& pairs, const Experts& w, const ExpertAdapters& lora, const Rows& z_rows, const float* weights,
                   int64_t t0, const Situ& situ, int workers, const PairRows& results, uint8_t* kept) {
    const int64_t latent = w.latent, blocks = int64_t(pairs.blocks.size());
    parallel_for(blocks, workers, [&](int64_t item) {
        const Pairs::Block& block = pairs.blocks[size_t(item)];
        const int64_t m = block.rows;
        Prefetch prefetch(ExpertBlock::steps(latent, w.width, lora.rank));
        if (item + 1 < blocks && pairs.blocks[size_t(item) + 1].expert != block.expert) {
            w.prefetch(pairs.blocks[size_t(item) + 1].expert, prefetch);
            if (lora.a1) lora.prefetch(0, pairs.blocks[size_t(item) + 1].expert, prefetch);
        }
        BlockRuns runs;
        if (lora.a1) pairs.runs(block.begin, m, runs);
        ExpertBlock s(latent, w.width, lora.rank);
        float* r = s.carve(scratch<EXPERT_BLOCK>(s.floats(m) + m * latent), m);
        if (results.sorted) r = results.sorted + block.begin * latent;
        s.gather(z_rows, block.begin, m);
        s.forward(w, lora, block.expert, m, runs, situ, r, prefetch);
        if (kept) s.keep(m, r, kept + block.begin * ExpertBlock::kept_bytes(latent, w.width, lora.rank));
        const int32_t* place = pairs.place.data() + block.begin;
        results.each_sum(pairs, block.begin, m, t0, latent, [&](int64_t i, float* sum) {
            if (i + ROWS_AHEAD < m) __builtin_prefetch(weights + place[i + ROWS_AHEAD]);
            const f16 weight = set1(weights[place[i]]);
            for (int64_t n = 0; n < latent; n += 16) store(sum + n, fma(weight, load(r + i * latent + n), load(sum + n)));
        });
    });
}

template <class Experts>
int64_t run(const Experts& w, const ExpertAdapters& lora, const Tokens& x, const int32_t* slots, int64_t slot_count, const Situ& situ,
            bf16* out, uint8_t* kept, int64_t threads) {
    const int64_t latent = w.latent, k = x.k, kept_bytes = ExpertBlock::kept_bytes(latent, w.width, lora.rank);
    Pairs pairs(lora.experts, lora.a1 ? slots : nullptr);
    const int workers = expert_threads(x.count, k, lora.experts, w, lora.rank, threads);
    const int64_t at_once = tokens_at_once(k, latent);
    for (int64_t t0 = 0; t0 < x.count; t0 += at_once) {
        const int64_t t1 = min64(t0 + at_once, x.count);
        pairs.sort(x.ids, k, t0, t1, slot_count);
        const PairRows results(t1 - t0, k, latent, workers);
        apply_experts(pairs, w, lora, Rows{x.z, x.z_stride, false, pairs.token.data()}, x.weights, t0, situ, workers, results,
                      kept ? kept + t0 * k * kept_bytes : nullptr);
        const int64_t chunk = 64;
        parallel_for((t1 - t0 + chunk - 1) / chunk, workers, [&](int64_t c) {
            for (int64_t t = t0 + c * chunk; t < min64(t0 + (c + 1) * chunk, t1); ++t)
                for (int64_t n = 0; n < latent; n += 16) {
                    f16 sum = results.sums ? load(results.sums + (t - t0) * latent + n) : zero();
                    for (int64_t j = 0; results.sorted && j < k; ++j) {
                        const int64_t at = pairs.position[size_t((t - t0) * k + j)];
                        sum = fma(set1(x.weights[t * k + j]), load(results.sorted + at * latent + n), sum);
                    }
                    store_bf16(out + t * latent + n, sum);
                }
        });
    }
    return workers;
}

template <class Experts>
int64_t run_pairs(const Experts& w, const ExpertAdapters& lora, const TokenPairs& x, const int32_t* slots, int64_t slot_count,
                  const Situ& situ, float* results, int64_t threads) {
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
        apply_experts(pairs, w, lora, Rows{x.z, x.z_stride, false, row.data()}, nullptr, t0, situ, workers, PairRows(sorted), nullptr);
        for (int64_t i = t0; i < t1; ++i)
            std::memcpy(results + i * latent, sorted + int64_t(pairs.position[size_t(i - t0)]) * latent, size_t(latent) * 4);
    }
    return workers;
}

}  // namespace

// out [tokens, L] = bf16(chain over j of fma(weights_j, r_j, .)) with, for expert ids_j: g = bf16(W1 z), u = bf16(W3 z),
// h = bf16(situ(g, u)), r = W2 h in FP32. Weights: MXFP4 codes and scales, or BF16 panels where there are no scales.
// a1 != null: adapters inside, as in a linear layer, for tokens with slot >= 0. kept [tokens*k, kept_bytes]: what zm_experts_backward may
// use instead of computing the pairs again; or null. Returns the threads used, or check_pairs' error.
ZM_API int64_t zm_experts(const bf16* z, int64_t z_stride, int64_t tokens, const int32_t* ids, const float* weights, int64_t k,
                          const void* c1, const uint8_t* s1, const void* c3, const uint8_t* s3, const void* c2,
                          const uint8_t* s2, int64_t experts, int64_t latent, int64_t width, float beta, float linear_beta,
                          const bf16* a1, const bf16* b1, const bf16* a3, const bf16* b3, const bf16* a2, const bf16* b2,
                          const int32_t* slots, int64_t slot_count, int64_t rank, float scale, uint8_t* kept, bf16* out,
                          int64_t threads) {
    const ExpertAdapters lora{a1, b1, a3, b3, a2, b2, a1 ? rank : 0, experts, latent, width, scale};
    if (const int64_t error = check_pairs(ids, tokens, k, experts, slots, slot_count)) return error;
    return with_experts(c1, s1, c3, s3, c2, s2, latent, width, [&](const auto& w) {
        return run(w, lora, {z, z_stride, tokens, ids, weights, k}, slots, slot_count, Situ(beta, linear_beta), out, kept, threads);
    });
}

// results [pairs, L] FP32 = the expert ids[i] applied to row rows_of[i] of z, not weighted. The other arguments: zm_experts, with one
// slot per pair. Pairs of one expert must come in token order: the order of the adapters' gradient chains. Returns as zm_experts.
ZM_API int64_t zm_expert_results(const bf16* z, int64_t z_stride, const int32_t* rows_of, int64_t count, const int32_t* ids,
                                 const void* c1, const uint8_t* s1, const void* c3, const uint8_t* s3, const void* c2,
                                 const uint8_t* s2, int64_t experts, int64_t latent, int64_t width, float beta, float linear_beta,
                                 const bf16* a1, const bf16* b1, const bf16* a3, const bf16* b3, const bf16* a2, const bf16* b2,
                                 const int32_t* slots, int64_t slot_count, int64_t rank, float scale, float* results,
                                 int64_t threads) {
    const ExpertAdapters lora{a1, b1, a3, b3, a2, b2, a1 ? rank : 0, experts, latent, width, scale};
    if (const int64_t error = check_pairs(ids, count, 1, experts, slots, slot_count)) return error;
    return with_experts(c1, s1, c3, s3, c2, s2, latent, width, [&](const auto& w) {
        return run_pairs(w, lora, {z, z_stride, rows_of, count, ids}, slots, slot_count, Situ(beta, linear_beta), results, threads);
    });
}

// out [tokens, L] BF16 from results [pairs, L] FP32, of which index[t*k + j] is that of the token's expert j. weights [tokens, k]:
// bf16(chain over j of fma(weight, result, .)); null: bf16(+0.0 + result_0 + result_1 + ...).
ZM_API int64_t zm_combine_experts(const float* results, int64_t latent, const int32_t* index, const float* weights, int64_t tokens,
                                  int64_t k, bf16* out, int64_t threads) {
    const int workers = threads_for(tokens * k * latent * 2, int(threads));
    parallel_for(tokens, workers, [&](int64_t t) {
        for (int64_t n = 0; n < latent; n += 16) {
            f16 sum = zero();
            for (int64_t j = t * k; j < (t + 1) * k; ++j) {
                const f16 result = load(results + index[j] * latent + n);
                sum = weights ? fma(set1(weights[j]), result, sum) : add(sum, result);
            }
            store_bf16(out + t * latent + n, sum);
        }
    });
    return workers;
}
