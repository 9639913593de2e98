/*
 * Test steps in virtual time of what changes the bytes of a step: moments in fewer bits, frozen
 * parameters that are read in their packed form, and micro-batches in both orders.
 */
#include "lh_test.h"
#include "sched/engine_private.h"
#include "sim/timing.h"

#define BLOCK_COUNT 6
#define COUNT (UINT64_C(3) << 20) /* the parameters of a block: three extents of scales */
#define ADAPTER_COUNT UINT64_C(8192)
#define MICRO_COUNT 3
#define COMPUTE_NS UINT64_C(40000000)
#define GB UINT64_C(1000000000)

/* What a model has besides its blocks of COUNT parameters. */
struct form {
    enum lh_adam_states states;
    bool is_packed; /* the parameters are frozen and in NF4, and each block has adapters */
    uint32_t step_count;
    uint32_t visit_count;
    uint64_t host_bytes;
};

static struct lh_unpack nf4(uint64_t count)
{
    return (struct lh_unpack){.format = LH_UNPACK_FORMAT_NIBBLES,
                              .dtype = LH_DTYPE_BF16,
                              .rounding = LH_DTYPE_BF16,
                              .rows = 1,
                              .columns = count,
                              .block_rows = 1,
                              .block_columns = 64,
                              .scale_type = LH_UNPACK_SCALE_NESTED,
                              .nested_block = 256};
}

static void blocks_add(struct lh_sim_model *model, const struct form *form)
{
    const struct lh_unpack packs[] = {nf4(COUNT),
                                      {.format = LH_UNPACK_FORMAT_RAW, .rows = 1, .columns = 6000}};
    const uint64_t count = form->is_packed ? ADAPTER_COUNT : COUNT;
    const struct lh_sim_unit_desc trained = {
        .dtype = LH_DTYPE_BF16, .counts = &count, .count = 1, .states = form->states};
    const struct lh_sim_unit_desc frozen = {
        .dtype = LH_DTYPE_BYTES, .packs = packs, .pack_count = LH_COUNT_OF(packs)};
    for (uint32_t i = 0; i < BLOCK_COUNT; i++) {
        struct lh_sim_block block = {.forward_ns = COMPUTE_NS, .backward_ns = 2 * COMPUTE_NS};
        block.units[block.unit_count++] = lh_sim_model_unit_add(model, &trained);
        if (form->is_packed)
            block.units[block.unit_count++] = lh_sim_model_unit_add(model, &frozen);
        lh_sim_model_block_add(model, &block);
        for (uint32_t j = 1; j < form->visit_count; j++)
            lh_sim_model_part_add(model, COMPUTE_NS, 2 * COMPUTE_NS);
    }
    model->has_sums = form->step_count > 0;
}

/* Time a step of a model; *read_out: what a load of all its units reads. */
static struct lh_sim_timing step_time(const struct form *form, uint64_t *read_out)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_sim_model model;
    struct lh_sim_timing timing = {0};
    struct lh_error err = {0};
    const struct lh_sim_model_opts model_opts = {
        .unit_max = 2 * BLOCK_COUNT,
        .param_max = 2 * BLOCK_COUNT,
        .block_max = BLOCK_COUNT,
        .part_max = BLOCK_COUNT * MICRO_COUNT,
        .scales_max = (uint32_t)(BLOCK_COUNT * lh_sim_model_scales_count(COUNT)),
        .packed_max = BLOCK_COUNT,
    };
    const bool has_sums = form->step_count > 0;
    struct lh_sim_timing_opts opts = {
        .machine = {.ssd_count = 1,
                    .ssd = {.bytes_per_s = {6 * GB, 4 * GB},
                            .latency_ns = 80000,
                            .queue_depth = 64},
                    .sync_ns = 200000,
                    .worker_count = 4,
                    .worker_bytes_per_s = 8 * GB,
                    .accelerator = {.link = {.bytes_per_s = {20 * GB, 20 * GB},
                                             .latency_ns = 10000,
                                             .queue_depth = 64,
                                             .duplex = true},
                                    .bytes = 24 * LH_MIB,
                                    .copy_count = 64}},
        .model = &model,
        .host_bytes = form->host_bytes,
        .commit_every = 1,
        .schedule = has_sums ? LH_ENGINE_SCHEDULE_DEFERRED : LH_ENGINE_SCHEDULE_OPTIMIZED,
        .micro = {form->step_count, form->visit_count},
        .io_depth = 16,
        .transfer_bytes = 4 * LH_MIB,
    };
    LH_CHECK(lh_sim_model_init(&model, &model_opts, &alloc, &err) == 0);
    blocks_add(&model, form);
    int rc = lh_sim_timing_run(&opts, &alloc, &timing, &err);
    if (rc < 0)
        fprintf(stderr, "%s\n", err.message);
    LH_CHECK(rc == 0 && timing.plan_around_count == 0);
    *read_out = 0;
    for (uint32_t i = 0; i < model.unit_count; i++)
        *read_out += lh_sim_model_read_bytes(&model, i);
    lh_sim_model_deinit(&model);
    LH_CHECK(alloc.live_count == 0);
    for (int i = 0; rc == 0 && i < LH_ENGINE_LINK_COUNT; i++)
        LH_CHECK(timing.stats.bytes[i] == timing.stats.planned_bytes[i]);
    return timing;
}

/* The least main memory that a form works with. */
static uint64_t least_bytes(enum lh_adam_states states)
{
    return states == LH_ADAM_STATES_F32 ? 64 * LH_MIB : 48 * LH_MIB;
}

static void states_test(void)
{
    lh_test_name("moments in fewer bits are read and written in their own size, with their scales");
    const uint64_t moments[] = {8 * COUNT, 4 * COUNT, 2 * COUNT + COUNT / 16, COUNT + COUNT / 16};
    for (int states = LH_ADAM_STATES_F32; states < LH_ADAM_STATES_COUNT; states++) {
        uint64_t read;
        const struct form form = {.states = (enum lh_adam_states)states,
                                  .host_bytes = least_bytes((enum lh_adam_states)states)};
        struct lh_sim_timing timing = step_time(&form, &read);
        const uint64_t *bytes = timing.stats.bytes;
        uint64_t states_bytes = BLOCK_COUNT * (2 * COUNT + moments[states]);
        LH_CHECK(bytes[LH_ENGINE_LINK_STATE_READ] == states_bytes);
        LH_CHECK(bytes[LH_ENGINE_LINK_STATE_WRITE] == states_bytes);
        LH_CHECK(bytes[LH_ENGINE_LINK_PARAM_WRITE] == BLOCK_COUNT * 2 * COUNT);
        LH_CHECK(timing.ssd_bytes == 2 * (BLOCK_COUNT * 2 * COUNT + states_bytes));
    }
}

static void packed_test(void)
{
    lh_test_name("a packed base is read packed, and crosses the link decoded");
    uint64_t read;
    const struct form form = {.is_packed = true, .host_bytes = 26 * LH_MIB};
    struct lh_sim_timing timing = step_time(&form, &read);
    const uint64_t *bytes = timing.stats.bytes;
    const uint64_t scales = COUNT / 64 + 4 * (COUNT / 64 / 256) + 4 * (16 + 256);
    const uint64_t packed = lh_align_up(COUNT / 2 + 6000 + scales, LH_BLOCK_BYTES);
    const uint64_t adapters = 2 * ADAPTER_COUNT;
    LH_CHECK(read == BLOCK_COUNT * (packed + adapters));
    /* Some loads of packed units, and of adapters, for forward, backward and the update. */
    const uint64_t load_count = bytes[LH_ENGINE_LINK_PARAM_READ] / packed;
    LH_CHECK(load_count >= 2 && load_count <= 2 * BLOCK_COUNT);
    LH_CHECK(bytes[LH_ENGINE_LINK_PARAM_READ] % packed <= 3 * BLOCK_COUNT * adapters);
    LH_CHECK(bytes[LH_ENGINE_LINK_COPY_IN] >= 2 * 2 * COUNT);
    LH_CHECK(bytes[LH_ENGINE_LINK_PARAM_WRITE] == BLOCK_COUNT * adapters);
    LH_CHECK(bytes[LH_ENGINE_LINK_STATE_WRITE] == BLOCK_COUNT * 10 * ADAPTER_COUNT);
    LH_CHECK(timing.ssd_bytes == BLOCK_COUNT * (packed + 2 * 12 * ADAPTER_COUNT));

    lh_test_name("workers decode what has arrived: a step is longer if that takes long");
    LH_CHECK(timing.step_ns >= BLOCK_COUNT * 3 * COMPUTE_NS);
}

static void micro_test(void)
{
    lh_test_name("micro-batches copy a gradient each, and one after the other they read the model "
                 "as often; with all of them in a block at once it is read as for one");
    const uint64_t host_bytes = 160 * LH_MIB;
    uint64_t read;
    const struct form forms[] = {
        {.step_count = 1, .visit_count = 1, .host_bytes = host_bytes},
        {.step_count = MICRO_COUNT, .visit_count = 1, .host_bytes = host_bytes},
        {.step_count = 1, .visit_count = MICRO_COUNT, .host_bytes = host_bytes},
    };
    struct lh_sim_timing timings[3];
    for (int i = 0; i < 3; i++)
        timings[i] = step_time(&forms[i], &read);
    const uint64_t gradients = BLOCK_COUNT * 2 * COUNT;
    LH_CHECK(timings[0].stats.bytes[LH_ENGINE_LINK_COPY_OUT] == gradients);
    LH_CHECK(timings[1].stats.bytes[LH_ENGINE_LINK_COPY_OUT] == MICRO_COUNT * gradients);
    LH_CHECK(timings[2].stats.bytes[LH_ENGINE_LINK_COPY_OUT] == MICRO_COUNT * gradients);
    const enum lh_engine_link in = LH_ENGINE_LINK_COPY_IN;
    LH_CHECK(timings[1].stats.bytes[in] > 2 * timings[0].stats.bytes[in]);
    LH_CHECK(timings[2].stats.bytes[in] == timings[0].stats.bytes[in]);
    for (int i = 0; i < 3; i++) {
        LH_CHECK(timings[i].stats.bytes[LH_ENGINE_LINK_STATE_WRITE] ==
                 timings[0].stats.bytes[LH_ENGINE_LINK_STATE_WRITE]);
        LH_CHECK(timings[i].compute_ns == (i > 0 ? MICRO_COUNT : 1) * BLOCK_COUNT * 3 * COMPUTE_NS);
        LH_CHECK(timings[i].step_ns >= timings[i].compute_ns);
    }
    LH_CHECK(timings[2].step_ns < timings[1].step_ns);
    /* The sums are in main memory. */
    LH_CHECK(timings[0].budget.gradient_waiting_bytes == BLOCK_COUNT * 4 * COUNT);
}

static void refusal_test(void)
{
    lh_test_name("sums need an accelerator and a schedule that updates after the close");
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_sim_model model;
    struct lh_sim_timing timing;
    struct lh_error err = {0};
    const struct lh_sim_model_opts model_opts = {.unit_max = 6, .param_max = 6, .block_max = 6};
    const struct form form = {.step_count = 1, .visit_count = 1};
    LH_CHECK(lh_sim_model_init(&model, &model_opts, &alloc, &err) == 0);
    blocks_add(&model, &form);
    struct lh_sim_timing_opts opts = {
        .machine = {.ssd_count = 1}, .model = &model, .micro = {1, 1}, .host_bytes = GB};
    opts.schedule = LH_ENGINE_SCHEDULE_OPTIMIZED;
    opts.machine.accelerator.copy_count = 1;
    opts.machine.accelerator.bytes = GB;
    LH_CHECK(lh_sim_timing_run(&opts, &alloc, &timing, &err) == -EINVAL);
    opts.schedule = LH_ENGINE_SCHEDULE_DEFERRED;
    opts.micro.visit_count = 2;
    LH_CHECK(lh_sim_timing_run(&opts, &alloc, &timing, &err) == -EINVAL);
    opts.micro.visit_count = 1;
    opts.machine.accelerator.copy_count = 0;
    LH_CHECK(lh_sim_timing_run(&opts, &alloc, &timing, &err) == -EINVAL);
    lh_sim_model_deinit(&model);
    LH_CHECK(alloc.live_count == 0);
}

int main(void)
{
    states_test();
    packed_test();
    micro_test();
    refusal_test();
    return 0;
}
