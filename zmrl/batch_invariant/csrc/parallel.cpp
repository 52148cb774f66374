// What the work sharing has done.
#include "paged.h"
#include "parallel.h"

// Threads of the largest team since the last call; 1 if every caller worked alone.
ZM_API int64_t zm_most_threads(int64_t /*threads*/) { return zm::largest_team.exchange(1); }

// Bytes of index keys (0) or latents (1) read from pages since the last call, by zm_index_select, zm_index_keys, zm_mla_attention.
ZM_API int64_t zm_bytes_read(int64_t kind, int64_t /*threads*/) { return zm::bytes_read[kind].exchange(0); }
