// Digests of rows and tensors: sum over i of mix64(i, bits of element i) mod 2^64 (mix64.h). The sum has no order, so chunks are
// shared out to threads freely.
#include <vector>

#include "mix64.h"
#include "parallel.h"

namespace {

constexpr int64_t CHUNK = 1 << 15;

template <class Bits>
uint64_t digest(const void* data, int64_t at, int64_t first, int64_t n) {
    const Bits* x = static_cast<const Bits*>(data) + at;
    return zm::digest_terms(first, n, [x](int64_t j) { return uint64_t(x[j]); });
}

}  // namespace

// out[r] = digest of elements 0..n of row r, whose first element counts as element `offset` (a shard of a longer row). `stride`:
// elements between rows; `size`: bytes of an element, 1, 2, 4 or 8. Returns the threads used, or -1 for another size.
ZM_API int64_t zm_digest(const void* data, int64_t rows, int64_t stride, int64_t n, int64_t offset, int64_t size, uint64_t* out,
                         int64_t threads) {
    const auto of_type = size == 1 ? digest<uint8_t> : size == 2 ? digest<uint16_t> : size == 4 ? digest<uint32_t> : digest<uint64_t>;
    if (size != 1 && size != 2 && size != 4 && size != 8) return -1;
    const int64_t chunks = n ? (n + CHUNK - 1) / CHUNK : 1;
    const int workers = zm::threads_for(rows * n * 2, int(threads));
    std::vector<uint64_t> partial(size_t(rows * chunks));
    zm::parallel_for(rows * chunks, workers, [&](int64_t item) {
        const int64_t row = item / chunks, first = item % chunks * CHUNK;
        partial[size_t(item)] = of_type(data, row * stride + first, offset + first, n - first < CHUNK ? n - first : CHUNK);
    });
    for (int64_t row = 0; row < rows; ++row) {
        out[row] = 0;
        for (int64_t c = 0; c < chunks; ++c) out[row] += partial[size_t(row * chunks + c)];
    }
    return workers;
}
