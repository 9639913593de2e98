#include "compute/norm.h"

#include <string.h>

#include "base/assert.h"
#include "compute/half.h"

#define LANE_COUNT 8

static inline double element_at(const uint8_t *bytes, enum lh_dtype dtype, uint64_t i)
{
    uint32_t bits = 0;
    float value;

    if (dtype == LH_DTYPE_BF16) {
        uint16_t high;
        memcpy(&high, bytes + 2 * i, sizeof(high));
        bits = (uint32_t)high << 16;
    } else if (dtype == LH_DTYPE_F16) {
        uint16_t half;
        memcpy(&half, bytes + 2 * i, sizeof(half));
        bits = lh_half_widen(half);
    } else {
        memcpy(&bits, bytes + 4 * i, sizeof(bits));
    }
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* Lanes hide the latency of the addition; they are added in order. */
static inline __attribute__((always_inline)) double sum_of(const uint8_t *bytes,
                                                           enum lh_dtype dtype, uint64_t count)
{
    double lanes[LANE_COUNT] = {0};
    double sum = 0;
    uint64_t i = 0;

    for (; i + LANE_COUNT <= count; i += LANE_COUNT) {
        for (uint64_t lane = 0; lane < LANE_COUNT; lane++) {
            double value = element_at(bytes, dtype, i + lane);
            lanes[lane] += value * value;
        }
    }
    for (; i < count; i++) {
        double value = element_at(bytes, dtype, i);
        lanes[i % LANE_COUNT] += value * value;
    }
    for (int lane = 0; lane < LANE_COUNT; lane++)
        sum += lanes[lane];
    return sum;
}

double lh_norm_square_sum(const void *elements, enum lh_dtype dtype, uint64_t count)
{
    LH_ASSERT(dtype <= LH_DTYPE_F16);
    if (dtype == LH_DTYPE_BF16)
        return sum_of(elements, LH_DTYPE_BF16, count);
    if (dtype == LH_DTYPE_F16)
        return sum_of(elements, LH_DTYPE_F16, count);
    return sum_of(elements, LH_DTYPE_F32, count);
}
