// What the machine can do: built by benchmarks/machine.py for one instruction set.
#include <omp.h>
#include <time.h>

#include <cstdint>

#include "vec.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

// The clock of the calling thread where it works alone: other processes of a shared machine do not count.
int64_t now(int64_t threads) {
    timespec t;
    clock_gettime(threads <= 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

// Makes the compiler compute the values.
void keep(const zm::f16* values, int count) {
    float out[16];
    for (int j = 0; j < count; ++j) {
        zm::store(out, values[j]);
        asm volatile("" : : "r"(out) : "memory");
    }
}

}  // namespace

// Nanoseconds of steps * 12 * 16 fused multiply-adds (2 FLOP each) in every thread, in independent chains.
API int64_t zm_bench_fma(int64_t steps, int64_t threads) {
    const int64_t start = now(threads);
#pragma omp parallel num_threads(int(threads))
    {
        zm::f16 acc[12];
        for (int j = 0; j < 12; ++j) acc[j] = zm::set1(float(j));
        zm::f16 x = zm::set1(0.999f), y = zm::set1(1e-3f);
        for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 12
            for (int j = 0; j < 12; ++j) acc[j] = zm::fma(acc[j], x, y);
        }
        keep(acc, 12);
    }
    return now(threads) - start;
}

// Nanoseconds of reading `bytes` (a multiple of 1024 per thread) `repeats` times.
API int64_t zm_bench_read(const float* data, int64_t bytes, int64_t repeats, int64_t threads) {
    const int64_t start = now(threads);
#pragma omp parallel num_threads(int(threads))
    {
        const int64_t share = bytes / 4 / threads / 256 * 256;
        const float* p = data + omp_get_thread_num() * share;
        zm::f16 acc[8];
        for (auto& a : acc) a = zm::zero();
        for (int64_t r = 0; r < repeats; ++r)
            for (int64_t i = 0; i < share; i += 128)
#pragma GCC unroll 8
                for (int j = 0; j < 8; ++j) acc[j] = zm::max(acc[j], zm::load(p + i + 16 * j));
        keep(acc, 8);
    }
    return now(threads) - start;
}
