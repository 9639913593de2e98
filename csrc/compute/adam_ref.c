/*
 * The definition of an update: one element at a time, with every rounding explicit (adam.h has the
 * formulas). This file is compiled with -ffp-contract=off. fmaf() rounds once on every machine, in
 * software where no such instruction exists.
 */
#include <math.h>
#include <string.h>

#include "base/assert.h"
#include "compute/adam_kernels.h"
#include "compute/half.h"

/* Arrays may have any alignment, so elements are copied, not dereferenced. */
static uint32_t load_u32(const void *array, uint64_t index)
{
    uint32_t value;

    memcpy(&value, (const char *)array + index * sizeof(value), sizeof(value));
    return value;
}

static uint16_t load_u16(const void *array, uint64_t index)
{
    uint16_t value;

    memcpy(&value, (const char *)array + index * sizeof(value), sizeof(value));
    return value;
}

static void store_u32(void *array, uint64_t index, uint32_t value)
{
    memcpy((char *)array + index * sizeof(value), &value, sizeof(value));
}

static void store_u16(void *array, uint64_t index, uint16_t value)
{
    memcpy((char *)array + index * sizeof(value), &value, sizeof(value));
}

static float float_from_bits(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* The bits to write for value: LH_ADAM_NAN_BITS for any NaN, otherwise the value's own bits. */
static uint32_t bits_to_write(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return isnan(value) ? LH_ADAM_NAN_BITS : bits;
}

static float gradient_load(const struct lh_adam_run *run, uint64_t index)
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
static float param_load(const struct lh_adam_run *run, uint64_t index)
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
static void param_store(const struct lh_adam_run *run, uint64_t index, uint32_t bits)
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

static void update(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars, bool roots)
{
    LH_ASSERT((run->residual != NULL) == (lh_adam_residual_bytes(run->param_dtype) > 0));
    bool has_nan = false;

    for (uint64_t i = 0; i < run->count; i++) {
        float g = gradient_load(run, i) * scalars->gradient_scale;
        float m = float_from_bits(load_u32(run->moment1, i));
        float v = float_from_bits(load_u32(run->moment2, i));
        float p = param_load(run, i);
        float d, root;

        m = fmaf(g - m, scalars->beta1_rest, m);
        v = fmaf(v, scalars->beta2, (g * scalars->beta2_rest) * g);
        root = sqrtf(v);
        d = fmaf(root, scalars->bias2_sqrt_inverse, scalars->eps);
        p = fmaf(-scalars->step_size, m / d, p * scalars->decay);

        store_u32(run->moment1, i, bits_to_write(m));
        store_u32(run->moment2, i, bits_to_write(roots ? root : v));
        param_store(run, i, bits_to_write(p));
        has_nan |= isnan(p);
    }
    if (has_nan && run->has_nan)
        *run->has_nan = true;
}

void lh_adam_ref(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars)
{
    update(run, scalars, false);
}

void lh_adam_ref_roots(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars)
{
    update(run, scalars, true);
}
