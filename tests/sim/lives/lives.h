/*
 * A simulation with bytes: the drives have contents and faults, and a run (sim/run.h) is a sequence
 * of lives, in each of which a process opens the store and trains until it ends.
 *
 *      lh_sim_lives_open()   starts a new process: creates the store, or opens it and compares it
 *                            with the reference; then creates an engine
 *      lh_sim_lives_drive()  trains, until DONE (finished and flushed), FAILED (the engine or an
 *                            edit has an error, as a user would see it), STOPPED (at the requested
 *                            crash point), STUCK (a request hangs, and no other event is pending)
 *                            or BROKEN (a checker found a failure: run.world.failure)
 *      lh_sim_lives_stop()   ends the process, and possibly cuts the machine's power
 *
 * All of this is implemented as hooks of csrc/sim (sim/hooks.h). Their table is in lives.c; each
 * function is in the file that owns the state that the function needs.
 *
 *      lives.c    the process and its memory       drives.c  requests: bytes and faults
 *      script.c   the training script              copies.c  the accelerator's copies
 *
 * Thread: one.
 */
#ifndef LH_TEST_SIM_LIVES_H
#define LH_TEST_SIM_LIVES_H

#include "lives/copies.h"
#include "lives/drives.h"
#include "lives/script.h"
#include "lives/target.h"
#include "lives/trace.h"
#include "sim/run.h"

/* The result of beginning a life. */
enum lh_sim_open {
    LH_SIM_OPEN_DONE = 0,
    LH_SIM_OPEN_CRASHED, /* the process ended while it created or opened the store */
    LH_SIM_OPEN_REFUSED, /* the store has an error that a fault explains */
    LH_SIM_OPEN_BROKEN,  /* a guarantee is broken: err says which */
};

/* The outcomes of opens and drives, which are counted. */
enum lh_sim_outcome {
    LH_SIM_OUTCOME_CREATED = 0,
    LH_SIM_OUTCOME_CREATION_FAILED,  /* because of a fault; no file remains */
    LH_SIM_OUTCOME_OPENED,           /* at the last committed step */
    LH_SIM_OUTCOME_OPENED_NEXT,      /* at the step that was being committed */
    LH_SIM_OUTCOME_OPENED_OLDER,     /* a committed step is lost, and the store's note says so */
    LH_SIM_OUTCOME_OPENED_OLD_STATE, /* at a consistent older state, which cannot be detected */
    LH_SIM_OUTCOME_OPENED_AT,        /* at an older step, after a refusal that names this step */
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
    LH_SIM_CRASH_NEVER = 0, /* after training is over, and the store is closed */
    LH_SIM_CRASH_EVENTS,    /* after a number of events */
    LH_SIM_CRASH_COMMIT,    /* a number of events after the start of a commit, or at its end */
    LH_SIM_CRASH_OPEN,      /* in a file call of create or open */
    LH_SIM_CRASH_CLOSE,     /* in a file call of close */
    LH_SIM_CRASH_EDIT,      /* in a file call of an edit, or after it */
    LH_SIM_CRASH_COPY,      /* in a file call that makes a snapshot, or after it */
    LH_SIM_CRASH_SYNC,      /* in a commit, when a sync has begun: `after` says which one */
    LH_SIM_CRASH_WHERE_COUNT,
};

struct lh_sim_crash {
    enum lh_sim_crash_where where;
    uint64_t commit; /* COMMIT, SYNC: the number of the commit in this life, from 1 */
    uint64_t after;
    bool is_kill; /* the machine keeps its power */
    bool tears;   /* only some sectors of a block of 4 KiB may survive */
};

struct lh_sim_lives_opts {
    uint64_t seed;
    struct lh_sim_run_opts run;         /* without hooks */
    struct lh_sim_reference *reference; /* borrowed until deinit, like the run's model */
    struct lh_sim_faults faults;
    struct lh_sim_train_chances chances;
    struct lh_sim_crash crash; /* of the current life */
    bool is_asked_older;       /* open the store at open_at, the step before its newest one */
    uint64_t open_at;
    const struct lh_sim_hooks *hooks; /* NULL: lh_sim_lives_hooks */
    uint64_t trace_bytes_max;
    bool has_snapshots; /* the store is copied while commits are held (chances.hold_ppm) */
};

/* The progress of creating a run's store. */
enum lh_sim_made {
    LH_SIM_MADE_NOTHING = 0, /* any files may be removed */
    LH_SIM_MADE_EMPTY,       /* the store has been created, and has to open at step 0 */
    LH_SIM_MADE_FILLED,      /* the store has the masters, committed twice */
};

struct lh_sim_lives {
    struct lh_sim_lives_opts opts;
    struct lh_sim_run run;
    struct lh_sim_trace trace;
    struct lh_sim_fault_log faults;
    struct lh_sim_random crash_random;
    struct lh_sim_random lives_random;
    struct lh_sim_disk disk;
    struct lh_sim_fs fs;
    struct lh_sim_drives drives;
    struct lh_sim_copies copies;
    struct lh_sim_script script;
    struct lh_sim_target target;  /* of snapshots */
    struct lh_sim_disk_copy copy; /* of a drive, from an earlier life */
    enum lh_sim_made made;
    bool has_masters;      /* an EMPTY store showed the masters: their first commit is durable */
    bool is_clean;         /* nothing was overwritten since the store was last closed cleanly */
    bool is_done;          /* the current life trained until the last step */
    bool is_failed;        /* the current life ended with an error of the engine */
    bool is_asked_older;   /* the store was opened at an older step on request */
    bool is_forked;        /* a stale read at open may have hidden a step that exists */
    bool is_crashed;       /* the process has ended */
    uint64_t began;        /* the event count when this life was last driven */
    uint64_t commit_count; /* the number of commits begun in this life */
    uint64_t commit_from;  /* the event count when the last commit began */
    bool was_committing;
    uint64_t outcomes[LH_SIM_OUTCOME_COUNT];
    uint64_t committed_step; /* as the engine knew it when the process was stopped */
    uint64_t open_count;
    uint64_t restored_files; /* a bit for each file that was restored from an older copy */
};

/*
 * Initialize lives, with empty drives.
 *
 * Owns:   *lives owns everything; release with lh_sim_lives_deinit(), after an error as well.
 *         *lives must not move. opts' pointers and alloc are borrowed until then.
 * Errors: those of the parts (-ENOSPC: host_bytes is too small).
 */
int lh_sim_lives_init(struct lh_sim_lives *lives, const struct lh_sim_lives_opts *opts,
                      struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_lives_deinit(struct lh_sim_lives *lives);

/*
 * Begin a life, without faults if calm. Create the store if it does not exist yet; otherwise open
 * it, check that no committed step is lost unless a fault explains the loss (lives/fault.h), and
 * compare the store with the reference, which returns to the store's step. Then create an engine.
 * Call this before the first drive and after each stop. err: what is broken, or was refused.
 */
enum lh_sim_open lh_sim_lives_open(struct lh_sim_lives *lives, bool calm, struct lh_error *err)
    LH_MUST_CHECK;
/* Train until one of the ends above. err: the engine's or checker's error (FAILED, BROKEN). */
enum lh_sim_end lh_sim_lives_drive(struct lh_sim_lives *lives, struct lh_error *err);
/* Whether a fault that happened explains the engine's error. */
bool lh_sim_lives_explains(const struct lh_sim_lives *lives, int code);
/*
 * End the process, whether it finished or not; then cut the power, unless opts.crash.is_kill.
 * Everything except the drives is destroyed.
 */
void lh_sim_lives_stop(struct lh_sim_lives *lives);
/*
 * While no process runs and everything is durable, damage a drive, or copy one for later damage.
 * The drive is chosen by seed.
 */
void lh_sim_lives_damage(struct lh_sim_lives *lives, enum lh_sim_fault fault);
void lh_sim_lives_copy(struct lh_sim_lives *lives);
/* Make dead drives work again. */
void lh_sim_lives_revive(struct lh_sim_lives *lives);

/*
 * Find the newest step of the store, as a reader does, and the one before it that it may still
 * have. No process has it open.
 */
int lh_sim_lives_look(struct lh_sim_lives *lives, uint64_t *step_out, uint64_t *older_out,
                      struct lh_error *err) LH_MUST_CHECK;

/* The hooks of lives, for callers that replace some of them. */
extern const struct lh_sim_hooks lh_sim_lives_hooks;
/* For such callers: the current life has ended in this way. */
void lh_sim_lives_ended(struct lh_sim_lives *lives, enum lh_sim_end end);

/* The name of an outcome in tables. */
const char *lh_sim_outcome_name(enum lh_sim_outcome outcome);

/* For life.c: create all parts that run on an open store. */
int lh_sim_lives_parts_create(struct lh_sim_lives *lives, bool calm, struct lh_error *err)
    LH_MUST_CHECK;

#endif
