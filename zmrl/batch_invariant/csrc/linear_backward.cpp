// Linear layers over panels, backward: the input gradient and the adapter gradients (docs/operators.md, Linear and experts).
#include "linear.h"

using namespace zm;

namespace {

// c = sum over the outputs of the given parts of W[n][k] dy[n] for input panels q0..q1 of 16. Slice s of `shards` takes slice s of
// every part, parts in order: a rank that owns whole slices of each part of a fused projection owns whole slices here.
template <class PanelsOf>
void transposed_product(const Rows& dy, int64_t i0, int64_t m, const Parts& parts, int64_t first, int64_t last, PanelsOf panels_of,
                        int64_t inputs, int64_t q0, int64_t q1, int64_t shards, float* c) {
    const int64_t ldc = (q1 - q0) * 16;
    combine_shards(shards, c, m * ldc, [&](int64_t s, float* out) {
        for (int64_t i = first; i < last; ++i) {
            const Part& part = parts.part[size_t(i)];
            chain(dy.columns(part.column), i0, m, Bf16Transposed{panels_of(part.panel), inputs}, q0, q1, s * part.size / shards,
                  (s + 1) * part.size / shards, out, ldc, i != first);
        }
    });
}

// dt_p = scale * (B_p^T dy_p) for the grouped rows: FP32 [rows, width].
void adapter_output_gradients(const Rows& dy, int64_t rows, const Grouping& grouping, const Parts& parts, const Adapter& lora,
                              int64_t shards, float* dt, int threads) {
    const int64_t width = lora.width(), per_part = lora.rank / 16;
    for_items(rows, lora.parts, 1, threads, [&](int64_t i0, int64_t m, int64_t part, int64_t) {
        float* c = scratch<OUTPUT_TILE>(4 * m * lora.rank);
        for_adapters(grouping.runs, i0, m, [&](int64_t begin, int64_t end, int64_t slot) {
            transposed_product(dy, i0 + begin, end - begin, parts, part, part + 1, [&](int64_t p) { return lora.b_of(slot, p); },
                               lora.rank, 0, per_part, shards, c);
            for (int64_t i = 0; i < end - begin; ++i)
                for (int64_t j = 0; j < lora.rank; j += 16)
                    store(dt + (i0 + begin + i) * width + part * lora.rank + j, mul(set1(lora.scale), load(c + i * lora.rank + j)));
        });
    });
}

// f(i, m): rows begin..end of the grouped order in blocks, ascending.
template <class F>
void row_blocks(int64_t begin, int64_t end, F f) {
    for (int64_t i = begin; i < end; i += ROW_BLOCK) f(i, min64(ROW_BLOCK, end - i));
}

// grad_a continues sum over rows of dt x, rows begin..end of the grouped order.
void accumulate_a(const Rows& x, int64_t begin, int64_t end, const Adapter& lora, const float* dt, float* grad, int threads) {
    const int64_t width = lora.width(), k = lora.inputs, blocks = (k + K_BLOCK - 1) / K_BLOCK;
    parallel_for(blocks, threads, [&](int64_t block) {
        const int64_t k0 = block * K_BLOCK, n = min64(K_BLOCK, k - k0);
        float* packed = scratch<GRADIENT_ROWS>(ROW_BLOCK * X_STRIDE);
        row_blocks(begin, end, [&](int64_t i0, int64_t m) {
            for (int64_t i = 0; i < m; ++i) x.pack(i0 + i, k0, n, packed + i * X_STRIDE);
            accumulate(packed, X_STRIDE, dt + i0 * width, width, m, n, width / 16, grad + k0 * 16, k * 16);
        });
    });
}

// grad_b continues sum over rows of (scale dy) t.
void accumulate_b(const Rows& dy, int64_t begin, int64_t end, const Parts& parts, const Adapter& lora, const bf16* t, float* grad,
                  int threads) {
    const int64_t rank = lora.rank, width = lora.width();
    const int64_t group = item_panels(parts.panels, 1, threads, ITEM_PANELS), groups = (parts.panels + group - 1) / group;
    const Rows t_rows{t, width, false};
    parallel_for(groups, threads, [&](int64_t item) {
        const int64_t p0 = item * group, p1 = min64(p0 + group, parts.panels), ld = (p1 - p0) * 16;
        float* t_packed = scratch<GRADIENT_ROWS>(ROW_BLOCK * rank);
        float* dy_packed = scratch<GRADIENT_COLUMNS>(ROW_BLOCK * ld);
        row_blocks(begin, end, [&](int64_t i0, int64_t m) {
            parts.outputs(p0, p1, [&](int64_t p, int64_t column, int lanes) {
                for (int64_t i = 0; i < m; ++i) {
                    float lane[16] = {0};
                    dy.pack(i0 + i, column, lanes, lane);
                    store(dy_packed + i * ld + p * 16, mul(set1(lora.scale), load(lane)));
                }
            });
            parts.stretches(p0, p1, [&](int64_t part, int64_t q0, int64_t q1) {
                for (int64_t i = 0; i < m; ++i) t_rows.pack(i0 + i, part * rank, rank, t_packed + i * rank);
                accumulate(t_packed, rank, dy_packed + (q0 - p0) * 16, ld, m, rank, q1 - q0, grad + q0 * rank * 16, rank * 16);
            });
        });
    });
}

}  // namespace

// dx [rows, k] = bf16(W^T dy), dy BF16 or FP32 [rows, sum(splits)]; W^T dy is one chain over n, parts in order, or `shards_n` slices.
// a != null: t = bf16(A x) (with `shards`, as forward), dt_p = scale * (B_p^T dy_p) (with `shards_n`), dx = bf16 of the chain over
// A^T dt continued from W^T dy; grad_a and grad_b (slot 0, may be null) continue their chains over the rows of slot 0.
// Returns the threads used, or -1 for a slot outside -1..slot_count-1.
ZM_API int64_t zm_linear_backward(const void* dy, int64_t dy_stride, int64_t dy_fp32, const bf16* x, int64_t x_stride, int64_t rows,
                                  int64_t k, const bf16* w, const int64_t* splits, int64_t parts_count, int64_t shards,
                                  int64_t shards_n, const bf16* a, const bf16* b, const int32_t* slots, int64_t slot_count,
                                  int64_t rank, float scale, float* grad_a, float* grad_b, bf16* dx, int64_t threads) {
    const Parts parts(splits, parts_count);
    const Adapter lora{a, b, rank, k, parts_count, parts.panels, scale};
    const int workers = product_threads(rows, parts.columns, k, threads);
    Grouping grouping;
    if (a && !grouping.group(slots, rows, slot_count)) return -1;
    const Rows dy_rows{dy, dy_stride, dy_fp32 != 0, grouping.index()}, x_rows{x, x_stride, false, grouping.index()};
    float* dt = nullptr;
    if (a) {
        dt = scratch<DT_ROWS>(rows * lora.width());
        adapter_output_gradients(dy_rows, rows, grouping, parts, lora, shards_n, dt, workers);
    }
    const Rows dt_rows{dt, lora.width(), true};
    for_items(rows, ceil16(k), ITEM_PANELS, workers, [&](int64_t i0, int64_t m, int64_t q0, int64_t q1) {
        const int64_t ldc = (q1 - q0) * 16;
        float* c = scratch<OUTPUT_TILE>(4 * m * ldc);
        transposed_product(dy_rows, i0, m, parts, 0, parts_count, [&](int64_t p) { return w + p * k * 16; }, k, q0, q1, shards_n, c);
        if (a)
            for_adapters(grouping.runs, i0, m, [&](int64_t begin, int64_t end, int64_t slot) {
                chain(dt_rows, i0 + begin, end - begin, Bf16Transposed{lora.a_of(slot), k}, q0, q1, 0, lora.width(), c + begin * ldc,
                      ldc, true);
            });
        for (int64_t i = 0; i < m; ++i)
            for (int64_t q = q0; q < q1; ++q)
                store_bf16_n(dx + grouping.row(i0 + i) * k + q * 16, load(c + i * ldc + (q - q0) * 16), int(min64(16, k - q * 16)));
    });
    for (const Run& run : grouping.runs) {
        if (run.slot != 0) continue;
        if (grad_a) accumulate_a(x_rows, run.begin, run.end, lora, dt, grad_a, workers);
        if (grad_b) {
            bf16* t = reinterpret_cast<bf16*>(scratch<T_ROWS>(rows * lora.width() / 2));
            adapter_inputs(x_rows, rows, grouping, lora, shards, t, workers);
            accumulate_b(dy_rows, run.begin, run.end, parts, lora, t, grad_b, workers);
        }
    }
    return workers;
}
