// exp, log, tanh, sigmoid and softplus of math.h over an array: for tests of their accuracy and of their equality over
// instruction sets.
#include "blocks.h"
#include "math.h"
#include "row.h"

using namespace zm;

// y[i] = f(x[i]), FP32; f: 0 exp, 1 log, 2 tanh, 3 sigmoid, 4 softplus. Returns the threads used, -1 for another f.
ZM_API int64_t zm_elementary(const float* x, float* y, int64_t n, int64_t function, int64_t threads) {
    if (function < 0 || function > 4) return -1;
    return parallel_blocks((n + LANES - 1) / LANES, LANES * 32, int(threads), [&](int64_t block) {
        const int64_t i = block * LANES;
        const f16 v = row_load(x, i, n);
        f16 (*const functions[])(f16) = {exp, log, tanh, sigmoid, softplus};
        row_store(y, i, n, functions[function](v));
    });
}
