/* Test machines and models of plans: what is refused, the sums, and that nothing leaks. */
#include "lh_test.h"
#include "plan/machine.h"
#include "plan/policy.h"

#define BLOCK_COUNT 3
#define BLOCK_LAYER_COUNT 2
#define LAYER_COUNT (BLOCK_COUNT * BLOCK_LAYER_COUNT)

static struct lh_plan_machine machine_make(void)
{
    return (struct lh_plan_machine){
        .gpu_flop_per_s = 100,
        .gpu_bytes = LH_GIB,
        .link_in_bytes_per_s = 10,
        .link_out_bytes_per_s = 10,
        .host_bytes = LH_GIB,
        .adam_params_per_s = 5,
        .ssd_count = 3,
        .ssd_read_bytes_per_s = 4,
        .ssd_write_bytes_per_s = 3,
    };
}

static struct lh_plan_model model_make(struct lh_alloc *alloc)
{
    struct lh_plan_model model;
    LH_CHECK(lh_plan_model_init(&model, BLOCK_COUNT, LAYER_COUNT, alloc, NULL) == 0);
    model.param_bytes = 2;
    model.residual_bytes = 2;
    for (uint32_t i = 0; i < BLOCK_COUNT; i++)
        model.blocks[i] =
            (struct lh_plan_block){i * BLOCK_LAYER_COUNT, BLOCK_LAYER_COUNT, LH_PLAN_BLOCK_NONE};
    for (uint32_t i = 0; i < LAYER_COUNT; i++)
        model.layers[i] = (struct lh_plan_layer){.param_count = i + 1,
                                                 .forward_flop = 100,
                                                 .activation_bytes = 10 * (i + 1),
                                                 .working_bytes = i,
                                                 .is_inter_block = i % 2 == 1};
    return model;
}

static void machines_are_checked(void)
{
    lh_test_name("a machine's rates and capacities must be there, and the error names the field");
    struct lh_plan_machine machine = machine_make();
    struct lh_error err = {0};
    LH_CHECK(lh_plan_machine_check(&machine, &err) == 0);
    machine.link_out_bytes_per_s = 0;
    LH_CHECK(lh_plan_machine_check(&machine, &err) == -EINVAL);
    LH_CHECK(strstr(err.message, "link_out_bytes_per_s") != NULL);
    machine = machine_make();
    machine.ssd_count = 0;
    LH_CHECK(lh_plan_machine_check(&machine, &err) == -EINVAL);
    LH_CHECK(strstr(err.message, "ssd_count") != NULL);

    lh_test_name("SSDs add up to what their bus lets through");
    machine = machine_make();
    LH_CHECK(lh_plan_machine_read_bytes_per_s(&machine) == 12);
    LH_CHECK(lh_plan_machine_write_bytes_per_s(&machine) == 9);
    machine.ssd_total_bytes_per_s = 10;
    LH_CHECK(lh_plan_machine_read_bytes_per_s(&machine) == 10);
    LH_CHECK(lh_plan_machine_write_bytes_per_s(&machine) == 9);
}

static void models_are_checked(void)
{
    lh_test_name("blocks of a model are its layers in order, and a shared block is in front");
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_plan_model model = model_make(&alloc);
    struct lh_error err = {0};
    LH_CHECK(lh_plan_model_check(&model, &err) == 0);
    model.blocks[1].layer_first++;
    LH_CHECK(lh_plan_model_check(&model, &err) == -EINVAL);
    model.blocks[1].layer_first--;
    model.blocks[1].layer_count = 0;
    LH_CHECK(lh_plan_model_check(&model, &err) == -EINVAL);
    model.blocks[1].layer_count = BLOCK_LAYER_COUNT;
    model.blocks[2].layer_count--;
    LH_CHECK(lh_plan_model_check(&model, &err) == -EINVAL);
    model.blocks[2].layer_count++;
    model.blocks[1].shared_block = 1;
    LH_CHECK(lh_plan_model_check(&model, &err) == -EINVAL);
    model.blocks[1].shared_block = 0;
    LH_CHECK(lh_plan_model_check(&model, &err) == 0);

    lh_test_name("moments larger than fp32's, and more frozen FLOP than FLOP, are refused");
    model.moment_block_bytes = 8 * LH_PLAN_MOMENT_BLOCK + 1;
    LH_CHECK(lh_plan_model_check(&model, &err) == -EINVAL);
    model.moment_block_bytes = 8 * LH_PLAN_MOMENT_BLOCK;
    LH_CHECK(lh_plan_model_check(&model, &err) == 0);
    model.layers[1].frozen_flop = 101;
    LH_CHECK(lh_plan_model_check(&model, &err) == -EINVAL);
    model.layers[1].frozen_flop = 100;
    LH_CHECK(lh_plan_model_check(&model, &err) == 0);

    lh_test_name("sums that could overflow are refused");
    model.layers[3].param_count = UINT64_C(1) << 56;
    LH_CHECK(lh_plan_model_check(&model, &err) == -EINVAL);
    LH_CHECK(strstr(err.message, "param_count") != NULL);
    lh_plan_model_deinit(&model, &alloc);
    LH_CHECK(alloc.live_count == 0);
}

static void totals_are_sums(void)
{
    lh_test_name("totals are sums over layers, and the largest block's");
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_plan_model model = model_make(&alloc);
    struct lh_plan_totals totals = lh_plan_model_totals(&model);
    LH_CHECK(totals.param_count == 21);
    LH_CHECK(totals.forward_flop == 600);
    LH_CHECK(totals.activation_bytes == 210);
    LH_CHECK(totals.inter_block_activation_bytes == 120);
    LH_CHECK(totals.block_param_count_max == 11);
    LH_CHECK(totals.block_activation_bytes_max == 110);
    LH_CHECK(totals.block_gpu_bytes_max == 110 + 5);
    LH_CHECK(totals.backward_flop == 2 * 600 && totals.block_bytes_max == 2 * 11);
    LH_CHECK(totals.frozen_bytes == 0 && totals.moments_less_bytes == 0);

    lh_test_name("frozen parameters add to a block's bytes, and take one product in backward");
    model.layers[0].frozen_bytes = 100;
    model.layers[0].frozen_read_bytes = 30;
    model.layers[0].frozen_flop = 90;
    totals = lh_plan_model_totals(&model);
    LH_CHECK(totals.frozen_bytes == 100 && totals.frozen_read_bytes == 30);
    LH_CHECK(totals.backward_flop == 2 * 600 - 90);
    LH_CHECK(totals.block_bytes_max == 2 * (1 + 2) + 100);
    LH_CHECK(totals.block_param_count_max == 11);

    lh_test_name("moments have AdamW's 8 bytes, or a share of a block's, rounded up, or none");
    LH_CHECK(lh_plan_moment_bytes(&model, 65) == 520);
    model.moment_block_bytes = 132;
    LH_CHECK(lh_plan_moment_bytes(&model, 64) == 132 && lh_plan_moment_bytes(&model, 65) == 135);
    totals = lh_plan_model_totals(&model);
    LH_CHECK(totals.moments_less_bytes == 8 * 21 - 44);
    model.moment_block_bytes = 0;
    LH_CHECK(lh_plan_moment_bytes(&model, 65) == 0);
    LH_CHECK(lh_plan_model_totals(&model).moments_less_bytes == 8 * 21);

    lh_test_name("a rule of matrices leaves AdamW's moments to some, and its products take time");
    model.moment_block_bytes = 256;
    model.layers[0].others_count = model.layers[0].param_count;
    model.layers[0].products_count = 9;
    uint64_t own = lh_plan_block_param_count(&model, 0) - model.layers[0].param_count;
    LH_CHECK(lh_plan_block_moment_bytes(&model, 0) == 8 * model.layers[0].param_count + 4 * own);
    LH_CHECK(lh_plan_block_update_count(&model, 0) == lh_plan_block_param_count(&model, 0) + 9);
    totals = lh_plan_model_totals(&model);
    LH_CHECK(totals.update_count == 21 + 9);
    LH_CHECK(totals.moments_less_bytes == 4 * (21 - model.layers[0].param_count));
    lh_plan_model_deinit(&model, &alloc);
}

static void failures_leak_nothing(void)
{
    lh_test_name("a plan whose n-th allocation fails leaves nothing behind");
    struct lh_plan_machine machine = machine_make();
    for (const char *const *name = lh_plan_policy_names(); *name; name++) {
        int rc = -ENOMEM;
        for (int64_t n = 0; rc == -ENOMEM; n++) {
            struct lh_alloc alloc = LH_ALLOC_INIT;
            struct lh_plan_model model = model_make(&alloc);
            uint64_t live_count = alloc.live_count;
            struct lh_plan plan;
            alloc.fail_after = n;
            rc = lh_plan_make(&plan, &model, &machine, *name, &alloc, NULL);
            LH_CHECK(rc == 0 || (rc == -ENOMEM && alloc.live_count == live_count));
            if (rc == 0) {
                LH_CHECK(n > 0);
                lh_plan_deinit(&plan, &alloc);
            }
            lh_plan_model_deinit(&model, &alloc);
            LH_CHECK(alloc.live_count == 0);
        }
    }
}

static void refusals_say_the_way_out(void)
{
    lh_test_name("an unknown policy is refused with all names, too little memory with the need");
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_plan_machine machine = machine_make();
    struct lh_plan_model model = model_make(&alloc);
    uint64_t live_count = alloc.live_count;
    struct lh_plan plan;
    struct lh_error err = {0};
    LH_CHECK(lh_plan_make(&plan, &model, &machine, "none", &alloc, &err) == -EINVAL);
    for (const char *const *name = lh_plan_policy_names(); *name; name++)
        LH_CHECK(strstr(err.message, *name) != NULL);
    uint64_t working_bytes = lh_plan_host_working_bytes(&model);
    char number[32];
    snprintf(number, sizeof(number), "%" PRIu64, working_bytes);
    machine.host_bytes = working_bytes - 1;
    LH_CHECK(lh_plan_make(&plan, &model, &machine, "lohan", &alloc, &err) == -ENOSPC);
    LH_CHECK(strstr(err.message, number) != NULL);
    LH_CHECK(alloc.live_count == live_count);
    lh_plan_model_deinit(&model, &alloc);
}

int main(void)
{
    machines_are_checked();
    models_are_checked();
    totals_are_sums();
    failures_leak_nothing();
    refusals_say_the_way_out();
    return 0;
}
