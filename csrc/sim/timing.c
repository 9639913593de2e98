#include "sim/timing.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"

/* By this step everything has been written once, and the order of uses has repeated. */
#define STEP 4
/* The same for schedule auto, with which the engine first tries one or two splits. */
#define STEP_AUTO 14
/* After this many steps, a commit no longer affects a step. */
#define WINDOW_MAX 4
/* The number of events between two calls of is_cancelled, which take some milliseconds. */
#define EVENT_COUNT 20000

/* The steps that are measured, and how often the engine commits while they run. */
struct window {
    uint64_t commit_every;
    uint64_t first; /* commits, unless commit_every is NEVER */
    uint64_t last;  /* lies between two commits, if such a step exists */
};

static struct window window_of(const struct lh_sim_timing_opts *opts)
{
    uint64_t settled = opts->schedule == LH_ENGINE_SCHEDULE_AUTO ? STEP_AUTO : STEP;
    if (opts->commit_every == LH_ENGINE_COMMIT_NEVER)
        return (struct window){LH_ENGINE_COMMIT_NEVER, settled, settled};
    uint64_t rarely = lh_align_up(settled, WINDOW_MAX);
    struct window window = {.commit_every = lh_min_u64(opts->commit_every, rarely)};
    window.first = lh_div_ceil(settled, window.commit_every) * window.commit_every;
    window.last = window.first + lh_min_u64(window.commit_every, WINDOW_MAX) - 1;
    return window;
}

/* Drive the run in slices, so that it can be cancelled. */
static int drive(struct lh_sim_run *run, const struct lh_sim_timing_opts *opts,
                 struct lh_error *err)
{
    for (;;) {
        switch (lh_sim_run_drive(run, err)) {
        case LH_SIM_END_DONE:
            return 0;
        case LH_SIM_END_FAILED:
            if (lh_engine_error(run->engine, err) < 0)
                return lh_engine_error(run->engine, err);
            return lh_error_set(err, run->train.rc,
                                "step %" PRIu64 " cannot be simulated: saved tensors have no place"
                                " (error %d)",
                                run->train.step + 1, -run->train.rc);
        case LH_SIM_END_BROKEN:
            (void)lh_error_prefix(err, "a bug in lohan, please report it");
            return -EPROTO;
        case LH_SIM_END_STUCK:
        case LH_SIM_END_STOPPED: /* the end of a slice; the run continues */
            if (opts->is_cancelled && opts->is_cancelled(opts->context))
                return lh_error_set(err, -EINTR, "the simulation was interrupted");
        }
    }
}

static uint64_t store_bytes(const struct lh_sim_model *model)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < model->extent_count; i++)
        bytes += model->extents[i].bytes * model->groups[model->extents[i].group].slot_count;
    for (uint32_t i = 0; i < model->packed_count; i++)
        bytes += model->files[i].bytes;
    return bytes;
}

static uint64_t written_bytes(const struct lh_engine_step_stats *stats)
{
    return stats->bytes[LH_ENGINE_LINK_PARAM_WRITE] + stats->bytes[LH_ENGINE_LINK_STATE_WRITE] +
           stats->bytes[LH_ENGINE_LINK_COMMIT_WRITE];
}

/* The cost of a commit: the window's time, minus that of as many steps like the window's last. */
static void commit_read(const struct lh_sim_run *run, const struct window *window,
                        struct lh_sim_timing *timing)
{
    const struct lh_sim_train_times *times = run->train.times;
    uint64_t count = window->last + 1 - window->first;
    uint64_t all_ns = times[(window->last + 1) % LH_SIM_STEP_COUNT_MAX].begin_ns -
                      times[window->first % LH_SIM_STEP_COUNT_MAX].begin_ns;
    uint64_t bytes = 0;
    for (uint64_t step = window->first; step <= window->last; step++)
        bytes += written_bytes(&run->check.last[step % LH_SIM_STEP_COUNT_MAX]);
    uint64_t between_bytes = count * written_bytes(&timing->stats);
    timing->commit_ns = all_ns - lh_min_u64(all_ns, count * timing->step_ns);
    timing->commit_write_bytes = bytes - lh_min_u64(bytes, between_bytes);
}

static void timing_read(const struct lh_sim_run *run, const struct window *window,
                        struct lh_sim_timing *timing)
{
    uint64_t step = window->last;
    const struct lh_sim_model *model = run->opts.model;
    const struct lh_sim_train_times *times = &run->train.times[step % LH_SIM_STEP_COUNT_MAX];
    const struct lh_sim_train_times *next = &run->train.times[(step + 1) % LH_SIM_STEP_COUNT_MAX];
    *timing = (struct lh_sim_timing){
        .begin_ns = times->begin_ns,
        .step_ns = next->begin_ns - times->begin_ns,
        .forward_ns = times->backward_ns - times->begin_ns,
        .backward_ns = times->close_ns - times->backward_ns,
        .close_wait_ns = times->closed_ns - times->close_ns,
        .forward_wait_ns = times->forward_wait_ns,
        .backward_wait_ns = times->backward_wait_ns,
        .gradient_wait_ns = times->gradient_wait_ns,
        .saved_wait_ns = times->saved_wait_ns,
        .stats = run->check.last[step % LH_SIM_STEP_COUNT_MAX],
        .budget = run->budget,
        .ssd_bytes = store_bytes(model),
        .plan_around_count = run->plan_around_count,
        .step = step,
    };
    LH_ASSERT(timing->stats.step == step);
    commit_read(run, window, timing);
    for (uint32_t i = 0; i < model->block_count; i++)
        timing->compute_ns += (model->blocks[i].forward_ns + model->blocks[i].backward_ns) *
                              lh_max_u64(run->opts.micro.step_count, 1);
}

/* Like drive(), for a cluster. */
static int cluster_drive(struct lh_sim_cluster *cluster, const struct lh_sim_timing_opts *opts,
                         struct lh_error *err)
{
    enum lh_sim_end end = LH_SIM_END_STOPPED;
    while (end == LH_SIM_END_STOPPED) {
        end = lh_sim_cluster_drive(cluster, err);
        if (end == LH_SIM_END_STOPPED && opts->is_cancelled && opts->is_cancelled(opts->context))
            return lh_error_set(err, -EINTR, "the simulation was interrupted");
    }
    if (end == LH_SIM_END_BROKEN) {
        (void)lh_error_prefix(err, "a bug in lohan, please report it");
        return -EPROTO;
    }
    return end == LH_SIM_END_DONE ? 0 : err->code;
}

static int cluster_time(const struct lh_sim_timing_opts *opts,
                        const struct lh_sim_run_opts *run_opts, const struct window *window,
                        struct lh_alloc *alloc, struct lh_sim_timing *timing_out,
                        struct lh_error *err)
{
    struct lh_sim_cluster *cluster = lh_alloc_zeroed(alloc, 1, sizeof(*cluster));
    if (!cluster)
        return lh_error_set(err, -ENOMEM, "no memory for a simulated cluster");
    struct lh_sim_cluster_opts cluster_opts = opts->cluster;
    cluster_opts.event_count_max = EVENT_COUNT;
    int rc = lh_sim_cluster_init(cluster, &cluster_opts, run_opts, alloc, err);
    if (rc == 0 && !opts->only_checks)
        rc = cluster_drive(cluster, opts, err);
    if (rc == 0 && !opts->only_checks) {
        const struct lh_sim_run *run = &lh_sim_cluster_member(cluster, 0, 0)->run;
        timing_read(run, window, timing_out);
        timing_out->net_bytes = cluster->mail.nodes[0].sent_bytes / run->opts.step_last;
        timing_out->trace_count = lh_engine_trace(run->engine, opts->trace, opts->trace_max);
    }
    lh_sim_cluster_deinit(cluster);
    lh_free(alloc, cluster);
    return rc;
}

static int one_time(const struct lh_sim_timing_opts *opts, const struct lh_sim_run_opts *run_opts,
                    const struct window *window, struct lh_alloc *alloc,
                    struct lh_sim_timing *timing_out, struct lh_error *err)
{
    LH_TRY(lh_sim_run_device_check(&opts->machine, opts->model, err));
    struct lh_sim_run *run = lh_alloc_zeroed(alloc, 1, sizeof(*run));
    if (!run)
        return lh_error_set(err, -ENOMEM, "no memory for a simulation");
    int rc = lh_sim_run_init(run, run_opts, alloc, err);
    if (rc == 0 && !opts->only_checks)
        rc = drive(run, opts, err);
    if (rc == 0 && !opts->only_checks) {
        timing_read(run, window, timing_out);
        timing_out->trace_count = lh_engine_trace(run->engine, opts->trace, opts->trace_max);
    }
    lh_sim_run_deinit(run);
    lh_free(alloc, run);
    return rc;
}

int lh_sim_timing_run(const struct lh_sim_timing_opts *opts, struct lh_alloc *alloc,
                      struct lh_sim_timing *timing_out, struct lh_error *err)
{
    *timing_out = (struct lh_sim_timing){0};
    struct window window = window_of(opts);
    struct lh_sim_run_opts run_opts = {
        .machine = opts->machine,
        .model = opts->model,
        .host_bytes = opts->host_bytes,
        .saved = opts->saved,
        .io_depth = opts->io_depth,
        .transfer_bytes = opts->transfer_bytes,
        .commit_every = window.commit_every,
        .schedule = opts->schedule,
        .micro = opts->micro,
        .step_last = window.last + 1,
        .event_count_max = EVENT_COUNT,
        .trace_count = opts->trace_max,
    };
    return opts->cluster.node_count > 0
               ? cluster_time(opts, &run_opts, &window, alloc, timing_out, err)
               : one_time(opts, &run_opts, &window, alloc, timing_out, err);
}
