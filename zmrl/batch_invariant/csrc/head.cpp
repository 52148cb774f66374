// Log-probabilities of a logits row at a temperature, the row's entropy and digest; forward and backward. A row is read in
// two passes: maximum (and digest), then exponentials. A NaN in the row makes every result of the row NaN.
// The kernels return the number of threads used, or a Status.
#include "blocks.h"
#include "math.h"
#include "mix64.h"
#include "row.h"

using namespace zm;

namespace {

constexpr int64_t PIECE = 2048;  // elements that stay in the L1 cache between maximum and digest

// Lanes i..i+15 of a row; lanes beyond it are -inf, which adds exp(-inf) = +0.0 to a sum.
inline f16 load_or_minus_infinity(const float* p, int64_t i, int64_t n) {
    if (i + LANES <= n) return load(p + i);
    float t[LANES];
    for (int j = 0; j < LANES; ++j) t[j] = i + j < n ? p[i + j] : -INFINITY;
    return load(t);
}

// z = logit / temperature. x / 1 = x, so dividing is skipped there.
struct Scaled {
    const float* logits;
    int64_t n;
    float temperature;
    f16 at(int64_t i) const {
        f16 x = load_or_minus_infinity(logits, i, n);
        return temperature == 1.0f ? x : div(x, set1(temperature));
    }
};

struct RowSum {
    float max, sum, log_sum;  // of z; sum = lanes(exp(z - max))
    float moment;             // lanes(exp(z - max) * (z - max)), terms whose exponential is 0 being 0
};

float row_max(const float* logits, int64_t n, uint64_t* digest) {
    f16 largest = set1(-INFINITY);
    uint64_t sum = 0;
    for (int64_t begin = 0; begin < n; begin += PIECE) {
        const int64_t end = begin + PIECE < n ? begin + PIECE : n;
        for (int64_t i = begin; i < end; i += LANES) largest = max(load_or_minus_infinity(logits, i, end), largest);
        if (digest) sum += digest_terms(begin, end - begin, [=](int64_t j) { return uint64_t(float_to_bits(logits[begin + j])); });
    }
    if (digest) *digest = sum;
    return max_lanes(largest);
}

// Division by a temperature is monotonic, so the largest z is the largest logit divided.
RowSum row_sum(const Scaled& row, uint64_t* digest) {
    RowSum out;
    out.max = row_max(row.logits, row.n, digest) / row.temperature;
    const f16 m = set1(out.max);
    f16 sum = zero(), moment = zero();
    for (int64_t i = 0; i < row.n; i += LANES) {
        f16 d = sub(row.at(i), m), e = exp(d);
        sum = add(sum, e);
        moment = fma(e, select_lt(zero(), e, d, zero()), moment);
    }
    out.sum = sum_lanes(sum);
    out.moment = sum_lanes(moment);
    out.log_sum = log1(out.sum);
    return out;
}

inline float canonical(float x) { return x == x ? x : bits_to_float(0x7fc00000u); }

bool temperatures_positive(const float* temperature, int64_t rows) {
    for (int64_t t = 0; t < rows; ++t)
        if (!(temperature[t] > 0.0f) || temperature[t] == INFINITY) return false;
    return true;
}

bool targets_in_row(const int64_t* targets, int64_t rows, int64_t n) {
    for (int64_t t = 0; t < rows; ++t)
        if (targets[t] < 0 || targets[t] >= n) return false;
    return true;
}

enum Status : int64_t { BAD_TEMPERATURE = -1, BAD_TARGET = -2 };

}  // namespace

// z = logits/temperature; m = max z; logp = (z[target] - m) - log(lanes(exp(z-m))); entropy = log(sum) -
// lanes(exp(z-m)*(z-m))/sum; digest: sum over i of mix64(i, bits of logits[i]).
ZM_API int64_t zm_log_probs(const float* logits, int64_t stride, const int64_t* targets, const float* temperature,
                            float* logp, float* entropy, uint64_t* digest, int64_t rows, int64_t n, int64_t threads) {
    if (!temperatures_positive(temperature, rows)) return BAD_TEMPERATURE;
    if (!targets_in_row(targets, rows, n)) return BAD_TARGET;
    return parallel_blocks(rows, n * 40, int(threads), [&](int64_t t) {
        const Scaled row{logits + t * stride, n, temperature[t]};
        const RowSum s = row_sum(row, digest + t);
        logp[t] = canonical((row.logits[targets[t]] / row.temperature - s.max) - s.log_sum);
        entropy[t] = canonical(s.log_sum - s.moment / s.sum);
    });
}

// The whole row of zm_log_probs: out[i] = (z[i] - m) - log(sum). out [rows, n] contiguous.
ZM_API int64_t zm_log_softmax(const float* logits, int64_t stride, const float* temperature, float* out, int64_t rows,
                              int64_t n, int64_t threads) {
    if (!temperatures_positive(temperature, rows)) return BAD_TEMPERATURE;
    return parallel_blocks(rows, n * 45, int(threads), [&](int64_t t) {
        const Scaled row{logits + t * stride, n, temperature[t]};
        const RowSum s = row_sum(row, nullptr);
        const f16 m = set1(s.max), log_sum = set1(s.log_sum), nan = set1(bits_to_float(0x7fc00000u));
        for (int64_t i = 0; i < n; i += LANES) {
            f16 y = sub(sub(row.at(i), m), log_sum);
            row_store(out + t * n, i, n, select_nan(y, nan, y));
        }
    });
}

// l = (z-m) - log(sum), p = exp(z-m) * (1/sum), g = dlogp/temperature, h = dentropy/temperature (dentropy may be null: 0):
// dlogits[i] = p * -(g + h*(l + entropy)) + (i == target ? g : 0), terms with p = 0 being 0.
ZM_API int64_t zm_log_probs_backward(const float* logits, int64_t stride, const int64_t* targets, const float* temperature,
                                     const float* dlogp, const float* dentropy, float* dlogits, int64_t rows, int64_t n,
                                     int64_t threads) {
    if (!temperatures_positive(temperature, rows)) return BAD_TEMPERATURE;
    if (!targets_in_row(targets, rows, n)) return BAD_TARGET;
    return parallel_blocks(rows, n * 75, int(threads), [&](int64_t t) {
        const Scaled row{logits + t * stride, n, temperature[t]};
        const RowSum s = row_sum(row, nullptr);
        const float g = dlogp[t] / row.temperature, h = dentropy ? dentropy[t] / row.temperature : 0.0f;
        const f16 m = set1(s.max), inverse = set1(1.0f / s.sum), minus_h = set1(-h);
        const f16 shift = set1(s.moment / s.sum), minus_g = set1(-g);  // l + entropy = (z-m) - moment/sum
        float* to = dlogits + t * n;
        for (int64_t i = 0; i < n; i += LANES) {
            f16 d = sub(row.at(i), m), p = mul(exp(d), inverse);
            f16 factor = fma(minus_h, sub(select_lt(zero(), p, d, zero()), shift), minus_g);
            row_store(to, i, n, mul(p, factor));
        }
        to[targets[t]] += g;
    });
}
