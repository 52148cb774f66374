// What the forward and backward pass of the routed experts share: weights, adapters, tokens sorted by expert, and one expert
// applied to a block of its tokens (docs/operators.md, Linear and experts).
#pragma once
#include <vector>

#include "parallel.h"
#include "short_product.h"
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
    void prefetch(int64_t e, Prefetch& memory) const {
        for (const uint8_t* codes : {c1, c3, c2}) memory.add(codes + e * size() / 2, size() / 2);
        for (const uint8_t* scales : {s1, s3, s2}) memory.add(scales + e * size() / 32, size() / 32);
    }
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
    void prefetch(int64_t e, Prefetch& memory) const {
        for (const bf16* m : {m1, m3, m2}) memory.add(m + e * size(), size() * 2);
    }
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
    void prefetch(int64_t slot, int64_t e, Prefetch& memory) const {
        const int64_t at = (slot * experts + e) * rank;
        for (const bf16* m : {a1, a3, b2}) memory.add(m + at * latent, rank * latent * 2);
        for (const bf16* m : {b1, b3, a2}) memory.add(m + at * width, rank * width * 2);
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

// What one expert computes for m tokens; rows are FP32, `spread` floats apart. Values rounded to BF16 are held exactly.
struct ExpertBlock {
    int64_t latent, width, rank, ld_latent, ld_width, ld_rank;
    float *z, *g, *u, *h, *t1, *t3, *t2;

    ExpertBlock(int64_t l, int64_t i, int64_t r) : latent(l), width(i), rank(r), ld_latent(spread(l)), ld_width(spread(i)), ld_rank(spread(r)) {}
    // Floats that carve() takes for m rows.
    int64_t floats(int64_t m) const { return m * (ld_latent + 3 * (ld_width + ld_rank)); }
    float* carve(float* at, int64_t m) {
        z = at, g = z + m * ld_latent, u = g + m * ld_width, h = u + m * ld_width;
        t1 = h + m * ld_width, t3 = t1 + m * ld_rank, t2 = t3 + m * ld_rank;
        return t2 + m * ld_rank;
    }
    void gather(const Rows& rows, int64_t i0, int64_t m) {
        for (int64_t i = 0; i < m; ++i) {
            if (i + ROWS_AHEAD < m) prefetch_row(rows.at(rows.row(i0 + i + ROWS_AHEAD), 0), latent * 2);
            rows.pack(i0 + i, 0, latent, z + i * ld_latent);
        }
    }

    // Panels that forward() goes through.
    static int64_t steps(int64_t latent, int64_t width, int64_t rank) { return (4 * width + 2 * latent + 3 * rank) / 16; }
    // From z: g, u, h and r [m, L]; with adapters also t1, t3, t2.
    template <class Experts>
    void forward(const Experts& w, const ExpertAdapters& lora, int64_t e, int64_t m, const BlockRuns& runs, const Situ& situ,
                 float* r, Prefetch& prefetch) {
        using Weights = typename Experts::Weights;
        const Added added{lora.scale};
        const int64_t wide = width / 16, deep = latent / 16, low = rank / 16;
        product(z, ld_latent, m, wide, g, ld_width, Stored{}, prefetch, Steps{w.template w1<Weights>(e), latent});
        product(z, ld_latent, m, wide, u, ld_width, Stored{}, prefetch, Steps{w.template w3<Weights>(e), latent});
        for_adapters(runs, 0, m, [&](int64_t i, int64_t end, int64_t slot) {
            const int64_t n = end - i;
            const auto through = [&](const bf16* a, const bf16* b, float* t, float* y) {
                product(z + i * ld_latent, ld_latent, n, low, t, ld_rank, Rounded{}, prefetch,
                        Steps{lora.a<Bf16Weights>(a, latent, slot, e), latent});
                product(t, ld_rank, n, wide, y, ld_width, added, prefetch, Steps{lora.b<Bf16Weights>(b, width, slot, e), rank});
            };
            through(lora.a1, lora.b1, t1 + i * ld_rank, g + i * ld_width);
            through(lora.a3, lora.b3, t3 + i * ld_rank, u + i * ld_width);
        });
        for (int64_t i = 0; i < m; ++i)
            for (int64_t n = i * ld_width; n < i * ld_width + width; n += 16) {
                const f16 gate = round_bf16(load(g + n)), up = round_bf16(load(u + n));
                store(g + n, gate), store(u + n, up);
                store(h + n, round_bf16(situ(gate, up)));
            }
        product(h, ld_width, m, deep, r, latent, Stored{}, prefetch, Steps{w.template w2<Weights>(e), width});
        for_adapters(runs, 0, m, [&](int64_t i, int64_t end, int64_t slot) {
            float* t = t2 + i * ld_rank;
            product(h + i * ld_width, ld_width, end - i, low, t, ld_rank, Rounded{}, prefetch,
                    Steps{lora.a<Bf16Weights>(lora.a2, width, slot, e), width});
            product(t, ld_rank, end - i, deep, r + i * latent, latent, added, prefetch,
                    Steps{lora.b<Bf16Weights>(lora.b2, latent, slot, e), rank});
        });
    }

    // Bytes that keep() writes for a pair, a multiple of 32.
    static int64_t kept_bytes(int64_t latent, int64_t width, int64_t rank) { return 2 * (2 * width + 3 * rank) + 4 * latent; }
    // Writes what backward needs of m pairs besides z and h (which comes with the derivative), so that it need not compute it again.
    void keep(int64_t m, const float* r, uint8_t* to) const {
        bf16* at = reinterpret_cast<bf16*>(to);
        each_rounded(m, [&](float* x) { stream_bf16(at, load(x)), at += 16; });
        float* out = reinterpret_cast<float*>(at);
        for (int64_t i = 0; i < m * latent; i += 16) stream(out + i, load(r + i));
#if defined(__AVX2__)
        _mm_sfence();  // backward may read on another thread
#endif
    }
    // Reads it again; returns r.
    const float* restore(int64_t m, const uint8_t* from) const {
        const bf16* at = reinterpret_cast<const bf16*>(from);
        each_rounded(m, [&](float* x) { store(x, load_bf16(at)), at += 16; });
        return reinterpret_cast<const float*>(at);
    }

  private:
    template <class F>
    void each_rounded(int64_t m, F f) const {
        const auto each = [&](float* x, int64_t n, int64_t ld) {
            for (int64_t i = 0; i < m; ++i)
                for (int64_t k = 0; k < n; k += 16) f(x + i * ld + k);
        };
        each(g, width, ld_width), each(u, width, ld_width);
        each(t1, rank, ld_rank), each(t3, rank, ld_rank), each(t2, rank, ld_rank);
    }
};

// Where the FP32 rows of pairs go: by sorted pair, to be combined when all are there; or, where one thread meets the experts in
// ascending order, straight into sums over a token's pairs: the same operations in the same order, and no trip through memory.
struct PairRows {
    float *sorted, *sums;

    PairRows(int64_t tokens, int64_t k, int64_t latent, int workers) {
        float* buffer = scratch<PAIR_RESULTS>(tokens * (workers > 1 ? k : 1) * latent);
        sorted = workers > 1 ? buffer : nullptr, sums = workers > 1 ? nullptr : buffer;
        if (sums) std::memset(sums, 0, size_t(tokens * latent) * 4);
    }
    explicit PairRows(float* rows) : sorted(rows), sums(nullptr) {}

    // f(i, sum) for the m pairs from `begin` on: pair i's place in the sums, of tokens t0 and after; nothing where there are none.
    template <class F>
    void each_sum(const Pairs& pairs, int64_t begin, int64_t m, int64_t t0, int64_t latent, F f) const {
        const int32_t* token = pairs.token.data() + begin;
        for (int64_t i = 0; sums && i < m; ++i) {
            if (i + ROWS_AHEAD < m) prefetch_row(sums + (token[i + ROWS_AHEAD] - t0) * latent, latent * 4);
            f(i, sums + (token[i] - t0) * latent);
        }
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
