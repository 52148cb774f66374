// What the work sharing has done.
#include "parallel.h"

// Threads of the largest team since the last call; 1 if every caller worked alone.
ZM_API int64_t zm_most_threads(int64_t /*threads*/) { return zm::largest_team.exchange(1); }
