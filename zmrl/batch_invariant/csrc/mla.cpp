// Absorbed MLA over selected rows of a paged latent cache, several adapters in one batch. Orders: docs/operators.md.
#include "mla.h"

using namespace zm;

// pages[slot] = kv[t] for slot >= 0. Returns the number of threads, or -1 - the first token whose
// slot lies outside the pages.
ZM_API int64_t zm_latent_store(const bf16* kv, int64_t kv_stride, int64_t tokens, int64_t width, uint8_t* pages,
                               int64_t page_stride, int64_t num_blocks, const int64_t* slot_mapping, int64_t block_size,
                               int64_t threads) {
    for (int64_t t = 0; t < tokens; ++t)
        if (slot_mapping[t] < -1 || slot_mapping[t] >= num_blocks * block_size) return -1 - t;
    const int64_t bytes = width * 2, tile = 64;
    const int workers = threads_for(tokens * width, int(threads));
    parallel_for((tokens + tile - 1) / tile, workers, [&](int64_t item) {
        for (int64_t t = item * tile; t < std::min(tokens, (item + 1) * tile); ++t) {
            const int64_t slot = slot_mapping[t];
            if (slot < 0) continue;
            std::memcpy(pages + slot / block_size * page_stride + slot % block_size * bytes, kv + t * kv_stride, size_t(bytes));
        }
    });
    return workers;
}

// out [tokens, heads*value] BF16, contiguous. selected null: every position up to the token's own, of which there are at most
// topk. Returns Status::result (paged.h).
ZM_API int64_t zm_mla_attention(const bf16* q, int64_t q_stride, int64_t tokens, const uint8_t* pages, int64_t page_stride,
                                int64_t num_blocks, const int32_t* block_table, int64_t table_stride, int64_t columns,
                                int64_t block_size, const int32_t* cu, int64_t requests, const int32_t* positions,
                                const int32_t* selected, int64_t selected_stride, int64_t topk, const bf16* kv_b, int64_t heads,
                                int64_t nope, int64_t pe, int64_t rank, int64_t value, const bf16* a, const bf16* b,
                                int64_t lora_rank, const int32_t* slots, int64_t slot_count, float lora_scale,
                                float score_scale, bf16* out, int64_t threads) {
    const Mla d{heads, nope, pe, rank, value, kv_b, a, b, lora_rank, slots, slot_count, lora_scale, score_scale, q, q_stride};
    const Pages cache{pages, page_stride, num_blocks, block_table, table_stride, columns, block_size};
    Status status;
    if (!valid_batch(d, cu, requests, tokens, status)) return status.result(0);
    const int64_t flop = tokens * heads * 2 * (topk * (d.width() + rank + 16) + (nope + value) * rank);
    const int workers = threads_for(flop, int(threads));
    const Tiling tiling(d, tokens, workers);
    const int64_t padded = d.padded(), row_count = (topk + 3) / 4 * 4;

    parallel_for(tiling.items(), workers, [&](int64_t item) {
        const int64_t t0 = item / tiling.blocks() * tiling.tile, m = std::min(tiling.tile, tokens - t0);
        const int64_t g0 = item % tiling.blocks() * tiling.block, groups = std::min(tiling.block, tiling.groups - g0);
        const int64_t h0 = g0 * GROUP, h1 = std::min(heads, h0 + groups * GROUP), slots_of_heads = groups * GROUP;
        const int64_t token_stride = slots_of_heads * padded, s_stride = row_count * GROUP;
        const int64_t sizes[] = {m * token_stride, m * std::max(rank, value), m * value, m * lora_rank, groups * s_stride,
                                 row_count * 2, row_count};
        float* at[7];
        int64_t total = 0;
        for (int64_t size : sizes) total += ceil16(size) * 16;
        at[0] = scratch<FIRST_OWN_TAG>(total);
        for (int i = 1; i < 7; ++i) at[i] = at[i - 1] + ceil16(sizes[i - 1]) * 16;
        float *q_cat = at[0], *delta = at[1], *y = at[2], *rank_vector = at[3], *s = at[4];
        Selected rows;
        rows.row = reinterpret_cast<const bf16**>(at[5]);
        rows.order = reinterpret_cast<int32_t*>(at[6]);

        absorb(d, t0, m, h0, h1, slots_of_heads - (h1 - h0), q_cat, token_stride, rank_vector, lora_rank, 0, delta);

        int64_t request = request_of(cu, requests, t0);
        for (int64_t i = 0; i < m; ++i) {
            const int64_t t = t0 + i;
            while (t >= cu[request + 1]) ++request;
            auto address = [&, row = cache.cursor(request)](int32_t position) mutable {
                return reinterpret_cast<const bf16*>(row.at(position, d.width() * 2));
            };
            const Selection selection{selected ? selected + t * selected_stride : nullptr, positions[t]};
            if (const int64_t failure = gather(selection, topk, address, rows)) {
                status.fail(Failure(failure), t);
                return;
            }
            float* x = q_cat + i * token_stride;
            scores(x, padded, rows, d.width(), score_scale, groups, s, s_stride);
            float sums[GROUP * 4];
            for (int64_t g = 0; g < groups; ++g) softmax_group(s + g * s_stride, rows, sums + g * GROUP);
            weighted_sum(s, s_stride, rows, rank, groups, x, padded);  // o_lat takes the place of q_lat
            for (int64_t h = 0; h < h1 - h0; ++h)
                for (int64_t k = 0; k < rank; k += LANES)
                    store(x + h * padded + k, round_bf16(div(load(x + h * padded + k), set1(sums[h]))));
        }

        for (int64_t h = h0; h < h1; ++h) {
            const Rows o_lat{q_cat + (h - h0) * padded, token_stride, true};
            chain(o_lat, 0, m, d.w_uv(h), 0, value / 16, 0, rank, y, value);
            d.for_runs(t0, m, [&](int64_t begin, int64_t end, int64_t slot) {
                const int64_t n = end - begin;
                chain(o_lat, begin, n, d.lora_a(slot), 0, lora_rank / 16, 0, rank, rank_vector, lora_rank);
                for (int64_t k = 0; k < n * lora_rank; k += LANES) store(rank_vector + k, round_bf16(load(rank_vector + k)));
                chain(Rows{rank_vector, lora_rank, true}, 0, n, d.lora_b(slot, d.value_panel(h)), 0, value / 16, 0, lora_rank,
                      delta, value);
                for (int64_t k = 0; k < n * value; k += LANES)
                    store(y + begin * value + k, fma(set1(lora_scale), load(delta + k), load(y + begin * value + k)));
            });
            for (int64_t i = 0; i < m; ++i)
                for (int64_t k = 0; k < value; k += LANES)
                    store_bf16(out + ((t0 + i) * heads + h) * value + k, load(y + i * value + k));
        }
    });
    return status.result(tiling.items() > 1 ? workers : 1);
}
