// The matrix product of every kernel: C[m][n] = chain of fma(x[m][k], w[k][n], .) in FP32 over ascending k (numerics.md rules 1, 2).
//
// A chain is continued by storing and reloading its FP32 accumulator, which is exact; so blocking over k, the tile's size
// (which differs between instruction sets), the row's place in a tile and the share of a thread never change a bit.
#pragma once
#include <cstdlib>
#include <new>

#include "panels.h"

namespace zm {

constexpr int64_t K_BLOCK = 256;           // chain steps per block: two FP32 panels of it fit the first-level cache
constexpr int64_t ROW_BLOCK = 96;          // rows of x per block
constexpr int64_t X_STRIDE = K_BLOCK + 16;  // floats between rows of a packed block of x (16: no cache set conflicts)
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 12, TILE_PANELS = 2;
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 6, TILE_PANELS = 1;
#else
constexpr int TILE_ROWS = 4, TILE_PANELS = 1;
#endif
constexpr int FEW_ROWS = 4, FEW_PANELS = TILE_PANELS * 2;  // for at most FEW_ROWS rows: more panels at once
// chain() reads BF16 panels directly for at most DIRECT_ROWS rows, in long stretches, which memory delivers faster; so many panels
// at once that their chains hide the latency of an FMA and fit the registers. Up to REREAD_ROWS rows read a block of a BF16 panel once
// per tile, from the first-level cache: on AVX2 a load, a shift and a mask convert it and fit between the FMAs, and an FP32 copy costs
// more (measured up to 24 rows; from 64 on there is no difference).
constexpr int64_t DIRECT_K = 2048, DIRECT_STRIDE = DIRECT_K + 16;
#if defined(__AVX512F__)
constexpr int DIRECT_ROWS = 8, REREAD_ROWS = 0;
constexpr int direct_panels(int rows) { return rows <= 4 ? 4 : 3; }
#else
constexpr int DIRECT_ROWS = 4;
#if defined(__AVX2__)
constexpr int REREAD_ROWS = 24;
#else
constexpr int REREAD_ROWS = 0;
#endif
constexpr int direct_panels(int rows) { return rows == 1 ? 4 : (rows <= 3 ? 2 : 1); }
#endif

// A buffer of the calling thread, one per Tag; it only grows.
template <int Tag>
inline float* scratch(int64_t floats) {
    struct Buffer {
        float* data = nullptr;
        int64_t size = 0;
        ~Buffer() { std::free(data); }
    };
    static thread_local Buffer buffer;
    if (floats > buffer.size) {
        std::free(buffer.data);
        buffer.size = (floats + 1023) / 1024 * 1024;
        buffer.data = static_cast<float*>(std::aligned_alloc(64, size_t(buffer.size) * 4));
        if (!buffer.data) throw std::bad_alloc();
    }
    return buffer.data;
}
enum ScratchTag { PACKED_ROWS, CONVERTED_WEIGHTS, LONG_RESULTS, FIRST_OWN_TAG };

// Rows of x: BF16 or FP32, `stride` elements apart; row i is row index[i] of the data (i where there is no index).
struct Rows {
    const void* data;
    int64_t stride;
    bool fp32;
    const int32_t* index = nullptr;

    // Elements k0..k0+n of row i, as FP32.
    void pack(int64_t i, int64_t k0, int64_t n, float* out) const {
        const int64_t at = row(i) * stride + k0;
        if (fp32) {
            std::memcpy(out, static_cast<const float*>(data) + at, size_t(n) * 4);
            return;
        }
        const bf16* x = static_cast<const bf16*>(data) + at;
        int64_t k = 0;
        for (; k + 16 <= n; k += 16) store(out + k, load_bf16(x + k));
        for (; k < n; ++k) out[k] = to_float(x[k]);
    }
    Rows columns(int64_t first) const {
        Rows r = *this;
        r.data = at(0, first);
        return r;
    }
    int64_t row(int64_t i) const { return index ? index[i] : i; }
    const void* at(int64_t row, int64_t column) const { return static_cast<const char*>(data) + (row * stride + column) * (fp32 ? 4 : 2); }
};

// ---- micro-kernel -----------------------------------------------------------------------------------------------------

// Sources of weights for a tile: 16 outputs of panel p at step k, in any order of lanes, and accumulators in the same order.
struct FloatPanels {  // w[p][k][16], any strides
    const float* data;
    int64_t panel, step;
    f16 operator()(int p, int64_t k) const { return load(data + p * panel + k * step); }
    static f16 take(const float* c) { return load(c); }
    static f16 in_order(f16 acc) { return acc; }
};
struct Bf16Panels {
    const bf16* data;
    int64_t panel;
    f16 operator()(int p, int64_t k) const { return load_bf16_split(data + p * panel + k * 16); }
    static f16 take(const float* c) { return split(load(c)); }
    static f16 in_order(f16 acc) { return join(acc); }
};
struct Accumulators {  // c[row][panel][16], any strides
    float* data;
    int64_t row, panel;
};

// What is done with the sums v of 16 outputs.
struct Stored {
    void operator()(float* c, f16 v) const { store(c, v); }
};
struct Rounded {  // to BF16
    void operator()(float* c, f16 v) const { store(c, round_bf16(v)); }
};
struct Scaled {
    float scale;
    void operator()(float* c, f16 v) const { store(c, mul(set1(scale), v)); }
};
struct Added {  // c = fma(scale, v, c)
    float scale;
    void operator()(float* c, f16 v) const { store(c, fma(set1(scale), v, load(c))); }
};

// R rows times P panels over k steps. XR: elements between rows of x where that is fixed, so that all rows share one pointer, or
// ANY_STRIDE; x_step: elements between chain steps (XR 1) or between rows (ANY_STRIDE).
constexpr int ANY_STRIDE = 0;
template <int R, int P, int XR, class W, class Out>
inline void tile(const float* x, int64_t x_step, W w, int64_t k, Accumulators c, bool first, Out out) {
    constexpr int GROUP = 3;  // rows that share a pointer: x86 adds once or twice a stride to it for free
    const float* rows[(R + GROUP - 1) / GROUP];
    if constexpr (XR == ANY_STRIDE)
#pragma GCC unroll 4
        for (int r = 0; r < R; r += GROUP) rows[r / GROUP] = x + r * x_step;
    const auto element = [&](int r) {
        if constexpr (XR == ANY_STRIDE) return rows[r / GROUP][r % GROUP * x_step];
        else return x[r * XR];
    };
    const int64_t advance = XR == 1 ? x_step : 1;
    f16 acc[R][P];
    float* at = c.data;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r, at += c.row)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) acc[r][p] = first ? zero() : W::take(at + p * c.panel);
#pragma GCC unroll 4
    for (int64_t i = 0; i < k; ++i) {
        f16 wide[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) wide[p] = w(p, i);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const f16 scalar = set1(element(r));
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) acc[r][p] = fma(scalar, wide[p], acc[r][p]);
        }
        if constexpr (XR == ANY_STRIDE)
#pragma GCC unroll 4
            for (int r = 0; r < R; r += GROUP) ++rows[r / GROUP];
        else x += advance;
    }
    at = c.data;
    asm("" : "+r"(c.row), "+r"(c.panel));  // else the compiler keeps every address of the loads for the stores, on the stack
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r, at += c.row)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) out(at + p * c.panel, W::in_order(acc[r][p]));
}

template <int R, int P, int XR, class W, class Out>
inline void tile_of(int64_t rows, const float* x, int64_t x_step, W w, int64_t k, Accumulators c, bool first, Out out) {
    if (rows == R) return tile<R, P, XR>(x, x_step, w, k, c, first, out);
    if constexpr (R > 1) tile_of<R - 1, P, XR>(rows, x, x_step, w, k, c, first, out);
}

// All m rows, in tiles of equal height (no short last tile, which would wait for its few chains).
template <int R, int P, int XR, class W, class Out>
void sweep(const float* x, int64_t x_step, int64_t m, W w, int64_t k, Accumulators c, bool first, Out out) {
    const int64_t tiles = (m + R - 1) / R;
    for (int64_t t = 0, i = 0; t < tiles; ++t) {
        const int64_t end = (t + 1) * m / tiles;
        const float* from = x + i * (XR == ANY_STRIDE ? x_step : XR);
        tile_of<R, P, XR>(end - i, from, x_step, w, k, {c.data + i * c.row, c.row, c.panel}, first, out);
        i = end;
    }
}

// m <= DIRECT_ROWS rows times `panels` BF16 panels over k steps; DIRECT_STRIDE floats between rows of x. R: the most rows.
template <int R>
void direct_rows(const float* x, int64_t m, const Bf16Panels& w, int64_t panels, int64_t k, float* c, int64_t ldc, bool first) {
    if constexpr (R > 1)
        if (m < R) return direct_rows<R - 1>(x, m, w, panels, k, c, ldc, first);
    constexpr int P = direct_panels(R);
    int64_t p = 0;
    for (; p + P <= panels; p += P)
        tile<R, P, DIRECT_STRIDE>(x, 1, Bf16Panels{w.data + p * w.panel, w.panel}, k, {c + p * 16, ldc, 16}, first, Stored{});
    for (; p < panels; ++p)
        tile<R, 1, DIRECT_STRIDE>(x, 1, Bf16Panels{w.data + p * w.panel, w.panel}, k, {c + p * 16, ldc, 16}, first, Stored{});
}

// The sweeps in use, compiled once, in product.cpp.
#define ZM_SWEEP(prefix, R, P, XR, W, Out) \
    prefix template void sweep<R, P, XR, W, Out>(const float*, int64_t, int64_t, W, int64_t, Accumulators, bool, Out);
#define ZM_FLOAT_FORMS(prefix, XR, Out)                  \
    ZM_SWEEP(prefix, TILE_ROWS, 1, XR, FloatPanels, Out) \
    ZM_SWEEP(prefix, FEW_ROWS, FEW_PANELS, XR, FloatPanels, Out)
#define ZM_FORMS(prefix, Out)                                           \
    ZM_FLOAT_FORMS(prefix, ANY_STRIDE, Out)                             \
    ZM_SWEEP(prefix, FEW_ROWS, FEW_PANELS, ANY_STRIDE, Bf16Panels, Out) \
    ZM_SWEEP(prefix, FEW_ROWS, 1, ANY_STRIDE, Bf16Panels, Out)
#define ZM_SWEEPS(prefix)                    \
    ZM_FLOAT_FORMS(prefix, X_STRIDE, Stored) \
    ZM_FORMS(prefix, Stored)                 \
    ZM_FORMS(prefix, Rounded)                \
    ZM_FORMS(prefix, Scaled)                 \
    ZM_FORMS(prefix, Added)                  \
    ZM_SWEEP(prefix, TILE_ROWS, 1, 1, FloatPanels, Stored)
ZM_SWEEPS(extern)
#define ZM_DIRECT_ROWS(prefix) \
    prefix template void direct_rows<DIRECT_ROWS>(const float*, int64_t, const Bf16Panels&, int64_t, int64_t, float*, int64_t, bool);
ZM_DIRECT_ROWS(extern)
#if defined(__AVX512F__)
#define ZM_OWN_SWEEPS(prefix)                                                  \
    ZM_SWEEP(prefix, TILE_ROWS, TILE_PANELS, X_STRIDE, FloatPanels, Stored)    \
    ZM_SWEEP(prefix, TILE_ROWS, TILE_PANELS, ANY_STRIDE, FloatPanels, Stored)  \
    ZM_SWEEP(prefix, TILE_ROWS, TILE_PANELS, ANY_STRIDE, FloatPanels, Rounded) \
    ZM_SWEEP(prefix, TILE_ROWS, TILE_PANELS, ANY_STRIDE, FloatPanels, Scaled)  \
    ZM_SWEEP(prefix, TILE_ROWS, TILE_PANELS, ANY_STRIDE, FloatPanels, Added)   \
    ZM_SWEEP(prefix, TILE_ROWS, TILE_PANELS, 1, FloatPanels, Stored)
ZM_OWN_SWEEPS(extern)
#elif defined(__AVX2__)
#define ZM_OWN_SWEEPS(prefix) ZM_SWEEP(prefix, TILE_ROWS, 1, X_STRIDE, Bf16Panels, Stored)
ZM_OWN_SWEEPS(extern)
#endif

// ---- blocks -----------------------------------------------------------------------------------------------------------

// c[i][16(p-p0)..] = chains over w's steps k0..k0+n (n <= K_BLOCK) for m packed rows; continued unless `first`.
template <class Weights>
void multiply_block(const float* packed, int64_t m, const Weights& w, int64_t p0, int64_t p1, int64_t k0, int64_t n, float* c,
                    int64_t ldc, bool first) {
    const bool few = m <= FEW_ROWS;
    if constexpr (Weights::DIRECT && REREAD_ROWS > 0)
        if (m <= REREAD_ROWS) {
            for (int64_t p = p0; p < p1; ++p) {
                const bf16 *piece = w.row(p, k0), *next = piece + w.inputs * 16;
                for (int64_t i = 0; i < n; i += 2) __builtin_prefetch(next + i * 16);  // this block of the next panel
                sweep<TILE_ROWS, 1, X_STRIDE>(packed, 1, m, Bf16Panels{piece, 0}, n, {c + (p - p0) * 16, ldc, 16}, first, Stored{});
            }
            return;
        }
    float* wide = scratch<CONVERTED_WEIGHTS>(FEW_PANELS * K_BLOCK * 16);
    for (int64_t p = p0; p < p1;) {
        const int64_t wanted = few ? FEW_PANELS : TILE_PANELS, count = p1 - p >= wanted ? wanted : 1;
        for (int64_t q = 0; q < count; ++q) w.convert(p + q, k0, n, wide + q * K_BLOCK * 16);
        const FloatPanels panels{wide, K_BLOCK * 16, 16};
        const Accumulators out{c + (p - p0) * 16, ldc, 16};
        if (count == 1) sweep<TILE_ROWS, 1, X_STRIDE>(packed, 1, m, panels, n, out, first, Stored{});
        else if (few) sweep<FEW_ROWS, FEW_PANELS, X_STRIDE>(packed, 1, m, panels, n, out, first, Stored{});
        else sweep<TILE_ROWS, TILE_PANELS, X_STRIDE>(packed, 1, m, panels, n, out, first, Stored{});
        p += count;
    }
}

// f(packed, k0, n, first): rows i0..i0+m of x in blocks of steps k0..k1; f continues the chains from block to block.
template <class F>
inline void for_blocks(const Rows& x, int64_t i0, int64_t m, int64_t k0, int64_t k1, F f) {
    float* packed = scratch<PACKED_ROWS>(ROW_BLOCK * X_STRIDE);
    for (int64_t k = k0; k < k1; k += K_BLOCK) {
        const int64_t n = min64(K_BLOCK, k1 - k);
        for (int64_t i = 0; i < m; ++i) x.pack(i0 + i, k, n, packed + i * X_STRIDE);
        f(packed, k, n, k == k0);
    }
}

inline void clear(float* c, int64_t ldc, int64_t m, int64_t columns) {
    for (int64_t i = 0; i < m; ++i) std::memset(c + i * ldc, 0, size_t(columns) * 4);
}

// chain() for at most DIRECT_ROWS rows of BF16 panels: bound by how fast the weights come, so each panel is read in one go.
inline void direct_chain(const Rows& x, int64_t i0, int64_t m, const Bf16Weights& w, int64_t p0, int64_t p1, int64_t k0, int64_t k1,
                      float* c, int64_t ldc, bool continued) {
    float* packed = scratch<PACKED_ROWS>(ROW_BLOCK * X_STRIDE);
    static_assert(DIRECT_ROWS * DIRECT_STRIDE <= ROW_BLOCK * X_STRIDE);
    for (int64_t k = k0; k < k1; k += DIRECT_K) {
        const int64_t n = min64(DIRECT_K, k1 - k);
        const bool first = k == k0 && !continued;
        const Bf16Panels panels{w.row(p0, k), w.inputs * 16};
        for (int64_t i = 0; i < m; ++i) x.pack(i0 + i, k, n, packed + i * DIRECT_STRIDE);
        direct_rows<DIRECT_ROWS>(packed, m, panels, p1 - p0, n, c, ldc, first);
    }
}

// c[i][16(p-p0)..] = chain over k0..k1 of fma(x[i0+i][k], w[p][k], .); m <= ROW_BLOCK; from +0.0, or continued from c.
template <class Weights>
void chain(const Rows& x, int64_t i0, int64_t m, const Weights& w, int64_t p0, int64_t p1, int64_t k0, int64_t k1, float* c,
           int64_t ldc, bool continued = false) {
    if (k0 >= k1 && !continued) clear(c, ldc, m, (p1 - p0) * 16);
    if constexpr (Weights::DIRECT)
        if (m <= DIRECT_ROWS && m > 0) return direct_chain(x, i0, m, w, p0, p1, k0, k1, c, ldc, continued);
    for_blocks(x, i0, m, k0, k1, [&](const float* packed, int64_t k, int64_t n, bool first) {
        multiply_block(packed, m, w, p0, p1, k, n, c, ldc, first && !continued);
    });
}

// numerics.md rule 2: `shards` (1 or 8) partial results of `size` floats, part s written by f(s, buffer), combined by the tree
// ((0+1)+(2+3))+((4+5)+(6+7)) in buffers[0..size). `buffers` holds 4 * size floats.
template <class F>
inline void combine_shards(int64_t shards, float* buffers, int64_t size, F f) {
    int64_t top = 0;
    for (int64_t s = 0; s < shards; ++s) {
        f(s, buffers + top++ * size);
        for (int64_t merged = s + 1; merged % 2 == 0; merged /= 2) {
            float* left = buffers + (--top - 1) * size;
            const float* right = left + size;
            for (int64_t i = 0; i < size; i += 16) store(left + i, add(load(left + i), load(right + i)));
        }
    }
}

// Adapter gradients: g[p][row][16] continues its chain over t of fma(x[t][row], w[t][16p..], .), t in 0..m ascending.
// `panel`: floats between the panels of g; x is FP32, rows ldx apart.
inline void accumulate(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t m, int64_t rows, int64_t panels, float* g,
                       int64_t panel) {
    for (int64_t p = 0; p < panels;) {
        const FloatPanels weights{w + p * 16, 16, ldw};
        const Accumulators out{g + p * panel, 16, panel};
        if (panels - p >= TILE_PANELS) {
            sweep<TILE_ROWS, TILE_PANELS, 1>(x, ldx, rows, weights, m, out, false, Stored{});
            p += TILE_PANELS;
        } else {
            sweep<TILE_ROWS, 1, 1>(x, ldx, rows, weights, m, out, false, Stored{});
            ++p;
        }
    }
}

// ---- rows grouped by adapter slot ---------------------------------------------------------------------------------------

struct Run {  // rows begin..end of the grouped order share a slot (-1: no adapter)
    int64_t begin, end, slot;
};

// f(begin, end, slot) for the parts of the runs inside rows i0..i0+m, relative to i0, without those that have no adapter.
template <class Runs, class F>
inline void for_adapters(const Runs& runs, int64_t i0, int64_t m, F f) {
    for (const Run& run : runs) {
        if (run.begin >= i0 + m) break;
        const int64_t begin = run.begin > i0 ? run.begin : i0, end = min64(run.end, i0 + m);
        if (begin < end && run.slot >= 0) f(begin - i0, end - i0, run.slot);
    }
}

}  // namespace zm
