/*
 * The engine's state machines. Private to csrc/sched; the public contract is engine.h.
 *
 * A unit's place in main memory (unit.c; READY is mirrored in `word`, which training threads read):
 *
 *           op LOAD              all bytes here and checked
 *   ABSENT ---------> LOADING ------------------------------> READY
 *      ^                                                     |  ^ |
 *      |   op EVICT: pins 0, uses of the plan over,          |  | | update_begin: pins 0, gate open
 *      +------------ nothing of it being written ------------+  | v
 *                                                              UPDATING
 *                                     all chunks computed ------+
 *
 * A chunk's states R, M, V in a slab (update.c):
 *
 *         fetch: a slab is free        reads done          its unit is UPDATING
 *   IDLE --------------------> READING ----------> LOADED --------------------> COMPUTING
 *     ^                                              ^                              |
 *     |            written, slab given back          |  written, slab kept          | job done
 *     +----------------------------------------------+---------------------- WRITING <
 *
 * A step (step.c):
 *
 *   OPEN --[CLOSE message]--> CLOSED --[updates computed and written]--> COMMITTING
 *    | ^                         |                                           |
 *    | +---[no commit is due]----+      [superblock durable]                 |
 *    | +---------------------------------------------------------------------+
 *    +--[ABORT message]--> ABORTING --[nothing in flight]--> OPEN, the same step again
 *
 * What holds:
 *  1. word has LH_UNIT_READY_BIT exactly while the bytes that computation reads are there: while
 *     state is READY; with an accelerator (device.c) while the copy is and is not old. Pins are 0
 *     else.
 *  2. The bytes of a READY unit equal the read slot of its extents, or are newer and being written
 *     (chunks in WRITING), or newer and dirty ([Note: Between commits] in update_write.c).
 *  3. No chunk computes for step t+1 before step t is over (written, committed if due):
 *     `gate_is_open`.
 *  4. Ops of a plan are executed in order, an accelerator's behind those that they do not commute
 *     with; a region never holds two units at one address.
 *  5. Transfers in flight never exceed io_depth; requests are a fixed array.
 *
 * Thread: everything is the engine thread's but what says atomic, and `shared`, which mutex
 *         protects.
 */
#ifndef LH_SCHED_ENGINE_PRIVATE_H
#define LH_SCHED_ENGINE_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/assert.h"
#include "base/ring.h"
#include "sched/asks.h"
#include "sched/engine.h"
#include "sched/in_place_private.h"
#include "sched/region.h"
#include "sched/saved_private.h"
#include "sched/split.h"
#include "sched/states.h"
#include "sched/transfer.h"

#define LH_UNIT_READY_BIT UINT32_C(0x80000000)
#define LH_CHUNK_NONE UINT32_MAX
#define LH_BLOCK_NONE UINT32_MAX
#define LH_PARAM_NONE UINT32_MAX
#define LH_UNIT_NONE UINT32_MAX
#define LH_SLAB_TRANSFER_COUNT 4
/* R, M, V, in a slab's order. */
#define LH_STATE_ARRAY_COUNT 3
#define LH_INBOX_CELL_COUNT 65536
#define LH_WAIT_NS_MIN 20000 /* less is what a call takes */

enum lh_message_kind {
    LH_MESSAGE_BEGIN = 1, /* mode */
    LH_MESSAGE_USE,       /* unit: pinned by the training thread */
    LH_MESSAGE_ACQUIRE,   /* unit: wants a grant */
    LH_MESSAGE_RELEASE,   /* unit: pins went to 0 */
    LH_MESSAGE_HANDLES,   /* unit: handles went to 0 */
    LH_MESSAGE_GRADIENT,  /* param, pointer, dtype */
    LH_MESSAGE_CLOSE,
    LH_MESSAGE_ABORT,
    LH_MESSAGE_FLUSH, /* commit */
    LH_MESSAGE_NORM,
    LH_MESSAGE_DRAIN,       /* somebody waits for the end of the closed step */
    LH_MESSAGE_WAITED,      /* unit, start, end, what for: for the trace and the statistics */
    LH_MESSAGE_SAVED_PUT,   /* item, as the next two */
    LH_MESSAGE_SAVED_FETCH, /* and whether somebody waits */
    LH_MESSAGE_SAVED_DROP,
};

struct lh_unit {
    struct lh_engine_unit desc;
    _Atomic uint32_t word; /* LH_UNIT_READY_BIT | pins */
    _Atomic uint32_t handles;
    _Atomic uint32_t grants; /* pins given to waiters that have not noticed yet */
    /*
     * The training thread's: the last step in which it gave a gradient, and the last such step
     * after whose close it asked the engine for the unit. While they differ an update may be ahead,
     * and READY is not enough.
     */
    uint64_t gradient_step;
    uint64_t asked_step;
    enum lh_unit_state state;
    uint64_t offset;    /* in the region, while not ABSENT */
    uint64_t use_count; /* of main memory's bytes: begins, absolute */
    bool use_is_open;
    uint64_t use_started_ns;
    uint32_t waiter_count;
    struct lh_transfer load; /* or, while it is_flushing, a write */
    _Atomic uint32_t load_count;
    bool is_param_dirty; /* P in the region is newer than in any slot: a commit writes it */
    bool is_flushing;    /* that is under way: no update begins */
    const struct lh_in_place_unit *in_place; /* NULL: it is in the store */
    bool in_place_moves;
    uint64_t seam_first;
    /* With an accelerator: */
    enum lh_copy_state copy_state;
    bool copy_is_old;            /* its update is queued, or over */
    bool is_copying;             /* main memory's bytes are being read */
    uint32_t copies;             /* in flight */
    _Atomic bool copy_is_moved;  /* it was changed there: main memory's bytes are older */
    bool is_of_out;              /* main memory's bytes are those of the last copy back */
    _Atomic bool copy_is_of_out; /* and were when the copy was made */
    _Atomic uint32_t copy_count;
    _Atomic uint32_t out_count;
    uint64_t copy_offset;
    uint64_t copy_use_count;
    struct lh_dev_fence *arrived;
    struct lh_dev_fence *released;
    uint32_t landing_count; /* gradients of this step on their way to main memory */
    uint32_t posted_count;  /* of these, not all of whose copies began */
    uint64_t landing_bytes; /* counted as held until they are all here */
    uint64_t landed_bytes;  /* of this step: landed, or on their way */
    uint64_t landing_planned_bytes;
    uint32_t chunk_first;
    uint32_t chunk_count;
    /* Of the open or closed step: */
    uint32_t gradient_count;
    uint64_t gradient_bytes;
    bool update_is_queued;
    bool update_is_done; /* all chunks written */
    bool is_predicted;   /* the step before updated it */
    bool is_deferred;    /* its update waits for the close (defer.c) */
    bool is_released;    /* and for this */
    uint32_t deferred_at;
    bool spills; /* where it is deferred: its gradients wait on SSD */
    enum lh_spill_state spill_state;
    uint32_t spill_next; /* chunk */
    uint32_t spill_written;
    enum lh_norm_state norm_state;
    struct lh_exec_job norm_job;
    struct lh_engine *engine;
    uint64_t planned_step;       /* the last step whose plan counts its update */
    uint64_t spill_planned_step; /* and its gradients' way to SSD and back */
    uint32_t chunks_computed;
    uint32_t chunks_written;
    uint32_t chunks_loaded;  /* LOADED, and not computed in this step */
    uint32_t chunks_to_pass; /* of these, those that do not keep their slab */
    uint32_t chunk_next;     /* before it all are computed */
};

struct lh_chunk {
    uint32_t unit;
    uint32_t slab;  /* LH_CHUNK_NONE while IDLE */
    uint64_t first; /* element in the unit */
    uint64_t count;
    enum lh_chunk_state state;
    bool is_kept; /* its slab stays its own: */
    uint32_t kept_slab;
    bool is_dirty;       /* and has newer R, M, V than any slot: a commit writes them */
    bool is_flushing;    /* they are being written, and nothing else is */
    uint64_t read_step;  /* the step that read it last; 0: never */
    uint64_t read_bytes; /* in that step */
    /*
     * The steps whose plans count it, and the bytes they read for it; by parity, as a step is
     * planned while the one before is not over.
     */
    uint64_t planned_steps[2];
    uint64_t planned_bytes[2];
    uint64_t computed_step; /* the step that computed it last */
    uint64_t gradient_step; /* the step whose gradients were read back for it */
    uint32_t block;         /* of gradients from an accelerator; LH_BLOCK_NONE */
    uint32_t landing_count; /* gradients posted that are not all in it */
};

struct lh_slab {
    uint8_t *memory;  /* R | M | V */
    uint32_t chunk;   /* LH_CHUNK_NONE: free */
    uint32_t pending; /* transfers not finished */
    struct lh_transfer transfers[LH_SLAB_TRANSFER_COUNT];
    struct lh_exec_job job;
    struct lh_adam_chunk adam;
    struct lh_adam_segment *segments;
    /*
     * What R, M, V were read with: copied, because the slot that is written may be the slot that
     * was read.
     */
    uint32_t *expected[LH_STATE_ARRAY_COUNT];
    bool is_zero[LH_STATE_ARRAY_COUNT]; /* never written: filled by the job instead of read */
    bool is_spill;             /* chunk's gradients pass through it; the chunk itself is not here */
    bool has_gradients;        /* they were read, behind R, M and V */
    uint32_t *spill_checksums; /* where gather_run() puts them */
    struct lh_adam_mismatch mismatch;
    int result;
    struct lh_engine *engine;
};

struct lh_gradient {
    const void *pointer; /* NULL: none in this step */
    enum lh_dtype dtype;
    struct lh_dev_fence *is_computed; /* with an accelerator, as what follows */
    uint64_t issued;                  /* elements whose copies began */
    uint32_t copies;                  /* not back yet */
    _Atomic bool is_held; /* posted and not consumed: the caller keeps the tensor alive */
};

struct lh_copy {
    struct lh_dev_copy dev;
    uint32_t unit;
    uint32_t param;         /* whose gradient it is; LH_PARAM_NONE: a unit's bytes */
    uint32_t chunk;         /* for which */
    struct lh_saved *saved; /* of a saved tensor; NULL: of the unit */
    struct lh_copy *next_free;
};

/* What other threads wait for or read; protected by mutex. */
struct lh_engine_shared {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct lh_error error;
    struct lh_engine_step_stats finished;
    bool has_finished;
    bool is_paused;
};

struct lh_engine {
    struct lh_alloc *alloc;
    struct lh_store *store;
    struct lh_io *io;
    struct lh_exec *exec;
    struct lh_dev *dev; /* NULL: computation is in main memory */
    struct lh_waker *waker;
    struct lh_clock clock;
    struct lh_engine_opts opts; /* its borrowed pointers are cleared */
    struct lh_budget budget;
    uint8_t *region;

    struct lh_unit *units;
    struct lh_engine_param *params;
    uint32_t param_count;
    uint64_t *param_steps; /* updates of each parameter so far */
    /* The training thread's; where a parameter had a gradient last, too. */
    uint64_t first_step; /* where the store stood at creation */
    uint64_t open_step;  /* as it counts */
    struct lh_asks asks;
    uint64_t *gradient_steps;
    struct lh_gradient *gradients;
    struct lh_chunk *chunks;
    uint32_t chunk_count;
    struct lh_slab *slabs;

    /* Requests and transfers (transfer.c). */
    struct lh_engine_request *requests;
    struct lh_engine_request *free_requests;
    struct lh_transfer *queue_heads[LH_PRIORITY_COUNT];
    struct lh_transfer *queue_tails[LH_PRIORITY_COUNT];
    uint32_t step_transfers[2]; /* submitted and not finished, by parity of their step */
    uint32_t io_in_flight;
    uint32_t checks_in_flight;
    uint32_t jobs_in_flight;
    uint64_t io_busy_since_ns;

    /* Plans (region.c). */
    struct lh_region host;
    struct lh_region device;
    struct lh_region *uses;                              /* the one where computation is */
    struct lh_event_list recorded[LH_ENGINE_MODE_COUNT]; /* of the last whole cycle */
    struct lh_event_list recording;
    uint64_t event_max;
    enum lh_engine_mode mode;
    uint64_t plan_step; /* whose bytes the ops are; 0: an evaluation's */

    uint8_t *seams; /* of units that are read in place ([Note: Seams] in in_place.c) */

    /* Copies (device.c) and gradients on their way back (landing.c). */
    struct lh_copy *copies;
    struct lh_copy *free_copies;
    uint32_t copies_in_flight;
    uint32_t loads_in_flight;
    uint32_t leaving_count; /* units */
    _Atomic uint32_t device_policy;
    _Atomic uint64_t device_alloc_bytes_per_s;
    uint32_t copying_unit;  /* not all of whose copy has begun; LH_UNIT_NONE */
    uint64_t copying_bytes; /* of it that have */
    uint8_t *blocks_memory;
    uint64_t block_bytes;
    uint32_t *free_blocks;
    uint32_t free_block_count;
    uint32_t block_reserve; /* see landing.c, as the next one */
    uint32_t landing_unit;
    uint32_t *landings; /* params, as they were posted; a ring of param_count */
    uint64_t landing_first;
    uint64_t landing_end;
    _Atomic(void *) stream; /* of the last hook */

    /* Updates (update.c). */
    uint32_t *update_queue; /* units of this step, in the order in which they became updatable */
    uint32_t update_first;  /* before it all are computed */
    uint32_t update_count;
    uint32_t updates_done;        /* written */
    uint32_t gradient_unit_count; /* units that have a gradient in this step */
    uint32_t *predicted_updates;  /* units, of the step before */
    uint32_t predicted_update_count;
    uint32_t ahead_first; /* of predicted_updates: before it nothing is to be read ahead */
    uint32_t chunks_busy; /* COMPUTING, COMPUTED or WRITING, and units whose P is_flushing */
    uint32_t *deferred;   /* units whose updates wait behind the close, in the order they are due */
    uint32_t deferred_first; /* before it all are in update_queue */
    uint32_t deferred_count;
    uint32_t *spill_queue; /* units whose gradients go to SSD in this step */
    uint32_t spill_first;
    uint32_t spill_count;
    bool any_spills; /* in this step */
    struct lh_split split;
    struct lh_saved_area saved;

    /* Step (step.c). */
    enum lh_step_state step_state;
    uint64_t step; /* closed steps */
    uint64_t committed_step;
    bool commit_is_late; /* one was due while commits were held */
    bool has_edits; /* bytes written while paused are in no commit: rolling back would lose them */
    bool flush_is_asked;
    bool flush_commits;
    bool commit_is_of_flush;
    uint32_t commit_in_flight;
    uint64_t commit_started_ns;
    struct lh_io_request *commit_requests;
    uint8_t *scalars; /* header, per-parameter steps, the caller's bytes */
    uint64_t scalar_bytes;
    uint64_t scalar_bytes_max;
    struct lh_adam_hyper *
        hypers[2]; /* by parity of the step: the open one is written while the closed one is used */
    double gradient_scales[2]; /* likewise */
    double square_sum;         /* of the step whose norm was asked last */
    double *square_sums;       /* of each parameter's gradient, once its unit's are DONE; scratch */
    bool norm_is_asked;
    bool takes_norms; /* of every unit, as its gradients come */
    struct lh_engine_step_stats
        stats[2]; /* of step n at n % 2: at most one closed step is not over */
    struct lh_engine_step_stats stats_other; /* evaluations */

    struct lh_engine_trace_event *trace;
    uint64_t trace_written;

    struct lh_ring inbox;
    _Atomic uint32_t waiting;               /* threads in a wait: somebody to wake */
    _Atomic uint64_t update_gradient_bytes; /* of updates under way */
    _Atomic uint64_t closes_done;           /* steps over */
    _Atomic uint64_t closes_asked;
    _Atomic uint64_t aborts_done;
    _Atomic uint64_t aborts_asked;
    _Atomic uint64_t norms_done;
    _Atomic uint64_t norms_asked;
    _Atomic uint64_t flushes_done;
    _Atomic uint64_t flushes_asked;
    _Atomic int abort_result;
    _Atomic uint32_t hold; /* enum lh_hold */
    _Atomic bool failed;
    _Atomic bool stopping;
    _Atomic bool pausing;
    bool has_thread;
    pthread_t thread;
    struct lh_engine_shared shared;
};

/* calls.c: of threads that are not the engine's */
typedef bool (*lh_wait_fn)(struct lh_engine *engine, uint64_t argument);
void lh_engine_post(struct lh_engine *engine, enum lh_message_kind kind, uint64_t a, uint64_t b,
                    uint64_t c);
int lh_engine_wait_until(struct lh_engine *engine, lh_wait_fn is_done, uint64_t argument,
                         int timeout_ms);
/* The same for room that something under way gives back; the wait is counted. */
int lh_engine_room_wait(struct lh_engine *engine, lh_wait_fn is_done, uint64_t argument,
                        int timeout_ms);
int lh_engine_fail_code(struct lh_engine *engine);
void lh_engine_fence_record(struct lh_engine *engine, struct lh_dev_fence *fence);

/* engine.c */
void *lh_engine_thread_run(void *context);
void lh_engine_fail(struct lh_engine *engine, const struct lh_error *err);
void lh_engine_notify(struct lh_engine *engine);
bool lh_engine_is_quiet(const struct lh_engine *engine);
uint64_t lh_engine_now(const struct lh_engine *engine);
void lh_engine_trace_add(struct lh_engine *engine, struct lh_engine_trace_event event);

/* transfer.c */
void lh_job_submit(struct lh_engine *engine, struct lh_exec_job *job);
bool lh_job_poll(struct lh_engine *engine);
void lh_check_done(struct lh_engine *engine, struct lh_engine_request *request);
void lh_io_busy_begin(struct lh_engine *engine);
void lh_io_busy_end(struct lh_engine *engine);

/* device.c */
int lh_device_create(struct lh_engine *engine, struct lh_error *err);
void lh_device_destroy(struct lh_engine *engine);
bool lh_device_has(const struct lh_unit *unit);
/* The plan counts its place as taken: it is there, or on its way. */
bool lh_device_is_placed(const struct lh_unit *unit);
bool lh_device_make_old(struct lh_engine *engine, struct lh_unit *unit);
bool lh_device_poll(struct lh_engine *engine);
bool lh_device_pump(struct lh_engine *engine);
void lh_device_forget(struct lh_engine *engine, struct lh_unit *unit);
void lh_device_fail(struct lh_engine *engine, const struct lh_error *cause, const char *what);
struct lh_copy *lh_copy_take(struct lh_engine *engine);
void lh_copy_give(struct lh_engine *engine, struct lh_copy *copy);

/* landing.c */
int lh_landing_create(struct lh_engine *engine, struct lh_error *err);
void lh_landing_destroy(struct lh_engine *engine);
void lh_landing_posted(struct lh_engine *engine, uint32_t param);
void lh_landing_copied(struct lh_engine *engine, struct lh_copy *copy);
bool lh_landing_pump(struct lh_engine *engine);
/* Gradients are in the accelerator's memory. */
bool lh_landing_is_used(const struct lh_engine *engine);
bool lh_landing_is_over(const struct lh_unit *unit);
/* It will be, whatever else waits: what is posted has its blocks. */
bool lh_landing_is_certain(const struct lh_engine *engine, const struct lh_unit *unit);
/* Of a unit whose gradients wait: in whole blocks where they lie in such. */
uint64_t lh_landing_waiting_bytes(const struct lh_engine *engine, const struct lh_unit *unit);
/* The gradient of one element of param's unit, and of those behind it in param and chunk. */
const uint8_t *lh_landing_bytes(const struct lh_engine *engine, uint32_t param, uint64_t element);
void lh_landing_release(struct lh_engine *engine, struct lh_chunk *chunk);
void lh_landing_forget(struct lh_engine *engine);

/* unit.c */
bool lh_unit_is_old(const struct lh_engine *engine, const struct lh_unit *unit);
void lh_unit_use(struct lh_engine *engine, uint32_t unit);
void lh_unit_acquire(struct lh_engine *engine, uint32_t unit);
void lh_unit_grant(struct lh_engine *engine, struct lh_unit *unit);
bool lh_unit_claim(struct lh_unit *unit);
bool lh_unit_claim_host(struct lh_engine *engine, struct lh_unit *unit);
void lh_unit_release(struct lh_engine *engine, uint32_t unit);
void lh_unit_load_done(struct lh_engine *engine, struct lh_unit *unit);
void lh_unit_make_ready(struct lh_engine *engine, struct lh_unit *unit);
void lh_unit_forget(struct lh_engine *engine, uint32_t unit);
bool lh_unit_pump(struct lh_engine *engine);

/* update.c */
void lh_update_gradient(struct lh_engine *engine, uint32_t param, const void *pointer,
                        enum lh_dtype dtype);
void lh_update_consider(struct lh_engine *engine, uint32_t unit);
void lh_update_consider_all(struct lh_engine *engine);
void lh_chunk_read(struct lh_engine *engine, struct lh_chunk *chunk, uint32_t slab);
void lh_chunk_compute(struct lh_engine *engine, struct lh_chunk *chunk);
void lh_update_transfer_done(struct lh_engine *engine, struct lh_transfer *transfer);
void lh_update_job_done(struct lh_engine *engine, struct lh_slab *slab);

/* update_pump.c */
/* Every change of a chunk's state goes through it. */
void lh_chunk_state_set(struct lh_engine *engine, struct lh_chunk *chunk,
                        enum lh_chunk_state state);
/* The next step begins, or the open one's chunks are no longer computed. */
void lh_chunks_recount(struct lh_engine *engine);
/* A slab for gradients: a free one, or one whose chunk was read ahead; LH_CHUNK_NONE: not now. */
uint32_t lh_slab_take(struct lh_engine *engine);
void lh_slab_clear(struct lh_engine *engine, struct lh_slab *slab);
bool lh_update_pump(struct lh_engine *engine);

/* defer.c */
void lh_defer_close(struct lh_engine *engine);
/* A use of unit is about to begin: queue its update, and those that are near. */
void lh_defer_use(struct lh_engine *engine, uint32_t unit);
/* Queue all that are left. */
void lh_defer_drain(struct lh_engine *engine);
void lh_defer_step_over(struct lh_engine *engine);

/* spill.c */
void lh_spill_choose(struct lh_engine *engine);
void lh_spill_consider(struct lh_engine *engine, uint32_t unit);
bool lh_spill_pump(struct lh_engine *engine);
void lh_spill_gathered(struct lh_engine *engine, struct lh_slab *slab);
void lh_spill_written(struct lh_engine *engine, struct lh_slab *slab);
void lh_spill_read(struct lh_engine *engine, struct lh_chunk *chunk);
uint8_t *lh_spill_gradients(const struct lh_slab *slab, const struct lh_unit *unit,
                            const struct lh_chunk *chunk);
void lh_spill_step_over(struct lh_engine *engine);
/* All of a unit's gradients are on SSD, and nobody else reads them: they are free. */
void lh_spill_release(struct lh_engine *engine, struct lh_unit *unit);

/* norm.c */
void lh_norm_run(struct lh_exec_job *job);
void lh_norm_consider(struct lh_engine *engine, struct lh_unit *unit);
void lh_norm_done(struct lh_engine *engine, struct lh_unit *unit);
void lh_norm_ask(struct lh_engine *engine);
bool lh_norm_pump(struct lh_engine *engine);
void lh_norm_forget(struct lh_engine *engine);

/* update_plan.c */
/* The extents of R, M and V, in a slab's order, and the bytes of one element (0: no such array). */
uint32_t lh_state_extent(const struct lh_unit *unit, uint32_t array);
uint64_t lh_state_element_bytes(const struct lh_unit *unit, uint32_t array);
uint8_t *lh_slab_array(const struct lh_slab *slab, const struct lh_unit *unit, uint32_t array,
                       uint64_t count);
uint32_t *lh_chunk_checksums(struct lh_engine *engine, const struct lh_unit *unit, uint32_t extent,
                             uint64_t offset);
void lh_update_plan(struct lh_engine *engine);
void lh_update_plan_correct(struct lh_engine *engine);
void lh_update_plan_reread(struct lh_engine *engine, struct lh_chunk *chunk);

/* What an update of chunk in step writes, of R, M and V, and of P. */
uint64_t lh_chunk_state_write_bytes(const struct lh_engine *engine, const struct lh_chunk *chunk,
                                    uint64_t step);
uint64_t lh_chunk_param_write_bytes(const struct lh_engine *engine, const struct lh_chunk *chunk,
                                    uint64_t step);

/* update_write.c */
/* All that step's update of chunk has to write. */
void lh_chunk_write(struct lh_engine *engine, struct lh_chunk *chunk);
void lh_chunk_written(struct lh_engine *engine, struct lh_chunk *chunk);
/*
 * Write what only memory has, as step's (0: nobody's): true, if there is something that was not
 * under way yet. Nothing else of a chunk is.
 */
bool lh_update_write_dirty(struct lh_engine *engine, uint64_t step);
/* All of a unit's P, that was dirty. */
void lh_update_param_written(struct lh_engine *engine, struct lh_unit *unit);

/* update_end.c */
void lh_update_step_over(struct lh_engine *engine);
void lh_update_rollback(struct lh_engine *engine);
void lh_update_forget_unit(struct lh_engine *engine, uint32_t unit);

/* step.c */
void lh_step_close(struct lh_engine *engine);
void lh_step_abort(struct lh_engine *engine);
void lh_step_begin(struct lh_engine *engine, enum lh_engine_mode mode);
bool lh_step_pump(struct lh_engine *engine);
void lh_step_commit_request_done(struct lh_engine *engine, struct lh_io_request *request);
bool lh_step_gate_is_open(const struct lh_engine *engine);
/* A closed step waits with its commit for the end of a hold, and all else with it. */
bool lh_step_is_held(const struct lh_engine *engine);
/* Step 0: what belongs to no step. */
struct lh_engine_step_stats *lh_step_stats(struct lh_engine *engine, uint64_t step);
/* The oldest step that is not over. */
uint64_t lh_step_current(const struct lh_engine *engine);

static inline struct lh_unit *lh_engine_unit_at(struct lh_engine *engine, uint32_t unit)
{
    LH_ASSERT(unit < engine->opts.unit_count);
    return &engine->units[unit];
}

static inline uint32_t lh_unit_pins(const struct lh_unit *unit)
{
    return atomic_load(&unit->word) & ~LH_UNIT_READY_BIT;
}

#endif
