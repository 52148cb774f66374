// What the forward and backward pass of a linear layer share: its parts, its adapter, its rows grouped by adapter slot.
#pragma once
#include <vector>

#include "parallel.h"
#include "product.h"

namespace zm {

enum LinearScratch { OUTPUT_TILE = FIRST_OWN_TAG, ADAPTER_TILE, GRADIENT_ROWS, GRADIENT_COLUMNS, T_ROWS, DT_ROWS };

// A fused projection: part i has `size` outputs from `column` on, in panels `panel` on (each part padded to 16 by itself).
struct Part {
    int64_t size, column, panel;
    int64_t panels() const { return ceil16(size); }
};
struct Parts {
    std::vector<Part> part;
    std::vector<int32_t> of_panel;
    int64_t columns = 0, panels = 0;

    Parts(const int64_t* splits, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
            part.push_back({splits[i], columns, panels});
            columns += splits[i];
            panels += ceil16(splits[i]);
            of_panel.resize(size_t(panels), int32_t(i));
        }
    }
    // f(part, p0, p1) for the stretches of panels begin..end that lie in one part.
    template <class F>
    void stretches(int64_t begin, int64_t end, F f) const {
        while (begin < end) {
            const int64_t i = of_panel[size_t(begin)];
            const int64_t stop = min64(end, part[size_t(i)].panel + part[size_t(i)].panels());
            f(i, begin, stop);
            begin = stop;
        }
    }
    // f(local panel, column, lanes) for panels begin..end: where their outputs go.
    template <class F>
    void outputs(int64_t begin, int64_t end, F f) const {
        for (int64_t p = begin; p < end; ++p) {
            const Part& of = part[size_t(of_panel[size_t(p)])];
            const int64_t done = (p - of.panel) * 16;
            f(p - begin, of.column + done, int(min64(16, of.size - done)));
        }
    }
};

// A [S, parts*rank/16, inputs, 16], B [S, panels, rank, 16].
struct Adapter {
    const bf16* a;
    const bf16* b;
    int64_t rank, inputs, parts, panels;
    float scale;

    int64_t width() const { return parts * rank; }
    const bf16* a_of(int64_t slot) const { return a + slot * width() * inputs; }
    const bf16* b_of(int64_t slot, int64_t panel) const { return b + (slot * panels + panel) * rank * 16; }
};

// Rows sorted by slot, ascending within a slot. `order` is empty where the rows already lie so.
struct Grouping {
    std::vector<int32_t> order;
    std::vector<Run> runs;

    // slots[t] in -1..count-1; false if one is not.
    bool group(const int32_t* slots, int64_t rows, int64_t count) {
        std::vector<int64_t> start(size_t(count) + 2, 0);
        bool sorted = true;
        for (int64_t t = 0; t < rows; ++t) {
            if (slots[t] < -1 || slots[t] >= count) return false;
            ++start[size_t(slots[t]) + 2];
            sorted = sorted && (t == 0 || slots[t - 1] <= slots[t]);
        }
        for (int64_t s = 1; s <= count + 1; ++s) {
            start[size_t(s)] += start[size_t(s) - 1];
            if (start[size_t(s)] > start[size_t(s) - 1]) runs.push_back({start[size_t(s) - 1], start[size_t(s)], s - 2});
        }
        if (sorted) return true;
        order.resize(size_t(rows));
        for (int64_t t = 0; t < rows; ++t) order[size_t(start[size_t(slots[t]) + 1]++)] = int32_t(t);
        return true;
    }
    const int32_t* index() const { return order.empty() ? nullptr : order.data(); }
    int64_t row(int64_t i) const { return order.empty() ? i : order[size_t(i)]; }
};

// Threads worth waking for a product, and the panels of one item so that every thread gets several.
inline int product_threads(int64_t rows, int64_t n, int64_t k, int64_t threads) {
    return threads_for(rows * n * k, int(threads));
}
inline int64_t item_panels(int64_t panels, int64_t row_blocks, int threads, int64_t most) {
    const int64_t even = panels * row_blocks / (4 * threads) / FEW_PANELS * FEW_PANELS;
    return threads <= 1 ? most : min64(even < FEW_PANELS ? FEW_PANELS : even, most);
}

// Items (row block, group of panels) of a product, shared out to threads: f(i0, rows, p0, p1).
template <class F>
void for_items(int64_t rows, int64_t panels, int64_t most, int threads, F f) {
    const int64_t row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    const int64_t group = item_panels(panels, row_blocks, threads, most), groups = (panels + group - 1) / group;
    parallel_for(row_blocks * groups, threads, [&](int64_t item) {
        const int64_t i0 = item / groups * ROW_BLOCK, p0 = item % groups * group;
        f(i0, min64(ROW_BLOCK, rows - i0), p0, min64(p0 + group, panels));
    });
}
constexpr int64_t ITEM_PANELS = 16;

// t = bf16(A x) for the grouped rows: BF16 [rows, width].
inline void adapter_inputs(const Rows& x, int64_t rows, const Grouping& grouping, const Adapter& lora, int64_t shards, bf16* t,
                           int threads) {
    const int64_t width = lora.width(), k = lora.inputs;
    for_items(rows, width / 16, ITEM_PANELS, threads, [&](int64_t i0, int64_t m, int64_t p0, int64_t p1) {
        const int64_t ldc = (p1 - p0) * 16;
        float* c = scratch<OUTPUT_TILE>(4 * m * ldc);
        for_adapters(grouping.runs, i0, m, [&](int64_t begin, int64_t end, int64_t slot) {
            const int64_t count = end - begin;
            combine_shards(shards, c, count * ldc, [&](int64_t s, float* out) {
                chain(x, i0 + begin, count, Bf16Weights{lora.a_of(slot), k}, p0, p1, s * k / shards, (s + 1) * k / shards, out, ldc);
            });
            for (int64_t i = 0; i < count; ++i)
                for (int64_t j = 0; j < ldc; j += 16) store_bf16(t + (i0 + begin + i) * width + p0 * 16 + j, load(c + i * ldc + j));
        });
    });
}

}  // namespace zm
