/*
 * The start of a life: a process creates a store or opens it, and the store's guarantees are
 * compared with what happened to it.
 *
 * run->committed_step is the last step that was reported as committed to an earlier process. No
 * life may begin before it, unless a fault has happened that no protocol survives (sim/fault.h);
 * then the store has to report the loss if it can. A note without such a fault also breaks a
 * guarantee: a user would look for damage that does not exist.
 */
#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "sched/engine_private.h"
#include "sim/run.h"
#include "store/store_impl.h"

#define BIT LH_SIM_FAULT_BIT_OF

/* Faults that make a single call fail, or a drive until it is revived. */
#define TRANSIENT                                                                                  \
    (BIT(LH_SIM_FAULT_ERROR) | BIT(LH_SIM_FAULT_SPACE) | BIT(LH_SIM_FAULT_FLIP) |                  \
     BIT(LH_SIM_FAULT_DROP) | BIT(LH_SIM_FAULT_DEAD))

const char *lh_sim_outcome_name(enum lh_sim_outcome outcome)
{
    static const char *const names[LH_SIM_OUTCOME_COUNT] = {
        [LH_SIM_OUTCOME_CREATED] = "created",
        [LH_SIM_OUTCOME_CREATION_FAILED] = "creation failed",
        [LH_SIM_OUTCOME_OPENED] = "opened",
        [LH_SIM_OUTCOME_OPENED_NEXT] = "opened, next step",
        [LH_SIM_OUTCOME_OPENED_OLDER] = "opened, older step, named",
        [LH_SIM_OUTCOME_OPENED_OLD_STATE] = "opened, older state, undetectable",
        [LH_SIM_OUTCOME_OPENED_AT] = "opened at an older step, asked for",
        [LH_SIM_OUTCOME_NOTED] = "noted",
        [LH_SIM_OUTCOME_REFUSED] = "refused",
        [LH_SIM_OUTCOME_UNCLEAN] = "refused, one slot not closed cleanly",
        [LH_SIM_OUTCOME_OPEN_CRASHED] = "crashed in open",
        [LH_SIM_OUTCOME_DONE] = "trained to the end",
        [LH_SIM_OUTCOME_FAILED] = "failed by a named error",
        [LH_SIM_OUTCOME_CRASHED] = "crashed",
        [LH_SIM_OUTCOME_STUCK] = "stuck",
    };
    LH_ASSERT(outcome < LH_SIM_OUTCOME_COUNT);
    return names[outcome];
}

/*
 * Whether a sync of a commit failed and dropped pages while the commit's other syncs are still in
 * flight: a read may return what was dropped before the engine learns of the failure.
 */
static bool is_dropped_in_commit(const struct lh_sim_run *run)
{
    return run->engine && run->engine->commit_in_flight > 0 &&
           lh_sim_world_had_fault(&run->world, BIT(LH_SIM_FAULT_DROP));
}

bool lh_sim_run_explains(const struct lh_sim_run *run, int code)
{
    uint64_t faults = 0;
    if (code == -EIO)
        faults = BIT(LH_SIM_FAULT_ERROR) | BIT(LH_SIM_FAULT_DROP) | BIT(LH_SIM_FAULT_DEAD);
    else if (code == -ENOSPC)
        faults = BIT(LH_SIM_FAULT_SPACE);
    else if (code == -EILSEQ)
        faults = BIT(LH_SIM_FAULT_FLIP) | LH_SIM_FAULTS_UNDETECTED | LH_SIM_FAULTS_DAMAGE;
    else if (code == -ECANCELED) /* caused by the program itself */
        return true;
    if (code == -EILSEQ && is_dropped_in_commit(run))
        return true;
    return lh_sim_world_had_fault(&run->world, faults);
}

static bool is_dead(const struct lh_sim_run *run)
{
    for (uint32_t i = 0; i < run->disk.file_count; i++) {
        if (run->disk.files[i].is_dead)
            return true;
    }
    return false;
}

static uint64_t transient_count(const struct lh_sim_run *run)
{
    uint64_t count = is_dead(run);
    for (uint32_t i = 0; i < LH_SIM_FAULT_COUNT; i++)
        count += (TRANSIENT & BIT(i)) != 0 ? run->world.fault_counts[i] : 0;
    return count;
}

static enum lh_sim_open count(struct lh_sim_run *run, enum lh_sim_outcome outcome,
                              enum lh_sim_open open)
{
    run->outcomes[outcome]++;
    return open;
}

static enum lh_sim_open broken(struct lh_error *err, const char *what)
{
    (void)lh_error_prefix(err, "%s", what);
    err->code = -EPROTO;
    return LH_SIM_OPEN_BROKEN;
}

static bool is_single(const struct lh_sim_run *run)
{
    return run->opts.commit_every == LH_ENGINE_COMMIT_NEVER;
}

/* Whether a failed creation left nothing behind, except on a dead drive. */
static bool is_clean(const struct lh_sim_run *run)
{
    for (uint32_t i = 0; i < run->disk.file_count; i++) {
        if (!run->disk.files[i].is_dead && run->disk.files[i].name.is_there)
            return false;
    }
    return true;
}

/* Remove the remains of an interrupted creation, as the user is told to do. */
static void remains_remove(struct lh_sim_run *run)
{
    for (uint32_t i = 0; i < run->disk.file_count; i++) {
        struct lh_sim_disk_file *file = &run->disk.files[i];
        if (file->name.is_there)
            lh_sim_disk_name_set(&run->disk, &file->name, false);
        lh_sim_disk_name_sync(&file->name);
    }
}

static enum lh_sim_open create(struct lh_sim_run *run, struct lh_error *err)
{
    uint64_t faults = lh_sim_world_fault_count(&run->world);
    remains_remove(run);
    int rc = lh_sim_store_create(run->opts.reference, &run->fs, is_single(run), run->alloc,
                                 &run->store, err);
    if (run->fs.is_dead)
        return count(run, LH_SIM_OUTCOME_OPEN_CRASHED, LH_SIM_OPEN_CRASHED);
    if (rc < 0) {
        if (lh_sim_world_fault_count(&run->world) == faults && !is_dead(run))
            return broken(err, "a store cannot be created, and no fault explains it");
        if (!is_clean(run))
            return broken(err, "a failed creation left something behind");
        return count(run, LH_SIM_OUTCOME_CREATION_FAILED, LH_SIM_OPEN_REFUSED);
    }
    run->made = LH_SIM_MADE_EMPTY;
    run->has_masters = false;
    run->is_clean = false;
    return count(run, LH_SIM_OUTCOME_CREATED, LH_SIM_OPEN_DONE);
}

/* Judge an error of open: it needs a fault that explains it. */
static enum lh_sim_open refused(struct lh_sim_run *run, uint64_t transient, struct lh_error *err)
{
    /* A store with one slot, overwritten in place: its owner restarts from a checkpoint. */
    if (err->code == -EUCLEAN && is_single(run) && !run->is_clean) {
        run->made = LH_SIM_MADE_NOTHING;
        lh_sim_reference_begin_again(run->opts.reference);
        lh_sim_disk_copy_free(&run->disk, &run->copy); /* it belongs to the discarded store */
        return count(run, LH_SIM_OUTCOME_UNCLEAN, LH_SIM_OPEN_REFUSED);
    }
    bool is_explained =
        transient_count(run) != transient || is_dead(run) ||
        lh_sim_world_had_fault(&run->world, LH_SIM_FAULTS_UNDETECTED | LH_SIM_FAULTS_DAMAGE);
    if (!is_explained)
        return broken(err, "the store is refused, and no fault explains it");
    return count(run, LH_SIM_OUTCOME_REFUSED, LH_SIM_OPEN_REFUSED);
}

/*
 * The note has to mention a damaged witness of the last commit, because it is then unknown whether
 * that directory is as new as the others. A witness that the next commit was writing may be torn.
 */
static bool is_witness_noted(struct lh_sim_run *run)
{
    const struct lh_store *store = run->store;
    uint32_t number = store->superblock.witness % 2;
    bool may_be_torn = (store->superblock.sequence + 1) % 2 == number;
    if (may_be_torn || run->is_asked_older ||
        lh_sim_world_had_fault(&run->world, LH_SIM_FAULTS_UNDETECTED))
        return true;
    for (uint32_t file = 1; file < store->file_count; file++) {
        uint8_t block[LH_BLOCK_BYTES];
        struct lh_store_witness witness;
        lh_sim_disk_read(&run->disk, file, LH_STORE_WITNESS_OFFSET(number), block, sizeof(block));
        if (lh_store_witness_decode(block, &store->header, &witness, NULL) < 0 &&
            !strstr(lh_store_note(store), "the witness of the last commit"))
            return false;
    }
    return true;
}

static enum lh_sim_open note_judge(struct lh_sim_run *run, uint64_t transient, struct lh_error *err)
{
    const char *note = lh_store_note(run->store);
    if (!is_witness_noted(run)) {
        lh_error_set(err, -EPROTO, "note: %s", note);
        return broken(err, "a witness is damaged, but the note does not say so");
    }
    if (note[0] == '\0')
        return LH_SIM_OPEN_DONE;
    if (transient_count(run) == transient &&
        !lh_sim_world_had_fault(&run->world, LH_SIM_FAULTS_UNDETECTED | LH_SIM_FAULTS_DAMAGE)) {
        lh_error_set(err, -EPROTO, "%s", note);
        return broken(err, "the store has a note, and no fault explains it");
    }
    return count(run, LH_SIM_OUTCOME_NOTED, LH_SIM_OPEN_DONE);
}

/* Whether a fault explains that the store opened at an older state than one it had shown. */
static bool may_be_older(const struct lh_sim_run *run)
{
    bool is_named = lh_store_note(run->store)[0] != '\0';
    return run->is_asked_older || run->is_first_old ||
           lh_sim_world_had_fault(&run->world, LH_SIM_FAULTS_UNDETECTED) ||
           (is_named &&
            lh_sim_world_had_fault(&run->world, LH_SIM_FAULTS_DAMAGE | BIT(LH_SIM_FAULT_FLIP)));
}

/* Judge the step that the store opened at. */
static enum lh_sim_open step_judge(struct lh_sim_run *run, struct lh_error *err)
{
    uint64_t step = lh_store_step(run->store);
    bool is_named = lh_store_note(run->store)[0] != '\0';
    lh_error_set(err, -EPROTO,
                 "step %" PRIu64 ", but step %" PRIu64 " was committed and step %" PRIu64
                 " was the last one closed; note: %s",
                 step, run->committed_step, run->opts.reference->step, lh_store_note(run->store));
    /* A stale read hid this step from an earlier life, which continued from the step before it. */
    if (step > run->opts.reference->step && run->is_forked)
        return count(run, LH_SIM_OUTCOME_OPENED_OLD_STATE, LH_SIM_OPEN_REFUSED);
    if (step > run->opts.reference->step)
        return broken(err, "the store opened at a step that was never closed");
    if (step == run->committed_step)
        return count(run, LH_SIM_OUTCOME_OPENED, LH_SIM_OPEN_DONE);
    if (step > run->committed_step)
        return count(run, LH_SIM_OUTCOME_OPENED_NEXT, LH_SIM_OPEN_DONE);
    if (run->is_asked_older)
        return count(run, LH_SIM_OUTCOME_OPENED_AT, LH_SIM_OPEN_DONE);
    if (!may_be_older(run))
        return broken(err, "a committed step is lost");
    return count(run, is_named ? LH_SIM_OUTCOME_OPENED_OLDER : LH_SIM_OUTCOME_OPENED_OLD_STATE,
                 LH_SIM_OPEN_DONE);
}

/* Judge the result of comparing the store's contents. */
static enum lh_sim_open bytes_judge(struct lh_sim_run *run, int rc, struct lh_error *err)
{
    if (rc == -EPROTO && run->is_forked)
        return count(run, LH_SIM_OUTCOME_OPENED_OLD_STATE, LH_SIM_OPEN_REFUSED);
    if (rc == -EPROTO)
        return broken(err, "wrong bytes were not detected");
    /* A restored directory is reported before anything is read from it. */
    uint64_t faults = (LH_SIM_FAULTS_UNDETECTED | LH_SIM_FAULTS_DAMAGE) & ~BIT(LH_SIM_FAULT_OLD);
    bool is_explained = lh_sim_world_had_fault(&run->world, faults) || is_dead(run);
    if (rc < 0 && !run->is_first_old && !is_explained)
        return broken(err, "committed bytes are lost");
    return rc < 0 ? count(run, LH_SIM_OUTCOME_REFUSED, LH_SIM_OPEN_REFUSED) : LH_SIM_OPEN_DONE;
}

/*
 * Judge a store that was created, but not filled: it has zeros, or the masters if their first
 * commit was in progress. The masters are committed twice (lh_sim_store_fill()), and only then is
 * the store filled: until the second commit, losing the newest superblock leads back to the zeros,
 * which also belong to step 0.
 */
static enum lh_sim_open empty_judge(struct lh_sim_run *run, struct lh_error *err)
{
    if (lh_store_step(run->store) != 0) {
        lh_error_set(err, -EPROTO, "step %" PRIu64, lh_store_step(run->store));
        return broken(err, "a store that was never trained opened at a step other than 0");
    }
    int rc = lh_sim_reference_compare(run->opts.reference, run->store, false, err);
    bool has_masters = rc == 0;
    if (rc == -EPROTO && (!run->has_masters || may_be_older(run)))
        rc = lh_sim_reference_compare_with(run->opts.reference, run->store, NULL, err);
    run->has_masters = has_masters;
    return bytes_judge(run, rc, err);
}

/* Whether the store has the scalars that the caller committed with the step. */
static bool has_scalars(const struct lh_sim_run *run)
{
    uint8_t expected[LH_SIM_SCALAR_BYTES_MAX];
    uint64_t step = lh_store_step(run->store);
    uint64_t bytes = step == 0 ? 0 : lh_sim_model_scalars(run->opts.model, step, expected);
    uint64_t all_bytes = 0;
    uint64_t found_bytes = 0;
    const void *all = lh_store_scalars(run->store, &all_bytes);
    const void *found = lh_scalars_find(all, all_bytes, &found_bytes);
    return found_bytes == bytes && (bytes == 0 || memcmp(found, expected, bytes) == 0);
}

static enum lh_sim_open state_judge(struct lh_sim_run *run, struct lh_error *err)
{
    enum lh_sim_open open = step_judge(run, err);
    if (open != LH_SIM_OPEN_DONE)
        return open;
    int rc = lh_sim_reference_compare(run->opts.reference, run->store, may_be_older(run), err);
    open = bytes_judge(run, rc, err);
    if (open != LH_SIM_OPEN_DONE)
        return open;
    if (!has_scalars(run)) {
        lh_error_set(err, -EPROTO, "step %" PRIu64, lh_store_step(run->store));
        return broken(err, "the scalars are not those of the step");
    }
    if (lh_store_step(run->store) != run->opts.reference->step)
        lh_sim_disk_copy_free(&run->disk, &run->copy); /* from a history that was discarded */
    lh_sim_reference_return(run->opts.reference, lh_store_step(run->store));
    run->committed_step = lh_store_step(run->store);
    return LH_SIM_OPEN_DONE;
}

/*
 * The newest step is damaged. If the store can show the previous one to readers, open it at that
 * step explicitly.
 */
static int older_open(struct lh_sim_run *run, const struct lh_store_open_opts *opts,
                      struct lh_error *err)
{
    struct lh_error refusal = *err;
    struct lh_store_open_opts older = *opts;
    older.read_only = true;
    int rc = lh_store_open(&older, run->alloc, &run->store, err);
    bool is_older = rc == 0 && lh_store_is_fallback(run->store);
    uint64_t step = rc == 0 ? lh_store_step(run->store) : 0;
    lh_store_close(run->store);
    run->store = NULL;
    if (!is_older) {
        *err = refusal;
        return refusal.code;
    }
    older.read_only = false;
    older.open_at = &step;
    /* From now on the later step may be lost, even if this open does not complete. */
    run->committed_step = lh_min_u64(run->committed_step, step);
    rc = lh_store_open(&older, run->alloc, &run->store, err);
    run->is_asked_older = rc == 0;
    return rc;
}

static enum lh_sim_open open_store(struct lh_sim_run *run, struct lh_error *err)
{
    uint64_t transient = transient_count(run);
    struct lh_store_open_opts opts = {
        .directories = run->fs.directories,
        .directory_count = run->disk.file_count,
        .fs = &run->fs.fs,
    };
    run->is_asked_older = false;
    uint64_t stale = run->world.fault_counts[LH_SIM_FAULT_STALE];
    int rc = lh_store_open(&opts, run->alloc, &run->store, err);
    run->is_forked |= run->world.fault_counts[LH_SIM_FAULT_STALE] > stale;
    if (rc < 0 && !run->fs.is_dead && transient_count(run) == transient && !is_dead(run))
        rc = older_open(run, &opts, err);
    if (run->fs.is_dead)
        return count(run, LH_SIM_OUTCOME_OPEN_CRASHED, LH_SIM_OPEN_CRASHED);
    if (rc < 0)
        return refused(run, transient, err);
    enum lh_sim_open open = note_judge(run, transient, err);
    if (open != LH_SIM_OPEN_DONE)
        return open;
    /* Reads by the judge do not count as calls of the process. */
    struct lh_sim_faults faults = run->fs.faults;
    uint64_t dies_after = run->fs.dies_after;
    run->fs.faults = (struct lh_sim_faults){0};
    run->fs.dies_after = UINT64_MAX;
    open = run->made == LH_SIM_MADE_EMPTY ? empty_judge(run, err) : state_judge(run, err);
    run->fs.faults = faults;
    run->fs.dies_after = dies_after;
    return open;
}

static enum lh_sim_open fill(struct lh_sim_run *run, struct lh_error *err)
{
    uint64_t transient = transient_count(run);
    int rc = run->has_masters ? lh_store_commit_sync(run->store, 0, "", 0, err)
                              : lh_sim_store_fill(run->store, run->opts.reference, err);
    if (run->fs.is_dead)
        return count(run, LH_SIM_OUTCOME_OPEN_CRASHED, LH_SIM_OPEN_CRASHED);
    if (rc < 0)
        return refused(run, transient, err);
    run->made = LH_SIM_MADE_FILLED;
    run->committed_step = 0;
    return LH_SIM_OPEN_DONE;
}

enum lh_sim_open lh_sim_run_open(struct lh_sim_run *run, bool calm, struct lh_error *err)
{
    LH_ASSERT(run->opts.reference && !run->engine);
    uint64_t dies_after =
        run->opts.crash.where == LH_SIM_CRASH_COPY ? run->opts.crash.after : UINT64_MAX;
    if (run->target.world &&
        lh_sim_target_restart(&run->target, calm ? NULL : &run->opts.faults, dies_after, err) < 0)
        return broken(err, "snapshot");
    lh_sim_fs_restart(&run->fs, calm ? NULL : &run->opts.faults);
    if (!calm && run->opts.crash.where == LH_SIM_CRASH_OPEN)
        lh_sim_fs_kill_after(&run->fs, run->opts.crash.after);
    run->commit_count = 0;
    run->was_committing = false;
    enum lh_sim_open open =
        run->made == LH_SIM_MADE_NOTHING ? create(run, err) : open_store(run, err);
    if (open == LH_SIM_OPEN_DONE && run->made != LH_SIM_MADE_FILLED)
        open = fill(run, err);
    if (open == LH_SIM_OPEN_DONE && lh_sim_run_parts_create(run, calm, err) < 0)
        open = broken(err, "no engine can be created on the store");
    run->is_crashed = open == LH_SIM_OPEN_CRASHED;
    return open;
}

void lh_sim_run_damage(struct lh_sim_run *run, enum lh_sim_fault fault)
{
    uint32_t file = fault == LH_SIM_FAULT_OLD
                        ? run->copy.file
                        : (uint32_t)lh_sim_random_below(&run->lives_random, run->disk.file_count);
    if (run->made != LH_SIM_MADE_FILLED || (fault == LH_SIM_FAULT_OLD && !run->copy.pages))
        return;
    if (lh_sim_disk_damage(&run->disk, fault, file, &run->copy, &run->lives_random) &&
        fault == LH_SIM_FAULT_OLD && file == 0)
        run->is_first_old = true;
}

void lh_sim_run_copy(struct lh_sim_run *run)
{
    uint32_t file = (uint32_t)lh_sim_random_below(&run->lives_random, run->disk.file_count);
    if (run->made == LH_SIM_MADE_FILLED)
        lh_sim_disk_copy_make(&run->disk, file, &run->copy);
}

void lh_sim_run_revive(struct lh_sim_run *run)
{
    for (uint32_t i = 0; i < run->disk.file_count; i++)
        run->disk.files[i].is_dead = false;
}
