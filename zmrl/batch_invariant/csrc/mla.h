// Shared pieces of absorbed MLA over selected latent rows, forward (mla.cpp) and backward (mla_backward.cpp).
//
// A latent row holds rank + pe BF16 values, shared by all heads. Heads are handled in groups of four, rows four at a time, so
// that a row is read once for a group; what belongs to one (token, head) never depends on which others share its group.
#pragma once
#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "math.h"
#include "paged.h"
#include "parallel.h"
#include "product.h"
#include "row.h"

namespace zm {

constexpr int GROUP = 4;            // heads of a group
constexpr int SHARDS = 8;           // numerics.md rule 6: by position mod 8
constexpr int64_t SCORE_BLOCK = 64;  // latent rows that all groups visit while they are in the cache
#if defined(__AVX512F__)
constexpr int DOT_ROWS = 4, SUM_VECTORS = 4;
#else
constexpr int DOT_ROWS = 1, SUM_VECTORS = 1;
#endif

// Sizes, the projection kv_b with its adapters, and the queries. Per head kv_b holds `nope` key rows, then `value` value rows.
struct Mla {
    int64_t heads, nope, pe, rank, value;
    const bf16* kv_b;  // panels [heads*(nope+value)/16, rank, 16]
    const bf16* a;     // [slots, r/16, rank, 16]; null: no adapters
    const bf16* b;     // [slots, heads*(nope+value)/16, r, 16]
    int64_t lora_rank;
    const int32_t* slots;
    int64_t slot_count;
    float lora_scale, score_scale;
    const bf16* q;  // per head nope, then pe values
    int64_t q_stride;

    int64_t width() const { return rank + pe; }
    int64_t padded() const { return (rank + pe + 15) / 16 * 16; }
    int64_t groups() const { return (heads + GROUP - 1) / GROUP; }
    int64_t slot(int64_t t) const { return a ? slots[t] : -1; }
    int64_t key_panel(int64_t h) const { return h * (nope + value) / 16; }
    int64_t value_panel(int64_t h) const { return (h * (nope + value) + nope) / 16; }

    Rows nope_rows(int64_t h) const { return {q + h * (nope + pe), q_stride, false}; }
    Bf16Weights w_uk(int64_t h) const { return {kv_b + key_panel(h) * rank * 16, rank}; }
    Bf16Weights w_uv(int64_t h) const { return {kv_b + value_panel(h) * rank * 16, rank}; }
    Bf16Transposed w_uk_t(int64_t h) const { return {kv_b + key_panel(h) * rank * 16, rank}; }
    Bf16Transposed w_uv_t(int64_t h) const { return {kv_b + value_panel(h) * rank * 16, rank}; }
    Bf16Weights lora_a(int64_t slot) const { return {a + slot * lora_rank * rank, rank}; }
    Bf16Transposed lora_a_t(int64_t slot) const { return {a + slot * lora_rank * rank, rank}; }
    const bf16* b_panel(int64_t slot, int64_t panel) const {
        return b + (slot * heads * (nope + value) / 16 + panel) * lora_rank * 16;
    }
    Bf16Weights lora_b(int64_t slot, int64_t panel) const { return {b_panel(slot, panel), lora_rank}; }
    Bf16Transposed lora_b_t(int64_t slot, int64_t panel) const { return {b_panel(slot, panel), lora_rank}; }

    // f(begin, end, slot), relative to t0: the runs of tokens t0..t0+m that share an adapter.
    template <class F>
    void for_runs(int64_t t0, int64_t m, F f) const {
        for (int64_t i = 0, end; a && i < m; i = end) {
            const int64_t s = slot(t0 + i);
            for (end = i + 1; end < m && slot(t0 + end) == s;) ++end;
            if (s >= 0) f(i, end, s);
        }
    }
};

// Sequences and adapter slots, checked once per call.
inline bool valid_batch(const Mla& d, const int32_t* cu, int64_t requests, int64_t tokens, Status& status) {
    if (!valid_sequences(cu, requests, tokens)) status.fail(BAD_SEQUENCES, 0);
    for (int64_t t = 0; d.a && t < tokens; ++t)
        if (d.slots[t] < -1 || d.slots[t] >= d.slot_count) status.fail(BAD_SLOT, t);
    return !status.failed();
}

// ---- work sharing -------------------------------------------------------------------------------------------------------

// Items of the parallel loop: tiles of tokens times blocks of head groups, about four per thread where there is enough work.
struct Tiling {
    int64_t tokens, tile, groups, block;

    Tiling(const Mla& d, int64_t t, int64_t threads) : tokens(t), groups(d.groups()), block(std::min<int64_t>(groups, 4)) {
        const int64_t wanted = threads > 1 ? 4 * threads : 1;
        if (tokens * blocks() < wanted) block = 1;
        const int64_t limit = std::max<int64_t>(1, std::min<int64_t>(64, (1 << 16) / (block * GROUP * d.padded())));
        tile = std::max<int64_t>(1, std::min(limit, tokens * blocks() / wanted));
        static_assert(64 <= ROW_BLOCK, "chain takes a tile at once");
    }
    int64_t blocks() const { return (groups + block - 1) / block; }
    int64_t items() const { return (tokens + tile - 1) / tile * blocks(); }
};

// ---- latent rows ----------------------------------------------------------------------------------------------------------

// The selected rows of one token, shard by shard, ascending inside a shard.
struct Selected {
    const bf16** row;      // padded to a multiple of DOT_ROWS by repeating a row
    int32_t* order;        // place in the ascending selection
    int32_t begin[SHARDS + 1];
    int32_t count;
    int64_t padded() const { return (count + 3) / 4 * 4; }
};

// The positions that a token at position `last` attends to: a list (ascending, -1 after the end), or, without one, 0..last.
struct Selection {
    const int32_t* list;
    int32_t last;
    bool has(int64_t i) const { return list ? list[i] >= 0 : i <= last; }
    int32_t operator[](int64_t i) const { return list ? list[i] : int32_t(i); }
    // Index of the first of `count` positions that is not before `position`.
    int64_t find(int64_t position, int64_t count) const {
        return list ? std::lower_bound(list, list + count, int32_t(position)) - list : std::min(position, count);
    }
};

// Fills `out` with at most topk rows of a selection; address(position) is the row, or null. Returns a Failure or 0.
template <class F>
inline int64_t gather(const Selection& selection, int64_t topk, F address, Selected& out) {
    int32_t next[SHARDS] = {0}, previous = -1;
    out.count = 0;
    for (; out.count < topk && selection.has(out.count); ++out.count) {
        const int32_t position = selection[out.count];
        if (position <= previous || position > selection.last) return BAD_SELECTION;
        previous = position;
        ++next[position % SHARDS];
    }
    if (out.count == 0) return BAD_SELECTION;
    out.begin[0] = 0;
    for (int s = 0; s < SHARDS; ++s) {
        out.begin[s + 1] = out.begin[s] + next[s];
        next[s] = out.begin[s];
    }
    for (int32_t i = 0; i < out.count; ++i) {
        const int32_t at = next[selection[i] % SHARDS]++;
        if (!(out.row[at] = address(selection[i]))) return BAD_BLOCK;
        out.order[at] = i;
    }
    for (int64_t i = out.count; i < out.padded(); ++i) out.row[i] = out.row[0];
    return 0;
}

// ---- scores ---------------------------------------------------------------------------------------------------------------

#if defined(__AVX2__)
// Rule 4 on eight vectors at once: result lane i is the sum over the eight lanes of v[i], halving distance 4, 2, 1.
inline __m256 sum_lanes_8(const __m256* v) {
    __m256 a[4], b[2];
    for (int i = 0; i < 4; ++i)
        a[i] = _mm256_add_ps(_mm256_permute2f128_ps(v[i], v[i + 4], 0x20), _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));
    for (int i = 0; i < 2; ++i)
        b[i] = _mm256_add_ps(_mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44), _mm256_shuffle_ps(a[2 * i], a[2 * i + 1], 0xee));
    return _mm256_add_ps(_mm256_shuffle_ps(b[0], b[1], 0x88), _mm256_shuffle_ps(b[0], b[1], 0xdd));
}
#endif

// Lane i of the result is sum_lanes(v[i]): the same additions, sixteen sums at once.
inline f16 sum_lanes_16(const f16* v) {
#if defined(__AVX512F__)
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; ++i) {  // v[i] and v[i+4], v[i+8] and v[i+12]: distance 8
        const int j = (i & 3) + (i >> 2) * 8;
        a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[j].v, v[j + 4].v, 0x44), _mm512_shuffle_f32x4(v[j].v, v[j + 4].v, 0xee));
    }
    for (int i = 0; i < 4; ++i)
        b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
    for (int i = 0; i < 2; ++i)
        c[i] = _mm512_add_ps(_mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0x44), _mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0xee));
    return {_mm512_add_ps(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd))};
#elif defined(__AVX2__)
    __m256 half[16];
    for (int i = 0; i < 16; ++i) half[i] = _mm256_add_ps(v[i].a, v[i].b);
    return {sum_lanes_8(half), sum_lanes_8(half + 8)};
#else
    float t[LANES];
    for (int i = 0; i < LANES; ++i) t[i] = sum_lanes(v[i]);
    return load(t);
#endif
}

// acc[4*i + g]: the lanes of q[g] . row[i] over `width` features; q is padded with +0.0.
template <int ROWS>
inline void dot_lanes_group(const float* q, int64_t q_stride, const bf16* const* row, int64_t width, f16* acc) {
    f16 sum[ROWS][GROUP];
    for (int i = 0; i < ROWS; ++i)
        for (int g = 0; g < GROUP; ++g) sum[i][g] = zero();
    const int64_t whole = width / LANES * LANES;
    auto step = [&](int64_t k, auto fetch) {
        f16 x[GROUP];
        for (int g = 0; g < GROUP; ++g) x[g] = load(q + g * q_stride + k);
        for (int i = 0; i < ROWS; ++i) {
            const f16 c = fetch(row[i] + k);
            for (int g = 0; g < GROUP; ++g) sum[i][g] = fma(x[g], c, sum[i][g]);
        }
    };
    for (int64_t k = 0; k < whole; k += LANES) step(k, [](const bf16* p) { return load_bf16(p); });
    if (whole < width) step(whole, [&](const bf16* p) { return load_bf16_n(p, int(width - whole)); });
    for (int i = 0; i < ROWS; ++i)
        for (int g = 0; g < GROUP; ++g) acc[i * GROUP + g] = sum[i][g];
}

// s[4*i + g] = lanes(q[g] . row[i]) * scale for all rows and groups. q: FP32 [groups*4][q_stride]; s: [groups][s_stride].
inline void scores(const float* q, int64_t q_stride, const Selected& rows, int64_t width, float scale, int64_t groups, float* s,
                   int64_t s_stride) {
    const int64_t n = rows.padded();
    for (int64_t i0 = 0; i0 < n; i0 += SCORE_BLOCK)
        for (int64_t g = 0; g < groups; ++g)
            for (int64_t i = i0; i < std::min(n, i0 + SCORE_BLOCK); i += 4) {
                f16 acc[16];
                for (int j = 0; j < 4; j += DOT_ROWS)
                    dot_lanes_group<DOT_ROWS>(q + g * GROUP * q_stride, q_stride, rows.row + i + j, width, acc + j * GROUP);
                store(s + g * s_stride + i * GROUP, mul(sum_lanes_16(acc), set1(scale)));
            }
}

// ---- softmax and weighted sums --------------------------------------------------------------------------------------------

// Combines values x[0..8) by rule 6: ((0+4)+(2+6))+((1+5)+(3+7)).
template <class T, class Add>
inline T strided_tree(const T* x, Add plus) {
    return plus(plus(plus(x[0], x[4]), plus(x[2], x[6])), plus(plus(x[1], x[5]), plus(x[3], x[7])));
}

// The part of that tree that rank r of W = 1, 2, 4, 8 finishes alone: over the values r, r + W, ...
struct Ranks {
    int64_t count = 1, rank = 0;

    template <class T, class Add>
    T subtree(T* x, Add plus) const {
        if (count == 1) return strided_tree(x, plus);
        for (int64_t d = SHARDS / 2; d >= count; d /= 2)
            for (int64_t i = rank; i < d; i += count) x[i] = plus(x[i], x[i + d]);
        return x[rank];
    }
};

// In place s -> exp(s - max over all rows); sums[4]: chains in each shard, strided tree.
inline void softmax_group(float* s, const Selected& rows, float* sums) {
    const int64_t n = rows.padded() * GROUP;
    f16 m = load(s);
    for (int64_t i = LANES; i < n; i += LANES) m = max(m, load(s + i));
    float lanes[LANES];
    store(lanes, m);
    for (int d = 8; d >= GROUP; d /= 2)
        for (int i = 0; i < d; ++i) lanes[i] = lanes[i] > lanes[i + d] ? lanes[i] : lanes[i + d];
    for (int i = GROUP; i < LANES; ++i) lanes[i] = lanes[i % GROUP];
    m = load(lanes);
    for (int64_t i = 0; i < n; i += LANES) store(s + i, exp(sub(load(s + i), m)));
    float part[GROUP][SHARDS];
    for (int shard = 0; shard < SHARDS; ++shard) {
        float sum[GROUP] = {0};
        for (int64_t i = rows.begin[shard]; i < rows.begin[shard + 1]; ++i)
            for (int g = 0; g < GROUP; ++g) sum[g] = sum[g] + s[i * GROUP + g];
        for (int g = 0; g < GROUP; ++g) part[g][shard] = sum[g];
    }
    for (int g = 0; g < GROUP; ++g) sums[g] = strided_tree(part[g], [](float a, float b) { return a + b; });
}

template <int V>
inline void weighted_block(const float* w, const Selected& rows, int64_t column, int tail, float* part) {
    for (int shard = 0; shard < SHARDS; ++shard) {
        f16 acc[GROUP][V];
        for (int g = 0; g < GROUP; ++g)
            for (int v = 0; v < V; ++v) acc[g][v] = zero();
        for (int64_t i = rows.begin[shard]; i < rows.begin[shard + 1]; ++i) {
            const bf16* row = rows.row[i] + column;
            f16 c[V];
            for (int v = 0; v < V; ++v) c[v] = tail ? load_bf16_n(row, tail) : load_bf16(row + v * LANES);
            for (int g = 0; g < GROUP; ++g)
                for (int v = 0; v < V; ++v) acc[g][v] = fma(set1(w[i * GROUP + g]), c[v], acc[g][v]);
        }
        for (int g = 0; g < GROUP; ++g)
            for (int v = 0; v < V; ++v) store(part + ((g * V + v) * SHARDS + shard) * LANES, acc[g][v]);
    }
}

template <int V>
inline void weighted_vectors(const float* w, int64_t w_stride, const Selected& rows, int64_t column, int tail, int64_t groups,
                             float* out, int64_t out_stride, Ranks ranks) {
    float part[GROUP * V * SHARDS * LANES];
    for (int64_t q = 0; q < groups; ++q) {
        if (tail) weighted_block<V>(w + q * w_stride, rows, column, tail, part);
        else weighted_block<V>(w + q * w_stride, rows, column, 0, part);
        for (int g = 0; g < GROUP; ++g)
            for (int v = 0; v < V; ++v) {
                f16 x[SHARDS];
                for (int s = 0; s < SHARDS; ++s) x[s] = load(part + ((g * V + v) * SHARDS + s) * LANES);
                const f16 sum = ranks.subtree(x, [](f16 a, f16 b) { return add(a, b); });
                store(out + (q * GROUP + g) * out_stride + column + v * LANES, sum);
            }
    }
}

// out[head][k] = sum over rows of w * row[k] by rule 6, or the part of one rank; k < width (written up to the next multiple of 16).
inline void weighted_sum(const float* w, int64_t w_stride, const Selected& rows, int64_t width, int64_t groups, float* out,
                         int64_t out_stride, Ranks ranks = {}) {
    int64_t k = 0;
    for (; k + SUM_VECTORS * LANES <= width; k += SUM_VECTORS * LANES)
        weighted_vectors<SUM_VECTORS>(w, w_stride, rows, k, 0, groups, out, out_stride, ranks);
    for (; k + LANES <= width; k += LANES) weighted_vectors<1>(w, w_stride, rows, k, 0, groups, out, out_stride, ranks);
    if (k < width) weighted_vectors<1>(w, w_stride, rows, k, int(width - k), groups, out, out_stride, ranks);
}

// ---- queries into the latent space ------------------------------------------------------------------------------------------

// q_cat [m][h1-h0][padded]: [q_lat | q_pe | +0.0] of tokens t0..t0+m, heads h0..h1, then `missing` rows of +0.0; token_stride
// floats between tokens. q_lat = bf16(fma(s, A^T t, W_UK^T q_nope)), t = bf16(B_k^T q_nope); bf16(W_UK^T q_nope)
// without an adapter. t goes to t_out [m][..][r] (t_stride between tokens, `t_step` between heads). delta: m * rank floats.
inline void absorb(const Mla& d, int64_t t0, int64_t m, int64_t h0, int64_t h1, int64_t missing, float* q_cat,
                   int64_t token_stride, float* t_out, int64_t t_stride, int64_t t_step, float* delta) {
    const int64_t padded = d.padded(), r = d.lora_rank;
    for (int64_t h = h0; h < h1; ++h) {
        float* out = q_cat + (h - h0) * padded;
        chain(d.nope_rows(h), t0, m, d.w_uk_t(h), 0, d.rank / 16, 0, d.nope, out, token_stride);
        d.for_runs(t0, m, [&](int64_t begin, int64_t end, int64_t slot) {
            float* t = t_out + begin * t_stride + (h - h0) * t_step;
            const int64_t n = end - begin;
            chain(d.nope_rows(h), t0 + begin, n, d.lora_b_t(slot, d.key_panel(h)), 0, r / 16, 0, d.nope, t, t_stride);
            for (int64_t i = 0; i < n; ++i)
                for (int64_t k = 0; k < r; k += LANES) store(t + i * t_stride + k, round_bf16(load(t + i * t_stride + k)));
            chain(Rows{t, t_stride, true}, 0, n, d.lora_a_t(slot), 0, d.rank / 16, 0, r, delta, d.rank);
            for (int64_t i = begin; i < end; ++i)
                for (int64_t k = 0; k < d.rank; k += LANES) {
                    float* x = out + i * token_stride + k;
                    store(x, fma(set1(d.lora_scale), load(delta + (i - begin) * d.rank + k), load(x)));
                }
        });
        for (int64_t i = 0; i < m; ++i) {
            float* x = out + i * token_stride;
            for (int64_t k = 0; k < d.rank; k += LANES) store(x + k, round_bf16(load(x + k)));
            const bf16* pe = d.q + (t0 + i) * d.q_stride + h * (d.nope + d.pe) + d.nope;
            for (int64_t k = 0; k < padded - d.rank; ++k) x[d.rank + k] = k < d.pe ? to_float(pe[k]) : 0.0f;
        }
    }
    for (int64_t i = 0; i < m; ++i)
        std::memset(q_cat + i * token_stride + (h1 - h0) * padded, 0, size_t(missing * padded) * 4);
}

// ---- from the latent space --------------------------------------------------------------------------------------------------

// out[t0+i][h][V] = bf16(fma(s, B_v u, W_UV o_lat)), u = bf16(A o_lat), for m tokens whose o_lat of head h are the rows of `o_lat`;
// bf16(W_UV o_lat) without an adapter. y: m * value floats, u: m * lora_rank, delta: m * max(rank, value).
inline void values(const Mla& d, int64_t t0, int64_t m, int64_t h, const Rows& o_lat, float* y, float* u, float* delta, bf16* out) {
    const int64_t value = d.value, r = d.lora_rank;
    chain(o_lat, 0, m, d.w_uv(h), 0, value / 16, 0, d.rank, y, value);
    d.for_runs(t0, m, [&](int64_t begin, int64_t end, int64_t slot) {
        const int64_t n = end - begin;
        chain(o_lat, begin, n, d.lora_a(slot), 0, r / 16, 0, d.rank, u, r);
        for (int64_t k = 0; k < n * r; k += LANES) store(u + k, round_bf16(load(u + k)));
        chain(Rows{u, r, true}, 0, n, d.lora_b(slot, d.value_panel(h)), 0, value / 16, 0, r, delta, value);
        for (int64_t k = 0; k < n * value; k += LANES)
            store(y + begin * value + k, fma(set1(d.lora_scale), load(delta + k), load(y + begin * value + k)));
    });
    for (int64_t i = 0; i < m; ++i)
        for (int64_t k = 0; k < value; k += LANES)
            store_bf16(out + ((t0 + i) * d.heads + h) * value + k, load(y + i * value + k));
}

}  // namespace zm
