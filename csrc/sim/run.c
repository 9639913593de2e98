#include "sim/run.h"

#include <inttypes.h>
#include <sys/mman.h>

#include "base/assert.h"
#include "sched/engine_private.h"

#define EVENT_MAX 8192
/* Saved tensors that were dropped are held until their writes end, perhaps in a later step. */
#define SAVED_STEP_COUNT 8
#define PLAN_AROUND_AFTER_NS UINT64_C(50000000)

uint32_t lh_sim_run_request_count_max(const struct lh_sim_run *run)
{
    return run->opts.io_depth + 8 * LH_STORE_DIRECTORY_COUNT_MAX;
}

static uint32_t job_max(const struct lh_sim_run *run)
{
    return 4 * run->opts.io_depth + run->budget.slab_count + 32 +
           run->opts.model->packed_count * LH_IN_PLACE_JOB_COUNT;
}

static bool has_landings(const struct lh_sim_run *run)
{
    const struct lh_sim_accelerator *accelerator = &run->opts.machine.accelerator;
    return accelerator->copy_count > 0 && !accelerator->gradients_in_memory;
}

/* Whether the engine adds the gradients of several backwards. */
static bool makes_sums(const struct lh_sim_run *run)
{
    return run->opts.micro.step_count > 0;
}

/* The memory is inaccessible, so that moving a byte by mistake ends the program. */
static int memory_map(const struct lh_sim_run *run, uint64_t bytes, uint64_t used_bytes,
                      uint8_t **memory_out, struct lh_error *err)
{
    void *memory = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return lh_error_set(err, -errno, "cannot map %" PRIu64 " bytes", bytes);
    LH_SIM_HOOK_CALL(&run->world, memory_mapped, memory, bytes, used_bytes);
    *memory_out = memory;
    return 0;
}

/* Map main memory (region, slabs, gradients, saved tensors), and the accelerator's memory. */
static int memories_map(struct lh_sim_run *run, struct lh_error *err)
{
    const struct lh_budget *budget = &run->budget;
    uint64_t needed = budget->region_bytes + budget->slab_count * budget->slab_bytes +
                      (has_landings(run) || makes_sums(run) ? budget->gradient_bytes : 0);
    run->memory_bytes = lh_align_up(needed, LH_HUGE_PAGE_BYTES);
    LH_TRY(memory_map(run, run->memory_bytes, needed, &run->memory, err));
    if (run->opts.saved.memory_bytes > 0)
        LH_TRY(memory_map(run, run->opts.saved.memory_bytes, run->opts.saved.memory_bytes,
                          &run->saved_memory, err));
    if (run->opts.machine.accelerator.copy_count == 0)
        return 0;
    uint64_t device_bytes = run->opts.machine.accelerator.bytes;
    return memory_map(run, device_bytes, device_bytes, &run->device_memory, err);
}

static int dev_create(struct lh_sim_run *run, struct lh_error *err)
{
    const struct lh_sim_accelerator *accelerator = &run->opts.machine.accelerator;
    struct lh_sim_dev_opts opts = {
        .world = &run->world,
        .link = accelerator->link,
        .copy_count = accelerator->copy_count,
        .is_ordered = accelerator->is_ordered,
    };
    if (accelerator->copy_count == 0)
        return 0;
    return lh_sim_dev_create(&opts, run->alloc, &run->dev, err);
}

/* The files of a base follow those of the stores: each is on the next drive. */
static uint32_t packed_file_first(const struct lh_sim_run *run)
{
    return (run->saved_store ? 2 : 1) * run->opts.machine.ssd_count;
}

static int backends_create(struct lh_sim_run *run, struct lh_error *err)
{
    const struct lh_sim_run_opts *opts = &run->opts;
    struct lh_sim_link_opts links[LH_SIM_SSD_COUNT_MAX];
    for (uint32_t i = 0; i < opts->machine.ssd_count; i++)
        links[i] = opts->machine.ssd;
    struct lh_sim_io_opts io_opts = {
        .world = &run->world,
        .links = links,
        .link_count = opts->machine.ssd_count,
        .file_count = packed_file_first(run) + opts->model->packed_count,
        .cap_bytes_per_s = opts->machine.cap_bytes_per_s,
        .sync_ns = opts->machine.sync_ns,
        .queue_depth_max = lh_sim_run_request_count_max(run),
        .io_depth = opts->io_depth,
    };
    LH_TRY(lh_sim_io_create(&io_opts, run->alloc, &run->io, err));
    LH_TRY(dev_create(run, err));
    struct lh_sim_exec_opts exec_opts = {
        .world = &run->world,
        .worker_count = opts->machine.worker_count,
        .bytes_per_s = opts->machine.worker_bytes_per_s,
        .queue_depth_max = job_max(run),
    };
    return lh_sim_exec_create(&exec_opts, run->alloc, &run->exec, err);
}

static struct lh_engine_opts engine_describe(struct lh_sim_run *run)
{
    const struct lh_sim_run_opts *opts = &run->opts;
    const struct lh_sim_model *model = opts->model;
    const struct lh_budget *budget = &run->budget;
    uint64_t sums_offset = budget->region_bytes + budget->slab_count * budget->slab_bytes;
    return (struct lh_engine_opts){
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
                .item_max = SAVED_STEP_COUNT * (uint32_t)lh_max_u64(model->saved_count, 1),
            },
        .in_place =
            {
                .files = model->files,
                .file_count = model->packed_count,
                .file_first = packed_file_first(run),
                .units = model->in_place,
                .unit_count = model->packed_count,
            },
        .gradients_in_memory = opts->machine.accelerator.gradients_in_memory,
        .sum_memory = makes_sums(run) ? run->memory + sums_offset : NULL,
        .sum_bytes = makes_sums(run) ? budget->gradient_bytes : 0,
        .io_depth = opts->io_depth,
        .transfer_bytes = opts->transfer_bytes,
        .commit_every = opts->commit_every,
        .schedule = opts->schedule,
        .trace_count = opts->trace_count,
        .manual = true,
    };
}

static int engine_create(struct lh_sim_run *run, struct lh_error *err)
{
    const struct lh_sim_run_opts *opts = &run->opts;
    const struct lh_sim_model *model = opts->model;
    struct lh_engine_opts engine_opts = engine_describe(run);
    LH_SIM_HOOK_CALL(&run->world, engine_described, &engine_opts);
    run->engine_alloc = (struct lh_alloc)LH_ALLOC_INIT;
    LH_TRY(lh_engine_create(&engine_opts, &run->engine_alloc, &run->engine, err));
    lh_alloc_seal(&run->engine_alloc);
    lh_sim_io_commit_owner_set(run->io, &run->engine->commit_owner);
    struct lh_sim_train_opts train_opts = {
        .world = &run->world,
        .model = model,
        .engine = run->engine,
        .dev = run->dev,
        .micro = opts->micro,
        .step_last = opts->step_last,
        .saved_out_bytes = opts->saved.out_bytes,
        .saved_ahead_bytes = opts->saved.ahead_bytes,
        .gradient_ahead_bytes = run->budget.gradient_ahead_bytes,
        .nowhere = run->memory,
        .waits_for_updates = opts->schedule == LH_ENGINE_SCHEDULE_SERIAL,
        .never_commits = opts->never_commits,
    };
    LH_TRY(lh_sim_train_init(&run->train, &train_opts, run->alloc, err));
    return lh_sim_check_init(&run->check, &run->world, model, run->engine, run->io, err);
}

int lh_sim_run_parts_create(struct lh_sim_run *run, struct lh_error *err)
{
    LH_TRY(memories_map(run, err));
    LH_TRY(backends_create(run, err));
    return engine_create(run, err);
}

/* Create the store of saved tensors: one extent, without files. */
static int saved_store_create(struct lh_sim_run *run, struct lh_error *err)
{
    struct lh_store_extent_desc extent = {
        .bytes = lh_align_up(run->opts.saved.ssd_bytes, LH_BLOCK_BYTES)};
    struct lh_store_group_desc group = {.slot_count = 1};
    const struct lh_sim_model model = {
        .unit_count = 1, .extents = &extent, .extent_count = 1, .groups = &group};
    if (extent.bytes == 0)
        return 0;
    return lh_sim_store_create(&model, run->opts.machine.ssd_count, run->alloc, &run->saved_store,
                               err);
}

int lh_sim_run_device_check(const struct lh_sim_machine *machine, const struct lh_sim_model *model,
                            struct lh_error *err)
{
    const struct lh_sim_accelerator *accelerator = &machine->accelerator;
    uint64_t least = lh_sim_model_region_bytes_min(model);
    if (accelerator->copy_count == 0 || accelerator->bytes >= least)
        return 0;
    return lh_error_set(err, -ENOSPC,
                        "device memory for parameters is too small: %" PRIu64
                        " bytes, but this model needs at least %" PRIu64,
                        accelerator->bytes, least);
}

static int micro_check(const struct lh_sim_run_opts *opts, struct lh_error *err)
{
    const struct lh_sim_micro *micro = &opts->micro;
    bool defers = opts->schedule == LH_ENGINE_SCHEDULE_SERIAL ||
                  opts->schedule == LH_ENGINE_SCHEDULE_DEFERRED;
    bool is_good = defers && opts->machine.accelerator.copy_count > 0 && micro->visit_count > 0 &&
                   opts->model->has_sums;
    for (uint32_t i = 0; is_good && i < opts->model->block_count; i++)
        is_good = opts->model->blocks[i].part_count % micro->visit_count == 0;
    if (is_good || micro->step_count == 0)
        return 0;
    return lh_error_set(err, -EINVAL,
                        "%" PRIu32 " micro-batches, %" PRIu32
                        " in a visit of a block, need an accelerator, schedule serial or deferred,"
                        " and as many parts in each block",
                        micro->step_count, micro->visit_count);
}

int lh_sim_run_prepare(struct lh_sim_run *run, const struct lh_sim_run_opts *opts,
                       struct lh_alloc *alloc, struct lh_error *err)
{
    *run = (struct lh_sim_run){.opts = *opts, .alloc = alloc, .waker = {.fd = -1}};
    LH_ASSERT(opts->machine.ssd_count <= LH_SIM_SSD_COUNT_MAX);
    LH_TRY(micro_check(opts, err));
    if (makes_sums(run))
        run->opts.machine.accelerator.gradients_in_memory = true;
    struct lh_sim_budget_opts budget_opts = {.host_bytes = opts->host_bytes,
                                             .schedule = opts->schedule,
                                             .commit_every = opts->commit_every,
                                             .has_blocks = has_landings(run)};
    LH_TRY(lh_sim_model_budget(opts->model, &budget_opts, &run->budget, err));
    LH_TRY(lh_sim_world_init(&run->world, alloc, EVENT_MAX, err));
    run->world.hooks = opts->hooks;
    run->world.hooks_context = opts->hooks_context;
    return 0;
}

int lh_sim_run_init(struct lh_sim_run *run, const struct lh_sim_run_opts *opts,
                    struct lh_alloc *alloc, struct lh_error *err)
{
    LH_TRY(lh_sim_run_prepare(run, opts, alloc, err));
    LH_TRY(lh_sim_store_create(opts->model, opts->machine.ssd_count, run->alloc, &run->store, err));
    LH_TRY(saved_store_create(run, err));
    return lh_sim_run_parts_create(run, err);
}

/* Poll until nothing moves at the current time. */
static void settle(struct lh_sim_run *run)
{
    bool moved = true;
    while (moved && !lh_sim_world_has_failed(&run->world)) {
        moved = lh_engine_poll(run->engine) && lh_engine_error(run->engine, NULL) == 0;
        moved |= lh_sim_train_poll(&run->train);
    }
}

void lh_sim_run_quiet_check(struct lh_sim_run *run)
{
    if (lh_engine_error(run->engine, NULL) < 0)
        return; /* the engine only waits for what is in flight */
    LH_SIM_HOOK_CALL(&run->world, quiet);
    lh_sim_check_quiet(&run->check);
    lh_sim_io_check(run->io);
    lh_sim_exec_check(run->exec);
    if (run->dev)
        lh_sim_dev_check(run->dev);
}

enum lh_sim_end lh_sim_run_drive(struct lh_sim_run *run, struct lh_error *err)
{
    struct lh_sim_world *world = &run->world;
    uint64_t limit = run->opts.event_count_max;
    uint64_t end = limit > 0 ? world->fired_count + limit : UINT64_MAX;
    bool is_planned_around = false;
    for (;;) {
        settle(run);
        if (LH_SIM_HOOK_GET(world, false, has_died))
            return LH_SIM_END_STOPPED;
        lh_sim_run_quiet_check(run);
        bool is_done = run->train.state == LH_SIM_TRAIN_STATE_DONE;
        if (is_done && !lh_sim_world_has_failed(world) && LH_SIM_HOOK_GET(world, true, trained))
            lh_sim_check_totals(&run->check);
        if (lh_sim_world_has_failed(world))
            break;
        if (is_done)
            return LH_SIM_END_DONE;
        if (lh_engine_error(run->engine, err) < 0 || run->train.state == LH_SIM_TRAIN_STATE_FAILED)
            return LH_SIM_END_FAILED;
        if (LH_SIM_HOOK_GET(world, false, stops) || world->fired_count >= end)
            return LH_SIM_END_STOPPED;
        if (lh_sim_world_advance(world)) {
            is_planned_around = false;
        } else if (LH_SIM_HOOK_GET(world, false, hangs)) {
            /* A request that never completes is in flight, so the engine's thread waits for it. */
            return LH_SIM_END_STUCK;
        } else if (!is_planned_around) {
            /* In production, the engine's thread replans when nothing has moved for a while. */
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
        lh_sim_io_drop(run->io);
    if (run->exec)
        lh_sim_exec_drop(run->exec);
    if (run->dev)
        lh_sim_dev_drop(run->dev);
    lh_sim_world_forget(&run->world);
    parts_destroy(run);
}

void lh_sim_run_deinit(struct lh_sim_run *run)
{
    lh_sim_run_stop(run);
    if (run->world.alloc)
        lh_sim_world_deinit(&run->world);
}
