/* Parameters stored in a different format than computation reads (zo.h, [Note: Kept formats]). */
#include <string.h>

#include "base/assert.h"
#include "compute/half.h"
#include "compute/zo_environment.h"
#include "compute/zo_kernels.h"

/* Elements processed at a time: few enough for all their formats to stay in the L1 cache. */
#define CHUNK 2048

uint64_t lh_zo_format_bytes(enum lh_zo_format format)
{
    return format == LH_ZO_FORMAT_F32 ? 4 : format == LH_ZO_FORMAT_F8 ? 1 : 2;
}

static uint32_t f8_widen(uint8_t kept)
{
    uint32_t magnitude = kept & UINT32_C(0x7F), sign = (uint32_t)(kept >> 7) << 31, bits;
    float low = (float)magnitude * 0x1p-9f; /* the value below the smallest normal number */
    memcpy(&bits, &low, sizeof(bits));
    if (magnitude >= 8)
        bits = (magnitude << 20) + (UINT32_C(120) << 23);
    return sign | (magnitude == 0x7F ? bits | LH_ZO_NAN : bits);
}

void lh_zo_widen_ref(float *values, const void *kept, enum lh_zo_format format, uint64_t count)
{
    const uint16_t *halves = kept;
    const uint8_t *bytes = kept;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits = format == LH_ZO_FORMAT_BF16  ? (uint32_t)halves[i] << 16
                        : format == LH_ZO_FORMAT_F16 ? lh_half_widen(halves[i])
                                                     : f8_widen(bytes[i]);
        memcpy(values + i, &bits, sizeof(bits));
    }
}

static uint16_t bf16_nearest(uint32_t bits)
{
    bool is_nan = (bits & UINT32_C(0x7FFFFFFF)) > UINT32_C(0x7F800000);
    return (uint16_t)(is_nan ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

void lh_zo_cast_ref(void *cast, const float *values, enum lh_zo_format format, uint64_t count)
{
    uint16_t *halves = cast;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof(bits));
        halves[i] = format == LH_ZO_FORMAT_BF16 ? bf16_nearest(bits) : lh_half_round(bits);
    }
}

static uint8_t f8_narrow(uint32_t bits)
{
    uint32_t magnitude = bits & UINT32_C(0x7FFFFFFF), sign = bits >> 24 & 0x80;
    float value;
    memcpy(&value, &magnitude, sizeof(value));
    if (magnitude > UINT32_C(0x7F800000))
        return (uint8_t)(sign | 0x7F);
    if (magnitude < UINT32_C(121) << 23)
        return (uint8_t)(sign | (uint32_t)(value * 0x1p9f));
    return (uint8_t)(sign | (magnitude - (UINT32_C(120) << 23)) >> 20);
}

void lh_zo_narrow_ref(void *kept, const float *values, enum lh_zo_format format, uint64_t count)
{
    uint16_t *halves = kept;
    uint8_t *bytes = kept;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof(bits));
        if (format == LH_ZO_FORMAT_BF16)
            halves[i] = (uint16_t)(bits >> 16);
        else if (format == LH_ZO_FORMAT_F16)
            halves[i] = lh_half_round(bits);
        else
            bytes[i] = f8_narrow(bits);
    }
}

/* Process a chunk. round_count: the number of ops up to and including the last ROUND. */
static void chunk_lead(const struct lh_zo_kernel *kernel, const struct lh_zo_kept *kept,
                       uint64_t first, uint64_t count, const struct lh_zo_op *ops,
                       uint32_t op_count, uint32_t round_count)
{
    float buffer[CHUNK] __attribute__((aligned(64)));
    bool is_wide = kept->value_format == LH_ZO_FORMAT_F32;
    float *values = is_wide ? kept->values : buffer;
    const float *source = values;
    if (kept->state_format == LH_ZO_FORMAT_F32)
        source = kept->state;
    else
        kernel->widen(values, kept->state, kept->state_format, count);
    if (round_count > 0) {
        lh_zo_apply_by(kernel, values, source, first, count, ops, round_count);
        source = values;
        if (kept->state_format == LH_ZO_FORMAT_F32)
            memcpy(kept->state, values, count * sizeof(*values));
        else
            kernel->narrow(kept->state, values, kept->state_format, count);
    }
    if (source != values || round_count < op_count)
        lh_zo_apply_by(kernel, values, source, first, count, ops + round_count,
                       op_count - round_count);
    if (!is_wide)
        kernel->cast(kept->values, values, kept->value_format, count);
}

void lh_zo_lead_by(const struct lh_zo_kernel *kernel, const struct lh_zo_kept *kept, uint64_t first,
                   uint64_t count, const struct lh_zo_op *ops, uint32_t op_count)
{
    const uint64_t state_bytes = lh_zo_format_bytes(kept->state_format);
    const uint64_t value_bytes = lh_zo_format_bytes(kept->value_format);
    struct lh_zo_kept chunk = *kept;
    uint32_t round_count = 0;
    LH_ASSERT(kept->value_format != LH_ZO_FORMAT_F8);
    LH_ASSERT(first <= LH_ZO_ELEMENT_COUNT_MAX && count <= LH_ZO_ELEMENT_COUNT_MAX - first);
    for (uint32_t i = 0; i < op_count; i++) {
        LH_ASSERT(ops[i].kind != LH_ZO_OP_ROUND || ops[i].format == kept->state_format);
        round_count = ops[i].kind == LH_ZO_OP_ROUND ? i + 1 : round_count;
    }
    zo_environment_t environment = zo_environment_enter();
    for (uint64_t at = 0, next; at < count; at = next) {
        next = lh_min_u64(count, at + CHUNK - (first + at) % CHUNK);
        chunk.state = (char *)kept->state + at * state_bytes;
        chunk.values = (char *)kept->values + at * value_bytes;
        chunk_lead(kernel, &chunk, first + at, next - at, ops, op_count, round_count);
    }
    zo_environment_leave(environment);
}

void lh_zo_lead(const struct lh_zo_kept *kept, uint64_t first, uint64_t count,
                const struct lh_zo_op *ops, uint32_t op_count)
{
    const struct lh_zo_kernel *best = NULL;
    lh_zo_kernels(&best);
    lh_zo_lead_by(best, kept, first, count, ops, op_count);
}
