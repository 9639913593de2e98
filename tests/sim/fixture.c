#include "fixture.h"

#include "../c/lh_test.h"

uint64_t sim_between(struct lh_sim_random *random, uint64_t least, uint64_t most)
{
    return least + lh_sim_random_below(random, most - least + 1);
}

uint64_t sim_scaled(struct lh_sim_random *random, uint64_t least, uint64_t most)
{
    uint64_t value = least;
    while (value < most && lh_sim_random_below(random, 4) != 0)
        value *= 3;
    return value < most ? value : most;
}

uint64_t sim_seed(int argc, char **argv)
{
    char *end = NULL;
    uint64_t seed = argc == 2 ? strtoull(argv[1], &end, 10) : 0;
    if (argc != 2 || *end != '\0' || end == argv[1]) {
        fprintf(stderr, "usage: %s SEED\n", argv[0]);
        exit(2);
    }
    return seed;
}

void sim_require(int rc, const struct lh_error *err, const char *what)
{
    if (rc < 0) {
        fprintf(stderr, "%s: %s (%d)\n", what, err->message, rc);
        exit(1);
    }
}

struct lh_sim_machine sim_machine_random(struct lh_sim_random *random)
{
    struct lh_sim_machine machine = {
        .ssd_count = (uint32_t)sim_between(random, 1, 3),
        .ssd =
            {
                .bytes_per_s = {sim_scaled(random, UINT64_C(50000000), UINT64_C(7000000000)),
                                sim_scaled(random, UINT64_C(30000000), UINT64_C(5000000000))},
                .latency_ns = sim_scaled(random, 500, 300000),
                .queue_depth = (uint32_t)sim_scaled(random, 1, 64),
                .duplex = lh_sim_random_below(random, 3) == 0,
            },
        .sync_ns = sim_scaled(random, 1000, 5000000),
        .worker_count = (uint32_t)sim_between(random, 1, 4),
        .worker_bytes_per_s = sim_scaled(random, UINT64_C(100000000), UINT64_C(30000000000)),
    };
    if (lh_sim_random_below(random, 2) == 0)
        machine.cap_bytes_per_s = machine.ssd.bytes_per_s[0] * sim_between(random, 1, 4) / 2;
    return machine;
}

struct lh_sim_accelerator sim_accelerator_random(const struct lh_sim_model *model, uint64_t seed)
{
    struct lh_sim_random random;
    lh_sim_random_init(&random, seed, LH_SIM_STREAM_ACCELERATOR);
    if (lh_sim_random_below(&random, 2) == 0)
        return (struct lh_sim_accelerator){0};
    uint64_t all_bytes = 0;
    for (uint32_t i = 0; i < model->unit_count; i++)
        all_bytes += model->units[i].bytes;
    uint64_t bytes = lh_sim_model_region_bytes_min(model);
    if (lh_sim_random_below(&random, 2) == 0)
        bytes += lh_sim_random_below(&random, all_bytes - bytes + 1);
    struct lh_sim_accelerator accelerator = {
        .link =
            {
                .bytes_per_s = {sim_scaled(&random, UINT64_C(50000000), UINT64_C(25000000000)),
                                sim_scaled(&random, UINT64_C(50000000), UINT64_C(25000000000))},
                .latency_ns = sim_scaled(&random, 500, 100000),
                .queue_depth = (uint32_t)sim_between(&random, 1, 4),
                .duplex = lh_sim_random_below(&random, 3) > 0,
            },
        .bytes = bytes / LH_BLOCK_BYTES * LH_BLOCK_BYTES,
        .copy_count = (uint32_t)sim_scaled(&random, 1, 64),
        .is_ordered = lh_sim_random_below(&random, 2) == 0,
    };
    accelerator.gradients_in_memory =
        !accelerator.is_ordered && lh_sim_random_below(&random, 4) == 0;
    return accelerator;
}

uint64_t sim_host_bytes_random(const struct lh_sim_run_opts *run, struct lh_sim_random *random)
{
    struct lh_budget budget;
    struct lh_error err = {0};
    const struct lh_sim_accelerator *accelerator = &run->machine.accelerator;
    bool has_landings = accelerator->copy_count > 0 && !accelerator->gradients_in_memory;
    struct lh_sim_budget_opts opts = {.host_bytes = UINT64_C(1) << 40,
                                      .schedule = run->schedule,
                                      .commit_every = run->commit_every,
                                      .has_blocks = has_landings};
    sim_require(lh_sim_model_budget(run->model, &opts, &budget, &err), &err, "budget");
    uint64_t spare = budget.host_bytes_full - budget.host_bytes_min;
    bool is_least = lh_sim_random_below(random, 2) == 0;
    return budget.host_bytes_min + (is_least ? 0 : lh_sim_random_below(random, spare + 1));
}

void sim_case_make(struct sim_case *sim, uint64_t seed, const struct lh_sim_sizes *sizes)
{
    struct lh_sim_random random;
    struct lh_sim_random options;
    struct lh_error err = {0};
    *sim = (struct sim_case){.alloc = LH_ALLOC_INIT};
    lh_sim_random_init(&random, seed, LH_SIM_STREAM_MODEL);
    sim_require(lh_sim_model_random(&sim->model, sizes, &random, &sim->alloc, &err), &err, "model");
    struct lh_sim_accelerator accelerator = sim_accelerator_random(&sim->model, seed);
    sim_require(lh_sim_reference_init(&sim->reference, &sim->model, seed, &sim->alloc, &err), &err,
                "reference");
    sim->model.has_mixed_gradients = accelerator.copy_count == 0;
    lh_sim_random_init(&random, seed, LH_SIM_STREAM_OPTIONS);
    sim->opts = (struct lh_sim_lives_opts){.seed = seed, .reference = &sim->reference};
    sim->opts.run = (struct lh_sim_run_opts){
        .machine = sim_machine_random(&random),
        .model = &sim->model,
        .io_depth = (uint32_t)sim_scaled(&random, 1, 16),
        .transfer_bytes = sim_between(&random, 1, 4) * LH_MIB,
        .commit_every = sim_between(&random, 0, 4) == 0 ? sim_between(&random, 2, 3) : 1,
        .schedule = (enum lh_engine_schedule)lh_sim_random_below(&random, LH_ENGINE_SCHEDULE_COUNT),
        .step_last = sim_between(&random, 2, 5),
    };
    sim->opts.run.machine.accelerator = accelerator;
    lh_sim_random_init(&options, seed, LH_SIM_STREAM_EDITS);
    if (lh_sim_random_below(&options, 8) == 0)
        sim->opts.run.commit_every = LH_ENGINE_COMMIT_NEVER;
    sim->reference.has_scales = lh_sim_random_below(&options, 3) == 0;
    if (lh_sim_random_below(&options, 3) == 0)
        sim->model.scalar_bytes_max = lh_sim_random_below(&options, LH_SIM_SCALAR_BYTES_MAX + 1);
    sim->opts.run.host_bytes = sim_host_bytes_random(&sim->opts.run, &random);
    sim->random = random;
}

void sim_case_unmake(struct sim_case *sim)
{
    lh_sim_reference_deinit(&sim->reference);
    lh_sim_model_deinit(&sim->model);
    LH_CHECK(sim->alloc.live_count == 0);
}
