/*
 * A simulated run: world, disk, links, workers, accelerator, store, engine and training thread, and
 * the loop that drives them.
 *
 *      The engine and the training thread are polled until neither moves;
 *      the checkers run; then the next event happens.
 *
 * With bytes, a run is a sequence of lives:
 *
 *      lh_sim_run_open()   starts a new process: creates the store, or opens it and compares it
 *                          with the reference; then creates an engine
 *      lh_sim_run_drive()  trains, until DONE (finished and flushed), FAILED (the engine or an edit
 *                          has an error, as a user would see it), CRASHED (at the requested point),
 *                          STUCK (a request hangs, and no other event is pending) or BROKEN (a
 *                          checker found a failure: world.failure)
 *      lh_sim_run_stop()   ends the process, and possibly cuts the machine's power
 *
 * Timing only, a run has one life, which lh_sim_run_init() begins.
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
#include "sim/target.h"
#include "sim/train.h"

enum lh_sim_end {
    LH_SIM_END_DONE = 0,
    LH_SIM_END_FAILED,
    LH_SIM_END_CRASHED,
    LH_SIM_END_STUCK,
    LH_SIM_END_BROKEN,
};

/* How a life began. */
enum lh_sim_open {
    LH_SIM_OPEN_DONE = 0,
    LH_SIM_OPEN_CRASHED, /* the process ended in the middle of it */
    LH_SIM_OPEN_REFUSED, /* an error that a fault explains */
    LH_SIM_OPEN_BROKEN,  /* a guarantee is broken: err says which */
};

/* The outcomes of opens and drives, which are counted. */
enum lh_sim_outcome {
    LH_SIM_OUTCOME_CREATED = 0,
    LH_SIM_OUTCOME_CREATION_FAILED,  /* by a fault; nothing is left behind */
    LH_SIM_OUTCOME_OPENED,           /* at the last committed step */
    LH_SIM_OUTCOME_OPENED_NEXT,      /* at the one that was being committed */
    LH_SIM_OUTCOME_OPENED_OLDER,     /* a committed step is lost, and the note says so */
    LH_SIM_OUTCOME_OPENED_OLD_STATE, /* at a consistent older state, which cannot be detected */
    LH_SIM_OUTCOME_OPENED_AT,        /* an older step, after a refusal that names it */
    LH_SIM_OUTCOME_NOTED,            /* opened with a note that a fault explains */
    LH_SIM_OUTCOME_REFUSED,          /* with an error that a fault explains */
    LH_SIM_OUTCOME_UNCLEAN,          /* a store with one slot whose process ended in training */
    LH_SIM_OUTCOME_OPEN_CRASHED,
    LH_SIM_OUTCOME_DONE,
    LH_SIM_OUTCOME_FAILED,
    LH_SIM_OUTCOME_CRASHED,
    LH_SIM_OUTCOME_STUCK,
    LH_SIM_OUTCOME_COUNT,
};

/* Where the process ends. */
enum lh_sim_crash_where {
    LH_SIM_CRASH_NEVER = 0, /* when training is over, and the store is closed */
    LH_SIM_CRASH_EVENTS,    /* after a number of events */
    LH_SIM_CRASH_COMMIT,    /* a number of events after the start of a commit, or at its end */
    LH_SIM_CRASH_OPEN,      /* in a file call of create or open */
    LH_SIM_CRASH_CLOSE,     /* in a file call of close */
    LH_SIM_CRASH_EDIT,      /* in a file call of an edit, or after it */
    LH_SIM_CRASH_COPY,      /* in a file call that makes a snapshot, or after it */
    LH_SIM_CRASH_SYNC,      /* in a commit, when one of its syncs has begun: `after` says which */
    LH_SIM_CRASH_WHERE_COUNT,
};

struct lh_sim_crash {
    enum lh_sim_crash_where where;
    uint64_t commit; /* COMMIT, SYNC: the number of the commit in this life, from 1 */
    uint64_t after;
    bool is_kill; /* the machine keeps its power */
    bool tears;   /* only some sectors of a block of 4 KiB may survive */
};

/* The accelerator; without one, computation is in main memory. */
struct lh_sim_accelerator {
    struct lh_sim_link_opts link; /* READ: to it, WRITE: from it */
    uint64_t bytes;               /* of its memory, for parameters */
    uint32_t copy_count;          /* in flight at once; 0: no accelerator */
    bool is_ordered;
    bool gradients_in_memory; /* as if they were summed there; not with is_ordered */
};

/* The machine. */
struct lh_sim_machine {
    uint32_t ssd_count;
    struct lh_sim_link_opts ssd;
    uint64_t cap_bytes_per_s; /* for all SSDs together; 0: none */
    uint64_t sync_ns;
    uint32_t worker_count;
    uint64_t worker_bytes_per_s; /* memory traffic of one worker */
    struct lh_sim_accelerator accelerator;
};

/* Room for saved tensors, in addition to host_bytes and the accelerator's bytes. */
struct lh_sim_saved_opts {
    uint64_t memory_bytes;  /* main memory */
    uint64_t transit_bytes; /* the part of it for those that pass through (sched/saved.h) */
    uint64_t ssd_bytes;     /* 0: none go to SSD */
    /* Device memory, unless a block specifies it: for tensors on their way out, for which forward
     * waits, and for those fetched ahead of their block. */
    uint64_t out_bytes;
    uint64_t ahead_bytes;
};

struct lh_sim_run_opts {
    uint64_t seed;
    struct lh_sim_machine machine;
    const struct lh_sim_model *model;   /* borrowed until stop, like reference */
    struct lh_sim_reference *reference; /* NULL: timing only */
    uint64_t host_bytes;
    struct lh_sim_saved_opts saved; /* timing only */
    uint32_t io_depth;
    uint64_t transfer_bytes;
    uint64_t commit_every;
    enum lh_engine_schedule schedule;
    struct lh_sim_faults faults;
    struct lh_sim_train_chances chances;
    uint64_t step_last;
    struct lh_sim_crash crash; /* of the current life */
    uint64_t trace_bytes_max;
    bool has_snapshots;   /* the store is copied while commits are held (chances.hold_ppm) */
    uint32_t trace_count; /* of the engine's events; 0: none */
};

/* How far the creation of a run's store has come. */
enum lh_sim_made {
    LH_SIM_MADE_NOTHING = 0, /* any files may be removed */
    LH_SIM_MADE_EMPTY,       /* created: it has to open, at step 0 */
    LH_SIM_MADE_FILLED,      /* it has the masters, in two commits */
};

struct lh_sim_run {
    struct lh_sim_run_opts opts;
    struct lh_alloc *alloc;
    struct lh_alloc engine_alloc; /* sealed while the engine runs */
    struct lh_sim_world world;
    struct lh_sim_random crash_random;
    struct lh_sim_random lives_random;
    struct lh_sim_disk disk;
    struct lh_sim_fs fs;
    struct lh_sim_target target;  /* of snapshots */
    struct lh_sim_disk_copy copy; /* of a drive, from an earlier life */
    enum lh_sim_made made;
    bool has_masters;      /* an EMPTY store showed the masters: their first commit is durable */
    bool is_clean;         /* nothing was overwritten since the store was last closed cleanly */
    bool is_done;          /* the current life trained to its end */
    bool is_failed;        /* it ended with an error of the engine */
    bool is_asked_older;   /* it was opened at an older step on request */
    bool is_forked;        /* a stale read at open may have hidden a step that exists */
    bool is_first_old;     /* directory 0 was restored: its store may be an older one, complete */
    bool is_crashed;       /* the process has ended */
    uint64_t commit_count; /* commits begun in this life */
    uint64_t commit_from;  /* the event count when the last of them began */
    bool was_committing;
    uint64_t outcomes[LH_SIM_OUTCOME_COUNT];
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
    uint64_t committed_step; /* as the engine knew it when it was stopped */
    uint64_t open_count;
    uint64_t plan_around_count; /* how often the engine was stuck until it replanned */
};

/*
 * Initialize a run, except for the store and what runs on it (timing only: these, too).
 *
 * Owns:   *run owns everything; release with lh_sim_run_deinit(), after an error as well. opts'
 *         pointers and alloc are borrowed until then.
 * Errors: those of the parts (-ENOSPC: host_bytes is too small).
 */
int lh_sim_run_init(struct lh_sim_run *run, const struct lh_sim_run_opts *opts,
                    struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_run_deinit(struct lh_sim_run *run);

/*
 * Begin a life, without faults if calm. Create the store if it does not exist yet; otherwise open
 * it, check that no committed step is lost unless a fault explains it (sim/fault.h), and compare it
 * with the reference, which goes back to the store's step. Then create an engine. Used only with
 * bytes, before the first drive and after each stop. err: what is broken, or was refused.
 */
enum lh_sim_open lh_sim_run_open(struct lh_sim_run *run, bool calm, struct lh_error *err)
    LH_MUST_CHECK;
/* Run until an end. err: the error of the engine or the checker, for FAILED and BROKEN. */
enum lh_sim_end lh_sim_run_drive(struct lh_sim_run *run, struct lh_error *err);
/* Whether a fault that happened explains the engine's error. */
bool lh_sim_run_explains(const struct lh_sim_run *run, int code);
/*
 * End the process, whether it finished or not; then cut the power, unless opts.crash.is_kill.
 * Everything except the drives is destroyed.
 */
void lh_sim_run_stop(struct lh_sim_run *run);
/*
 * While no process runs and everything is durable, damage a drive, or copy one for later damage.
 * The drive is chosen by seed.
 */
void lh_sim_run_damage(struct lh_sim_run *run, enum lh_sim_fault fault);
void lh_sim_run_copy(struct lh_sim_run *run);
/* Make dead drives work again. */
void lh_sim_run_revive(struct lh_sim_run *run);

/* The name of an outcome in tables. */
const char *lh_sim_outcome_name(enum lh_sim_outcome outcome);

/* For run.c and life.c: create everything that runs on an open store. */
int lh_sim_run_parts_create(struct lh_sim_run *run, bool calm, struct lh_error *err) LH_MUST_CHECK;

#endif
