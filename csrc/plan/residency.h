/*
 * Which unit is resident when, decided before the step from the order of its uses.
 *
 * Forward visits blocks in one order and backward in the opposite one, so the unit used longest ago
 * is often the one needed next: a cache that reacts (LRU) evicts just that. The order of uses is
 * the same in every step of a training loop, so it is recorded and the next step is planned with
 * it: on a miss the unit whose next use is farthest goes (L. Belady's rule, which Elixir's rCache
 * uses for chunks), on the real addresses of the region, by the same first-fit code that hands them
 * out. The result is a list of evictions and loads that the engine executes in order. No decision
 * is left to timing, so the bytes that a step reads for parameters are known before it starts.
 *
 * Words: an event is the begin or the end of a use of a unit. A load belongs to the begin that
 * needs it. Uses are counted per unit and absolutely (since the engine started), so that an
 * eviction can say "after v's 7th use".
 *
 * A region of copies (an accelerator's memory) holds bytes that are updated elsewhere: an update
 * leaves a copy old. It is the first to go, and is loaded anew before the next use.
 *
 * Units that are always there have places of their own at the region's begin, and where all units
 * fit each has one: nothing that stays, or that nobody has to make room for, parts the holes. A
 * unit of a scope of k then finds at most k of them when the scope's others are in use, and all the
 * rest can go: lh_budget_apart_bytes() is always enough.
 *
 * Invariants:
 *  1. Ops, executed in order, never hold more than the region, and never evict a unit inside a use.
 *  2. Every begin finds its unit resident when the ops up to it were executed.
 *  3. The state after planning is the state after executing the ops: plans chain.
 *
 * Pure; includes base only. Thread: the state belongs to one owner.
 * Source: Fuyou 4.4 (FIFO prefetch), Elixir VI (Belady eviction over a recorded order).
 */
#ifndef LH_PLAN_RESIDENCY_H
#define LH_PLAN_RESIDENCY_H

#include "base/alloc.h"
#include "base/error.h"
#include "base/range.h"

#define LH_RESIDENCY_GRANULE LH_BLOCK_BYTES
#define LH_RESIDENCY_ABSENT LH_RANGE_NONE

enum lh_residency_event_kind {
    LH_RESIDENCY_EVENT_BEGIN = 0,
    LH_RESIDENCY_EVENT_END = 1,
    /*
     * A use that begins and ends at once: the engine itself waits for the update. In a region of
     * copies it is no use; it leaves the copy old.
     */
    LH_RESIDENCY_EVENT_UPDATE = 2,
    LH_RESIDENCY_EVENT_NEED =
        3, /* must be resident here for a use that was counted before; not counted again */
};

struct lh_residency_event {
    uint32_t unit;
    uint32_t kind; /* enum lh_residency_event_kind */
};

enum lh_residency_op_kind {
    LH_RESIDENCY_OP_EVICT = 0,
    LH_RESIDENCY_OP_LOAD = 1,
    LH_RESIDENCY_OP_NONE = 2, /* was executed ahead of those before it */
};

struct lh_residency_op {
    uint32_t kind; /* enum lh_residency_op_kind */
    uint32_t unit;
    uint64_t offset;      /* where in the region */
    uint64_t uses_before; /* the unit's uses that must have begun (EVICT: and ended) by then */
    uint64_t event;       /* the event that it is for */
};

struct lh_residency_unit {
    uint64_t bytes;
    uint64_t load_bytes; /* what a load brings of them; 0: all */
    bool always;         /* its scope encloses other scopes: loaded once, never evicted */
};

struct lh_residency {
    struct lh_range range;
    const struct lh_residency_unit *units; /* borrowed until deinit */
    uint32_t unit_count;
    bool has_copies;      /* see above */
    bool holds_all;       /* every unit has a place of its own */
    bool *is_stale;       /* of copies: resident, and updated since */
    uint64_t *offsets;    /* LH_RESIDENCY_ABSENT: not resident */
    uint64_t *use_counts; /* begins so far */
    uint32_t *open_uses;  /* begun and not ended */
    uint64_t *next_uses;  /* scratch of planning */
    uint64_t *first_uses; /* scratch of planning */
};

/*
 * An empty region of region_bytes; set has_copies where what is in it is updated elsewhere. units
 * is borrowed until deinit.
 *
 * Errors: -ENOMEM, -EINVAL (a unit of 0 bytes, or larger than what units that are always there
 * leave of the region: named with both numbers).
 */
int lh_residency_init(struct lh_residency *state, struct lh_alloc *alloc,
                      const struct lh_residency_unit *units, uint32_t unit_count,
                      uint64_t region_bytes, struct lh_error *err) LH_MUST_CHECK;
void lh_residency_deinit(struct lh_residency *state, struct lh_alloc *alloc);
/* Nothing is resident; counts stay. */
void lh_residency_reset(struct lh_residency *state);
/* unit, which is not resident, is at offset: where a plan loaded it. */
void lh_residency_put(struct lh_residency *state, uint32_t unit, uint64_t offset);
/* It keeps a place of its own: once resident it stays. */
bool lh_residency_has_place(const struct lh_residency *state, uint32_t unit);
/* Both initialised with the same units. */
void lh_residency_copy(struct lh_residency *target, const struct lh_residency *source);

/*
 * Plan a sequence of events from state; state becomes what holds after it. cyclic: the same events
 * will follow again, so a unit without a further use here is next used at its first one there.
 *
 * Returns the number of ops, -ENOSPC when at some event no set of evictions makes room (units in
 * use are in the way; err says how much was needed and free, *failed_event_out which event), -E2BIG
 * when op_max is too small. On error state is garbage. loaded_bytes_out: the sum of the loads'
 * bytes.
 */
int64_t lh_residency_plan(struct lh_residency *state, const struct lh_residency_event *events,
                          uint64_t event_count, bool cyclic, struct lh_residency_op *ops,
                          uint64_t op_max, uint64_t *loaded_bytes_out, uint64_t *failed_event_out,
                          struct lh_error *err) LH_MUST_CHECK;

/*
 * Plan on behind the last event, in a region of copies: what the next cycle, whose events these
 * are, reads first is loaded as far as there is room that nothing in the cycle needs sooner. Old
 * copies are made anew where they are, so each can be as soon as its own update is over, in
 * whatever order updates come. A unit whose first event is another update is left alone.
 *
 * Returns the number of ops, -E2BIG.
 */
int64_t lh_residency_plan_ahead(struct lh_residency *state, const struct lh_residency_event *events,
                                uint64_t event_count, struct lh_residency_op *ops, uint64_t op_max,
                                uint64_t *loaded_bytes_out, struct lh_error *err) LH_MUST_CHECK;

/*
 * Before planning, where uses come round in one direction (forwards alone): each begins as soon as
 * the one before it has begun, not ended. Belady's rule keeps all but one of the places and reads
 * every miss into that one, and nobody can compute in the place that is being read into; so it
 * wants two that change places, for a read or so more in each cycle. Begins keep their order. A
 * begin stays where it is if what is then in use, and the largest unit beside it, is more than the
 * region has.
 */
void lh_residency_read_ahead(const struct lh_residency *state, struct lh_residency_event *events,
                             uint64_t event_count);

/* Scratch of lh_residency_read_ahead_where_cheap(). */
struct lh_residency_trial {
    struct lh_residency *state;        /* of the same units */
    struct lh_residency_event *events; /* room for as many as are asked about */
    struct lh_residency_op *ops;
    uint64_t op_max;
};

/*
 * lh_residency_read_ahead() if plans of the next cycles, made from state both ways, say that it
 * costs no more than two units of mean size in each cycle, or a quarter of what is read anyway.
 * Where sizes differ, what is in use can leave no hole for the largest unit although its bytes are
 * free, and that one is read again in each cycle; or a plan does not get to its end. Then what had
 * no room begins where it did, for a few begins, before all do.
 *
 * True: events have been moved.
 */
bool lh_residency_read_ahead_where_cheap(const struct lh_residency *state,
                                         struct lh_residency_event *events, uint64_t event_count,
                                         const struct lh_residency_trial *trial);

/*
 * True: b may be executed before a, which is in front of it. They are of different units (of which
 * units[] says the bytes) at different places.
 */
bool lh_residency_commutes(const struct lh_residency_unit *units, const struct lh_residency_op *a,
                           const struct lh_residency_op *b);

#endif
