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

/* A batch stays in registers and in the first-level cache while all gradients are added to it. */
static inline __attribute__((always_inline)) void some(float *sum, const void *const *gradients,
                                                       uint32_t gradient_count, enum lh_dtype dtype,
                                                       bool is_first, uint64_t at, uint64_t count)
{
    uint64_t offset = at * lh_dtype_bytes(dtype);
    const uint8_t *first = (const uint8_t *)gradients[0] + offset;
    float elements[BATCH];

    for (uint64_t i = 0; i < count; i++)
        elements[i] = element_at(first, dtype, i);
    /* Its own loop: the compiler does not vectorize one with a condition. */
    for (uint64_t i = 0; i < count && !is_first; i++)
        elements[i] = sum[at + i] + elements[i];
    for (uint32_t j = 1; j < gradient_count; j++) {
        const uint8_t *later = (const uint8_t *)gradients[j] + offset;

        for (uint64_t i = 0; i < count; i++)
            elements[i] += element_at(later, dtype, i);
    }
    memcpy(sum + at, elements, count * sizeof(*sum));
}

static inline __attribute__((always_inline)) void all(float *sum, const void *const *gradients,
                                                      uint32_t gradient_count, enum lh_dtype dtype,
                                                      bool is_first, uint64_t count)
{
    uint64_t at = 0;

    for (; at + BATCH <= count; at += BATCH)
        some(sum, gradients, gradient_count, dtype, is_first, at, BATCH);
    some(sum, gradients, gradient_count, dtype, is_first, at, count - at);
}

void lh_sum_add_all(float *sum, const void *const *gradients, uint32_t gradient_count,
                    enum lh_dtype dtype, uint64_t count, bool is_first)
{
    LH_ASSERT(dtype <= LH_DTYPE_F16 && gradient_count > 0);
    if (dtype == LH_DTYPE_F32)
        all(sum, gradients, gradient_count, LH_DTYPE_F32, is_first, count);
    else if (dtype == LH_DTYPE_BF16)
        all(sum, gradients, gradient_count, LH_DTYPE_BF16, is_first, count);
    else
        all(sum, gradients, gradient_count, LH_DTYPE_F16, is_first, count);
}

void lh_sum_start(float *sum, const void *gradient, enum lh_dtype dtype, uint64_t count)
{
    lh_sum_add_all(sum, &gradient, 1, dtype, count, true);
}

void lh_sum_add(float *sum, const void *gradient, enum lh_dtype dtype, uint64_t count)
{
    lh_sum_add_all(sum, &gradient, 1, dtype, count, false);
}
