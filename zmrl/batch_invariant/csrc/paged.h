// Packed sequences and paged caches (docs/operators.md, Layouts), and how an operator reports an argument it cannot use.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "sequences.h"

namespace zm {

enum Failure : int64_t { BAD_SELECTION = 1, BAD_BLOCK = 2, BAD_SLOT = 3, BAD_SEQUENCES = 4, BAD_START = 5, BAD_POSITION = 6 };

// The first failing token (by index, whatever the threads) and its reason, as reason << 32 | token.
struct Status {
    std::atomic<int64_t> value{0};

    void fail(Failure reason, int64_t token) {
        const int64_t code = (int64_t(reason) << 32) | token;
        int64_t seen = value.load();
        while ((seen == 0 || (seen & 0xffffffff) > token) && !value.compare_exchange_weak(seen, code)) {}
    }
    bool failed() const { return value.load(std::memory_order_relaxed) != 0; }
    // What a kernel returns: the number of threads, or minus the code of the failure.
    int64_t result(int threads) const { return failed() ? -value.load() : threads; }
};

// cu_seqlens [requests + 1] must rise from 0 to `tokens`.
inline bool valid_sequences(const int32_t* cu, int64_t requests, int64_t tokens) {
    return Sequences{cu, nullptr, nullptr, requests}.check(tokens, 0) == SEQUENCES_OK;
}

inline int64_t request_of(const int32_t* cu, int64_t requests, int64_t t) {
    return std::upper_bound(cu, cu + requests + 1, int32_t(t)) - cu - 1;
}

// Bytes of cached rows that operators have read since they were last asked for (zm_bytes_read). An index key counts once for the
// tokens that share its decoding, a latent once for each token, however many groups of heads visit it.
enum CachedRows : int64_t { INDEX_KEYS, LATENTS };
inline std::atomic<int64_t> bytes_read[2];

struct Pages {
    const uint8_t* data;
    int64_t stride, count;  // bytes between blocks, number of blocks
    const int32_t* table;   // [requests, columns]
    int64_t table_stride, columns, block_size;

    // Walks over ascending positions of one request; divides only when the block changes.
    struct Cursor {
        const Pages& pages;
        const int32_t* table;
        int64_t first = 0, end = 0;  // positions of the current block
        const uint8_t* block = nullptr;

        // Moves to the block of `position`; false if the block table does not have it.
        bool seek(int64_t position) {
            if (position < end) return true;
            const int64_t column = position / pages.block_size;
            if (column >= pages.columns || table[column] < 0 || table[column] >= pages.count) return false;
            first = column * pages.block_size;
            end = first + pages.block_size;
            block = pages.data + table[column] * pages.stride;
            return true;
        }
        // The row of `position` in a page that begins with rows of `bytes`, or null.
        const uint8_t* at(int64_t position, int64_t bytes) {
            return seek(position) ? block + (position - first) * bytes : nullptr;
        }
    };
    Cursor cursor(int64_t request) const { return {*this, table + request * table_stride}; }
};

}  // namespace zm
