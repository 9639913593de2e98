#include "compute/sum.h"

#include <string.h>

#include "base/assert.h"
#include "compute/half.h"

/* The compiler vectorizes a loop with a fixed number of iterations without further hints. */
#define BATCH 64

static inline __attribute__((always_inline)) float element_at(const uint8_t *bytes,
                                                              enum lh_dtype dtype, uint64_t i)
{
    uint32_t bits = 0;
    float value;

    if (dtype == LH_DTYPE_F32) {
        memcpy(&bits, bytes + 4 * i, sizeof(bits));
    } else {
        uint16_t short_bits;
        memcpy(&short_bits, bytes + 2 * i, sizeof(short_bits));
        bits = dtype == LH_DTYPE_BF16 ? (uint32_t)short_bits << 16 : lh_half_widen(short_bits);
    }
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline __attribute__((always_inline)) void some(float *restrict sum,
                                                       const uint8_t *restrict gradient,
                                                       enum lh_dtype dtype, bool adds,
                                                       uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        sum[i] = adds ? sum[i] + element_at(gradient, dtype, i) : element_at(gradient, dtype, i);
}

static inline __attribute__((always_inline)) void
all(float *sum, const uint8_t *gradient, enum lh_dtype dtype, bool adds, uint64_t count)
{
    uint64_t i = 0;

    for (; i + BATCH <= count; i += BATCH)
        some(sum + i, gradient + i * lh_dtype_bytes(dtype), dtype, adds, BATCH);
    some(sum + i, gradient + i * lh_dtype_bytes(dtype), dtype, adds, count - i);
}

void lh_sum_start(float *sum, const void *gradient, enum lh_dtype dtype, uint64_t count)
{
    LH_ASSERT(dtype <= LH_DTYPE_F16);
    if (dtype == LH_DTYPE_F32)
        memcpy(sum, gradient, count * sizeof(*sum));
    else if (dtype == LH_DTYPE_BF16)
        all(sum, gradient, LH_DTYPE_BF16, false, count);
    else
        all(sum, gradient, LH_DTYPE_F16, false, count);
}

void lh_sum_add(float *sum, const void *gradient, enum lh_dtype dtype, uint64_t count)
{
    LH_ASSERT(dtype <= LH_DTYPE_F16);
    if (dtype == LH_DTYPE_F32)
        all(sum, gradient, LH_DTYPE_F32, true, count);
    else if (dtype == LH_DTYPE_BF16)
        all(sum, gradient, LH_DTYPE_BF16, true, count);
    else
        all(sum, gradient, LH_DTYPE_F16, true, count);
}
