#include "compute/sum.h"

#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "compute/half.h"

/* The compiler vectorizes a loop with a fixed number of iterations without further hints. */
#define BATCH 64
/* The elements that are added at once after a checksum has brought them into the caches. */
#define RUN 4096

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
static inline __attribute__((always_inline)) void some(float *sum,
                                                       const struct lh_sum_source *sources,
                                                       uint32_t source_count, enum lh_dtype dtype,
                                                       bool is_first, uint64_t at, uint64_t count)
{
    uint64_t offset = at * lh_dtype_bytes(dtype);
    const uint8_t *first = (const uint8_t *)sources[0].gradient + offset;
    float elements[BATCH];

    for (uint64_t i = 0; i < count; i++)
        elements[i] = element_at(first, dtype, i);
    /* Its own loop: the compiler does not vectorize one with a condition. */
    for (uint64_t i = 0; i < count && !is_first; i++)
        elements[i] = sum[at + i] + elements[i];
    for (uint32_t j = 1; j < source_count; j++) {
        const uint8_t *later = (const uint8_t *)sources[j].gradient + offset;

        for (uint64_t i = 0; i < count; i++)
            elements[i] += element_at(later, dtype, i);
    }
    memcpy(sum + at, elements, count * sizeof(*sum));
}

static inline __attribute__((always_inline)) void run(float *sum,
                                                      const struct lh_sum_source *sources,
                                                      uint32_t source_count, enum lh_dtype dtype,
                                                      bool is_first, uint64_t at, uint64_t count)
{
    uint64_t end = at + count;

    for (; at + BATCH <= end; at += BATCH)
        some(sum, sources, source_count, dtype, is_first, at, BATCH);
    some(sum, sources, source_count, dtype, is_first, at, end - at);
}

void lh_sum_add_all(float *sum, struct lh_sum_source *sources, uint32_t source_count,
                    enum lh_dtype dtype, uint64_t count, bool is_first)
{
    uint64_t bytes = lh_dtype_bytes(dtype);

    LH_ASSERT(dtype <= LH_DTYPE_F16 && source_count > 0);
    for (uint64_t at = 0; at < count; at += RUN) {
        uint64_t part = lh_min_u64(count - at, RUN);

        for (uint32_t j = 0; j < source_count; j++) {
            struct lh_sum_source *source = &sources[j];

            if (source->is_checked)
                source->checksum = lh_crc32c(
                    source->checksum, (const uint8_t *)source->gradient + at * bytes, part * bytes);
        }
        if (dtype == LH_DTYPE_F32)
            run(sum, sources, source_count, LH_DTYPE_F32, is_first, at, part);
        else if (dtype == LH_DTYPE_BF16)
            run(sum, sources, source_count, LH_DTYPE_BF16, is_first, at, part);
        else
            run(sum, sources, source_count, LH_DTYPE_F16, is_first, at, part);
    }
}

void lh_sum_start(float *sum, const void *gradient, enum lh_dtype dtype, uint64_t count)
{
    struct lh_sum_source source = {.gradient = gradient};

    lh_sum_add_all(sum, &source, 1, dtype, count, true);
}

void lh_sum_add(float *sum, const void *gradient, enum lh_dtype dtype, uint64_t count)
{
    struct lh_sum_source source = {.gradient = gradient};

    lh_sum_add_all(sum, &source, 1, dtype, count, false);
}
