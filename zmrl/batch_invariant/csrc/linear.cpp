// Linear layers over panels, forward, with or without adapters (docs/operators.md, Linear and experts).
#include "linear.h"

using namespace zm;

// y [rows, sum(splits)] = x W, BF16 or FP32: one chain over k, or `shards` slices of it.
// a != null: t_p = bf16(A_p x), y = bf16(fma(scale, chain(B t_p), x W)) for the rows with slot >= 0.
// Returns the threads used, or -1 for a slot outside -1..slot_count-1.
ZM_API int64_t zm_linear(const bf16* x, int64_t x_stride, int64_t rows, int64_t k, const bf16* w, const int64_t* splits,
                         int64_t parts_count, int64_t shards, const bf16* a, const bf16* b, const int32_t* slots,
                         int64_t slot_count, int64_t rank, float scale, void* y, int64_t fp32_out, int64_t threads) {
    const Parts parts(splits, parts_count);
    const Adapter lora{a, b, rank, k, parts_count, parts.panels, scale};
    const int workers = product_threads(rows, parts.columns, k, threads);
    Grouping grouping;
    Rows in{x, x_stride, false};
    bf16* t = nullptr;
    if (a) {
        if (!grouping.group(slots, rows, slot_count)) return -1;
        in.index = grouping.index();
        t = reinterpret_cast<bf16*>(scratch<T_ROWS>(rows * lora.width() / 2));
        adapter_inputs(in, rows, grouping, lora, shards, t, workers);
    }
    const Rows t_rows{t, lora.width(), false};
    for_items(rows, parts.panels, ITEM_PANELS, workers, [&](int64_t i0, int64_t m, int64_t p0, int64_t p1) {
        const int64_t ldc = (p1 - p0) * 16;
        float* c = scratch<OUTPUT_TILE>(4 * m * ldc);
        combine_shards(shards, c, m * ldc, [&](int64_t s, float* out) {
            chain(in, i0, m, Bf16Weights{w, k}, p0, p1, s * k / shards, (s + 1) * k / shards, out, ldc);
        });
        if (a)
            for_adapters(grouping.runs, i0, m, [&](int64_t begin, int64_t end, int64_t slot) {
                float* d = scratch<ADAPTER_TILE>((end - begin) * ldc);
                parts.stretches(p0, p1, [&](int64_t part, int64_t q0, int64_t q1) {
                    chain(t_rows.columns(part * rank), i0 + begin, end - begin, Bf16Weights{lora.b_of(slot, 0), rank}, q0, q1, 0,
                          rank, d + (q0 - p0) * 16, ldc);
                });
                float* base = c + begin * ldc;
                for (int64_t i = 0; i < (end - begin) * ldc; i += 16)
                    store(base + i, fma(set1(scale), load(d + i), load(base + i)));
            });
        parts.outputs(p0, p1, [&](int64_t p, int64_t column, int lanes) {
            for (int64_t i = 0; i < m; ++i) {
                const int64_t at = grouping.row(i0 + i) * parts.columns + column;
                const f16 v = load(c + i * ldc + p * 16);
                if (fp32_out) {
                    float* out = static_cast<float*>(y) + at;
                    lanes == 16 ? store(out, v) : store_n(out, v, lanes);
                } else {
                    bf16* out = static_cast<bf16*>(y) + at;
                    lanes == 16 ? store_bf16(out, v) : store_bf16_n(out, v, lanes);
                }
            }
        });
    });
    return workers;
}
