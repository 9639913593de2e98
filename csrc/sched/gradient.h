/*
 * Gradients of a step: taken over from the training thread, and later released to it. Private to
 * csrc/sched.
 */
#ifndef LH_SCHED_GRADIENT_H
#define LH_SCHED_GRADIENT_H

#include <stdatomic.h>

#include "base/base.h"
#include "base/dtype.h"

struct lh_dev_fence;
struct lh_engine;
struct lh_factors;
struct lh_unit;

struct lh_gradient {
    const void *pointer; /* NULL: the parameter has no gradient in this step */
    enum lh_dtype dtype;
    struct lh_dev_fence *is_computed; /* used only with an accelerator, as are the next two */
    uint64_t issued;                  /* the number of elements whose copies have begun */
    uint32_t copies;                  /* the number of copies in flight */
    const double *row_sums;           /* of its rows' squares, if the update needs them */
    struct lh_factors *factors;       /* of its second moments, if the update needs them */
    float *update;                    /* of a matrix: what the momentum becomes, or NULL */
    _Atomic bool is_held; /* posted and not released: the caller keeps the tensor alive */
};

/* Handle the training thread's message that the gradient of a parameter is ready. */
void lh_gradient_take(struct lh_engine *engine, uint32_t param, const void *pointer,
                      enum lh_dtype dtype);
/*
 * Release a gradient to the training thread. The caller of this function must notify waiting
 * threads.
 */
void lh_gradient_release(struct lh_engine *engine, uint32_t param);
/* Release a unit's gradients, which no update holds any longer, and notify waiting threads. */
void lh_gradient_release_unit(struct lh_engine *engine, struct lh_unit *unit);
/* Count a unit's gradients as held by an update in progress, once per step. */
void lh_gradient_hold_unit(struct lh_engine *engine, struct lh_unit *unit);
/* Count bytes of gradients as held by updates in progress, until lh_gradient_unhold(). */
void lh_gradient_hold(struct lh_engine *engine, uint64_t bytes);
void lh_gradient_unhold(struct lh_engine *engine, uint64_t bytes);
/*
 * The address of the gradient of one element of param's unit, in memory that continues with the
 * following elements of param in the same chunk. The address is where the caller has the gradient,
 * or where a feature has put it. Thread: any.
 */
const uint8_t *lh_gradient_at(const struct lh_engine *engine, uint32_t param, uint64_t element);

#endif
