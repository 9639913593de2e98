/*
 * Units: parameters that are loaded, lent and updated together. Private to csrc/sched.
 *
 * A unit's place in main memory; READY is mirrored in `shared.word`, which training threads read:
 *
 *      ABSENT -> LOADING     load_start            op LOAD of the plan
 *      LOADING -> READY      lh_unit_make_ready    all bytes are here and checked
 *      LOADING -> ABSENT     lh_unit_load_cancel   it is no longer awaited from another process
 *      READY -> UPDATING     lh_update_pump_take   it has no pin, and its update is queued
 *      UPDATING -> READY     lh_unit_make_ready    all chunks are computed, or none was
 *      READY -> ABSENT       lh_unit_pump          op EVICT: no pins, uses of the plan over
 *      READY -> ABSENT       lh_unit_forget        its extents changed, or it was rolled back
 *      UPDATING -> ABSENT    updates_undo          some chunks were computed
 */
#ifndef LH_SCHED_UNIT_H
#define LH_SCHED_UNIT_H

#include <stdatomic.h>

#include "sched/engine.h"
#include "sched/slab.h"
#include "sched/states.h"
#include "sched/transfer.h"
#include "sched/update.h"

struct lh_dev_fence;
struct lh_unit_parts;

#define LH_UNIT_NONE UINT32_MAX
#define LH_UNIT_READY_BIT UINT32_C(0x80000000)

/* Atomic words that training threads and the engine's thread share. */
struct lh_unit_shared {
    _Atomic uint32_t word; /* LH_UNIT_READY_BIT | pins */
    _Atomic uint32_t handles;
    _Atomic uint32_t grants;     /* pins given to waiting threads that have not yet noticed */
    _Atomic uint32_t refusals;   /* refusals that waiting threads have not yet noticed */
    _Atomic uint32_t load_count; /* reads into main memory, modulo 2^32 */
};

/*
 * Owned by the training thread: the last step in which that thread gave a gradient of the unit, and
 * the last such step after whose close it requested the unit from the engine. While the two differ,
 * an update may be pending, so the thread must request the unit even if it is READY.
 */
struct lh_unit_caller {
    uint64_t gradient_step;
    uint64_t asked_step;
};

/*
 * One array of a unit's states. Elements [i << shift, (i + 1) << shift) have `bytes` bytes of it,
 * where shift is 0 for all arrays but scales; bytes 0: the unit has no such array.
 */
struct lh_unit_state_array {
    uint32_t extent;
    uint64_t bytes;
    uint32_t shift;
};

/* A part of an array on SSD. */
struct lh_unit_state_place {
    uint32_t extent;
    uint64_t offset;
    uint64_t bytes;
};

/*
 * A unit's copy on the accelerator, with the counts of [Note: Moved units] in engine.h. It is not a
 * feature's, because pins, plans and addresses follow from where computation reads the unit;
 * device.c and unified.c decide when it is made and ends.
 */
struct lh_unit_copy {
    enum lh_copy_state state;
    /* the unit's update is queued or finished: the copy is outdated */
    bool is_stale;
    bool is_copying;              /* the unit is being copied in or back */
    uint32_t part_count;          /* number of the unit's parts whose copies are in flight */
    _Atomic bool is_modified;     /* the copy was changed: main memory has older bytes */
    bool host_matches_write_back; /* main memory has the bytes of the last copy back */
    /* the value of host_matches_write_back when this copy was made */
    _Atomic bool is_from_write_back;
    _Atomic uint32_t copy_count;
    _Atomic uint32_t out_count;
    uint64_t offset;
    uint64_t use_count;
    struct lh_dev_fence *arrived;
    struct lh_dev_fence *released;
    bool is_release_awaited; /* a marker of unified.c after `released` is in flight */
};

/* Owned by the engine's thread, except `shared` and `caller`. */
struct lh_unit {
    const struct lh_engine_unit *desc;
    struct lh_unit_parts *parts; /* the features': parts.h */
    struct lh_engine *engine;
    struct lh_unit_shared shared;
    struct lh_unit_caller caller;
    enum lh_unit_state state;
    uint64_t offset; /* the unit's offset in the plan of main memory's region, while not ABSENT */
    uint8_t *memory; /* the unit's bytes in main memory, while not ABSENT */
    uint64_t use_count; /* the number of uses of the unit's bytes in main memory since creation */
    bool use_is_open;
    uint64_t use_started_ns;
    uint32_t waiter_count;
    const struct lh_source *source; /* the files from which the unit's parameters are read */
    struct lh_transfer load;        /* also the write of the unit's dirty parameters in a flush */
    uint32_t chunk_first;
    uint32_t chunk_count;
    struct lh_unit_state_array states[LH_STATE_ARRAY_COUNT]; /* R, M, V, S and E */
    struct lh_update_unit update;
    struct lh_unit_copy copy;
};

/* Change a unit's state; only this function changes it. */
void lh_unit_state_set(struct lh_unit *unit, enum lh_unit_state state);
/* Whether a pending update, or one that the unit owes, is about to replace the unit's bytes. */
bool lh_unit_is_stale(const struct lh_engine *engine, const struct lh_unit *unit);
/*
 * Handle messages of the training thread: it pinned a READY unit, it waits for a unit, or it
 * dropped a unit's last pin.
 */
void lh_unit_use(struct lh_engine *engine, uint32_t unit);
void lh_unit_acquire(struct lh_engine *engine, uint32_t unit);
void lh_unit_release(struct lh_engine *engine, uint32_t unit);
/* The unit's bytes are where computation reads them: give a pin to each waiting thread. */
void lh_unit_grant(struct lh_engine *engine, struct lh_unit *unit);
/*
 * Whether a thread waits for the unit, and the accelerator, if there is one, has not copied it yet,
 * or a thread reads it in main memory: until then its bytes stay there.
 */
bool lh_unit_is_awaited(const struct lh_engine *engine, const struct lh_unit *unit);
/*
 * Take the unit's bytes in main memory away from their readers. Returns false if the bytes are
 * being read.
 */
bool lh_unit_claim_host(struct lh_engine *engine, struct lh_unit *unit);
void lh_unit_make_ready(struct lh_engine *engine, struct lh_unit *unit);
/* Its source will not bring a LOADING unit, which no thread waits for. */
void lh_unit_load_cancel(struct lh_unit *unit);
/* All bytes of a LOADING unit are in main memory. */
void lh_unit_arrived(struct lh_engine *engine, struct lh_unit *unit);
void lh_unit_forget(struct lh_engine *engine, uint32_t unit);
/* The same for a unit that may have readers. Returns false if it has. */
bool lh_unit_try_forget(struct lh_engine *engine, uint32_t unit);
/* Execute the plan's ops in order, as far as possible now. Returns whether anything moved. */
bool lh_unit_pump(struct lh_engine *engine);

/* Whether the unit's newest bytes are on the accelerator. */
static inline bool lh_unit_copy_is_here(const struct lh_unit_copy *copy)
{
    return copy->state == LH_COPY_STATE_READY && !copy->is_stale;
}

/* Whether the plan counts the copy's place as taken: the copy is complete or in progress. */
static inline bool lh_unit_copy_is_placed(const struct lh_unit_copy *copy)
{
    return copy->state == LH_COPY_STATE_COPYING || copy->state == LH_COPY_STATE_READY;
}

/* Where in the unit the load of its bytes begins. */
static inline uint64_t lh_unit_load_first(const struct lh_unit *unit)
{
    return unit->source->ops->load_first ? unit->source->ops->load_first(unit) : 0;
}

/* The bytes of count elements of an array. */
static inline uint64_t lh_unit_state_bytes(const struct lh_unit_state_array *array, uint64_t count)
{
    return (count >> array->shift) * array->bytes;
}

/* Where elements [first, first + count), which are in one chunk, are on SSD. */
struct lh_unit_state_place lh_unit_state_place(const struct lh_unit *unit, uint32_t array,
                                               uint64_t first, uint64_t count);

/* Whether the unit is trained, but another process has its states. */
static inline bool lh_unit_is_given(const struct lh_unit *unit)
{
    return unit->desc->is_given;
}

static inline uint32_t lh_unit_pins(const struct lh_unit *unit)
{
    return atomic_load(&unit->shared.word) & ~LH_UNIT_READY_BIT;
}

/* Take the unit away from training threads. Returns false if the unit is pinned. */
static inline bool lh_unit_claim(struct lh_unit *unit)
{
    uint32_t expected = LH_UNIT_READY_BIT;
    return atomic_compare_exchange_strong(&unit->shared.word, &expected, 0);
}

#endif
