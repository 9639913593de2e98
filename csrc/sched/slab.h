/*
 * Slabs: main memory in which a chunk's residual, first and second moment (R, M, V), the scales of
 * 8-bit moments or the second moments of rows (S), and the average of the parameters (E) are read,
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

#define LH_SLAB_TRANSFER_COUNT 6
/* The arrays R, M, V, S and E, in a slab's order. */
#define LH_STATE_ARRAY_COUNT 5

struct lh_slab {
    struct lh_engine *engine;
    uint8_t *memory;  /* R | M | V | S | E */
    uint32_t chunk;   /* LH_CHUNK_NONE: free */
    bool is_lent;     /* lent to a feature: the chunk's states are not in the slab */
    uint32_t pending; /* the number of transfers that are not finished */
    struct lh_transfer transfers[LH_SLAB_TRANSFER_COUNT];
    struct lh_job job;
    struct lh_adam_chunk adam;
    struct lh_adam_segment *segments;
    /*
     * The checksums that the arrays must have. These are copies, because the slot that is written
     * may be the slot that was read.
     */
    uint32_t *expected[LH_STATE_ARRAY_COUNT];
    /* the array was never written: the job fills it with zeros */
    bool is_zero[LH_STATE_ARRAY_COUNT];
    /* the chunk's gradients, if they were read with its states, or NULL */
    const uint8_t *gradients;
    /* where a feature's job writes the checksums of its output */
    uint32_t *checksums;
    struct lh_adam_mismatch mismatch;
    uint32_t nan_segment; /* as in struct lh_adam_chunk, if such updates are refused */
    int result;
};

/* Divide the budget's memory for slabs into slabs. */
int lh_slab_create(struct lh_engine *engine, struct lh_error *err);
void lh_slab_destroy(struct lh_engine *engine);
/* The address of array in a slab that holds count elements of the unit. */
uint8_t *lh_slab_array(const struct lh_slab *slab, const struct lh_unit *unit, uint32_t array,
                       uint64_t count);
/*
 * Find a slab for a chunk of unit, or for a feature (unit is NULL): a free slab, or one that can be
 * taken from another chunk. Returns LH_CHUNK_NONE if there is no such slab now.
 */
uint32_t lh_slab_find(struct lh_engine *engine, const struct lh_unit *unit);
/* Give a free slab to a chunk, or lend it to a feature until lh_slab_return(). */
void lh_slab_give(struct lh_engine *engine, struct lh_slab *slab, struct lh_chunk *chunk);
void lh_slab_lend(struct lh_engine *engine, struct lh_slab *slab, const struct lh_chunk *chunk);
void lh_slab_return(struct lh_engine *engine, struct lh_slab *slab);
/* Free a slab, and make the chunk in it IDLE. */
void lh_slab_clear(struct lh_engine *engine, struct lh_slab *slab);
/* Add a job that has run on a slab to the statistics and the trace. */
void lh_slab_job_account(struct lh_engine *engine, const struct lh_job *job,
                         enum lh_engine_trace_kind kind);

#endif
