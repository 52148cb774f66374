// Calls any kernel, whatever its arguments.
#pragma once
#include <cstdint>

namespace zm {

// Every kernel takes integers and pointers (at most 48) and floats (at most 8) in a mixed order and returns an int64. The calling
// convention of x86-64 Linux passes the two kinds independently of each other and lets the caller pass too many: so one type of
// function fits all kernels.
constexpr int MOST_INTEGERS = 48, MOST_FLOATS = 8;

inline int64_t call(void* kernel, const int64_t* a, const float* f) {
    using I = int64_t;
    using F = float;
    using Kernel = I (*)(I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I,
                         I, I, I, I, I, I, I, I, F, F, F, F, F, F, F, F);
    return reinterpret_cast<Kernel>(kernel)(
        a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16], a[17], a[18], a[19],
        a[20], a[21], a[22], a[23], a[24], a[25], a[26], a[27], a[28], a[29], a[30], a[31], a[32], a[33], a[34], a[35], a[36], a[37],
        a[38], a[39], a[40], a[41], a[42], a[43], a[44], a[45], a[46], a[47], f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]);
}

}  // namespace zm
