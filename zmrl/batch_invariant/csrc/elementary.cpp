// exp, log, tanh and sigmoid of math.h over an array: for tests of their accuracy and of their equality over
// instruction sets.
#include "blocks.h"
#include "math.h"
#include "row.h"

using namespace zm;

// y[i] = f(x[i]), FP32; f: 0 exp, 1 log, 2 tanh, 3 sigmoid. Returns the threads used, -1 for another f.
ZM_API int64_t zm_elementary(const float* x, float* y, int64_t n, int64_t function, int64_t threads) {
    if (function < 0 || function > 3) return -1;
    return parallel_blocks((n + LANES - 1) / LANES, LANES * 32, int(threads), [&](int64_t block) {
        const int64_t i = block * LANES;
        const f16 v = row_load(x, i, n);
        row_store(y, i, n, function == 0 ? exp(v) : function == 1 ? log(v) : function == 2 ? tanh(v) : sigmoid(v));
    });
}
