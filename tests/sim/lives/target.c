#include "lives/target.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "lives/store.h"

#define DRIVE_COUNT_MAX 2
#define PAUSE_NS_MAX 300000

/* Whether a fault happened that makes a call fail, or a drive return or store wrong bytes. */
static bool had_fault(const struct lh_sim_target *target)
{
    uint64_t faults = LH_SIM_FAULTS_UNDETECTED | LH_SIM_FAULTS_DAMAGE;
    static const enum lh_sim_fault others[] = {LH_SIM_FAULT_ERROR, LH_SIM_FAULT_SPACE,
                                               LH_SIM_FAULT_DROP, LH_SIM_FAULT_FLIP,
                                               LH_SIM_FAULT_DEAD};
    for (uint32_t i = 0; i < LH_COUNT_OF(others); i++)
        faults |= LH_SIM_FAULT_BIT_OF(others[i]);
    return lh_sim_fault_had(target->faults, faults);
}

int lh_sim_target_init(struct lh_sim_target *target, struct lh_sim_fault_log *faults,
                       const struct lh_sim_reference *reference, const struct lh_sim_fs *source_fs,
                       uint64_t seed, struct lh_error *err)
{
    struct lh_sim_world *world = faults->world;
    *target = (struct lh_sim_target){.world = world,
                                     .faults = faults,
                                     .reference = reference,
                                     .source_fs = source_fs,
                                     .is_over = true};
    lh_sim_random_init(&target->random, seed, LH_SIM_STREAM_TARGET);
    lh_sim_disk_init(&target->disk, faults,
                     1 + (uint32_t)lh_sim_random_below(&target->random, DRIVE_COUNT_MAX));
    lh_sim_fs_init(&target->fs, &target->disk, lh_sim_mix(seed, LH_SIM_STREAM_TARGET));
    uint64_t scalar_bytes = reference->model->scalar_bytes_max +
                            lh_scalars_overhead_bytes(reference->model->param_count);
    target->piece = lh_alloc_zeroed(world->alloc, 1, LH_SIM_TARGET_PIECE_BYTES);
    target->expected = lh_alloc_zeroed(world->alloc, 1, reference->state_bytes);
    target->scalars = lh_alloc_zeroed(world->alloc, 1, scalar_bytes);
    if (!target->piece || !target->expected || !target->scalars)
        return lh_error_set(err, -ENOMEM, "no memory for a copy of %" PRIu64 " bytes",
                            reference->state_bytes);
    return 0;
}

void lh_sim_target_deinit(struct lh_sim_target *target)
{
    if (!target->world)
        return;
    lh_sim_disk_deinit(&target->disk);
    lh_free(target->world->alloc, target->piece);
    lh_free(target->world->alloc, target->expected);
    lh_free(target->world->alloc, target->scalars);
    target->world = NULL;
}

/* Remove the files, as the user's process does after a failed copy or an interrupted one. */
static void files_remove(struct lh_sim_target *target)
{
    char path[LH_SIM_FS_PATH_BYTES + 16];
    for (uint32_t i = 0; i < target->disk.file_count; i++) {
        snprintf(path, sizeof(path), "%s/lohan.data", target->fs.directories[i]);
        (void)target->fs.fs.ops->remove(&target->fs.fs, path);
    }
}

static void copy_end(struct lh_sim_target *target)
{
    lh_store_close(target->store);
    lh_store_close(target->source);
    target->store = NULL;
    target->source = NULL;
    target->is_over = true;
}

void lh_sim_target_cancel(struct lh_sim_target *target)
{
    if (!target->world || target->is_over)
        return;
    copy_end(target);
    files_remove(target);
}

static void copy_fail(struct lh_sim_target *target, const struct lh_error *err)
{
    bool is_dead = target->fs.is_dead || target->source_fs->is_dead;
    if (!is_dead && !had_fault(target))
        lh_sim_world_fail(target->world, "a copy failed, and no fault explains it: %s",
                          err->message);
    lh_sim_target_cancel(target);
}

static int target_create(struct lh_sim_target *target, struct lh_error *err)
{
    struct lh_alloc *alloc = target->world->alloc;
    int rc = lh_sim_lives_store_create(target->reference, &target->fs, false, alloc, &target->store,
                                       err);
    if (rc != -EEXIST || target->is_whole)
        return rc;
    files_remove(target);
    return lh_sim_lives_store_create(target->reference, &target->fs, false, alloc, &target->store,
                                     err);
}

/* Returns 1 if a piece was copied, 0 if none is left. */
static int piece_copy(struct lh_sim_target *target, struct lh_error *err)
{
    const struct lh_sim_model *model = target->reference->model;
    for (; target->extent < model->extent_count; target->extent++, target->offset = 0) {
        struct lh_store_extent_desc extent = lh_store_extent(target->source, target->extent);
        uint32_t slot = lh_store_read_slot(target->source, extent.group);
        if (target->offset == extent.bytes ||
            lh_store_is_zero(target->source, target->extent, slot))
            continue;
        uint64_t bytes = lh_min_u64(LH_SIM_TARGET_PIECE_BYTES, extent.bytes - target->offset);
        LH_TRY(lh_store_read_sync(target->source, target->extent, target->offset, target->piece,
                                  bytes, err));
        LH_TRY(lh_store_write_sync(target->store, target->extent, target->offset, target->piece,
                                   bytes, err));
        target->offset += bytes;
        return 1;
    }
    return 0;
}

static void piece_next(void *context)
{
    struct lh_sim_target *target = context;
    struct lh_error err = {0};
    if (target->is_over)
        return;
    int rc = piece_copy(target, &err);
    if (rc > 0) {
        uint64_t pause_ns = lh_sim_random_below(&target->random, PAUSE_NS_MAX);
        lh_sim_world_at(target->world, target->world->now_ns + pause_ns, piece_next, target);
        return;
    }
    if (rc == 0)
        rc = lh_store_commit_sync(target->store, lh_store_step(target->source), target->scalars,
                                  target->scalar_bytes, &err);
    if (rc < 0) {
        copy_fail(target, &err);
        return;
    }
    target->is_whole = true;
    target->whole_count++;
    copy_end(target);
}

void lh_sim_target_copy(struct lh_sim_target *target, uint64_t step)
{
    struct lh_error err = {0};
    struct lh_store_open_opts opts = {
        .directories = target->source_fs->directories,
        .directory_count = target->source_fs->disk->file_count,
        .read_only = true,
        .is_held = true,
        .fs = &target->source_fs->fs,
    };
    target->is_begun = true;
    if (target->is_whole)
        return; /* a user would choose a new directory; here one copy is enough */
    target->is_over = false;
    target->extent = 0;
    target->offset = 0;
    int rc = lh_store_open(&opts, target->world->alloc, &target->source, &err);
    if (rc == 0 && lh_store_step(target->source) != step)
        rc = lh_error_set(&err, -EPROTO,
                          "step %" PRIu64 " is copied, but commits are held at step %" PRIu64,
                          lh_store_step(target->source), step);
    if (rc == 0)
        rc = target_create(target, &err);
    if (rc < 0) {
        copy_fail(target, &err);
        return;
    }
    const void *scalars = lh_store_scalars(target->source, &target->scalar_bytes);
    memcpy(target->scalars, scalars, target->scalar_bytes);
    memcpy(target->expected, lh_sim_reference_committed(target->reference, step),
           target->reference->state_bytes);
    lh_sim_world_at(target->world, target->world->now_ns, piece_next, target);
}

/* Whether nothing was committed to the store after its creation. */
static bool is_empty(const struct lh_store *store)
{
    for (uint32_t i = 0; i < lh_store_extent_count(store); i++) {
        uint32_t slot = lh_store_read_slot(store, lh_store_extent(store, i).group);
        if (!lh_store_is_zero(store, i, slot))
            return false;
    }
    return true;
}

static int contents_judge(struct lh_sim_target *target, struct lh_store *store,
                          struct lh_error *err)
{
    bool is_lossy = lh_sim_fault_had(target->faults, LH_SIM_FAULTS_UNDETECTED);
    if (is_empty(store)) {
        if (target->is_whole && !is_lossy)
            return lh_error_set(err, -EPROTO, "a copy reported as complete is empty");
        target->is_whole = false;
        target->left_count++;
        return 0;
    }
    uint64_t bytes = 0;
    const void *scalars = lh_store_scalars(store, &bytes);
    int rc = lh_sim_reference_compare_with(target->reference, store, target->expected, err);
    if (rc < 0 && rc != -EPROTO && is_lossy)
        return 0;
    if (rc < 0)
        return lh_error_prefix(err, "a copy that was committed");
    if (bytes != target->scalar_bytes || memcmp(scalars, target->scalars, bytes) != 0)
        return lh_error_set(err, -EPROTO, "a copy does not have the scalars of its step");
    target->is_whole = true;
    return 0;
}

/* Judge a store that cannot be opened: the next copy has to be able to replace this store. */
static int remains_judge(struct lh_sim_target *target, struct lh_error *err)
{
    if (lh_sim_fault_had(target->faults, LH_SIM_FAULTS_UNDETECTED)) {
        target->is_whole = false;
        return 0;
    }
    if (target->is_whole || (err->code != -ENOENT && err->code != -EINPROGRESS)) {
        const char *what = target->is_whole ? "a complete copy" : "the rest of a copy";
        (void)lh_error_prefix(err, "%s cannot be opened", what);
        return -EPROTO;
    }
    target->left_count += err->code == -EINPROGRESS;
    return 0;
}

/* Remove a complete copy after it was judged: the next copy goes to empty drives. */
static void whole_remove(struct lh_sim_target *target)
{
    for (uint32_t i = 0; i < target->disk.file_count && target->is_whole; i++) {
        struct lh_sim_disk_file *file = &target->disk.files[i];
        lh_sim_disk_name_set(&target->disk, &file->name, false);
        lh_sim_disk_name_sync(&file->name);
    }
    target->is_whole = false;
}

int lh_sim_target_restart(struct lh_sim_target *target, const struct lh_sim_faults *faults,
                          uint64_t dies_after, struct lh_error *err)
{
    struct lh_store *store = NULL;
    struct lh_store_open_opts opts = {.directories = target->fs.directories,
                                      .directory_count = target->disk.file_count,
                                      .fs = &target->fs.fs};
    for (uint32_t i = 0; i < target->disk.file_count; i++)
        target->disk.files[i].is_dead = false;
    lh_sim_fs_restart(&target->fs, NULL);
    int rc = lh_store_open(&opts, target->world->alloc, &store, err);
    rc = rc < 0 ? remains_judge(target, err) : contents_judge(target, store, err);
    lh_store_close(store);
    whole_remove(target);
    lh_sim_fs_restart(&target->fs, faults);
    if (dies_after != UINT64_MAX)
        lh_sim_fs_kill_after(&target->fs, dies_after);
    target->is_begun = false;
    return rc;
}

void lh_sim_target_stop(struct lh_sim_target *target, bool loses_power, bool tears,
                        struct lh_sim_random *random)
{
    if (!target->world)
        return;
    lh_sim_fs_kill(&target->fs);
    if (!target->is_over)
        copy_end(target);
    if (loses_power)
        lh_sim_disk_crash(&target->disk, tears, random);
}
