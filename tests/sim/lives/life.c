/*
 * The start of a life: a process creates a store or opens it, and the result is compared with what
 * the store guarantees after the faults that happened.
 *
 * lives->committed_step is the last step that was reported as committed to an earlier process. No
 * life may begin at an earlier step, unless a fault has happened that no protocol survives
 * (lives/fault.h); then the store has to report the loss if it can. A note without such a fault
 * also breaks a guarantee: a user would look for damage that does not exist.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "lives/lives.h"
#include "lives/store.h"
#include "sched/engine_private.h"
#include "store/store_impl.h"

#define BIT LH_SIM_FAULT_BIT_OF

/* Faults that make a single call fail, or all calls to a drive until it is revived. */
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
static bool is_dropped_in_commit(const struct lh_sim_lives *lives)
{
    return lives->run.engine && lives->run.engine->commit_in_flight > 0 &&
           lh_sim_fault_had(&lives->faults, BIT(LH_SIM_FAULT_DROP));
}

bool lh_sim_lives_explains(const struct lh_sim_lives *lives, int code)
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
    if (code == -EILSEQ && is_dropped_in_commit(lives))
        return true;
    return lh_sim_fault_had(&lives->faults, faults);
}

static bool is_dead(const struct lh_sim_lives *lives)
{
    for (uint32_t i = 0; i < lives->disk.file_count; i++) {
        if (lives->disk.files[i].is_dead)
            return true;
    }
    return false;
}

static uint64_t transient_count(const struct lh_sim_lives *lives)
{
    uint64_t count = is_dead(lives);
    for (uint32_t i = 0; i < LH_SIM_FAULT_COUNT; i++)
        count += (TRANSIENT & BIT(i)) != 0 ? lives->faults.counts[i] : 0;
    return count;
}

static enum lh_sim_open count(struct lh_sim_lives *lives, enum lh_sim_outcome outcome,
                              enum lh_sim_open open)
{
    lives->outcomes[outcome]++;
    return open;
}

static enum lh_sim_open broken(struct lh_error *err, const char *what)
{
    (void)lh_error_prefix(err, "%s", what);
    err->code = -EPROTO;
    return LH_SIM_OPEN_BROKEN;
}

static bool is_single(const struct lh_sim_lives *lives)
{
    return lives->opts.run.commit_every == LH_ENGINE_COMMIT_NEVER;
}

/* Whether no files remain after a failed creation, except on a dead drive. */
static bool is_clean(const struct lh_sim_lives *lives)
{
    for (uint32_t i = 0; i < lives->disk.file_count; i++) {
        if (!lives->disk.files[i].is_dead && lives->disk.files[i].name.is_there)
            return false;
    }
    return true;
}

/* Remove the remains of an interrupted creation, as the user is told to do. */
static void remains_remove(struct lh_sim_lives *lives)
{
    for (uint32_t i = 0; i < lives->disk.file_count; i++) {
        struct lh_sim_disk_file *file = &lives->disk.files[i];
        if (file->name.is_there)
            lh_sim_disk_name_set(&lives->disk, &file->name, false);
        lh_sim_disk_name_sync(&file->name);
    }
}

static enum lh_sim_open create(struct lh_sim_lives *lives, struct lh_error *err)
{
    uint64_t faults = lh_sim_fault_count(&lives->faults);
    remains_remove(lives);
    int rc = lh_sim_lives_store_create(lives->opts.reference, &lives->fs, is_single(lives),
                                       lives->run.alloc, &lives->run.store, err);
    if (lives->fs.is_dead)
        return count(lives, LH_SIM_OUTCOME_OPEN_CRASHED, LH_SIM_OPEN_CRASHED);
    if (rc < 0) {
        if (lh_sim_fault_count(&lives->faults) == faults && !is_dead(lives))
            return broken(err, "a store cannot be created, and no fault explains it");
        if (!is_clean(lives))
            return broken(err, "a failed creation left something behind");
        return count(lives, LH_SIM_OUTCOME_CREATION_FAILED, LH_SIM_OPEN_REFUSED);
    }
    lives->made = LH_SIM_MADE_EMPTY;
    lives->has_masters = false;
    lives->is_clean = false;
    return count(lives, LH_SIM_OUTCOME_CREATED, LH_SIM_OPEN_DONE);
}

/* Judge an error of open, which is a failure unless a fault explains it. */
static enum lh_sim_open refused(struct lh_sim_lives *lives, uint64_t transient,
                                struct lh_error *err)
{
    /* A store with one slot, overwritten in place: its owner restarts from a checkpoint. */
    if (err->code == -EUCLEAN && is_single(lives) && !lives->is_clean) {
        lives->made = LH_SIM_MADE_NOTHING;
        lh_sim_reference_begin_again(lives->opts.reference);
        lh_sim_disk_copy_free(&lives->disk, &lives->copy); /* it belongs to the discarded store */
        return count(lives, LH_SIM_OUTCOME_UNCLEAN, LH_SIM_OPEN_REFUSED);
    }
    bool is_explained =
        transient_count(lives) != transient || is_dead(lives) ||
        lh_sim_fault_had(&lives->faults, LH_SIM_FAULTS_UNDETECTED | LH_SIM_FAULTS_DAMAGE);
    if (!is_explained)
        return broken(err, "the store is refused, and no fault explains it");
    return count(lives, LH_SIM_OUTCOME_REFUSED, LH_SIM_OPEN_REFUSED);
}

/*
 * Whether the note mentions the witnesses of the last commit if one is damaged: it has to, because
 * it is then unknown whether that directory is as new as the others. A witness that the next commit
 * was writing may be torn.
 */
static bool is_witness_noted(struct lh_sim_lives *lives)
{
    const struct lh_store *store = lives->run.store;
    uint32_t number = store->superblock.witness % 2;
    bool may_be_torn = (store->superblock.sequence + 1) % 2 == number;
    if (may_be_torn || lives->is_asked_older ||
        lh_sim_fault_had(&lives->faults, LH_SIM_FAULTS_UNDETECTED))
        return true;
    for (uint32_t file = 1; file < store->file_count; file++) {
        uint8_t block[LH_BLOCK_BYTES];
        struct lh_store_witness witness;
        lh_sim_disk_read(&lives->disk, file, LH_STORE_WITNESS_OFFSET(number), block, sizeof(block));
        if (lh_store_witness_decode(block, &store->header, &witness, NULL) < 0 &&
            !strstr(lh_store_note(store), "the witness of the last commit"))
            return false;
    }
    return true;
}

static enum lh_sim_open note_judge(struct lh_sim_lives *lives, uint64_t transient,
                                   struct lh_error *err)
{
    const char *note = lh_store_note(lives->run.store);
    if (!is_witness_noted(lives)) {
        lh_error_set(err, -EPROTO, "note: %s", note);
        return broken(err, "a witness is damaged, but the note does not say so");
    }
    if (note[0] == '\0')
        return LH_SIM_OPEN_DONE;
    if (transient_count(lives) == transient &&
        !lh_sim_fault_had(&lives->faults, LH_SIM_FAULTS_UNDETECTED | LH_SIM_FAULTS_DAMAGE)) {
        lh_error_set(err, -EPROTO, "%s", note);
        return broken(err, "the store has a note, and no fault explains it");
    }
    return count(lives, LH_SIM_OUTCOME_NOTED, LH_SIM_OPEN_DONE);
}

/* Whether directory 0 was restored from a copy: the store may seem complete. */
static bool is_first_old(const struct lh_sim_lives *lives)
{
    return (lives->restored_files & 1) != 0;
}

/* Whether a fault explains that the store opened at an older state than it had before. */
static bool may_be_older(const struct lh_sim_lives *lives)
{
    bool is_named = lh_store_note(lives->run.store)[0] != '\0';
    return lives->is_asked_older || is_first_old(lives) ||
           lh_sim_fault_had(&lives->faults, LH_SIM_FAULTS_UNDETECTED) ||
           (is_named &&
            lh_sim_fault_had(&lives->faults, LH_SIM_FAULTS_DAMAGE | BIT(LH_SIM_FAULT_FLIP)));
}

/* Judge the step that the store opened at. */
static enum lh_sim_open step_judge(struct lh_sim_lives *lives, struct lh_error *err)
{
    uint64_t step = lh_store_step(lives->run.store);
    bool is_named = lh_store_note(lives->run.store)[0] != '\0';
    lh_error_set(err, -EPROTO,
                 "step %" PRIu64 ", but step %" PRIu64 " was committed and step %" PRIu64
                 " was the last one closed; note: %s",
                 step, lives->committed_step, lives->opts.reference->step,
                 lh_store_note(lives->run.store));
    /* A stale read hid this step from an earlier life, which continued from the step before it. */
    if (step > lives->opts.reference->step && lives->is_forked)
        return count(lives, LH_SIM_OUTCOME_OPENED_OLD_STATE, LH_SIM_OPEN_REFUSED);
    if (step > lives->opts.reference->step)
        return broken(err, "the store opened at a step that was never closed");
    /* Asking for a step has already made it the committed one: older_open(). */
    if (lives->is_asked_older)
        return count(lives, LH_SIM_OUTCOME_OPENED_AT, LH_SIM_OPEN_DONE);
    if (step == lives->committed_step)
        return count(lives, LH_SIM_OUTCOME_OPENED, LH_SIM_OPEN_DONE);
    if (step > lives->committed_step)
        return count(lives, LH_SIM_OUTCOME_OPENED_NEXT, LH_SIM_OPEN_DONE);
    if (!may_be_older(lives))
        return broken(err, "a committed step is lost");
    return count(lives, is_named ? LH_SIM_OUTCOME_OPENED_OLDER : LH_SIM_OUTCOME_OPENED_OLD_STATE,
                 LH_SIM_OPEN_DONE);
}

/*
 * Whether bytes are lost because their directory was restored, and open could not reject it: its
 * witness was the only proof, and could not be read. The note has to name that directory.
 */
static bool is_restored_unproven(const struct lh_sim_lives *lives, const struct lh_error *err)
{
    const char *note = lh_store_note(lives->run.store);
    for (uint32_t file = 1; file < lives->disk.file_count; file++) {
        char place[LH_SIM_FS_PATH_BYTES + 32];
        char doubt[LH_SIM_FS_PATH_BYTES + 64];
        const char *directory = lives->fs.directories[file];
        snprintf(place, sizeof(place), " of %s/lohan.data have checksum ", directory);
        snprintf(doubt, sizeof(doubt), "%s/lohan.data: the witness of the last commit", directory);
        if ((lives->restored_files & BIT(file)) != 0 && strstr(err->message, place) &&
            strstr(note, doubt))
            return true;
    }
    return false;
}

/* Judge the result of comparing the store's contents. */
static enum lh_sim_open bytes_judge(struct lh_sim_lives *lives, int rc, struct lh_error *err)
{
    if (rc == -EPROTO && lives->is_forked)
        return count(lives, LH_SIM_OUTCOME_OPENED_OLD_STATE, LH_SIM_OPEN_REFUSED);
    if (rc == -EPROTO)
        return broken(err, "wrong bytes were not detected");
    /* A restored directory is rejected before anything is read from it, if its witness is read. */
    uint64_t faults = (LH_SIM_FAULTS_UNDETECTED | LH_SIM_FAULTS_DAMAGE) & ~BIT(LH_SIM_FAULT_OLD);
    bool is_explained = lh_sim_fault_had(&lives->faults, faults) || is_dead(lives);
    is_explained |= rc == -EILSEQ && is_restored_unproven(lives, err);
    if (rc < 0 && !is_first_old(lives) && !is_explained)
        return broken(err, "committed bytes are lost");
    return rc < 0 ? count(lives, LH_SIM_OUTCOME_REFUSED, LH_SIM_OPEN_REFUSED) : LH_SIM_OPEN_DONE;
}

/*
 * Judge a store that was created, but not filled: it has zeros, or the masters if their first
 * commit was in progress. The masters are committed twice (lh_sim_lives_store_fill()), and only
 * then is the store filled: until the second commit, losing the newest superblock leads back to the
 * zeros, which also belong to step 0.
 */
static enum lh_sim_open empty_judge(struct lh_sim_lives *lives, struct lh_error *err)
{
    if (lh_store_step(lives->run.store) != 0) {
        lh_error_set(err, -EPROTO, "step %" PRIu64, lh_store_step(lives->run.store));
        return broken(err, "a store that was never trained opened at a step other than 0");
    }
    int rc = lh_sim_reference_compare(lives->opts.reference, lives->run.store, false, err);
    bool has_masters = rc == 0;
    if (rc == -EPROTO && (!lives->has_masters || may_be_older(lives)))
        rc = lh_sim_reference_compare_with(lives->opts.reference, lives->run.store, NULL, err);
    lives->has_masters = has_masters;
    return bytes_judge(lives, rc, err);
}

/* Whether the store has the scalars that the caller committed with the step. */
static bool has_scalars(const struct lh_sim_lives *lives)
{
    uint8_t expected[LH_SIM_SCALAR_BYTES_MAX];
    uint64_t step = lh_store_step(lives->run.store);
    uint64_t bytes = step == 0 ? 0 : lh_sim_model_scalars(lives->opts.run.model, step, expected);
    uint64_t all_bytes = 0;
    uint64_t found_bytes = 0;
    const void *all = lh_store_scalars(lives->run.store, &all_bytes);
    const void *found = lh_scalars_find(all, all_bytes, &found_bytes);
    return found_bytes == bytes && (bytes == 0 || memcmp(found, expected, bytes) == 0);
}

static enum lh_sim_open state_judge(struct lh_sim_lives *lives, struct lh_error *err)
{
    enum lh_sim_open open = step_judge(lives, err);
    if (open != LH_SIM_OPEN_DONE)
        return open;
    int rc =
        lh_sim_reference_compare(lives->opts.reference, lives->run.store, may_be_older(lives), err);
    open = bytes_judge(lives, rc, err);
    if (open != LH_SIM_OPEN_DONE)
        return open;
    if (!has_scalars(lives)) {
        lh_error_set(err, -EPROTO, "step %" PRIu64, lh_store_step(lives->run.store));
        return broken(err, "the scalars are not those of the step");
    }
    if (lh_store_step(lives->run.store) != lives->opts.reference->step)
        lh_sim_disk_copy_free(&lives->disk, &lives->copy); /* its history was discarded */
    lh_sim_reference_return(lives->opts.reference, lh_store_step(lives->run.store));
    lives->committed_step = lh_store_step(lives->run.store);
    return LH_SIM_OPEN_DONE;
}

/*
 * The newest step is damaged. If the store can show the previous one to readers, open it at that
 * step explicitly.
 */
static int older_open(struct lh_sim_lives *lives, const struct lh_store_open_opts *opts,
                      struct lh_error *err)
{
    struct lh_error refusal = *err;
    struct lh_store_open_opts older = *opts;
    older.read_only = true;
    int rc = lh_store_open(&older, lives->run.alloc, &lives->run.store, err);
    bool is_older = rc == 0 && lh_store_is_fallback(lives->run.store);
    uint64_t step = rc == 0 ? lh_store_step(lives->run.store) : 0;
    lh_store_close(lives->run.store);
    lives->run.store = NULL;
    if (!is_older) {
        *err = refusal;
        return refusal.code;
    }
    older.read_only = false;
    older.open_at = &step;
    /* From now on the later step may be lost, even if this open does not complete. */
    lives->committed_step = lh_min_u64(lives->committed_step, step);
    rc = lh_store_open(&older, lives->run.alloc, &lives->run.store, err);
    lives->is_asked_older = rc == 0;
    return rc;
}

static enum lh_sim_open open_store(struct lh_sim_lives *lives, struct lh_error *err)
{
    uint64_t transient = transient_count(lives);
    struct lh_store_open_opts opts = {
        .directories = lives->fs.directories,
        .directory_count = lives->disk.file_count,
        .fs = &lives->fs.fs,
    };
    lives->is_asked_older = lives->opts.is_asked_older;
    if (lives->is_asked_older) {
        opts.open_at = &lives->opts.open_at;
        lives->committed_step = lh_min_u64(lives->committed_step, lives->opts.open_at);
    }
    uint64_t stale = lives->faults.counts[LH_SIM_FAULT_STALE];
    int rc = lh_store_open(&opts, lives->run.alloc, &lives->run.store, err);
    lives->is_forked |= lives->faults.counts[LH_SIM_FAULT_STALE] > stale;
    if (rc < 0 && !lives->fs.is_dead && transient_count(lives) == transient && !is_dead(lives))
        rc = older_open(lives, &opts, err);
    if (lives->fs.is_dead)
        return count(lives, LH_SIM_OUTCOME_OPEN_CRASHED, LH_SIM_OPEN_CRASHED);
    if (rc < 0)
        return refused(lives, transient, err);
    enum lh_sim_open open = note_judge(lives, transient, err);
    if (open != LH_SIM_OPEN_DONE)
        return open;
    /* Reads that only check the store have no faults, and the process does not end in them. */
    struct lh_sim_faults faults = lives->fs.faults;
    uint64_t dies_after = lives->fs.dies_after;
    lives->fs.faults = (struct lh_sim_faults){0};
    lives->fs.dies_after = UINT64_MAX;
    open = lives->made == LH_SIM_MADE_EMPTY ? empty_judge(lives, err) : state_judge(lives, err);
    lives->fs.faults = faults;
    lives->fs.dies_after = dies_after;
    return open;
}

int lh_sim_lives_look(struct lh_sim_lives *lives, uint64_t *step_out, uint64_t *older_out,
                      struct lh_error *err)
{
    struct lh_store_open_opts opts = {
        .directories = lives->fs.directories,
        .directory_count = lives->disk.file_count,
        .read_only = true,
        .fs = &lives->fs.fs,
    };
    struct lh_store *store = NULL;
    lh_sim_fs_restart(&lives->fs, NULL);
    LH_TRY(lh_store_open(&opts, lives->run.alloc, &store, err));
    *step_out = lh_store_step(store);
    *older_out = lh_store_older_step(store);
    lh_store_close(store);
    return 0;
}

static enum lh_sim_open fill(struct lh_sim_lives *lives, struct lh_error *err)
{
    uint64_t transient = transient_count(lives);
    int rc = lives->has_masters
                 ? lh_store_commit_sync(lives->run.store, 0, "", 0, err)
                 : lh_sim_lives_store_fill(lives->run.store, lives->opts.reference, err);
    if (lives->fs.is_dead)
        return count(lives, LH_SIM_OUTCOME_OPEN_CRASHED, LH_SIM_OPEN_CRASHED);
    if (rc < 0)
        return refused(lives, transient, err);
    lives->made = LH_SIM_MADE_FILLED;
    lives->committed_step = 0;
    return LH_SIM_OPEN_DONE;
}

enum lh_sim_open lh_sim_lives_open(struct lh_sim_lives *lives, bool calm, struct lh_error *err)
{
    LH_ASSERT(lives->opts.reference && !lives->run.engine);
    uint64_t dies_after =
        lives->opts.crash.where == LH_SIM_CRASH_COPY ? lives->opts.crash.after : UINT64_MAX;
    if (lives->target.world &&
        lh_sim_target_restart(&lives->target, calm ? NULL : &lives->opts.faults, dies_after, err) <
            0)
        return broken(err, "snapshot");
    lh_sim_fs_restart(&lives->fs, calm ? NULL : &lives->opts.faults);
    if (!calm && lives->opts.crash.where == LH_SIM_CRASH_OPEN)
        lh_sim_fs_kill_after(&lives->fs, lives->opts.crash.after);
    lives->commit_count = 0;
    lives->was_committing = false;
    enum lh_sim_open open =
        lives->made == LH_SIM_MADE_NOTHING ? create(lives, err) : open_store(lives, err);
    if (open == LH_SIM_OPEN_DONE && lives->made != LH_SIM_MADE_FILLED)
        open = fill(lives, err);
    if (open == LH_SIM_OPEN_DONE && lh_sim_lives_parts_create(lives, calm, err) < 0)
        open = broken(err, "no engine can be created on the store");
    lives->is_crashed = open == LH_SIM_OPEN_CRASHED;
    return open;
}

void lh_sim_lives_damage(struct lh_sim_lives *lives, enum lh_sim_fault fault)
{
    uint32_t file =
        fault == LH_SIM_FAULT_OLD
            ? lives->copy.file
            : (uint32_t)lh_sim_random_below(&lives->lives_random, lives->disk.file_count);
    if (lives->made != LH_SIM_MADE_FILLED || (fault == LH_SIM_FAULT_OLD && !lives->copy.pages))
        return;
    if (lh_sim_disk_damage(&lives->disk, fault, file, &lives->copy, &lives->lives_random) &&
        fault == LH_SIM_FAULT_OLD)
        lives->restored_files |= BIT(file);
}

void lh_sim_lives_copy(struct lh_sim_lives *lives)
{
    uint32_t file = (uint32_t)lh_sim_random_below(&lives->lives_random, lives->disk.file_count);
    if (lives->made == LH_SIM_MADE_FILLED)
        lh_sim_disk_copy_make(&lives->disk, file, &lives->copy);
}

void lh_sim_lives_revive(struct lh_sim_lives *lives)
{
    for (uint32_t i = 0; i < lives->disk.file_count; i++)
        lives->disk.files[i].is_dead = false;
}
