// parallel_for over small items: rows are handed out in blocks that are worth a thread's trip to the scheduler.
#pragma once
#include "parallel.h"

namespace zm {

// f(i) for i in [0, n); `flop` is the approximate cost of one item in floating point operations. Returns the threads used.
template <class F>
inline int64_t parallel_blocks(int64_t n, int64_t flop, int threads, F f) {
    const int workers = threads_for(n * flop, threads);
    const int64_t enough = (PARALLEL_GRAIN / 2 + flop - 1) / (flop > 0 ? flop : 1);
    const int64_t even = (n + 4 * workers - 1) / (4 * workers);
    const int64_t block = enough > even && workers > 1 ? enough : (even > 0 ? even : 1);
    const int64_t blocks = (n + block - 1) / block;
    parallel_for(blocks, workers, [&](int64_t b) {
        const int64_t end = (b + 1) * block < n ? (b + 1) * block : n;
        for (int64_t i = b * block; i < end; ++i) f(i);
    });
    return blocks > 1 ? workers : 1;
}

}  // namespace zm
