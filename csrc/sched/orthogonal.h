/*
 * The updates of matrices: Muon's rule needs the momentum of a whole matrix before any element of
 * it is updated ([Note: Matrices] in compute/rule.h). Private to csrc/sched.
 *
 *      NONE -> RUNNING      start       every chunk of the unit is LOADED, with its gradients
 *      RUNNING -> DONE      next        all of the unit's matrices are orthogonalized
 *      DONE -> NONE         forget      the unit is computed, or the step is over
 *
 * In between, a unit's chunks stay LOADED and are only read: workers write the new momentum, of
 * which the chunks' updates later write the same bits, into a buffer, orthogonalize each matrix of
 * it in place, and then the chunks are updated one by one, as under every rule. So one unit at a
 * time needs slabs for all of its chunks, which the budget has (is_whole), and one buffer is
 * enough.
 */
#ifndef LH_SCHED_ORTHOGONAL_H
#define LH_SCHED_ORTHOGONAL_H

#include <stdatomic.h>

#include "compute/newton_schulz.h"
#include "sched/feature.h"
#include "sched/job.h"
#include "sched/states.h"

struct lh_engine;
struct lh_unit;

/* The most jobs that work on a stage at the same time. */
#define LH_ORTHOGONAL_JOB_COUNT_MAX 32

struct lh_orthogonal_unit {
    enum lh_orthogonal_state state;
};

/* What the tasks of a stage do. */
enum lh_orthogonal_stage {
    LH_ORTHOGONAL_STAGE_MOMENTUM, /* a task is a chunk */
    LH_ORTHOGONAL_STAGE_BEGIN,    /* of a matrix: one task */
    LH_ORTHOGONAL_STAGE_PRODUCT,  /* of a matrix: panels */
};

struct lh_orthogonal_job {
    struct lh_job job;
    struct lh_engine *engine;
    float *scratch;
};

struct lh_orthogonal {
    struct lh_unit *unit; /* whose chunks have the slabs, or NULL */
    float *updates;       /* of the unit's elements: momentum, then updates */
    float *gram;
    float *polynomial;
    float *scratch;

    enum lh_orthogonal_stage stage;
    uint32_t param; /* the matrix that is worked on */
    uint32_t product;
    struct lh_newton_schulz matrix;
    float eps;
    uint64_t task_count;
    _Atomic uint64_t task_next;
    uint32_t jobs_running;
    uint32_t job_count;
    struct lh_orthogonal_job jobs[LH_ORTHOGONAL_JOB_COUNT_MAX];
    bool is_asking; /* what other features say of a chunk */
};

extern const struct lh_feature lh_orthogonal_feature;

/* Whether there are matrices. */
bool lh_orthogonal_is_needed(const struct lh_engine *engine);
/* Allocate the buffers. */
int lh_orthogonal_create(struct lh_engine *engine, struct lh_error *err);
void lh_orthogonal_destroy(struct lh_engine *engine);

#endif
