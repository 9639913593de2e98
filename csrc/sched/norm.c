/*
 * The norm of all gradients of a step, known before the first update: where every update is
 * deferred, each unit's sums of squares are taken by a worker when its gradients are there, behind
 * backward. Nobody may ask for them: until somebody has, only gradients that leave for SSD are
 * summed, which stay in memory until their sum is known; and an update waits for its unit's sum.
 *
 * Source: torch.nn.utils.clip_grad_norm_ (the rule; none of the papers clips).
 */
#include "compute/norm.h"
#include "sched/engine_private.h"

/* On a worker. */
void lh_norm_run(struct lh_exec_job *job)
{
    struct lh_unit *unit = job->context;
    const struct lh_engine *engine = unit->engine;
    double sum = 0;

    for (uint64_t at = 0; at < unit->desc.elements; at += LH_NORM_BLOCK_ELEMENTS) {
        double block = 0;

        for (uint32_t i = 0; i < unit->desc.param_count; i++) {
            const struct lh_engine_param *param = &engine->params[unit->desc.param_first + i];
            const struct lh_gradient *gradient = &engine->gradients[unit->desc.param_first + i];
            uint64_t first = lh_max_u64(param->first, at);
            uint64_t end = lh_min_u64(param->first + param->count, at + LH_NORM_BLOCK_ELEMENTS);

            if (first < end && gradient->pointer)
                block +=
                    lh_norm_square_sum(lh_landing_bytes(engine, unit->desc.param_first + i, first),
                                       gradient->dtype, end - first);
        }
        sum += block;
    }
    unit->square_sum = sum;
}

static void norm_start(struct lh_engine *engine, struct lh_unit *unit)
{
    unit->norm_state = LH_NORM_STATE_RUNNING;
    unit->norm_job = (struct lh_exec_job){
        .run = lh_norm_run, .context = unit, .work_bytes = unit->gradient_bytes};
    lh_job_submit(engine, &unit->norm_job);
}

void lh_norm_consider(struct lh_engine *engine, struct lh_unit *unit)
{
    if ((engine->takes_norms || unit->spills) && unit->norm_state == LH_NORM_STATE_NONE &&
        unit->gradient_count == unit->desc.param_count && lh_landing_is_over(unit))
        norm_start(engine, unit);
}

void lh_norm_done(struct lh_engine *engine, struct lh_unit *unit)
{
    unit->norm_state = LH_NORM_STATE_DONE;
    if (unit->spill_state == LH_SPILL_STATE_DONE)
        lh_spill_release(engine, unit);
}

void lh_norm_ask(struct lh_engine *engine)
{
    engine->norm_is_asked = true;
    engine->takes_norms = true; /* behind backward, from the next step on */
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        lh_spill_consider(engine, i);
}

/* Once it is asked no gradient is to come: units that have not all of theirs are begun with. */
bool lh_norm_pump(struct lh_engine *engine)
{
    double sum = 0;
    bool moved = false;
    bool is_done = true;

    if (!engine->norm_is_asked)
        return false;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];

        if (unit->gradient_count == 0)
            continue;
        if (unit->norm_state == LH_NORM_STATE_NONE && lh_landing_is_over(unit)) {
            norm_start(engine, unit);
            moved = true;
        }
        is_done &= unit->norm_state == LH_NORM_STATE_DONE;
        if (is_done)
            sum += unit->square_sum;
    }
    if (!is_done)
        return moved;
    engine->square_sum = sum;
    engine->norm_is_asked = false;
    atomic_fetch_add(&engine->norms_done, 1);
    lh_engine_notify(engine);
    return true;
}

void lh_norm_forget(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        engine->units[i].norm_state = LH_NORM_STATE_NONE;
}
