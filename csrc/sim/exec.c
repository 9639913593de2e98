#include "sim/exec.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"

struct sim_exec;

struct worker {
    struct sim_exec *exec;
    struct lh_exec_job *job; /* NULL: idle */
};

struct sim_exec {
    struct lh_exec exec; /* the first member, because the caller's pointer points to it */
    struct lh_alloc *alloc;
    struct lh_sim_exec_opts opts;
    struct worker *workers;
    struct lh_exec_job **waiting;
    uint32_t waiting_count;
    struct lh_exec_job **done;
    uint32_t done_count;
    uint32_t running_count;
};

static struct lh_exec_job *list_shift(struct lh_exec_job **jobs, uint32_t *count)
{
    struct lh_exec_job *first = jobs[0];
    memmove((void *)jobs, (void *)(jobs + 1), --*count * sizeof(*jobs));
    return first;
}

static void job_done(void *context);

static void jobs_start(struct sim_exec *sim)
{
    struct lh_sim_world *world = sim->opts.world;
    for (uint32_t i = 0; i < sim->opts.worker_count && sim->waiting_count > 0; i++) {
        struct worker *worker = &sim->workers[i];
        if (worker->job)
            continue;
        worker->job = list_shift(sim->waiting, &sim->waiting_count);
        worker->job->worker_index = i;
        worker->job->started_ns = world->now_ns;
        sim->running_count++;
        uint64_t job_ns = lh_sim_transfer_ns(worker->job->work_bytes, sim->opts.bytes_per_s);
        lh_sim_world_at(world, world->now_ns + job_ns, job_done, worker);
    }
}

static void job_done(void *context)
{
    struct worker *worker = context;
    struct sim_exec *sim = worker->exec;
    struct lh_exec_job *job = worker->job;
    job->ended_ns = sim->opts.world->now_ns;
    LH_SIM_HOOK_CALL(sim->opts.world, job_done, job);
    lh_sim_world_trace(sim->opts.world, LH_SIM_TRACE_JOB, job->worker_index, job->work_bytes,
                       job->ended_ns - job->started_ns);
    worker->job = NULL;
    sim->running_count--;
    sim->done[sim->done_count++] = job;
    jobs_start(sim);
}

static int sim_submit(struct lh_exec *exec, struct lh_exec_job *job)
{
    struct sim_exec *sim = (struct sim_exec *)exec;
    if (sim->waiting_count + sim->running_count + sim->done_count == sim->opts.queue_depth_max)
        return -EAGAIN;
    sim->waiting[sim->waiting_count++] = job;
    jobs_start(sim);
    return 0;
}

static uint32_t sim_poll(struct lh_exec *exec, struct lh_exec_job **done, uint32_t done_max)
{
    struct sim_exec *sim = (struct sim_exec *)exec;
    uint32_t count = 0;
    while (count < done_max && sim->done_count > 0)
        done[count++] = list_shift(sim->done, &sim->done_count);
    return count;
}

static void sim_destroy(struct lh_exec *exec)
{
    struct sim_exec *sim = (struct sim_exec *)exec;
    LH_ASSERT(sim->running_count == 0);
    lh_free(sim->alloc, sim->workers);
    lh_free(sim->alloc, (void *)sim->waiting);
    lh_free(sim->alloc, (void *)sim->done);
    lh_free(sim->alloc, sim);
}

static const struct lh_exec_ops sim_ops = {
    .version = LH_EXEC_OPS_VERSION,
    .name = "simulator",
    .submit = sim_submit,
    .poll = sim_poll,
    .destroy = sim_destroy,
};

int lh_sim_exec_create(const struct lh_sim_exec_opts *opts, struct lh_alloc *alloc,
                       struct lh_exec **exec_out, struct lh_error *err)
{
    *exec_out = NULL;
    if (opts->worker_count == 0 || opts->bytes_per_s == 0)
        return lh_error_set(err, -EINVAL,
                            "%" PRIu32 " workers of %" PRIu64 " bytes/s: both must be above 0",
                            opts->worker_count, opts->bytes_per_s);
    struct sim_exec *sim = lh_alloc_zeroed(alloc, 1, sizeof(*sim));
    if (!sim)
        return lh_error_set(err, -ENOMEM, "no memory for simulated workers");
    sim->exec = (struct lh_exec){.ops = &sim_ops, .thread_count = opts->worker_count};
    sim->alloc = alloc;
    sim->opts = *opts;
    sim->workers = lh_alloc_zeroed(alloc, opts->worker_count, sizeof(*sim->workers));
    sim->waiting = lh_alloc_zeroed(alloc, opts->queue_depth_max, sizeof(struct lh_exec_job *));
    sim->done = lh_alloc_zeroed(alloc, opts->queue_depth_max, sizeof(struct lh_exec_job *));
    if (!sim->workers || !sim->waiting || !sim->done) {
        sim_destroy(&sim->exec);
        return lh_error_set(err, -ENOMEM, "no memory for %" PRIu32 " simulated workers",
                            opts->worker_count);
    }
    for (uint32_t i = 0; i < opts->worker_count; i++)
        sim->workers[i].exec = sim;
    *exec_out = &sim->exec;
    return 0;
}

void lh_sim_exec_drop(struct lh_exec *exec)
{
    struct sim_exec *sim = (struct sim_exec *)exec;
    for (uint32_t i = 0; i < sim->opts.worker_count; i++)
        sim->workers[i].job = NULL;
    sim->waiting_count = 0;
    sim->running_count = 0;
    sim->done_count = 0;
}

void lh_sim_exec_check(struct lh_exec *exec)
{
    struct sim_exec *sim = (struct sim_exec *)exec;
    if (sim->waiting_count > 0 && sim->running_count < sim->opts.worker_count)
        lh_sim_world_fail(sim->opts.world,
                          "%" PRIu32 " jobs wait while only %" PRIu32 " of %" PRIu32 " workers run",
                          sim->waiting_count, sim->running_count, sim->opts.worker_count);
    if (sim->done_count > 0)
        lh_sim_world_fail(sim->opts.world, "%" PRIu32 " finished jobs were not polled",
                          sim->done_count);
}
