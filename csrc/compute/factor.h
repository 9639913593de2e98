/*
 * [Note: Factors] Adafactor's second moments of a parameter, and what follows from all of it.
 *
 * The last two dimensions of a parameter are those of matrices, one after the other. A matrix of
 * n rows and m columns has n + m + 1 floats: the factor of each row and column, which follow the
 * means of the squares of the gradients in it, and the mean of the factors of its rows, as of the
 * last update. A parameter with fewer dimensions has a float for each element. With g the gradient
 * times gradient_scale, t the parameter's step, and w = t^beta2_decay:
 *
 *      r = r + w (mean of the row's g^2 - r)             the same for columns, c
 *      v = max(r c / max(mean of r, eps1), eps1^2)       or v = max(v + w (g^2 - v), eps1^2)
 *      u = g / sqrt(v)
 *      step_size = max(eps2, RMS(p)) min(lr, 1 / sqrt(t)) / max(1, RMS(u))
 *      p = p (1 - lr weight_decay) - step_size u
 *
 * Everything up to step_size is computed in fp64, and only stored in fp32. A v that fp32 rounds to
 * 0 is the least positive number instead: a gradient of 0 is not a step, whatever eps1 is. A
 * sum's order depends on the parameter's elements alone. p in RMS(p) is the parameter as
 * computation reads it: P16 where there is one. The last line is the kernel's (rule.h), which is
 * given each element's v in the place of a second moment.
 *
 * The floats are in the unit's P itself, behind its parameters, where they are read, checked,
 * written and committed with it; an element of the unit is never read as both.
 *
 * Pure. Source: torch.optim.Adafactor (Shazeer and Stern 2018, with d = 1).
 */
#ifndef LH_COMPUTE_FACTOR_H
#define LH_COMPUTE_FACTOR_H

#include "base/base.h"
#include "base/dtype.h"

/* What a parameter has in an update. */
struct lh_factors {
    float *values;    /* its floats; NULL: the rule has none */
    uint64_t rows;    /* of each matrix */
    uint64_t columns; /* 0: there is a float for each element */
    double eps1;
    double step_size; /* lh_factor_update() sets it */
};

/*
 * Returns where the gradients of elements of the parameter are, from `at` on; *count_out of them
 * are consecutive in memory, at most `count`.
 */
typedef const void *(*lh_factor_gradient_fn)(const void *context, uint64_t at, uint64_t count,
                                             uint64_t *count_out);

/* What the factors and the step of a parameter follow from. */
struct lh_factor_work {
    lh_factor_gradient_fn gradient_at;
    const void *context;
    enum lh_dtype gradient_dtype; /* F32, BF16 or F16, as param_dtype */
    const void *param;            /* before the update */
    enum lh_dtype param_dtype;
    uint64_t count; /* elements */
    double gradient_scale;
    double w;
    double relative; /* min(lr, 1 / sqrt(t)) */
    double eps2;
};

/* Move the floats of a parameter, and compute its step_size, in any floating-point environment. */
void lh_factor_update(struct lh_factors *factors, const struct lh_factor_work *work);

/*
 * Compute v of count elements of a parameter from `first` on, after lh_factor_update(). The default
 * floating-point environment is required.
 */
void lh_factor_estimate(const struct lh_factors *factors, uint64_t first, uint64_t count,
                        float *out);

#endif
