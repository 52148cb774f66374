// SiTU: cap(g, beta)*sigmoid(g) * cap(u, linear_beta), multiplied left to right in FP32, and its derivative.
// cap(x, b) = b*tanh(x/b); an infinite b caps nothing: cap(x, inf) = x. Both infinite: SiLU(g)*u.
#pragma once
#include <cmath>

#include "math.h"

namespace zm {

struct Situ {
    f16 beta, linear_beta, inverse;  // 1 / beta where that is exact: a power of two
    bool capped, linear_capped, exact;

    Situ(float b, float lb) : beta(set1(b)), linear_beta(set1(lb)), capped(!std::isinf(b)), linear_capped(!std::isinf(lb)) {
        int exponent = 0;
        exact = std::frexp(b, &exponent) == 0.5f && std::abs(exponent) < 100;
        inverse = set1(exact ? 1.0f / b : 0.0f);
    }
    f16 over_beta(f16 x) const { return exact ? mul(x, inverse) : div(x, beta); }

    f16 operator()(f16 g, f16 u) const {
        f16 gate = mul(capped ? mul(beta, tanh(over_beta(g))) : g, sigmoid(g));
        return linear_capped ? mul(mul(gate, linear_beta), tanh(div(u, linear_beta))) : mul(gate, u);
    }

    // dg = dy * d situ / dg, du = dy * d situ / du. With T = tanh(g/beta), S = sigmoid(g), V = tanh(u/linear_beta):
    //   d/dg = S * ((1 - T*T) + (beta*T) * (1 - S)) * (linear_beta*V),   d/du = ((beta*T) * S) * (1 - V*V)
    // Where nothing is capped beta*T is g (linear_beta*V is u) and T*T (V*V) is 0.
    // Returns situ(g, u), which comes with them.
    f16 backward(f16 g, f16 u, f16 dy, f16& dg, f16& du) const {
        const f16 one = set1(1.0f);
        f16 s = sigmoid(g), bt = g, cap_slope = one, bv = u, linear_slope = one, v = u;
        if (capped) {
            f16 t = tanh(over_beta(g));
            bt = mul(beta, t), cap_slope = fma(sub(zero(), t), t, one);
        }
        if (linear_capped) {
            v = tanh(div(u, linear_beta));
            bv = mul(linear_beta, v), linear_slope = fma(sub(zero(), v), v, one);
        }
        const f16 gate = mul(bt, s);
        dg = mul(dy, mul(mul(s, fma(bt, sub(one, s), cap_slope)), bv));
        du = mul(dy, mul(gate, linear_slope));
        return linear_capped ? mul(mul(gate, linear_beta), v) : mul(gate, u);
    }
};

}  // namespace zm
