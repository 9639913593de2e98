/*
 * Elements of a run, one at a time: how the definitions of update rules read and write them.
 * Only csrc/compute includes this header.
 */
#ifndef LH_COMPUTE_RULE_ELEMENT_H
#define LH_COMPUTE_RULE_ELEMENT_H

#include <math.h>
#include <string.h>

#include "compute/adam_kernels.h"
#include "compute/half.h"

/* Arrays may have any alignment, so elements are copied, not dereferenced. */
static inline uint32_t load_u32(const void *array, uint64_t index)
{
    uint32_t value;

    memcpy(&value, (const char *)array + index * sizeof(value), sizeof(value));
    return value;
}

static inline uint16_t load_u16(const void *array, uint64_t index)
{
    uint16_t value;

    memcpy(&value, (const char *)array + index * sizeof(value), sizeof(value));
    return value;
}

static inline void store_u32(void *array, uint64_t index, uint32_t value)
{
    memcpy((char *)array + index * sizeof(value), &value, sizeof(value));
}

static inline void store_u16(void *array, uint64_t index, uint16_t value)
{
    memcpy((char *)array + index * sizeof(value), &value, sizeof(value));
}

static inline float float_from_bits(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* The bits to write for value: LH_ADAM_NAN_BITS for any NaN, otherwise the value's own bits. */
static inline uint32_t bits_to_write(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return isnan(value) ? LH_ADAM_NAN_BITS : bits;
}

static inline float gradient_load(const struct lh_adam_run *run, uint64_t index)
{
    if (run->gradient_dtype == LH_DTYPE_BF16)
        return float_from_bits((uint32_t)load_u16(run->gradient, index) << 16);
    if (run->gradient_dtype == LH_DTYPE_F16)
        return float_from_bits(lh_half_widen(load_u16(run->gradient, index)));
    return float_from_bits(load_u32(run->gradient, index));
}

/*
 * The inverse of [Note: 12P] or [Note: 14P]. Unsigned arithmetic keeps the overflow that damaged
 * bytes may cause defined.
 */
static inline float param_load(const struct lh_adam_run *run, uint64_t index)
{
    if (run->param_dtype == LH_DTYPE_F32)
        return float_from_bits(load_u32(run->param, index));
    if (run->param_dtype == LH_DTYPE_F16)
        return float_from_bits(load_u32(run->residual, index));
    return float_from_bits(((uint32_t)load_u16(run->param, index) << 16) +
                           (uint32_t)(int16_t)load_u16(run->residual, index));
}

/*
 * bf16: adding half a unit in P16's last place to the bit pattern rounds the magnitude to nearest,
 * ties away from zero; the low 16 bits of the difference are those of the master.
 */
static inline void param_store(const struct lh_adam_run *run, uint64_t index, uint32_t bits)
{
    if (run->param_dtype == LH_DTYPE_F32) {
        store_u32(run->param, index, bits);
        return;
    }
    if (run->param_dtype == LH_DTYPE_F16) {
        store_u16(run->param, index, lh_half_round(bits));
        store_u32(run->residual, index, bits);
        return;
    }
    store_u16(run->param, index, (uint16_t)((bits + 0x8000) >> 16));
    store_u16(run->residual, index, (uint16_t)bits);
}

#endif
