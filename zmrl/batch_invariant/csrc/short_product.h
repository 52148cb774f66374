// Products of a few dozen rows with weights that only these rows meet (an expert's): the rows are read where they are, several
// weights make one chain, and a last step is done on the sums while they are in registers. Chains too long for one block go
// through chain() of product.h: the same bits.
#pragma once
#include <type_traits>

#include "product.h"

namespace zm {

// Floats between rows of n floats (a multiple of 16): an odd number of cache lines, so that a column does not meet few cache sets.
inline int64_t spread(int64_t n) { return (n / 16 | 1) * 16; }

// Memory that will be read soon, asked for bit by bit between products, so that it comes while they run.
class Prefetch {
  public:
    // steps: how often operator() will be called, about.
    explicit Prefetch(int64_t steps) : steps(steps) {}
    void add(const void* data, int64_t bytes) {
        if (bytes > LARGE || count == MOST) return;
        ranges[count++] = {static_cast<const char*>(data), (bytes + LINE - 1) / LINE};
        total += ranges[count - 1].lines;
    }
    void operator()(int64_t times = 1) {
        for (int64_t left = times * (total / steps + 1); left > 0 && next < count;) {
            Range& range = ranges[next];
            const int64_t n = min64(left, range.lines);
            for (int64_t i = 0; i < n; ++i) __builtin_prefetch(range.at + i * LINE, 0, 2);
            range.at += n * LINE, range.lines -= n, left -= n;
            if (!range.lines) ++next;
        }
    }

  private:
    static constexpr int MOST = 24;
    static constexpr int64_t LINE = 64, LARGE = 64 << 10;  // what is larger would be gone again when it is read
    struct Range {
        const char* at;
        int64_t lines;
    };
    Range ranges[MOST];
    int count = 0, next = 0;
    int64_t steps, total = 0;
};

// The same for rows anywhere in memory, which a loop reads in turn: those that come so many rows later.
constexpr int64_t ROWS_AHEAD = 16;
inline void prefetch_row(const void* row, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(row) + i);
}

// `steps` steps of a chain over the weights w, from their first on.
template <class W>
struct Steps {
    W w;
    int64_t steps;
};
template <class W>
Steps(W, int64_t) -> Steps<W>;

template <class Out, class W>
void few_rows_product(const float* x, int64_t ldx, int64_t m, int64_t panels, float* c, int64_t ldc, Out out, const Steps<W>& part) {
    for (int64_t p = 0; p < panels;) {
        const Bf16Panels direct{part.w.row(p, 0), part.w.inputs * 16};
        const Accumulators to{c + p * 16, ldc, 16};
        if (panels - p >= FEW_PANELS) {
            sweep<FEW_ROWS, FEW_PANELS, ANY_STRIDE>(x, ldx, m, direct, part.steps, to, true, out);
            p += FEW_PANELS;
        } else {
            sweep<FEW_ROWS, 1, ANY_STRIDE>(x, ldx, m, direct, part.steps, to, true, out);
            ++p;
        }
    }
}

// out(c[i][16p..], chain from +0.0 over the steps of all parts, in order, of fma(x[i][k], w[p][k], .)) for m <= ROW_BLOCK rows and
// `panels` panels; x: FP32, column k of a row belongs to step k of the whole chain.
template <class Out, class... W>
void product(const float* x, int64_t ldx, int64_t m, int64_t panels, float* c, int64_t ldc, Out out, Prefetch& prefetch,
             const Steps<W>&... parts) {
    const int64_t steps = (parts.steps + ...);
    if (steps > K_BLOCK) {
        constexpr bool in_place = std::is_same_v<Out, Stored>;
        const int64_t ld = in_place ? ldc : panels * 16;
        float* sums = in_place ? c : scratch<LONG_RESULTS>(m * ld);
        int64_t k = 0;
        ((chain(Rows{x + k, ldx, true}, 0, m, parts.w, 0, panels, 0, parts.steps, sums, ld, k > 0), k += parts.steps), ...);
        if constexpr (!in_place)
            for (int64_t i = 0; i < m; ++i)
                for (int64_t n = 0; n < ld; n += 16) out(c + i * ldc + n, load(sums + i * ld + n));
        return;
    }
    const bool few = m <= FEW_ROWS;
    if constexpr (sizeof...(W) == 1 && (W::DIRECT && ...))
        if (few) return few_rows_product(x, ldx, m, panels, c, ldc, out, parts...);
    float* wide = scratch<CONVERTED_WEIGHTS>(FEW_PANELS * K_BLOCK * 16);
    for (int64_t p = 0; p < panels;) {
        const int64_t wanted = few ? FEW_PANELS : TILE_PANELS, count = panels - p >= wanted ? wanted : 1;
        for (int64_t q = 0; q < count; ++q) {
            float* at = wide + q * K_BLOCK * 16;
            ((parts.w.convert(p + q, 0, parts.steps, at), at += parts.steps * 16), ...);
        }
        const FloatPanels source{wide, K_BLOCK * 16, 16};
        const Accumulators to{c + p * 16, ldc, 16};
        if (count == 1) sweep<TILE_ROWS, 1, ANY_STRIDE>(x, ldx, m, source, steps, to, true, out);
        else if (few) sweep<FEW_ROWS, FEW_PANELS, ANY_STRIDE>(x, ldx, m, source, steps, to, true, out);
        else sweep<TILE_ROWS, TILE_PANELS, ANY_STRIDE>(x, ldx, m, source, steps, to, true, out);
        p += count;
        prefetch();
    }
}

}  // namespace zm
