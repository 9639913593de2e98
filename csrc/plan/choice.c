#include "plan/choice.h"

#include <string.h>

#include "base/assert.h"

/* Source: LoHan table II (P32: 4 bytes a parameter) */
#define P32_BYTES 4

int lh_plan_choice_init(struct lh_plan_choice *choice, const struct lh_plan_model *model,
                        struct lh_alloc *alloc, struct lh_error *err)
{
    memset(choice, 0, sizeof(*choice));
    choice->fates = lh_alloc_zeroed(alloc, model->layer_count, sizeof(*choice->fates));
    choice->blocks = lh_alloc_zeroed(alloc, model->block_count, sizeof(*choice->blocks));
    if (!choice->fates || !choice->blocks) {
        lh_plan_choice_deinit(choice, alloc);
        return lh_error_set(err, -ENOMEM, "no memory for a plan of %u layers", model->layer_count);
    }
    choice->layer_count = model->layer_count;
    choice->block_count = model->block_count;
    choice->master_bytes = P32_BYTES;
    return 0;
}

void lh_plan_choice_deinit(struct lh_plan_choice *choice, struct lh_alloc *alloc)
{
    lh_free(alloc, choice->fates);
    lh_free(alloc, choice->blocks);
    memset(choice, 0, sizeof(*choice));
}

int lh_plan_choice_check(const struct lh_plan_choice *choice, const struct lh_plan_model *model,
                         struct lh_error *err)
{
    LH_ASSERT(choice->layer_count == model->layer_count);
    LH_ASSERT(choice->block_count == model->block_count);
    for (uint32_t i = 0; i < model->layer_count; i++)
        if (choice->fates[i] == LH_PLAN_FATE_RECOMPUTE && model->layers[i].is_inter_block)
            return lh_error_set(err, -EINVAL,
                                "layer %u is between blocks, where recomputation starts: it can be"
                                " kept or swapped, but not recomputed",
                                i);
    if (choice->master_bytes != P32_BYTES && choice->master_bytes != model->residual_bytes)
        return lh_error_set(err, -EINVAL,
                            "master_bytes is %u, but must be %d (an fp32 master) or %u (the model's"
                            " residual)",
                            choice->master_bytes, P32_BYTES, model->residual_bytes);
    return 0;
}

void lh_plan_choice_copy(struct lh_plan_choice *target, const struct lh_plan_choice *source)
{
    LH_ASSERT(target->layer_count == source->layer_count);
    LH_ASSERT(target->block_count == source->block_count);
    memcpy(target->fates, source->fates, source->layer_count * sizeof(*source->fates));
    memcpy(target->blocks, source->blocks, source->block_count * sizeof(*source->blocks));
    target->schedule = source->schedule;
    target->master_bytes = source->master_bytes;
}
