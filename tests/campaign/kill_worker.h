/*
 * What the worlds of kill_worker.c share: a page that a life shares with the process that kills it,
 * and what a world can do.
 */
#ifndef LH_CAMPAIGN_KILL_WORKER_H
#define LH_CAMPAIGN_KILL_WORKER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* What a life was doing when it was killed. */
enum phase {
    PHASE_CREATE,
    PHASE_OPEN,
    PHASE_STEP,
    PHASE_COMMIT,
    PHASE_EDIT, /* some bytes of an extent are replaced */
    PHASE_COPY, /* the store is copied into another one */
    PHASE_CLOSE,
    PHASE_COUNT,
};

extern const char *const phase_names[PHASE_COUNT];

/* In memory that the killing process and the life share. */
struct shared {
    _Atomic uint32_t phase;
    _Atomic uint32_t is_made;  /* the creation has returned */
    _Atomic uint32_t is_dirty; /* a store with one slot has uncommitted bytes */
    _Atomic uint64_t least;    /* the newest step that is certainly committed */
    _Atomic uint64_t most;     /* the newest step that may be committed */
    _Atomic uint64_t calls;    /* the number of calls of a life that was not killed */
    _Atomic uint64_t found;    /* the step that a check found */
};

/* The result of a check; any other value is a failure. */
#define CHECK_HELD 0
#define CHECK_REFUSED 10 /* the store was rejected with a named error, as it may be */

struct world {
    const char *name;
    uint64_t step_max; /* after this step the existing store is removed, and a new one begun */
    void (*prepare)(void);
    /*
     * The rest in a process of its own. life: create the store or open it, go on, close; arms the
     * calls itself. check: the store is whole.
     */
    void (*life)(const char *name, uint64_t seed, struct shared *shared, bool is_there,
                 void (*arm)(void));
    int (*check)(const char *name, uint64_t seed, struct shared *shared, bool was_there);
};

extern const struct world world_engine;
extern const struct world world_store;

#endif
