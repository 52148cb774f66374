// Backward of absorbed MLA over selected rows (mla.cpp): gradients of q and of the latent rows, and of the adapter of kv_b.
//
// Everything is recomputed from the inputs; latents are read from `kv`, whose row cu[r] + s was stored as position s of
// request r.
// Tokens pass in chunks, so that what is kept per (token, head) stays small; each chunk continues the chains of the one before.
// The rounding of q_lat, o_lat, t and u is passed straight through. Gradients are FP32 inside and rounded to BF16 once.
#include "mla.h"

using namespace zm;

namespace {

constexpr int64_t CHUNK_FLOATS = 1 << 23;

// What one chunk keeps per token and head.
struct Kept {
    float *q_cat, *grad_o_lat;  // [padded], [rank]
    float* a_rows;              // [2][rank]: scale * dq_lat, o_lat
    float* a_columns;           // [2][r]: t, du
    float* b_rows;              // [2][r]: dt, u
    float* b_columns;           // [nope + value]: q_nope, scale * do
    float* weights;             // per token [topk][2][group heads]: probabilities, then score gradients
    std::unique_ptr<int32_t[]> counts;  // per token: selected rows
    std::unique_ptr<float[]> memory;

    Kept(const Mla& d, int64_t tokens, int64_t topk) : counts(new int32_t[size_t(tokens)]) {
        const int64_t n = tokens * d.heads, group_heads = d.groups() * GROUP;
        const int64_t sizes[] = {tokens * group_heads * d.padded(), tokens * group_heads * d.rank, n * 2 * d.rank,
                                 n * 2 * d.lora_rank, n * 2 * d.lora_rank, d.a ? n * (d.nope + d.value) : 0,
                                 tokens * topk * 2 * group_heads};
        float** parts[] = {&q_cat, &grad_o_lat, &a_rows, &a_columns, &b_rows, &b_columns, &weights};
        int64_t total = 0;
        for (int64_t size : sizes) total += size;
        memory.reset(new float[size_t(total)]);
        float* at = memory.get();
        for (int i = 0; i < 7; at += sizes[i++]) *parts[i] = at;
    }
};

// Slices of heads whose sums are chains of their own (numerics.md rule 2): those of one rank, 8 on one rank alone.
struct Slices {
    int64_t heads, count;
    int64_t begin(int64_t s) const { return s * heads / count; }
    int64_t of(int64_t h) const { return ((h + 1) * count - 1) / heads; }
};

struct Call {
    Mla d;
    const bf16 *grad, *kv;  // do [tokens, heads*value]; kv [tokens, rank + pe]
    int64_t grad_stride, kv_stride;
    const int32_t *cu, *positions, *selected;  // selected null: all positions, at most topk
    int64_t requests, selected_stride, topk;
    bf16* dq;
    Slices slices;
    float* dkv;  // [slices][tokens][padded]
    int64_t slice_stride;
    Status* status;

    Selection selection(int64_t t) const { return {selected ? selected + t * selected_stride : nullptr, positions[t]}; }
};

// One item of the first pass: tokens t0..t0+m of the chunk that begins at c0, heads h0..h1.
struct TokenItem {
    const Call& call;
    const Mla& d;
    const Kept& kept;
    int64_t c0, t0, m, groups, h0, h1, heads;  // groups, heads: of this item; `all` heads of all groups
    int64_t all, padded, rank, r, s_stride, ab_stride;
    float *q_cat, *grad_o_lat, *a_rows, *a_columns, *b_rows, *b_columns;  // of the item's first token and head
    float *delta, *p, *ds, *dq_cat;                                        // scratch
    Selected rows;

    TokenItem(const Call& c, const Kept& k, int64_t first, int64_t token, int64_t tokens, int64_t group, int64_t group_count)
        : call(c), d(c.d), kept(k), c0(first), t0(token), m(tokens), groups(group_count), h0(group * GROUP),
          h1(std::min(d.heads, h0 + groups * GROUP)), heads(h1 - h0), all(d.groups() * GROUP), padded(d.padded()), rank(d.rank),
          r(d.lora_rank), s_stride((c.topk + 3) / 4 * 4 * GROUP), ab_stride(d.heads * 2 * r) {
        const int64_t i = t0 - c0, head = i * d.heads + h0;
        q_cat = kept.q_cat + (i * all + h0) * padded;
        grad_o_lat = kept.grad_o_lat + (i * all + h0) * rank;
        a_rows = kept.a_rows + head * 2 * rank;
        a_columns = kept.a_columns + head * 2 * r;
        b_rows = kept.b_rows + head * 2 * r;
        b_columns = kept.b_columns + head * (d.nope + d.value);
        const int64_t row_count = s_stride / GROUP;
        const int64_t sizes[] = {m * std::max(rank, d.nope), groups * s_stride, groups * s_stride, m * groups * GROUP * padded,
                                 row_count * 2, row_count};
        float* at[6];
        int64_t total = 0;
        for (int64_t size : sizes) total += ceil16(size) * 16;
        at[0] = scratch<FIRST_OWN_TAG>(total);
        for (int j = 1; j < 6; ++j) at[j] = at[j - 1] + ceil16(sizes[j - 1]) * 16;
        delta = at[0], p = at[1], ds = at[2], dq_cat = at[3];
        rows.row = reinterpret_cast<const bf16**>(at[4]);
        rows.order = reinterpret_cast<int32_t*>(at[5]);
    }

    void run() {
        absorb(d, t0, m, h0, h1, groups * GROUP - heads, q_cat, all * padded, a_columns, ab_stride, 2 * r, delta);
        for (int64_t h = h0; h < h1; ++h) values(h);
        for (int64_t i = 0; i < m; ++i)
            std::memset(grad_o_lat + (i * all + heads) * rank, 0, size_t((groups * GROUP - heads) * rank) * 4);
        int64_t request = request_of(call.cu, call.requests, t0);
        for (int64_t i = 0; i < m; ++i) {
            while (t0 + i >= call.cu[request + 1]) ++request;
            if (!attention(i, request)) return;
        }
        for (int64_t h = h0; h < h1; ++h) queries(h);
    }

    void scale_rows(float* x, int64_t n) const {
        for (int64_t i = 0; i < n; ++i)
            for (int64_t k = i * ab_stride; k < i * ab_stride + r; k += LANES) store(x + k, mul(set1(d.lora_scale), load(x + k)));
    }

    // do_lat = chain_v(W_UV do), continued by chain_r(A du), du = scale * chain_v(B_v do)
    void values(int64_t h) const {
        const Rows grad{call.grad + h * d.value, call.grad_stride, false};
        float* out = grad_o_lat + (h - h0) * rank;
        chain(grad, t0, m, d.w_uv_t(h), 0, rank / 16, 0, d.value, out, all * rank);
        d.for_runs(t0, m, [&](int64_t begin, int64_t end, int64_t slot) {
            float* du = a_columns + begin * ab_stride + (h - h0) * 2 * r + r;
            const int64_t n = end - begin;
            chain(grad, t0 + begin, n, d.lora_b_t(slot, d.value_panel(h)), 0, r / 16, 0, d.value, du, ab_stride);
            scale_rows(du, n);
            chain(Rows{du, ab_stride, true}, 0, n, d.lora_a_t(slot), 0, rank / 16, 0, r, out + begin * all * rank, all * rank,
                  true);
        });
    }

    // P = p/sum, dP = lanes(do_lat . c), ds = (P * (dP - lanes(do_lat . o))) * score_scale, with o before its rounding;
    // d[q_lat | q_pe] = rule 6 of ds * row.
    bool attention(int64_t i, int64_t request) {
        const int64_t t = t0 + i, first = call.cu[request], length = call.cu[request + 1] - first;
        auto address = [&](int32_t s) { return s < length ? call.kv + (first + s) * call.kv_stride : nullptr; };
        if (const int64_t failure = gather(call.selection(t), call.topk, address, rows)) {
            call.status->fail(Failure(failure), t);
            return false;
        }
        kept.counts[t - c0] = rows.count;
        const float *x = q_cat + i * all * padded, *g = grad_o_lat + i * all * rank;
        float* dx = dq_cat + i * groups * GROUP * padded;
        float sums[4 * GROUP], dots[4 * GROUP];
        scores(x, padded, rows, d.width(), d.score_scale, groups, p, s_stride);
        for (int64_t q = 0; q < groups; ++q) softmax_group(p + q * s_stride, rows, sums + q * GROUP);
        weighted_sum(p, s_stride, rows, rank, groups, dx, padded);
        for (int64_t h = 0; h < groups * GROUP; ++h) {
            f16 dot = zero();
            for (int64_t k = 0; k < rank; k += LANES) {
                const f16 o = div(load(dx + h * padded + k), set1(sums[h]));
                dot = fma(load(g + h * rank + k), o, dot);
                if (h < heads) store(a_rows + (i * d.heads + h) * 2 * rank + rank + k, round_bf16(o));
            }
            dots[h] = sum_lanes(dot);
        }
        scores(g, rank, rows, rank, 1.0f, groups, ds, s_stride);
        for (int64_t q = 0; q < groups; ++q) {
            float sum[LANES], dot[LANES];
            for (int l = 0; l < LANES; ++l) sum[l] = sums[q * GROUP + l % GROUP], dot[l] = dots[q * GROUP + l % GROUP];
            for (int64_t k = q * s_stride; k < q * s_stride + rows.padded() * GROUP; k += LANES) {
                const f16 probability = div(load(p + k), load(sum));
                store(p + k, probability);
                store(ds + k, mul(mul(probability, sub(load(ds + k), load(dot))), set1(d.score_scale)));
            }
        }
        weighted_sum(ds, s_stride, rows, d.width(), groups, dx, padded);
        float* weights = kept.weights + (t - c0) * call.topk * 2 * all + h0;
        for (int64_t j = 0; j < rows.count; ++j) {
            float* w = weights + int64_t(rows.order[j]) * 2 * all;
            for (int64_t q = 0; q < groups; ++q) {
                std::memcpy(w + q * GROUP, p + q * s_stride + j * GROUP, GROUP * 4);
                std::memcpy(w + all + q * GROUP, ds + q * s_stride + j * GROUP, GROUP * 4);
            }
        }
        return true;
    }

    // dq_nope = chain_k(W_UK dq_lat), continued by chain_r(B_k dt), dt = scale * chain_k(A dq_lat)
    void queries(int64_t h) const {
        const int64_t dq_stride = groups * GROUP * padded;
        const Rows dq_lat{dq_cat + (h - h0) * padded, dq_stride, true};
        chain(dq_lat, 0, m, d.w_uk(h), 0, d.nope / 16, 0, rank, delta, d.nope);
        d.for_runs(t0, m, [&](int64_t begin, int64_t end, int64_t slot) {
            const int64_t n = end - begin;
            float *dt = b_rows + begin * ab_stride + (h - h0) * 2 * r, *u = dt + r;
            chain(dq_lat, begin, n, d.lora_a(slot), 0, r / 16, 0, rank, dt, ab_stride);
            scale_rows(dt, n);
            const Rows o_lat{a_rows + (begin * d.heads + h - h0) * 2 * rank + rank, d.heads * 2 * rank, true};
            chain(o_lat, 0, n, d.lora_a(slot), 0, r / 16, 0, rank, u, ab_stride);
            for (int64_t i = 0; i < n; ++i)
                for (int64_t k = i * ab_stride; k < i * ab_stride + r; k += LANES) store(u + k, round_bf16(load(u + k)));
            chain(Rows{dt, ab_stride, true}, 0, n, d.lora_b(slot, d.key_panel(h)), 0, d.nope / 16, 0, r, delta + begin * d.nope,
                  d.nope, true);
            for (int64_t i = begin; i < end; ++i) keep_for_adapter(i, h);
        });
        for (int64_t i = 0; i < m; ++i) {
            bf16* out = call.dq + ((t0 + i) * d.heads + h) * (d.nope + d.pe);
            for (int64_t k = 0; k < d.nope; k += LANES) store_bf16(out + k, load(delta + i * d.nope + k));
            const float* pe = dq_cat + i * dq_stride + (h - h0) * padded + rank;
            for (int64_t k = 0; k < d.pe; ++k) out[d.nope + k] = to_bf16(pe[k]);
        }
    }

    void keep_for_adapter(int64_t i, int64_t h) const {
        const f16 scale = set1(d.lora_scale);
        const float* dq_lat = dq_cat + (i * groups * GROUP + h - h0) * padded;
        float* scaled = a_rows + (i * d.heads + h - h0) * 2 * rank;
        for (int64_t k = 0; k < rank; k += LANES) store(scaled + k, mul(scale, load(dq_lat + k)));
        float* columns = b_columns + (i * d.heads + h - h0) * (d.nope + d.value);
        const bf16* q_nope = d.q + (t0 + i) * d.q_stride + h * (d.nope + d.pe);
        for (int64_t k = 0; k < d.nope; k += LANES) store(columns + k, load_bf16(q_nope + k));
        const bf16* grad = call.grad + (t0 + i) * call.grad_stride + h * d.value;
        for (int64_t k = 0; k < d.value; k += LANES) store(columns + d.nope + k, mul(scale, load_bf16(grad + k)));
    }
};

constexpr int64_t LATENT_ROWS = 16;  // that the heads visit while they are in the cache

// V vectors of the gradients of the latent rows selection[j0..j1], head after head: fma(P, do_lat, .) (LATENT), then
// fma(ds, q_cat, .), in the sum of the head's slice. sums: [slices][slice_stride], w: [row][2][all].
template <int V, bool LATENT>
inline void row_gradients(const Selection& selection, int64_t j0, int64_t j1, const Slices& slices, float* sums,
                          int64_t slice_stride, const float* w, int64_t all, const float* grad_o_lat, int64_t rank,
                          const float* q_cat, int64_t padded) {
    for (int64_t h = 0; h < slices.heads; ++h) {
        f16 g[V], x[V];
        for (int v = 0; v < V; ++v) {
            if (LATENT) g[v] = load(grad_o_lat + h * rank + v * LANES);
            x[v] = load(q_cat + h * padded + v * LANES);
        }
        float* const sum = sums + slices.of(h) * slice_stride;
        for (int64_t j = j0; j < j1; ++j) {
            const f16 p = set1(w[j * 2 * all + h]), ds = set1(w[j * 2 * all + all + h]);
            float* out = sum + selection[j] * padded;
            for (int v = 0; v < V; ++v) {
                f16 acc = load(out + v * LANES);
                if (LATENT) acc = fma(p, g[v], acc);
                store(out + v * LANES, fma(ds, x[v], acc));
            }
        }
    }
}

// Positions begin..end of one request: the chains over the chunk's tokens c0..c1.
void rows_item(const Call& call, const Kept& kept, int64_t c0, int64_t c1, int64_t request, int64_t begin, int64_t end) {
    const Mla& d = call.d;
    const int64_t all = d.groups() * GROUP, padded = d.padded(), rank = d.rank, first = call.cu[request];
    float* const sums = call.dkv + first * padded;
    for (int64_t t = std::max(c0, first + begin); t < std::min<int64_t>(c1, call.cu[request + 1]); ++t) {
        const Selection selection = call.selection(t);
        const int64_t count = kept.counts[t - c0];
        const float *g = kept.grad_o_lat + (t - c0) * all * rank, *x = kept.q_cat + (t - c0) * all * padded;
        const float* w = kept.weights + (t - c0) * call.topk * 2 * all;
        for (int64_t j0 = selection.find(begin, count), j1; j0 < count && selection[j0] < end; j0 = j1) {
            for (j1 = j0 + 1; j1 < std::min(count, j0 + LATENT_ROWS) && selection[j1] < end;) ++j1;
            auto some = [&](auto rows, int64_t k) {
                rows(selection, j0, j1, call.slices, sums + k, call.slice_stride, w, all, g + k, rank, x + k, padded);
            };
            int64_t k = 0;
            for (; k + 4 * LANES <= rank; k += 4 * LANES) some(row_gradients<4, true>, k);
            for (; k < rank; k += LANES) some(row_gradients<1, true>, k);
            for (; k < padded; k += LANES) some(row_gradients<1, false>, k);
        }
    }
}

// One slice's dA of 16 inputs, over the tokens begin..end of the chunk, then the slice's heads: fma(scale*dq_lat, t, .), then
// fma(o_lat, du, .).
void adapter_item(const Call& call, const Kept& kept, int64_t begin, int64_t end, int64_t slice, int64_t block, float* grad) {
    const int64_t h0 = call.slices.begin(slice), h1 = call.slices.begin(slice + 1), rank = call.d.rank, r = call.d.lora_rank;
    float *rows = scratch<FIRST_OWN_TAG>((ROW_BLOCK + 1) * (LANES + r)), *columns = rows + ROW_BLOCK * LANES;
    int64_t m = 0;
    auto flush = [&] {
        accumulate(rows, LANES, columns, r, m, LANES, r / 16, grad + block * 256, rank * 16);
        m = 0;
    };
    for (int64_t i = begin; i < end; ++i)
        for (int64_t row = (i * call.d.heads + h0) * 2; row < (i * call.d.heads + h1) * 2; ++row) {
            store(rows + m * LANES, load(kept.a_rows + row * rank + block * LANES));
            for (int64_t k = 0; k < r; k += LANES) store(columns + m * r + k, load(kept.a_columns + row * r + k));
            if (++m == ROW_BLOCK) flush();
        }
    if (m) flush();
}

}  // namespace

// dq [tokens, heads*(nope+pe)] BF16 and dkv [tokens, rank+pe] (BF16, or FP32: the subtree of a rank that owns `slices` of the 8
// slices of all heads), contiguous; grad_a FP32 [slices] of slot 0 of a and grad_b FP32 like slot 0 of b, whose tokens continue
// the chains in them, or null. Returns Status::result (paged.h); sequences must start at position 0.
ZM_API int64_t zm_mla_attention_backward(const bf16* grad, int64_t grad_stride, const bf16* q, int64_t q_stride, int64_t tokens,
                                         const bf16* kv, int64_t kv_stride, const int32_t* cu, int64_t requests,
                                         const int32_t* positions, const int32_t* selected, int64_t selected_stride,
                                         int64_t topk, const bf16* kv_b, int64_t heads, int64_t nope, int64_t pe, int64_t rank,
                                         int64_t value, const bf16* a, const bf16* b, int64_t lora_rank, const int32_t* slots,
                                         int64_t slot_count, float lora_scale, float score_scale, int64_t slices, bf16* dq,
                                         void* dkv, int64_t dkv_fp32, float* grad_a, float* grad_b, int64_t threads) {
    const Mla d{heads, nope, pe, rank, value, kv_b, a, b, lora_rank, slots, slot_count, lora_scale, score_scale, q, q_stride};
    Status status;
    if (!valid_batch(d, cu, requests, tokens, status)) return status.result(0);
    for (int64_t r = 0; r < requests; ++r)
        for (int64_t t = cu[r]; t < cu[r + 1]; ++t)
            if (positions[t] != t - cu[r]) status.fail(BAD_START, t);
    if (status.failed()) return status.result(0);

    const int64_t padded = d.padded(), all = d.groups() * GROUP;
    const std::unique_ptr<float[]> sums(new float[size_t(slices * tokens * padded)]());
    const Call call{d, grad, kv, grad_stride, kv_stride, cu, positions, selected, requests, selected_stride, topk, dq,
                    {heads, slices}, sums.get(), tokens * padded, &status};
    const int64_t floats = all * (padded + rank + 2 * topk) + heads * (2 * rank + 4 * lora_rank + nope + value);
    const int64_t chunk = std::max<int64_t>(1, std::min(tokens, CHUNK_FLOATS / floats));
    const Kept kept(d, chunk, topk);
    const int workers = threads_for(chunk * heads * 4 * (topk * (d.width() + rank) + (nope + value) * rank), int(threads));

    for (int64_t c0 = 0; c0 < tokens; c0 += chunk) {
        const int64_t c1 = std::min(tokens, c0 + chunk);
        const Tiling tiling(d, c1 - c0, workers);
        parallel_for(tiling.items(), workers, [&](int64_t item) {
            const int64_t t0 = c0 + item / tiling.blocks() * tiling.tile, g0 = item % tiling.blocks() * tiling.block;
            TokenItem(call, kept, c0, t0, std::min(tiling.tile, c1 - t0), g0, std::min(tiling.block, tiling.groups - g0)).run();
        });
        if (status.failed()) return status.result(0);

        const int64_t range = std::max<int64_t>(16, tokens / (8 * workers));  // positions of one item
        std::vector<std::array<int64_t, 2>> ranges;
        for (int64_t r = request_of(cu, requests, c0); r < requests && cu[r] < c1; ++r)
            for (int64_t s = 0; s < std::min<int64_t>(c1, cu[r + 1]) - cu[r]; s += range) ranges.push_back({r, s});
        parallel_for(int64_t(ranges.size()), workers,
                     [&](int64_t i) { rows_item(call, kept, c0, c1, ranges[i][0], ranges[i][1], ranges[i][1] + range); });

        const int64_t r = lora_rank, blocks = rank / 16;
        if (grad_a)
            parallel_for(slices * blocks, workers, [&](int64_t item) {
                d.for_runs(c0, c1 - c0, [&](int64_t begin, int64_t end, int64_t slot) {
                    if (slot == 0) adapter_item(call, kept, begin, end, item / blocks, item % blocks, grad_a + item / blocks * r * rank);
                });
            });
        // dB over tokens: fma(dt, q_nope, .) in the key rows, fma(u, scale*do, .) in the value rows
        if (grad_b)
            parallel_for(heads * 2, workers, [&](int64_t item) {
                const int64_t h = item / 2, part = item % 2, column = h * (nope + value) + part * nope;
                d.for_runs(c0, c1 - c0, [&](int64_t begin, int64_t end, int64_t slot) {
                    if (slot != 0) return;
                    accumulate(kept.b_rows + (begin * heads + h) * 2 * r + part * r, heads * 2 * r,
                               kept.b_columns + begin * heads * (nope + value) + column, heads * (nope + value), end - begin, r,
                               (part ? value : nope) / 16, grad_b + column * r, r * 16);
                });
            });
    }
    parallel_for(tokens, threads_for(slices * tokens * padded, workers), [&](int64_t t) {
        for (int64_t k = 0; k < d.width(); k += LANES) {
            f16 x[SHARDS];
            for (int64_t s = 0; s < slices; ++s) x[s] = load(sums.get() + s * call.slice_stride + t * padded + k);
            for (int64_t left = slices; left > 1; left /= 2)  // neighbours: ((0+1)+(2+3))+...
                for (int64_t s = 0; s < left / 2; ++s) x[s] = add(x[2 * s], x[2 * s + 1]);
            if (dkv_fp32) row_store(static_cast<float*>(dkv) + t * d.width(), k, d.width(), x[0]);
            else row_store(static_cast<bf16*>(dkv) + t * d.width(), k, d.width(), x[0]);
        }
    });
    return workers;
}
