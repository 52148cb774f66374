// Packed sequences and their state slots, as kernels get them: checked before anything is read or written.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace zm {

// What a kernel over sequences returns instead of the number of threads used; ops/sequences.py has the messages.
enum SequenceStatus : int64_t {
    SEQUENCES_OK = 0, BAD_CU_SEQLENS = -1, BAD_STATE_IN = -2, BAD_STATE_OUT = -3, SHARED_SLOT = -4
};

// Rows of request r are cu[r]..cu[r+1]; state_in/state_out [requests] are slots, -1 or null: none.
struct Sequences {
    const int32_t* cu;
    const int32_t* state_in;
    const int32_t* state_out;
    int64_t count;

    int64_t in(int64_t r) const { return state_in ? state_in[r] : -1; }
    int64_t out(int64_t r) const { return state_out ? state_out[r] : -1; }

    SequenceStatus check(int64_t rows, int64_t slots) const {
        if (cu[0] != 0 || cu[count] != rows) return BAD_CU_SEQLENS;
        for (int64_t r = 0; r < count; ++r) {
            if (cu[r] > cu[r + 1]) return BAD_CU_SEQLENS;
            if (in(r) < -1 || in(r) >= slots) return BAD_STATE_IN;
            if (out(r) < -1 || out(r) >= slots) return BAD_STATE_OUT;
        }
        return shared_slot() ? SHARED_SLOT : SEQUENCES_OK;
    }

    // A slot that one request writes and another reads or writes: the result would depend on which comes first.
    bool shared_slot() const {
        if (!state_out || count < 2) return false;
        std::vector<std::pair<int64_t, int64_t>> writers;  // (slot, request)
        for (int64_t r = 0; r < count; ++r)
            if (out(r) >= 0) writers.emplace_back(out(r), r);
        std::sort(writers.begin(), writers.end());
        for (size_t i = 1; i < writers.size(); ++i)
            if (writers[i].first == writers[i - 1].first) return true;
        for (int64_t r = 0; r < count; ++r) {
            if (in(r) < 0) continue;
            const auto at = std::lower_bound(writers.begin(), writers.end(), std::make_pair(in(r), int64_t(0)));
            if (at != writers.end() && at->first == in(r) && at->second != r) return true;
        }
        return false;
    }
};

}  // namespace zm
