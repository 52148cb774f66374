// Latent rows between BF16 and their format (latent.h), and the codecs by themselves, for tests and references.
#include "index_key.h"
#include "latent.h"
#include "parallel.h"
#include "product.h"

using namespace zm;

// pages[slot] = kv[t] in a LatentFormat, for slot >= 0. Returns the number of threads, or -1 - the first token whose
// slot lies outside the pages.
ZM_API int64_t zm_latent_store(const bf16* kv, int64_t kv_stride, int64_t tokens, int64_t rank, int64_t pe, int64_t format,
                               float scale, uint8_t* pages, int64_t page_stride, int64_t num_blocks,
                               const int64_t* slot_mapping, int64_t block_size, int64_t threads) {
    for (int64_t t = 0; t < tokens; ++t)
        if (slot_mapping[t] < -1 || slot_mapping[t] >= num_blocks * block_size) return -1 - t;
    const LatentRow row{format, rank, pe, scale};
    const int64_t bytes = row.bytes(), tile = 64;
    const int workers = threads_for(tokens * row.width() * (format == LATENT_BF16 ? 1 : 16), int(threads));
    parallel_for((tokens + tile - 1) / tile, workers, [&](int64_t item) {
        for (int64_t t = item * tile; t < std::min(tokens, (item + 1) * tile); ++t) {
            const int64_t slot = slot_mapping[t];
            if (slot >= 0) row.encode(kv + t * kv_stride, pages + slot / block_size * page_stride + slot % block_size * bytes);
        }
    });
    return workers;
}

// out[t] = what a page gives back for kv[t], or, where there is a gradient, its straight-through gradient. out: contiguous.
ZM_API int64_t zm_latent_values(const bf16* kv, int64_t kv_stride, int64_t tokens, int64_t rank, int64_t pe, int64_t format,
                                float scale, const bf16* grad, int64_t grad_stride, bf16* out, int64_t threads) {
    const LatentRow row{format, rank, pe, scale};
    const int64_t tile = 64;
    const int workers = threads_for(tokens * row.width() * 16, int(threads));
    parallel_for((tokens + tile - 1) / tile, workers, [&](int64_t item) {
        uint8_t* stored = reinterpret_cast<uint8_t*>(scratch<FIRST_OWN_TAG>(row.width()));
        for (int64_t t = item * tile; t < std::min(tokens, (item + 1) * tile); ++t) {
            const bf16* x = kv + t * kv_stride;
            if (grad) {
                row.gradient(x, grad + t * grad_stride, out + t * row.width());
            } else {
                row.encode(x, stored);
                row.decode(stored, out + t * row.width());
            }
        }
    });
    return workers;
}

// codes[i] = e4m3(x[i]) (direction 0) or x[i] = value of codes[i] (1).
ZM_API int64_t zm_e4m3(float* x, uint8_t* codes, int64_t n, int64_t direction, int64_t) {
    FloatEnvironment environment;
    for (int64_t i = 0; i < n; ++i)
        if (direction == 0) codes[i] = to_e4m3(x[i]); else x[i] = E4M3.value[codes[i]];
    return 0;
}

// The same for e2m1, one code a byte.
ZM_API int64_t zm_e2m1(float* x, uint8_t* codes, int64_t n, int64_t direction, int64_t) {
    FloatEnvironment environment;
    for (int64_t i = 0; i < n; ++i)
        if (direction == 0) codes[i] = to_e2m1(x[i]); else x[i] = E2M1[codes[i] & 15];
    return 0;
}

// key[t] = codes, then scales, of x[t] [tokens, d] in an IndexFormat (direction 0), or back, with FP8's scale multiplied in (1).
ZM_API int64_t zm_index_key(float* x, uint8_t* key, int64_t tokens, int64_t d, int64_t format, int64_t direction, int64_t) {
    FloatEnvironment environment;
    const IndexKey codec{format, d};
    for (int64_t t = 0; t < tokens; ++t, x += d) {
        uint8_t *codes = key + t * (codec.code_bytes() + codec.scale_bytes()), *scales = codec.scales(codes, 1, 0);
        if (direction == 0) {
            codec.encode(x, codes, scales);
        } else {
            const float scale = codec.decode(codes, scales, x);
            for (int64_t i = 0; i < d; ++i) x[i] *= scale;
        }
    }
    return 0;
}
