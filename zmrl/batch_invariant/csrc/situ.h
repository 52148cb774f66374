// SiTU: beta*tanh(g/beta)*sigmoid(g) * linear_beta*tanh(u/linear_beta), multiplied left to right in FP32, and its derivative.
#pragma once
#include "math.h"

namespace zm {

inline f16 situ(f16 g, f16 u, f16 beta, f16 linear_beta) {
    f16 gate = mul(mul(beta, tanh(div(g, beta))), sigmoid(g));
    return mul(mul(gate, linear_beta), tanh(div(u, linear_beta)));
}

// dg = dy * d situ / dg, du = dy * d situ / du. With T = tanh(g/beta), S = sigmoid(g), V = tanh(u/linear_beta):
//   d/dg = S * ((1 - T*T) + (beta*T) * (1 - S)) * (linear_beta*V),   d/du = ((beta*T) * S) * (1 - V*V)
inline void situ_backward(f16 g, f16 u, f16 beta, f16 linear_beta, f16 dy, f16& dg, f16& du) {
    const f16 one = set1(1.0f);
    f16 t = tanh(div(g, beta)), s = sigmoid(g), v = tanh(div(u, linear_beta));
    f16 bt = mul(beta, t);
    f16 slope = fma(bt, sub(one, s), fma(sub(zero(), t), t, one));
    dg = mul(dy, mul(mul(s, slope), mul(linear_beta, v)));
    du = mul(dy, mul(mul(bt, s), fma(sub(zero(), v), v, one)));
}

}  // namespace zm
