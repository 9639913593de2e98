/*
 * Sums of gradients over several backwards, made of gradients in an accelerator's memory (sum.c).
 * Private to csrc/sched.
 */
#ifndef LH_SCHED_SUM_H
#define LH_SCHED_SUM_H

#include "base/error.h"
#include "compute/sum_tree.h"
#include "sched/feature.h"

struct lh_engine;
struct lh_sum_piece;

/* The gradient of a parameter that is being added to its sum. */
struct lh_sum_param {
    /* Set by the training thread before it posts the gradient, while nothing is in flight. */
    const uint8_t *gradient;
    float *sum;
    enum lh_dtype dtype;
    struct lh_sum_join join;
    /* The engine's. */
    uint64_t issued; /* the number of elements whose copies have begun */
    uint32_t copies; /* the number of copies in flight */
    uint32_t jobs;   /* the number of pieces that are copied, and not yet added */
};

struct lh_sums {
    struct lh_sum_param *params; /* NULL: the engine makes no sums */
    uint32_t *queue;             /* a ring of param_count entries: parameters in order of posting */
    uint64_t first;
    uint64_t end;
    bool is_begun;               /* copies of the first gradient in the queue have begun */
    struct lh_sum_piece *pieces; /* each has a block of opts.sum_memory */
    struct lh_sum_piece *free;
    uint32_t piece_count;
    uint64_t piece_bytes;
    uint64_t moved_bytes;      /* the bytes of gradients copied in the open step */
    _Atomic uint64_t posted;   /* gradients posted by the training thread */
    _Atomic uint64_t finished; /* gradients added, or forgotten */
};

extern const struct lh_feature lh_sum_feature;

/* Divide opts.sum_memory into pieces. */
int lh_sum_create(struct lh_engine *engine, struct lh_error *err);
void lh_sum_destroy(struct lh_engine *engine);

#endif
