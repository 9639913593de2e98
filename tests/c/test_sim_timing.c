/* Test lh_sim_timing_run(): what ends a simulation early, and that nothing leaks then. */
#include "lh_test.h"
#include "sim_preset.h"
#include "sim/timing.h"

struct rig {
    struct lh_alloc alloc;
    struct lh_sim_model model;
    struct lh_sim_timing_opts opts;
    struct lh_sim_timing timing;
    struct lh_error err;
    uint32_t question_count;
};

static void rig_init(struct rig *rig, enum lh_sim_preset preset)
{
    struct lh_sim_run_opts run_opts;
    *rig = (struct rig){.alloc = LH_ALLOC_INIT};
    LH_CHECK(lh_sim_preset_make(preset, &rig->alloc, &rig->model, &run_opts, &rig->err) == 0);
    rig->opts = (struct lh_sim_timing_opts){
        .machine = run_opts.machine,
        .model = &rig->model,
        .host_bytes = run_opts.host_bytes,
        .commit_every = 1,
        .io_depth = run_opts.io_depth,
        .transfer_bytes = run_opts.transfer_bytes,
        .context = rig,
    };
}

static void rig_deinit(struct rig *rig)
{
    lh_sim_model_deinit(&rig->model);
    LH_CHECK(rig->alloc.live_count == 0);
}

static bool is_cancelled(void *context)
{
    struct rig *rig = context;
    return ++rig->question_count == 2;
}

static bool is_never_cancelled(void *context)
{
    struct rig *rig = context;
    rig->question_count++;
    return false;
}

static int rig_run(struct rig *rig)
{
    lh_error_clear(&rig->err);
    return lh_sim_timing_run(&rig->opts, &rig->alloc, &rig->timing, &rig->err);
}

static void test_cancel(void)
{
    static struct rig rig;
    rig_init(&rig, LH_SIM_PRESET_BALANCED);
    lh_test_name("being asked whether to continue changes no time");
    LH_CHECK(rig_run(&rig) == 0);
    const struct lh_sim_timing before = rig.timing;
    rig.opts.is_cancelled = is_never_cancelled;
    LH_CHECK(rig_run(&rig) == 0);
    LH_CHECK(rig.question_count > 0);
    LH_CHECK(memcmp(&before, &rig.timing, sizeof(before)) == 0);
    lh_test_name("who says so ends the run, and it says so");
    rig.question_count = 0;
    rig.opts.is_cancelled = is_cancelled;
    LH_CHECK(rig_run(&rig) == -EINTR && rig.err.code == -EINTR);
    LH_CHECK(rig.question_count == 2 && rig.timing.step_ns == 0);
    rig_deinit(&rig);
}

static void test_refusals(void)
{
    static struct rig rig;
    rig_init(&rig, LH_SIM_PRESET_PAPERS_13B);
    lh_test_name("too little main memory is refused with the least that works");
    uint64_t host_bytes = rig.opts.host_bytes;
    rig.opts.host_bytes = LH_MIB;
    LH_CHECK(rig_run(&rig) == -ENOSPC && strstr(rig.err.message, "at least"));
    rig.opts.host_bytes = host_bytes;
    lh_test_name("too little memory of an accelerator is refused with the least that works");
    uint64_t least = lh_sim_model_region_bytes_min(&rig.model);
    rig.opts.machine.accelerator.bytes = least - LH_BLOCK_BYTES;
    LH_CHECK(rig_run(&rig) == -ENOSPC && strstr(rig.err.message, "at least"));
    rig_deinit(&rig);
}

static void test_never(void)
{
    static struct rig rig;
    rig_init(&rig, LH_SIM_PRESET_BALANCED);
    lh_test_name("a run that never commits has the time of a step and none of a commit");
    LH_CHECK(rig_run(&rig) == 0);
    const struct lh_sim_timing committed = rig.timing;
    LH_CHECK(committed.stats.bytes[LH_ENGINE_LINK_COMMIT_WRITE] > 0);
    rig.opts.commit_every = LH_ENGINE_COMMIT_NEVER;
    LH_CHECK(rig_run(&rig) == 0);
    LH_CHECK(rig.timing.stats.bytes[LH_ENGINE_LINK_COMMIT_WRITE] == 0);
    LH_CHECK(rig.timing.commit_ns == 0 && rig.timing.commit_write_bytes == 0);
    LH_CHECK(rig.timing.compute_ns == committed.compute_ns);
    LH_CHECK(rig.timing.step_ns >= rig.timing.compute_ns);
    rig_deinit(&rig);
}

static void test_memory_runs_out(void)
{
    static struct rig rig;
    rig_init(&rig, LH_SIM_PRESET_BALANCED);
    rig.opts.is_cancelled = is_cancelled;
    lh_test_name("whichever allocation fails, nothing is left of the run");
    uint64_t live_count = rig.alloc.live_count;
    int rc = -ENOMEM;
    for (int64_t i = 0; rc == -ENOMEM; i++) {
        rig.question_count = 1; /* this is the second question, after which the run may end */
        rig.alloc.fail_after = i;
        rc = rig_run(&rig);
        LH_CHECK(rc == -ENOMEM || i > 10);
        LH_CHECK(rig.alloc.live_count == live_count);
    }
    LH_CHECK(rc == -EINTR);
    rig.alloc.fail_after = -1;
    rig_deinit(&rig);
}

int main(void)
{
    test_cancel();
    test_refusals();
    test_never();
    test_memory_runs_out();
    return 0;
}
