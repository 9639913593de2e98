/*
 * The arithmetic of every rule, with every rounding explicit: rule.h has the formulas. It
 * is written once, for floats and for vectors of any width. The including file defines `values`,
 * INLINE, fma_of(), root_of(), sign_of() (1, -1 or 0; 0 for NaN) and splat().
 */
#ifndef LH_COMPUTE_RULE_CORE_H
#define LH_COMPUTE_RULE_CORE_H

#include "compute/adam.h"

/* Elements: parameters, gradients times gradient_scale, and moments, 0 where a rule has none. */
struct element {
    values p, g, m, v;
};

typedef void (*rule_fn)(struct element *e, const struct lh_adam_scalars *scalars);

/*
 * The rules below, each with the moments that its row in rule.c has: first, second. Adafactor's
 * second one is not stored: a caller computes it (factor.h). In place of Muon's second moment is
 * its update (struct lh_adam_segment).
 */
#define RULES_EACH(X)                                                                              \
    X(LH_RULE_ADAMW, adamw, true, true)                                                            \
    X(LH_RULE_ADAM, adam, true, true)                                                              \
    X(LH_RULE_LION, lion, true, false)                                                             \
    X(LH_RULE_SGD, sgd, false, false)                                                              \
    X(LH_RULE_SGD_MOMENTUM, sgd_momentum, true, false)                                             \
    X(LH_RULE_ADAGRAD, adagrad, false, true)                                                       \
    X(LH_RULE_RMSPROP, rmsprop, false, true)                                                       \
    X(LH_RULE_RMSPROP_MOMENTUM, rmsprop_momentum, true, true)                                      \
    X(LH_RULE_ADAM_MINI, adam_mini, true, false)                                                   \
    X(LH_RULE_ADAFACTOR, adafactor, false, true)                                                   \
    X(LH_RULE_MUON, muon, true, true)

/* The value itself where it is finite, otherwise NaN. */
static INLINE values finite_of(values a)
{
    return fma_of(a, splat(0), a);
}

/* AdamW: adam.h. */
static INLINE void adamw(struct element *e, const struct lh_adam_scalars *scalars)
{
    values d;

    e->m = fma_of(e->g - e->m, splat(scalars->beta1_rest), e->m);
    e->v = fma_of(e->v, splat(scalars->beta2), (e->g * splat(scalars->beta2_rest)) * e->g);
    d = fma_of(root_of(e->v), splat(scalars->bias2_sqrt_inverse), splat(scalars->eps));
    e->p = fma_of(splat(-scalars->step_size), e->m / d, e->p * splat(scalars->decay));
}

/* Adam, whose weight decay is a part of the gradient. */
static INLINE void adam(struct element *e, const struct lh_adam_scalars *scalars)
{
    values g = fma_of(e->p, splat(scalars->coupled), e->g);
    values d;

    e->m = fma_of(g - e->m, splat(scalars->beta1_rest), e->m);
    e->v = fma_of(e->v, splat(scalars->beta2), (g * splat(scalars->beta2_rest)) * g);
    d = fma_of(root_of(e->v), splat(scalars->bias2_sqrt_inverse), splat(scalars->eps));
    e->p = fma_of(splat(-scalars->step_size), e->m / d, e->p);
}

/* Lion: every element changes by step_size, in the direction of the sign of c. */
static INLINE void lion(struct element *e, const struct lh_adam_scalars *scalars)
{
    values c = fma_of(e->g, splat(scalars->beta1_rest), e->m * splat(scalars->beta1));
    values moved = fma_of(c, splat(0), sign_of(c)); /* NaN where c is not finite */

    e->p = fma_of(splat(-scalars->step_size), moved, e->p * splat(scalars->decay));
    e->m = fma_of(e->g, splat(scalars->beta2_rest), e->m * splat(scalars->beta2));
}

/* SGD without momentum. */
static INLINE void sgd(struct element *e, const struct lh_adam_scalars *scalars)
{
    values g = fma_of(e->p, splat(scalars->coupled), e->g);

    e->p = finite_of(fma_of(splat(-scalars->step_size), g, e->p));
}

/* SGD with momentum. */
static INLINE void sgd_momentum(struct element *e, const struct lh_adam_scalars *scalars)
{
    values g = fma_of(e->p, splat(scalars->coupled), e->g);
    values d;

    e->m = fma_of(g, splat(scalars->beta1_rest), e->m * splat(scalars->beta1));
    d = fma_of(e->m, splat(scalars->eps), g * splat(scalars->beta2));
    e->p = finite_of(fma_of(splat(-scalars->step_size), d, e->p));
}

/* The gradient divided by the root of the second moment, of Adagrad and RMSprop. */
static INLINE values by_root(values g, values v, const struct lh_adam_scalars *scalars)
{
    return g / (root_of(v) + splat(scalars->eps));
}

/* Adagrad: the second moment is the sum of squares. */
static INLINE void adagrad(struct element *e, const struct lh_adam_scalars *scalars)
{
    values g = fma_of(e->p, splat(scalars->coupled), e->g);

    e->v = fma_of(g, g, e->v + splat(scalars->beta1));
    e->p = fma_of(splat(-scalars->step_size), by_root(g, e->v, scalars), e->p);
}

/* RMSprop without momentum. */
static INLINE void rmsprop(struct element *e, const struct lh_adam_scalars *scalars)
{
    values g = fma_of(e->p, splat(scalars->coupled), e->g);

    e->v = fma_of(e->v, splat(scalars->beta2), (g * splat(scalars->beta2_rest)) * g);
    e->p = fma_of(splat(-scalars->step_size), by_root(g, e->v, scalars), e->p);
}

/* RMSprop with momentum. */
static INLINE void rmsprop_momentum(struct element *e, const struct lh_adam_scalars *scalars)
{
    values g = fma_of(e->p, splat(scalars->coupled), e->g);
    values q, d;

    e->v = fma_of(e->v, splat(scalars->beta2), (g * splat(scalars->beta2_rest)) * g);
    q = by_root(g, e->v, scalars);
    e->m = fma_of(q, splat(scalars->beta1_rest), e->m * splat(scalars->beta1));
    d = fma_of(e->m, splat(scalars->beta1_rest), q * splat(1 - scalars->beta1_rest));
    e->p = fma_of(splat(-scalars->step_size), d, e->p);
}

/* Adam-mini, for elements of one row, whose root of the second moment is in eps. */
static INLINE void adam_mini(struct element *e, const struct lh_adam_scalars *scalars)
{
    values moved;

    e->m = fma_of(e->g - e->m, splat(scalars->beta1_rest), e->m);
    moved = e->m / splat(scalars->eps);
    e->p = fma_of(splat(-scalars->step_size), moved, e->p * splat(scalars->decay));
}

/* Adafactor, with an element's estimate of its second moment. */
static INLINE void adafactor(struct element *e, const struct lh_adam_scalars *scalars)
{
    values moved = e->g / root_of(e->v);

    e->p = fma_of(splat(-scalars->step_size), moved, e->p * splat(scalars->decay));
}

/* Muon, whose orthogonalized momentum is in v. */
static INLINE void muon(struct element *e, const struct lh_adam_scalars *scalars)
{
    e->m = fma_of(e->g - e->m, splat(scalars->beta1_rest), e->m);
    e->p = fma_of(splat(-scalars->step_size), e->v, e->p * splat(scalars->decay));
}

#endif
