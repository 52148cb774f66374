// The exact top-k over ranks that each hold every W-th position: what a rank sends, and how all ranks choose from it.
//
// A message is one row of int32 per token: `segments` header words, then `capacity` candidates in ascending local position.
// A candidate is ranking key << 16 | local position mod 2^16 (indexer.cpp defines the keys; local position l of rank r is position
// l*W + r). Header word s is the number of candidates whose local position lies in segment s of 2^16, so that a position of any
// length needs no more than 16 bits in its candidate; bit 31 of word 0: a score is NaN.
#include <cstring>
#include <memory>

#include "parallel.h"
#include "product.h"

using namespace zm;

namespace {

constexpr int SEGMENT_BITS = 16, MOST_RANKS = 8;
constexpr uint32_t NAN_BIT = 1u << 31;
constexpr int64_t PICK_FLOP = 4;  // rough work per key, for the number of threads

// The key of the `wanted`-th largest of those that for_each visits; `wanted` becomes how many of them equal it and belong.
template <class ForEach>
uint16_t cut_of(int64_t& wanted, ForEach for_each) {
    uint32_t count[256];
    const auto largest = [&] {
        int byte = 255;
        for (; wanted > count[byte]; --byte) wanted -= count[byte];
        return uint32_t(byte);
    };
    std::memset(count, 0, sizeof count);
    for_each([&](uint16_t key) { ++count[key >> 8]; });
    const uint32_t high = largest();
    std::memset(count, 0, sizeof count);
    for_each([&](uint16_t key) { count[key & 255] += key >> 8 == high; });
    return uint16_t(high << 8 | largest());
}

// The candidates of one token from one rank.
struct List {
    const uint32_t* words;
    int64_t size;
    bool complete;  // nothing of this rank that could be chosen is missing, whatever was chosen
};

}  // namespace

// words [rows, segments + capacity]: the `capacity` best of the keys of positions 0..counts[row], all of them if there are fewer.
// keys: rows `stride` apart. Order: key descending, position ascending. Returns the number of threads, or -1 - row if a position
// needs more segments.
ZM_API int64_t zm_pick_candidates(const uint16_t* keys, int64_t stride, const int32_t* counts, int64_t rows, int64_t capacity,
                                  int64_t segments, uint32_t* words, int64_t threads) {
    int64_t total = 0;
    for (int64_t row = 0; row < rows; ++row) {
        if (counts[row] < 0 || counts[row] > stride || counts[row] > segments << SEGMENT_BITS) return -1 - row;
        total += counts[row];
    }
    const int workers = threads_for(total * PICK_FLOP, int(threads));
    parallel_for(rows, workers, [&](int64_t row) {
        const uint16_t* key = keys + row * stride;
        uint32_t *header = words + row * (segments + capacity), *out = header + segments;
        std::memset(header, 0, size_t(segments + capacity) * 4);
        const int64_t n = counts[row];
        int64_t ties = capacity;
        uint16_t cut = 0;
        if (n > capacity)
            cut = cut_of(ties, [&](auto use) {
                for (int64_t i = 0; i < n; ++i) use(key[i]);
            });
        bool nan = false;
        for (int64_t i = 0, filled = 0; i < n; ++i) {
            nan |= key[i] == 0;
            const bool equal = key[i] == cut;
            if (key[i] < cut || (equal && ties == 0)) continue;
            ties -= equal;
            out[filled++] = uint32_t(key[i]) << 16 | uint32_t(i & 0xffff);
            ++header[i >> SEGMENT_BITS];
        }
        if (nan) header[0] |= NAN_BIT;
    });
    return workers;
}

// words [world, rows, segments + capacity]: the messages of all ranks. selected [rows, topk]: the topk best positions, ascending;
// positions[row] >= topk is the token's own. more[row]: bit r is set if rank r may hold further winners, and the row is then not
// final: rank r must send its topk best. flags (may be null): set to 1 where a rank met NaN. Returns the number of threads, or
// -1 - row for a message that no rank sends.
ZM_API int64_t zm_merge_candidates(const uint32_t* words, int64_t world, int64_t rows, int64_t segments, int64_t capacity,
                                   const int32_t* positions, int64_t topk, int32_t* selected, int32_t* more, int32_t* flags,
                                   int64_t threads) {
    const int workers = threads_for(rows * world * capacity * 8, int(threads));
    std::atomic<int64_t> bad{rows};
    parallel_for(rows, workers, [&](int64_t row) {
        List list[MOST_RANKS];
        const auto refuse = [&] {
            for (int64_t seen = bad; row < seen && !bad.compare_exchange_weak(seen, row);) {}
        };
        float* memory = scratch<FIRST_OWN_TAG>(world * capacity);
        int32_t* position = reinterpret_cast<int32_t*>(memory);  // [world][capacity]
        int64_t sent = 0;
        bool nan = false;
        for (int64_t r = 0; r < world; ++r) {
            const uint32_t* header = words + (r * rows + row) * (segments + capacity);
            const int64_t held = positions[row] < r ? 0 : (positions[row] - r) / world + 1;
            List& l = list[r];
            l.words = header + segments;
            l.size = 0;
            int64_t last = -1;
            for (int64_t s = 0; s < segments; ++s) {
                const int64_t n = s == 0 ? header[0] & ~NAN_BIT : header[s];
                if (n > capacity - l.size) return refuse();
                for (int64_t i = 0; i < n; ++i, ++l.size) {
                    const int64_t local = s << SEGMENT_BITS | (l.words[l.size] & 0xffff);
                    if (local <= last || local >= held) return refuse();
                    position[r * capacity + l.size] = int32_t(local * world + r);
                    last = local;
                }
            }
            l.complete = l.size == held || l.size >= topk;
            if (!l.complete && l.size == 0) return refuse();
            nan |= header[0] & NAN_BIT;
            sent += l.size;
        }
        if (sent < topk) return refuse();
        if (nan && flags) flags[row] = 1;

        int64_t ties = topk;
        const uint16_t cut = cut_of(ties, [&](auto use) {
            for (int64_t r = 0; r < world; ++r)
                for (int64_t i = 0; i < list[r].size; ++i) use(uint16_t(list[r].words[i] >> 16));
        });
        int32_t last_tie = -1;
        int64_t at[MOST_RANKS] = {0};
        const auto seek = [&](int64_t r) {  // to the next candidate of rank r that can be chosen
            while (at[r] < list[r].size && list[r].words[at[r]] >> 16 < cut) ++at[r];
        };
        for (int64_t r = 0; r < world; ++r) seek(r);
        for (int64_t filled = 0; filled < topk;) {
            int64_t first = -1;
            int32_t lowest = INT32_MAX;
            for (int64_t r = 0; r < world; ++r)
                if (at[r] < list[r].size && position[r * capacity + at[r]] < lowest) lowest = position[r * capacity + at[r]], first = r;
            const bool equal = list[first].words[at[first]] >> 16 == cut;
            if (!equal || ties > 0) selected[row * topk + filled++] = lowest;
            if (equal && ties > 0) --ties, last_tie = lowest;
            ++at[first];
            seek(first);
        }

        // A rank is safe if its worst candidate was not chosen: whatever it did not send is worse still.
        int32_t fired = 0;
        for (int64_t r = 0; r < world; ++r) {
            if (list[r].complete) continue;
            int64_t worst = 0;
            for (int64_t i = 1; i < list[r].size; ++i)
                if (list[r].words[i] >> 16 <= list[r].words[worst] >> 16) worst = i;
            const uint32_t key = list[r].words[worst] >> 16;
            if (key > cut || (key == cut && position[r * capacity + worst] <= last_tie)) fired |= 1 << r;
        }
        more[row] = fired;
    });
    return bad < rows ? -1 - bad : workers;
}
