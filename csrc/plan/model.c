#include "plan/model.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"

#define SUM_MAX (UINT64_C(1) << 60)
#define COUNT_MAX (UINT32_C(1) << 20)
#define ELEMENT_BYTES_MAX 8
/* AdamW's moments of a parameter in fp32. */
#define MOMENT_BYTES_F32 (LH_PLAN_MOMENT_BLOCK_BYTES_F32 / LH_PLAN_MOMENT_BLOCK)

int lh_plan_model_init(struct lh_plan_model *model, uint32_t block_count, uint32_t layer_count,
                       struct lh_alloc *alloc, struct lh_error *err)
{
    memset(model, 0, sizeof(*model));
    model->layers = lh_alloc_zeroed(alloc, lh_max_u64(layer_count, 1), sizeof(*model->layers));
    model->blocks = lh_alloc_zeroed(alloc, lh_max_u64(block_count, 1), sizeof(*model->blocks));
    if (!model->layers || !model->blocks) {
        lh_plan_model_deinit(model, alloc);
        return lh_error_set(err, -ENOMEM, "no memory for a model of %u blocks and %u layers",
                            block_count, layer_count);
    }
    model->layer_count = layer_count;
    model->block_count = block_count;
    model->moment_block_bytes = LH_PLAN_MOMENT_BLOCK_BYTES_F32;
    return 0;
}

void lh_plan_model_deinit(struct lh_plan_model *model, struct lh_alloc *alloc)
{
    lh_free(alloc, model->layers);
    lh_free(alloc, model->blocks);
    memset(model, 0, sizeof(*model));
}

static int blocks_check(const struct lh_plan_model *model, struct lh_error *err)
{
    uint32_t next = 0;
    for (uint32_t i = 0; i < model->block_count; i++) {
        const struct lh_plan_block *block = &model->blocks[i];
        if (block->layer_count == 0)
            return lh_error_set(err, -EINVAL, "block %u of a model has no layers", i);
        if (block->layer_first != next || block->layer_count > model->layer_count - next)
            return lh_error_set(err, -EINVAL,
                                "block %u of a model has layers %u to %u, but must start at layer"
                                " %u and end within the model's %u layers",
                                i, block->layer_first, block->layer_first + block->layer_count - 1,
                                next, model->layer_count);
        if (block->shared_block != LH_PLAN_BLOCK_NONE && block->shared_block >= i)
            return lh_error_set(err, -EINVAL,
                                "block %u of a model shares parameters with block %u, which does"
                                " not come before it",
                                i, block->shared_block);
        next += block->layer_count;
    }
    if (next != model->layer_count)
        return lh_error_set(err, -EINVAL, "the blocks of a model contain only %u of its %u layers",
                            next, model->layer_count);
    return 0;
}

int lh_plan_model_check(const struct lh_plan_model *model, struct lh_error *err)
{
    if (model->layer_count == 0 || model->layer_count > COUNT_MAX)
        return lh_error_set(err, -EINVAL, "a model has %u layers: it must have 1 to %u",
                            model->layer_count, COUNT_MAX);
    if (model->param_bytes == 0 || model->param_bytes > ELEMENT_BYTES_MAX ||
        model->residual_bytes > ELEMENT_BYTES_MAX)
        return lh_error_set(err, -EINVAL,
                            "param_bytes %u must be from 1 to %d, and residual_bytes %u no larger"
                            " than that limit",
                            model->param_bytes, ELEMENT_BYTES_MAX, model->residual_bytes);
    if (model->moment_block_bytes > LH_PLAN_MOMENT_BLOCK_BYTES_F32)
        return lh_error_set(err, -EINVAL,
                            "moment_block_bytes %u exceeds %d, the bytes of two moments in fp32",
                            model->moment_block_bytes, LH_PLAN_MOMENT_BLOCK_BYTES_F32);
    LH_TRY(blocks_check(model, err));
    unsigned __int128 sums[6] = {0};
    for (uint32_t i = 0; i < model->layer_count; i++) {
        const struct lh_plan_layer *layer = &model->layers[i];
        /* Later sums count every byte of a parameter and its states: at most 32 of them. */
        sums[0] += ((unsigned __int128)layer->param_count + layer->products_count) * 32;
        sums[1] += layer->forward_flop;
        sums[2] += layer->activation_bytes;
        sums[3] += layer->working_bytes;
        sums[4] += layer->frozen_bytes;
        sums[5] += layer->frozen_read_bytes;
        if (layer->others_count > layer->param_count)
            return lh_error_set(err, -EINVAL,
                                "layer %u of a model has others_count %" PRIu64
                                ", more than its param_count %" PRIu64,
                                i, layer->others_count, layer->param_count);
        if (layer->frozen_flop > layer->forward_flop)
            return lh_error_set(err, -EINVAL,
                                "layer %u of a model has frozen_flop %" PRIu64
                                ", more than its forward_flop %" PRIu64,
                                i, layer->frozen_flop, layer->forward_flop);
    }
    static const char *const names[] = {"(param_count + products_count) * 32",
                                        "forward_flop",
                                        "activation_bytes",
                                        "working_bytes",
                                        "frozen_bytes",
                                        "frozen_read_bytes"};
    for (size_t i = 0; i < LH_COUNT_OF(sums); i++)
        if (sums[i] > SUM_MAX)
            return lh_error_set(err, -EINVAL, "the sum of a model's %s exceeds %" PRIu64, names[i],
                                SUM_MAX);
    return 0;
}

uint64_t lh_plan_block_param_count(const struct lh_plan_model *model, uint32_t block)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < model->blocks[block].layer_count; i++)
        count += model->layers[model->blocks[block].layer_first + i].param_count;
    return count;
}

uint64_t lh_plan_block_update_count(const struct lh_plan_model *model, uint32_t block)
{
    uint64_t count = lh_plan_block_param_count(model, block);
    for (uint32_t i = 0; i < model->blocks[block].layer_count; i++)
        count += model->layers[model->blocks[block].layer_first + i].products_count;
    return count;
}

uint64_t lh_plan_block_moment_bytes(const struct lh_plan_model *model, uint32_t block)
{
    uint64_t count = lh_plan_block_param_count(model, block);
    uint64_t others = 0;
    for (uint32_t i = 0; i < model->blocks[block].layer_count; i++)
        others += model->layers[model->blocks[block].layer_first + i].others_count;
    LH_ASSERT(others <= count);
    return lh_plan_moment_bytes(model, count - others) + MOMENT_BYTES_F32 * others;
}

uint64_t lh_plan_block_frozen_bytes(const struct lh_plan_model *model, uint32_t block)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < model->blocks[block].layer_count; i++)
        bytes += model->layers[model->blocks[block].layer_first + i].frozen_bytes;
    return bytes;
}

uint64_t lh_plan_block_frozen_read_bytes(const struct lh_plan_model *model, uint32_t block)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < model->blocks[block].layer_count; i++)
        bytes += model->layers[model->blocks[block].layer_first + i].frozen_read_bytes;
    return bytes;
}

uint64_t lh_plan_moment_bytes(const struct lh_plan_model *model, uint64_t param_count)
{
    return lh_div_ceil(param_count * model->moment_block_bytes, LH_PLAN_MOMENT_BLOCK);
}

struct lh_plan_totals lh_plan_model_totals(const struct lh_plan_model *model)
{
    struct lh_plan_totals totals = {0};
    uint64_t others = 0;
    for (uint32_t i = 0; i < model->block_count; i++) {
        const struct lh_plan_block *block = &model->blocks[i];
        uint64_t activation_bytes = 0;
        uint64_t working_bytes = 0;
        for (uint32_t j = 0; j < block->layer_count; j++) {
            const struct lh_plan_layer *layer = &model->layers[block->layer_first + j];
            totals.forward_flop += layer->forward_flop;
            totals.backward_flop += 2 * layer->forward_flop - layer->frozen_flop;
            others += layer->others_count;
            activation_bytes += layer->activation_bytes;
            if (layer->is_inter_block)
                totals.inter_block_activation_bytes += layer->activation_bytes;
            working_bytes = lh_max_u64(working_bytes, layer->working_bytes);
        }
        uint64_t param_count = lh_plan_block_param_count(model, i);
        uint64_t frozen_bytes = lh_plan_block_frozen_bytes(model, i);
        totals.param_count += param_count;
        totals.update_count += lh_plan_block_update_count(model, i);
        totals.frozen_bytes += frozen_bytes;
        totals.frozen_read_bytes += lh_plan_block_frozen_read_bytes(model, i);
        totals.block_bytes_max =
            lh_max_u64(totals.block_bytes_max, param_count * model->param_bytes + frozen_bytes);
        totals.activation_bytes += activation_bytes;
        totals.block_param_count_max = lh_max_u64(totals.block_param_count_max, param_count);
        totals.block_activation_bytes_max =
            lh_max_u64(totals.block_activation_bytes_max, activation_bytes);
        totals.block_gpu_bytes_max =
            lh_max_u64(totals.block_gpu_bytes_max, activation_bytes + working_bytes);
    }
    totals.moments_less_bytes = MOMENT_BYTES_F32 * (totals.param_count - others) -
                                lh_plan_moment_bytes(model, totals.param_count - others);
    return totals;
}
