// A list of kernel calls in one call: a decode step without Python between its operators, and a kernel's time without Python.
#include <time.h>

#include "parallel.h"

namespace {

using I = int64_t;
using F = float;
// Every kernel takes integers and pointers (at most 48) and floats (at most 8) in a mixed order and returns an int64. The calling
// convention of x86-64 Linux passes the two kinds independently of each other and lets the caller pass too many: so one type of
// function fits all kernels.
constexpr int INTEGERS = 48, FLOATS = 8;
using Kernel = I (*)(I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I,
                     I, I, I, I, I, I, F, F, F, F, F, F, F, F);

inline I call(Kernel kernel, const I* a, const F* f) {
    return kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16], a[17], a[18],
                  a[19], a[20], a[21], a[22], a[23], a[24], a[25], a[26], a[27], a[28], a[29], a[30], a[31], a[32], a[33], a[34], a[35],
                  a[36], a[37], a[38], a[39], a[40], a[41], a[42], a[43], a[44], a[45], a[46], a[47], f[0], f[1], f[2], f[3], f[4], f[5],
                  f[6], f[7]);
}

// The clock of the calling thread where it works alone: other work on the machine does not count.
inline I now(I threads) {
    timespec t;
    clock_gettime(threads <= 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return I(t.tv_sec) * 1000000000 + t.tv_nsec;
}

}  // namespace

// Calls kernels[0..count), `repeats` times all of them; kernel i has the integers 48*i.. and the floats 8*i..; stops at the first one
// that returns a negative number. Returns -1, or the number of the kernel that failed and in `status` what it returned.
// nanoseconds: the time of all, or null.
ZM_API int64_t zm_run_program(void* const* kernels, const int64_t* integers, const float* floats, int64_t count, int64_t repeats,
                              int64_t* status, int64_t* nanoseconds, int64_t threads) {
    const I start = nanoseconds ? now(threads) : 0;
    for (I r = 0; r < repeats; ++r)
        for (I i = 0; i < count; ++i) {
            const I result = call(reinterpret_cast<Kernel>(kernels[i]), integers + i * INTEGERS, floats + i * FLOATS);
            if (result < 0) {
                *status = result;
                return i;
            }
        }
    if (nanoseconds) *nanoseconds = now(threads) - start;
    return -1;
}
