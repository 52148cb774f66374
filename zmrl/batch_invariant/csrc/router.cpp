// The expert router: sigmoid scores, exact biased top-k, renormalised weights; forward and backward.
#include <cstring>

#include "blocks.h"
#include "math.h"
#include "row.h"

using namespace zm;

namespace {

constexpr int64_t MAX_EXPERTS = 4096, MAX_TOPK = 128;

// The best `k` of a stream of (score, id) with ascending ids, in the order (score descending, id ascending).
struct Best {
    float score[MAX_TOPK];
    int32_t id[MAX_TOPK];
    int64_t count = 0, k;
    explicit Best(int64_t k) : k(k) {}
    bool full() const { return count == k; }
    float worst() const { return score[k - 1]; }
    void insert(float s, int32_t i) {
        if (full() && !(s > worst())) return;
        int64_t at = full() ? k - 1 : count++;
        for (; at > 0 && score[at - 1] < s; --at) {
            score[at] = score[at - 1];
            id[at] = id[at - 1];
        }
        score[at] = s;
        id[at] = i;
    }
};

// Scores of one row and its `topk` ids, ascending. True if a score is NaN; those sort last, among themselves by id.
bool choose(const float* logits, const float* bias, int64_t experts, int64_t topk, float* s, int32_t* ids) {
    Best best(topk);
    bool nan = false;
    float keys[LANES];
    f16 worst = set1(-INFINITY);
    for (int64_t i = 0; i < experts; i += LANES) {
        f16 score = sigmoid(row_load(logits, i, experts)), key = add(score, row_load(bias, i, experts));
        row_store(s, i, experts, score);
        nan |= any_nan(key);
        if (best.full() && !any_lt(worst, key)) continue;
        store(keys, key);
        const int lanes = int(experts - i < LANES ? experts - i : LANES);
        for (int j = 0; j < lanes; ++j)
            if (keys[j] == keys[j]) best.insert(keys[j], int32_t(i + j));
        if (best.full()) worst = set1(best.worst());
    }
    for (int64_t i = 0; !best.full(); ++i)  // too few numbers
        if (s[i] + bias[i] != s[i] + bias[i]) best.id[best.count++] = int32_t(i);
    for (int64_t j = 0; j < topk; ++j) {
        int64_t at = j;
        for (; at > 0 && ids[at - 1] > best.id[j]; --at) ids[at] = ids[at - 1];
        ids[at] = best.id[j];
    }
    return nan;
}

// lanes(s) over the chosen + 1e-20
float denominator(const float* s, int64_t topk) {
    f16 sum = zero();
    for (int64_t j = 0; j < topk; j += LANES) sum = add(sum, row_load(s, j, topk));
    return sum_lanes(sum) + 1e-20f;
}

}  // namespace

// s = sigmoid(logits); ids: the topk of s + bias, ties to the lower id, emitted ascending; weights = (s / (lanes(s) +
// 1e-20)) * scale, lanes over the chosen in that order. flags [rows] may be null. Returns the threads used, -1 for
// unsupported sizes.
ZM_API int64_t zm_router(const float* logits, int64_t stride, const float* bias, int32_t* ids, float* weights, int32_t* flags,
                         int64_t rows, int64_t experts, int64_t topk, float scale, int64_t threads) {
    if (topk < 1 || topk > MAX_TOPK || topk > experts || experts > MAX_EXPERTS) return -1;
    return parallel_blocks(rows, experts * 50, int(threads), [&](int64_t t) {
        float s[MAX_EXPERTS], chosen[MAX_TOPK];
        int32_t* id = ids + t * topk;
        if (choose(logits + t * stride, bias, experts, topk, s, id) && flags) flags[t] = 1;
        for (int64_t j = 0; j < topk; ++j) chosen[j] = s[id[j]];
        const f16 sum = set1(denominator(chosen, topk)), factor = set1(scale);
        for (int64_t j = 0; j < topk; j += LANES)
            row_store(weights + t * topk, j, topk, mul(div(row_load(chosen, j, topk), sum), factor));
    });
}

// sum = lanes(s) + 1e-20, c = lanes(dw * s) / sum; dlogits = (scale * (dw - c) / sum) * (s * (1 - s)), zero where not chosen.
// Returns the threads used, -1 for an unsupported topk, -2 for an id that is no expert.
ZM_API int64_t zm_router_backward(const float* logits, int64_t stride, const int32_t* ids, const float* dweights,
                                  float* dlogits, int64_t rows, int64_t experts, int64_t topk, float scale,
                                  int64_t threads) {
    if (topk < 1 || topk > MAX_TOPK) return -1;
    for (int64_t j = 0; j < rows * topk; ++j)
        if (ids[j] < 0 || ids[j] >= experts) return -2;
    return parallel_blocks(rows, experts + topk * 60, int(threads), [&](int64_t t) {
        const int32_t* id = ids + t * topk;
        const float *row = logits + t * stride, *dw = dweights + t * topk;
        float s[MAX_TOPK] = {0}, out[MAX_TOPK];
        for (int64_t j = 0; j < topk; ++j) s[j] = row[id[j]];
        for (int64_t j = 0; j < topk; j += LANES) row_store(s, j, topk, sigmoid(row_load(s, j, topk)));
        const float sum = denominator(s, topk);
        const f16 total = set1(sum), c = set1(dot_lanes(dw, s, topk) / sum), factor = set1(scale), one = set1(1.0f);
        for (int64_t j = 0; j < topk; j += LANES) {
            f16 sj = row_load(s, j, topk), ds = div(mul(factor, sub(row_load(dw, j, topk), c)), total);
            row_store(out, j, topk, mul(ds, mul(sj, sub(one, sj))));
        }
        float* to = dlogits + t * experts;
        std::memset(to, 0, size_t(experts) * sizeof(float));
        for (int64_t j = 0; j < topk; ++j) to[id[j]] = out[j];
    });
}
