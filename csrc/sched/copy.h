/*
 * Copies between main memory and the accelerator. Private to csrc/sched.
 *
 * A copy is taken from a fixed table, filled in by its user, and given back when it is over. It
 * carries the function to call at its end.
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
    const char *what; /* the copy's name in messages: "a gradient's copy" */
    uint32_t unit;    /* the unit that is copied; LH_UNIT_NONE: it is no unit's copy */
    uint32_t param;   /* for a gradient: its parameter, and the chunk in which its bytes lie */
    uint32_t chunk;
    uint32_t item; /* for a saved tensor: its item */
    struct lh_copy *next_free;
};

struct lh_copies {
    struct lh_copy *all;
    struct lh_copy *free;
    uint32_t in_flight;
};

/* Create the table of opts.copy_count copies. */
int lh_copy_create(struct lh_engine *engine, struct lh_error *err);
void lh_copy_destroy(struct lh_engine *engine);
/* Whether the table has a free copy. */
bool lh_copy_is_free(const struct lh_engine *engine);
/* Take a free copy. Asserts that there is one. */
struct lh_copy *lh_copy_take(struct lh_engine *engine);
/* Start a copy. Returns false if the accelerator rejected it; the engine has then failed. */
bool lh_copy_submit(struct lh_engine *engine, struct lh_copy *copy);
/*
 * Take back finished copies; if the engine failed, without calling done(). Returns whether there
 * were any.
 */
bool lh_copy_poll(struct lh_engine *engine);

#endif
