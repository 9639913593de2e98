/*
 * Gradients that are copied from an accelerator to main memory (landing.c). A gradient has landed
 * when all of it is in main memory. Private to csrc/sched.
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
    uint32_t posted_count; /* the number of these gradients whose copies are not all issued */
    uint64_t held_bytes;   /* the bytes counted as held until all gradients have landed */
    uint64_t moved_bytes;  /* the bytes of this step's gradients, landed or not */
    uint64_t planned_bytes;
};

struct lh_landing_chunk {
    uint8_t *block; /* the block for the chunk's gradients; NULL: no block */
    uint32_t count; /* the number of posted gradients with parts missing in the block */
};

struct lh_landing {
    struct lh_pool blocks; /* the free blocks; not initialized if there is no memory for any */
    uint64_t block_bytes;
    /* The number of blocks reserved for one unit: [Note: Reserved blocks] in landing.c. */
    uint32_t reserve;
    uint32_t unit;    /* the unit that may take reserved blocks, or LH_UNIT_NONE */
    uint32_t *params; /* a ring of param_count entries: parameters in the order of posting */
    uint64_t first;
    uint64_t end;
};

extern const struct lh_feature lh_landing_feature;

/* Divide the budget's memory for gradients into blocks. */
int lh_landing_create(struct lh_engine *engine, struct lh_error *err);
void lh_landing_destroy(struct lh_engine *engine);
/* The bytes that a unit's waiting gradients take (whole blocks if gradients land in blocks). */
uint64_t lh_landing_waiting_bytes(const struct lh_engine *engine, const struct lh_unit *unit);

#endif
