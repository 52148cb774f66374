// exp, log, tanh, sigmoid and softplus over 16 lanes: one code path for body and tail, explicit FMA. Largest error against
// float64 over the whole range: exp, log and tanh 2 ulp, sigmoid and softplus 2.5 ulp
// (tests/batch_invariant/test_elementary.py measures it).
#pragma once
#include "vec.h"

namespace zm {

// p * 2^n, rounded once; p in [0.5, 2), n integral in [-151, 128].
inline f16 times_exp2(f16 p, f16 n) {
#if defined(__AVX512F__)
    return {_mm512_scalef_ps(p.v, n.v)};
#else
    const f16 magic = set1(12582912.0f);
    f16 half = sub(fma(n, set1(0.5f), magic), magic);  // n = half + rest, each a normal exponent
    return mul(mul(p, exp2i(half)), exp2i(sub(n, half)));
#endif
}

// exp(x): 2^n * P(r), r = x - n ln 2 in [-ln2/2, ln2/2]. inf above 88.7229, +0 below -104, denormals kept.
inline f16 exp(f16 x) {
    f16 lo = set1(-104.0f), hi = set1(88.8f), c = x;
#if defined(__AVX512F__)
    constexpr bool plain = false;  // times_exp2 is one instruction
#else
    const bool plain = all_lt(abs(x), set1(80.0f));  // the usual case: 2^n is normal, and so is the result; no lane is NaN
#endif
    if (!plain) c = max(min(x, hi), lo);  // NaN becomes hi here and is restored at the end
    const f16 magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    f16 n = sub(fma(c, set1(1.44269504088896341f), magic), magic);
    f16 r = fma(n, set1(-0.693359375f), c);
    r = fma(n, set1(2.12194440e-4f), r);
    f16 p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, set1(1.0f)));
    if (plain) return mul(p, exp2i(n));
    f16 y = select_lt(x, lo, zero(), times_exp2(p, n));
    return select_nan(x, x, y);
}

// log(x) of the natural base; -inf at 0, NaN below, inf at inf.
inline f16 log(f16 x) {
    const f16 tiny = set1(1.17549435e-38f);
    f16 small = mul(x, set1(8388608.0f));
    f16 m, e;
    frexp(select_lt(x, tiny, small, x), m, e);
    e = select_lt(x, tiny, sub(e, set1(23.0f)), e);
    const f16 root_half = set1(0.707106781186547524f);
    e = select_lt(m, root_half, sub(e, set1(1.0f)), e);
    m = sub(select_lt(m, root_half, add(m, m), m), set1(1.0f));
    f16 z = mul(m, m);
    f16 p = set1(7.0376836292e-2f);
    p = fma(p, m, set1(-1.1514610310e-1f));
    p = fma(p, m, set1(1.1676998740e-1f));
    p = fma(p, m, set1(-1.2420140846e-1f));
    p = fma(p, m, set1(1.4249322787e-1f));
    p = fma(p, m, set1(-1.6668057665e-1f));
    p = fma(p, m, set1(2.0000714765e-1f));
    p = fma(p, m, set1(-2.4999993993e-1f));
    p = fma(p, m, set1(3.3333331174e-1f));
    f16 y = mul(mul(m, z), p);
    y = fma(e, set1(-2.12194440e-4f), y);
    y = fma(z, set1(-0.5f), y);
    y = fma(e, set1(0.693359375f), add(m, y));
    const float inf = INFINITY;
    y = select_lt(set1(3.402823466e38f), x, set1(inf), y);
    y = select_lt(zero(), x, y, set1(-inf));
    y = select_lt(x, zero(), set1(NAN), y);
    return select_nan(x, x, y);
}

// e = exp(-|x|); 1 / (1 + e) for x >= 0, e / (1 + e) below: accurate down to the last denormal.
inline f16 sigmoid(f16 x) {
    f16 e = exp(sub(zero(), abs(x)));
    return div(select_lt(x, zero(), e, set1(1.0f)), add(set1(1.0f), e));
}

// tanh(x): polynomial below 0.625, 1 - 2 / (exp(2|x|) + 1) above.
inline f16 tanh(f16 x) {
    f16 a = abs(x);
    f16 z = mul(x, x);
    f16 p = set1(-5.70498872745e-3f);
    p = fma(p, z, set1(2.06390887954e-2f));
    p = fma(p, z, set1(-5.37397155531e-2f));
    p = fma(p, z, set1(1.33314422036e-1f));
    p = fma(p, z, set1(-3.33332819422e-1f));
    f16 small = fma(mul(p, z), x, x);
    if (all_lt(a, set1(0.625f))) return copysign(small, x);  // the usual case of a small argument; no lane is NaN
    f16 large = sub(set1(1.0f), div(set1(2.0f), add(exp(add(a, a)), set1(1.0f))));
    f16 y = copysign(select_lt(a, set1(0.625f), small, large), x);  // of small too: fma gives +0 for -0
    return select_nan(x, x, y);
}

// log(1 + exp(x)) = max(x, 0) + log1p(e), e = exp(-|x|). With s = fl(1 + e), e - (s - 1) is the exact error of that addition,
// and log1p(e) = log(s) + (e - (s - 1)) / s to first order: accurate down to the last denormal, and for any x above 0 too.
inline f16 softplus(f16 x) {
    const f16 one = set1(1.0f);
    f16 e = exp(sub(zero(), abs(x))), s = add(one, e);
    f16 tail = add(log(s), div(sub(e, sub(s, one)), s));
    return select_nan(x, x, add(max(x, zero()), tail));
}

inline float exp1(float x) { float t[LANES]; store(t, exp(set1(x))); return t[0]; }
inline float log1(float x) { float t[LANES]; store(t, log(set1(x))); return t[0]; }
inline float sigmoid1(float x) { float t[LANES]; store(t, sigmoid(set1(x))); return t[0]; }

}  // namespace zm
