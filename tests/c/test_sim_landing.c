/*
 * Test gradients that arrive in scarce memory, in virtual time. Half of the parameters have no
 * gradient in a step, so most updates become due at the close, while some of their units' gradients
 * are still on the accelerator, which makes one copy at a time.
 */
#include "lh_test.h"
#include "lives/lives.h"

#define SEED_COUNT 400
#define STEP_COUNT 30
#define BLOCK_COUNT 2
#define UNIT_PARAM_COUNT 3
#define PARAM_ELEMENTS_MAX 600

static uint32_t unit_add(struct lh_sim_model *model, struct lh_sim_random *random)
{
    uint64_t counts[UNIT_PARAM_COUNT];
    for (uint32_t i = 0; i < UNIT_PARAM_COUNT; i++)
        counts[i] = 1 + lh_sim_random_below(random, PARAM_ELEMENTS_MAX);
    return lh_sim_model_unit_add(model, &(struct lh_sim_unit_desc){.dtype = LH_DTYPE_F32,
                                                                   .counts = counts,
                                                                   .count = UNIT_PARAM_COUNT});
}

static void model_make(struct lh_sim_model *model, struct lh_sim_random *random,
                       struct lh_alloc *alloc)
{
    const uint32_t unit_count = BLOCK_COUNT * LH_SIM_BLOCK_UNIT_COUNT_MAX;
    const struct lh_sim_model_opts opts = {.unit_max = unit_count,
                                           .param_max = unit_count * UNIT_PARAM_COUNT,
                                           .block_max = BLOCK_COUNT};
    LH_CHECK(lh_sim_model_init(model, &opts, alloc, NULL) == 0);
    for (uint32_t i = 0; i < BLOCK_COUNT; i++) {
        struct lh_sim_block block = {
            .unit_count = LH_SIM_BLOCK_UNIT_COUNT_MAX, .forward_ns = 10000, .backward_ns = 20000};
        for (uint32_t j = 0; j < block.unit_count; j++)
            block.units[j] = unit_add(model, random);
        lh_sim_model_block_add(model, &block);
    }
}

/* A slow drive and a slow worker; a few slabs and blocks more than the minimum. */
static struct lh_sim_run_opts opts_make(const struct lh_sim_model *model,
                                        struct lh_sim_random *random)
{
    const struct lh_sim_budget_opts budget_opts = {
        .host_bytes = UINT64_C(1) << 40, .commit_every = 1, .has_blocks = true};
    struct lh_budget budget;
    LH_CHECK(lh_sim_model_budget(model, &budget_opts, &budget, NULL) == 0);
    uint64_t spare = (budget.host_bytes_full - budget.host_bytes_min) / 4;
    return (struct lh_sim_run_opts){
        .machine =
            {
                .ssd_count = 1,
                .ssd = {.bytes_per_s = {UINT64_C(450000000), UINT64_C(5000000000)},
                        .latency_ns = 1500,
                        .queue_depth = 3},
                .sync_ns = 1000,
                .worker_count = 1,
                .worker_bytes_per_s = UINT64_C(100000000),
                .accelerator = {.link = {.bytes_per_s = {UINT64_C(450000000),
                                                         UINT64_C(12000000000)},
                                         .latency_ns = 13500,
                                         .queue_depth = 4,
                                         .duplex = true},
                                .bytes = lh_sim_model_region_bytes_min(model),
                                .copy_count = 1,
                                .is_ordered = true},
            },
        .model = model,
        .host_bytes = budget.host_bytes_min + lh_sim_random_below(random, spare + 1),
        .io_depth = 4,
        .transfer_bytes = LH_MIB,
        .commit_every = 1,
        .schedule = LH_ENGINE_SCHEDULE_OPTIMIZED,
        .step_last = STEP_COUNT,
    };
}

static bool seed_ends(uint64_t seed)
{
    static const struct lh_sim_hooks hooks = {LH_SIM_SCRIPT_HOOKS};
    static struct lh_sim_lives lives; /* only its run and its script are used */
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_sim_model model;
    struct lh_sim_random random;
    struct lh_error err = {0};
    lh_sim_random_init(&random, seed, LH_SIM_STREAM_MODEL);
    model_make(&model, &random, &alloc);
    struct lh_sim_run_opts opts = opts_make(&model, &random);
    opts.hooks = &hooks;
    opts.hooks_context = &lives;
    LH_CHECK(lh_sim_run_init(&lives.run, &opts, &alloc, &err) == 0);
    const struct lh_sim_script_opts script_opts = {
        .train = &lives.run.train,
        .chances = {.skip_ppm = 500000},
        .seed = lh_sim_mix(seed, 1),
    };
    lh_sim_script_init(&lives.script, &script_opts, &alloc);
    enum lh_sim_end end = lh_sim_run_drive(&lives.run, &err);
    if (end != LH_SIM_END_DONE)
        fprintf(stderr, "seed %" PRIu64 ": %s\n", seed, err.message);
    lh_sim_run_deinit(&lives.run);
    lh_sim_script_deinit(&lives.script, &alloc);
    lh_sim_model_deinit(&model);
    LH_CHECK(alloc.live_count == 0);
    return end == LH_SIM_END_DONE;
}

int main(void)
{
    lh_test_name("an update that has begun gets the rest of its gradients, although another unit "
                 "waits for a block: every step ends");
    uint32_t stuck_count = 0;
    for (uint64_t seed = 0; seed < SEED_COUNT; seed++)
        stuck_count += !seed_ends(seed);
    printf("  %u of %d runs do not end\n", stuck_count, SEED_COUNT);
    LH_CHECK(stuck_count == 0);
    return 0;
}
