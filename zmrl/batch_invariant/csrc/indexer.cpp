// The DSA indexer: index keys in pages, scores, and the exact top-k. Definitions and order: docs/operators.md, numerics.md.
#include <array>
#include <memory>
#include <vector>

#include "index_key.h"
#include "norm.h"
#include "paged.h"
#include "parallel.h"
#include "product.h"

using namespace zm;

namespace {

constexpr int64_t BLOCK = 64;         // positions decoded at once
constexpr int64_t TOKENS = 8;         // tokens of one request that share the decoded keys
constexpr int64_t CHUNK_KEYS = 1 << 23;  // ranking keys held at once
constexpr int64_t SPLIT = 4096;       // positions per item where there are too few tokens for the threads
constexpr int64_t LARGEST_D = 4096;
constexpr uint8_t NOTHING[LARGEST_D] = {0};  // codes, or scales, of the key of no position
#if defined(__AVX512F__)
constexpr int HEADS = 4;  // heads multiplied at once
#else
constexpr int HEADS = 1;
#endif

// Walsh-Hadamard transform: butterflies (a + b, a - b) at distance 1, 2, 4, ..., then times `scale`.
void hadamard(float* x, int64_t d, float scale) {
    for (int64_t half = 1; half < d; half *= 2)
        for (int64_t i = 0; i < d; i += 2 * half)
            for (int64_t j = i; j < i + half; ++j) {
                const float a = x[j], b = x[j + half];
                x[j] = a + b;
                x[j + half] = a - b;
            }
    for (int64_t i = 0; i < d; ++i) x[i] = x[i] * scale;
}

// Lanes of rule 5 in the order in which the halving tree adds them: four lanes give one value, four values the sum.
constexpr int TREE[4][4] = {{0, 8, 4, 12}, {2, 10, 6, 14}, {1, 9, 5, 13}, {3, 11, 7, 15}};

// dot[h]: lanes(q[h] . k) for sixteen keys, one per vector lane. k: [d][16], q: [H][d], d a multiple of 16.
template <int H>
inline void dots(const float* k, const float* q, int64_t d, f16* dot) {
    f16 part[4][H];
    for (int c = 0; c < 4; ++c) {
        f16 acc[H][4];
        for (int h = 0; h < H; ++h)
            for (int l = 0; l < 4; ++l) acc[h][l] = zero();
        for (int64_t i = 0; i < d; i += LANES)
            for (int l = 0; l < 4; ++l) {
                const f16 x = load(k + (i + TREE[c][l]) * LANES);
                for (int h = 0; h < H; ++h) acc[h][l] = fma(set1(q[h * d + i + TREE[c][l]]), x, acc[h][l]);
            }
        for (int h = 0; h < H; ++h) part[c][h] = add(add(acc[h][0], acc[h][1]), add(acc[h][2], acc[h][3]));
    }
    for (int h = 0; h < H; ++h) dot[h] = add(add(part[0][h], part[1][h]), add(part[2][h], part[3][h]));
}

// total[v] continues its chain over heads h0..h0+H: fma(w[h], relu(dot), total); relu keeps NaN.
template <int H>
inline void score_heads(const float* keys, int64_t vectors, const float* q, const float* w, int64_t d, f16* total) {
    for (int64_t v = 0; v < vectors; ++v) {
        f16 dot[H];
        dots<H>(keys + v * LANES * d, q, d, dot);
        for (int h = 0; h < H; ++h) total[v] = fma(set1(w[h]), select_lt(dot[h], zero(), zero(), dot[h]), total[v]);
    }
}

struct Index {
    const bf16* q;
    int64_t q_stride;
    const float* w;
    int64_t w_stride, heads, d;
    IndexKey key;
    bool rotate;
    float root_d, root_heads;  // d^-0.5, heads^-0.5
    Pages pages;
    const int32_t* positions;
    int64_t topk;

    int64_t padded() const { return ceil16(d) * 16; }

    // Query vectors [heads][padded] as the values of their codes, and the weights with every scale folded in.
    void prepare(int64_t t, float* values, float* weights) const {
        uint8_t* codes = reinterpret_cast<uint8_t*>(values + heads * padded());  // `padded` floats of room
        uint8_t* scales = codes + key.code_bytes();
        for (int64_t h = 0; h < heads; ++h) {
            float* x = values + h * padded();
            for (int64_t i = 0; i < padded(); ++i) x[i] = i < d ? to_float(q[t * q_stride + h * d + i]) : 0.0f;
            if (rotate) hadamard(x, d, root_d);
            key.encode(x, codes, scales);
            const float scale = key.decode(codes, scales, x);
            weights[h] = ((w[t * w_stride + h] * scale) * root_d) * root_heads;
        }
    }

    // Ranking keys of positions begin..end (begin a multiple of BLOCK) for tokens t0..t0+m of one request; those that take all
    // their positions are left out. keys: rows of `stride`, the first for t0. False if the block table ends too early.
    bool score(int64_t request, int64_t t0, int64_t m, int64_t begin, int64_t end, uint16_t* keys, int64_t stride) const {
        const int64_t n = padded(), per_token = heads * n;
        float* values = scratch<FIRST_OWN_TAG>(m * (per_token + heads) + n + BLOCK * n + BLOCK);
        float *weights = values + m * per_token + n, *decoded = weights + m * heads, *scales = decoded + BLOCK * n;
        int64_t last = -1;
        for (int64_t i = 0; i < m; ++i) {
            if (positions[t0 + i] < std::max(topk, begin)) continue;
            prepare(t0 + i, values + i * per_token, weights + i * heads);
            last = std::max<int64_t>(last, positions[t0 + i]);
        }
        Pages::Cursor cursor = pages.cursor(request);
        const int64_t stop = std::min(end, last + 1);
        if (stop > begin) bytes_read[INDEX_KEYS] += (stop - begin) * (key.code_bytes() + key.scale_bytes());
        for (int64_t p = begin; p < stop; p += BLOCK) {
            const int64_t vectors = ceil16(std::min(BLOCK, last + 1 - p));
            for (int64_t v = 0; v < vectors; ++v) {
                const uint8_t *codes[LANES], *scale_at[LANES];
                for (int64_t j = 0; j < LANES; ++j) {
                    const int64_t position = p + v * LANES + j;
                    codes[j] = scale_at[j] = NOTHING;
                    if (position > last) continue;
                    if (!(codes[j] = cursor.at(position, key.code_bytes()))) return false;
                    scale_at[j] = key.scales(cursor.block, pages.block_size, position - cursor.first);
                }
                key.decode_transposed(codes, scale_at, decoded + v * LANES * n, scales + v * LANES);
            }
            for (int64_t i = 0; i < m; ++i) {
                if (positions[t0 + i] < topk || positions[t0 + i] < p) continue;
                const float *x = values + i * per_token, *wt = weights + i * heads;
                f16 total[BLOCK / LANES];
                for (int64_t v = 0; v < vectors; ++v) total[v] = zero();
                int64_t h = 0;
                for (; h + HEADS <= heads; h += HEADS) score_heads<HEADS>(decoded, vectors, x + h * n, wt + h, n, total);
                for (; h < heads; ++h) score_heads<1>(decoded, vectors, x + h * n, wt + h, n, total);
                uint16_t* out = keys + i * stride + p;
                for (int64_t v = 0; v < vectors; ++v) rank(mul(load(scales + v * LANES), total[v]), out + v * LANES);
            }
        }
        return true;
    }

    // Order-preserving keys of BF16 scores: -0 is +0; NaN is 0, below -infinity.
    static void rank(f16 scores, uint16_t* keys) {
        store_bf16(keys, scores);
        for (int i = 0; i < LANES; ++i) {
            const uint16_t b = keys[i], sign = b >> 15, rest = b & 0x7fff;
            const uint16_t key = sign && rest ? uint16_t(~b) : uint16_t(rest | 0x8000);
            keys[i] = rest > 0x7f80 ? 0 : key;
        }
    }

    // out[topk]: the selection of token t. Returns whether a score is NaN.
    bool pick(int64_t t, const uint16_t* keys, int32_t* out) const {
        const int64_t n = positions[t] + 1;
        if (n <= topk) {
            for (int64_t i = 0; i < topk; ++i) out[i] = i < n ? int32_t(i) : -1;
            return false;
        }
        uint32_t count[4][256];  // four histograms, so that equal keys do not wait for each other
        // The byte of the topk-th largest key among those that `use` admits; `wanted` becomes its rank inside that byte.
        auto select_byte = [&](int64_t& wanted, auto use) {
            std::memset(count, 0, sizeof count);
            for (int64_t i = 0; i < n; ++i) use(keys[i], count[i & 3]);
            for (int byte = 255;; --byte) {
                const int64_t here = int64_t(count[0][byte]) + count[1][byte] + count[2][byte] + count[3][byte];
                if (wanted <= here) return uint32_t(byte);
                wanted -= here;
            }
        };
        int64_t wanted = topk;
        bool nan = false;
        const uint32_t high = select_byte(wanted, [&](uint16_t key, uint32_t* c) {
            ++c[key >> 8];
            nan |= key == 0;
        });
        const uint32_t low = select_byte(wanted, [&](uint16_t key, uint32_t* c) { c[key & 255] += key >> 8 == high; });
        const uint16_t cut = uint16_t(high << 8 | low);
        int64_t ties = wanted;  // positions with the key `cut` that are still to be taken
        for (int64_t i = 0, filled = 0; filled < topk; ++i) {
            const bool equal = keys[i] == cut, take = keys[i] > cut || (equal && ties > 0);
            ties -= equal;
            out[filled] = int32_t(i);
            filled += take;
        }
        return nan;
    }
};

}  // namespace

// pages[slot] = layer_norm of k[t] [tokens, d] in an IndexFormat, for slot >= 0; ln_w, ln_b [d] FP32 (ln_fp32) or BF16.
// Returns the number of threads, or -1 - the first token whose slot lies outside the pages.
ZM_API int64_t zm_index_store(const bf16* k, int64_t k_stride, int64_t tokens, int64_t d, const void* ln_w, const void* ln_b,
                              int64_t ln_fp32, float eps, int64_t rotate, float root_d, int64_t format, uint8_t* pages,
                              int64_t page_stride, int64_t num_blocks, const int64_t* slot_mapping, int64_t block_size,
                              int64_t threads) {
    for (int64_t t = 0; t < tokens; ++t)
        if (slot_mapping[t] < -1 || slot_mapping[t] >= num_blocks * block_size) return -1 - t;
    const IndexKey key{format, d};
    const int64_t tile = 16;
    const int workers = threads_for(tokens * d * 32, int(threads));
    parallel_for((tokens + tile - 1) / tile, workers, [&](int64_t item) {
        float *x = scratch<FIRST_OWN_TAG>(3 * d), *w = x + d, *b = w + d;
        for (int64_t i = 0; i < d; ++i) {
            w[i] = ln_fp32 ? static_cast<const float*>(ln_w)[i] : to_float(static_cast<const bf16*>(ln_w)[i]);
            b[i] = ln_fp32 ? static_cast<const float*>(ln_b)[i] : to_float(static_cast<const bf16*>(ln_b)[i]);
        }
        for (int64_t t = item * tile; t < std::min(tokens, (item + 1) * tile); ++t) {
            if (slot_mapping[t] < 0) continue;
            uint8_t* page = pages + slot_mapping[t] / block_size * page_stride;
            const int64_t place = slot_mapping[t] % block_size;
            layer_norm_row(k + t * k_stride, w, b, x, d, eps);
            if (rotate) hadamard(x, d, root_d);
            key.encode(x, page + place * key.code_bytes(), key.scales(page, block_size, place));
        }
    });
    return workers;
}

// out [tokens, topk] int32, contiguous. flags [tokens] or null: set to 1 where a ranked score is NaN. Returns Status::result.
ZM_API int64_t zm_index_select(const bf16* q, int64_t q_stride, int64_t tokens, int64_t heads, int64_t d, const float* w,
                               int64_t w_stride, int64_t rotate, float root_d, float root_heads, int64_t format,
                               const uint8_t* pages, int64_t page_stride, int64_t num_blocks, const int32_t* block_table,
                               int64_t table_stride, int64_t columns, int64_t block_size, const int32_t* cu, int64_t requests,
                               const int32_t* positions, int64_t topk, int32_t* flags, int32_t* out, int64_t threads) {
    const Pages cache{pages, page_stride, num_blocks, block_table, table_stride, columns, block_size};
    const Index index{q, q_stride, w, w_stride, heads, d, {format, d}, rotate != 0, root_d, root_heads, cache, positions, topk};
    Status status;
    if (!valid_sequences(cu, requests, tokens)) status.fail(BAD_SEQUENCES, 0);
    int64_t longest = 0, scored = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        if (positions[t] < 0) status.fail(BAD_POSITION, t);
        if (positions[t] >= topk) {
            longest = std::max<int64_t>(longest, positions[t] + 1);
            scored += positions[t] + 1;
        }
    }
    if (status.failed()) return status.result(0);
    const int64_t stride = (longest + BLOCK - 1) / BLOCK * BLOCK;
    const int64_t chunk = std::max<int64_t>(TOKENS, CHUNK_KEYS / std::max<int64_t>(1, stride));
    const std::unique_ptr<uint16_t[]> keys(new uint16_t[size_t(std::min(chunk, tokens) * stride)]);
    const int workers = threads_for(scored * heads * d * 2 + tokens * topk, int(threads));

    for (int64_t c0 = 0; c0 < tokens; c0 += chunk) {
        const int64_t c1 = std::min(tokens, c0 + chunk);
        std::vector<std::array<int64_t, 3>> tiles;  // request, first token, tokens
        for (int64_t t = c0, r = request_of(cu, requests, c0); t < c1;) {
            while (t >= cu[r + 1]) ++r;
            const int64_t m = std::min({TOKENS, c1 - t, cu[r + 1] - t});
            tiles.push_back({r, t, m});
            t += m;
        }
        auto score = [&](const std::array<int64_t, 3>& tile, int64_t begin, int64_t end) {
            const auto [r, t, m] = tile;
            if (!index.score(r, t, m, begin, end, keys.get() + (t - c0) * stride, stride)) status.fail(BAD_BLOCK, t);
        };
        auto pick = [&](int64_t t) {
            if (index.pick(t, keys.get() + (t - c0) * stride, out + t * topk) && flags) flags[t] = 1;
        };
        const int64_t count = int64_t(tiles.size());
        if (count < 2 * workers && longest > SPLIT) {  // few tokens, long contexts: positions are shared out as well
            const int64_t splits = (longest + SPLIT - 1) / SPLIT;
            parallel_for(count * splits, workers, [&](int64_t i) {
                const int64_t begin = i % splits * SPLIT;
                score(tiles[i / splits], begin, begin + SPLIT);
            });
            if (status.failed()) return status.result(0);
            parallel_for(c1 - c0, workers, [&](int64_t i) { pick(c0 + i); });
        } else {
            parallel_for(count, workers, [&](int64_t i) {
                score(tiles[i], 0, longest);
                if (status.failed()) return;
                for (int64_t t = tiles[i][1]; t < tiles[i][1] + tiles[i][2]; ++t) pick(t);
            });
            if (status.failed()) return status.result(0);
        }
    }
    return workers;
}

// keys [tokens, stride], stride a multiple of BLOCK: the ranking keys of positions 0..counts[t] of a request's pages, for ranks that
// choose together (candidates.cpp); what follows them in the row is undefined. Returns Status::result.
ZM_API int64_t zm_index_keys(const bf16* q, int64_t q_stride, int64_t tokens, int64_t heads, int64_t d, const float* w,
                             int64_t w_stride, int64_t rotate, float root_d, float root_heads, int64_t format,
                             const uint8_t* pages, int64_t page_stride, int64_t num_blocks, const int32_t* block_table,
                             int64_t table_stride, int64_t columns, int64_t block_size, const int32_t* cu, int64_t requests,
                             const int32_t* counts, uint16_t* keys, int64_t stride, int64_t threads) {
    const Pages cache{pages, page_stride, num_blocks, block_table, table_stride, columns, block_size};
    Status status;
    if (!valid_sequences(cu, requests, tokens)) status.fail(BAD_SEQUENCES, 0);
    const std::unique_ptr<int32_t[]> last(new int32_t[size_t(tokens)]);
    int64_t longest = 0, scored = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        if (counts[t] < 0 || counts[t] > stride || stride % BLOCK) status.fail(BAD_POSITION, t);
        last[t] = counts[t] - 1;
        longest = std::max<int64_t>(longest, counts[t]);
        scored += counts[t];
    }
    if (status.failed()) return status.result(0);
    const Index index{q, q_stride, w, w_stride, heads, d, {format, d}, rotate != 0, root_d, root_heads, cache, last.get(), 0};
    const int64_t splits = (longest + SPLIT - 1) / SPLIT;
    std::vector<std::array<int64_t, 3>> tiles;  // request, first token, tokens
    for (int64_t r = 0; r < requests; ++r)
        for (int64_t t = cu[r]; t < cu[r + 1]; t += TOKENS) tiles.push_back({r, t, std::min<int64_t>(TOKENS, cu[r + 1] - t)});
    const int workers = threads_for(scored * heads * d * 2, int(threads));
    parallel_for(int64_t(tiles.size()) * splits, workers, [&](int64_t i) {
        const auto [r, t, m] = tiles[size_t(i / splits)];
        const int64_t begin = i % splits * SPLIT;
        if (!index.score(r, t, m, begin, begin + SPLIT, keys + t * stride, stride)) status.fail(BAD_BLOCK, t);
    });
    return status.result(workers);
}
