#include "compute/cast.h"

#include <string.h>

#include "base/assert.h"
#include "compute/half.h"

/*
 * Long enough for the loop inside to be vectorised, short enough to stop soon after a difference.
 */
#define BATCH 256

static uint16_t bf16_of(uint32_t bits)
{
    bool is_nan = (bits & UINT32_C(0x7fffffff)) > UINT32_C(0x7f800000);
    uint32_t rounded = (bits + UINT32_C(0x7fff) + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)(is_nan ? UINT32_C(0x7fc0) : rounded);
}

static inline __attribute__((always_inline)) bool is_of(const uint16_t *cast, const float *values,
                                                        uint64_t count, uint16_t (*round)(uint32_t))
{
    for (uint64_t first = 0; first < count; first += BATCH) {
        uint64_t end = first + BATCH < count ? first + BATCH : count;
        uint32_t difference = 0;
        for (uint64_t i = first; i < end; i++) {
            uint32_t bits;
            memcpy(&bits, &values[i], sizeof(bits));
            difference |= (uint32_t)(round(bits) ^ cast[i]);
        }
        if (difference)
            return false;
    }
    return true;
}

bool lh_cast_is_of(const void *cast, enum lh_dtype dtype, const float *values, uint64_t count)
{
    LH_ASSERT(dtype == LH_DTYPE_BF16 || dtype == LH_DTYPE_F16);
    if (dtype == LH_DTYPE_F16)
        return is_of(cast, values, count, lh_half_round);
    return is_of(cast, values, count, bf16_of);
}
