/*
 * Virtual time: one clock in integer nanoseconds, one heap of events, numbers from a seed, a trace.
 *
 * Nothing in csrc/sim happens but as an event at a virtual time, and of two events at one time the
 * one that was asked for first comes first. No address, no wall clock, no order of a hash takes
 * part in anything, and no floating point in any time; so one seed gives one trace, byte for byte,
 * on every machine.
 *
 *      what happens now: engine and training thread, until neither moves
 *      nothing does    : the next event of the heap; now is its time
 *      no event is left: everything is done, or it hangs (see run.h)
 *
 * A checker that finds a promise broken calls lh_sim_world_fail(): the first failure is kept with
 * its time, and ends the run. It is a fault of lohan or of the simulator, never of the machine that
 * is simulated: those are the engine's own errors.
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

/* xoshiro256**, whose state splitmix64 makes from a seed. */
struct lh_sim_random {
    uint64_t state[4];
};

/* stream: an independent sequence of numbers for each purpose, so that one more draw for one of
 * them changes nothing about the others. */
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

/* The same numbers from the same seed and stream. */
void lh_sim_random_init(struct lh_sim_random *random, uint64_t seed, enum lh_sim_stream stream);
/* All 64 bits of the next number. */
uint64_t lh_sim_random_next(struct lh_sim_random *random);
/* 0 .. count - 1; count is above 0. */
uint64_t lh_sim_random_below(struct lh_sim_random *random, uint64_t count);
/* true in ppm of a million cases. Draws one number whatever ppm is. */
bool lh_sim_random_chance(struct lh_sim_random *random, uint32_t ppm);
/* A hash of two numbers: the same everywhere, for what must not depend on the order of calls. */
uint64_t lh_sim_mix(uint64_t a, uint64_t b);

typedef void (*lh_sim_fire_fn)(void *context);

struct lh_sim_event {
    uint64_t at_ns;
    uint64_t sequence;
    lh_sim_fire_fn fire;
    void *context;
};

/* What a trace record is of; its three numbers are told in order. */
enum lh_sim_trace_kind {
    LH_SIM_TRACE_SUBMIT = 1, /* kind << 32 | file, offset, bytes */
    LH_SIM_TRACE_DONE,       /* kind << 32 | file, offset, -result */
    LH_SIM_TRACE_FAULT,      /* kind of fault << 32 | file, offset, detail */
    LH_SIM_TRACE_JOB,        /* worker, work_bytes, nanoseconds */
    LH_SIM_TRACE_TRAIN,      /* state of the training thread, step, block << 32 | unit */
    LH_SIM_TRACE_STEP,       /* step that is over, its time since the one before, bytes */
    LH_SIM_TRACE_CRASH,      /* unsynced writes, blocks kept, blocks lost */
    LH_SIM_TRACE_COPY,       /* direction, bytes, -result: it is over */
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
 * Time 0, nothing to come. trace_bytes_max: how much of the trace is kept (its hash is of all).
 *
 * Owns:   *world owns its tables; release with lh_sim_world_deinit(). alloc is borrowed until then.
 * Errors: -ENOMEM; nothing is owned then.
 */
int lh_sim_world_init(struct lh_sim_world *world, struct lh_alloc *alloc, uint32_t event_max,
                      uint64_t trace_bytes_max, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_world_deinit(struct lh_sim_world *world);
/* Borrows world for as long as the clock is used. */
struct lh_clock lh_sim_world_clock(struct lh_sim_world *world);
/* fire(context) at a time that is not in the past. More than event_max at once: asserted. */
void lh_sim_world_at(struct lh_sim_world *world, uint64_t at_ns, lh_sim_fire_fn fire,
                     void *context);
/* Go to the next event and fire it; false: there is none. */
bool lh_sim_world_advance(struct lh_sim_world *world);
/* Nothing that was to come comes: the machine lost its power. */
void lh_sim_world_forget(struct lh_sim_world *world);
void lh_sim_world_trace(struct lh_sim_world *world, enum lh_sim_trace_kind kind, uint64_t a,
                        uint64_t b, uint64_t c);
/* A fault happens: it is counted, and traced with what it happened to. */
void lh_sim_world_fault(struct lh_sim_world *world, enum lh_sim_fault fault, uint64_t file,
                        uint64_t offset, uint64_t detail);
/* Whether any fault of a set (LH_SIM_FAULT_BIT_OF) has happened. */
bool lh_sim_world_had_fault(const struct lh_sim_world *world, uint64_t faults);
uint64_t lh_sim_world_fault_count(const struct lh_sim_world *world); /* of all kinds */
/* A promise is broken; the first one is kept. */
void lh_sim_world_fail(struct lh_sim_world *world, const char *format, ...) LH_PRINTF(2, 3);
bool lh_sim_world_has_failed(const struct lh_sim_world *world);

/* Nanoseconds that bytes take at bytes_per_s, rounded up, so that no rate is ever exceeded. */
uint64_t lh_sim_transfer_ns(uint64_t bytes, uint64_t bytes_per_s);

#endif
