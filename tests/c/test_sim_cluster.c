/*
 * Test clusters in virtual time: the processes of a mirror have, to the nanosecond, the times of
 * all processes of the cluster in which every node is simulated, for random clusters. Nodes send
 * and compute what the division of states says, and other configurations are refused.
 */
#include "lh_test.h"
#include "sim/cluster.h"

#define NODE_COUNT_MAX 8
#define CASE_COUNT 120
#define UNIT_COUNT_MAX 12

/* A random cluster, and what runs on it. */
struct sample {
    uint64_t seed;
    uint64_t drawn_count;
    struct lh_sim_model model;
    struct lh_sim_cluster_opts cluster;
    struct lh_sim_run_opts run;
};

/* The end of a run, and how far it came. */
struct outcome {
    int rc;
    enum lh_sim_end end;
    struct lh_error err;
};

static struct lh_alloc alloc = LH_ALLOC_INIT;
static uint64_t done_count;
static uint64_t refused_count;

static uint64_t below(struct sample *sample, uint64_t limit)
{
    return lh_sim_mix(sample->seed, ++sample->drawn_count) % limit;
}

static uint64_t between(struct sample *sample, uint64_t least, uint64_t most)
{
    return least + below(sample, most - least + 1);
}

/* A number of any order of magnitude. */
static uint64_t scaled(struct sample *sample, uint64_t least, uint64_t most)
{
    while (most / 4 > least && below(sample, 3) > 0)
        most /= 4;
    return between(sample, least, most);
}

static void blocks_draw(struct sample *sample)
{
    struct lh_sim_model *model = &sample->model;
    bool has_saved = below(sample, 3) == 0;
    for (uint32_t i = 0; i < model->unit_count; i++) {
        struct lh_sim_block block = {
            .units = {i, (uint32_t)below(sample, model->unit_count)},
            .unit_count = 1,
            .forward_ns = scaled(sample, 1000, 20000000),
            .backward_ns = scaled(sample, 1000, 40000000),
        };
        if (block.units[1] != i && below(sample, 4) == 0)
            block.unit_count = 2;
        lh_sim_model_block_add(model, &block);
        if (has_saved)
            lh_sim_model_saved_add(model, scaled(sample, 1, 4 * LH_MIB), LH_SAVED_TIER_MEMORY);
        if (below(sample, 3) == 0)
            lh_sim_model_part_add(model, scaled(sample, 1000, 20000000),
                                  scaled(sample, 1000, 40000000));
    }
}

static void model_draw(struct sample *sample)
{
    static const enum lh_dtype dtypes[] = {LH_DTYPE_BF16, LH_DTYPE_BF16, LH_DTYPE_F32,
                                           LH_DTYPE_F16};
    const struct lh_sim_model_opts opts = {.unit_max = UNIT_COUNT_MAX,
                                           .param_max = UNIT_COUNT_MAX,
                                           .block_max = UNIT_COUNT_MAX,
                                           .saved_max = UNIT_COUNT_MAX,
                                           .part_max = 2 * UNIT_COUNT_MAX};
    LH_CHECK(lh_sim_model_init(&sample->model, &opts, &alloc, NULL) == 0);
    uint64_t unit_count = between(sample, 1, UNIT_COUNT_MAX);
    enum lh_dtype dtype = dtypes[below(sample, LH_COUNT_OF(dtypes))];
    uint64_t frozen_share = below(sample, 3) == 0 ? 3 : UINT64_MAX;
    for (uint64_t i = 0; i < unit_count; i++) {
        uint64_t count = scaled(sample, 1, 3000000);
        bool is_frozen = i > 0 && below(sample, frozen_share) == 0;
        const struct lh_sim_unit_desc desc = {.dtype = is_frozen ? LH_DTYPE_BYTES : dtype,
                                              .always = below(sample, 8) == 0,
                                              .counts = &count,
                                              .count = 1};
        (void)lh_sim_model_unit_add(&sample->model, &desc);
    }
    blocks_draw(sample);
}

static void machine_draw(struct sample *sample)
{
    struct lh_sim_machine *machine = &sample->run.machine;
    *machine = (struct lh_sim_machine){
        .ssd_count = (uint32_t)between(sample, 1, 3),
        .ssd = {.bytes_per_s = {scaled(sample, 50000000, UINT64_C(7000000000)),
                                scaled(sample, 30000000, UINT64_C(5000000000))},
                .latency_ns = scaled(sample, 500, 300000),
                .queue_depth = (uint32_t)scaled(sample, 1, 64),
                .duplex = below(sample, 3) == 0},
        .sync_ns = scaled(sample, 1000, 5000000),
        .worker_count = (uint32_t)between(sample, 1, 4),
        .worker_bytes_per_s = scaled(sample, 100000000, UINT64_C(30000000000)),
    };
    if (below(sample, 3) == 0)
        return;
    /* Enough for the largest block of the undivided model three times over, or for everything. */
    uint64_t bytes = 4 * lh_sim_model_region_bytes_min(&sample->model) + 64 * LH_MIB;
    machine->accelerator = (struct lh_sim_accelerator){
        .link = {.bytes_per_s = {scaled(sample, 50000000, UINT64_C(25000000000)),
                                 scaled(sample, 50000000, UINT64_C(25000000000))},
                 .latency_ns = scaled(sample, 500, 100000),
                 .queue_depth = (uint32_t)between(sample, 1, 4),
                 .duplex = below(sample, 3) > 0},
        .bytes = lh_align_up(bytes, LH_BLOCK_BYTES),
        .copy_count = (uint32_t)scaled(sample, 1, 64),
    };
}

static void sample_draw(struct sample *sample, uint64_t seed)
{
    *sample = (struct sample){.seed = seed};
    model_draw(sample);
    sample->cluster = (struct lh_sim_cluster_opts){
        .node_count = (uint32_t)between(sample, 1, NODE_COUNT_MAX),
        .gpu_count = (uint32_t)between(sample, 1, 4),
        .micro_steps = (uint32_t)between(sample, 1, 3),
        .division = (enum lh_sim_division)below(sample, LH_SIM_DIVISION_COUNT),
        .card = {.latency_ns = below(sample, 4) == 0 ? 0 : scaled(sample, 1, 3000000),
                 .queue_depth = (uint32_t)scaled(sample, 1, 64)},
    };
    for (uint32_t i = 0; i < LH_SIM_DIRECTION_COUNT; i++)
        sample->cluster.card.bytes_per_s[i] = scaled(sample, 10000000, UINT64_C(50000000000));
    bool may_defer = sample->cluster.division == LH_SIM_DIVISION_WHOLE;
    sample->run = (struct lh_sim_run_opts){
        .model = &sample->model,
        .saved = {.memory_bytes = 256 * LH_MIB,
                  .out_bytes = scaled(sample, 4 * LH_MIB, 64 * LH_MIB),
                  .ahead_bytes = scaled(sample, 4 * LH_MIB, 64 * LH_MIB)},
        .io_depth = (uint32_t)scaled(sample, 1, 16),
        .transfer_bytes = between(sample, 1, 4) * LH_MIB,
        .commit_every = below(sample, 3) == 0 ? between(sample, 2, 3) : 1,
        .schedule = may_defer && below(sample, 2) == 0 ? LH_ENGINE_SCHEDULE_DEFERRED
                                                       : LH_ENGINE_SCHEDULE_SERIAL,
        .step_last = between(sample, 2, 4),
        .host_bytes = scaled(sample, 16 * LH_MIB, 4 * LH_GIB),
    };
    machine_draw(sample);
}

static struct outcome cluster_run(struct lh_sim_cluster *cluster, const struct sample *sample,
                                  bool is_mirror)
{
    struct lh_sim_cluster_opts opts = sample->cluster;
    struct outcome outcome = {0};
    opts.is_mirror = is_mirror;
    outcome.rc = lh_sim_cluster_init(cluster, &opts, &sample->run, &alloc, &outcome.err);
    if (outcome.rc == 0)
        outcome.end = lh_sim_cluster_drive(cluster, &outcome.err);
    return outcome;
}

static void members_compare(const struct lh_sim_member *one, const struct lh_sim_member *image)
{
    const struct lh_sim_run *run = &one->run;
    LH_CHECK(run->train.step == image->run.train.step);
    LH_CHECK(memcmp(run->train.times, image->run.train.times, sizeof(run->train.times)) == 0);
    LH_CHECK(memcmp(run->check.last, image->run.check.last, sizeof(run->check.last)) == 0);
    LH_CHECK(run->world.fired_count == image->run.world.fired_count);
}

static void clusters_compare(const struct lh_sim_cluster *full, const struct lh_sim_cluster *mirror)
{
    const struct lh_sim_node *image = &mirror->mail.nodes[0];
    LH_CHECK(full->mail.made_count == full->opts.node_count && mirror->mail.made_count == 1);
    for (uint32_t i = 0; i < full->opts.node_count; i++) {
        const struct lh_sim_node *node = &full->mail.nodes[i];
        LH_CHECK(node->received_ns == image->received_ns && node->sent_bytes == image->sent_bytes);
        LH_CHECK(memcmp(node->counts, image->counts, sizeof(node->counts)) == 0);
        for (uint32_t j = 0; j < full->opts.gpu_count; j++)
            members_compare(lh_sim_cluster_member(full, i, j), lh_sim_cluster_member(mirror, 0, j));
    }
}

static void case_run(uint64_t seed)
{
    static struct lh_sim_cluster full;
    static struct lh_sim_cluster mirror;
    struct sample sample;
    sample_draw(&sample, seed);
    struct outcome whole = cluster_run(&full, &sample, false);
    struct outcome image = cluster_run(&mirror, &sample, true);
    bool is_refused = whole.rc == -ENOSPC || (whole.rc == 0 && whole.end == LH_SIM_END_FAILED &&
                                              whole.err.code == -ENOSPC);
    if ((whole.rc < 0 || whole.end != LH_SIM_END_DONE) && !is_refused)
        printf("seed %" PRIu64 ": %d, end %d: %s\n", seed, whole.rc, (int)whole.end,
               whole.err.message);
    LH_CHECK(is_refused || (whole.rc == 0 && whole.end == LH_SIM_END_DONE));
    LH_CHECK(image.rc == whole.rc && image.end == whole.end);
    if (!is_refused)
        clusters_compare(&full, &mirror);
    done_count += !is_refused;
    refused_count += is_refused;
    lh_sim_cluster_deinit(&full);
    lh_sim_cluster_deinit(&mirror);
    lh_sim_model_deinit(&sample.model);
    LH_CHECK(alloc.live_count == 0);
}

/* --- A cluster whose figures can be calculated ------------------------------------------ */

#define SMALL_COUNT 5000 /* the elements of a unit, in shards of 2048 for three nodes and more */
#define SHARD_COUNT 2048
#define SMALL_BYTES_PER_S UINT64_C(1000000000)

/* Two units, one of them frozen, on nodes of two processes; a byte takes a nanosecond. */
static void small_make(struct sample *sample, enum lh_sim_division division, uint32_t node_count)
{
    const struct lh_sim_model_opts opts = {
        .unit_max = 2, .param_max = 2, .block_max = 2, .saved_max = 1};
    const uint64_t count = SMALL_COUNT;
    *sample = (struct sample){0};
    LH_CHECK(lh_sim_model_init(&sample->model, &opts, &alloc, NULL) == 0);
    for (uint32_t i = 0; i < 2; i++) {
        const struct lh_sim_unit_desc desc = {
            .dtype = i == 0 ? LH_DTYPE_BF16 : LH_DTYPE_BYTES, .counts = &count, .count = 1};
        (void)lh_sim_model_unit_add(&sample->model, &desc);
        lh_sim_model_block_add(&sample->model, &(struct lh_sim_block){.units = {i},
                                                                      .unit_count = 1,
                                                                      .forward_ns = 100000,
                                                                      .backward_ns = 200000});
    }
    sample->cluster = (struct lh_sim_cluster_opts){
        .node_count = node_count,
        .gpu_count = 2,
        .micro_steps = 3,
        .division = division,
        .card = {.bytes_per_s = {1, SMALL_BYTES_PER_S}, .latency_ns = 1000, .queue_depth = 64}};
    sample->run = (struct lh_sim_run_opts){
        .model = &sample->model,
        .io_depth = 8,
        .transfer_bytes = LH_MIB,
        .commit_every = 1,
        .schedule = LH_ENGINE_SCHEDULE_SERIAL,
        .step_last = 4,
        .host_bytes = LH_GIB,
        .machine = {
            .ssd_count = 1,
            .ssd = {.bytes_per_s = {SMALL_BYTES_PER_S, SMALL_BYTES_PER_S}, .queue_depth = 8},
            .worker_count = 1,
            .worker_bytes_per_s = SMALL_BYTES_PER_S}};
}

static void figures_test(enum lh_sim_division division, uint32_t node_count, uint64_t sent_bytes,
                         uint64_t updated_bytes)
{
    static struct lh_sim_cluster mirror;
    struct sample sample;
    small_make(&sample, division, node_count);
    struct outcome outcome = cluster_run(&mirror, &sample, true);
    LH_CHECK(outcome.rc == 0 && outcome.end == LH_SIM_END_DONE);
    uint64_t step_last = sample.run.step_last;
    LH_CHECK(mirror.mail.nodes[0].sent_bytes == step_last * sent_bytes);
    const struct lh_sim_member *owner = lh_sim_cluster_member(&mirror, 0, 0);
    const struct lh_sim_member *mate = lh_sim_cluster_member(&mirror, 0, 1);
    LH_CHECK(owner->run.check.last[step_last].update_busy_ns == updated_bytes);
    LH_CHECK(mate->run.check.last[step_last].update_busy_ns == 0);
    lh_sim_cluster_deinit(&mirror);
    lh_sim_model_deinit(&sample.model);
}

static void refused(struct sample *sample, int code, const char *message)
{
    static struct lh_sim_cluster cluster;
    struct lh_error err = {0};
    LH_CHECK(lh_sim_cluster_init(&cluster, &sample->cluster, &sample->run, &alloc, &err) == code);
    LH_CHECK(strstr(err.message, message) != NULL);
    lh_sim_cluster_deinit(&cluster);
    lh_sim_model_deinit(&sample->model);
}

static void refusals_test(void)
{
    struct sample sample;
    small_make(&sample, LH_SIM_DIVISION_SHARDS, 2);
    sample.run.schedule = LH_ENGINE_SCHEDULE_DEFERRED;
    refused(&sample, -EINVAL, "a cluster has schedule serial");
    small_make(&sample, LH_SIM_DIVISION_WHOLE, 2);
    sample.run.saved.ssd_bytes = LH_MIB;
    refused(&sample, -EINVAL, "have to fit in main memory");
    small_make(&sample, LH_SIM_DIVISION_WHOLE, LH_SIM_NODE_COUNT_MAX + 1);
    refused(&sample, -EINVAL, "at most 1024 nodes");
    small_make(&sample, LH_SIM_DIVISION_WHOLE, 2);
    sample.cluster.card.bytes_per_s[LH_SIM_DIRECTION_WRITE] = 0;
    refused(&sample, -EINVAL, "a card with a rate");
    small_make(&sample, LH_SIM_DIVISION_SHARDS, 2);
    struct lh_sim_block *block = &sample.model.blocks[0];
    block->unit_count = 3;
    block->units[1] = block->units[2] = 0;
    refused(&sample, -EINVAL, "at most 2 can be divided");
    small_make(&sample, LH_SIM_DIVISION_SHARDS, 2);
    sample.run.machine.accelerator =
        (struct lh_sim_accelerator){.copy_count = 1, .bytes = LH_BLOCK_BYTES};
    refused(&sample, -ENOSPC, "device memory for parameters is too small");
}

/* Memory runs out at every allocation in turn. */
static void memory_test(void)
{
    static struct lh_sim_cluster cluster;
    struct sample sample;
    struct lh_error err = {0};
    small_make(&sample, LH_SIM_DIVISION_SHARDS, 2);
    uint64_t before = alloc.live_count;
    int rc = -ENOMEM;
    for (int64_t after = 0; rc == -ENOMEM; after++) {
        alloc.fail_after = after;
        rc = lh_sim_cluster_init(&cluster, &sample.cluster, &sample.run, &alloc, &err);
        alloc.fail_after = -1;
        lh_sim_cluster_deinit(&cluster);
        LH_CHECK(alloc.live_count == before);
    }
    LH_CHECK(rc == 0);
    lh_sim_model_deinit(&sample.model);
}

int main(int argc, char **argv)
{
    lh_test_name("a mirror has the times of the whole cluster, to the nanosecond");
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
    uint64_t count = argc > 1 ? 1 : lh_test_is_fast() || LH_TEST_IS_SLOW ? 20 : CASE_COUNT;
    for (uint64_t seed = first; seed < first + count; seed++)
        case_run(seed);
    printf("  %" PRIu64 " clusters compared, %" PRIu64 " refused for lack of memory\n", done_count,
           refused_count);
    lh_test_name("a node sends gradients, agreement and values, and updates what its states are");
    /* Six gradients of two processes, and new values; AdamW moves 24 bytes an element, and the
     * values of the other three nodes 4. */
    const uint64_t shard_bytes = 2 * SHARD_COUNT;
    figures_test(LH_SIM_DIVISION_SHARDS, 4, 3 * (6 * shard_bytes + 64 + shard_bytes),
                 SHARD_COUNT * (24 + 3 * 4));
    /* All elements, rounded up. */
    figures_test(LH_SIM_DIVISION_WHOLE, 4, 3 * (6 * 3 * shard_bytes + 64), 3 * SHARD_COUNT * 24);
    figures_test(LH_SIM_DIVISION_SHARDS, 1, 0, 3 * SHARD_COUNT * 24);
    lh_test_name("what cannot be mirrored or does not fit raises an error that says why");
    refusals_test();
    lh_test_name("no memory: an error, and nothing leaks");
    memory_test();
    return 0;
}
