// The 64-bit mixing functions behind row digests, tensor digests and sampling noise. Integer arithmetic only.
#pragma once
#include <cstdint>

namespace zm {

// The finaliser of splitmix64 (Steele, Lea, Flood 2014; constants of Stafford's variant 13): a bijection.
inline uint64_t splitmix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Digest term of element i (numerics.md, Digests): a bijection in `bits` for every i, so one flipped bit always changes
// the sum over i of mix64(i, bits_i) mod 2^64.
inline uint64_t mix64(uint64_t i, uint64_t bits) { return splitmix64(bits ^ (i * 0x9E3779B97F4A7C15ull)); }

}  // namespace zm
