#include "compute/cast.h"

#include <string.h>

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

bool lh_cast_is_bf16_of(const void *bf16, const float *values, uint64_t count)
{
    const uint16_t *target = bf16;
    for (uint64_t first = 0; first < count; first += BATCH) {
        uint64_t end = first + BATCH < count ? first + BATCH : count;
        uint32_t difference = 0;
        for (uint64_t i = first; i < end; i++) {
            uint32_t bits;
            memcpy(&bits, &values[i], sizeof(bits));
            difference |= (uint32_t)(bf16_of(bits) ^ target[i]);
        }
        if (difference)
            return false;
    }
    return true;
}
