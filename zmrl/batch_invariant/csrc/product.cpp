// The micro-kernel's instances, compiled once for all kernels.
#include "product.h"

namespace zm {

ZM_SWEEPS()
ZM_DIRECT_ROWS()
#if defined(__AVX2__)
ZM_OWN_SWEEPS()
#endif

}  // namespace zm
