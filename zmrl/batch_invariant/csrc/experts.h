// What the forward and backward pass of the routed experts share: weights, adapters, tokens sorted by expert, and one expert
// applied to a block of its tokens (docs/operators.md, Linear and experts).
#pragma once
#include <vector>

#include "parallel.h"
#include "product.h"
#include "situ.h"

namespace zm {

enum ExpertScratch { EXPERT_BLOCK = FIRST_OWN_TAG, PAIR_RESULTS };
constexpr int64_t PAIR_RESULTS_FLOATS = 8 << 20;  // per-expert results of at most so many floats at a time (32 MiB)

// The weights of all experts, w1, w3 [E, I/16, L, ..] and w2 [E, L/16, I, ..] in MXFP4 or BF16 panels; Weights and Transposed
// read them in either direction.
struct Mxfp4Experts {
    using Weights = Mxfp4Weights;
    using Transposed = Mxfp4Transposed;
    const uint8_t *c1, *s1, *c3, *s3, *c2, *s2;
    int64_t latent, width;  // L, I: multiples of 32

    int64_t size() const { return latent * width; }
    template <class W> W w1(int64_t e) const { return {c1 + e * size() / 2, s1 + e * size() / 32, latent}; }
    template <class W> W w3(int64_t e) const { return {c3 + e * size() / 2, s3 + e * size() / 32, latent}; }
    template <class W> W w2(int64_t e) const { return {c2 + e * size() / 2, s2 + e * size() / 32, width}; }
};
struct Bf16Experts {
    using Weights = Bf16Weights;
    using Transposed = Bf16Transposed;
    const bf16 *m1, *m3, *m2;
    int64_t latent, width;  // L, I: multiples of 16

    int64_t size() const { return latent * width; }
    template <class W> W w1(int64_t e) const { return {m1 + e * size(), latent}; }
    template <class W> W w3(int64_t e) const { return {m3 + e * size(), latent}; }
    template <class W> W w2(int64_t e) const { return {m2 + e * size(), width}; }
};

// f(weights) with the weights in the format that they are in: without scales the pointers c are BF16 panels.
template <class F>
inline int64_t with_experts(const void* c1, const uint8_t* s1, const void* c3, const uint8_t* s3, const void* c2, const uint8_t* s2,
                            int64_t latent, int64_t width, F f) {
    if (!s1) return f(Bf16Experts{static_cast<const bf16*>(c1), static_cast<const bf16*>(c3), static_cast<const bf16*>(c2), latent, width});
    return f(Mxfp4Experts{static_cast<const uint8_t*>(c1), s1, static_cast<const uint8_t*>(c3), s3, static_cast<const uint8_t*>(c2), s2,
                          latent, width});
}

// A1, A3 [S, E, r/16, L, 16], B1, B3 [S, E, I/16, r, 16], A2 [S, E, r/16, I, 16], B2 [S, E, L/16, r, 16]; a1 null: no adapters.
struct ExpertAdapters {
    const bf16 *a1, *b1, *a3, *b3, *a2, *b2;
    int64_t rank, experts, latent, width;
    float scale;

    // W: Bf16Weights or Bf16Transposed; a(...) maps `inputs` to the rank, b(...) the rank to `outputs`.
    template <class W> W a(const bf16* base, int64_t inputs, int64_t slot, int64_t e) const {
        return {base + (slot * experts + e) * rank * inputs, inputs};
    }
    template <class W> W b(const bf16* base, int64_t outputs, int64_t slot, int64_t e) const {
        return {base + (slot * experts + e) * rank * outputs, rank};
    }
};

// Runs of equal slot among the rows of one block.
struct BlockRuns {
    Run run[ROW_BLOCK];
    int64_t count = 0;
    const Run* begin() const { return run; }
    const Run* end() const { return run + count; }
};

// The (token, j) pairs of tokens t0..t1, sorted by expert, then slot, then token.
struct Pairs {
    struct Block { int64_t expert, begin, rows; };  // at most ROW_BLOCK sorted pairs of one expert
    std::vector<int64_t> start;                     // per expert: its first sorted pair
    std::vector<int32_t> token, place, position;    // per sorted pair: token, t*k+j; per pair of the block: its sorted position
    std::vector<Block> blocks;
    const int32_t* slots;
    int64_t experts;

    Pairs(int64_t expert_count, const int32_t* token_slots) : slots(token_slots), experts(expert_count) {}

    void sort(const int32_t* ids, int64_t k, int64_t t0, int64_t t1, int64_t slot_count) {
        const int64_t tokens = t1 - t0, n = tokens * k;
        start.assign(size_t(experts) + 1, 0);
        token.resize(size_t(n)), place.resize(size_t(n)), position.resize(size_t(n));
        blocks.clear();
        for (int64_t i = t0 * k; i < t1 * k; ++i) ++start[size_t(ids[i]) + 1];
        for (int64_t e = 0; e < experts; ++e) start[size_t(e) + 1] += start[size_t(e)];
        std::vector<int64_t> next(start.begin(), start.end() - 1);
        const auto visit = [&](int64_t t) {
            for (int64_t i = t * k; i < (t + 1) * k; ++i) {
                const int64_t at = next[size_t(ids[i])]++;
                token[size_t(at)] = int32_t(t), place[size_t(at)] = int32_t(i), position[size_t(i - t0 * k)] = int32_t(at);
            }
        };
        if (!slots || slot_count <= 0) {
            for (int64_t t = t0; t < t1; ++t) visit(t);
        } else {
            std::vector<int64_t> first(size_t(slot_count) + 2, 0);
            for (int64_t t = t0; t < t1; ++t) ++first[size_t(slots[t]) + 2];
            for (size_t s = 1; s < first.size(); ++s) first[s] += first[s - 1];
            std::vector<int32_t> order(static_cast<size_t>(tokens));
            for (int64_t t = t0; t < t1; ++t) order[size_t(first[size_t(slots[t]) + 1]++)] = int32_t(t);
            for (int32_t t : order) visit(t);
        }
        for (int64_t e = 0; e < experts; ++e)
            for (int64_t i = start[size_t(e)]; i < start[size_t(e) + 1]; i += ROW_BLOCK)
                blocks.push_back({e, i, min64(ROW_BLOCK, start[size_t(e) + 1] - i)});
    }
    void runs(int64_t begin, int64_t rows, BlockRuns& out) const {
        out.count = 0;
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t slot = slots[token[size_t(begin + i)]];
            if (out.count && out.run[out.count - 1].slot == slot) out.run[out.count - 1].end = i + 1;
            else out.run[out.count++] = {i, i + 1, slot};
        }
    }
};

// 0, -1 for a slot outside -1..slot_count-1, -2 for ids that do not ascend within 0..experts-1.
inline int64_t check_pairs(const int32_t* ids, int64_t tokens, int64_t k, int64_t experts, const int32_t* slots, int64_t slot_count) {
    for (int64_t t = 0; t < tokens; ++t) {
        if (slots && (slots[t] < -1 || slots[t] >= slot_count)) return -1;
        for (int64_t j = 0; j < k; ++j) {
            const int64_t id = ids[t * k + j];
            if (id < 0 || id >= experts || (j && ids[t * k + j - 1] >= id)) return -2;
        }
    }
    return 0;
}

inline void round_rows(float* x, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) store(x + i, round_bf16(load(x + i)));
}
// y = fma(scale, d, y)
inline void add_scaled(float* y, const float* d, int64_t n, f16 scale) {
    for (int64_t i = 0; i < n; i += 16) store(y + i, fma(scale, load(d + i), load(y + i)));
}

// What one expert computes for m tokens; every array is FP32 [m, its width]. Values rounded to BF16 are held exactly.
struct ExpertBlock {
    float *g, *u, *h, *t1, *t3, *t2, *d;

    // Floats that carve() takes for m rows.
    static int64_t floats(int64_t m, int64_t latent, int64_t width, int64_t rank) {
        return m * (3 * width + 3 * rank + (latent > width ? latent : width));
    }
    float* carve(float* at, int64_t m, int64_t width, int64_t rank, int64_t latent) {
        g = at, u = g + m * width, h = u + m * width, t1 = h + m * width, t3 = t1 + m * rank, t2 = t3 + m * rank, d = t2 + m * rank;
        return d + m * (latent > width ? latent : width);
    }

    // g, u, h and r [m, L] for rows i0..i0+m of z; with adapters also t1, t3, t2.
    template <class Experts>
    void forward(const Experts& w, const ExpertAdapters& lora, int64_t e, const Rows& z, int64_t i0, int64_t m,
                 const BlockRuns& runs, const Situ& situ, float* r) {
        using Weights = typename Experts::Weights;
        const int64_t L = w.latent, I = w.width, rank = lora.rank;
        const f16 scale = set1(lora.scale);
        for_blocks(z, i0, m, 0, L, [&](const float* packed, int64_t k, int64_t n, bool first) {
            multiply_block(packed, m, w.template w1<Weights>(e), 0, I / 16, k, n, g, I, first);
            multiply_block(packed, m, w.template w3<Weights>(e), 0, I / 16, k, n, u, I, first);
            for_adapters(runs, 0, m, [&](int64_t i, int64_t end, int64_t slot) {
                const float* rows = packed + i * X_STRIDE;
                multiply_block(rows, end - i, lora.a<Bf16Weights>(lora.a1, L, slot, e), 0, rank / 16, k, n, t1 + i * rank, rank, first);
                multiply_block(rows, end - i, lora.a<Bf16Weights>(lora.a3, L, slot, e), 0, rank / 16, k, n, t3 + i * rank, rank, first);
            });
        });
        for_adapters(runs, 0, m, [&](int64_t i, int64_t end, int64_t slot) {
            expand(t1 + i * rank, end - i, lora.b<Bf16Weights>(lora.b1, I, slot, e), rank, I, scale, g + i * I);
            expand(t3 + i * rank, end - i, lora.b<Bf16Weights>(lora.b3, I, slot, e), rank, I, scale, u + i * I);
        });
        for (int64_t i = 0; i < m * I; i += 16) {
            const f16 gate = round_bf16(load(g + i)), up = round_bf16(load(u + i));
            store(g + i, gate), store(u + i, up);
            store(h + i, round_bf16(situ(gate, up)));
        }
        for_blocks(Rows{h, I, true}, 0, m, 0, I, [&](const float* packed, int64_t k, int64_t n, bool first) {
            multiply_block(packed, m, w.template w2<Weights>(e), 0, L / 16, k, n, r, L, first);
            for_adapters(runs, 0, m, [&](int64_t i, int64_t end, int64_t slot) {
                multiply_block(packed + i * X_STRIDE, end - i, lora.a<Bf16Weights>(lora.a2, I, slot, e), 0, rank / 16, k, n,
                               t2 + i * rank, rank, first);
            });
        });
        for_adapters(runs, 0, m, [&](int64_t i, int64_t end, int64_t slot) {
            expand(t2 + i * rank, end - i, lora.b<Bf16Weights>(lora.b2, L, slot, e), rank, L, scale, r + i * L);
        });
    }

    // Bytes that keep() writes for a pair.
    static int64_t kept_bytes(int64_t latent, int64_t width, int64_t rank) { return 6 * (width + rank) + 4 * latent; }
    // Writes what backward needs of m pairs, so that it need not compute them again.
    void keep(int64_t m, int64_t width, int64_t rank, int64_t latent, const float* r, uint8_t* to) const {
        bf16* at = reinterpret_cast<bf16*>(to);
        each_rounded(m, width, rank, [&](float* x, int64_t n) {
            for (int64_t i = 0; i < n; i += 16) store_bf16(at + i, load(x + i));
            at += n;
        });
        std::memcpy(at, r, size_t(m * latent) * 4);
    }
    // Reads it again; returns r.
    const float* restore(int64_t m, int64_t width, int64_t rank, const uint8_t* from) const {
        const bf16* at = reinterpret_cast<const bf16*>(from);
        each_rounded(m, width, rank, [&](float* x, int64_t n) {
            for (int64_t i = 0; i < n; i += 16) store(x + i, load_bf16(at + i));
            at += n;
        });
        return reinterpret_cast<const float*>(at);
    }

  private:
    template <class F>
    void each_rounded(int64_t m, int64_t width, int64_t rank, F f) const {
        f(g, m * width), f(u, m * width), f(h, m * width);
        f(t1, m * rank), f(t3, m * rank), f(t2, m * rank);
    }
    // t = bf16(t); y = fma(scale, chain(B t), y), not rounded.
    void expand(float* t, int64_t m, const Bf16Weights& b, int64_t rank, int64_t outputs, f16 scale, float* y) {
        round_rows(t, m * rank);
        chain(Rows{t, rank, true}, 0, m, b, 0, outputs / 16, 0, rank, d, outputs);
        add_scaled(y, d, m * outputs, scale);
    }
};

// Threads worth waking: products, conversion of the weights of every expert met (about four tokens' worth) and SiTU.
template <class Experts>
inline int expert_threads(int64_t tokens, int64_t k, int64_t experts, const Experts& w, int64_t rank, int64_t threads) {
    const int64_t pairs = tokens * k, met = min64(pairs, experts);
    return threads_for((pairs + 4 * met) * (w.size() + rank * (w.latent + w.width)) * 4, int(threads));
}
// Tokens whose per-expert results fit the buffer.
inline int64_t tokens_at_once(int64_t k, int64_t latent) {
    const int64_t tokens = PAIR_RESULTS_FLOATS / (k * latent);
    return tokens < 1 ? 1 : tokens;
}

}  // namespace zm
