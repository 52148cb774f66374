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

// The digest of elements first..first+n of a row (numerics.md, Digests): the sum mod 2^64 over i of
// mix64(i, bits_i) = splitmix64(bits_i ^ i * G), a bijection in the bits for every i, so one flipped bit always changes the sum.
// bits(j): those of element first + j.
template <class Bits>
inline uint64_t digest_terms(int64_t first, int64_t n, Bits bits) {
    constexpr uint64_t G = 0x9E3779B97F4A7C15ull;
    uint64_t sum = 0, key = uint64_t(first) * G;  // by addition: multiplications are what a term costs
    for (int64_t j = 0; j < n; ++j, key += G) sum += splitmix64(bits(j) ^ key);
    return sum;
}

}  // namespace zm
