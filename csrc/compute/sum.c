#include "compute/sum.h"

#include <string.h>

#include "base/assert.h"
#include "compute/half.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

/* The compiler vectorizes a loop with a fixed number of iterations without further hints. */
#define BATCH 64
#define STREAM_BYTES 16

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

/*
 * Store the elements of a sum. A sum that starts is read again when all others have started, which
 * is too late for a cache, and a store through the cache would first read what it overwrites.
 */
static inline __attribute__((always_inline)) void
store(float *restrict sum, const float *restrict elements, bool streams, uint64_t count)
{
#if defined(__x86_64__)
    if (streams) {
        for (uint64_t i = 0; i < count; i += STREAM_BYTES / sizeof(*sum))
            _mm_stream_ps(sum + i, _mm_loadu_ps(elements + i));
        return;
    }
#endif
    (void)streams;
    memcpy(sum, elements, count * sizeof(*sum));
}

static inline __attribute__((always_inline)) void some(float *sum, const void *const *gradients,
                                                       uint32_t gradient_count, enum lh_dtype dtype,
                                                       bool is_first, bool streams, uint64_t at,
                                                       uint64_t count)
{
    uint64_t offset = at * lh_dtype_bytes(dtype);
    const uint8_t *first = (const uint8_t *)gradients[0] + offset;
    float elements[BATCH];

    for (uint64_t i = 0; i < count; i++)
        elements[i] =
            is_first ? element_at(first, dtype, i) : sum[at + i] + element_at(first, dtype, i);
    for (uint32_t j = 1; j < gradient_count; j++) {
        const uint8_t *later = (const uint8_t *)gradients[j] + offset;

        for (uint64_t i = 0; i < count; i++)
            elements[i] += element_at(later, dtype, i);
    }
    store(sum + at, elements, streams, count);
}

static inline __attribute__((always_inline)) void all(float *sum, const void *const *gradients,
                                                      uint32_t gradient_count, enum lh_dtype dtype,
                                                      bool is_first, uint64_t count)
{
    bool streams = is_first && (uintptr_t)sum % STREAM_BYTES == 0;
    uint64_t at = 0;

    for (; at + BATCH <= count; at += BATCH)
        some(sum, gradients, gradient_count, dtype, is_first, streams, at, BATCH);
    some(sum, gradients, gradient_count, dtype, is_first, false, at, count - at);
#if defined(__x86_64__)
    if (streams)
        _mm_sfence(); /* other threads see streamed stores only after it */
#endif
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
