/*
 * The norm of all gradients of a step, known before the first update: where every update is
 * deferred, each unit's sums of squares are taken by a worker when its gradients are there, behind
 * backward. Nobody may ask for them: until somebody has, only gradients that leave for SSD are
 * summed, which stay in memory until their sum is known; and an update waits for its unit's sum.
 *
 * Source: torch.nn.utils.clip_grad_norm_ (the rule; none of the papers clips).
 */
#include "compute/norm.h"

#include <stdlib.h>

#include "sched/engine_private.h"

/* On a worker: each parameter's, from its own first element on, wherever its unit is cut. */
void lh_norm_run(struct lh_exec_job *job)
{
    struct lh_unit *unit = job->context;
    const struct lh_engine *engine = unit->engine;
    uint64_t chunk_elements = engine->budget.chunk_elements;

    for (uint32_t i = 0; i < unit->desc.param_count; i++) {
        uint32_t param = unit->desc.param_first + i;
        const struct lh_engine_param *desc = &engine->params[param];
        const struct lh_gradient *gradient = &engine->gradients[param];
        uint64_t end = gradient->pointer ? desc->first + desc->count : desc->first;
        struct lh_norm_sum sum = {0};

        for (uint64_t at = desc->first; at < end;) {
            uint64_t next = lh_min_u64(end, (at / chunk_elements + 1) * chunk_elements);

            lh_norm_sum_add(&sum, lh_landing_bytes(engine, param, at), gradient->dtype, next - at);
            at = next;
        }
        engine->square_sums[param] = lh_norm_sum_end(&sum);
    }
}

static int sums_compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of all parameters in one order that does not know of units: by size, the smallest first. */
static double sums_add(struct lh_engine *engine)
{
    double *sums = engine->square_sums + engine->param_count;
    double total = 0;
    uint32_t count = 0;

    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];

        for (uint32_t j = 0; unit->gradient_count > 0 && j < unit->desc.param_count; j++)
            sums[count++] = engine->square_sums[unit->desc.param_first + j];
    }
    qsort(sums, count, sizeof(*sums), sums_compare);
    for (uint32_t i = 0; i < count; i++)
        total += sums[i];
    return total;
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
    }
    if (!is_done)
        return moved;
    engine->square_sum = sums_add(engine);
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
