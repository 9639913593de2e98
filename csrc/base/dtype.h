/*
 * Element types that the core distinguishes. All other types are BYTES (frozen parameters).
 */
#ifndef LH_BASE_DTYPE_H
#define LH_BASE_DTYPE_H

#include "base/base.h"

enum lh_dtype {
    LH_DTYPE_F32 = 0,
    LH_DTYPE_BF16 = 1,
    LH_DTYPE_F16 = 2,
    LH_DTYPE_BYTES = 3,
};

static inline uint64_t lh_dtype_bytes(enum lh_dtype dtype)
{
    switch (dtype) {
    case LH_DTYPE_F32:
        return 4;
    case LH_DTYPE_BF16:
    case LH_DTYPE_F16:
        return 2;
    default:
        return 1;
    }
}

#endif
