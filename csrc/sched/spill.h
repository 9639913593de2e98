/*
 * Gradients that wait on SSD for the close of their step (spill.c). Private to csrc/sched.
 *
 *      NONE -> RUNNING      update_considered   all gradients of the unit are here
 *      RUNNING -> DONE      chunk_written       all its chunks are written
 *      DONE -> NONE         step_forgotten      the step is over
 *      RUNNING -> NONE      step_forgotten      or was rolled back
 */
#ifndef LH_SCHED_SPILL_H
#define LH_SCHED_SPILL_H

#include "sched/feature.h"
#include "sched/states.h"
#include "sched/transfer.h"

struct lh_engine;
struct lh_unit;
struct lh_chunk;
struct lh_slab;

struct lh_spill_unit {
    bool is_chosen; /* the unit's gradients wait on SSD while its update is deferred */
    enum lh_spill_state state;
    uint32_t next_chunk; /* index of the next chunk whose gradients are gathered into a slab */
    uint32_t written_count;
    bool is_released;      /* the gradients are only on SSD */
    bool is_stopped;       /* those that are in memory need not be on SSD */
    uint64_t moved_bytes;  /* of this step's gradients, those that are written or will be */
    uint64_t first_byte;   /* of the unit's place, if gradients lie apart */
    uint64_t planned_step; /* the last step whose plan counts writing and reading the gradients */
};

struct lh_spill {
    struct lh_source apart; /* [Note: Gradients apart] in spill.c; its store is NULL: none do */
    uint32_t *queue;        /* units whose gradients go to SSD in this step */
    uint32_t first;
    uint32_t count;
};

struct lh_spill_chunk {
    uint64_t gradient_step; /* the step whose gradients were last read back for the chunk */
};

extern const struct lh_feature lh_spill_feature;

/*
 * Choose the units whose gradients wait on SSD: all units after the first ones whose gradients fit
 * in memory. If there are none, engine->spill remains NULL.
 */
int lh_spill_create(struct lh_engine *engine, struct lh_error *err);
void lh_spill_destroy(struct lh_engine *engine);
/*
 * The norm was requested, so no gradient will follow: spill units that have only some of their
 * gradients, too.
 */
void lh_spill_consider_all(struct lh_engine *engine);
/*
 * Release a unit's gradients in memory if they are all on SSD, their sums of squares are known, and
 * no update will read them in memory.
 */
void lh_spill_release(struct lh_engine *engine, struct lh_unit *unit);

#endif
