#include "sim/shards.h"

#include <inttypes.h>

#include "base/assert.h"

/* The units of a divided model that a unit of the whole one becomes. */
struct parts {
    uint32_t first;
    uint32_t count;
};

static struct parts unit_divide(struct lh_sim_model *model, const struct lh_engine_unit *unit,
                                uint32_t node_count, bool *is_given)
{
    struct parts parts = {.first = model->unit_count, .count = 1};
    uint64_t count = unit->elements > 0 ? lh_align_up(lh_div_ceil(unit->elements, node_count),
                                                      LH_ENGINE_ELEMENT_ALIGN)
                                        : unit->bytes;
    struct lh_sim_unit_desc desc = {
        .dtype = unit->dtype, .always = unit->always, .counts = &count, .count = 1};
    (void)lh_sim_model_unit_add(model, &desc);
    if (unit->elements == 0 || node_count == 1)
        return parts;
    count *= node_count - 1;
    is_given[lh_sim_model_unit_add(model, &desc)] = true;
    parts.count = 2;
    return parts;
}

static void parts_copy(const struct lh_sim_model *whole, const struct lh_sim_block *from,
                       struct lh_sim_block *block, struct lh_sim_model *model)
{
    for (uint32_t i = 0; i < from->part_count; i++) {
        const struct lh_sim_part *part = &whole->parts[from->part_first + i];
        block->forward_ns = part->forward_ns;
        block->backward_ns = part->backward_ns;
        if (i == 0)
            lh_sim_model_block_add(model, block);
        else
            lh_sim_model_part_add(model, part->forward_ns, part->backward_ns);
        for (uint32_t j = part->saved_first; j < part->saved_first + part->saved_count; j++)
            lh_sim_model_saved_add(model, whole->saved[j].bytes, whole->saved[j].tier);
    }
}

static int blocks_copy(const struct lh_sim_model *whole, const struct parts *parts,
                       struct lh_sim_model *model, struct lh_error *err)
{
    for (uint32_t i = 0; i < whole->block_count; i++) {
        const struct lh_sim_block *from = &whole->blocks[i];
        struct lh_sim_block block = *from;
        block.unit_count = 0;
        for (uint32_t j = 0; j < from->unit_count; j++) {
            const struct parts *unit = &parts[from->units[j]];
            if (block.unit_count + unit->count > LH_SIM_BLOCK_UNIT_COUNT_MAX)
                return lh_error_set(err, -EINVAL,
                                    "block %" PRIu32 " uses %" PRIu32
                                    " units: at most %d can be divided among nodes",
                                    i, from->unit_count, LH_SIM_BLOCK_UNIT_COUNT_MAX / 2);
            for (uint32_t k = 0; k < unit->count; k++)
                block.units[block.unit_count++] = unit->first + k;
        }
        parts_copy(whole, from, &block, model);
    }
    return 0;
}

int lh_sim_shards_make(const struct lh_sim_model *whole, uint32_t node_count,
                       struct lh_alloc *alloc, struct lh_sim_model *model_out, struct lh_error *err)
{
    const struct lh_sim_model_opts opts = {.unit_max = 2 * whole->unit_count,
                                           .param_max = 2 * whole->unit_count,
                                           .block_max = whole->block_count,
                                           .saved_max = whole->saved_count,
                                           .part_max = whole->part_count};
    LH_ASSERT(node_count > 0);
    LH_TRY(lh_sim_model_init(model_out, &opts, alloc, err));
    bool *is_given = lh_alloc_zeroed(alloc, opts.unit_max, sizeof(*is_given));
    struct parts *parts = lh_alloc_zeroed(alloc, whole->unit_count, sizeof(*parts));
    int rc = is_given && parts ? 0 : -ENOMEM;
    if (rc < 0)
        (void)lh_error_set(err, rc, "no memory to divide a model");
    for (uint32_t i = 0; rc == 0 && i < whole->unit_count; i++)
        parts[i] = unit_divide(model_out, &whole->units[i], node_count, is_given);
    if (rc == 0)
        rc = blocks_copy(whole, parts, model_out, err);
    if (rc == 0 && node_count > 1)
        lh_sim_model_give(model_out, is_given);
    model_out->has_sums = true;
    lh_free(alloc, is_given);
    lh_free(alloc, parts);
    return rc;
}
