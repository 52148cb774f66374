// Absorbed MLA over selected rows of a paged latent cache, several adapters in one batch. Orders: docs/operators.md.
#include <utility>

#include "latent.h"
#include "mla.h"

using namespace zm;

// out [tokens, heads*value] BF16, contiguous. selected null: every position up to the token's own, of which there are at most
// topk. Returns Status::result (paged.h).
ZM_API int64_t zm_mla_attention(const bf16* q, int64_t q_stride, int64_t tokens, const uint8_t* pages, int64_t page_stride,
                                int64_t num_blocks, const int32_t* block_table, int64_t table_stride, int64_t columns,
                                int64_t block_size, int64_t format, float latent_scale, const int32_t* cu, int64_t requests,
                                const int32_t* positions, const int32_t* selected, int64_t selected_stride, int64_t topk,
                                const bf16* kv_b, int64_t heads, int64_t nope, int64_t pe, int64_t rank, int64_t value,
                                const bf16* a, const bf16* b, int64_t lora_rank, const int32_t* slots, int64_t slot_count,
                                float lora_scale, float score_scale, bf16* out, int64_t threads) {
    const Mla d{heads, nope, pe, rank, value, kv_b, a, b, lora_rank, slots, slot_count, lora_scale, score_scale, q, q_stride};
    const LatentRow latent{format, rank, pe, latent_scale};
    const Pages cache{pages, page_stride, num_blocks, block_table, table_stride, columns, block_size};
    Status status;
    if (!valid_batch(d, cu, requests, tokens, status)) return status.result(0);
    const int64_t flop = tokens * heads * 2 * (topk * (d.width() + rank + 16) + (nope + value) * rank);
    const int workers = threads_for(flop, int(threads));
    const Tiling tiling(d, tokens, workers);
    const int64_t padded = d.padded(), row_count = (topk + 3) / 4 * 4, row_floats = (d.width() + 1) / 2;

    parallel_for(tiling.items(), workers, [&](int64_t item) {
        const int64_t t0 = item / tiling.blocks() * tiling.tile, m = std::min(tiling.tile, tokens - t0);
        const int64_t g0 = item % tiling.blocks() * tiling.block, groups = std::min(tiling.block, tiling.groups - g0);
        const int64_t h0 = g0 * GROUP, h1 = std::min(heads, h0 + groups * GROUP), slots_of_heads = groups * GROUP;
        const int64_t token_stride = slots_of_heads * padded, s_stride = row_count * GROUP;
        const int64_t sizes[] = {m * token_stride, m * std::max(rank, value), m * value, m * lora_rank, groups * s_stride,
                                 row_count * 2, row_count, format == LATENT_BF16 ? 0 : topk * row_floats};
        float* at[8];
        int64_t total = 0;
        for (int64_t size : sizes) total += ceil16(size) * 16;
        at[0] = scratch<FIRST_OWN_TAG>(total);
        for (int i = 1; i < 8; ++i) at[i] = at[i - 1] + ceil16(sizes[i - 1]) * 16;
        float *q_cat = at[0], *delta = at[1], *y = at[2], *rank_vector = at[3], *s = at[4];
        Selected rows;
        rows.row = reinterpret_cast<const bf16**>(at[5]);
        rows.order = reinterpret_cast<int32_t*>(at[6]);
        bf16* const decoded = reinterpret_cast<bf16*>(at[7]);

        absorb(d, t0, m, h0, h1, slots_of_heads - (h1 - h0), q_cat, token_stride, rank_vector, lora_rank, 0, delta);

        int64_t request = request_of(cu, requests, t0);
        for (int64_t i = 0; i < m; ++i) {
            const int64_t t = t0 + i;
            while (t >= cu[request + 1]) ++request;
            auto address = [&, row = cache.cursor(request), next = decoded](int32_t position) mutable -> const bf16* {
                const uint8_t* stored = row.at(position, latent.bytes());
                if (format == LATENT_BF16 || !stored) return reinterpret_cast<const bf16*>(stored);
                latent.decode(stored, next);
                return std::exchange(next, next + 2 * row_floats);
            };
            const Selection selection{selected ? selected + t * selected_stride : nullptr, positions[t]};
            if (const int64_t failure = gather(selection, topk, address, rows)) {
                status.fail(Failure(failure), t);
                return;
            }
            if (g0 == 0) bytes_read[LATENTS] += rows.count * latent.bytes();
            float* x = q_cat + i * token_stride;
            scores(x, padded, rows, d.width(), score_scale, groups, s, s_stride);
            float sums[GROUP * 4];
            for (int64_t g = 0; g < groups; ++g) softmax_group(s + g * s_stride, rows, sums + g * GROUP);
            weighted_sum(s, s_stride, rows, rank, groups, x, padded);  // o_lat takes the place of q_lat
            for (int64_t h = 0; h < h1 - h0; ++h)
                for (int64_t k = 0; k < rank; k += LANES)
                    store(x + h * padded + k, round_bf16(div(load(x + h * padded + k), set1(sums[h]))));
        }

        for (int64_t h = h0; h < h1; ++h)
            values(d, t0, m, h, Rows{q_cat + (h - h0) * padded, token_stride, true}, y, rank_vector, delta, out);
    });
    return status.result(tiling.items() > 1 ? workers : 1);
}
