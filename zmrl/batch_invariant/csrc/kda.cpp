// Kimi Delta Attention forward: parallel over (sequence, head), token by token, state in FP32 in the caller's slots.
#include <cstring>

#include "kda.h"
#include "parallel.h"
#include "sequences.h"

using namespace zm;

namespace {

constexpr int64_t CHUNK = 8;  // tokens prepared at a time; changes no bit
#if defined(__AVX512F__)
constexpr int VECTORS = 4;
#else
constexpr int VECTORS = 2;
#endif

// One head of one sequence: rows [start, start + length), state `s` with rows of kda_width(dim) floats, updated in place.
void run(const KdaInputs& in, int64_t start, int64_t length, int64_t h, float* s, bf16* o) {
    const int64_t d = in.dim, width = kda_width(d), o_stride = in.heads * d;
    const float rate = exp1(in.a_log[h]);
    KdaToken tokens[CHUNK];
    for (int64_t t0 = 0; t0 < length; t0 += CHUNK) {
        const int64_t count = length - t0 < CHUNK ? length - t0 : CHUNK;
        for (int64_t i = 0; i < count; ++i) kda_prepare(in, start + t0 + i, h, rate, tokens[i]);
        kda_column_blocks<VECTORS>(width, [&](auto block, int64_t c) {
            constexpr int N = decltype(block)::value;
            for (int64_t i = 0; i < count; ++i) {
                const int64_t t = start + t0 + i;
                const bf16* v_row = in.v + t * in.v_stride + h * d;
                f16 v[N], error[N], u[N], out[N];
                for (int n = 0; n < N; ++n) v[n] = row_load(v_row, c + n * LANES, d);
                kda_step<N, true>(s + c, width, s + c, width, d, tokens[i], v, error, u, out);
                for (int n = 0; n < N; ++n) row_store(o + t * o_stride + h * d, c + n * LANES, d, out[n]);
            }
        });
    }
}

}  // namespace

// o [T, H*D] contiguous. state [slots, H, D, D] FP32, slot stride in elements, inner dimensions contiguous; a request's state
// comes from slot state_in (zeros if -1) and goes to slot state_out (dropped if -1). A slot that one request writes must not
// be used by another. D: a multiple of 8, at most 128. Returns the threads used, or a SequenceStatus.
ZM_API int64_t zm_kda(const bf16* q, int64_t q_stride, const bf16* k, int64_t k_stride, const bf16* v, int64_t v_stride,
                      const bf16* f, int64_t f_stride, const bf16* b, int64_t b_stride, const float* a_log,
                      const float* dt_bias, float lower_bound, const int32_t* cu, const int32_t* state_in,
                      const int32_t* state_out, float* state, int64_t state_stride, int64_t slots, bf16* o, int64_t rows,
                      int64_t heads, int64_t dim, int64_t requests, int64_t threads) {
    const Sequences seqs{cu, state_in, state_out, requests};
    if (SequenceStatus status = seqs.check(rows, slots)) return status;
    const KdaInputs in{q, k, v, f, b, q_stride, k_stride, v_stride, f_stride, b_stride, a_log, dt_bias, lower_bound,
                       heads, dim};
    const int64_t width = kda_width(dim), size = dim * dim;
    const int workers = threads_for((rows + requests) * heads * size * 7, int(threads));
    parallel_for(requests * heads, workers, [&](int64_t item) {
        const int64_t r = item / heads, h = item % heads, from = seqs.in(r), to = seqs.out(r);
        const float* source = from < 0 ? nullptr : state + from * state_stride + h * size;
        float* target = to < 0 ? nullptr : state + to * state_stride + h * size;
        alignas(64) float own[KDA_MAX_DIM * KDA_MAX_DIM];
        float* s = target && width == dim ? target : own;
        if (!source) {
            std::memset(s, 0, size_t(dim * width) * sizeof(float));
        } else if (width == dim) {
            if (s != source) std::memcpy(s, source, size_t(size) * sizeof(float));
        } else {
            std::memset(s, 0, size_t(dim * width) * sizeof(float));
            for (int64_t i = 0; i < dim; ++i) std::memcpy(s + i * width, source + i * dim, size_t(dim) * sizeof(float));
        }
        run(in, cu[r], cu[r + 1] - cu[r], h, s, o);
        if (target && s == own)
            for (int64_t i = 0; i < dim; ++i) std::memcpy(target + i * dim, s + i * width, size_t(dim) * sizeof(float));
    });
    return requests * heads > 1 ? workers : 1;
}
