// Absorbed MLA in the pieces between which ranks exchange, each rank holding every W-th position (mla.cpp does all at once on one
// rank, with the same arithmetic): queries into the latent space, scores and their maximum, partial sums, values.
#include <utility>

#include "latent.h"
#include "mla.h"

using namespace zm;

namespace {

// Latent rows of this rank: position p is local position p / W of the request's pages.
struct Shard {
    Pages cache;
    Ranks ranks;
    const int32_t *cu, *positions, *selected;
    int64_t requests, selected_stride, topk;
    LatentRow latent;

    int64_t row_count() const { return (topk + 3) / 4 * 4; }
    int64_t row_floats() const { return (latent.width() + 1) / 2; }
    // Room for the pointers of the selected rows and, if they are not BF16, for what they decode to.
    int64_t room() const { return 3 * row_count() + (latent.format == LATENT_BF16 ? 0 : topk * row_floats()); }

    // The selected rows of token t that this rank holds: none is no failure. memory: room(). Returns a Failure or 0.
    int64_t rows_of(int64_t t, float* memory, Selected& rows) const {
        rows.row = reinterpret_cast<const bf16**>(memory);
        rows.order = reinterpret_cast<int32_t*>(memory + 2 * row_count());
        const int32_t* selection = selected + t * selected_stride;
        rows.count = 0;
        std::fill(rows.begin, rows.begin + SHARDS + 1, 0);
        if (selection[0] < 0) return 0;
        for (int64_t i = 0; i < topk && selection[i] >= 0; ++i)
            if (selection[i] % ranks.count != ranks.rank) return BAD_SELECTION;
        auto address = [&, row = cache.cursor(request_of(cu, requests, t)),
                        next = reinterpret_cast<bf16*>(memory + 3 * row_count())](int32_t position) mutable -> const bf16* {
            const uint8_t* stored = row.at(position / ranks.count, latent.bytes());
            if (latent.format == LATENT_BF16 || !stored) return reinterpret_cast<const bf16*>(stored);
            latent.decode(stored, next);
            return std::exchange(next, next + 2 * row_floats());
        };
        return gather(Selection{selection, positions[t]}, topk, address, rows);
    }
};

// sum of p[i * GROUP] over the rows of each shard, ascending, and this rank's part of the tree.
float shard_sum(const float* p, const Selected& rows, Ranks ranks) {
    float part[SHARDS] = {0};
    for (int shard = 0; shard < SHARDS; ++shard)
        for (int64_t i = rows.begin[shard]; i < rows.begin[shard + 1]; ++i) part[shard] = part[shard] + p[i * GROUP];
    return ranks.subtree(part, [](float a, float b) { return a + b; });
}

}  // namespace

// q_cat [tokens, heads, rank + pe] BF16: per head q_lat, then q_pe. Returns Status::result.
ZM_API int64_t zm_mla_queries(const bf16* q, int64_t q_stride, int64_t tokens, const bf16* kv_b, int64_t heads, int64_t nope,
                              int64_t pe, int64_t rank, int64_t value, const bf16* a, const bf16* b, int64_t lora_rank,
                              const int32_t* slots, int64_t slot_count, float lora_scale, bf16* q_cat, int64_t threads) {
    const Mla d{heads, nope, pe, rank, value, kv_b, a, b, lora_rank, slots, slot_count, lora_scale, 0.0f, q, q_stride};
    const int32_t cu[2] = {0, int32_t(tokens)};
    Status status;
    if (!valid_batch(d, cu, 1, tokens, status)) return status.result(0);
    const int workers = threads_for(tokens * heads * 2 * nope * rank, int(threads));
    const Tiling tiling(d, tokens, workers);
    parallel_for(tiling.items(), workers, [&](int64_t item) {
        const int64_t t0 = item / tiling.blocks() * tiling.tile, m = std::min(tiling.tile, tokens - t0);
        const int64_t h0 = item % tiling.blocks() * tiling.block * GROUP, h1 = std::min(heads, h0 + tiling.block * GROUP);
        const int64_t padded = d.padded(), stride = (h1 - h0) * padded;
        float *out = scratch<FIRST_OWN_TAG>(m * (stride + rank + lora_rank)), *delta = out + m * stride, *t = delta + m * rank;
        absorb(d, t0, m, h0, h1, 0, out, stride, t, lora_rank, 0, delta);
        for (int64_t i = 0; i < m; ++i)
            for (int64_t h = h0; h < h1; ++h)
                for (int64_t k = 0; k < d.width(); k += LANES)
                    row_store(q_cat + ((t0 + i) * heads + h) * d.width(), k, d.width(), load(out + i * stride + (h - h0) * padded + k));
    });
    return status.result(workers);
}

// scores [tokens, groups of 4 heads][ceil4(topk)][4] of the rows in `selected`, which are this rank's; maximum [tokens, heads] of
// them, -inf where there is none. Returns Status::result.
ZM_API int64_t zm_mla_scores(const bf16* q_cat, int64_t tokens, int64_t heads, int64_t rank, int64_t pe, float score_scale,
                             const uint8_t* pages, int64_t page_stride, int64_t num_blocks, const int32_t* block_table,
                             int64_t table_stride, int64_t columns, int64_t block_size, int64_t format, float latent_scale,
                             const int32_t* cu, int64_t requests,
                             const int32_t* positions, const int32_t* selected, int64_t selected_stride, int64_t topk,
                             int64_t world, int64_t world_rank, float* score, float* maximum, int64_t threads) {
    const int64_t width = rank + pe, padded = (width + 15) / 16 * 16, groups = (heads + GROUP - 1) / GROUP;
    const Shard shard{{pages, page_stride, num_blocks, block_table, table_stride, columns, block_size}, {world, world_rank},
                      cu, positions, selected, requests, selected_stride, topk, {format, rank, pe, latent_scale}};
    Status status;
    if (!valid_sequences(cu, requests, tokens)) status.fail(BAD_SEQUENCES, 0);
    if (status.failed()) return status.result(0);
    const int64_t count = shard.row_count(), s_stride = count * GROUP;
    const int workers = threads_for(tokens * heads * 2 * topk * width, int(threads));
    parallel_for(tokens, workers, [&](int64_t t) {
        float *x = scratch<FIRST_OWN_TAG>(groups * GROUP * padded + shard.room() + 16), *s = score + t * groups * s_stride;
        Selected rows;
        float* const memory = x + groups * GROUP * padded;
        if (const int64_t failure = shard.rows_of(t, memory, rows)) return status.fail(Failure(failure), t);
        for (int64_t h = 0; h < groups * GROUP; ++h)
            for (int64_t k = 0; k < padded; ++k)
                x[h * padded + k] = h < heads && k < width ? to_float(q_cat[(t * heads + h) * width + k]) : 0.0f;
        scores(x, padded, rows, width, score_scale, groups, s, s_stride);
        for (int64_t h = 0; h < heads; ++h) {
            float m = -INFINITY;
            for (int64_t i = 0; i < rows.count; ++i) {
                const float v = s[h / GROUP * s_stride + i * GROUP + h % GROUP];
                m = v > m ? v : m;
            }
            maximum[t * heads + h] = m;
        }
    });
    return status.result(workers);
}

// partial [tokens, heads, rank + 1]: this rank's subtree of acc, then of sum, with p = exp(score - maximum of all ranks). `score`
// is zm_mla_scores' and is overwritten. Returns Status::result.
ZM_API int64_t zm_mla_partial(float* score, const float* maximum, int64_t tokens, int64_t heads, int64_t rank, int64_t pe,
                              const uint8_t* pages, int64_t page_stride, int64_t num_blocks, const int32_t* block_table,
                              int64_t table_stride, int64_t columns, int64_t block_size, int64_t format, float latent_scale,
                             const int32_t* cu, int64_t requests,
                              const int32_t* positions, const int32_t* selected, int64_t selected_stride, int64_t topk,
                              int64_t world, int64_t world_rank, float* partial, int64_t threads) {
    const int64_t groups = (heads + GROUP - 1) / GROUP;
    const Shard shard{{pages, page_stride, num_blocks, block_table, table_stride, columns, block_size}, {world, world_rank},
                      cu, positions, selected, requests, selected_stride, topk, {format, rank, pe, latent_scale}};
    Status status;
    if (!valid_sequences(cu, requests, tokens)) status.fail(BAD_SEQUENCES, 0);
    if (status.failed()) return status.result(0);
    const int64_t count = shard.row_count(), s_stride = count * GROUP;
    const int workers = threads_for(tokens * heads * 2 * topk * (rank + 16), int(threads));
    parallel_for(tokens, workers, [&](int64_t t) {
        float *acc = scratch<FIRST_OWN_TAG>(groups * GROUP * rank + shard.room() + 16), *s = score + t * groups * s_stride;
        Selected rows;
        float* const memory = acc + groups * GROUP * rank;
        if (const int64_t failure = shard.rows_of(t, memory, rows)) return status.fail(Failure(failure), t);
        for (int64_t h = 0; h < groups * GROUP; h += GROUP) {
            float m[LANES];
            for (int64_t i = 0; i < LANES; ++i) m[i] = h + i % GROUP < heads ? maximum[t * heads + h + i % GROUP] : 0.0f;
            float* group = s + h / GROUP * s_stride;
            for (int64_t i = 0; i < rows.padded() * GROUP; i += LANES) store(group + i, exp(sub(load(group + i), load(m))));
        }
        weighted_sum(s, s_stride, rows, rank, groups, acc, rank, shard.ranks);
        for (int64_t h = 0; h < heads; ++h) {
            float* out = partial + (t * heads + h) * (rank + 1);
            std::memcpy(out, acc + h * rank, size_t(rank) * 4);
            out[rank] = shard_sum(s + h / GROUP * s_stride + h % GROUP, rows, shard.ranks);
        }
    });
    return status.result(workers);
}

// out [tokens, heads*value] BF16: the ranks' partials [world, tokens, heads, rank + 1] added up by the rest of the tree, divided,
// rounded and projected. Returns Status::result.
ZM_API int64_t zm_mla_values(const float* partial, int64_t world, int64_t tokens, const bf16* kv_b, int64_t heads, int64_t nope,
                             int64_t pe, int64_t rank, int64_t value, const bf16* a, const bf16* b, int64_t lora_rank,
                             const int32_t* slots, int64_t slot_count, float lora_scale, bf16* out, int64_t threads) {
    const Mla d{heads, nope, pe, rank, value, kv_b, a, b, lora_rank, slots, slot_count, lora_scale, 0.0f, nullptr, 0};
    const int32_t cu[2] = {0, int32_t(tokens)};
    Status status;
    if (!valid_batch(d, cu, 1, tokens, status)) return status.result(0);
    const int workers = threads_for(tokens * heads * 2 * value * rank, int(threads));
    const int64_t tile = std::max<int64_t>(1, std::min<int64_t>(64, tokens / (workers > 1 ? 4 * workers : 1)));
    const int64_t row = rank + 1, of_rank = tokens * heads * row;
    parallel_for((tokens + tile - 1) / tile * heads, workers, [&](int64_t item) {
        const int64_t t0 = item / heads * tile, h = item % heads, m = std::min(tile, tokens - t0);
        float* o_lat = scratch<FIRST_OWN_TAG>(m * (rank + value + lora_rank + std::max(rank, value)) + world * row);
        float *y = o_lat + m * rank, *u = y + m * value, *delta = u + m * lora_rank, *x = delta + m * std::max(rank, value);
        for (int64_t i = 0; i < m; ++i) {
            for (int64_t w = 0; w < world; ++w)
                std::memcpy(x + w * row, partial + w * of_rank + ((t0 + i) * heads + h) * row, size_t(row) * 4);
            for (int64_t step = world / 2; step > 0; step /= 2)
                for (int64_t k = 0; k < step * row; ++k) x[k] = x[k] + x[k + step * row];
            for (int64_t k = 0; k < rank; k += LANES) store(o_lat + i * rank + k, round_bf16(div(load(x + k), set1(x[rank]))));
        }
        values(d, t0, m, h, Rows{o_lat, rank, true}, y, u, delta, out);
    });
    return status.result(workers);
}
