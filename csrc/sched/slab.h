/*
 * Slabs: main memory in which a chunk's residual, first and second moment (R, M, V) are read,
 * updated and written. Private to csrc/sched.
 *
 * A slab is free, holds a chunk's states, or is lent to a feature for other bytes of a chunk.
 */
#ifndef LH_SCHED_SLAB_H
#define LH_SCHED_SLAB_H

#include "compute/adam.h"
#include "sched/job.h"
#include "sched/transfer.h"

struct lh_chunk;
struct lh_engine;
struct lh_unit;

#define LH_SLAB_TRANSFER_COUNT 4
/* The arrays R, M and V, in a slab's order. */
#define LH_STATE_ARRAY_COUNT 3

struct lh_slab {
    struct lh_engine *engine;
    uint8_t *memory;  /* R | M | V */
    uint32_t chunk;   /* LH_CHUNK_NONE: free */
    bool is_lent;     /* the chunk's states are not here */
    uint32_t pending; /* transfers not finished */
    struct lh_transfer transfers[LH_SLAB_TRANSFER_COUNT];
    struct lh_job job;
    struct lh_adam_chunk adam;
    struct lh_adam_segment *segments;
    /*
     * The checksums that R, M and V must have. Copied, because the slot that is written may be the
     * slot that was read.
     */
    uint32_t *expected[LH_STATE_ARRAY_COUNT];
    bool is_zero[LH_STATE_ARRAY_COUNT]; /* never written: filled by the job instead of read */
    const uint8_t *gradients;           /* the chunk's, read beside its states; may be NULL */
    uint32_t *checksums;                /* where a feature's job puts checksums of its output */
    struct lh_adam_mismatch mismatch;
    int result;
};

/* Divide the budget's memory into slabs. */
int lh_slab_create(struct lh_engine *engine, struct lh_error *err);
void lh_slab_destroy(struct lh_engine *engine);
/* Where array begins in a slab that holds count elements of the unit. */
uint8_t *lh_slab_array(const struct lh_slab *slab, const struct lh_unit *unit, uint32_t array,
                       uint64_t count);
/*
 * Find a slab for a chunk of unit, or (unit NULL) for a feature: a free one, or one whose chunk was
 * read ahead. LH_CHUNK_NONE: there is none now.
 */
uint32_t lh_slab_find(struct lh_engine *engine, const struct lh_unit *unit);
/* Give a free slab to a chunk, or lend it to a feature until lh_slab_return(). */
void lh_slab_give(struct lh_engine *engine, struct lh_slab *slab, struct lh_chunk *chunk);
void lh_slab_lend(struct lh_engine *engine, struct lh_slab *slab, const struct lh_chunk *chunk);
void lh_slab_return(struct lh_engine *engine, struct lh_slab *slab);
/* Free the slab, and make its chunk IDLE. */
void lh_slab_clear(struct lh_engine *engine, struct lh_slab *slab);
/* Count and trace a job that has run on a slab. */
void lh_slab_job_account(struct lh_engine *engine, const struct lh_job *job,
                         enum lh_engine_trace_kind kind);

#endif
