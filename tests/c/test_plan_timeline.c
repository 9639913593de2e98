/* Test the length of a step for a choice: bounds, dependencies, and bytes. */
#include <math.h>

#include "lh_test.h"
#include "plan/cost_lohan.h"
#include "plan/policy.h"
#include "plan/timeline.h"
#include "plan_fixture.h"

#define ROUND_COUNT 300

/* Equal blocks of one layer each on a machine whose rates are told one by one. */
struct small {
    struct lh_alloc alloc;
    struct lh_plan_model model;
    struct lh_plan_machine machine;
    struct lh_plan_timeline timeline;
    struct lh_plan_choice choice;
};

#define SMALL_BLOCK_COUNT 16
#define SMALL_PARAM_COUNT 1000
#define SMALL_FLOP 1000000
#define FAST (UINT64_C(1) << 50)

static void small_begin(struct small *small)
{
    small->alloc = (struct lh_alloc)LH_ALLOC_INIT;
    LH_CHECK(lh_plan_model_init(&small->model, SMALL_BLOCK_COUNT, SMALL_BLOCK_COUNT, &small->alloc,
                                NULL) == 0);
    small->model.param_bytes = 2;
    small->model.residual_bytes = 2;
    for (uint32_t i = 0; i < SMALL_BLOCK_COUNT; i++) {
        small->model.blocks[i] = (struct lh_plan_block){i, 1, LH_PLAN_BLOCK_NONE};
        small->model.layers[i] = (struct lh_plan_layer){.param_count = SMALL_PARAM_COUNT,
                                                        .forward_flop = SMALL_FLOP,
                                                        .activation_bytes = 5000,
                                                        .is_inter_block = true};
    }
    small->machine = (struct lh_plan_machine){
        .gpu_flop_per_s = FAST,
        .gpu_bytes = FAST,
        .link_in_bytes_per_s = FAST,
        .link_out_bytes_per_s = FAST,
        .host_bytes = FAST,
        .adam_params_per_s = FAST,
        .ssd_count = 1,
        .ssd_read_bytes_per_s = FAST,
        .ssd_write_bytes_per_s = FAST,
    };
    LH_CHECK(lh_plan_timeline_init(&small->timeline, &small->model, &small->machine, &small->alloc,
                                   NULL) == 0);
    LH_CHECK(lh_plan_choice_init(&small->choice, &small->model, &small->alloc, NULL) == 0);
}

static void small_end(struct small *small)
{
    lh_plan_choice_deinit(&small->choice, &small->alloc);
    lh_plan_timeline_deinit(&small->timeline, &small->alloc);
    lh_plan_model_deinit(&small->model, &small->alloc);
    LH_CHECK(small->alloc.live_count == 0);
}

static struct lh_plan_step small_step(struct small *small)
{
    return lh_plan_timeline_step(&small->timeline, &small->choice);
}

static bool is_near(double value, double expected)
{
    return fabs(value - expected) <= 1e-6 * expected;
}

static void turns_are_not_hidden(void)
{
    lh_test_name("between backward and forward the first block's gradient, update and copy show");
    struct small small;
    small_begin(&small);
    small.machine.gpu_flop_per_s = SMALL_FLOP;
    small.machine.link_in_bytes_per_s = 2 * SMALL_PARAM_COUNT;
    small.machine.link_out_bytes_per_s = 2 * SMALL_PARAM_COUNT;
    small.machine.adam_params_per_s = SMALL_PARAM_COUNT;
    /* 16 forwards of 1 s, 16 backwards of 2 s; 1 s out, 1 s AdamW, 1 s in. */
    LH_CHECK(is_near(small_step(&small).iteration_s, 16 + 32 + 3));
    LH_CHECK(small_step(&small).bound_by == LH_PLAN_RESOURCE_GPU);

    lh_test_name("a serial step waits for all updates, and an overlapped one for the last");
    small.machine.link_in_bytes_per_s = FAST;
    small.machine.link_out_bytes_per_s = FAST;
    LH_CHECK(is_near(small_step(&small).iteration_s, 16 + 32 + 1));
    small.choice.schedule = LH_PLAN_SCHEDULE_SERIAL;
    LH_CHECK(is_near(small_step(&small).iteration_s, 16 + 32 + 16));

    lh_test_name("recomputation is the GPU's work in backward");
    small.choice.schedule = LH_PLAN_SCHEDULE_OPTIMIZED;
    small.choice.fates[2] = LH_PLAN_FATE_RECOMPUTE;
    LH_CHECK(is_near(small_step(&small).iteration_s, 16 + 32 + 1 + 1));
    LH_CHECK(small_step(&small).recompute_flop == SMALL_FLOP);
    small_end(&small);
}

static void backward_waits_for_activations(void)
{
    lh_test_name("a link that forward leaves idle does not fetch what backward waits for");
    struct small small;
    small_begin(&small);
    small.machine.gpu_flop_per_s = SMALL_FLOP / 4;
    small.machine.link_in_bytes_per_s = SMALL_PARAM_COUNT;
    for (uint32_t i = 0; i < SMALL_BLOCK_COUNT; i++) {
        small.model.layers[i].activation_bytes = 12 * SMALL_PARAM_COUNT;
        small.choice.fates[i] = LH_PLAN_FATE_SWAP_HOST;
        small.choice.blocks[i].has_host_p16 = true;
    }
    /* A block computes 4 s in forward and 8 s in backward; its transfers take 2 s, and 2 + 12 s. */
    struct lh_plan_step step = small_step(&small);
    LH_CHECK(is_near(step.busy_s[LH_PLAN_RESOURCE_IN], 16 * (2 + 14)));
    LH_CHECK(step.iteration_s > 16 * (4 + 14) - 3 * 4);

    lh_test_name("forward waits while activations leave more slowly than it computes");
    small.machine.link_in_bytes_per_s = FAST;
    small.machine.link_out_bytes_per_s = 2 * SMALL_PARAM_COUNT;
    small.machine.gpu_bytes = step.gpu_bytes;
    /* Offloading takes 6 s per block, before 8 s of backward, which hide the gradients. */
    LH_CHECK(small_step(&small).iteration_s > 16 * (6 + 8) - 3 * 6);
    lh_test_name("room on the GPU for all that leaves hides it during backward");
    small.machine.gpu_bytes += 2 * 16 * 12 * SMALL_PARAM_COUNT;
    LH_CHECK(is_near(small_step(&small).iteration_s, 16 * (4 + 8) + 1));
    small_end(&small);
}

static void naive_is_one_after_the_other(void)
{
    lh_test_name("naive updates take the sum of read, AdamW and write; optimized ones the most");
    struct small small;
    small_begin(&small);
    small.machine.ssd_read_bytes_per_s = 12 * SMALL_PARAM_COUNT;
    small.machine.ssd_write_bytes_per_s = 14 * SMALL_PARAM_COUNT;
    small.machine.adam_params_per_s = SMALL_PARAM_COUNT;
    struct lh_plan_step step = small_step(&small);
    /* P16 is read twice, 1/6 s each; then 1 s read and 1 s written, a block. */
    LH_CHECK(is_near(step.busy_s[LH_PLAN_RESOURCE_SSD], 16 * (2.0 + 1.0 / 3)));
    LH_CHECK(step.iteration_s < 16 * (2.0 + 1.0 / 3) + 1.5);
    small.choice.schedule = LH_PLAN_SCHEDULE_NAIVE;
    LH_CHECK(small_step(&small).iteration_s > 16 * 3.0);
    small_end(&small);
}

static void deferring_uses_forward(void)
{
    lh_test_name("updates that backward cannot hide are hidden by forward, all within one time");
    struct small small;
    small_begin(&small);
    small.machine.gpu_flop_per_s = SMALL_FLOP;
    /* All bytes of a step take as long as computation, 48 s; those of backward alone 45 of its 32.
     */
    small.machine.ssd_read_bytes_per_s = 10 * SMALL_PARAM_COUNT;
    small.machine.ssd_write_bytes_per_s = 10 * SMALL_PARAM_COUNT;
    double eager_s = small_step(&small).iteration_s;
    LH_CHECK(eager_s > 56);
    for (uint32_t i = 1; i < SMALL_BLOCK_COUNT; i += 4)
        small.choice.blocks[i].is_deferred = true;
    LH_CHECK(small_step(&small).iteration_s < 52);

    lh_test_name("updates that forward cannot hide either make it wait");
    for (uint32_t i = 0; i < SMALL_BLOCK_COUNT; i++)
        small.choice.blocks[i].is_deferred = true;
    LH_CHECK(small_step(&small).iteration_s > 41 + 32);

    lh_test_name("what is deferred waits in main memory, and moves the same bytes");
    struct lh_plan_step step = small_step(&small);
    for (uint32_t i = 0; i < SMALL_BLOCK_COUNT; i++)
        small.choice.blocks[i].is_deferred = false;
    struct lh_plan_step eager = small_step(&small);
    LH_CHECK(step.host_bytes == eager.host_bytes + 2 * SMALL_BLOCK_COUNT * SMALL_PARAM_COUNT);
    LH_CHECK(step.ssd_write_bytes == eager.ssd_write_bytes);
    small_end(&small);
}

static void bytes_are_the_papers(void)
{
    lh_test_name("states move 16 bytes in and 14 out a parameter; with residuals 14 and 12");
    const uint64_t count = SMALL_BLOCK_COUNT * SMALL_PARAM_COUNT;
    struct small small;
    small_begin(&small);
    struct lh_plan_step step = small_step(&small);
    LH_CHECK(step.ssd_read_bytes == 16 * count && step.ssd_write_bytes == 14 * count);
    LH_CHECK(step.link_in_bytes == 4 * count && step.link_out_bytes == 2 * count);
    LH_CHECK(step.ssd_bytes == 2 * 14 * count);
    small.choice.master_bytes = small.model.residual_bytes;
    step = small_step(&small);
    LH_CHECK(step.ssd_read_bytes == 14 * count && step.ssd_write_bytes == 12 * count);

    lh_test_name("frozen parameters are read packed and cross the link decoded, twice a step,"
                 " unless they are in memory; no commit writes them");
    uint64_t in_bytes = small_step(&small).link_in_bytes;
    uint64_t read_bytes = small_step(&small).ssd_read_bytes;
    uint64_t host_bytes = small_step(&small).host_bytes;
    uint64_t commit_bytes = small_step(&small).commit_bytes;
    small.model.layers[3].frozen_bytes = 8000;
    small.model.layers[3].frozen_read_bytes = 3000;
    LH_CHECK(small_step(&small).link_in_bytes == in_bytes + 2 * 8000);
    LH_CHECK(small_step(&small).ssd_read_bytes == read_bytes + 2 * 3000);
    small.choice.blocks[3].has_host_p16 = true;
    LH_CHECK(small_step(&small).ssd_read_bytes < read_bytes);
    LH_CHECK(small_step(&small).commit_bytes == commit_bytes + 2 * SMALL_PARAM_COUNT);
    LH_CHECK(small_step(&small).host_bytes >= host_bytes + 8000 + 2 * SMALL_PARAM_COUNT);
    small.choice.blocks[3].has_host_p16 = false;
    small.model.layers[3].frozen_bytes = 0;
    small.model.layers[3].frozen_read_bytes = 0;

    lh_test_name("activations move out and in, and over SSDs where they do not stay in memory");
    small.choice.fates[0] = LH_PLAN_FATE_SWAP_HOST;
    small.choice.fates[1] = LH_PLAN_FATE_SWAP_SSD;
    struct lh_plan_step swapped = small_step(&small);
    LH_CHECK(swapped.swapped_bytes == 10000 && swapped.swapped_ssd_bytes == 5000);
    LH_CHECK(swapped.link_in_bytes == step.link_in_bytes + 10000);
    LH_CHECK(swapped.link_out_bytes == step.link_out_bytes + 10000);
    LH_CHECK(swapped.ssd_read_bytes == step.ssd_read_bytes + 5000);
    LH_CHECK(swapped.ssd_write_bytes == step.ssd_write_bytes + 5000);
    LH_CHECK(swapped.host_bytes == step.host_bytes + 5000);
    LH_CHECK(step.gpu_bytes == swapped.gpu_bytes + 10000);

    lh_test_name("states in memory move nothing but with a commit, under a hundredth of the time");
    for (uint32_t i = 0; i < SMALL_BLOCK_COUNT; i++)
        small.choice.blocks[i] = (struct lh_plan_block_choice){
            .has_host_p16 = true, .has_host_master = true, .has_host_moments = true};
    small.machine.ssd_write_bytes_per_s = 1000;
    double without_s = small_step(&small).iteration_s;
    step = small_step(&small);
    LH_CHECK(step.ssd_read_bytes == 5000 && step.commit_bytes == 12 * count);
    double commit_s = (double)step.commit_bytes / 1000 / (double)step.commit_every;
    LH_CHECK(step.commit_every > 1 && commit_s < 0.01 * without_s);
    small_end(&small);
}

static void memory_is_checked(void)
{
    lh_test_name("a step that a tier has no room for is refused with both numbers");
    struct small small;
    small_begin(&small);
    struct lh_plan_step step = small_step(&small);
    struct lh_error err = {0};
    LH_CHECK(lh_plan_step_check(&step, &small.machine, &err) == 0);
    small.machine.gpu_bytes = step.gpu_bytes - 1;
    LH_CHECK(lh_plan_step_check(&step, &small.machine, &err) == -ENOSPC);
    LH_CHECK(strstr(err.message, "gpu_bytes") != NULL);
    small.machine.gpu_bytes = step.gpu_bytes;
    small.machine.ssd_bytes = step.ssd_bytes;
    LH_CHECK(lh_plan_step_check(&step, &small.machine, &err) == 0);
    small.machine.ssd_bytes--;
    LH_CHECK(lh_plan_step_check(&step, &small.machine, &err) == -ENOSPC);
    small_end(&small);
}

static struct lh_plan_choice choice_random(const struct lh_plan_model *model, uint64_t *seed,
                                           struct lh_alloc *alloc)
{
    struct lh_plan_choice choice;
    LH_CHECK(lh_plan_choice_init(&choice, model, alloc, NULL) == 0);
    for (uint32_t i = 0; i < model->layer_count; i++)
        choice.fates[i] = (uint8_t)(lh_test_random(seed) % LH_PLAN_FATE_COUNT);
    for (uint32_t i = 0; i < model->block_count; i++) {
        uint64_t bits = lh_test_random(seed);
        choice.blocks[i] = (struct lh_plan_block_choice){.is_deferred = bits & 1,
                                                         .has_host_p16 = bits & 2,
                                                         .has_host_master = bits & 4,
                                                         .has_host_moments = bits & 8};
    }
    choice.master_bytes = lh_test_random(seed) % 2 ? 4 : 2;
    return choice;
}

static void steps_have_bounds(void)
{
    lh_test_name("a step takes at least its busiest resource, at most two stages and the turns");
    uint64_t seed = 7;
    for (int round = 0; round < ROUND_COUNT; round++) {
        struct lh_alloc alloc = LH_ALLOC_INIT;
        struct plan_fixture_shape shape = {1 + (uint32_t)(lh_test_random(&seed) % 9), 3};
        struct lh_plan_model model = plan_fixture_model(shape, round % 2, &seed, &alloc);
        struct lh_plan_machine machine = plan_fixture_machine(&model, &seed);
        struct lh_plan_timeline timeline;
        LH_CHECK(lh_plan_timeline_init(&timeline, &model, &machine, &alloc, NULL) == 0);
        struct lh_plan_choice choice = choice_random(&model, &seed, &alloc);
        struct lh_plan_step step = lh_plan_timeline_step(&timeline, &choice);
        double sum_s = 0;
        for (int i = 0; i < LH_PLAN_RESOURCE_COUNT; i++) {
            LH_CHECK(step.iteration_s >= step.busy_s[i]);
            LH_CHECK(step.busy_s[step.bound_by] >= step.busy_s[i]);
            sum_s += step.busy_s[i];
        }
        LH_CHECK(step.iteration_s <= 1.01 * sum_s);
        lh_plan_choice_deinit(&choice, &alloc);
        lh_plan_timeline_deinit(&timeline, &alloc);
        lh_plan_model_deinit(&model, &alloc);
    }
}

static void eager_steps_are_lohans(void)
{
    lh_test_name("with all updates eager a step takes what LoHan's equations say, but for turns");
    uint64_t seed = 11;
    for (int round = 0; round < ROUND_COUNT; round++) {
        struct lh_alloc alloc = LH_ALLOC_INIT;
        struct plan_fixture_shape shape = {100, 3};
        struct lh_plan_model model = plan_fixture_model(shape, false, &seed, &alloc);
        struct lh_plan_machine machine = plan_fixture_machine(&model, &seed);
        /* Effects that the equations do not consider. */
        machine.adam_params_per_s = FAST;
        machine.gpu_bytes = lh_plan_gpu_working_bytes(&model) +
                            4 * lh_plan_model_totals(&model).block_activation_bytes_max;
        struct lh_plan plan;
        if (lh_plan_make(&plan, &model, &machine, "lohan", &alloc, NULL) == 0) {
            /* If the first blocks' activations fill main memory, the SSDs are busier later. */
            LH_CHECK(fabs(plan.step.iteration_s - plan.policy_s) < 0.12 * plan.policy_s);
            lh_plan_deinit(&plan, &alloc);
        }
        lh_plan_model_deinit(&model, &alloc);
        LH_CHECK(alloc.live_count == 0);
    }
}

int main(void)
{
    turns_are_not_hidden();
    backward_waits_for_activations();
    naive_is_one_after_the_other();
    deferring_uses_forward();
    bytes_are_the_papers();
    memory_is_checked();
    steps_have_bounds();
    eager_steps_are_lohans();
    return 0;
}
