#include "rig_reference.h"

#include <stdlib.h>
#include <string.h>

#include "compute/adam.h"
#include "compute/half.h"
#include "compute/newton_schulz.h"
#include "lh_test.h"

uint64_t rig_array_bytes(const struct lh_engine_unit *unit, enum rig_array array)
{
    if (array != RIG_ARRAY_PARAM && unit->is_given)
        return 0;
    switch (array) {
    case RIG_ARRAY_PARAM:
        return unit->bytes;
    case RIG_ARRAY_RESIDUAL:
        return unit->elements * lh_adam_residual_bytes(unit->dtype);
    case RIG_ARRAY_MOMENT2:
        return lh_rules[unit->rule].has_moment2 ? unit->elements * sizeof(float) : 0;
    default:
        return unit->elements * sizeof(float);
    }
}

uint32_t rig_array_extent(const struct lh_engine_unit *unit, enum rig_array array)
{
    const uint32_t extents[RIG_ARRAY_COUNT] = {unit->param_extent, unit->residual_extent,
                                               unit->moment1_extent, unit->moment2_extent};
    return extents[array];
}

uint8_t *rig_array_at(const struct rig *rig, uint8_t *state, uint32_t unit, enum rig_array array)
{
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        for (enum rig_array j = RIG_ARRAY_PARAM; j < RIG_ARRAY_COUNT; j++) {
            if (i == unit && j == array)
                return state;
            state += rig_array_bytes(&rig->units[i], j);
        }
    }
    LH_CHECK(!"an array");
    return NULL;
}

static void half_master_store(uint8_t *params, float *masters, uint64_t index, float value)
{
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof(bits));
    ((uint16_t *)(void *)params)[index] = lh_half_round(bits);
    masters[index] = value;
}

void rig_reference_init(struct rig *rig)
{
    uint64_t seed = 1;
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        for (enum rig_array j = RIG_ARRAY_PARAM; j < RIG_ARRAY_COUNT; j++)
            rig->state_bytes += rig_array_bytes(&rig->units[i], j);
    }
    rig->state = calloc(1, rig->state_bytes);
    void *scratch = malloc(rig->state_bytes); /* of residuals that the rig does not have */
    LH_CHECK(rig->state && scratch);
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++) {
        const struct lh_engine_param *param = &rig->params[i];
        const struct lh_engine_unit *unit = &rig->units[param->unit];
        uint8_t *target = rig_array_at(rig, rig->state, param->unit, RIG_ARRAY_PARAM);
        void *residual = unit->is_given
                             ? scratch
                             : rig_array_at(rig, rig->state, param->unit, RIG_ARRAY_RESIDUAL);
        for (uint64_t j = 0; j < param->count; j++) {
            float value = (float)((double)(int32_t)lh_test_random(&seed) / 4e9);
            if (unit->dtype == LH_DTYPE_BF16)
                lh_adam_split(&value, (uint16_t *)(void *)target + param->first + j,
                              (int16_t *)residual + param->first + j, 1);
            else if (unit->dtype == LH_DTYPE_F32)
                memcpy(target + (param->first + j) * 4, &value, 4);
            else if (unit->dtype == LH_DTYPE_F16)
                half_master_store(target, residual, param->first + j, value);
            else
                target[param->first + j] = (uint8_t)j;
        }
        rig->gradients[i] = calloc(param->count, sizeof(float));
        LH_CHECK(rig->gradients[i]);
    }
    free(scratch);
}

/*
 * Return what Muon adds to a matrix, for the caller to free. test_newton_schulz.c compares the bits
 * of all kernels, of which the best one is used here: the reference takes minutes.
 */
static float *matrix_update(const struct rig *rig, uint32_t index, const struct lh_adam_run *run,
                            const struct lh_adam_scalars *scalars)
{
    const struct lh_engine_param *param = &rig->params[index];
    const uint64_t columns = param->count / param->matrix_rows;
    const uint64_t gram = lh_newton_schulz_gram_floats(param->matrix_rows, columns);
    const uint64_t scratch = lh_newton_schulz_scratch_floats(param->matrix_rows, columns);
    const struct lh_newton_schulz_kernel *const *kernels = NULL;
    LH_CHECK(lh_newton_schulz_kernels(&kernels) > 0);
    float *memory = calloc(param->count + 2 * gram + scratch, sizeof(*memory));
    LH_CHECK(memory);
    struct lh_newton_schulz matrix = {memory, param->matrix_rows, columns, memory + param->count,
                                      memory + param->count + gram};
    struct lh_adam_segment segment = {.count = param->count,
                                      .gradient = run->gradient,
                                      .gradient_dtype = run->gradient_dtype,
                                      .scalars = *scalars,
                                      .update = memory};

    lh_newton_schulz_momentum(&segment, run->moment1);
    lh_newton_schulz_begin(&matrix, scalars->eps);
    for (int i = 0; i < LH_NEWTON_SCHULZ_STEPS * LH_NEWTON_SCHULZ_STAGE_COUNT; i++) {
        enum lh_newton_schulz_stage stage = i % LH_NEWTON_SCHULZ_STAGE_COUNT;
        uint64_t task_count = lh_newton_schulz_task_count(&matrix, stage);

        for (uint64_t task = 0; task < task_count; task++)
            lh_newton_schulz_task(kernels[0], &matrix, stage, task,
                                  memory + param->count + 2 * gram);
    }
    return memory;
}

void rig_reference_update(struct rig *rig, uint32_t index)
{
    const struct lh_engine_param *param = &rig->params[index];
    const struct lh_engine_unit *unit = &rig->units[param->unit];
    const struct lh_adam_kernel *kernels = NULL;
    int kernel_count = lh_adam_kernels(&kernels);
    uint64_t residual_bytes = lh_adam_residual_bytes(unit->dtype);
    if (unit->is_given) {
        uint64_t bytes = lh_dtype_bytes(unit->dtype);
        memcpy(rig_array_at(rig, rig->state, param->unit, RIG_ARRAY_PARAM) + param->first * bytes,
               rig->gradients[index], param->count * bytes);
        rig->param_steps[index]++;
        return;
    }
    uint8_t *arrays[RIG_ARRAY_COUNT];
    for (enum rig_array i = RIG_ARRAY_PARAM; i < RIG_ARRAY_COUNT; i++)
        arrays[i] = rig_array_at(rig, rig->state, param->unit, i);
    struct lh_adam_run run = {
        .param = arrays[RIG_ARRAY_PARAM] + param->first * lh_dtype_bytes(unit->dtype),
        .residual =
            residual_bytes > 0 ? arrays[RIG_ARRAY_RESIDUAL] + param->first * residual_bytes : NULL,
        .moment1 = (float *)(void *)arrays[RIG_ARRAY_MOMENT1] + param->first,
        .moment2 = (float *)(void *)arrays[RIG_ARRAY_MOMENT2] + param->first,
        .gradient = rig->gradients[index],
        .count = param->count,
        .param_dtype = unit->dtype,
        .gradient_dtype = rig_gradient_dtype(rig, index),
    };
    const struct lh_adam_hyper *hyper = &rig->hypers[param->group];
    struct lh_adam_scalars scalars = lh_rules[unit->rule].scalars(
        hyper, ++rig->param_steps[index], rig->factor > 0 ? rig->factor : 1.0);
    float *update = NULL;
    if (unit->rule == LH_RULE_MUON) {
        scalars.step_size = (float)(hyper->lr * param->lr_ratio);
        update = run.moment2 = matrix_update(rig, index, &run, &scalars);
    }
    LH_CHECK(strcmp(kernels[kernel_count - 1].name, "ref") == 0);
    kernels[kernel_count - 1].run[unit->rule](&run, &scalars);
    free(update);
}
