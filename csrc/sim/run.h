/*
 * A simulated run: world, links, workers, accelerator, store, engine and training thread, and the
 * loop that drives them.
 *
 *      The engine and the training thread are polled until neither moves;
 *      the checkers run; then the next event happens.
 *
 * lh_sim_run_drive() trains, until DONE (finished and flushed), FAILED (the engine has an error, as
 * a user would see it), STOPPED (event_count_max events have happened, or hooks end the process),
 * STUCK (no event is pending, and hooks know why) or BROKEN (a checker found a failure:
 * world.failure).
 *
 * Hooks (sim/hooks.h) may let a run have several processes, one after the other: they create the
 * parts with lh_sim_run_parts_create(), on a store that they opened, before the first drive and
 * after each lh_sim_run_stop().
 *
 * Thread: one.
 */
#ifndef LH_SIM_RUN_H
#define LH_SIM_RUN_H

#include "sim/check.h"
#include "sim/dev.h"
#include "sim/exec.h"
#include "sim/io.h"
#include "sim/store.h"
#include "sim/train.h"

enum lh_sim_end {
    LH_SIM_END_DONE = 0,
    LH_SIM_END_FAILED,
    LH_SIM_END_STOPPED,
    LH_SIM_END_STUCK,
    LH_SIM_END_BROKEN,
};

/* The accelerator; without one, computation is in main memory. */
struct lh_sim_accelerator {
    struct lh_sim_link_opts link; /* READ: copies to the accelerator, WRITE: copies from it */
    uint64_t bytes;               /* the size of the device memory for parameters */
    uint32_t copy_count;          /* the most copies in flight; 0: no accelerator */
    bool is_ordered;
    /* Gradients are in main memory. If is_ordered, hooks pass them when the stream made them. */
    bool gradients_in_memory;
};

/* The machine. */
struct lh_sim_machine {
    uint32_t ssd_count;
    struct lh_sim_link_opts ssd;
    uint64_t cap_bytes_per_s; /* the limit for all SSDs together; 0: none */
    uint64_t sync_ns;
    uint32_t worker_count;
    uint64_t worker_bytes_per_s; /* memory traffic of one worker */
    struct lh_sim_accelerator accelerator;
};

/* Room for saved tensors, in addition to host_bytes and the accelerator's bytes. */
struct lh_sim_saved_opts {
    uint64_t memory_bytes;  /* main memory */
    uint64_t transit_bytes; /* the part of it for tensors in transit to SSD (sched/saved.h) */
    uint64_t ssd_bytes;     /* 0: no tensors go to SSD */
    /* Device memory, unless a block specifies it: for tensors on their way out, for which forward
     * waits, and for tensors that are fetched ahead of their block. */
    uint64_t out_bytes;
    uint64_t ahead_bytes;
};

struct lh_sim_run_opts {
    struct lh_sim_machine machine;
    const struct lh_sim_model *model; /* borrowed until deinit, like the hooks */
    uint64_t host_bytes;
    struct lh_sim_saved_opts saved;
    uint32_t io_depth;
    uint64_t transfer_bytes;
    uint64_t commit_every;
    bool never_commits; /* the store belongs to another process */
    enum lh_engine_schedule schedule;
    struct lh_sim_micro micro;
    uint64_t step_last;
    uint64_t event_count_max;         /* the most events of one drive; 0: no limit */
    uint32_t trace_count;             /* how many of the engine's events are kept */
    const struct lh_sim_hooks *hooks; /* NULL: none */
    void *hooks_context;
};

struct lh_sim_run {
    struct lh_sim_run_opts opts;
    struct lh_alloc *alloc;
    struct lh_alloc engine_alloc; /* sealed while the engine runs */
    struct lh_sim_world world;
    struct lh_waker waker; /* not used for sleeping */
    struct lh_budget budget;
    uint8_t *memory;
    uint64_t memory_bytes;
    uint8_t *device_memory;
    uint8_t *saved_memory;
    struct lh_store *saved_store; /* NULL: none */
    struct lh_store *store;
    struct lh_io *io;
    struct lh_exec *exec;
    struct lh_dev *dev; /* NULL: none */
    struct lh_engine *engine;
    struct lh_sim_train train;
    struct lh_sim_check check;
    uint64_t plan_around_count; /* how often the engine was stuck until it replanned */
};

/*
 * Initialize a run, with a store without files and all parts that run on this store.
 *
 * Owns:   *run owns everything; release with lh_sim_run_deinit(), after an error as well. opts'
 *         pointers and alloc are borrowed until then.
 * Errors: those of the parts (-ENOSPC: host_bytes is too small).
 */
int lh_sim_run_init(struct lh_sim_run *run, const struct lh_sim_run_opts *opts,
                    struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_run_deinit(struct lh_sim_run *run);
/* Run until one of the ends above. err: the engine's or checker's error, for FAILED and BROKEN. */
enum lh_sim_end lh_sim_run_drive(struct lh_sim_run *run, struct lh_error *err);

/*
 * For a caller that drives several runs in one virtual time, in place of lh_sim_run_drive(): run
 * the checkers. Nothing moves in any of the runs.
 */
void lh_sim_run_quiet_check(struct lh_sim_run *run);

/* For hooks: like lh_sim_run_init(), but without a store and the parts that run on it. */
int lh_sim_run_prepare(struct lh_sim_run *run, const struct lh_sim_run_opts *opts,
                       struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;
/* Create all parts that run on run->store, which is open. */
int lh_sim_run_parts_create(struct lh_sim_run *run, struct lh_error *err) LH_MUST_CHECK;
/* Check that the accelerator has room for any block of a model. Errors: -ENOSPC. */
int lh_sim_run_device_check(const struct lh_sim_machine *machine, const struct lh_sim_model *model,
                            struct lh_error *err) LH_MUST_CHECK;
/* The number of slots for the run's requests (sim/hooks.h). */
uint32_t lh_sim_run_request_count_max(const struct lh_sim_run *run);
/* End the process, whether training is over or not: destroy the parts that run on the store, and
 * close the store. */
void lh_sim_run_stop(struct lh_sim_run *run);

#endif
