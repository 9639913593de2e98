#include "sched/gradient.h"

#include "sched/engine_private.h"

void lh_gradient_take(struct lh_engine *engine, uint32_t param, const void *pointer,
                      enum lh_dtype dtype)
{
    LH_ASSERT(param < engine->param_count);
    struct lh_gradient *gradient = &engine->gradients[param];
    uint32_t index = engine->params[param].unit;
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    LH_ASSERT(engine->step_state == LH_STEP_STATE_OPEN); /* lh_engine_over_wait() ensures this */
    LH_ASSERT(unit->desc->elements > 0);
    LH_ASSERT(gradient->pointer == NULL && !unit->update.is_queued);
    LH_ASSERT(atomic_load(&gradient->is_held));
    bool is_accepted = LH_FEATURE_ALL(engine, gradient_accepts, unit);
    if (!is_accepted)
        return;
    gradient->pointer = pointer;
    gradient->dtype = dtype;
    if (unit->update.gradient_count++ == 0)
        engine->updates.gradient_unit_count++;
    unit->update.gradient_bytes += engine->params[param].count * lh_dtype_bytes(dtype);
    LH_ASSERT(unit->update.gradient_count <= unit->desc->param_count);
    LH_FEATURE_CALL(engine, gradient_taken, param);
    lh_update_consider(engine, index);
}

void lh_gradient_release(struct lh_engine *engine, uint32_t param)
{
    LH_ASSERT(param < engine->param_count);
    atomic_store(&engine->gradients[param].is_held, false);
    atomic_fetch_add(&engine->gradients_released, 1);
}

void lh_gradient_release_unit(struct lh_engine *engine, struct lh_unit *unit)
{
    for (uint32_t i = 0; i < unit->desc->param_count; i++)
        lh_gradient_release(engine, unit->desc->param_first + i);
    lh_gradient_unhold(engine, unit->update.gradient_bytes);
    unit->update.gradient_bytes = 0;
    lh_core_notify(engine);
}

void lh_gradient_hold(struct lh_engine *engine, uint64_t bytes)
{
    uint64_t held = atomic_fetch_add(&engine->update_gradient_bytes, bytes) + bytes;
    struct lh_engine_step_stats *stats = lh_core_stats(engine, lh_core_step(engine));
    LH_ASSERT(held >= bytes);
    stats->gradient_bytes_max = lh_max_u64(stats->gradient_bytes_max, held);
}

void lh_gradient_hold_unit(struct lh_engine *engine, struct lh_unit *unit)
{
    if (unit->update.is_counted)
        return;
    unit->update.is_counted = true;
    lh_gradient_hold(engine, unit->update.gradient_bytes);
}

void lh_gradient_unhold(struct lh_engine *engine, uint64_t bytes)
{
    uint64_t before = atomic_fetch_sub(&engine->update_gradient_bytes, bytes);
    LH_ASSERT(before >= bytes);
}

const uint8_t *lh_gradient_at(const struct lh_engine *engine, uint32_t param, uint64_t element)
{
    LH_ASSERT(param < engine->param_count);
    const struct lh_gradient *gradient = &engine->gradients[param];
    LH_ASSERT(gradient->pointer && element >= engine->params[param].first);
    LH_ASSERT(element < engine->params[param].first + engine->params[param].count);
    if (engine->gradient_at)
        return engine->gradient_at(engine, param, element);
    return (const uint8_t *)gradient->pointer +
           (element - engine->params[param].first) * lh_dtype_bytes(gradient->dtype);
}
