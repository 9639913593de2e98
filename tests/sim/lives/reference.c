#include "lives/reference.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "compute/half.h"
#include "lives/random.h"

static struct lh_sim_snapshot *snapshot_at(struct lh_sim_reference *reference, uint64_t step)
{
    return &reference->snapshots[step % LH_SIM_SNAPSHOT_COUNT];
}

static uint8_t *array_at(const struct lh_sim_reference *reference, uint8_t *state, uint32_t unit,
                         enum lh_sim_array array)
{
    return state + reference->offsets[unit * LH_SIM_ARRAY_COUNT + array];
}

/* A value in [-0.5, 0.5), exact in a double, and rounded once to a float. */
static float value_of(uint64_t hash)
{
    return (float)((double)(int32_t)(uint32_t)hash / 4294967296.0);
}

static void half_master_store(uint8_t *params, uint8_t *masters, uint64_t index, float value)
{
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof(bits));
    ((uint16_t *)(void *)params)[index] = lh_half_round(bits);
    memcpy(masters + index * sizeof(value), &value, sizeof(value));
}

static void masters_fill(struct lh_sim_reference *reference, uint8_t *state)
{
    const struct lh_sim_model *model = reference->model;
    for (uint32_t i = 0; i < model->param_count; i++) {
        const struct lh_engine_param *param = &model->params[i];
        const struct lh_engine_unit *unit = &model->units[param->unit];
        uint8_t *target = array_at(reference, state, param->unit, LH_SIM_ARRAY_PARAM);
        uint8_t *residual = array_at(reference, state, param->unit, LH_SIM_ARRAY_RESIDUAL);
        uint64_t hash = lh_sim_mix(reference->seed, i);
        for (uint64_t j = param->first; j < param->first + param->count; j++) {
            float value = value_of(hash = lh_sim_mix(hash, j));
            if (unit->dtype == LH_DTYPE_BF16)
                lh_adam_split(&value, (uint16_t *)(void *)target + j,
                              (int16_t *)(void *)residual + j, 1);
            else if (unit->dtype == LH_DTYPE_F32)
                memcpy(target + j * sizeof(value), &value, sizeof(value));
            else if (unit->dtype == LH_DTYPE_F16)
                half_master_store(target, residual, j, value);
            else
                target[j] = (uint8_t)hash;
        }
    }
}

static bool state_make(struct lh_sim_reference *reference, struct lh_sim_snapshot *snapshot)
{
    if (!snapshot->state)
        snapshot->state = lh_alloc_zeroed(reference->alloc, 1, reference->state_bytes);
    return snapshot->state != NULL;
}

static int tables_create(struct lh_sim_reference *reference)
{
    const struct lh_sim_model *model = reference->model;
    struct lh_alloc *alloc = reference->alloc;
    uint64_t count_max = 1;
    reference->offsets = lh_alloc_zeroed(alloc, (uint64_t)model->unit_count * LH_SIM_ARRAY_COUNT,
                                         sizeof(*reference->offsets));
    if (!reference->offsets)
        return -ENOMEM;
    for (uint32_t i = 0; i < model->unit_count; i++) {
        for (uint32_t j = 0; j < LH_SIM_ARRAY_COUNT; j++) {
            reference->offsets[i * LH_SIM_ARRAY_COUNT + j] = reference->state_bytes;
            reference->state_bytes += lh_sim_model_array_bytes(model, i, (enum lh_sim_array)j);
        }
    }
    for (uint32_t i = 0; i < model->param_count; i++)
        count_max = lh_max_u64(count_max, model->params[i].count);
    reference->gradient = lh_alloc_zeroed(alloc, count_max, sizeof(float));
    reference->contribution = lh_alloc_zeroed(alloc, count_max, sizeof(float));
    if (!reference->gradient || !reference->contribution)
        return -ENOMEM;
    for (uint32_t i = 0; i < LH_SIM_SNAPSHOT_COUNT; i++) {
        struct lh_sim_snapshot *snapshot = &reference->snapshots[i];
        snapshot->step = UINT64_MAX;
        snapshot->param_steps = lh_alloc_zeroed(alloc, model->param_count, sizeof(uint64_t));
        if (!snapshot->param_steps || (i == 0 && !state_make(reference, snapshot)))
            return -ENOMEM;
    }
    return 0;
}

int lh_sim_reference_init(struct lh_sim_reference *reference, const struct lh_sim_model *model,
                          uint64_t seed, struct lh_alloc *alloc, struct lh_error *err)
{
    *reference = (struct lh_sim_reference){.model = model, .alloc = alloc, .seed = seed};
    if (tables_create(reference) < 0) {
        lh_sim_reference_deinit(reference);
        return lh_error_set(err, -ENOMEM, "no memory for a reference of %" PRIu64 " elements",
                            model->element_count);
    }
    snapshot_at(reference, 0)->step = 0;
    masters_fill(reference, snapshot_at(reference, 0)->state);
    return 0;
}

void lh_sim_reference_deinit(struct lh_sim_reference *reference)
{
    lh_free(reference->alloc, reference->offsets);
    lh_free(reference->alloc, reference->gradient);
    lh_free(reference->alloc, reference->contribution);
    for (uint32_t i = 0; i < LH_SIM_SNAPSHOT_COUNT; i++) {
        lh_free(reference->alloc, reference->snapshots[i].state);
        lh_free(reference->alloc, reference->snapshots[i].before);
        lh_free(reference->alloc, reference->snapshots[i].param_steps);
    }
    *reference = (struct lh_sim_reference){0};
}

const uint8_t *lh_sim_reference_array_of(const struct lh_sim_reference *reference, uint64_t step,
                                         bool is_edited, uint32_t unit, enum lh_sim_array array)
{
    const struct lh_sim_snapshot *snapshot = &reference->snapshots[step % LH_SIM_SNAPSHOT_COUNT];
    LH_ASSERT(snapshot->step == step);
    bool is_before = snapshot->edit != LH_SIM_EDIT_NONE && !is_edited;
    return array_at(reference, is_before ? snapshot->before : snapshot->state, unit, array);
}

const uint8_t *lh_sim_reference_array(const struct lh_sim_reference *reference, uint64_t step,
                                      uint32_t unit, enum lh_sim_array array)
{
    return lh_sim_reference_array_of(reference, step, true, unit, array);
}

bool lh_sim_reference_is_edited(const struct lh_sim_reference *reference, uint64_t step)
{
    const struct lh_sim_snapshot *snapshot = &reference->snapshots[step % LH_SIM_SNAPSHOT_COUNT];
    return snapshot->step == step && snapshot->edit != LH_SIM_EDIT_NONE;
}

const uint8_t *lh_sim_reference_committed(const struct lh_sim_reference *reference, uint64_t step)
{
    const struct lh_sim_snapshot *snapshot = &reference->snapshots[step % LH_SIM_SNAPSHOT_COUNT];
    LH_ASSERT(snapshot->step == step);
    return snapshot->edit == LH_SIM_EDIT_STAGED ? snapshot->before : snapshot->state;
}

void lh_sim_reference_edit_begin(struct lh_sim_reference *reference)
{
    struct lh_sim_snapshot *snapshot = snapshot_at(reference, reference->step);
    LH_ASSERT(snapshot->edit == LH_SIM_EDIT_NONE);
    if (!snapshot->before)
        snapshot->before = lh_alloc_zeroed(reference->alloc, 1, reference->state_bytes);
    LH_ASSERT(snapshot->before);
    memcpy(snapshot->before, snapshot->state, reference->state_bytes);
    snapshot->edit = LH_SIM_EDIT_STAGED;
}

void lh_sim_reference_edit(struct lh_sim_reference *reference, uint32_t unit,
                           enum lh_sim_array array, uint64_t first, uint64_t count, uint64_t seed)
{
    struct lh_sim_snapshot *snapshot = snapshot_at(reference, reference->step);
    uint64_t bytes = lh_sim_model_array_bytes(reference->model, unit, array) /
                     reference->model->units[unit].elements;
    uint8_t *target = array_at(reference, snapshot->state, unit, array);
    for (uint64_t i = first; i < first + count; i++) {
        /* In either width this is a number above 0 and far from the largest. */
        float value = 0.25F + 0.5F * (float)(lh_sim_mix(seed, i) % 251) / 256;
        uint32_t bits = 0;
        memcpy(&bits, &value, sizeof(bits));
        uint16_t half = (uint16_t)(bits >> 16);
        memcpy(target + i * bytes, bytes == sizeof(bits) ? (void *)&bits : (void *)&half, bytes);
    }
}

static void edit_undo(struct lh_sim_snapshot *snapshot)
{
    if (snapshot->edit == LH_SIM_EDIT_NONE)
        return;
    uint8_t *edited = snapshot->state;
    snapshot->state = snapshot->before;
    snapshot->before = edited;
    snapshot->edit = LH_SIM_EDIT_NONE;
}

void lh_sim_reference_begin_again(struct lh_sim_reference *reference)
{
    lh_sim_reference_return(reference, 0);
    edit_undo(snapshot_at(reference, 0));
}

void lh_sim_reference_edit_set(struct lh_sim_reference *reference, enum lh_sim_edit edit)
{
    snapshot_at(reference, reference->step)->edit = edit;
}

double lh_sim_reference_scale(const struct lh_sim_reference *reference, uint64_t step)
{
    return reference->has_scales ? 0.25 * (double)(1 + step % 5) : 1.0;
}

static void values_make(const struct lh_sim_reference *reference, uint64_t hash, uint32_t param,
                        enum lh_dtype dtype, void *values_out)
{
    for (uint64_t i = 0; i < reference->model->params[param].count; i++) {
        float value = value_of(hash = lh_sim_mix(hash, i));
        uint32_t bits = 0;
        memcpy(&bits, &value, sizeof(bits));
        if (dtype == LH_DTYPE_BF16)
            ((uint16_t *)values_out)[i] = (uint16_t)(bits >> 16);
        else if (dtype == LH_DTYPE_F16)
            ((uint16_t *)values_out)[i] = lh_half_round(bits);
        else
            ((float *)values_out)[i] = value;
    }
}

static uint64_t hash_of(const struct lh_sim_reference *reference, uint64_t step, uint32_t param)
{
    return lh_sim_mix(lh_sim_mix(reference->seed, step), param);
}

/* Draw with a probability of ppm in a million, independently of the order of calls. */
static bool has_luck(uint64_t hash, uint32_t ppm)
{
    return hash % LH_SIM_PPM_ONE < ppm;
}

bool lh_sim_reference_uses(const struct lh_sim_reference *reference, uint64_t step, uint32_t rank,
                           uint32_t block)
{
    uint64_t hash = lh_sim_mix(hash_of(reference, step, block), rank + UINT64_C(1000));
    return !has_luck(hash, reference->block_skip_ppm) || block == 0;
}

static bool is_used(const struct lh_sim_reference *reference, uint64_t step, uint32_t rank,
                    uint32_t unit)
{
    for (uint32_t i = 0; i < reference->model->block_count; i++) {
        const struct lh_sim_block *block = &reference->model->blocks[i];
        for (uint32_t j = 0; j < block->unit_count; j++) {
            if (block->units[j] == unit && lh_sim_reference_uses(reference, step, rank, i))
                return true;
        }
    }
    return false;
}

bool lh_sim_reference_contributes(const struct lh_sim_reference *reference, uint64_t step,
                                  uint32_t rank, uint32_t param)
{
    uint32_t unit = reference->model->params[param].unit;
    uint64_t hash = lh_sim_mix(hash_of(reference, step, param), rank + UINT64_C(2000));
    /* The first parameter is trained and used in every step. */
    bool is_skipped = has_luck(hash, reference->skip_ppm) && param > 0;
    return reference->model->units[unit].elements > 0 && !is_skipped &&
           is_used(reference, step, rank, unit);
}

bool lh_sim_reference_has_gradient(const struct lh_sim_reference *reference, uint64_t step,
                                   uint32_t param)
{
    bool has_any = false;
    for (uint32_t rank = 0; rank < reference->process_count && !has_any; rank++)
        has_any = lh_sim_reference_contributes(reference, step, rank, param);
    return has_any;
}

void lh_sim_reference_contribution(const struct lh_sim_reference *reference, uint64_t step,
                                   uint32_t rank, uint32_t param, void *gradient_out)
{
    uint32_t unit = reference->model->params[param].unit;
    uint64_t hash = lh_sim_mix(hash_of(reference, step, param), rank);
    values_make(reference, hash, param, reference->model->units[unit].dtype, gradient_out);
}

static float widened(const void *values, enum lh_dtype dtype, uint64_t index)
{
    uint32_t bits = 0;
    float value = 0;
    if (dtype == LH_DTYPE_F32)
        return ((const float *)values)[index];
    uint16_t half = ((const uint16_t *)values)[index];
    bits = dtype == LH_DTYPE_BF16 ? (uint32_t)half << 16 : lh_half_widen(half);
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static void sum_make(const struct lh_sim_reference *reference, uint64_t step, uint32_t param,
                     float *sum_out)
{
    enum lh_dtype dtype = reference->model->units[reference->model->params[param].unit].dtype;
    uint64_t count = reference->model->params[param].count;
    bool is_first = true;
    for (uint32_t rank = 0; rank < reference->process_count; rank++) {
        if (!lh_sim_reference_contributes(reference, step, rank, param))
            continue;
        lh_sim_reference_contribution(reference, step, rank, param, reference->contribution);
        for (uint64_t i = 0; i < count; i++) {
            float value = widened(reference->contribution, dtype, i);
            sum_out[i] = is_first ? value : sum_out[i] + value;
        }
        is_first = false;
    }
}

void lh_sim_reference_gradient(const struct lh_sim_reference *reference, uint64_t step,
                               uint32_t param, void *gradient_out)
{
    if (reference->process_count > 0) {
        sum_make(reference, step, param, gradient_out);
        return;
    }
    values_make(reference, hash_of(reference, step, param), param,
                lh_sim_model_gradient_dtype(reference->model, param), gradient_out);
}

static void param_update(struct lh_sim_reference *reference, struct lh_sim_snapshot *snapshot,
                         uint32_t index)
{
    const struct lh_sim_model *model = reference->model;
    const struct lh_engine_param *param = &model->params[index];
    const struct lh_engine_unit *unit = &model->units[param->unit];
    const struct lh_adam_kernel *kernels = NULL;
    int kernel_count = lh_adam_kernels(&kernels);
    uint64_t residual_bytes = lh_adam_residual_bytes(unit->dtype);
    LH_ASSERT(strcmp(kernels[kernel_count - 1].name, "ref") == 0);
    uint8_t *arrays[LH_SIM_ARRAY_COUNT];
    for (uint32_t i = 0; i < LH_SIM_ARRAY_COUNT; i++)
        arrays[i] = array_at(reference, snapshot->state, param->unit, (enum lh_sim_array)i);
    lh_sim_reference_gradient(reference, snapshot->step, index, reference->gradient);
    struct lh_adam_run run = {
        .param = arrays[LH_SIM_ARRAY_PARAM] + param->first * lh_dtype_bytes(unit->dtype),
        .residual = residual_bytes > 0
                        ? arrays[LH_SIM_ARRAY_RESIDUAL] + param->first * residual_bytes
                        : NULL,
        .moment1 = (float *)(void *)arrays[LH_SIM_ARRAY_MOMENT1] + param->first,
        .moment2 = (float *)(void *)arrays[LH_SIM_ARRAY_MOMENT2] + param->first,
        .gradient = reference->gradient,
        .count = param->count,
        .param_dtype = unit->dtype,
        .gradient_dtype = reference->process_count > 0
                              ? LH_DTYPE_F32
                              : lh_sim_model_gradient_dtype(reference->model, index),
    };
    struct lh_adam_hyper hyper = lh_sim_model_hyper(param->group, snapshot->step);
    struct lh_adam_scalars scalars = lh_adam_scalars_make(
        &hyper, ++snapshot->param_steps[index], lh_sim_reference_scale(reference, snapshot->step));
    kernels[kernel_count - 1].run[LH_RULE_ADAMW](&run, &scalars);
}

void lh_sim_reference_advance(struct lh_sim_reference *reference, const bool *has_gradient)
{
    const struct lh_sim_snapshot *before = snapshot_at(reference, reference->step);
    struct lh_sim_snapshot *after = snapshot_at(reference, reference->step + 1);
    uint32_t param_count = reference->model->param_count;
    LH_ASSERT(before->step == reference->step && state_make(reference, after));
    memcpy(after->state, before->state, reference->state_bytes);
    memcpy(after->param_steps, before->param_steps, param_count * sizeof(uint64_t));
    after->step = ++reference->step;
    after->edit = LH_SIM_EDIT_NONE;
    for (uint32_t i = 0; i < param_count; i++) {
        if (has_gradient[i])
            param_update(reference, after, i);
    }
}

void lh_sim_reference_return(struct lh_sim_reference *reference, uint64_t step)
{
    LH_ASSERT(snapshot_at(reference, step)->step == step);
    for (uint32_t i = 0; i < LH_SIM_SNAPSHOT_COUNT; i++) {
        if (reference->snapshots[i].step > step)
            reference->snapshots[i].step = UINT64_MAX;
    }
    reference->step = step;
}

int lh_sim_reference_compare_with(const struct lh_sim_reference *reference, struct lh_store *store,
                                  const uint8_t *state, struct lh_error *err)
{
    const struct lh_sim_model *model = reference->model;
    uint8_t *found = lh_alloc_zeroed(reference->alloc, 2, reference->state_bytes);
    if (!found)
        return lh_error_set(err, -ENOMEM, "no memory for %" PRIu64 " bytes",
                            2 * reference->state_bytes);
    const uint8_t *zeros = found + reference->state_bytes;
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < model->unit_count; i++) {
        for (uint32_t j = 0; rc == 0 && j < LH_SIM_ARRAY_COUNT; j++) {
            enum lh_sim_array array = (enum lh_sim_array)j;
            uint64_t bytes = lh_sim_model_array_bytes(model, i, array);
            if (bytes == 0 || lh_sim_model_extent(model, i, array) == LH_ENGINE_EXTENT_NONE)
                continue;
            rc = lh_store_read_sync(store, lh_sim_model_extent(model, i, array), 0, found, bytes,
                                    err);
            const uint8_t *expected =
                state ? state + reference->offsets[i * LH_SIM_ARRAY_COUNT + j] : zeros;
            if (rc == 0 && memcmp(found, expected, bytes) != 0)
                rc =
                    lh_error_set(err, -EPROTO,
                                 "array %" PRIu32 " of unit %" PRIu32 " is not %s of step %" PRIu64,
                                 j, i, state ? "that" : "the zeros", lh_store_step(store));
        }
    }
    lh_free(reference->alloc, found);
    return rc;
}

int lh_sim_reference_compare(struct lh_sim_reference *reference, struct lh_store *store,
                             bool may_be_older, struct lh_error *err)
{
    struct lh_sim_snapshot *snapshot = snapshot_at(reference, lh_store_step(store));
    enum lh_sim_edit edit = snapshot->edit;
    int rc = -EPROTO;
    if (edit != LH_SIM_EDIT_STAGED)
        rc = lh_sim_reference_compare_with(reference, store, snapshot->state, err);
    bool may_be_before = edit == LH_SIM_EDIT_STAGED || edit == LH_SIM_EDIT_COMMITTING ||
                         (edit == LH_SIM_EDIT_COMMITTED && may_be_older);
    bool is_before = false;
    if (rc == -EPROTO && may_be_before) {
        rc = lh_sim_reference_compare_with(reference, store, snapshot->before, err);
        is_before = rc == 0;
    }
    if (is_before)
        edit_undo(snapshot);
    else if (rc == 0 && edit == LH_SIM_EDIT_COMMITTING)
        snapshot->edit = LH_SIM_EDIT_COMMITTED;
    return rc;
}
