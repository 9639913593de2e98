/*
 * Copies between main memory and the accelerator. Private to csrc/sched.
 *
 * A copy is taken from a fixed table, filled by whoever needs it, and given back when it is over.
 * It says itself who is told of its end.
 */
#ifndef LH_SCHED_COPY_H
#define LH_SCHED_COPY_H

#include "dev/dev.h"
#include "sched/engine.h"

struct lh_engine;

struct lh_copy {
    struct lh_dev_copy dev;
    /* Called by the engine's thread when the bytes have moved. */
    void (*done)(struct lh_engine *engine, struct lh_copy *copy);
    const char *what; /* for messages: "a gradient's copy" */
    uint32_t unit;    /* whose bytes these are; LH_UNIT_NONE: no unit's */
    uint32_t param;   /* of a gradient: whose, and in which chunk its bytes lie */
    uint32_t chunk;
    uint32_t item; /* of a saved tensor */
    struct lh_copy *next_free;
};

struct lh_copies {
    struct lh_copy *all;
    struct lh_copy *free;
    uint32_t in_flight;
};

/* The table has opts.copy_count copies. */
int lh_copy_create(struct lh_engine *engine, struct lh_error *err);
void lh_copy_destroy(struct lh_engine *engine);
/* Whether one of the table is not under way. */
bool lh_copy_is_free(const struct lh_engine *engine);
/* Asserted: one is free. */
struct lh_copy *lh_copy_take(struct lh_engine *engine);
/* Begin it. False: the accelerator refused it, and the engine has failed. */
bool lh_copy_submit(struct lh_engine *engine, struct lh_copy *copy);
/* Take back what is done. True: something was. After an error of the engine nobody is told. */
bool lh_copy_poll(struct lh_engine *engine);

#endif
