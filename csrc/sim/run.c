#include "sim/run.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "base/assert.h"
#include "sched/engine_private.h"

#define EVENT_MAX 8192
#define GARBAGE 0xa5
#define PLAN_AROUND_AFTER_NS UINT64_C(50000000)

static uint32_t job_max(const struct lh_sim_run *run)
{
    return 4 * run->opts.io_depth + run->budget.slab_count + 32;
}

static bool has_landings(const struct lh_sim_run *run)
{
    const struct lh_sim_accelerator *accelerator = &run->opts.machine.accelerator;
    return accelerator->copy_count > 0 && !accelerator->gradients_in_memory;
}

/* Timing only: addresses that nobody may touch; a byte that is moved after all ends the program. */
static int memory_map(const struct lh_sim_run *run, uint64_t bytes, uint8_t **memory_out,
                      struct lh_error *err)
{
    bool has_bytes = run->opts.reference != NULL;
    void *memory = mmap(NULL, bytes, has_bytes ? PROT_READ | PROT_WRITE : PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return lh_error_set(err, -errno, "cannot map %" PRIu64 " bytes", bytes);
    if (has_bytes)
        memset(memory, GARBAGE, bytes);
    *memory_out = memory;
    return 0;
}

/* Region, slabs and what gradients land in; the accelerator's. */
static int memories_map(struct lh_sim_run *run, struct lh_error *err)
{
    const struct lh_budget *budget = &run->budget;
    uint64_t needed = budget->region_bytes + budget->slab_count * budget->slab_bytes +
                      (has_landings(run) ? budget->gradient_bytes : 0);
    run->memory_bytes = lh_align_up(needed, LH_HUGE_PAGE_BYTES);
    LH_TRY(memory_map(run, run->memory_bytes, &run->memory, err));
    if (run->opts.saved.memory_bytes > 0)
        LH_TRY(memory_map(run, run->opts.saved.memory_bytes, &run->saved_memory, err));
    if (run->opts.machine.accelerator.copy_count == 0)
        return 0;
    return memory_map(run, run->opts.machine.accelerator.bytes, &run->device_memory, err);
}

static int dev_create(struct lh_sim_run *run, bool calm, struct lh_error *err)
{
    const struct lh_sim_accelerator *accelerator = &run->opts.machine.accelerator;
    struct lh_sim_dev_opts opts = {
        .world = &run->world,
        .link = accelerator->link,
        .copy_count = accelerator->copy_count,
        .is_ordered = accelerator->is_ordered,
        .moves_bytes = run->opts.reference != NULL,
        .seed = lh_sim_mix(run->opts.seed, run->open_count),
    };
    if (!calm)
        opts.faults = run->opts.faults;
    if (accelerator->copy_count == 0)
        return 0;
    return lh_sim_dev_create(&opts, run->alloc, &run->dev, err);
}

static int backends_create(struct lh_sim_run *run, bool calm, struct lh_error *err)
{
    const struct lh_sim_run_opts *opts = &run->opts;
    struct lh_sim_link_opts links[LH_SIM_DISK_FILE_COUNT_MAX];
    bool has_bytes = opts->reference != NULL;
    for (uint32_t i = 0; i < opts->machine.ssd_count; i++)
        links[i] = opts->machine.ssd;
    struct lh_sim_io_opts io_opts = {
        .world = &run->world,
        .disk = has_bytes ? &run->disk : NULL,
        .links = links,
        .link_count = opts->machine.ssd_count,
        .file_count = (run->saved_store ? 2 : 1) * opts->machine.ssd_count,
        .cap_bytes_per_s = opts->machine.cap_bytes_per_s,
        .sync_ns = opts->machine.sync_ns,
        .queue_depth_max = opts->io_depth + 8 * LH_STORE_DIRECTORY_COUNT_MAX,
        .io_depth = opts->io_depth,
        .seed = lh_sim_mix(opts->seed, run->open_count),
    };
    if (!calm)
        io_opts.faults = opts->faults;
    LH_TRY(lh_sim_io_create(&io_opts, run->alloc, &run->io, err));
    LH_TRY(dev_create(run, calm, err));
    struct lh_sim_exec_opts exec_opts = {
        .world = &run->world,
        .worker_count = opts->machine.worker_count,
        .bytes_per_s = opts->machine.worker_bytes_per_s,
        .queue_depth_max = job_max(run),
        .run_jobs = has_bytes,
    };
    return lh_sim_exec_create(&exec_opts, run->alloc, &run->exec, err);
}

static int engine_create(struct lh_sim_run *run, struct lh_error *err)
{
    const struct lh_sim_run_opts *opts = &run->opts;
    const struct lh_sim_model *model = opts->model;
    struct lh_engine_opts engine_opts = {
        .units = model->units,
        .unit_count = model->unit_count,
        .params = model->params,
        .param_count = model->param_count,
        .group_count = LH_SIM_GROUP_COUNT,
        .budget = &run->budget,
        .memory = run->memory,
        .memory_bytes = run->memory_bytes,
        .store = run->store,
        .io = run->io,
        .exec = run->exec,
        .waker = &run->waker,
        .clock = lh_sim_world_clock(&run->world),
        .dev = run->dev,
        .device_memory = run->device_memory,
        .device_bytes = opts->machine.accelerator.bytes,
        .copy_count = opts->machine.accelerator.copy_count,
        .saved =
            {
                .memory = run->saved_memory,
                .memory_bytes = opts->saved.memory_bytes,
                .transit_bytes = opts->saved.transit_bytes,
                .store = run->saved_store,
                .file_first = opts->machine.ssd_count,
                .item_max = (uint32_t)lh_max_u64(model->saved_count, 1),
            },
        .gradients_in_memory = opts->machine.accelerator.gradients_in_memory,
        .io_depth = opts->io_depth,
        .transfer_bytes = opts->transfer_bytes,
        .commit_every = opts->commit_every,
        .schedule = opts->schedule,
        .verify = opts->reference != NULL,
        .trace_count = opts->trace_count,
        .manual = true,
    };
    run->engine_alloc = (struct lh_alloc)LH_ALLOC_INIT;
    LH_TRY(lh_engine_create(&engine_opts, &run->engine_alloc, &run->engine, err));
    lh_alloc_seal(&run->engine_alloc);
    lh_sim_io_commit_owner_set(run->io, run->engine);
    struct lh_sim_train_opts train_opts = {
        .world = &run->world,
        .model = model,
        .reference = opts->reference,
        .engine = run->engine,
        .dev = run->dev,
        .step_last = opts->step_last,
        .saved_out_bytes = opts->saved.out_bytes,
        .saved_ahead_bytes = opts->saved.ahead_bytes,
        .gradient_ahead_bytes = run->budget.gradient_ahead_bytes,
        .nowhere = run->memory,
        .waits_for_updates = opts->schedule == LH_ENGINE_SCHEDULE_SERIAL,
        .chances = opts->chances,
        .seed = lh_sim_mix(opts->seed, run->open_count),
    };
    LH_TRY(lh_sim_train_init(&run->train, &train_opts, run->alloc, err));
    return lh_sim_check_init(&run->check, &run->world, model, run->engine, run->io, err);
}

/* Everything on an open store. */
static int parts_create(struct lh_sim_run *run, bool calm, struct lh_error *err)
{
    run->open_count++;
    LH_TRY(memories_map(run, err));
    LH_TRY(backends_create(run, calm, err));
    return engine_create(run, err);
}

static int store_create(struct lh_sim_run *run, struct lh_error *err)
{
    const struct lh_sim_run_opts *opts = &run->opts;
    if (!opts->reference)
        return lh_sim_store_create_unreal(opts->model, opts->machine.ssd_count, run->alloc,
                                          &run->store, err);
    LH_TRY(lh_sim_store_create(opts->reference, opts->directories, opts->machine.ssd_count,
                               run->alloc, &run->store, err));
    return lh_sim_store_load(run->store, &run->world, &run->disk, err);
}

/* One extent, without files. */
static int saved_store_create(struct lh_sim_run *run, struct lh_error *err)
{
    struct lh_store_extent_desc extent = {
        .bytes = lh_align_up(run->opts.saved.ssd_bytes, LH_BLOCK_BYTES)};
    struct lh_store_group_desc group = {.slot_count = 1};
    const struct lh_sim_model model = {
        .unit_count = 1, .extents = &extent, .extent_count = 1, .groups = &group};
    LH_ASSERT(run->opts.saved.memory_bytes == 0 || !run->opts.reference);
    if (extent.bytes == 0)
        return 0;
    return lh_sim_store_create_unreal(&model, run->opts.machine.ssd_count, run->alloc,
                                      &run->saved_store, err);
}

int lh_sim_run_init(struct lh_sim_run *run, const struct lh_sim_run_opts *opts,
                    struct lh_alloc *alloc, struct lh_error *err)
{
    *run = (struct lh_sim_run){.opts = *opts, .alloc = alloc, .waker = {.fd = -1}};
    LH_ASSERT(opts->machine.ssd_count <= LH_SIM_DISK_FILE_COUNT_MAX);
    lh_sim_random_init(&run->crash_random, opts->seed, LH_SIM_STREAM_CRASH);
    struct lh_sim_budget_opts budget_opts = {.host_bytes = opts->host_bytes,
                                             .schedule = opts->schedule,
                                             .commit_every = opts->commit_every,
                                             .has_blocks = has_landings(run)};
    LH_TRY(lh_sim_model_budget(opts->model, &budget_opts, &run->budget, err));
    LH_TRY(lh_sim_world_init(&run->world, alloc, EVENT_MAX, opts->trace_bytes_max, err));
    LH_TRY(store_create(run, err));
    LH_TRY(saved_store_create(run, err));
    return parts_create(run, false, err);
}

/* Until nothing moves at this time. */
static void settle(struct lh_sim_run *run)
{
    bool moved = true;
    while (moved && !lh_sim_world_has_failed(&run->world)) {
        moved = lh_engine_poll(run->engine) && lh_engine_error(run->engine, NULL) == 0;
        moved |= lh_sim_train_poll(&run->train);
    }
}

static void quiet_check(struct lh_sim_run *run)
{
    if (lh_engine_error(run->engine, NULL) < 0)
        return; /* it only takes back what is in flight */
    lh_sim_check_quiet(&run->check);
    lh_sim_io_check(run->io);
    lh_sim_exec_check(run->exec);
    if (run->dev)
        lh_sim_dev_check(run->dev);
}

/* Training is over: nothing wrong was read and kept for parameters. */
static void end_check(struct lh_sim_run *run)
{
    uint32_t flips = lh_sim_io_flip_count(run->io, run->memory, run->budget.region_bytes);
    if (flips > 0)
        lh_sim_world_fail(&run->world,
                          "%" PRIu32 " blocks of parameters with a flipped bit were not reported",
                          flips);
    if (run->train.abort_count == 0)
        lh_sim_check_totals(&run->check);
}

enum lh_sim_end lh_sim_run_drive(struct lh_sim_run *run, struct lh_error *err)
{
    struct lh_sim_world *world = &run->world;
    uint64_t crash_at = run->opts.crash_after > 0 ? world->fired_count + run->opts.crash_after : 0;
    bool is_planned_around = false;
    for (;;) {
        settle(run);
        quiet_check(run);
        bool is_done = run->train.state == LH_SIM_TRAIN_STATE_DONE;
        if (is_done && !lh_sim_world_has_failed(world))
            end_check(run);
        if (lh_sim_world_has_failed(world))
            break;
        if (is_done)
            return LH_SIM_END_DONE;
        if (lh_engine_error(run->engine, err) < 0)
            return LH_SIM_END_FAILED;
        if (crash_at > 0 && world->fired_count >= crash_at)
            return LH_SIM_END_CRASHED;
        if (lh_sim_world_advance(world)) {
            is_planned_around = false;
        } else if (!is_planned_around) {
            /* What the engine's thread does when nothing has moved for a while. */
            is_planned_around = true;
            run->plan_around_count++;
            world->now_ns += PLAN_AROUND_AFTER_NS;
            lh_region_plan_around(run->engine);
        } else {
            lh_sim_check_hangs(&run->check, &run->train);
        }
    }
    if (err)
        *err = world->failure;
    return LH_SIM_END_BROKEN;
}

static void parts_destroy(struct lh_sim_run *run)
{
    lh_sim_check_deinit(&run->check);
    if (run->train.opts.model)
        lh_sim_train_deinit(&run->train, run->alloc);
    if (run->engine) {
        run->committed_step = run->engine->committed_step;
        LH_ASSERT(run->engine_alloc.refused_count == 0);
        lh_alloc_unseal(&run->engine_alloc);
        lh_engine_destroy(run->engine);
        LH_ASSERT(run->engine_alloc.live_count == 0);
    }
    if (run->exec)
        run->exec->ops->destroy(run->exec);
    if (run->io)
        run->io->ops->destroy(run->io);
    if (run->dev)
        run->dev->ops->destroy(run->dev);
    lh_store_close(run->store);
    lh_store_close(run->saved_store);
    if (run->saved_memory)
        munmap(run->saved_memory, run->opts.saved.memory_bytes);
    if (run->memory)
        munmap(run->memory, run->memory_bytes);
    if (run->device_memory)
        munmap(run->device_memory, run->opts.machine.accelerator.bytes);
    run->engine = NULL;
    run->exec = NULL;
    run->io = NULL;
    run->dev = NULL;
    run->store = NULL;
    run->memory = NULL;
    run->device_memory = NULL;
    run->saved_memory = NULL;
    run->saved_store = NULL;
}

void lh_sim_run_stop(struct lh_sim_run *run)
{
    if (run->io)
        lh_sim_io_crash(run->io, &run->crash_random);
    if (run->exec)
        lh_sim_exec_crash(run->exec);
    if (run->dev)
        lh_sim_dev_crash(run->dev);
    lh_sim_world_forget(&run->world);
    if (run->disk.file_count > 0)
        lh_sim_disk_crash(&run->disk, &run->crash_random);
    parts_destroy(run);
}

void lh_sim_run_deinit(struct lh_sim_run *run)
{
    lh_sim_run_stop(run);
    if (run->disk.world)
        lh_sim_disk_deinit(&run->disk);
    if (run->world.alloc)
        lh_sim_world_deinit(&run->world);
}

static int store_reopen(struct lh_sim_run *run, struct lh_error *err)
{
    struct lh_store_open_opts opts = {
        .directories = run->opts.directories,
        .directory_count = run->opts.machine.ssd_count,
        .allow_buffered = true,
    };
    for (uint32_t i = 0; i < run->disk.file_count; i++) {
        char path[LH_STORE_PATH_BYTES_MAX];
        snprintf(path, sizeof(path), "%s/lohan.data", run->opts.directories[i]);
        LH_TRY(lh_sim_disk_store(&run->disk, i, path, err));
    }
    lh_sim_disk_deinit(&run->disk);
    LH_TRY(lh_store_open(&opts, run->alloc, &run->store, err));
    uint64_t step = lh_store_step(run->store);
    if (step > run->opts.reference->step)
        return lh_error_set(err, -EPROTO,
                            "the store opens at step %" PRIu64 ", and only %" PRIu64 " were closed",
                            step, run->opts.reference->step);
    LH_TRY(lh_sim_reference_compare(run->opts.reference, run->store, err));
    if (step < run->committed_step)
        return lh_error_set(
            err, -ESTALE, "the store opens at step %" PRIu64 ", and step %" PRIu64 " was committed",
            step, run->committed_step);
    lh_sim_reference_return(run->opts.reference, step);
    return lh_sim_store_load(run->store, &run->world, &run->disk, err);
}

int lh_sim_run_reopen(struct lh_sim_run *run, bool calm, struct lh_error *err)
{
    LH_ASSERT(run->opts.reference && !run->engine);
    int rc = store_reopen(run, err);
    if (rc == 0)
        rc = parts_create(run, calm, err);
    if (rc < 0)
        lh_sim_run_stop(run);
    return rc;
}
