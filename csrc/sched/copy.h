/*
 * Copies between main memory and the accelerator. Private to csrc/sched.
 *
 * A user takes a copy from a fixed table, fills it in and submits it; when the copy is over, the
 * engine calls the copy's done() and returns it to the table. A part of the table is reserved for
 * each kind of user, so that the many pieces of gradients, say, do not delay the loads of units.
 */
#ifndef LH_SCHED_COPY_H
#define LH_SCHED_COPY_H

#include "dev/dev.h"
#include "sched/engine.h"

struct lh_engine;

enum lh_copy_user {
    LH_COPY_USER_UNIT, /* units' parameters, either way */
    LH_COPY_USER_GRADIENT,
    LH_COPY_USER_SAVED_OUT,
    LH_COPY_USER_SAVED_IN,
};
#define LH_COPY_USER_COUNT 4

struct lh_copy {
    struct lh_dev_copy dev;
    /* Called on the engine's thread when the bytes have been copied. */
    void (*done)(struct lh_engine *engine, struct lh_copy *copy);
    const char *what; /* the copy's name in messages: "a gradient's copy" */
    enum lh_copy_user user;
    uint32_t unit;  /* the unit to which the bytes belong; LH_UNIT_NONE: to no unit */
    uint32_t param; /* for a gradient: its parameter, and the chunk that contains the bytes */
    uint32_t chunk;
    uint32_t item; /* for a saved tensor: the item's index */
    struct lh_copy *next_free;
};

#define LH_COPY_SPAN_COUNT 64

/* When the newest copies of one queue were executed. */
struct lh_copy_spans {
    uint64_t start_ns[LH_COPY_SPAN_COUNT];
    uint64_t end_ns[LH_COPY_SPAN_COUNT];
    uint64_t count;
};

struct lh_copies {
    struct lh_copy *all;
    struct lh_copy *free;
    uint32_t in_flight;
    uint32_t taken[LH_COPY_USER_COUNT];
    struct lh_copy_spans spans[2]; /* of copies to the device: not aside, and aside (dev.h) */
};

/* Create the table of opts.copy_count copies. */
int lh_copy_create(struct lh_engine *engine, struct lh_error *err);
void lh_copy_destroy(struct lh_engine *engine);
/* Whether the table has a free copy for this user. */
bool lh_copy_is_free(const struct lh_engine *engine, enum lh_copy_user user);
/* Take a free copy from the table. Asserts that one is free for this user. */
struct lh_copy *lh_copy_take(struct lh_engine *engine, enum lh_copy_user user);
/* Start a copy. Returns false if the accelerator rejected it; the engine has then failed. */
bool lh_copy_submit(struct lh_engine *engine, struct lh_copy *copy);
/*
 * Return finished copies to the table; done() is called unless the engine has failed. Returns
 * whether any copy had finished.
 */
bool lh_copy_poll(struct lh_engine *engine);

#endif
