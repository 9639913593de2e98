/*
 * Virtual time: a clock in integer nanoseconds, a heap of events, seeded random numbers, a trace.
 *
 * Everything in csrc/sim happens as an event at a virtual time; of two events at the same time, the
 * one scheduled first fires first. Nothing depends on addresses, the wall clock or the order of a
 * hash table, and no time on floating point, so one seed gives one trace, byte for byte, on every
 * machine.
 *
 *      at the current time: engine and training thread, until neither moves
 *      nothing moves      : the next event of the heap; its time becomes the current time
 *      no event is left   : everything is done, or it hangs (see run.h)
 *
 * A checker that finds a violation calls lh_sim_world_fail(): the first failure is kept with its
 * time, and ends the run. It is a bug in lohan or in the simulator, never a fault of the simulated
 * machine: those are reported as the engine's own errors.
 *
 * Thread: one.
 */
#ifndef LH_SIM_WORLD_H
#define LH_SIM_WORLD_H

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "sim/fault.h"

#define LH_SIM_NS_PER_S UINT64_C(1000000000)
#define LH_SIM_PPM_ONE UINT32_C(1000000)

/* xoshiro256**, with a state that splitmix64 generates from a seed. */
struct lh_sim_random {
    uint64_t state[4];
};

/* Independent sequences of numbers, one per purpose, so that an additional draw for one purpose
 * does not change the others. */
enum lh_sim_stream {
    LH_SIM_STREAM_MODEL = 1,
    LH_SIM_STREAM_FAULTS,
    LH_SIM_STREAM_CRASH,
    LH_SIM_STREAM_TRAIN,
    LH_SIM_STREAM_OPTIONS,
    LH_SIM_STREAM_COPIES,
    LH_SIM_STREAM_ACCELERATOR,
    LH_SIM_STREAM_FILES,
    LH_SIM_STREAM_LIVES,
    LH_SIM_STREAM_EDITS,
    LH_SIM_STREAM_WORLDS,
    LH_SIM_STREAM_TARGET,
};

/* Initialize: the same seed and stream give the same numbers. */
void lh_sim_random_init(struct lh_sim_random *random, uint64_t seed, enum lh_sim_stream stream);
/* All 64 bits of the next number. */
uint64_t lh_sim_random_next(struct lh_sim_random *random);
/* A number from 0 to count - 1; count is above 0. */
uint64_t lh_sim_random_below(struct lh_sim_random *random, uint64_t count);
/* Returns true with a probability of ppm in a million. Draws one number whatever ppm is. */
bool lh_sim_random_chance(struct lh_sim_random *random, uint32_t ppm);
/* A portable hash of two numbers, for values that must not depend on the order of calls. */
uint64_t lh_sim_mix(uint64_t a, uint64_t b);

typedef void (*lh_sim_fire_fn)(void *context);

struct lh_sim_event {
    uint64_t at_ns;
    uint64_t sequence;
    lh_sim_fire_fn fire;
    void *context;
};

/* The kinds of trace records; the comments list the three numbers of each, in order. */
enum lh_sim_trace_kind {
    LH_SIM_TRACE_SUBMIT = 1, /* kind << 32 | file, offset, bytes */
    LH_SIM_TRACE_DONE,       /* kind << 32 | file, offset, -result */
    LH_SIM_TRACE_FAULT,      /* kind of fault << 32 | file, offset, detail */
    LH_SIM_TRACE_JOB,        /* worker, work_bytes, nanoseconds */
    LH_SIM_TRACE_TRAIN,      /* state of the training thread, step, block << 32 | unit */
    LH_SIM_TRACE_STEP,       /* step that ended, its time since the previous one, bytes */
    LH_SIM_TRACE_CRASH,      /* unsynced writes, blocks kept, blocks lost */
    LH_SIM_TRACE_COPY,       /* direction, bytes, -result, at the end of a copy */
};

#define LH_SIM_TRACE_RECORD_BYTES 40

struct lh_sim_world {
    struct lh_alloc *alloc;
    uint64_t now_ns;
    struct lh_sim_event *events; /* a binary heap */
    uint32_t event_count;
    uint32_t event_max;
    uint64_t next_sequence;
    uint64_t fired_count;
    uint8_t *trace; /* the first trace_bytes_max bytes of it */
    uint64_t trace_bytes;
    uint64_t trace_bytes_max;
    uint64_t trace_hash; /* FNV-1a of all of it */
    uint64_t fault_counts[LH_SIM_FAULT_COUNT];
    struct lh_error failure;
};

/*
 * Initialize a world at time 0, without events. trace_bytes_max limits how much of the trace is
 * kept (its hash covers all of it).
 *
 * Owns:   *world owns its tables; release with lh_sim_world_deinit(). alloc is borrowed until then.
 * Errors: -ENOMEM; nothing is owned then.
 */
int lh_sim_world_init(struct lh_sim_world *world, struct lh_alloc *alloc, uint32_t event_max,
                      uint64_t trace_bytes_max, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_world_deinit(struct lh_sim_world *world);
/* Borrows world for as long as the clock is used. */
struct lh_clock lh_sim_world_clock(struct lh_sim_world *world);
/* Schedule fire(context) at a time that is not in the past. Asserts at most event_max events. */
void lh_sim_world_at(struct lh_sim_world *world, uint64_t at_ns, lh_sim_fire_fn fire,
                     void *context);
/* Advance to the next event and fire it. Returns false if no event is left. */
bool lh_sim_world_advance(struct lh_sim_world *world);
/* Discard all events, as when the machine loses power. */
void lh_sim_world_forget(struct lh_sim_world *world);
void lh_sim_world_trace(struct lh_sim_world *world, enum lh_sim_trace_kind kind, uint64_t a,
                        uint64_t b, uint64_t c);
/* Count a fault, and trace it with its target. */
void lh_sim_world_fault(struct lh_sim_world *world, enum lh_sim_fault fault, uint64_t file,
                        uint64_t offset, uint64_t detail);
/* Whether any fault of a set (LH_SIM_FAULT_BIT_OF) has happened. */
bool lh_sim_world_had_fault(const struct lh_sim_world *world, uint64_t faults);
uint64_t lh_sim_world_fault_count(const struct lh_sim_world *world); /* of all kinds */
/* Report a failure; only the first one is kept. */
void lh_sim_world_fail(struct lh_sim_world *world, const char *format, ...) LH_PRINTF(2, 3);
bool lh_sim_world_has_failed(const struct lh_sim_world *world);

/* Nanoseconds that bytes take at bytes_per_s, rounded up, so that no rate is ever exceeded. */
uint64_t lh_sim_transfer_ns(uint64_t bytes, uint64_t bytes_per_s);

#endif
