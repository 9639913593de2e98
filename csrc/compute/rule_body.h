/*
 * Every rule but AdamW for vectors of any width, with the compiler's own vector types. The
 * including file defines VECTOR_BYTES, TABLE (the name of the table of kernels), and, after
 * zo_vectors.h, what rule_core.h needs, halves_load() and halves_store().
 *
 * The arithmetic is rule_core.h, as in rule_ref.c, to which elements that fill no vector are left:
 * both write the same bits.
 */
#ifndef LH_COMPUTE_RULE_BODY_H
#define LH_COMPUTE_RULE_BODY_H

#include <string.h>

#include "base/assert.h"
#include "compute/adam_kernels.h"
#include "compute/rule_core.h"

#define LANES (VECTOR_BYTES / 4)
/* How far ahead memory is prefetched, in elements; see adam_avx512.c. */
#define PREFETCH_ELEMENTS 512

typedef uint16_t shorts __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef int16_t signed_shorts __attribute__((vector_size(VECTOR_BYTES / 2)));

/* What a body is inlined for: constants. */
struct form {
    rule_fn rule;
    bool has_moment1, has_moment2;
    enum lh_dtype param, gradient;
};

/* Load floats of any alignment. */
static INLINE values floats_load(const void *array, uint64_t i)
{
    values loaded;

    memcpy(&loaded, (const float *)array + i, sizeof(loaded));
    return loaded;
}

/* Store floats at any alignment. */
static INLINE void floats_store(void *array, uint64_t i, values stored)
{
    memcpy((float *)array + i, &stored, sizeof(stored));
}

/* Load elements of 2 bytes as the upper halves of words. */
static INLINE words uppers_load(const void *array, uint64_t i)
{
    shorts loaded;

    memcpy(&loaded, (const uint16_t *)array + i, sizeof(loaded));
    return __builtin_convertvector(loaded, words) << 16;
}

/* Store the lower halves of words. */
static INLINE void lowers_store(void *array, uint64_t i, words stored)
{
    shorts narrow = __builtin_convertvector(stored, shorts);

    memcpy((uint16_t *)array + i, &narrow, sizeof(narrow));
}

/* Load gradients, not yet multiplied by gradient_scale. */
static INLINE values gradient_load(const struct lh_adam_run *run, uint64_t i,
                                   const enum lh_dtype dtype)
{
    if (dtype == LH_DTYPE_BF16)
        return (values)uppers_load(run->gradient, i);
    if (dtype == LH_DTYPE_F16)
        return halves_load((const uint16_t *)run->gradient + i);
    return floats_load(run->gradient, i);
}

/* Load masters: [Note: 12P], [Note: 14P]. */
static INLINE values param_load(const struct lh_adam_run *run, uint64_t i,
                                const enum lh_dtype dtype)
{
    signed_shorts residual;

    if (dtype != LH_DTYPE_BF16)
        return floats_load(dtype == LH_DTYPE_F16 ? run->residual : run->param, i);
    memcpy(&residual, (const int16_t *)run->residual + i, sizeof(residual));
    return (values)(uppers_load(run->param, i) + (words) __builtin_convertvector(residual, ints));
}

/* Store masters, and what they are rounded to. */
static INLINE void param_store(const struct lh_adam_run *run, uint64_t i, values p,
                               const enum lh_dtype dtype)
{
    if (dtype == LH_DTYPE_BF16) {
        lowers_store(run->param, i, ((words)p + 0x8000) >> 16);
        lowers_store(run->residual, i, (words)p & 0xFFFF);
        return;
    }
    floats_store(dtype == LH_DTYPE_F16 ? run->residual : run->param, i, p);
    if (dtype == LH_DTYPE_F16)
        halves_store((uint16_t *)run->param + i, p);
}

/* Replace every NaN by LH_ADAM_NAN_BITS. */
static INLINE values nan_settled(values a)
{
    words is_nan = (words)(a != a);

    return (values)(((words)a & ~is_nan) | (is_nan & LH_ADAM_NAN_BITS));
}

/* Prefetch what follows elements of an array, which has element_bytes 0 if it is NULL. */
static INLINE void prefetch(const void *array, uint64_t i, const uint64_t element_bytes)
{
    if (element_bytes > 0)
        __builtin_prefetch((const char *)array + (i + PREFETCH_ELEMENTS) * element_bytes);
}

/* Returns the number of elements updated: a multiple of LANES. */
static INLINE uint64_t body(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars,
                            const struct form form)
{
    const uint64_t count = run->count / LANES * LANES;
    words nans = {0};
    bool has_nan = false;

    for (uint64_t i = 0; i < count; i += LANES) {
        struct element e = {
            .p = param_load(run, i, form.param),
            .g = gradient_load(run, i, form.gradient) * splat(scalars->gradient_scale),
        };

        prefetch(run->param, i, lh_dtype_bytes(form.param));
        prefetch(run->gradient, i, lh_dtype_bytes(form.gradient));
        prefetch(run->residual, i, lh_adam_residual_bytes(form.param));
        prefetch(run->moment1, i, form.has_moment1 ? sizeof(float) : 0);
        prefetch(run->moment2, i, form.has_moment2 ? sizeof(float) : 0);
        if (form.has_moment1)
            e.m = floats_load(run->moment1, i);
        if (form.has_moment2)
            e.v = floats_load(run->moment2, i);
        form.rule(&e, scalars);
        if (form.has_moment1)
            floats_store(run->moment1, i, nan_settled(e.m));
        if (form.has_moment2)
            floats_store(run->moment2, i, nan_settled(e.v));
        param_store(run, i, nan_settled(e.p), form.param);
        nans |= (words)(e.p != e.p);
    }
    for (int lane = 0; lane < LANES; lane++)
        has_nan |= nans[lane] != 0;
    if (has_nan && run->has_nan)
        *run->has_nan = true;
    return count;
}

/* The body for the gradients' dtype. */
static INLINE uint64_t body_by_gradient(const struct lh_adam_run *run,
                                        const struct lh_adam_scalars *scalars, struct form form)
{
    form.gradient = LH_DTYPE_BF16;
    if (run->gradient_dtype == LH_DTYPE_BF16)
        return body(run, scalars, form);
    form.gradient = LH_DTYPE_F16;
    if (run->gradient_dtype == LH_DTYPE_F16)
        return body(run, scalars, form);
    form.gradient = LH_DTYPE_F32;
    return body(run, scalars, form);
}

/* Update a run, whose last elements are left to the definition. */
static INLINE void update(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars,
                          enum lh_rule rule, struct form form)
{
    uint64_t done;

    LH_ASSERT((run->residual != NULL) == (lh_adam_residual_bytes(run->param_dtype) > 0));
    form.param = run->param_dtype;
    if (run->param_dtype == LH_DTYPE_BF16) {
        form.param = LH_DTYPE_BF16;
        done = body_by_gradient(run, scalars, form);
    } else if (run->param_dtype == LH_DTYPE_F16) {
        form.param = LH_DTYPE_F16;
        done = body_by_gradient(run, scalars, form);
    } else {
        form.param = LH_DTYPE_F32;
        done = body_by_gradient(run, scalars, form);
    }
    if (done < run->count) {
        struct lh_adam_run rest = lh_adam_run_from(run, done);

        lh_rule_ref[rule](&rest, scalars);
    }
}

#define KERNEL(rule, name, has_moment1, has_moment2)                                               \
    static void name##_run(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars)   \
    {                                                                                              \
        update(run, scalars, (rule), (struct form){name, has_moment1, has_moment2, 0, 0});         \
    }
/* A function of each rule, and the table of them. */
RULES_EACH(KERNEL)

#define ENTRY(rule, name, has_moment1, has_moment2) [rule] = name##_run,
const lh_adam_fn TABLE[LH_RULE_COUNT] = {RULES_EACH(ENTRY)};

#endif
