#include "lives/lives.h"

#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>

#include "base/assert.h"
#include "sched/engine_private.h"
#include "store/store_impl.h"

#define GARBAGE 0xa5

static void traced(void *context, enum lh_sim_trace_kind kind, uint64_t a, uint64_t b, uint64_t c)
{
    struct lh_sim_lives *lives = context;
    lh_sim_trace_add(&lives->trace, lives->run.world.now_ns, kind, a, b, c);
}

static void memory_mapped(void *context, void *memory, uint64_t bytes, uint64_t used_bytes)
{
    (void)context;
    LH_ASSERT(mprotect(memory, bytes, PROT_READ | PROT_WRITE) == 0);
    memset(memory, GARBAGE, used_bytes);
}

static void engine_described(void *context, struct lh_engine_opts *opts)
{
    (void)context;
    opts->verify = true;
}

/* Whether the process ended in a file call of an edit or a copy. */
static bool has_died(void *context)
{
    const struct lh_sim_lives *lives = context;
    return lives->fs.is_dead || lives->target.fs.is_dead;
}

static void quiet(void *context)
{
    struct lh_sim_lives *lives = context;
    lh_sim_drives_overwritten_forget(&lives->drives, lives->run.engine);
    lh_sim_script_hold_check(&lives->script);
}

/* Check that no undetected wrong bytes are in the parameters. */
static bool trained(void *context)
{
    struct lh_sim_lives *lives = context;
    uint32_t flips =
        lh_sim_drives_flip_count(&lives->drives, lives->run.memory, lives->run.budget.region_bytes);
    if (flips > 0)
        lh_sim_world_fail(&lives->run.world,
                          "%" PRIu32 " blocks of parameters with a flipped bit were not reported",
                          flips);
    return lives->script.abort_count == 0;
}

/* Whether the process ends now. Called whenever nothing moves. */
static bool stops(void *context)
{
    struct lh_sim_lives *lives = context;
    /* The sync of the first superblock is listed twice: it reveals what was not durable earlier. */
    static const enum lh_store_phase syncs[] = {
        LH_STORE_PHASE_SYNC_DATA, LH_STORE_PHASE_SYNC_MANIFEST, LH_STORE_PHASE_SYNC_SUPERBLOCK,
        LH_STORE_PHASE_SYNC_SUPERBLOCK, LH_STORE_PHASE_SYNC_SUPERBLOCK_COPY};
    const struct lh_sim_crash *crash = &lives->opts.crash;
    uint64_t now = lives->run.world.fired_count;
    bool is_committing = lh_store_is_committing(lives->run.store);
    bool is_over = lives->was_committing && !is_committing;
    if (is_committing && !lives->was_committing) {
        lives->commit_count++;
        lives->commit_from = now;
    }
    lives->was_committing = is_committing;
    if (crash->where == LH_SIM_CRASH_OPEN)
        return true; /* opening made fewer calls than `after` */
    if (crash->where == LH_SIM_CRASH_EDIT)
        return lives->script.edit_count > 0;
    if (crash->where == LH_SIM_CRASH_EVENTS)
        return now >= lives->began + crash->after;
    if (crash->where == LH_SIM_CRASH_COPY)
        return lives->target.is_begun && lives->target.is_over;
    if (crash->where == LH_SIM_CRASH_SYNC)
        return lives->commit_count >= crash->commit &&
               lives->run.store->phase == syncs[crash->after % LH_COUNT_OF(syncs)];
    return crash->where == LH_SIM_CRASH_COMMIT && lives->commit_count >= crash->commit &&
           (is_over || (is_committing && now >= lives->commit_from + crash->after));
}

static bool hangs(void *context)
{
    return ((const struct lh_sim_lives *)context)->drives.hang_count > 0;
}

static void job_done(void *context, struct lh_exec_job *job)
{
    (void)context;
    job->run(job);
}

const struct lh_sim_hooks lh_sim_lives_hooks = {
    LH_SIM_SCRIPT_HOOKS,
    .use_made = lh_sim_script_use_made,
    .gradient_made = lh_sim_script_gradient_made,
    .use_begun = lh_sim_script_use_begun,
    .use_ended = lh_sim_script_use_ended,
    .closing = lh_sim_script_closing,
    .traced = traced,
    .memory_mapped = memory_mapped,
    .engine_described = engine_described,
    .has_died = has_died,
    .quiet = quiet,
    .trained = trained,
    .stops = stops,
    .hangs = hangs,
    .request_begun = lh_sim_drives_request_begun,
    .request_continued = lh_sim_drives_request_continued,
    .request_done = lh_sim_drives_request_done,
    .request_dropped = lh_sim_drives_request_dropped,
    .job_done = job_done,
    .copy_taken = lh_sim_copies_copy_taken,
    .copy_begun = lh_sim_copies_copy_begun,
    .copy_ended = lh_sim_copies_copy_ended,
    .dev_is_dead = lh_sim_copies_dev_is_dead,
};

int lh_sim_lives_init(struct lh_sim_lives *lives, const struct lh_sim_lives_opts *opts,
                      struct lh_alloc *alloc, struct lh_error *err)
{
    struct lh_sim_run_opts run_opts = opts->run;
    *lives = (struct lh_sim_lives){.opts = *opts};
    LH_ASSERT(opts->reference && opts->run.saved.memory_bytes == 0);
    run_opts.hooks = opts->hooks ? opts->hooks : &lh_sim_lives_hooks;
    run_opts.hooks_context = lives;
    lh_sim_random_init(&lives->crash_random, opts->seed, LH_SIM_STREAM_CRASH);
    lh_sim_random_init(&lives->lives_random, opts->seed, LH_SIM_STREAM_LIVES);
    LH_TRY(lh_sim_run_prepare(&lives->run, &run_opts, alloc, err));
    lives->faults.world = &lives->run.world;
    lh_sim_trace_init(&lives->trace, opts->trace_bytes_max, alloc);
    lh_sim_disk_init(&lives->disk, &lives->faults, opts->run.machine.ssd_count);
    lh_sim_fs_init(&lives->fs, &lives->disk, opts->seed);
    lh_sim_drives_init(&lives->drives, &lives->disk, lh_sim_run_request_count_max(&lives->run),
                       alloc);
    return opts->has_snapshots ? lh_sim_target_init(&lives->target, &lives->faults, opts->reference,
                                                    &lives->fs, opts->seed, err)
                               : 0;
}

int lh_sim_lives_parts_create(struct lh_sim_lives *lives, bool calm, struct lh_error *err)
{
    const struct lh_sim_lives_opts *opts = &lives->opts;
    const struct lh_sim_faults *faults = calm ? NULL : &opts->faults;
    uint64_t seed = lh_sim_mix(opts->seed, ++lives->open_count);
    lh_sim_drives_restart(&lives->drives, faults, seed);
    lh_sim_copies_restart(&lives->copies, &lives->faults, faults, seed);
    LH_TRY(lh_sim_run_parts_create(&lives->run, err));
    const struct lh_sim_script_opts script_opts = {
        .train = &lives->run.train,
        .reference = opts->reference,
        .fs = &lives->fs,
        .target = lives->target.world ? &lives->target : NULL,
        .edit_dies_after = opts->crash.where == LH_SIM_CRASH_EDIT ? opts->crash.after : UINT64_MAX,
        .never_quits = calm,
        .chances = opts->chances,
        .seed = seed,
    };
    lh_sim_script_init(&lives->script, &script_opts, lives->run.alloc);
    return 0;
}

void lh_sim_lives_ended(struct lh_sim_lives *lives, enum lh_sim_end end)
{
    static const enum lh_sim_outcome outcomes[] = {
        [LH_SIM_END_DONE] = LH_SIM_OUTCOME_DONE,
        [LH_SIM_END_FAILED] = LH_SIM_OUTCOME_FAILED,
        [LH_SIM_END_STOPPED] = LH_SIM_OUTCOME_CRASHED,
        [LH_SIM_END_STUCK] = LH_SIM_OUTCOME_STUCK,
    };
    lives->outcomes[outcomes[end]]++;
    lives->is_crashed = end == LH_SIM_END_STOPPED || end == LH_SIM_END_STUCK;
    lives->is_done = end == LH_SIM_END_DONE;
    lives->is_failed = end == LH_SIM_END_FAILED;
}

enum lh_sim_end lh_sim_lives_drive(struct lh_sim_lives *lives, struct lh_error *err)
{
    lives->began = lives->run.world.fired_count;
    enum lh_sim_end end = lh_sim_run_drive(&lives->run, err);
    if (end == LH_SIM_END_FAILED && lh_engine_error(lives->run.engine, NULL) == 0)
        *err = lives->script.err;
    if (end != LH_SIM_END_BROKEN)
        lh_sim_lives_ended(lives, end);
    return end;
}

void lh_sim_lives_stop(struct lh_sim_lives *lives)
{
    const struct lh_sim_crash *crash = &lives->opts.crash;
    if (lives->is_crashed)
        lh_sim_fs_kill(&lives->fs);
    else
        lh_sim_target_cancel(&lives->target);
    lh_sim_target_stop(&lives->target, !crash->is_kill, crash->tears, &lives->crash_random);
    bool is_untouched = !lives->run.io || (lives->drives.write_count == 0 &&
                                           lives->script.edit_count == 0 && !lives->is_failed);
    uint64_t fault_count = lh_sim_fault_count(&lives->faults);
    if (lives->run.engine)
        lives->committed_step = lives->run.engine->committed_step;
    if (crash->where == LH_SIM_CRASH_CLOSE)
        lh_sim_fs_kill_after(&lives->fs, crash->after);
    lh_sim_run_stop(&lives->run);
    lh_sim_script_deinit(&lives->script, lives->run.alloc);
    bool is_closed =
        lives->is_done && !lives->fs.is_dead && lh_sim_fault_count(&lives->faults) == fault_count;
    lives->is_clean = is_closed || (lives->is_clean && is_untouched);
    lives->is_crashed = false;
    lives->is_done = false;
    lives->is_failed = false;
    lh_sim_fs_kill(&lives->fs);
    lh_sim_fault_add(&lives->faults, crash->is_kill ? LH_SIM_FAULT_KILL : LH_SIM_FAULT_POWER, 0, 0,
                     0);
    if (!crash->is_kill)
        lh_sim_disk_crash(&lives->disk, crash->tears, &lives->crash_random);
}

void lh_sim_lives_deinit(struct lh_sim_lives *lives)
{
    lives->opts.crash = (struct lh_sim_crash){0};
    if (lives->disk.world) {
        lh_sim_lives_stop(lives);
        lh_sim_disk_copy_free(&lives->disk, &lives->copy);
        lh_sim_disk_deinit(&lives->disk);
        lh_sim_target_deinit(&lives->target);
        lh_sim_drives_deinit(&lives->drives, lives->run.alloc);
        lh_sim_trace_deinit(&lives->trace, lives->run.alloc);
    }
    lh_sim_run_deinit(&lives->run);
}
