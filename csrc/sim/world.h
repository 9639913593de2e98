/*
 * Virtual time: a clock in integer nanoseconds, a heap of events, and the hooks.
 *
 * Everything in csrc/sim happens as an event at a virtual time; of two events at the same time, the
 * one scheduled first fires first. Nothing depends on addresses, the wall clock or the order of a
 * hash table, and no time depends on floating point, so a run gives the same trace, byte for byte,
 * on every machine.
 *
 *      at the current time: engine and training thread are polled, until neither moves
 *      nothing moves      : the next event of the heap fires; its time becomes the current time
 *      no event is left   : everything is done, or the run hangs (see run.h)
 *
 * A checker that finds a violation calls lh_sim_world_fail(): the first failure is kept with its
 * time, and ends the run. A violation is a bug in lohan or in the simulator, never a fault of the
 * simulated machine: such faults are reported as the engine's own errors.
 *
 * Thread: one.
 */
#ifndef LH_SIM_WORLD_H
#define LH_SIM_WORLD_H

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "sim/hooks.h"

#define LH_SIM_NS_PER_S UINT64_C(1000000000)

/* The output function of splitmix64. */
uint64_t lh_sim_scramble(uint64_t z);
/* A portable hash of two numbers, for values that must not depend on the order of calls. */
uint64_t lh_sim_mix(uint64_t a, uint64_t b);

typedef void (*lh_sim_fire_fn)(void *context);

struct lh_sim_event {
    uint64_t at_ns;
    uint64_t sequence;
    lh_sim_fire_fn fire;
    void *context;
};

struct lh_sim_world {
    struct lh_alloc *alloc;
    uint64_t now_ns;
    struct lh_sim_event *events; /* a binary heap */
    uint32_t event_count;
    uint32_t event_max;
    uint64_t next_sequence;
    uint64_t fired_count;
    const struct lh_sim_hooks *hooks; /* NULL: none; borrowed, like hooks_context */
    void *hooks_context;
    struct lh_error failure;
};

/*
 * Initialize a world at time 0, without events and hooks.
 *
 * Owns:   *world owns its tables; release with lh_sim_world_deinit(). alloc is borrowed until then.
 * Errors: -ENOMEM; nothing is owned then.
 */
int lh_sim_world_init(struct lh_sim_world *world, struct lh_alloc *alloc, uint32_t event_max,
                      struct lh_error *err) LH_MUST_CHECK;
void lh_sim_world_deinit(struct lh_sim_world *world);
/* Make a clock of virtual time, which borrows world for as long as the clock is used. */
struct lh_clock lh_sim_world_clock(struct lh_sim_world *world);
/* Schedule fire(context) at a time that is not past. Asserts that the heap is not full. */
void lh_sim_world_at(struct lh_sim_world *world, uint64_t at_ns, lh_sim_fire_fn fire,
                     void *context);
/* Advance to the next event and fire it. Returns false if no event is left. */
bool lh_sim_world_advance(struct lh_sim_world *world);
/* The time of the next event; UINT64_MAX: no event is left. */
uint64_t lh_sim_world_next_ns(const struct lh_sim_world *world);
/* Discard all events, as when the machine loses power. */
void lh_sim_world_forget(struct lh_sim_world *world);
/* Report an event to the hooks. */
void lh_sim_world_trace(const struct lh_sim_world *world, enum lh_sim_trace_kind kind, uint64_t a,
                        uint64_t b, uint64_t c);
/* Report a failure; only the first one is kept. */
void lh_sim_world_fail(struct lh_sim_world *world, const char *format, ...) LH_PRINTF(2, 3);
bool lh_sim_world_has_failed(const struct lh_sim_world *world);

/* Nanoseconds that bytes take at bytes_per_s, rounded up, so that no rate is ever exceeded. */
uint64_t lh_sim_transfer_ns(uint64_t bytes, uint64_t bytes_per_s);

#endif
