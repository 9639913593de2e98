/*
 * The definition of an update: one element at a time, with every rounding explicit (adam.h has the
 * formulas). This file is compiled with -ffp-contract=off. fmaf() rounds once on every machine, in
 * software where no such instruction exists.
 */
#include "base/assert.h"
#include "compute/rule_element.h"

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
