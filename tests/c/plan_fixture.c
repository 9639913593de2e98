#include "plan_fixture.h"

#include "lh_test.h"
#include "plan/timeline.h"

struct lh_plan_model plan_fixture_model(struct plan_fixture_shape shape, bool is_uneven,
                                        uint64_t *seed, struct lh_alloc *alloc)
{
    struct lh_plan_model model;
    uint32_t layer_count = shape.block_count * shape.block_layer_count;
    LH_CHECK(lh_plan_model_init(&model, shape.block_count, layer_count, alloc, NULL) == 0);
    model.param_bytes = 2;
    model.residual_bytes = 2;
    for (uint32_t i = 0; i < layer_count; i++) {
        uint32_t in_block = i % shape.block_layer_count;
        struct lh_plan_layer *layer = &model.layers[i];
        if (!is_uneven && i >= shape.block_layer_count)
            *layer = model.layers[in_block];
        else
            *layer = (struct lh_plan_layer){
                .param_count = (1 + lh_test_below(seed, 8)) * PLAN_FIXTURE_UNIT,
                .forward_flop = (1 + lh_test_below(seed, 64)) * PLAN_FIXTURE_UNIT,
                .activation_bytes = (1 + lh_test_below(seed, 16)) * PLAN_FIXTURE_UNIT,
                .is_inter_block = in_block == shape.block_layer_count - 1,
            };
        if (in_block == 0)
            model.blocks[i / shape.block_layer_count] =
                (struct lh_plan_block){i, shape.block_layer_count, LH_PLAN_BLOCK_NONE};
    }
    LH_CHECK(lh_plan_model_check(&model, NULL) == 0);
    return model;
}

struct lh_plan_machine plan_fixture_machine(const struct lh_plan_model *model, uint64_t *seed)
{
    struct lh_plan_totals totals = lh_plan_model_totals(model);
    uint64_t state_bytes = 14 * totals.param_count;
    /* The rates are powers of two near those at which all resources take equally long. */
    uint64_t gpu = 4 * totals.forward_flop << lh_test_below(seed, 6);
    struct lh_plan_machine machine = {
        .gpu_flop_per_s = gpu,
        .gpu_bytes = lh_plan_gpu_working_bytes(model) + totals.block_activation_bytes_max +
                     lh_test_below(seed, totals.activation_bytes + 1),
        .link_in_bytes_per_s = 4 * totals.param_count << lh_test_below(seed, 6),
        .link_out_bytes_per_s = 4 * totals.param_count << lh_test_below(seed, 6),
        .host_bytes =
            lh_plan_host_working_bytes(model) +
            lh_test_below(seed, (totals.activation_bytes + state_bytes) << lh_test_below(seed, 2)),
        .adam_params_per_s = totals.param_count << lh_test_below(seed, 6),
        .ssd_count = 1 + lh_test_below(seed, 4),
        .ssd_read_bytes_per_s = state_bytes << lh_test_below(seed, 4),
        .ssd_write_bytes_per_s = state_bytes << lh_test_below(seed, 4),
    };
    LH_CHECK(lh_plan_machine_check(&machine, NULL) == 0);
    return machine;
}
