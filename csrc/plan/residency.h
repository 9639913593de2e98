/*
 * The residency plan: which unit is resident when, decided before the step from the recorded order
 * of uses.
 *
 * Forward visits blocks in one order and backward in the opposite one, so the least recently used
 * unit is often the one needed next, and a reactive cache (LRU) would evict exactly that. The order
 * of uses is the same in every step of a training loop, so it is recorded, and the next step is
 * planned with it: on a miss, the unit whose next use is farthest away is evicted (L. Belady's
 * rule, which Elixir's rCache uses for chunks). The plan chooses the real addresses in the
 * region, by first fit. The result is a list of evictions and loads that the engine executes in
 * order, at these addresses. No decision depends on timing, so the bytes that a step
 * reads for parameters are known before it starts.
 *
 * Terms: an event is the begin or the end of a use of a unit. A load belongs to the begin that
 * needs it. Uses are counted per unit and absolutely (since the engine started), so that an
 * eviction can say "after v's 7th use".
 *
 * A region of copies (an accelerator's memory) holds bytes that are updated elsewhere: an update
 * makes a copy stale. Stale copies are evicted first, and reloaded before their next use.
 *
 * Units that are always resident have fixed places at the start of the region; if all units fit,
 * every unit has a fixed place. So no permanently resident unit lies between the holes. A unit of a
 * scope of k units then finds at most k holes while the scope's other units are in use, and all
 * units outside the scope can be evicted: lh_budget_apart_bytes() is always enough.
 *
 * Invariants:
 *  1. Ops executed in order never exceed the region, and never evict a unit that is in use.
 *  2. Every begin finds its unit resident once the ops up to it have been executed.
 *  3. The state after planning is the state after executing the ops, so plans can be chained.
 *
 * [Note: Reserved places] Units that are in use at the same time without being of one scope (a
 * checkpoint's recomputation keeps them) may lie such that enough bytes are free for the next one,
 * but not in one piece. Units in use cannot move. So if a plan ends at such a load, it is made
 * again with a place reserved for the load, that is, the units in use at that time are loaded
 * elsewhere. One that is in the place already is evicted together with the next load of another
 * unit: a thread that waits for that load cannot use the unit before it is evicted.
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
#define LH_RESIDENCY_RESERVED_COUNT_MAX 8

enum lh_residency_event_kind {
    LH_RESIDENCY_EVENT_BEGIN = 0,
    LH_RESIDENCY_EVENT_END = 1,
    /*
     * A use that begins and ends at once: the engine itself waits for the update. In a region of
     * copies, an update is counted as a use, but needs no copy; it makes an existing copy stale.
     */
    LH_RESIDENCY_EVENT_UPDATE = 2,
    LH_RESIDENCY_EVENT_NEED =
        3, /* must be resident here for a use that was counted earlier; not counted again */
};

struct lh_residency_event {
    uint32_t unit;
    uint32_t kind; /* enum lh_residency_event_kind */
};

enum lh_residency_op_kind {
    LH_RESIDENCY_OP_EVICT = 0,
    LH_RESIDENCY_OP_LOAD = 1,
    LH_RESIDENCY_OP_NONE = 2, /* the op has already been executed, ahead of earlier ops */
};

struct lh_residency_op {
    uint32_t kind; /* enum lh_residency_op_kind */
    uint32_t unit;
    uint64_t offset;      /* the unit's offset in the region */
    uint64_t uses_before; /* how many uses must have begun (EVICT: and ended) before this op */
    uint64_t event;       /* the event that needs this op */
};

struct lh_residency_unit {
    uint64_t bytes;
    uint64_t unread_bytes; /* the part of the bytes that a load does not read */
    bool always;           /* the unit's scope encloses other scopes: loaded once, never evicted */
};

/* See [Note: Reserved places]. */
struct lh_residency_reserved {
    uint64_t event; /* the begin that needs the place; it is reserved until then */
    uint64_t offset;
    uint64_t bytes;
    bool *avoids; /* for each unit, whether it is in use at that event */
};

/* What the making of a plan writes; each array has one element per unit. */
struct lh_residency_scratch {
    uint64_t *next_uses;
    uint64_t *first_uses;
    bool *is_open_before; /* in use since before the first event */
    struct lh_residency_reserved reserved[LH_RESIDENCY_RESERVED_COUNT_MAX];
    uint32_t reserved_count; /* of the plan being made; otherwise 0 */
};

struct lh_residency {
    struct lh_range range;
    const struct lh_residency_unit *units; /* borrowed until deinit */
    uint32_t unit_count;
    bool has_copies;      /* see above */
    bool holds_all;       /* every unit has a fixed place */
    bool *is_stale;       /* stale copies: resident, and updated since they were loaded */
    uint64_t *offsets;    /* LH_RESIDENCY_ABSENT: not resident */
    uint64_t *use_counts; /* the number of uses begun so far */
    uint32_t *open_uses;  /* the number of uses begun and not ended */
    struct lh_residency_scratch *scratch;
};

/*
 * Initialize an empty region of region_bytes. The caller then sets has_copies if the contents are
 * updated elsewhere. units is borrowed until deinit.
 *
 * Errors: -ENOMEM, -EINVAL (a unit of 0 bytes, or one larger than what the always resident units
 * leave of the region; the message has both numbers).
 */
int lh_residency_init(struct lh_residency *state, struct lh_alloc *alloc,
                      const struct lh_residency_unit *units, uint32_t unit_count,
                      uint64_t region_bytes, struct lh_error *err) LH_MUST_CHECK;
void lh_residency_deinit(struct lh_residency *state, struct lh_alloc *alloc);
/* Mark all units as not resident; counts are kept. */
void lh_residency_reset(struct lh_residency *state);
/* Mark unit, which is not resident, as resident at offset, where a plan loaded it. */
void lh_residency_put(struct lh_residency *state, uint32_t unit, uint64_t offset);
/* Whether unit has a fixed place: once resident, it stays resident. */
static inline bool lh_residency_has_place(const struct lh_residency *state, uint32_t unit)
{
    return state->holds_all || state->units[unit].always;
}
/* Copy a state; both were initialised with the same units. */
void lh_residency_copy(struct lh_residency *target, const struct lh_residency *source);

/*
 * Plan a sequence of events from state, and advance state past it. cyclic: the same events will
 * follow again, so the next use of a unit without further uses here is its first use in the next
 * cycle.
 *
 * Returns the number of ops, -ENOSPC if at some event no set of evictions makes room (units in use
 * are in the way; err says how much was needed and free, *failed_event_out which event it was), or
 * -E2BIG if op_max is too small. On error, state is garbage. *loaded_bytes_out is the total size of
 * the loads.
 */
int64_t lh_residency_plan(struct lh_residency *state, const struct lh_residency_event *events,
                          uint64_t event_count, bool cyclic, struct lh_residency_op *ops,
                          uint64_t op_max, uint64_t *loaded_bytes_out, uint64_t *failed_event_out,
                          struct lh_error *err) LH_MUST_CHECK;

/*
 * The same, starting from `before`, a state with the same units: if units in use leave no
 * contiguous room for an event, the plan is made again with places reserved (see [Note: Reserved
 * places]).
 */
int64_t lh_residency_plan_apart(struct lh_residency *state, const struct lh_residency *before,
                                const struct lh_residency_event *events, uint64_t event_count,
                                bool cyclic, struct lh_residency_op *ops, uint64_t op_max,
                                uint64_t *loaded_bytes_out, uint64_t *failed_event_out,
                                struct lh_error *err) LH_MUST_CHECK;

/*
 * Continue the plan past the last event, in a region of copies: load ahead what the next cycle,
 * whose events are given, reads first, while there is room that nothing in the cycle needs sooner.
 * Stale copies are reloaded in place, so each can be loaded as soon as its own update has finished,
 * in whatever order updates finish. A unit whose first event is another update is left alone.
 *
 * Returns the number of ops, -E2BIG.
 */
int64_t lh_residency_plan_ahead(struct lh_residency *state, const struct lh_residency_event *events,
                                uint64_t event_count, struct lh_residency_op *ops, uint64_t op_max,
                                uint64_t *loaded_bytes_out, struct lh_error *err) LH_MUST_CHECK;

/*
 * Before planning uses that cycle in one direction (forwards only), move each begin to just after
 * the previous begin, before the previous end. Belady's rule keeps all places but one and reads
 * every miss into that one, so reads and computation would alternate in it. If two places take
 * turns, these overlap, at the cost of about one more read per cycle. Begins keep their order. A
 * begin is not moved if the units then in use and the largest unit would together exceed the
 * region.
 */
void lh_residency_read_ahead(const struct lh_residency *state, struct lh_residency_event *events,
                             uint64_t event_count);

/* Scratch of lh_residency_read_ahead_where_cheap(). */
struct lh_residency_trial {
    struct lh_residency *state;        /* a scratch state with the same units */
    struct lh_residency_event *events; /* has room for as many events as are passed */
    struct lh_residency_op *ops;
    uint64_t op_max;
};

/*
 * Apply lh_residency_read_ahead() if trial plans of the next cycles from state, with and without
 * it, show that it costs no more than two units of mean size per cycle, or a quarter of what is
 * read anyway. If sizes differ, the units in use may leave no contiguous hole for the largest unit
 * although enough bytes are free, so that this unit is read again in each cycle, or that a plan
 * fails. In the latter case, the move of the begin that found no room is undone, and the trial is
 * repeated; after a few such begins, all moves are undone.
 *
 * Returns true if events have been moved.
 */
bool lh_residency_read_ahead_where_cheap(const struct lh_residency *state,
                                         struct lh_residency_event *events, uint64_t event_count,
                                         const struct lh_residency_trial *trial);

/*
 * Whether b may be executed before a, which precedes it: the two ops have different units (whose
 * sizes are in units[]), at places that do not overlap.
 */
bool lh_residency_commutes(const struct lh_residency_unit *units, const struct lh_residency_op *a,
                           const struct lh_residency_op *b);

#endif
