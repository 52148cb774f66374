// The short causal depthwise convolution (width 4) with SiLU over packed sequences, forward and backward.
//
// Work is shared by channel blocks: a block's weights are transposed once and serve all sequences. The kernels return the
// number of threads used, or a SequenceStatus.
#include <cstring>

#include "math.h"
#include "parallel.h"
#include "row.h"
#include "sequences.h"

using namespace zm;

namespace {

constexpr int WIDTH = 4, HISTORY = WIDTH - 1;
constexpr int64_t MAX_BLOCK = 256;  // channels of one work item

const bf16 ZEROS[MAX_BLOCK] = {0};

// Columns [c0, c0 + n) of w [C, 4], as [4][n].
struct BlockWeights {
    alignas(64) float w[WIDTH][MAX_BLOCK];
    BlockWeights(const float* from, int64_t c0, int64_t n) {
        for (int64_t c = 0; c < n; ++c)
            for (int j = 0; j < WIDTH; ++j) w[j][c] = from[(c0 + c) * WIDTH + j];
    }
    // chain over j of fma(w[j], x[j], .), x[j] being the input of token t-3+j
    f16 convolve(const bf16* const* x, int64_t i, int64_t n) const {
        f16 sum = zero();
        for (int j = 0; j < WIDTH; ++j) sum = fma(row_load(w[j], i, n), row_load(x[j], i, n), sum);
        return sum;
    }
};

// f(c0, n) for every block of n channels from c0. Returns the threads used.
template <class F>
int64_t for_channel_blocks(int64_t rows, int64_t channels, int64_t flop, int threads, F f) {
    const int workers = threads_for(rows * channels * flop, threads);
    int64_t block = (channels + workers - 1) / workers;
    block = block > MAX_BLOCK ? MAX_BLOCK : (block + LANES - 1) / LANES * LANES;
    const int64_t blocks = (channels + block - 1) / block;
    parallel_for(blocks, workers, [&](int64_t b) {
        const int64_t c0 = b * block;
        f(c0, channels - c0 < block ? channels - c0 : block);
    });
    return blocks > 1 ? workers : 1;
}

// The inputs of tokens t-3..t of a sequence: from `history` (3 rows) before its first row.
inline void window(const bf16* const* history, const bf16* x, int64_t stride, int64_t t, const bf16** out) {
    for (int j = 0; j < WIDTH; ++j) {
        const int64_t at = t - HISTORY + j;
        out[j] = at < 0 ? history[at + HISTORY] : x + at * stride;
    }
}

}  // namespace

// y = bf16(c * sigmoid(c)), c = chain over j of fma(w[c,j], x[t-3+j], .); the 3 inputs before a sequence come from slot
// state_in (zeros if -1), its last 3 inputs go to slot state_out. state [slots, 3, C], slot stride in elements.
ZM_API int64_t zm_short_conv(const bf16* x, int64_t x_stride, const float* w, const int32_t* cu, const int32_t* state_in,
                             const int32_t* state_out, bf16* state, int64_t state_stride, int64_t slots, bf16* y,
                             int64_t rows, int64_t channels, int64_t requests, int64_t threads) {
    const Sequences seqs{cu, state_in, state_out, requests};
    if (SequenceStatus status = seqs.check(rows, slots)) return status;
    return for_channel_blocks(rows + requests, channels, 50, int(threads), [&](int64_t c0, int64_t n) {
        const BlockWeights weights(w, c0, n);
        for (int64_t r = 0; r < requests; ++r) {
            const int64_t start = cu[r], length = cu[r + 1] - cu[r], in = seqs.in(r), out = seqs.out(r);
            const bf16* first = x + start * x_stride + c0;
            const bf16* history[HISTORY];
            for (int j = 0; j < HISTORY; ++j) history[j] = in < 0 ? ZEROS : state + in * state_stride + j * channels + c0;
            const bf16* inputs[WIDTH];
            for (int64_t t = 0; t < length; ++t) {
                window(history, first, x_stride, t, inputs);
                bf16* to = y + (start + t) * channels + c0;
                for (int64_t i = 0; i < n; i += LANES) {
                    f16 c = weights.convolve(inputs, i, n);
                    row_store(to, i, n, mul(c, sigmoid(c)));
                }
            }
            if (out < 0) continue;
            for (int j = 0; j < HISTORY; ++j) {  // ascending: a row of the same slot is read before it is overwritten
                const int64_t at = length - HISTORY + j;
                bf16* to = state + out * state_stride + j * channels + c0;
                std::memmove(to, at < 0 ? history[at + HISTORY] : first + at * x_stride, size_t(n) * sizeof(bf16));
            }
        }
    });
}

// Sequences start from zeros. c recomputed, s = sigmoid(c), dc = dy * (s * (1 + c*(1-s))) in FP32;
// dx[t] = bf16(chain over j = 3..0 of fma(w[c,j], dc[t+3-j], .)), dc beyond the sequence being zero.
ZM_API int64_t zm_short_conv_backward(const bf16* dy, int64_t dy_stride, const bf16* x, int64_t x_stride, const float* w,
                                      const int32_t* cu, bf16* dx, int64_t rows, int64_t channels, int64_t requests,
                                      int64_t threads) {
    const Sequences seqs{cu, nullptr, nullptr, requests};
    if (SequenceStatus status = seqs.check(rows, 0)) return status;
    const bf16* const history[HISTORY] = {ZEROS, ZEROS, ZEROS};
    return for_channel_blocks(rows, channels, 64, int(threads), [&](int64_t c0, int64_t n) {
        const BlockWeights weights(w, c0, n);
        const f16 one = set1(1.0f);
        alignas(64) float ring[WIDTH][MAX_BLOCK];  // dc of token t lies in row t mod 4
        for (int64_t r = 0; r < requests; ++r) {
            const int64_t start = cu[r], length = cu[r + 1] - cu[r];
            const bf16* inputs[WIDTH];
            for (int64_t t = 0; t < length + HISTORY; ++t) {
                float* dc = ring[t % WIDTH];
                if (t < length) {
                    window(history, x + start * x_stride + c0, x_stride, t, inputs);
                    const bf16* grad = dy + (start + t) * dy_stride + c0;
                    for (int64_t i = 0; i < n; i += LANES) {
                        f16 c = weights.convolve(inputs, i, n), s = sigmoid(c);
                        row_store(dc, i, n, mul(row_load(grad, i, n), mul(s, fma(c, sub(one, s), one))));
                    }
                } else {
                    std::memset(dc, 0, size_t(n) * sizeof(float));
                }
                const int64_t to = t - HISTORY;  // all four dc that token `to` needs are known now
                if (to < 0) continue;
                for (int64_t i = 0; i < n; i += LANES) {
                    f16 sum = zero();
                    for (int j = WIDTH - 1; j >= 0; --j)
                        sum = fma(row_load(weights.w[j], i, n), row_load(ring[(to + HISTORY - j) % WIDTH], i, n), sum);
                    row_store(dx + (start + to) * channels + c0, i, n, sum);
                }
            }
        }
    });
}
