/*
 * The definition of every rule: rule_core.h, one element at a time. This file is compiled with
 * -ffp-contract=off. fmaf() rounds once on every machine, in software where no such instruction
 * exists.
 */
#include "base/assert.h"
#include "compute/rule_element.h"

#define INLINE inline __attribute__((always_inline))

typedef float values;

static INLINE values fma_of(values a, values b, values c)
{
    return fmaf(a, b, c);
}

static INLINE values root_of(values a)
{
    return sqrtf(a);
}

static INLINE values sign_of(values a)
{
    return (float)(a > 0) - (float)(a < 0);
}

static INLINE values splat(float a)
{
    return a;
}

#include "compute/rule_core.h"

static INLINE void update(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars,
                          rule_fn rule)
{
    LH_ASSERT((run->residual != NULL) == (lh_adam_residual_bytes(run->param_dtype) > 0));
    bool has_nan = false;

    for (uint64_t i = 0; i < run->count; i++) {
        struct element e = {
            .p = param_load(run, i),
            .g = gradient_load(run, i) * scalars->gradient_scale,
            .m = run->moment1 ? float_from_bits(load_u32(run->moment1, i)) : 0,
            .v = run->moment2 ? float_from_bits(load_u32(run->moment2, i)) : 0,
        };

        rule(&e, scalars);
        if (run->moment1)
            store_u32(run->moment1, i, bits_to_write(e.m));
        if (run->moment2)
            store_u32(run->moment2, i, bits_to_write(run->has_roots ? sqrtf(e.v) : e.v));
        param_store(run, i, bits_to_write(e.p));
        has_nan |= isnan(e.p);
    }
    if (has_nan && run->has_nan)
        *run->has_nan = true;
}

#define KERNEL(rule, name, has_moment1, has_moment2)                                               \
    static void name##_run(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars)   \
    {                                                                                              \
        update(run, scalars, name);                                                                \
    }
RULES_EACH(KERNEL)

#define ENTRY(rule, name, has_moment1, has_moment2) [rule] = name##_run,
const lh_adam_fn lh_rule_ref[LH_RULE_COUNT] = {RULES_EACH(ENTRY)};
