// Gumbel-max sampling with noise from a counter-based hash of (seed, output position, token id): no generator state.
#include "blocks.h"
#include "math.h"
#include "mix64.h"
#include "row.h"

using namespace zm;

namespace {

constexpr int64_t MAX_IDS = 1 << 24;  // ids are kept exactly in FP32 lanes

// One stream of hashes over token ids per (seed, position). Three odd constants keep it apart from the digest's stream.
uint64_t stream_key(int64_t seed, int64_t position) {
    const uint64_t s = splitmix64(uint64_t(seed) + 0xA0761D6478BD642Full);
    return splitmix64(s + (uint64_t(position) + 1) * 0xE7037ED1A0B428DBull);
}
inline uint64_t id_hash(uint64_t key, uint64_t id) { return splitmix64(key + (id + 1) * 0x8EBC6AF09C88C6E3ull); }

// Gumbel noise of ids id..id+15: -log(E), E = -log(1 - v), v = (top 24 bits)*2^-24 + (next 24 bits + 0.5)*2^-48, at most
// 1 - 2^-24. Small v keep 24 significant bits (least: 2^-49), so a token's chance is right down to about 1e-14, where
// a 24-bit uniform would never draw a token below 6e-8. log(1 - v) = log(y) - (v - (1-y))/y with y = 1 - v rounded.
f16 gumbel(uint64_t key, uint64_t id) {
    float high[LANES], low[LANES];
    for (int j = 0; j < LANES; ++j) {
        const uint64_t h = id_hash(key, id + uint64_t(j));
        high[j] = float(int32_t(h >> 40));
        low[j] = float(int32_t((h >> 16) & 0xFFFFFF));
    }
    const f16 one = set1(1.0f), unit = set1(0x1p-24f);
    f16 v = fma(add(load(low), set1(0.5f)), set1(0x1p-48f), mul(load(high), unit));
    v = min(v, sub(one, unit));
    f16 y = sub(one, v);
    f16 e = sub(div(sub(v, sub(one, y)), y), log(y));
    return sub(zero(), log(e));
}

// Largest score and its lowest id. NaN never wins; a row without a score above -inf yields id 0.
struct Best {
    f16 score = set1(-INFINITY), id = zero();
    void offer(f16 s, f16 ids) {
        id = select_lt(score, s, ids, id);
        score = select_lt(score, s, s, score);
    }
    int64_t winner() const {
        float s[LANES], i[LANES];
        store(s, score);
        store(i, id);
        int best = 0;
        for (int j = 1; j < LANES; ++j)
            if (s[j] > s[best] || (s[j] == s[best] && i[j] < i[best])) best = j;
        return int64_t(i[best]);
    }
};

}  // namespace

// token = argmax of logits/temperature + gumbel(seed, position, id), or of the logits where temperature is 0; the lowest id
// wins a tie. Returns the threads used, -1 for a negative, infinite or NaN temperature, -2 for an unsupported row length.
ZM_API int64_t zm_sample(const float* logits, int64_t stride, const float* temperature, const int64_t* seeds,
                         const int64_t* positions, int64_t* tokens, int64_t rows, int64_t n, int64_t threads) {
    if (n < 1 || n > MAX_IDS) return -2;
    for (int64_t t = 0; t < rows; ++t)
        if (!(temperature[t] >= 0.0f) || temperature[t] == INFINITY) return -1;
    return parallel_blocks(rows, n * 80, int(threads), [&](int64_t t) {
        const float* row = logits + t * stride;
        const uint64_t key = stream_key(seeds[t], positions[t]);
        const bool greedy = temperature[t] == 0.0f;
        const f16 divisor = set1(greedy ? 1.0f : temperature[t]), step = set1(float(LANES));
        float first[LANES];
        for (int j = 0; j < LANES; ++j) first[j] = float(j);
        f16 ids = load(first);
        Best best;
        for (int64_t i = 0; i < n; i += LANES, ids = add(ids, step)) {
            f16 x;
            if (i + LANES <= n) {
                x = load(row + i);
            } else {
                float tail[LANES];
                for (int j = 0; j < LANES; ++j) tail[j] = i + j < n ? row[i + j] : -INFINITY;
                x = load(tail);
            }
            best.offer(greedy ? x : add(div(x, divisor), gumbel(key, uint64_t(i))), ids);
        }
        tokens[t] = best.winner();
    });
}
