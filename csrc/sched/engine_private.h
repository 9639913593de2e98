/*
 * The engine itself: its parts, and which thread may touch them. Private to csrc/sched; the public
 * contract is engine.h.
 *
 * Parts, from the bottom: core.h (clock, first error, counters), job.h, transfer.h and copy.h (work
 * in flight), region.h (plans), unit.h, chunk.h and slab.h (the contents of memory), gradient.h,
 * update.h, update_pump.h and write_back.h (the pipeline of a gradient), step.h (close, commit,
 * abort). Optional parts are features (feature.h), which the pipeline calls only through a table.
 * The state machines are drawn in unit.h, chunk.h, step.h, device.h, spill.h, norm.h and
 * saved_private.h.
 *
 * Invariants:
 *  1. A unit's shared.word has LH_UNIT_READY_BIT exactly while computation can read the unit's
 *     bytes: while the unit is READY, or, if the accelerator reads copies, while the unit's copy is
 *     READY and not stale. At other times pins are 0.
 *  2. The bytes of a READY unit are equal to those in the read slot of its extents, or they are
 *     newer: written in the open or closed step, or dirty ([Note: Between commits] in
 *     write_back.h).
 *  3. No chunk is computed for step t+1 before step t is over (written, and committed if that is
 *     due): lh_engine_over_wait() waits for this before the first gradient of step t+1.
 *  4. The ops of a plan are executed in order, except that an accelerator's op may overtake ops
 *     with which it commutes. A region never holds two units at one address.
 *  5. Transfers never have more than io_depth requests in flight; the requests are a fixed array.
 *
 * Thread: everything belongs to the engine's thread, except atomics, `shared` (protected by a mutex
 *         of its own), and what a comment assigns to the training thread.
 */
#ifndef LH_SCHED_ENGINE_PRIVATE_H
#define LH_SCHED_ENGINE_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/assert.h"
#include "base/ring.h"
#include "sched/borrow.h"
#include "sched/chunk.h"
#include "sched/copy.h"
#include "sched/core.h"
#include "sched/defer.h"
#include "sched/device.h"
#include "sched/engine.h"
#include "sched/expect.h"
#include "sched/feature.h"
#include "sched/gather.h"
#include "sched/given.h"
#include "sched/gradient.h"
#include "sched/idle.h"
#include "sched/in_place_private.h"
#include "sched/job.h"
#include "sched/landing.h"
#include "sched/mates.h"
#include "sched/naive.h"
#include "sched/norm.h"
#include "sched/orthogonal.h"
#include "sched/parts.h"
#include "sched/reading.h"
#include "sched/region.h"
#include "sched/repeat.h"
#include "sched/request.h"
#include "sched/saved_private.h"
#include "sched/scalars.h"
#include "sched/settle.h"
#include "sched/slab.h"
#include "sched/spill.h"
#include "sched/split.h"
#include "sched/states.h"
#include "sched/step.h"
#include "sched/stream.h"
#include "sched/sum.h"
#include "sched/tail.h"
#include "sched/transfer.h"
#include "sched/unified.h"
#include "sched/unit.h"
#include "sched/update.h"
#include "sched/update_plan.h"
#include "sched/update_pump.h"
#include "sched/write_back.h"

#define LH_PARAM_NONE UINT32_MAX
#define LH_INBOX_CELL_COUNT 65536
#define LH_STATS_OF_EVALUATIONS 2
/* shorter waits are not reported: they are the cost of the call itself */
#define LH_WAIT_NS_MIN 20000

enum lh_message_kind {
    LH_MESSAGE_BEGIN = 1, /* mode */
    LH_MESSAGE_USE,       /* unit: the training thread has pinned it */
    LH_MESSAGE_ACQUIRE,   /* unit: the training thread waits for a pin */
    LH_MESSAGE_RELEASE,   /* unit: its pins became 0 */
    LH_MESSAGE_HANDLES,   /* unit: its handles became 0 */
    LH_MESSAGE_GRADIENT,  /* param, pointer, dtype */
    LH_MESSAGE_CLOSE,
    LH_MESSAGE_ABORT,
    LH_MESSAGE_FLUSH, /* commit */
    LH_MESSAGE_NORM,
    LH_MESSAGE_REPEAT,
    LH_MESSAGE_DRAIN,       /* a thread waits for the end of the closed step */
    LH_MESSAGE_WAITED,      /* unit, start, end: for the trace and the statistics */
    LH_MESSAGE_SAVED_PUT,   /* item, as for the next two */
    LH_MESSAGE_SAVED_FETCH, /* item, and whether a thread waits for it */
    LH_MESSAGE_SAVED_DROP,
    LH_MESSAGE_SUM,        /* param */
    LH_MESSAGE_GIVEN,      /* unit: its new values are there; LH_UNIT_NONE: they will not come */
    LH_MESSAGE_READ,       /* unit, the read's number: the training thread reads main memory */
    LH_MESSAGE_READ_END,   /* unit, the read's number */
    LH_MESSAGE_GATHERED,   /* unit, and whether it is complete */
    LH_MESSAGE_ROUND,      /* its number */
    LH_MESSAGE_STANDSTILL, /* whether the training thread waits for other processes */
    LH_MESSAGE_SETTLE,     /* all units that owe updates */
    LH_MESSAGE_ANNOUNCED,  /* unit, its place in the announcement, and whether it is the last */
};

/* What other threads wait for or read. Protected by mutex. */
struct lh_engine_shared {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct lh_error error;
    struct lh_error refusal; /* the last refusal */
    struct lh_engine_step_stats finished;
    bool has_finished;
    bool is_paused;
};

struct lh_engine {
    struct lh_alloc *alloc;
    struct lh_store *store;
    struct lh_io *io;
    struct lh_exec *exec;
    struct lh_dev *dev; /* NULL: the CPU computes */
    bool copies_units;  /* there is a dev, and it reads copies of units in memory of its own */
    struct lh_waker *waker;
    struct lh_clock clock;
    struct lh_engine_opts opts; /* without the pointers borrowed for the call */
    struct lh_budget budget;
    uint8_t *region;
    uint8_t *slab_memory; /* the slabs, followed by the gradients' blocks */

    struct lh_unit *units;
    struct lh_engine_unit *descs; /* the units' */
    struct lh_unit_parts *parts;  /* the units' */
    struct lh_engine_param *params;
    uint32_t param_count;
    uint64_t *param_steps; /* the number of updates of each parameter; a part of scalars */
    /* Owned by the training thread, as is gradient_steps. */
    uint64_t first_step;      /* the store's step at creation */
    uint64_t open_step;       /* the training thread's own count */
    uint64_t *gradient_steps; /* the open_step in which each parameter last had a gradient */
    struct lh_gradient *gradients;
    struct lh_chunk *chunks;
    uint32_t chunk_count;
    struct lh_slab *slabs;

    /* Requests and transfers (transfer.c). */
    struct lh_transfer_queue transfers;
    uint32_t jobs_in_flight;

    /* Plans (region.c). */
    struct lh_region host_region;
    struct lh_region *device_region;                     /* NULL unless copies_units */
    struct lh_region *uses;                              /* the region in which computation reads */
    struct lh_event_list recorded[LH_ENGINE_MODE_COUNT]; /* the events of the last complete cycle */
    struct lh_event_list recording;
    uint64_t event_max;
    uint64_t announced_count; /* the current announcement's events in the prediction */
    enum lh_engine_mode mode;
    uint64_t plan_step; /* the step for which the ops' bytes count; 0: no step's (an evaluation) */

    struct lh_in_place *in_place;
    struct lh_copies *copies; /* NULL unless there is a dev */
    struct lh_device *device;
    struct lh_reading *reading;
    struct lh_unified *unified;
    struct lh_landing *landing;
    struct lh_sums *sums;
    struct lh_tail *tail;
    _Atomic(void *) stream; /* the stream that the last hook set */

    struct lh_features features;
    /* Replaces the pipeline's own loop over queued updates. NULL: not replaced. */
    void (*pump_updates)(struct lh_engine *engine, struct lh_update_pump *pump);
    /* Finds gradients that a feature has moved. NULL: gradients are where the caller has them. */
    const uint8_t *(*gradient_at)(const struct lh_engine *engine, uint32_t param, uint64_t element);
    struct lh_updates updates;
    struct lh_defer *defer;
    struct lh_spill *spill;
    struct lh_norm *norm;
    struct lh_repeat *repeat;         /* NULL unless opts.repeats */
    struct lh_orthogonal *orthogonal; /* NULL unless a rule has matrices */
    struct lh_split *split;
    struct lh_saved_area *saved;
    struct lh_mates *mates;
    struct lh_borrow *borrow;
    struct lh_gather *gather;
    struct lh_idle *idle;

    /* Step (step.c). */
    enum lh_step_state step_state;
    uint64_t step; /* the number of closed steps */
    uint64_t committed_step;
    bool commit_is_late; /* a commit was due while commits were held */
    /* a caller's writes during a pause are uncommitted: a rollback would lose them */
    bool has_edits;
    _Atomic bool is_reopened;  /* the closed step was over before: lh_step_reopen() */
    bool is_undoing;           /* ABORTING: the step is to be repeated, not discarded */
    bool is_repeated;          /* the step's updates were undone: they run again after the close */
    bool reopened_uncommitted; /* it has made updates since the last commit of its number */
    bool flush_is_asked;
    bool flush_commits;
    bool commit_is_of_flush;
    uint32_t commit_in_flight;
    uint64_t commit_started_ns;
    struct lh_io_owner commit_owner;
    struct lh_io_request *commit_requests;
    uint8_t *scalars; /* header, per-parameter steps, the caller's bytes */
    uint64_t scalar_bytes;
    uint64_t scalar_bytes_max;
    /* Indexed by step % 2, as at most one closed step is not over while the next one is open. */
    struct lh_adam_hyper *hypers[2];
    double gradient_scales[2];
    _Atomic uint64_t commit_every_later; /* 0: none; in place of opts.commit_every... */
    uint64_t commit_every_from;          /* ...from this step on; constant once the former is set */
    struct lh_engine_step_stats stats[3]; /* the last: the counters of evaluations */

    struct lh_engine_trace_event *trace;
    uint64_t trace_written;

    struct lh_ring inbox;
    struct lh_ring_message held; /* the next message, if has_held: it waits (message_is_held) */
    bool has_held;
    _Atomic uint32_t waiting;               /* threads that wait and must be notified */
    _Atomic uint32_t tentative;             /* threads in a tentative wait */
    _Atomic uint64_t update_gradient_bytes; /* the bytes of gradients held by updates in progress */
    _Atomic uint64_t gradients_released;    /* how often gradients were released */
    uint32_t fork_count;                    /* the fork count when the engine was created */
    _Atomic uint64_t post_count;            /* messages posted by any thread */
    _Atomic uint64_t heard_count;           /* messages that the engine has handled */
    struct lh_request requests[LH_REQUEST_COUNT];
    bool flush_requests_commit; /* owned by the training thread: whether its last flush commits */
    _Atomic int abort_result;
    _Atomic bool holds_commits; /* a hold is requested; it is granted once the engine has replied */
    _Atomic bool failed;
    _Atomic bool stopping;
    _Atomic bool pausing;
    bool has_thread;
    pthread_t thread;
    struct lh_engine_shared shared;
};

/* Whether gradients arrive in the accelerator's memory. */
static inline bool lh_engine_gradients_land(const struct lh_engine *engine)
{
    return engine->dev && !engine->opts.gradients_in_memory;
}

/* calls.c: functions that threads other than the engine's call */
typedef bool (*lh_wait_fn)(struct lh_engine *engine, uint64_t argument);
void lh_engine_post(struct lh_engine *engine, enum lh_message_kind kind, uint64_t a, uint64_t b,
                    uint64_t c);
int lh_engine_wait_until(struct lh_engine *engine, lh_wait_fn is_done, uint64_t argument,
                         int timeout_ms);
/*
 * Like lh_engine_wait_until(), for room that work in flight will free. Counted as gradient_wait_ns.
 */
int lh_engine_room_wait(struct lh_engine *engine, lh_wait_fn is_done, uint64_t argument,
                        int timeout_ms);

/* engine.c */
void *lh_engine_thread_run(void *context);

/* What the engine's thread knows about the time since something last moved. */
struct lh_quiet {
    uint64_t since_ns; /* since when a thread has been stuck; 0: none is */
    bool is_planned_around;
};

#define LH_QUIET_NAP_MS 50
/*
 * What the engine's thread does when a poll has moved nothing. Returns how long it may sleep:
 * LH_QUIET_NAP_MS, -1 (until there is news) or 0 (it polls again).
 */
int lh_engine_quiet(struct lh_engine *engine, struct lh_quiet *quiet);

static inline struct lh_unit *lh_engine_unit_at(struct lh_engine *engine, uint32_t unit)
{
    LH_ASSERT(unit < engine->opts.unit_count);
    return &engine->units[unit];
}

/* 0 for memory that was allocated, otherwise -ENOMEM. */
static inline int lh_engine_part_check(const void *memory, const char *name, struct lh_error *err)
{
    return memory ? 0 : lh_error_set(err, -ENOMEM, "no memory for the state of %s", name);
}

/* Allocate a feature's state, which lh_engine_destroy() frees. Its value is 0 or -ENOMEM. */
#define LH_ENGINE_PART_CREATE(engine, part, err)                                                   \
    lh_engine_part_check(                                                                          \
        (engine)->part = lh_alloc_zeroed((engine)->alloc, 1, sizeof(*(engine)->part)), #part, err)

/* How many copies are in flight; without a device, none. */
static inline uint32_t lh_copy_in_flight(const struct lh_engine *engine)
{
    LH_ASSERT(!engine->dev || engine->copies);
    return engine->copies ? engine->copies->in_flight : 0;
}

/* Whether the engine's units are another process's, the owner's of its team. */
static inline bool lh_engine_is_mate(const struct lh_engine *engine)
{
    return engine->opts.team && engine->opts.team->mate > 0;
}

/* The number of the oldest step that is not over. */
static inline uint64_t lh_core_step(const struct lh_engine *engine)
{
    bool is_closed =
        engine->step_state == LH_STEP_STATE_CLOSED ||
        (engine->step_state == LH_STEP_STATE_COMMITTING && !engine->commit_is_of_flush);
    return is_closed ? engine->step : engine->step + 1;
}

/* Whether a step commits, by its number. */
static inline bool lh_step_commits(const struct lh_engine *engine, uint64_t step)
{
    uint64_t later = atomic_load(&engine->commit_every_later);
    uint64_t every =
        later != 0 && step >= engine->commit_every_from ? later : engine->opts.commit_every;
    return every != LH_ENGINE_COMMIT_NEVER && step % every == 0;
}

#endif
