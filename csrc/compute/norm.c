#include "compute/norm.h"

#include <string.h>

#include "base/assert.h"
#include "compute/half.h"

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

static double lanes_sum(const struct lh_norm_sum *sum)
{
    double total = 0;
    for (int lane = 0; lane < LH_NORM_LANE_COUNT; lane++)
        total += sum->lanes[lane];
    return total;
}

/* Add elements of one block. Lanes hide the latency of additions; they are summed in order. */
static inline __attribute__((always_inline)) void add(struct lh_norm_sum *sum, const uint8_t *bytes,
                                                      enum lh_dtype dtype, uint64_t count)
{
    double lanes[LH_NORM_LANE_COUNT];
    uint64_t skipped = (LH_NORM_LANE_COUNT - sum->count) % LH_NORM_LANE_COUNT;
    uint64_t head = lh_min_u64(count, skipped);
    uint64_t first = sum->count;
    uint64_t i = 0;

    memcpy(lanes, sum->lanes, sizeof(lanes));
    for (; i < head; i++) {
        double value = element_at(bytes, dtype, i);
        lanes[(first + i) % LH_NORM_LANE_COUNT] += value * value;
    }
    for (; i + LH_NORM_LANE_COUNT <= count; i += LH_NORM_LANE_COUNT) {
        for (uint64_t lane = 0; lane < LH_NORM_LANE_COUNT; lane++) {
            double value = element_at(bytes, dtype, i + lane);
            lanes[lane] += value * value;
        }
    }
    for (; i < count; i++) {
        double value = element_at(bytes, dtype, i);
        lanes[(first + i) % LH_NORM_LANE_COUNT] += value * value;
    }
    memcpy(sum->lanes, lanes, sizeof(lanes));
    sum->count += count;
}

void lh_norm_sum_add(struct lh_norm_sum *sum, const void *elements, enum lh_dtype dtype,
                     uint64_t count)
{
    const uint8_t *bytes = elements;

    LH_ASSERT(dtype <= LH_DTYPE_F16);
    while (count > 0) {
        uint64_t room = LH_NORM_BLOCK_ELEMENTS - sum->count % LH_NORM_BLOCK_ELEMENTS;
        uint64_t part = lh_min_u64(count, room);

        if (dtype == LH_DTYPE_BF16)
            add(sum, bytes, LH_DTYPE_BF16, part);
        else if (dtype == LH_DTYPE_F16)
            add(sum, bytes, LH_DTYPE_F16, part);
        else
            add(sum, bytes, LH_DTYPE_F32, part);
        if (part == room) {
            sum->blocks += lanes_sum(sum);
            memset(sum->lanes, 0, sizeof(sum->lanes));
        }
        bytes += part * lh_dtype_bytes(dtype);
        count -= part;
    }
}

double lh_norm_sum_end(const struct lh_norm_sum *sum)
{
    return sum->blocks + lanes_sum(sum);
}

double lh_norm_square_sum(const void *elements, enum lh_dtype dtype, uint64_t count)
{
    struct lh_norm_sum sum = {0};
    lh_norm_sum_add(&sum, elements, dtype, count);
    return lh_norm_sum_end(&sum);
}
