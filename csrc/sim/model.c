#include "sim/model.h"

#include <string.h>

#include "base/assert.h"
#include "compute/adam.h"

int lh_sim_model_init(struct lh_sim_model *model, const struct lh_sim_model_opts *opts,
                      struct lh_alloc *alloc, struct lh_error *err)
{
    *model = (struct lh_sim_model){
        .alloc = alloc, .opts = *opts, .scalar_bytes_max = LH_SIM_SCALAR_BYTES};
    if (opts->part_max == 0)
        model->opts.part_max = opts->block_max;
    model->parts = lh_alloc_zeroed(alloc, model->opts.part_max, sizeof(*model->parts));
    model->units = lh_alloc_zeroed(alloc, opts->unit_max, sizeof(*model->units));
    model->params = lh_alloc_zeroed(alloc, opts->param_max, sizeof(*model->params));
    model->blocks = lh_alloc_zeroed(alloc, opts->block_max, sizeof(*model->blocks));
    model->groups = lh_alloc_zeroed(alloc, opts->unit_max, sizeof(*model->groups));
    model->saved = lh_alloc_zeroed(alloc, lh_max_u64(opts->saved_max, 1), sizeof(*model->saved));
    model->extents =
        lh_alloc_zeroed(alloc, (uint64_t)opts->unit_max * LH_SIM_ARRAY_COUNT + opts->scales_max,
                        sizeof(*model->extents));
    uint64_t packed_max = lh_max_u64(opts->packed_max, 1);
    model->in_place = lh_alloc_zeroed(alloc, packed_max, sizeof(*model->in_place));
    model->packed = lh_alloc_zeroed(alloc, packed_max, sizeof(*model->packed));
    model->files = lh_alloc_zeroed(alloc, packed_max, sizeof(*model->files));
    if (!model->units || !model->params || !model->blocks || !model->groups || !model->saved ||
        !model->parts || !model->extents || !model->in_place || !model->packed || !model->files) {
        lh_sim_model_deinit(model);
        return lh_error_set(err, -ENOMEM, "no memory for a model of %u units", opts->unit_max);
    }
    return 0;
}

void lh_sim_model_deinit(struct lh_sim_model *model)
{
    lh_free(model->alloc, model->units);
    lh_free(model->alloc, model->params);
    lh_free(model->alloc, model->blocks);
    lh_free(model->alloc, model->groups);
    lh_free(model->alloc, model->saved);
    lh_free(model->alloc, model->parts);
    lh_free(model->alloc, model->extents);
    lh_free(model->alloc, model->in_place);
    lh_free(model->alloc, model->packed);
    lh_free(model->alloc, model->files);
    *model = (struct lh_sim_model){0};
}

/* Bytes per element of an array of moments. */
static uint64_t moment_bytes(const struct lh_engine_unit *unit, enum lh_sim_array array)
{
    const struct lh_rule_row *rule = &lh_rules[unit->rule];
    if (array == LH_SIM_ARRAY_MOMENT1)
        return rule->has_moment1 ? lh_adam_moment1_bytes(unit->states) : 0;
    return rule->has_moment2 ? lh_adam_moment2_bytes(unit->states) : 0;
}

uint64_t lh_sim_model_array_bytes(const struct lh_sim_model *model, uint32_t index,
                                  enum lh_sim_array array)
{
    const struct lh_engine_unit *unit = &model->units[index];
    switch (array) {
    case LH_SIM_ARRAY_PARAM:
        return unit->bytes;
    case LH_SIM_ARRAY_RESIDUAL:
        return unit->elements * lh_adam_residual_bytes(unit->dtype);
    default:
        return unit->elements * moment_bytes(unit, array);
    }
}

uint64_t lh_sim_model_scales_count(uint64_t elements)
{
    return lh_div_ceil(lh_align_up(elements, LH_ENGINE_SCALED_ALIGN), LH_ADAM_SCALES_ELEMENTS);
}

uint64_t lh_sim_model_read_bytes(const struct lh_sim_model *model, uint32_t index)
{
    for (uint32_t i = 0; i < model->packed_count; i++) {
        if (model->in_place[i].unit == index)
            return model->packed[i].run.bytes;
    }
    return model->units[index].bytes;
}

uint32_t lh_sim_model_extent(const struct lh_sim_model *model, uint32_t index,
                             enum lh_sim_array array)
{
    const struct lh_engine_unit *unit = &model->units[index];
    const uint32_t extents[LH_SIM_ARRAY_COUNT] = {unit->param_extent, unit->residual_extent,
                                                  unit->moment1_extent, unit->moment2_extent};
    return extents[array];
}

static void extent_add(struct lh_sim_model *model, uint32_t group, uint64_t bytes)
{
    uint64_t most = (uint64_t)model->opts.unit_max * LH_SIM_ARRAY_COUNT + model->opts.scales_max;
    LH_ASSERT(bytes > 0 && model->extent_count < most);
    model->extents[model->extent_count++] =
        (struct lh_store_extent_desc){.bytes = bytes, .group = group};
}

/* Add the extents with what blocks of a unit have: scales of 8-bit moments, or rows. */
static void scales_add(struct lh_sim_model *model, uint32_t index)
{
    struct lh_engine_unit *unit = &model->units[index];
    uint64_t block_bytes = lh_adam_block_bytes(unit->rule, unit->states);
    unit->scales_extent = model->extent_count;
    for (uint64_t first = 0; first < unit->elements; first += LH_ADAM_SCALES_ELEMENTS) {
        uint64_t count = lh_min_u64(LH_ADAM_SCALES_ELEMENTS, unit->elements - first);
        uint64_t bytes = count / LH_ADAM_STATES_BLOCK * block_bytes;
        if (bytes > 0)
            extent_add(model, index, bytes);
    }
}

/* What the decoded values of a packed parameter need besides the packed bytes, one after the other.
 */
static uint64_t parts_place(struct lh_in_place_pack *pack, uint64_t offset)
{
    uint64_t *places[LH_UNPACK_PART_COUNT] = {
        [LH_UNPACK_PART_SCALES] = &pack->scales,
        [LH_UNPACK_PART_TABLE] = &pack->table,
        [LH_UNPACK_PART_NESTED] = &pack->nested,
        [LH_UNPACK_PART_NESTED_TABLE] = &pack->nested_table,
        [LH_UNPACK_PART_ZEROS] = &pack->zeros,
        [LH_UNPACK_PART_INDEX] = &pack->index,
    };
    for (uint32_t i = 0; i < LH_UNPACK_PART_COUNT; i++) {
        uint64_t bytes = lh_unpack_part_bytes(&pack->unpack, (enum lh_unpack_part)i);
        *places[i] = bytes > 0 ? offset : 0;
        offset += bytes;
    }
    return offset;
}

/*
 * Lay out a packed unit as python/lohan/layout/_in_place_units.py does: the file has the parameters
 * one after the other, then all scales, and the unit's memory ends with what a load reads.
 */
static void packed_place(struct lh_sim_model *model, uint32_t index,
                         const struct lh_sim_unit_desc *desc)
{
    LH_ASSERT(model->packed_count < model->opts.packed_max);
    LH_ASSERT(desc->pack_count > 0 && desc->pack_count <= LH_SIM_PACK_COUNT_MAX);
    struct lh_sim_packed *packed = &model->packed[model->packed_count];
    uint64_t read = 0;
    uint64_t decoded = 0;
    uint64_t distance = 0;
    for (uint32_t i = 0; i < desc->pack_count; i++) {
        struct lh_in_place_pack *pack = &packed->packs[i];
        *pack = (struct lh_in_place_pack){.unpack = desc->packs[i], .from = read, .to = decoded};
        uint64_t count = lh_unpack_count(&pack->unpack);
        uint64_t end = decoded + count * lh_unpack_element_bytes(&pack->unpack);
        read += lh_unpack_packed_bytes(&pack->unpack, count);
        distance = lh_max_u64(distance, lh_max_u64(end, read) - read);
        decoded = lh_align_up(end, LH_IN_PLACE_ALIGN);
        distance = lh_max_u64(distance, lh_max_u64(decoded, read) - read);
    }
    distance = lh_align_up(distance, LH_BLOCK_BYTES);
    uint64_t end = distance + read;
    for (uint32_t i = 0; i < desc->pack_count; i++) {
        packed->packs[i].from += distance;
        end = parts_place(&packed->packs[i], end);
    }
    end = lh_align_up(end, LH_BLOCK_BYTES);
    packed->run = (struct lh_in_place_run){
        .file = model->packed_count, .offset = distance, .bytes = end - distance};
    model->files[model->packed_count] =
        (struct lh_in_place_file){.path = "a base", .bytes = end - distance};
    model->in_place[model->packed_count] = (struct lh_in_place_unit){
        .unit = index,
        .runs = &packed->run,
        .run_count = 1,
        .packs = packed->packs,
        .pack_count = desc->pack_count,
        .checksum_count = (uint32_t)lh_div_ceil(end - distance, LH_CHECKSUM_BYTES),
    };
    model->packed_count++;
    model->units[index].bytes = end;
}

static uint32_t packed_add(struct lh_sim_model *model, const struct lh_sim_unit_desc *desc)
{
    LH_ASSERT(desc->dtype == LH_DTYPE_BYTES && model->param_count < model->opts.param_max);
    uint32_t index = model->unit_count++;
    model->groups[index].slot_count = 1;
    model->units[index] = (struct lh_engine_unit){.dtype = desc->dtype,
                                                  .always = desc->always,
                                                  .param_first = model->param_count,
                                                  .param_count = 1,
                                                  .param_extent = LH_ENGINE_EXTENT_NONE,
                                                  .residual_extent = LH_ENGINE_EXTENT_NONE,
                                                  .moment1_extent = LH_ENGINE_EXTENT_NONE,
                                                  .moment2_extent = LH_ENGINE_EXTENT_NONE,
                                                  .store_group = index};
    packed_place(model, index, desc);
    model->params[model->param_count++] =
        (struct lh_engine_param){.unit = index, .count = model->units[index].bytes};
    return index;
}

uint32_t lh_sim_model_unit_add(struct lh_sim_model *model, const struct lh_sim_unit_desc *desc)
{
    LH_ASSERT(model->unit_count < model->opts.unit_max);
    if (desc->packs)
        return packed_add(model, desc);
    LH_ASSERT(desc->count > 0 && model->param_count + desc->count <= model->opts.param_max);
    uint32_t index = model->unit_count++;
    struct lh_engine_unit *unit = &model->units[index];
    bool is_frozen = desc->dtype == LH_DTYPE_BYTES;
    bool has_blocks = lh_adam_block_bytes(desc->rule, desc->states) > 0;
    uint64_t align = has_blocks ? LH_ENGINE_SCALED_ALIGN : LH_ENGINE_ELEMENT_ALIGN;
    uint64_t end = 0;
    *unit = (struct lh_engine_unit){.dtype = desc->dtype,
                                    .always = desc->always,
                                    .param_first = model->param_count,
                                    .param_count = desc->count,
                                    .rule = desc->rule,
                                    .work_bytes = desc->work_bytes,
                                    .states = desc->states,
                                    .store_group = index};
    for (uint32_t i = 0; i < desc->count; i++) {
        uint64_t first = lh_align_up(end, LH_ENGINE_PARAM_ALIGN);
        uint32_t param = model->param_count++;
        model->params[param] = (struct lh_engine_param){.unit = index,
                                                        .first = first,
                                                        .count = desc->counts[i],
                                                        .row_elements = desc->counts[i],
                                                        .factor_first = first + desc->counts[i],
                                                        .group = param % LH_SIM_GROUP_COUNT};
        end = first + desc->counts[i];
        model->element_count += is_frozen ? 0 : desc->counts[i];
    }
    unit->elements = is_frozen ? 0 : lh_align_up(end, align);
    unit->bytes =
        is_frozen ? lh_align_up(end, LH_BLOCK_BYTES) : unit->elements * lh_dtype_bytes(desc->dtype);
    model->groups[index].slot_count = is_frozen ? 1 : 2;
    uint32_t *const targets[LH_SIM_ARRAY_COUNT] = {&unit->param_extent, &unit->residual_extent,
                                                   &unit->moment1_extent, &unit->moment2_extent};
    for (uint32_t i = 0; i < LH_SIM_ARRAY_COUNT; i++) {
        uint64_t bytes = lh_sim_model_array_bytes(model, index, (enum lh_sim_array)i);
        *targets[i] = bytes > 0 ? model->extent_count : LH_ENGINE_EXTENT_NONE;
        if (bytes > 0)
            extent_add(model, index, bytes);
    }
    scales_add(model, index);
    return index;
}

static void part_add(struct lh_sim_model *model, uint64_t forward_ns, uint64_t backward_ns)
{
    LH_ASSERT(model->part_count < model->opts.part_max);
    model->parts[model->part_count++] = (struct lh_sim_part){
        .forward_ns = forward_ns, .backward_ns = backward_ns, .saved_first = model->saved_count};
    model->blocks[model->block_count - 1].part_count++;
}

void lh_sim_model_block_add(struct lh_sim_model *model, const struct lh_sim_block *block)
{
    LH_ASSERT(model->block_count < model->opts.block_max);
    LH_ASSERT(block->unit_count <= LH_SIM_BLOCK_UNIT_COUNT_MAX);
    struct lh_sim_block *added = &model->blocks[model->block_count++];
    *added = *block;
    added->part_first = model->part_count;
    added->part_count = 0;
    part_add(model, block->forward_ns, block->backward_ns);
}

void lh_sim_model_part_add(struct lh_sim_model *model, uint64_t forward_ns, uint64_t backward_ns)
{
    LH_ASSERT(model->block_count > 0);
    model->blocks[model->block_count - 1].forward_ns += forward_ns;
    model->blocks[model->block_count - 1].backward_ns += backward_ns;
    part_add(model, forward_ns, backward_ns);
}

void lh_sim_model_saved_add(struct lh_sim_model *model, uint64_t bytes, enum lh_saved_tier tier)
{
    LH_ASSERT(bytes > 0 && model->part_count > 0 && model->saved_count < model->opts.saved_max);
    model->saved[model->saved_count++] = (struct lh_sim_saved){.bytes = bytes, .tier = tier};
    model->parts[model->part_count - 1].saved_count++;
}

struct lh_adam_hyper lh_sim_model_hyper(uint32_t group, uint64_t step)
{
    double lr = 1e-3 * (double)(1 + step % 3);
    if (group == 0)
        return (struct lh_adam_hyper){lr, 0.9, 0.999, 1e-8, 0.01, 0};
    return (struct lh_adam_hyper){3 * lr, 0.8, 0.99, 1e-6, 0, 0};
}

void lh_sim_model_give(struct lh_sim_model *model, const bool *is_given)
{
    model->extent_count = 0;
    for (uint32_t i = 0; i < model->unit_count; i++) {
        struct lh_engine_unit *unit = &model->units[i];
        LH_ASSERT(unit->states == LH_ADAM_STATES_F32 && model->packed_count == 0);
        unit->is_given = is_given[i] && unit->elements > 0;
        uint32_t *const targets[LH_SIM_ARRAY_COUNT] = {&unit->param_extent, &unit->residual_extent,
                                                       &unit->moment1_extent,
                                                       &unit->moment2_extent};
        for (uint32_t j = 0; j < LH_SIM_ARRAY_COUNT; j++) {
            uint64_t bytes = lh_sim_model_array_bytes(model, i, (enum lh_sim_array)j);
            bool is_here = bytes > 0 && (j == LH_SIM_ARRAY_PARAM || !is_given[i]);
            *targets[j] = is_here ? model->extent_count : LH_ENGINE_EXTENT_NONE;
            if (is_here)
                model->extents[model->extent_count++] =
                    (struct lh_store_extent_desc){.bytes = bytes, .group = i};
        }
    }
}

bool lh_sim_model_is_given(const struct lh_sim_model *model, uint32_t unit)
{
    LH_ASSERT(unit < model->unit_count);
    return model->units[unit].is_given;
}

enum lh_dtype lh_sim_model_gradient_dtype(const struct lh_sim_model *model, uint32_t param)
{
    LH_ASSERT(param < model->param_count);
    uint32_t unit = model->params[param].unit;
    bool is_mixed = model->has_mixed_gradients && unit % 3 == 2 && param % 2 == 1;
    is_mixed |= model->has_sums && !lh_sim_model_is_given(model, unit);
    return is_mixed ? LH_DTYPE_F32 : model->units[unit].dtype;
}

uint64_t lh_sim_model_scalars(const struct lh_sim_model *model, uint64_t step, void *scalars_out)
{
    uint64_t bytes = lh_sim_mix(step, model->scalar_bytes_max) % (model->scalar_bytes_max + 1);
    for (uint64_t i = 0; i < bytes; i++)
        ((uint8_t *)scalars_out)[i] = (uint8_t)(step * 151 + i);
    return bytes;
}

/* The bytes that a block's units need, wherever those already in use are placed. */
static uint64_t block_bytes_min(const struct lh_sim_model *model, const struct lh_sim_block *block)
{
    uint64_t largest_bytes = 0;
    uint64_t sum_bytes = 0;
    uint64_t count = 0;
    for (uint32_t i = 0; i < block->unit_count; i++) {
        const struct lh_engine_unit *unit = &model->units[block->units[i]];
        if (unit->always)
            continue;
        largest_bytes = lh_max_u64(largest_bytes, unit->bytes);
        sum_bytes += unit->bytes;
        count++;
    }
    return count > 1 ? sum_bytes + (count - 1) * largest_bytes : sum_bytes;
}

uint64_t lh_sim_model_region_bytes_min(const struct lh_sim_model *model)
{
    uint64_t always_bytes = 0;
    uint64_t all_bytes = 0;
    uint64_t largest_bytes = 0;
    uint64_t second_bytes = 0;
    uint64_t block_bytes_max = 0;
    for (uint32_t i = 0; i < model->unit_count; i++) {
        uint64_t bytes = model->units[i].bytes;
        all_bytes += bytes;
        if (model->units[i].always) {
            always_bytes += bytes;
            continue;
        }
        second_bytes = lh_max_u64(second_bytes, lh_min_u64(bytes, largest_bytes));
        largest_bytes = lh_max_u64(largest_bytes, bytes);
    }
    for (uint32_t i = 0; i < model->block_count; i++)
        block_bytes_max = lh_max_u64(block_bytes_max, block_bytes_min(model, &model->blocks[i]));
    uint64_t others_bytes = lh_max_u64(block_bytes_max, largest_bytes + 2 * second_bytes);
    return lh_min_u64(always_bytes + others_bytes, all_bytes);
}

static uint32_t element_bytes_max(const struct lh_sim_model *model)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < model->unit_count; i++) {
        if (model->units[i].elements > 0)
            most = lh_max_u64(most, lh_dtype_bytes(model->units[i].dtype));
    }
    return (uint32_t)most;
}

int lh_sim_model_budget(const struct lh_sim_model *model, const struct lh_sim_budget_opts *opts,
                        struct lh_budget *budget_out, struct lh_error *err)
{
    bool is_auto = opts->schedule == LH_ENGINE_SCHEDULE_AUTO;
    bool is_waiting = is_auto || opts->schedule == LH_ENGINE_SCHEDULE_SERIAL ||
                      opts->schedule == LH_ENGINE_SCHEDULE_DEFERRED;
    struct lh_budget_unit *units = lh_alloc_zeroed(model->alloc, model->unit_count, sizeof(*units));
    if (!units)
        return lh_error_set(err, -ENOMEM, "no memory for a budget of %u units", model->unit_count);
    uint32_t block_bytes = opts->has_blocks ? element_bytes_max(model) : 0;
    for (uint32_t i = 0; i < model->unit_count; i++) {
        const struct lh_engine_unit *unit = &model->units[i];
        bool has_states = unit->elements > 0 && !lh_sim_model_is_given(model, i);
        enum lh_dtype waiting = model->has_sums && has_states ? LH_DTYPE_F32 : unit->dtype;
        units[i] = (struct lh_budget_unit){
            .bytes = unit->bytes,
            .elements = unit->elements,
            .gradient_bytes = unit->elements * lh_dtype_bytes(unit->dtype),
            .state_bytes_per_element = lh_engine_state_bytes(unit),
            .state_bytes_per_block =
                has_states ? (uint32_t)lh_adam_block_bytes(unit->rule, unit->states) : 0,
            .waiting_bytes_per_element =
                is_waiting && unit->elements > 0 ? (uint32_t)lh_dtype_bytes(waiting) : 0,
            .waits_in_memory = opts->commit_every != 1 || model->has_sums,
            .waits_at_will = is_auto,
            .block_bytes_per_element = unit->elements > 0 ? block_bytes : 0,
            .always = unit->always,
        };
    }
    int rc = lh_budget_make(units, model->unit_count, opts->host_bytes, 0, budget_out, err);
    lh_free(model->alloc, units);
    if (rc == 0)
        budget_out->region_bytes =
            lh_max_u64(budget_out->region_bytes, lh_sim_model_region_bytes_min(model));
    return rc;
}
