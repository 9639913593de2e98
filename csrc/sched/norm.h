/*
 * The norm of all gradients of a step, known before its first update, and the sums of squares of
 * rows and factors of second moments, known before the update of their unit (norm.c). Private to
 * csrc/sched.
 *
 *      NONE -> RUNNING      norm_start      a worker sums the squares of the unit's gradients
 *      RUNNING -> DONE      norm_done
 *      DONE -> NONE         forget          the step is over
 *
 * The factors of a unit, which a second job moves, have the same states.
 */
#ifndef LH_SCHED_NORM_H
#define LH_SCHED_NORM_H

#include "compute/factor.h"
#include "sched/feature.h"
#include "sched/job.h"
#include "sched/states.h"

struct lh_engine;
struct lh_unit;
struct lh_chunk;
struct lh_slab;

struct lh_norm_unit {
    enum lh_norm_state state;
    enum lh_norm_state factors;
    struct lh_job job; /* of the sums, and later of the factors */
};

/* The factors of a parameter, and what they follow from. */
struct lh_norm_factors {
    const struct lh_engine *engine;
    uint32_t param;
    struct lh_factors factors;
    struct lh_factor_work work;
};

struct lh_norm {
    double square_sum; /* the sum of squares of the step whose norm was requested last */
    /* each parameter's sum, valid once its unit is DONE; param_count more are scratch */
    double *sums;
    double *row_sums;                /* each row's sum; NULL: no rule has rows */
    uint64_t *row_first;             /* each parameter's first row in row_sums */
    struct lh_norm_factors *factors; /* each parameter's; NULL: no rule has factors */
    bool is_asked;
    bool is_taken; /* each unit is summed as soon as its gradients have arrived */
};

extern const struct lh_feature lh_norm_feature;

/* Allocate the sums. */
int lh_norm_create(struct lh_engine *engine, struct lh_error *err);
void lh_norm_destroy(struct lh_engine *engine);
/* Whether a rule needs sums of rows or factors, whatever the schedule. */
bool lh_norm_is_of_rule(const struct lh_engine *engine);
/* Start summing the unit's gradients if all have arrived and their sums are needed. */
void lh_norm_consider(struct lh_engine *engine, struct lh_unit *unit);

#endif
