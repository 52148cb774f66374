// What the machine can do, and the time of a kernel without Python: built by benchmarks/machine.py for one instruction set.
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

// Nanoseconds of `repeats` calls. Every kernel takes integers and pointers (up to 48) and floats (up to 8) in a mixed order. In the
// calling convention of x86-64 Linux the two kinds are passed independently of each other, and arguments too many are ignored: so one
// type of function fits all kernels.
API int64_t zm_bench_call(void* function, const int64_t* a, const float* f, int64_t repeats, int64_t threads) {
    using I = int64_t;
    using Kernel = I (*)(I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I,
                         I, I, I, I, I, I, I, I, float, float, float, float, float, float, float, float);
    const auto kernel = reinterpret_cast<Kernel>(function);
    const int64_t start = now(threads);
    for (int64_t r = 0; r < repeats; ++r)
        kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16], a[17], a[18],
               a[19], a[20], a[21], a[22], a[23], a[24], a[25], a[26], a[27], a[28], a[29], a[30], a[31], a[32], a[33], a[34], a[35],
               a[36], a[37], a[38], a[39], a[40], a[41], a[42], a[43], a[44], a[45], a[46], a[47], f[0], f[1], f[2], f[3], f[4], f[5],
               f[6], f[7]);
    return now(threads) - start;
}

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
