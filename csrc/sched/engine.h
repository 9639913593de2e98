/*
 * The engine: one thread that moves a model's parameters and optimizer states between SSD, main
 * memory and the accelerator, and runs the optimizer.
 *
 * The training thread (the user's, or autograd's) reports what happens: a step begins, a unit is
 * needed, a unit is no longer read, a gradient is ready, the step is closed. The training thread
 * waits only in the calls that are documented to wait. How the engine reacts is described in
 * engine_private.h (the state machines) and docs/architecture.md (A step).
 *
 * [Note: pins and handles] Each unit has two shared counters. `pins` counts uses and lends, that
 * is, readers of the unit's bytes in memory. `handles` counts the references that autograd has
 * saved for a backward, which will read the bytes again. The engine takes a unit away from where
 * computation reads it only at pins 0. It updates a unit only at pins 0 and, before the close of
 * the step, only at handles 0. Uses begin and handles are added on a training thread; lends are
 * added, and both counters are decremented, on any thread.
 *
 * An error of the engine is final: the first one is kept, every wait ends, and later calls that can
 * fail return it.
 *
 * Thread: only one training thread at a time may call these functions, unless a comment says "any".
 *         Autograd's device thread counts as the training thread while the user's thread waits. The
 *         store, io, exec and waker belong to the engine from create to destroy, except during
 *         lh_engine_pause.
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
#include "compute/sum_tree.h"
#include "dev/dev.h"
#include "exec/exec.h"
#include "io/io.h"
#include "plan/budget.h"
#include "sched/in_place.h"
#include "sched/saved.h"
#include "store/store.h"
#include "team/team.h"

#define LH_ENGINE_EXTENT_NONE UINT32_MAX
/*
 * The number of elements of a trainable unit is padded to a multiple of this, so that the size of
 * each of the unit's arrays is a multiple of LH_BLOCK_BYTES.
 */
#define LH_ENGINE_ELEMENT_ALIGN 2048
/*
 * A parameter starts at a multiple of this many elements in its unit. That is 128 bytes or more, a
 * multiple of the alignment of torch's allocator (64 bytes).
 */
#define LH_ENGINE_PARAM_ALIGN 64
/* The elements whose scales fill a block (compute/adam_states.h). */
#define LH_ENGINE_SCALED_ALIGN (16 * LH_BLOCK_BYTES)
#define LH_ENGINE_COMMIT_NEVER 0
#define LH_ENGINE_TRACE_COUNT_MAX (1U << 18)

struct lh_engine_param {
    uint32_t unit;
    uint64_t first;  /* trainable: first element in the unit; frozen: first byte in the unit */
    uint64_t count;  /* elements */
    uint32_t group;  /* index of the parameter's group of hyper-parameters */
    uint32_t number; /* selects the random bits of its moments (struct lh_adam_random) */
    /* Of a row that has a second moment of its own ([Note: Second moments of rows] in rule.h). */
    uint64_t row_elements;
    /* Under a rule with factors ([Note: Factors] in compute/factor.h): the rows and columns of its
     * matrices, 0 if it has none, and the element of the unit where its floats begin. */
    uint64_t factor_rows;
    uint64_t factor_columns;
    uint64_t factor_first;
    /* Of a matrix that is updated as such ([Note: Matrices] in rule.h), otherwise 0. */
    uint64_t matrix_rows;
    double lr_ratio; /* what its shape makes of the learning rate */
};

struct lh_engine_unit {
    uint64_t bytes; /* size of the stored parameters; a multiple of LH_BLOCK_BYTES */
    /*
     * The room that the unit takes in the memory where computation happens: `bytes`, followed by
     * room for the caller that the engine never reads, writes or copies. 0: exactly `bytes`.
     */
    uint64_t place_bytes;
    uint64_t elements;    /* padded to LH_ENGINE_ELEMENT_ALIGN; 0: the unit is frozen */
    enum lh_dtype dtype;  /* F32, BF16 or F16 if the unit is trainable */
    bool always;          /* the unit's scope encloses others: it is loaded once and stays */
    bool is_announced;    /* its uses are planned only where they are announced (expect.h) */
    uint32_t family;      /* 0: it owes nothing in steps without a gradient ([Note: Idle units]) */
    bool averages_idle;   /* of a family: its average alone takes such a step */
    uint32_t param_first; /* the unit's parameters: [param_first, param_first + param_count) */
    uint32_t param_count;
    uint32_t param_extent;    /* LH_ENGINE_EXTENT_NONE: the unit is read in place */
    uint32_t residual_extent; /* LH_ENGINE_EXTENT_NONE: the unit has no residual */
    uint32_t moment1_extent;  /* LH_ENGINE_EXTENT_NONE: the rule has none, or is_given */
    uint32_t moment2_extent;
    bool is_given;              /* it is trained, but another process has its states */
    enum lh_rule rule;          /* how it is updated; all trainable units have the same */
    enum lh_adam_states states; /* how moments are stored; all trainable units have the same */
    /*
     * Formats with scales, and rules with rows: the first of consecutive extents, each with the
     * scales or rows of LH_ADAM_SCALES_ELEMENTS elements or the rest. `elements` is then padded
     * to LH_ENGINE_SCALED_ALIGN: whole blocks.
     */
    uint32_t scales_extent;
    uint32_t average_extent; /* of fp32 averages (E), after the moments', so never 0; 0: none */
    uint32_t store_group;
    /* What an update takes beside its memory traffic, in bytes of that: simulations only. */
    uint64_t work_bytes;
};

/* The bytes of R, M, V and E that this process has for an element of a unit; 0: frozen. */
uint32_t lh_engine_state_bytes(const struct lh_engine_unit *unit);

enum lh_engine_mode {
    LH_ENGINE_MODE_TRAIN = 0, /* forward, backward, close */
    LH_ENGINE_MODE_EVAL = 1,  /* forward only */
};
#define LH_ENGINE_MODE_COUNT 2

/* When the optimizer's updates run. All schedules produce the same numbers. */
enum lh_engine_schedule {
    /*
     * Updates run as gradients arrive; reads, arithmetic and writes of successive chunks overlap.
     */
    LH_ENGINE_SCHEDULE_OPTIMIZED = 0,
    /* Updates run after backward and before the next forward, which the caller must delay. */
    LH_ENGINE_SCHEDULE_SERIAL,
    /*
     * Updates run as gradients arrive; each unit is read, then computed, then written, before the
     * next unit is read.
     */
    LH_ENGINE_SCHEDULE_NAIVE,
    /* Each update runs shortly before the next forward reads its unit; in a team, at the close. */
    LH_ENGINE_SCHEDULE_DEFERRED,
    /*
     * Some updates run as gradients arrive, and the other ones are deferred; measurements of
     * earlier steps determine the split.
     */
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
    /* For the budget's region and slabs, LH_HUGE_PAGE_BYTES-aligned; borrowed until destroy. */
    uint8_t *memory;
    uint64_t memory_bytes;  /* at least region_bytes (without a team) + slab_count * slab_bytes */
    struct lh_store *store; /* this and the next three are borrowed until destroy */
    struct lh_io *io;
    /* 4 * io_depth + 8 jobs, one per slab and unit, and LH_IN_PLACE_JOB_COUNT per packed unit */
    struct lh_exec *exec;
    struct lh_waker *waker;
    struct lh_clock clock;
    /*
     * The accelerator that computes (borrowed until destroy), and the accelerator's memory for
     * parameters. NULL: computation is in main memory. With an accelerator, `memory` also has room
     * for the budget's gradient bytes, after the slabs, unless gradients_in_memory is set.
     */
    struct lh_dev *dev;
    uint8_t *device_memory;
    uint64_t device_bytes;
    uint32_t copy_count; /* the maximum number of copies in flight on dev */
    /*
     * With dev: it reads units where they are in main memory (unified.c), and device_memory is the
     * address at which it finds the budget's region. It must be ordered, and needs has_passed and
     * synchronize; there must be no team.
     */
    bool units_in_memory;
    struct lh_saved_opts saved;
    struct lh_in_place_opts in_place;
    /*
     * The processes of this machine that share parameters (team/team.h); borrowed until destroy.
     * The owner's region is the team's, and a mate has none: `memory` begins with the slabs. A
     * mate's store, which it must not write, is only read for its description. NULL: no team.
     */
    struct lh_team *team;
    /*
     * With dev and a team: the team's accelerators gather units (gather.c), and a thread waits for
     * at most so long for a process that does not take part. 0: units are copied whole.
     */
    uint64_t gather_wait_ns;
    bool gradients_in_memory; /* with dev: gradients are nevertheless passed in main memory */
    /*
     * Main memory through which lh_sum_post() copies gradients from dev, LH_BLOCK_BYTES-aligned;
     * borrowed until destroy. 0 bytes: it is not called.
     */
    uint8_t *sum_memory;
    uint64_t sum_bytes;
    /*
     * Main memory through which lh_tail_post() copies from dev; borrowed until destroy. 0 bytes: it
     * is not called.
     */
    uint8_t *tail_memory;
    uint64_t tail_bytes;
    uint32_t io_depth;       /* the maximum number of requests in flight */
    uint64_t transfer_bytes; /* the maximum size of a request; a multiple of LH_CHECKSUM_BYTES */
    uint64_t commit_every;   /* steps per commit; LH_ENGINE_COMMIT_NEVER: only a flush commits */
    enum lh_engine_schedule schedule;
    bool norms; /* lh_norm_wait() is called in each step; needs every update deferred, or repeats */
    /*
     * Updates do not wait for the norm, and lh_repeat() may be called. Needs norms, the schedule
     * OPTIMIZED and commit_every 1. The gradients of a step stay until its close: in memory, or
     * where the budget has no room for them in `apart`.
     */
    bool repeats;
    struct {
        struct lh_store *store; /* has one extent; borrowed until destroy. NULL: there is none */
        uint32_t file_first;    /* index of the store's first file among io's files */
    } apart;
    bool verify;          /* verify the checksums of what is read */
    bool accept_nan;      /* an update may make a parameter NaN; otherwise the engine fails */
    uint32_t trace_count; /* number of trace events that are kept; 0: no trace */
    bool manual;          /* no thread: the caller drives lh_engine_poll() (simulators, tests) */
};

struct lh_engine;

/*
 * Create an engine for an open store. The step, and the step count of each parameter, are taken
 * from the store's last commit.
 *
 * Owns:   *engine_out owns its thread and tables; release with lh_engine_destroy().
 * Errors: -EINVAL, -ENOMEM, -EAGAIN (no thread could be started), -EBADMSG (the store's scalars are
 *         not this model's). *engine_out is then NULL.
 */
int lh_engine_create(const struct lh_engine_opts *opts, struct lh_alloc *alloc,
                     struct lh_engine **engine_out, struct lh_error *err) LH_MUST_CHECK;
/*
 * Stop the engine's thread. Requests, copies and jobs in flight are waited for; no other work is
 * finished (lh_engine_flush() does that). Lends stay valid until destroy, and unpinning is still
 * allowed; later calls that can fail return -ECANCELED, or an earlier error of the engine.
 */
void lh_engine_stop(struct lh_engine *engine);
/* Stop the engine and free it. NULL is allowed. */
void lh_engine_destroy(struct lh_engine *engine);

/* Run one round of the state machines of a manual engine. Returns whether something happened. */
bool lh_engine_poll(struct lh_engine *engine);

/*
 * Report that a forward of the whole model begins, so that the engine plans the step (train) or the
 * evaluation. Does not wait.
 */
int lh_engine_begin(struct lh_engine *engine, enum lh_engine_mode mode) LH_MUST_CHECK;
/*
 * Announce the next uses ([Note: Uses that are announced] in expect.h): each of these units, in
 * this order, before any other unit. Their lh_engine_unit.is_announced is set. They are borrowed
 * for the call.
 */
void lh_engine_announce(struct lh_engine *engine, const uint32_t *units, uint32_t count);

/*
 * Begin a use of unit. Returns 1 if the unit is resident and has been pinned, 0 if it was only
 * requested (then call lh_engine_acquire_wait()), or the engine's error.
 */
int lh_engine_acquire(struct lh_engine *engine, uint32_t unit) LH_MUST_CHECK;
/*
 * Wait for a requested unit. Returns 1 if the unit is resident and has been pinned, 0 after
 * timeout_ms (then call again), or -errno. -ENOSPC can also mean that the unit was refused, because
 * pinned units leave no room for it: the engine has not failed, the use has not begun, and
 * lh_engine_refusal() returns the reason.
 */
int lh_engine_acquire_wait(struct lh_engine *engine, uint32_t unit, int timeout_ms) LH_MUST_CHECK;
void lh_engine_refusal(struct lh_engine *engine, struct lh_error *err);
/*
 * Begin and end a tentative wait: if the wait takes long, the caller will release pinned units
 * before it ends the wait. Until then the engine refuses no unit for lack of room. Otherwise a
 * caller that the operating system does not schedule for some time would be refused before it could
 * release any unit.
 */
void lh_engine_tentative_begin(struct lh_engine *engine);
void lh_engine_tentative_end(struct lh_engine *engine);
/* The address at which computation reads the unit. Valid while the unit is pinned. Thread: any. */
uint8_t *lh_engine_address(const struct lh_engine *engine, uint32_t unit);
/* Add a pin to a pinned unit (a lend). Thread: any. */
void lh_engine_pin(struct lh_engine *engine, uint32_t unit);
/* Remove a pin; removing the last pin ends the use. Thread: any; the GIL is not needed. */
void lh_engine_unpin(struct lh_engine *engine, uint32_t unit);
uint32_t lh_engine_pin_count(const struct lh_engine *engine, uint32_t unit);
/*
 * [Note: Moved units] A caller may change a frozen unit's bytes in place while the unit is pinned.
 * These fields tell the caller later whether the bytes are unchanged since then. The counts are
 * modulo 2^32.
 */
struct lh_engine_bytes {
    uint8_t *address;
    /* copies to the accelerator; without an accelerator, reads into main memory */
    uint32_t make_count;
    uint32_t out_count; /* copies back to main memory */
    /* The last copy to the accelerator read the bytes that the last copy back had written. */
    bool is_from_write_back;
};
/* The state of a pinned unit's bytes. Thread: any. */
struct lh_engine_bytes lh_engine_bytes(const struct lh_engine *engine, uint32_t unit);
/*
 * Report that a pinned unit was changed on the accelerator: when the unit is evicted from the
 * accelerator, it is copied back to main memory if it has a place in main memory. Without an
 * accelerator this does nothing.
 */
void lh_engine_moved(struct lh_engine *engine, uint32_t unit);

/* Bits that each disable an optimization, to measure its benefit. 0: disable nothing. */
#define LH_ENGINE_DEVICE_NO_OVERLAP 1U /* copy units one at a time, while a thread waits */
/*
 * For the emulated device: the memory of an evicted unit is returned to the system, and the memory
 * of the next unit is allocated at alloc_bytes_per_s (0: instantly). An allocation stalls an
 * accelerator, so a load begins only when a thread waits for it and no copy is in flight.
 */
#define LH_ENGINE_DEVICE_NO_REUSE 2U
/* Set the policy (a combination of the bits above), before any unit is acquired. */
void lh_device_policy_set(struct lh_engine *engine, uint32_t policy, uint64_t alloc_bytes_per_s);

/*
 * Set the accelerator's stream that receives computation from now on: acquires, unpins and
 * gradients are ordered with it. Returns the previous stream. Thread: any.
 */
void *lh_engine_stream_set(struct lh_engine *engine, void *stream);

/*
 * Add, drop or count handles; see [Note: pins and handles]. Thread: any for
 * lh_engine_handle_drop().
 */
void lh_engine_handle_add(struct lh_engine *engine, uint32_t unit);
void lh_engine_handle_drop(struct lh_engine *engine, uint32_t unit);
uint32_t lh_engine_handle_count(const struct lh_engine *engine, uint32_t unit);

/* Set the hyper-parameters of the open step, before its first gradient. */
void lh_engine_hyper_set(struct lh_engine *engine, uint32_t group,
                         const struct lh_adam_hyper *hyper);
/*
 * Set a group's hyper-parameters of an earlier step, which units may owe ([Note: Idle units] in
 * idle.h). Call it before the first use of a unit.
 */
void lh_idle_history_set(struct lh_engine *engine, uint64_t step, uint32_t group,
                         const struct lh_adam_hyper *hyper);
/* How many steps the unit owes. Thread: any. */
uint32_t lh_idle_owed(const struct lh_engine *engine, uint32_t unit);
/*
 * Settle all units that owe. The open step must have no gradients. Returns 1 once all are updated
 * in memory (a flush waits for their writes), 0 after timeout_ms (then call again), or -errno.
 */
int lh_settle_all(struct lh_engine *engine, int timeout_ms) LH_MUST_CHECK;

/*
 * Wait until every closed step is over (written, and committed if due) and no interrupted flush or
 * abort is in progress. Returns 1, 0 after timeout_ms, or -errno.
 */
int lh_engine_over_wait(struct lh_engine *engine, int timeout_ms) LH_MUST_CHECK;
/* Whether the last step was over, and was closed again for what units owe. Thread: any. */
bool lh_engine_is_reopened(const struct lh_engine *engine);

/*
 * Hand over param's gradient, after lh_engine_over_wait() returned 1 in this step. The gradient is
 * contiguous, has param's element order, and is borrowed until lh_engine_gradient_is_consumed().
 * Its dtype is F32, BF16 or F16. With an accelerator the gradient is in the accelerator's memory
 * and has the parameter's dtype (unless opts.gradients_in_memory).
 *
 * Errors: -EALREADY (param has a gradient in the open step), -EINVAL (frozen, or wrong dtype), the
 *         engine's error. Does not wait.
 */
int lh_engine_gradient(struct lh_engine *engine, uint32_t param, const void *gradient,
                       enum lh_dtype dtype) LH_MUST_CHECK;
/*
 * Add a gradient in the accelerator's memory (F32, BF16 or F16) to a sum in main memory, of the
 * parameter's number of elements, or to the partial sums of a tree, as the join says. The gradient
 * is read until lh_engine_gradient_is_consumed(), and so must have been the parameter's previous
 * one; the sums are written until lh_sum_wait().
 *
 * @return 0, or the engine's error. Does not wait.
 */
int lh_sum_post(struct lh_engine *engine, uint32_t param, const void *gradient, enum lh_dtype dtype,
                float *sum, const struct lh_sum_join *join) LH_MUST_CHECK;
/* Wait until all gradients are in their sums. Returns 1, 0 after timeout_ms, or -errno. */
int lh_sum_wait(struct lh_engine *engine, int timeout_ms) LH_MUST_CHECK;
/* Wait until a parameter's gradient is consumed. Returns 1, 0 after timeout_ms, or -errno. */
int lh_sum_release_wait(struct lh_engine *engine, uint64_t param, int timeout_ms) LH_MUST_CHECK;
/* A counter that changes whenever lh_engine_gradient_is_consumed() becomes true for a gradient. */
uint64_t lh_engine_gradient_release_count(const struct lh_engine *engine);
bool lh_engine_gradient_is_consumed(const struct lh_engine *engine, uint32_t param);
/*
 * Wait until the engine has handled all that was posted before this call, so that updates which are
 * due count as being in progress. Returns 1, 0 after timeout_ms, or -errno.
 */
int lh_engine_heard_wait(struct lh_engine *engine, int timeout_ms) LH_MUST_CHECK;
/* Whether updates in progress hold at most gradient_bytes_max bytes of gradients. */
bool lh_engine_gradients_fit(const struct lh_engine *engine, uint64_t gradient_bytes_max);
/*
 * Wait until updates in progress hold at most gradient_bytes_max bytes of gradients. Returns 1, 0
 * after timeout_ms, or -errno. Updates in progress need nothing from the caller, so the wait always
 * ends.
 */
int lh_engine_gradient_wait(struct lh_engine *engine, uint64_t gradient_bytes_max, int timeout_ms)
    LH_MUST_CHECK;

/*
 * Compute the sum of squares of all gradients of the open step, after its backward, in fp64. The
 * result is the same for every budget. The schedule has to defer every update, unless steps can be
 * repeated (opts.repeats). With opts.norms, or after the first call, the computation overlaps
 * backward. Waits. Returns 1 (*square_sum_out is set), 0 after timeout_ms, or -errno.
 */
int lh_norm_wait(struct lh_engine *engine, double *square_sum_out, int timeout_ms) LH_MUST_CHECK;
/*
 * The sums of squares of single parameters that lh_norm_wait() has added, valid until the close:
 * one for each parameter of a unit that has a gradient, except those of given units.
 */
const double *lh_norm_sums(const struct lh_engine *engine);
/*
 * After the close of a step: the new values of a unit whose states another process has are in
 * memory, where lh_engine_gradient() said that they would be. Call it once for each such unit that
 * has gradients, in the same order in every step.
 */
void lh_given_arrived(struct lh_engine *engine, uint32_t unit);
/* New values that have not come will not come: the engine fails, and the step is never over. */
void lh_given_never(struct lh_engine *engine);
/* Where a process's part of a unit begins: the end of the part of the process before it. */
static inline uint64_t lh_gather_edge(uint64_t bytes, uint32_t count, uint32_t process)
{
    uint64_t at = bytes / count * process + bytes % count * process / count;
    return process == count ? bytes : at - at % 64;
}

/*
 * Wait for the next unit that the team's accelerators gather, at lh_engine_address(): this process
 * has its part there (lh_gather_edge()), and needs those of the others. Returns 1, 0 after
 * timeout_ms, or -ECANCELED once the engine has stopped. Gathers are made in this order in all
 * processes. Thread: one of the caller's.
 */
int lh_gather_next(struct lh_engine *engine, uint32_t *unit_out, int timeout_ms) LH_MUST_CHECK;
/*
 * The unit is complete at its place, for all that read it afterwards; or the connection is
 * broken, and nothing writes there any more. Thread: as for lh_gather_next().
 */
void lh_gather_done(struct lh_engine *engine, uint32_t unit, bool is_complete);
/*
 * Report the end of a backward in all processes, with the number of the next one from 0, which is
 * the same in all of them; and whether the training thread waits for what the others compute.
 */
void lh_gather_round(struct lh_engine *engine, uint64_t round);
void lh_gather_wait(struct lh_engine *engine, bool waits);
/* A process of the team is gone, for which a thread of this one waits: the engine fails. */
void lh_engine_peer_lost(struct lh_engine *engine);
/*
 * Set the factor by which the open step's gradients are multiplied (in fp32), before the step's
 * close. The default is 1.
 */
void lh_engine_gradient_scale_set(struct lh_engine *engine, double scale);

/*
 * With opts.repeats, after lh_norm_wait(): undo the updates that the open step has made, and make
 * them again after its close, with the factor that is set until then. The step's gradients stay
 * borrowed. Waits. Returns 1, 0 after timeout_ms (then call again), or -errno. -ENOTRECOVERABLE,
 * which also fails the engine: an update has changed a unit that is pinned.
 */
int lh_repeat(struct lh_engine *engine, int timeout_ms) LH_MUST_CHECK;
/*
 * With opts.repeats, before the first gradient of a step: whether its updates wait for the close,
 * so that it need not be repeated. The setting stays until it is changed.
 */
void lh_repeat_wait_set(struct lh_engine *engine, bool waits);

/*
 * From the open step on, commit every `every` steps (those whose number is a multiple of it), in
 * place of opts.commit_every. `every` must be above 1. Call it once, before the first gradient of
 * the step. Returns false, without effect, if gradients wait on SSD (opts.commit_every of 1 and too
 * little memory for them): they are in the slot of the next commit, so every step must commit.
 */
bool lh_every_set(struct lh_engine *engine, uint64_t every);

/*
 * Close the open step: parameters with gradients are updated, and the other parameters stay
 * unchanged. scalars are copied and become part of the commit. Waits until the previous step is
 * over (written, and committed if due). Returns 1 (the step is closed), 0 after timeout_ms (then
 * call again), or -errno.
 */
int lh_engine_close(struct lh_engine *engine, const void *scalars, uint64_t scalar_bytes,
                    int timeout_ms) LH_MUST_CHECK;

/*
 * Announce that the last `bytes` of the scalars that lh_engine_close() gets next are in the
 * accelerator's memory, where the stream's work so far computes them. The caller keeps them
 * unchanged until the next step's close; the engine replaces the scalars' bytes before it commits.
 * Waits until the previous step is over. Returns 1, 0 after timeout_ms (then call again), or the
 * engine's error; -E2BIG: more than opts.tail_bytes.
 *
 * Thread: the training thread.
 */
int lh_tail_post(struct lh_engine *engine, const void *device, uint64_t bytes, int timeout_ms)
    LH_MUST_CHECK;

/*
 * With copies of units: read a unit's newest bytes in main memory, which does not involve the
 * accelerator. Begin a read; wait until the unit is in main memory and no update of a closed step
 * is pending; copy the bytes; end the read, also if the wait was given up. Only one read may be
 * under way. No step may be closed or aborted meanwhile, and the engine may not be paused.
 * lh_reading_wait() returns 1, 0 after timeout_ms (then call again), or the engine's error.
 *
 * Thread: the training thread.
 */
void lh_reading_begin(struct lh_engine *engine, uint32_t unit);
int lh_reading_wait(struct lh_engine *engine, int timeout_ms) LH_MUST_CHECK;
const uint8_t *lh_reading_address(const struct lh_engine *engine, uint32_t unit);
void lh_reading_end(struct lh_engine *engine, uint32_t unit);

/*
 * Discard the open step: updates that have begun are rolled back to the last committed step. Waits.
 * Returns 1 (the step is discarded), 0 after timeout_ms (then call again), or -errno.
 * -ENOTRECOVERABLE, which also fails the engine: an update has changed a unit that is still pinned,
 * or a rollback would also lose steps or edits since the last commit (commit_every above 1 or
 * never, or commits were held).
 */
int lh_engine_abort(struct lh_engine *engine, int timeout_ms) LH_MUST_CHECK;

/*
 * Wait until nothing is in progress. If commit, closed steps are committed first. Returns 1, 0
 * after timeout_ms, or -errno.
 */
int lh_engine_flush(struct lh_engine *engine, bool commit, int timeout_ms) LH_MUST_CHECK;

/*
 * Prevent commits from beginning until lh_engine_commit_release(): what the store has committed
 * stays unchanged, and another reader may copy it from the files. Training continues; a commit that
 * is due happens with the first step that ends after the release, and a flush that commits waits
 * for the release. Waits for a commit in progress to end. Returns 1 (commits are held), 0 after
 * timeout_ms (then call again), or -errno.
 */
int lh_engine_commit_hold(struct lh_engine *engine, int timeout_ms) LH_MUST_CHECK;
/* Thread: any. */
void lh_engine_commit_release(struct lh_engine *engine);

/*
 * After a flush: hand the store over to the caller. The engine sleeps until lh_engine_resume(),
 * which must also be called after an error or a timeout. A failed engine is not paused, and its
 * error is returned. With commit_every 1 the caller must commit what it writes before it gives the
 * next gradient, because gradients that wait on SSD lie in the uncommitted slot (spill.c).
 * invalidate: discard the resident bytes of a unit whose extents the caller has changed (the unit
 * must not be pinned).
 */
int lh_engine_pause(struct lh_engine *engine, int timeout_ms) LH_MUST_CHECK;
void lh_engine_invalidate(struct lh_engine *engine, uint32_t unit);
void lh_engine_resume(struct lh_engine *engine);
/*
 * While a mate's engine is paused: give all units back to the owner. None may be pinned. What was
 * recorded of the current cycle stays.
 */
void lh_borrow_give_back(struct lh_engine *engine);

/* Return the code of the first error, and copy it to *err; 0: no error. Thread: any. */
int lh_engine_error(struct lh_engine *engine, struct lh_error *err);

/* The number of closed steps, including those before this engine was created. */
uint64_t lh_engine_step(const struct lh_engine *engine);
uint64_t lh_engine_param_step(const struct lh_engine *engine, uint32_t param);
/*
 * Find the caller's part in the scalars of a commit. The result points into scalars; NULL: invalid
 * scalars.
 */
const void *lh_scalars_find(const void *scalars, uint64_t scalar_bytes, uint64_t *bytes_out);
/* The bytes that scalars take in addition to the caller's part. */
uint64_t lh_scalars_overhead_bytes(uint32_t param_count);
/*
 * Build scalars (the overhead bytes followed by the caller's part) for a store that is not filled
 * by an engine. param_steps has the number of updates of each parameter.
 */
void lh_scalars_make(const uint64_t *param_steps, uint32_t param_count, const void *caller,
                     uint64_t caller_bytes, void *scalars_out);
/* Make all step counts 0, while the engine is paused: the caller has written moments of zeros. */
void lh_scalars_steps_clear(struct lh_engine *engine);

enum lh_engine_link {
    LH_ENGINE_LINK_PARAM_READ = 0,
    LH_ENGINE_LINK_STATE_READ,
    LH_ENGINE_LINK_PARAM_WRITE,
    LH_ENGINE_LINK_STATE_WRITE,
    LH_ENGINE_LINK_COMMIT_WRITE,
    LH_ENGINE_LINK_GRADIENT_WRITE, /* gradients that wait for the close (spill.c) */
    LH_ENGINE_LINK_GRADIENT_READ,  /* the spilled gradients, read back */
    LH_ENGINE_LINK_COPY_IN,        /* parameters, to the accelerator */
    LH_ENGINE_LINK_COPY_OUT,       /* gradients, from the accelerator */
    LH_ENGINE_LINK_SAVED_WRITE,    /* saved tensors (saved.h) */
    LH_ENGINE_LINK_SAVED_READ,
    LH_ENGINE_LINK_SAVED_IN,  /* saved tensors, to the accelerator */
    LH_ENGINE_LINK_SAVED_OUT, /* saved tensors, from the accelerator */
    LH_ENGINE_LINK_SHARED,    /* parameters, read where another process has them (borrow.c) */
    LH_ENGINE_LINK_GATHERED,  /* parameters, from other processes' accelerators (gather.c) */
    LH_ENGINE_LINK_COUNT,
};

/* Whether a link connects SSDs and main memory. */
static inline bool lh_engine_link_is_ssd(enum lh_engine_link link)
{
    return link < LH_ENGINE_LINK_COPY_IN || link == LH_ENGINE_LINK_SAVED_WRITE ||
           link == LH_ENGINE_LINK_SAVED_READ;
}

/*
 * The statistics of one step, from its beginning (the first forward after the previous step) to the
 * end of its writes and commit.
 */
struct lh_engine_step_stats {
    uint64_t step; /* 1, 2, ... */
    uint64_t begin_ns;
    uint64_t close_ns; /* the time of the call of lh_engine_close() */
    uint64_t end_ns;   /* the end of the writes and of the commit */
    uint64_t bytes[LH_ENGINE_LINK_COUNT];
    uint64_t planned_bytes[LH_ENGINE_LINK_COUNT];
    uint64_t replans;
    /*
     * The training thread's time in lh_engine_acquire_wait; and in lh_engine_gradient_wait and in
     * waits for saved tensors. With a device that measures it, the times for which the device had
     * nothing to execute because of these waits.
     */
    uint64_t param_wait_ns;
    uint64_t gradient_wait_ns;
    uint64_t ssd_busy_ns;    /* the time with at least one request in flight */
    uint64_t update_busy_ns; /* the sum of the workers' times in jobs on slabs */
    uint64_t copy_busy_ns[LH_DEV_DIRECTION_COUNT];
    uint64_t commit_ns;
    uint64_t gradient_bytes_max; /* the most bytes of gradients counted as held at a time */
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
    LH_ENGINE_TRACE_COMPUTE, /* computation of the simulator's training thread; lane: its phase */
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

/*
 * Copy the newest trace events, the oldest first, and return their number. Call only after
 * lh_engine_flush().
 */
uint32_t lh_engine_trace(struct lh_engine *engine, struct lh_engine_trace_event *events,
                         uint32_t event_max);

#endif
