/*
 * Gradients on their way from an accelerator to main memory (landing.c). Private to csrc/sched.
 */
#ifndef LH_SCHED_LANDING_H
#define LH_SCHED_LANDING_H

#include "base/error.h"
#include "mem/pool.h"
#include "sched/feature.h"

struct lh_engine;
struct lh_unit;
struct lh_chunk;
struct lh_slab;

struct lh_landing_unit {
    uint32_t count;        /* the number of this step's gradients that have not landed */
    uint32_t posted_count; /* the number of these whose copies have not begun */
    uint64_t held_bytes;   /* the bytes counted as held until all gradients are here */
    uint64_t moved_bytes;  /* gradients of this step, landed or not */
    uint64_t planned_bytes;
};

struct lh_landing_chunk {
    uint8_t *block; /* the block with its gradients; NULL: it has none */
    uint32_t count; /* posted gradients of which parts are not in the block yet */
};

struct lh_landing {
    struct lh_pool blocks; /* without a base if there are none */
    uint64_t block_bytes;
    /* The number of blocks reserved for one unit: [Note: Reserved blocks] in landing.c. */
    uint32_t reserve;
    uint32_t unit;    /* the unit that may take from the reserve */
    uint32_t *params; /* a ring of param_count parameters, in the order in which they were posted */
    uint64_t first;
    uint64_t end;
};

extern const struct lh_feature lh_landing_feature;

/* Cut the budget's memory for gradients into blocks. */
int lh_landing_create(struct lh_engine *engine, struct lh_error *err);
void lh_landing_destroy(struct lh_engine *engine);
/* The bytes that a unit's waiting gradients take: whole blocks where they lie in blocks. */
uint64_t lh_landing_waiting_bytes(const struct lh_engine *engine, const struct lh_unit *unit);

#endif
