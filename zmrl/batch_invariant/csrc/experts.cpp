// All routed experts of all tokens in one call, forward (docs/operators.md, Linear and experts).
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

template <class Experts>
int64_t run(const Experts& w, const ExpertAdapters& lora, const Tokens& x, const int32_t* slots, int64_t slot_count, const Situ& situ,
            bf16* out, int64_t threads) {
    const int64_t latent = w.latent, width = w.width, k = x.k;
    const bool adapted = lora.a1 != nullptr;
    Pairs pairs(lora.experts, adapted ? slots : nullptr);
    const int workers = expert_threads(x.count, k, lora.experts, w, lora.rank, threads);
    const int64_t at_once = tokens_at_once(k, latent);
    for (int64_t t0 = 0; t0 < x.count; t0 += at_once) {
        const int64_t t1 = min64(t0 + at_once, x.count);
        pairs.sort(x.ids, k, t0, t1, slot_count);
        float* results = scratch<PAIR_RESULTS>((t1 - t0) * k * latent);
        const Rows z_rows{x.z, x.z_stride, false, pairs.token.data()};
        parallel_for(int64_t(pairs.blocks.size()), workers, [&](int64_t item) {
            const Pairs::Block& block = pairs.blocks[size_t(item)];
            BlockRuns runs;
            if (adapted) pairs.runs(block.begin, block.rows, runs);
            ExpertBlock s;
            s.carve(scratch<EXPERT_BLOCK>(ExpertBlock::floats(block.rows, latent, width, lora.rank)), block.rows, width, lora.rank,
                    latent);
            s.forward(w, lora, block.expert, z_rows, block.begin, block.rows, runs, situ, results + block.begin * latent);
        });
        const int64_t chunk = 64;
        parallel_for((t1 - t0 + chunk - 1) / chunk, workers, [&](int64_t c) {
            for (int64_t t = t0 + c * chunk; t < min64(t0 + (c + 1) * chunk, t1); ++t)
                for (int64_t n = 0; n < latent; n += 16) {
                    f16 sum = zero();
                    for (int64_t j = 0; j < k; ++j) {
                        const int64_t at = pairs.position[size_t((t - t0) * k + j)];
                        sum = fma(set1(x.weights[t * k + j]), load(results + at * latent + n), sum);
                    }
                    store_bf16(out + t * latent + n, sum);
                }
        });
    }
    return workers;
}

}  // namespace

// out [tokens, L] = bf16(chain over j of fma(weights_j, r_j, .)) with, for expert ids_j: g = bf16(W1 z), u = bf16(W3 z),
// h = bf16(situ(g, u)), r = W2 h in FP32. Weights: MXFP4 codes and scales, or BF16 panels where there are no scales.
// a1 != null: adapters inside, as in a linear layer, for tokens with slot >= 0. Returns the threads used, or check_pairs' error.
ZM_API int64_t zm_experts(const bf16* z, int64_t z_stride, int64_t tokens, const int32_t* ids, const float* weights, int64_t k,
                          const void* c1, const uint8_t* s1, const void* c3, const uint8_t* s3, const void* c2,
                          const uint8_t* s2, int64_t experts, int64_t latent, int64_t width, float beta, float linear_beta,
                          const bf16* a1, const bf16* b1, const bf16* a3, const bf16* b3, const bf16* a2, const bf16* b2,
                          const int32_t* slots, int64_t slot_count, int64_t rank, float scale, bf16* out, int64_t threads) {
    const ExpertAdapters lora{a1, b1, a3, b3, a2, b2, a1 ? rank : 0, experts, latent, width, scale};
    if (const int64_t error = check_pairs(ids, tokens, k, experts, slots, slot_count)) return error;
    return with_experts(c1, s1, c3, s3, c2, s2, latent, width, [&](const auto& w) {
        return run(w, lora, {z, z_stride, tokens, ids, weights, k}, slots, slot_count, Situ(beta, linear_beta), out, threads);
    });
}
