/*
 * Gradients on their way from an accelerator to main memory (landing.c). Private to csrc/sched.
 */
#ifndef LH_SCHED_LANDING_H
#define LH_SCHED_LANDING_H

#include "base/error.h"
#include "sched/feature.h"

struct lh_engine;
struct lh_unit;
struct lh_chunk;
struct lh_slab;

#define LH_BLOCK_NONE UINT32_MAX

struct lh_landing_unit {
    uint32_t count;        /* gradients of this step on their way */
    uint32_t posted_count; /* of these, not all of whose copies began */
    uint64_t held_bytes;   /* counted as held until they are all here */
    uint64_t moved_bytes;  /* of this step: landed, or on their way */
    uint64_t planned_bytes;
};

struct lh_landing_chunk {
    uint32_t block; /* where its gradients are; LH_BLOCK_NONE */
    uint32_t count; /* gradients posted that are not all in it */
};

struct lh_landing {
    uint8_t *memory; /* of the blocks */
    uint64_t block_bytes;
    uint32_t *free_blocks;
    uint32_t free_count;
    uint32_t reserve; /* [Note: Blocks that come back] in landing.c */
    uint32_t unit;    /* whose turn it is to take from the reserve */
    uint32_t *params; /* as they were posted; a ring of param_count */
    uint64_t first;
    uint64_t end;
};

extern const struct lh_feature lh_landing_feature;

/* Cut the budget's memory for gradients into blocks. */
int lh_landing_create(struct lh_engine *engine, struct lh_error *err);
void lh_landing_destroy(struct lh_engine *engine);
/* Of a unit whose gradients wait: in whole blocks where they lie in such. */
uint64_t lh_landing_waiting_bytes(const struct lh_engine *engine, const struct lh_unit *unit);

#endif
