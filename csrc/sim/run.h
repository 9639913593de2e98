/*
 * A simulated run: world, disk, links, workers, accelerator, store, engine and training thread put
 * together, and the loop that drives them.
 *
 *      engine and training thread are polled until neither moves;
 *      the checkers look; then the next event happens.
 *
 * A run ends DONE (training is over and flushed), FAILED (the engine has an error: what a user
 * would see), CRASHED (at the event that was asked for) or BROKEN (a checker found something:
 * world.failure). After any of them lh_sim_run_stop() takes everything down but the disk, and
 * lh_sim_run_reopen() opens the store again as a new process would, from what is durable.
 *
 * Thread: one.
 */
#ifndef LH_SIM_RUN_H
#define LH_SIM_RUN_H

#include "sim/check.h"
#include "sim/dev.h"
#include "sim/disk.h"
#include "sim/exec.h"
#include "sim/io.h"
#include "sim/store.h"
#include "sim/train.h"

enum lh_sim_end {
    LH_SIM_END_DONE = 0,
    LH_SIM_END_FAILED,
    LH_SIM_END_CRASHED,
    LH_SIM_END_BROKEN,
};

/* What computes, where that is not in main memory. */
struct lh_sim_accelerator {
    struct lh_sim_link_opts link; /* READ: to it, WRITE: from it */
    uint64_t bytes;               /* of its memory, for parameters */
    uint32_t copy_count;          /* in flight at once; 0: there is no accelerator */
    bool is_ordered;
    bool gradients_in_memory; /* as if they were summed there; not with is_ordered */
};

/* The machine: what moves and what computes. */
struct lh_sim_machine {
    uint32_t ssd_count;
    struct lh_sim_link_opts ssd;
    uint64_t cap_bytes_per_s; /* of all SSDs together; 0: none */
    uint64_t sync_ns;
    uint32_t worker_count;
    uint64_t worker_bytes_per_s; /* of memory, each */
    struct lh_sim_accelerator accelerator;
};

/* For saved tensors, besides host_bytes and the accelerator's bytes. */
struct lh_sim_saved_opts {
    uint64_t memory_bytes;  /* main memory */
    uint64_t transit_bytes; /* of these, for those that pass through (sched/saved.h) */
    uint64_t ssd_bytes;     /* 0: none leaves main memory */
    /* Device memory, where a block does not say: for those on their way out, which forward waits
     * for, and for those fetched ahead of their block. */
    uint64_t out_bytes;
    uint64_t ahead_bytes;
};

struct lh_sim_run_opts {
    uint64_t seed;
    struct lh_sim_machine machine;
    const struct lh_sim_model *model;   /* borrowed until stop, as is reference */
    struct lh_sim_reference *reference; /* NULL: timing only */
    const char *const *directories;     /* machine.ssd_count; NULL: timing only */
    uint64_t host_bytes;
    struct lh_sim_saved_opts saved; /* timing only */
    uint32_t io_depth;
    uint64_t transfer_bytes;
    uint64_t commit_every;
    enum lh_engine_schedule schedule;
    struct lh_sim_faults faults;
    struct lh_sim_train_chances chances;
    uint64_t step_last;
    uint64_t crash_after; /* events; 0: never */
    uint64_t trace_bytes_max;
    uint32_t trace_count; /* of the engine's events; 0: none */
};

struct lh_sim_run {
    struct lh_sim_run_opts opts;
    struct lh_alloc *alloc;
    struct lh_alloc engine_alloc; /* sealed while the engine runs */
    struct lh_sim_world world;
    struct lh_sim_random crash_random;
    struct lh_sim_disk disk;
    struct lh_waker waker; /* nobody sleeps on it */
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
    uint64_t committed_step; /* as the engine knew it when it was stopped */
    uint64_t open_count;
    uint64_t plan_around_count; /* how often the engine was stuck until it planned again */
};

/*
 * A new store at step 0, and all that runs on it.
 *
 * Owns:   *run owns everything; release with lh_sim_run_deinit(), after an error as well. opts'
 *         pointers and alloc are borrowed until then.
 * Errors: those of the parts (-ENOSPC: host_bytes is too small).
 */
int lh_sim_run_init(struct lh_sim_run *run, const struct lh_sim_run_opts *opts,
                    struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_run_deinit(struct lh_sim_run *run);

/* Go on until an end. err: what the engine or the checker says, for FAILED and BROKEN. */
enum lh_sim_end lh_sim_run_drive(struct lh_sim_run *run, struct lh_error *err);

/* The power fails, or the process is killed: everything goes but what is durable. */
void lh_sim_run_stop(struct lh_sim_run *run);
/*
 * Open the store from what is durable and compare it with the reference, which goes back to its
 * step; then a new engine, without faults if calm. Only with bytes, after a stop.
 *
 * Errors: those of lh_store_open() and lh_sim_reference_compare() (-EPROTO: wrong bytes that nobody
 *         would notice), -ESTALE: a committed step is lost, and an older one is there, whole. The
 *         run is stopped then.
 */
int lh_sim_run_reopen(struct lh_sim_run *run, bool calm, struct lh_error *err) LH_MUST_CHECK;

#endif
