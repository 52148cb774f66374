// A list of kernel calls in one call: a decode step without Python between its operators, and a kernel's time without Python.
#include <time.h>

#include "call.h"
#include "parallel.h"

namespace {

// The clock of the calling thread where it works alone: other work on the machine does not count.
inline int64_t now(int64_t threads) {
    timespec t;
    clock_gettime(threads <= 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}

}  // namespace

// Calls kernels[0..count), `repeats` times all of them; kernel i has the integers 48*i.. and the floats 8*i..; stops at the first one
// that returns a negative number. Returns -1, or the number of the kernel that failed and in `status` what it returned.
// nanoseconds: the time of all, or null.
ZM_API int64_t zm_run_program(void* const* kernels, const int64_t* integers, const float* floats, int64_t count, int64_t repeats,
                              int64_t* status, int64_t* nanoseconds, int64_t threads) {
    const int64_t start = nanoseconds ? now(threads) : 0;
    for (int64_t r = 0; r < repeats; ++r)
        for (int64_t i = 0; i < count; ++i) {
            const int64_t result = zm::call(kernels[i], integers + i * zm::MOST_INTEGERS, floats + i * zm::MOST_FLOATS);
            if (result < 0) {
                *status = result;
                return i;
            }
        }
    if (nanoseconds) *nanoseconds = now(threads) - start;
    return -1;
}
