/*
 * The engine: the one thread that moves a model's states between SSD and main memory and runs its
 * optimizer.
 *
 * The training thread (the user's, or autograd's) reports what happens: a step begins, a unit is
 * needed, a unit is no longer read, a gradient is ready, the step is closed. It waits only in the
 * calls that are documented to wait. How the engine reacts is described in engine_private.h (the
 * state machines) and docs/architecture.md (A step).
 *
 * [Note: pins and handles] Each unit has two shared counters. `pins` counts uses and lends, that
 * is, readers of the unit's bytes in memory. `handles` counts saved-for-backward references, whose
 * backward will read the bytes again. The engine evicts a unit only at pins 0, and updates it only
 * at pins 0 and handles 0. Both are incremented on a training thread and decremented on any.
 *
 * Errors are final: the first one is kept, every wait ends, and every later call returns it.
 *
 * Thread: functions are for one training thread at a time (autograd's device thread counts as it
 *         while the other waits), unless a comment says "any". The store, io, exec and waker belong
 *         to the engine from create to destroy, except during lh_engine_pause.
 * Source: LoHan IV-C (active gradient offloading), Fuyou 4.3 and 4.4.
 */
#ifndef LH_SCHED_ENGINE_H
#define LH_SCHED_ENGINE_H

#include "base/alloc.h"
#include "base/clock.h"
#include "base/dtype.h"
#include "base/error.h"
#include "base/waker.h"
#include "compute/adam.h"
#include "dev/dev.h"
#include "exec/exec.h"
#include "io/io.h"
#include "plan/budget.h"
#include "sched/in_place.h"
#include "sched/saved.h"
#include "store/store.h"

#define LH_ENGINE_EXTENT_NONE UINT32_MAX
/*
 * Elements of a trainable unit are padded to this, so that every array of it is a multiple of
 * LH_BLOCK_BYTES.
 */
#define LH_ENGINE_ELEMENT_ALIGN 2048
/*
 * A parameter starts at a multiple of this many elements in its unit: 128 bytes or more, enough for
 * the alignment of torch's allocator (64).
 */
#define LH_ENGINE_PARAM_ALIGN 64
#define LH_ENGINE_COMMIT_NEVER 0
#define LH_ENGINE_TRACE_COUNT_MAX (1U << 18)

struct lh_engine_param {
    uint32_t unit;
    uint64_t first; /* trainable: element in the unit; frozen: byte in the unit's place */
    uint64_t count; /* elements */
    uint32_t group; /* its group of hyper-parameters */
};

struct lh_engine_unit {
    uint64_t bytes; /* size of its P16, P32 or frozen bytes; multiple of LH_BLOCK_BYTES */
    /*
     * The room that it takes where computation is: its bytes, followed by room for the caller that
     * the engine never reads, writes or copies. 0: no more than its bytes.
     */
    uint64_t place_bytes;
    uint64_t elements;    /* trainable, padded to LH_ENGINE_ELEMENT_ALIGN; 0: frozen */
    enum lh_dtype dtype;  /* F32, BF16 or F16 where trainable */
    bool always;          /* its scope encloses others: it is loaded once and stays */
    uint32_t param_first; /* its parameters are [param_first, param_first + param_count) */
    uint32_t param_count;
    uint32_t param_extent;    /* LH_ENGINE_EXTENT_NONE: it is read in place */
    uint32_t residual_extent; /* LH_ENGINE_EXTENT_NONE: it has no residual */
    uint32_t moment1_extent;
    uint32_t moment2_extent;
    uint32_t store_group;
};

enum lh_engine_mode {
    LH_ENGINE_MODE_TRAIN = 0, /* forward, backward, close */
    LH_ENGINE_MODE_EVAL = 1,  /* forward only */
};
#define LH_ENGINE_MODE_COUNT 2

/* When updates run. All schedules produce the same numbers. */
enum lh_engine_schedule {
    /* As gradients arrive; reads, arithmetic and writes of successive chunks overlap. */
    LH_ENGINE_SCHEDULE_OPTIMIZED = 0,
    /* After backward and before the next forward, which the caller must delay. */
    LH_ENGINE_SCHEDULE_SERIAL,
    /* As gradients arrive; a unit is read, then computed, then written, before the next is read. */
    LH_ENGINE_SCHEDULE_NAIVE,
    /* Each one shortly before the next forward reads its unit. */
    LH_ENGINE_SCHEDULE_DEFERRED,
    /* Some as gradients arrive and the others deferred; the split is measured in earlier steps. */
    LH_ENGINE_SCHEDULE_AUTO,
};
#define LH_ENGINE_SCHEDULE_COUNT 5

struct lh_engine_opts {
    const struct lh_engine_unit *units; /* borrowed for the call */
    uint32_t unit_count;
    const struct lh_engine_param *params; /* borrowed for the call; sorted by unit */
    uint32_t param_count;
    uint32_t group_count;
    const struct lh_budget *budget; /* borrowed for the call */
    /* The budget's region and slabs, LH_HUGE_PAGE_BYTES-aligned; borrowed until destroy. */
    uint8_t *memory;
    uint64_t memory_bytes;  /* at least region_bytes + slab_count * slab_bytes */
    struct lh_store *store; /* this and the next three are borrowed until destroy */
    struct lh_io *io;
    struct lh_exec *exec; /* its queue holds 4 * io_depth jobs, and one per slab and per unit */
    struct lh_waker *waker;
    struct lh_clock clock;
    /*
     * The accelerator that computes (borrowed until destroy), and its memory for parameters. NULL:
     * computation is in main memory. With one, `memory` has the budget's gradient bytes after the
     * slabs.
     */
    struct lh_dev *dev;
    uint8_t *device_memory;
    uint64_t device_bytes;
    uint32_t copy_count; /* the most copies in flight on dev */
    struct lh_saved_opts saved;
    struct lh_in_place_opts in_place;
    bool gradients_in_memory; /* only with dev: gradients are given in main memory anyway */
    uint32_t io_depth;        /* the most requests in flight */
    uint64_t transfer_bytes;  /* the most bytes per request; multiple of LH_CHECKSUM_BYTES */
    uint64_t commit_every;    /* steps; LH_ENGINE_COMMIT_NEVER: only on request */
    enum lh_engine_schedule schedule;
    bool norms;           /* lh_engine_norm() is called each step; every update is deferred */
    bool verify;          /* verify the checksums of what is read */
    uint32_t trace_count; /* events kept; 0: no trace */
    bool manual;          /* no thread: the caller drives lh_engine_poll() (simulators, tests) */
};

struct lh_engine;

/*
 * Make an engine over an open store. Step and per-parameter step counts are taken from the store's
 * last commit.
 *
 * Owns:   *engine_out owns its thread and tables; release with lh_engine_destroy().
 * Errors: -EINVAL, -ENOMEM, -EAGAIN (no thread), -EBADMSG (the store's scalars are not this
 *         model's). NULL then.
 */
int lh_engine_create(const struct lh_engine_opts *opts, struct lh_alloc *alloc,
                     struct lh_engine **engine_out, struct lh_error *err) LH_MUST_CHECK;
/*
 * End the thread without finishing what is open (lh_engine_flush does that); wait for what is in
 * flight. Lends stay valid until destroy; unpin is still allowed, everything else returns
 * -ECANCELED.
 */
void lh_engine_stop(struct lh_engine *engine);
/* Stop the engine and free it. NULL is allowed. */
void lh_engine_destroy(struct lh_engine *engine);

/* Run one round of the state machines of a manual engine. Returns whether something happened. */
bool lh_engine_poll(struct lh_engine *engine);

/* A forward of the whole model begins: plan the step (train) or the evaluation. Does not wait. */
int lh_engine_begin(struct lh_engine *engine, enum lh_engine_mode mode) LH_MUST_CHECK;

/*
 * Begin a use of unit. 1: it is resident and pinned; 0: it was requested, call
 * lh_engine_acquire_wait(); -errno: the engine's error.
 */
int lh_engine_acquire(struct lh_engine *engine, uint32_t unit) LH_MUST_CHECK;
/*
 * Wait for a requested unit. 1: it is resident and pinned; 0: timeout_ms passed, call again;
 * -errno. -ENOSPC although the engine has not failed: pinned units leave no room for this one, and
 * the use has not begun; lh_engine_refusal() returns the reason.
 */
int lh_engine_acquire_wait(struct lh_engine *engine, uint32_t unit, int timeout_ms) LH_MUST_CHECK;
void lh_engine_refusal(struct lh_engine *engine, struct lh_error *err);
/*
 * Begin and end a tentative wait: if it lasts, its caller releases units before it ends the wait.
 * Meanwhile the engine does not refuse a unit for which pinned units leave no room. Otherwise a
 * caller that the machine does not run for some time would be refused before it could release any.
 */
void lh_engine_tentative_begin(struct lh_engine *engine);
void lh_engine_tentative_end(struct lh_engine *engine);
/* The address at which computation reads the unit. Valid while it is pinned. Thread: any. */
uint8_t *lh_engine_address(const struct lh_engine *engine, uint32_t unit);
/* Add a pin to a pinned unit (a lend). Thread: any. */
void lh_engine_pin(struct lh_engine *engine, uint32_t unit);
/* Drop a pin; the last one ends the use. Thread: any, without the GIL. */
void lh_engine_unpin(struct lh_engine *engine, uint32_t unit);
uint32_t lh_engine_pin_count(const struct lh_engine *engine, uint32_t unit);
/*
 * [Note: Moved units] A caller that changes a frozen unit's bytes in place while it is pinned uses
 * these to tell whether the bytes are still as it left them. Counts are modulo 2^32.
 */
struct lh_engine_bytes {
    uint8_t *address;
    uint32_t make_count; /* copies to the accelerator; without one, reads into main memory */
    uint32_t out_count;  /* copies back to main memory */
    /* The last copy to the accelerator copied the bytes that the last copy back had written. */
    bool is_from_write_back;
};
/* The state of a pinned unit's bytes. Thread: any. */
struct lh_engine_bytes lh_engine_bytes(const struct lh_engine *engine, uint32_t unit);
/*
 * Report that a pinned unit was changed on the accelerator: when it is evicted there, it is copied
 * back to main memory if it has a place there. Without an accelerator this does nothing.
 */
void lh_engine_moved(struct lh_engine *engine, uint32_t unit);

/* Optimizations to disable, to measure what they gain. Bits; 0: disable nothing. */
#define LH_ENGINE_DEVICE_NO_OVERLAP 1U /* copies begin when a thread waits, one at a time */
/*
 * For the emulated device: memory that a unit leaves is returned to the system, and the next unit's
 * is allocated at alloc_bytes_per_s (0: instantly). Allocating stalls an accelerator, so a load
 * begins only when a thread waits for it and no copy is in flight.
 */
#define LH_ENGINE_DEVICE_NO_REUSE 2U
/* Set the policy, before anything is acquired. */
void lh_engine_device_policy_set(struct lh_engine *engine, uint32_t policy,
                                 uint64_t alloc_bytes_per_s);

/*
 * Set the accelerator's stream that receives computation from now on: acquires, unpins and
 * gradients are ordered with it. Returns the previous stream. Thread: any.
 */
void *lh_engine_stream_set(struct lh_engine *engine, void *stream);

/* See [Note: pins and handles]. Thread: any for lh_engine_handle_drop(). */
void lh_engine_handle_add(struct lh_engine *engine, uint32_t unit);
void lh_engine_handle_drop(struct lh_engine *engine, uint32_t unit);
uint32_t lh_engine_handle_count(const struct lh_engine *engine, uint32_t unit);

/* Set the hyper-parameters of the open step, before its first gradient. */
void lh_engine_hyper_set(struct lh_engine *engine, uint32_t group,
                         const struct lh_adam_hyper *hyper);

/*
 * Wait until every closed step is over (written, committed if due). Returns 1, 0 after timeout_ms,
 * or -errno.
 */
int lh_engine_over_wait(struct lh_engine *engine, int timeout_ms) LH_MUST_CHECK;

/*
 * Hand over param's gradient, after lh_engine_over_wait() returned 1 in this step: contiguous, in
 * param's order, borrowed until lh_engine_gradient_is_consumed(). Its dtype is F32, BF16 or F16.
 * With an accelerator it is in the accelerator's memory and has the parameter's dtype (unless
 * opts.gradients_in_memory).
 *
 * Errors: -EALREADY (param has a gradient in the open step), -EINVAL (frozen, or wrong dtype), the
 *         engine's error. Does not wait.
 */
int lh_engine_gradient(struct lh_engine *engine, uint32_t param, const void *gradient,
                       enum lh_dtype dtype) LH_MUST_CHECK;
/* A counter that changes whenever lh_engine_gradient_is_consumed() changes for any gradient. */
uint64_t lh_engine_gradient_release_count(const struct lh_engine *engine);
bool lh_engine_gradient_is_consumed(const struct lh_engine *engine, uint32_t param);
/*
 * Wait until updates in progress hold at most gradient_bytes_max bytes of gradients. 1: they do; 0:
 * timeout_ms passed; -errno. Updates in progress need nothing from the caller, so this ends.
 */
int lh_engine_gradient_wait(struct lh_engine *engine, uint64_t gradient_bytes_max, int timeout_ms)
    LH_MUST_CHECK;

/*
 * Compute the sum of squares of all gradients of the open step, after its backward: in fp64, and
 * the same for every budget. Only with a schedule that defers every update. With opts.norms, and
 * after the first call, it overlaps backward. Waits. 1: *square_sum_out is set; 0: timeout_ms
 * passed; -errno.
 */
int lh_engine_norm(struct lh_engine *engine, double *square_sum_out, int timeout_ms) LH_MUST_CHECK;
/* Set the factor of the open step's gradients, in fp32, before its close. The default is 1. */
void lh_engine_gradient_scale_set(struct lh_engine *engine, double scale);

/*
 * Close the open step: parameters with gradients are updated, the others stay. scalars (copied) go
 * into the commit. Waits for the end of the previous step (its writes and its commit). 1: closed;
 * 0: timeout_ms passed, call again; -errno.
 */
int lh_engine_close(struct lh_engine *engine, const void *scalars, uint64_t scalar_bytes,
                    int timeout_ms) LH_MUST_CHECK;

/*
 * Discard the open step: updates that began are rolled back to the last committed step. Waits. 1:
 * done; 0: timeout_ms passed, call again; -ENOTRECOVERABLE: steps since the last commit would also
 * be lost (commit_every above 1 or never, or commits were held, and an update began).
 */
int lh_engine_abort(struct lh_engine *engine, int timeout_ms) LH_MUST_CHECK;

/*
 * Wait until nothing is in progress, after a commit of closed steps if commit. 1, 0 (timeout),
 * -errno.
 */
int lh_engine_flush(struct lh_engine *engine, bool commit, int timeout_ms) LH_MUST_CHECK;

/*
 * Prevent commits from beginning until lh_engine_commit_release(): what the store has committed
 * stays unchanged, and another reader may copy it from the files. Training continues; a commit that
 * is due happens with the first step that ends after the release, and a flush that commits waits
 * for the release. Waits for a commit in progress. 1: held; 0: timeout_ms passed, call again;
 * -errno.
 */
int lh_engine_commit_hold(struct lh_engine *engine, int timeout_ms) LH_MUST_CHECK;
/* Thread: any. */
void lh_engine_commit_release(struct lh_engine *engine);

/*
 * After a flush: hand the store to the caller; the engine sleeps until lh_engine_resume(), which is
 * also called after an error or a timeout. A failed engine is not paused: -errno. With
 * commit_every 1 the caller must commit what it writes before it gives the next gradient, because
 * gradients that wait on SSD lie in the uncommitted slot (spill.c).
 * invalidate: discard the resident bytes of a unit whose extents the caller has changed (it must
 * not be pinned).
 */
int lh_engine_pause(struct lh_engine *engine, int timeout_ms) LH_MUST_CHECK;
void lh_engine_invalidate(struct lh_engine *engine, uint32_t unit);
void lh_engine_resume(struct lh_engine *engine);

/* Return the code of the first error, and copy it to *err; 0: no error. Thread: any. */
int lh_engine_error(struct lh_engine *engine, struct lh_error *err);

uint64_t lh_engine_step(const struct lh_engine *engine); /* closed steps, since creation */
uint64_t lh_engine_param_step(const struct lh_engine *engine, uint32_t param);
/* Find the caller's part in the scalars of the store's last commit; it points into scalars. */
const void *lh_scalars_find(const void *scalars, uint64_t scalar_bytes, uint64_t *bytes_out);
/* The bytes that scalars take in addition to the caller's part. */
uint64_t lh_scalars_overhead_bytes(uint32_t param_count);
/*
 * Build scalars (the overhead bytes followed by the caller's part) for a store that is filled from
 * elsewhere, whose parameters have been updated param_steps times.
 */
void lh_scalars_make(const uint64_t *param_steps, uint32_t param_count, const void *caller,
                     uint64_t caller_bytes, void *scalars_out);

enum lh_engine_link {
    LH_ENGINE_LINK_PARAM_READ = 0,
    LH_ENGINE_LINK_STATE_READ,
    LH_ENGINE_LINK_PARAM_WRITE,
    LH_ENGINE_LINK_STATE_WRITE,
    LH_ENGINE_LINK_COMMIT_WRITE,
    LH_ENGINE_LINK_GRADIENT_WRITE, /* gradients that wait for the close (spill.c) */
    LH_ENGINE_LINK_GRADIENT_READ,  /* the same, read back */
    LH_ENGINE_LINK_COPY_IN,        /* parameters, to the accelerator */
    LH_ENGINE_LINK_COPY_OUT,       /* gradients, from the accelerator */
    LH_ENGINE_LINK_SAVED_WRITE,    /* saved tensors (saved.h) */
    LH_ENGINE_LINK_SAVED_READ,
    LH_ENGINE_LINK_SAVED_IN,  /* saved tensors, to the accelerator */
    LH_ENGINE_LINK_SAVED_OUT, /* saved tensors, from it */
    LH_ENGINE_LINK_COUNT,
};

/* Whether a link goes to the SSDs; the others go to or from the accelerator. */
static inline bool lh_engine_link_is_ssd(enum lh_engine_link link)
{
    return link < LH_ENGINE_LINK_COPY_IN || link == LH_ENGINE_LINK_SAVED_WRITE ||
           link == LH_ENGINE_LINK_SAVED_READ;
}

/*
 * The statistics of one step, from its begin (the first forward after the previous step) to the end
 * of its writes and commit.
 */
struct lh_engine_step_stats {
    uint64_t step; /* 1, 2, ... */
    uint64_t begin_ns;
    uint64_t close_ns; /* the time of the call of lh_engine_close() */
    uint64_t end_ns;   /* the end of the writes and of the commit */
    uint64_t bytes[LH_ENGINE_LINK_COUNT];
    uint64_t planned_bytes[LH_ENGINE_LINK_COUNT];
    uint64_t replans;
    uint64_t param_wait_ns;    /* the training thread's time in lh_engine_acquire_wait */
    uint64_t gradient_wait_ns; /* its time in lh_engine_gradient_wait */
    uint64_t ssd_busy_ns;      /* the time with at least one request in flight */
    uint64_t update_busy_ns;   /* the sum of the workers' times */
    uint64_t copy_busy_ns[LH_DEV_DIRECTION_COUNT];
    uint64_t commit_ns;
    uint64_t gradient_bytes_max; /* the most held at a time, by updates and complete units */
    uint64_t updated_params;
    uint64_t deferred_units; /* the number of units updated after the close, as scheduled */
};

/*
 * Get the statistics of the last finished step. Returns false if no step has finished yet.
 *
 * Thread: any.
 */
bool lh_engine_stats(struct lh_engine *engine, struct lh_engine_step_stats *stats_out);

enum lh_engine_trace_kind {
    LH_ENGINE_TRACE_PARAM_READ = 0,
    LH_ENGINE_TRACE_STATE_READ,
    LH_ENGINE_TRACE_WRITE,
    LH_ENGINE_TRACE_UPDATE,
    LH_ENGINE_TRACE_CHECK,
    LH_ENGINE_TRACE_COMMIT,
    LH_ENGINE_TRACE_USE,
    LH_ENGINE_TRACE_WAIT,
    LH_ENGINE_TRACE_GRADIENT_READ,
    LH_ENGINE_TRACE_GATHER,
    LH_ENGINE_TRACE_COPY_IN,
    LH_ENGINE_TRACE_COPY_OUT,
    LH_ENGINE_TRACE_SAVED_READ,
    LH_ENGINE_TRACE_SAVED_SUM,
    LH_ENGINE_TRACE_COMPUTE, /* the simulator's training thread; lane: its phase */
};

struct lh_engine_trace_event {
    uint32_t kind; /* enum lh_engine_trace_kind */
    uint32_t unit;
    uint32_t lane; /* index of the worker or of the request */
    uint32_t step;
    uint64_t start_ns;
    uint64_t end_ns;
    uint64_t bytes;
};

/* Copy the newest events, oldest first, and return their count. After lh_engine_flush only. */
uint32_t lh_engine_trace(struct lh_engine *engine, struct lh_engine_trace_event *events,
                         uint32_t event_max);

#endif
