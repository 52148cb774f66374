// Work sharing: OpenMP over independent items. Which thread runs an item never changes the item's arithmetic.
#pragma once
#include <omp.h>

#include <atomic>
#include <cstdint>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#define ZM_API extern "C" __attribute__((visibility("default")))

namespace zm {

// Denormals on, round to nearest, for the calling thread; restored on exit (a library may have set FTZ or DAZ).
struct FloatEnvironment {
#if defined(__SSE__)
    unsigned saved = _mm_getcsr();
    FloatEnvironment() { _mm_setcsr(0x1f80); }
    ~FloatEnvironment() { _mm_setcsr(saved); }
#endif
};

// Size of the largest team since it was last asked for (zm_most_threads): the proof that several threads did work.
inline std::atomic<int64_t> largest_team{1};

// f(i) for i in [0, n), chunks handed out dynamically. threads <= 1 runs in the caller.
template <class F>
inline void parallel_for(int64_t n, int threads, F f) {
    if (threads <= 1 || n <= 1) {
        FloatEnvironment env;
        for (int64_t i = 0; i < n; ++i) f(i);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        FloatEnvironment env;
        if (omp_get_thread_num() == 0 && omp_get_num_threads() > largest_team) largest_team = omp_get_num_threads();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < n; ++i) f(i);
    }
}

// Smallest piece of work worth a thread, in floating point operations: below it the caller works alone.
constexpr int64_t PARALLEL_GRAIN = 1 << 20;
inline int threads_for(int64_t flop, int threads) {
    int64_t useful = flop / PARALLEL_GRAIN;
    return int(useful < 1 ? 1 : (useful < threads ? useful : threads));
}

}  // namespace zm
