/*
 * The norm of all gradients of a step, known before the first update: if every update is deferred,
 * a worker sums the squares of each unit as soon as its gradients have arrived, during backward.
 * Without opts.norms the norm may never be requested; until the first request, only gradients that
 * are spilled to SSD are summed, because they stay in memory only until their sum is known. An
 * update waits for its unit's sum.
 *
 * If the update rule has rows ([Note: Second moments of rows] in compute/rule.h), the same job also
 * sums each row of the unit, and every update waits for it, whatever the schedule. A row's sum has
 * the order of a norm's, so it depends neither on chunks nor on the worker.
 *
 * If it has factors ([Note: Factors] in compute/factor.h), a second job moves those of the unit in
 * its bytes in memory, which nobody else reads or writes while it is UPDATING, before the first of
 * its chunks is computed. The unit's gradients are in memory until then: the budget has room for
 * all that wait, so that none are spilled.
 *
 * Source: torch.nn.utils.clip_grad_norm_ (the rule; none of the papers clips gradients).
 */
#include "compute/norm.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "sched/engine_private.h"

/* How often a job reads gradients: for rows, columns and the update. */
#define FACTOR_PASS_COUNT 3

static void state_set(struct lh_unit *unit, enum lh_norm_state state)
{
    LH_ASSERT(lh_states_may(lh_states_norm, (int)unit->parts->norm.state, (int)state));
    unit->parts->norm.state = state;
}

static void factors_set(struct lh_unit *unit, enum lh_norm_state state)
{
    LH_ASSERT(lh_states_may(lh_states_norm, (int)unit->parts->norm.factors, (int)state));
    unit->parts->norm.factors = state;
}

static bool has_norm(const struct lh_unit *unit)
{
    return unit->update.gradient_count > 0 && !lh_unit_is_given(unit);
}

static bool needs_rows(const struct lh_unit *unit)
{
    return unit->desc->elements > 0 && lh_rules[unit->desc->rule].has_rows &&
           !lh_unit_is_given(unit);
}

/* Whether an update waits for the sums of rows. What idle units owe has gradients of zeros. */
static bool awaits_rows(const struct lh_unit *unit)
{
    return needs_rows(unit) && !unit->update.idle.is_due;
}

static bool needs_factors(const struct lh_unit *unit)
{
    return unit->desc->elements > 0 && lh_rules[unit->desc->rule].has_factors &&
           !lh_unit_is_given(unit);
}

/* The sum of squares of a parameter's elements [at, end), across chunk boundaries. */
static double range_sum(const struct lh_engine *engine, uint32_t param, uint64_t at, uint64_t end)
{
    const uint64_t chunk_elements = engine->budget.chunk_elements;
    struct lh_norm_sum sum = {0};

    LH_ASSERT(param < engine->param_count);
    while (at < end) {
        uint64_t next = lh_min_u64(end, (at / chunk_elements + 1) * chunk_elements);

        lh_norm_sum_add(&sum, lh_gradient_at(engine, param, at), engine->gradients[param].dtype,
                        next - at);
        at = next;
    }
    return lh_norm_sum_end(&sum);
}

/* Runs on a worker: sum each parameter from its first element on, across chunk boundaries. */
static void norm_run(struct lh_exec_job *job)
{
    struct lh_unit *unit = job->context;
    const struct lh_engine *engine = unit->engine;

    for (uint32_t i = 0; i < unit->desc->param_count; i++) {
        uint32_t param = unit->desc->param_first + i;
        const struct lh_engine_param *desc = &engine->params[param];
        const struct lh_gradient *gradient = &engine->gradients[param];
        uint64_t end = gradient->pointer ? desc->first + desc->count : desc->first;

        engine->norm->sums[param] = range_sum(engine, param, desc->first, end);
        uint64_t row = engine->norm->row_first[param];
        LH_ASSERT(!needs_rows(unit) || engine->norm->row_sums);
        for (uint64_t at = desc->first; needs_rows(unit) && at < end; at += desc->row_elements)
            engine->norm->row_sums[row++] =
                range_sum(engine, param, at, lh_min_u64(at + desc->row_elements, end));
    }
}

static int sums_compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Add all parameters' sums in an order independent of units: by value, the smallest first. */
static double sums_add(struct lh_engine *engine)
{
    double *sums = engine->norm->sums + engine->param_count;
    double total = 0;
    uint32_t count = 0;

    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];

        for (uint32_t j = 0; has_norm(unit) && j < unit->desc->param_count; j++) {
            LH_ASSERT(count < engine->param_count);
            sums[count++] = engine->norm->sums[unit->desc->param_first + j];
        }
    }
    qsort(sums, count, sizeof(*sums), sums_compare);
    for (uint32_t i = 0; i < count; i++)
        total += sums[i];
    return total;
}

static void norm_done(struct lh_engine *engine, struct lh_job *job)
{
    struct lh_unit *unit = job->exec.context;
    LH_ASSERT(unit->parts->norm.state == LH_NORM_STATE_RUNNING);
    state_set(unit, LH_NORM_STATE_DONE);
    if (engine->spill)
        lh_spill_release(engine, unit);
}

static void norm_start(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(unit->update.gradient_count > 0 && unit->parts->landing.count == 0);
    state_set(unit, LH_NORM_STATE_RUNNING);
    for (uint32_t i = 0; needs_rows(unit) && i < unit->desc->param_count; i++) {
        uint32_t param = unit->desc->param_first + i;

        engine->gradients[param].row_sums = engine->norm->row_sums + engine->norm->row_first[param];
    }
    unit->parts->norm.job = (struct lh_job){
        .exec = {.run = norm_run, .context = unit, .work_bytes = unit->update.gradient_bytes},
        .done = norm_done,
    };
    lh_job_submit(engine, &unit->parts->norm.job);
}

void lh_norm_consider(struct lh_engine *engine, struct lh_unit *unit)
{
    if ((engine->norm->is_taken || unit->parts->spill.is_chosen) &&
        unit->parts->norm.state == LH_NORM_STATE_NONE && has_norm(unit) &&
        unit->update.gradient_count == unit->desc->param_count && unit->parts->landing.count == 0)
        norm_start(engine, unit);
}

/* Once the norm is requested, no gradient will follow: also sum incomplete units. */
static bool pump_after(struct lh_engine *engine)
{
    bool moved = false;
    bool is_done = true;

    if (!engine->norm->is_asked)
        return false;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];

        if (!has_norm(unit))
            continue;
        if (unit->parts->norm.state == LH_NORM_STATE_NONE && unit->parts->landing.count == 0) {
            norm_start(engine, unit);
            moved = true;
        }
        is_done &= unit->parts->norm.state == LH_NORM_STATE_DONE;
    }
    if (!is_done)
        return moved;
    engine->norm->square_sum = sums_add(engine);
    engine->norm->is_asked = false;
    lh_request_reply(engine, LH_REQUEST_NORM);
    return true;
}

/* Where gradients of a parameter are; see lh_factor_gradient_fn. */
static const void *gradient_at(const void *context, uint64_t at, uint64_t count,
                               uint64_t *count_out)
{
    const struct lh_norm_factors *of = context;
    const uint64_t chunk_elements = of->engine->budget.chunk_elements;
    uint64_t element = of->engine->params[of->param].first + at;

    *count_out = lh_min_u64(count, chunk_elements - element % chunk_elements);
    return lh_gradient_at(of->engine, of->param, element);
}

/* Runs on a worker: move the factors of each parameter that has a gradient. */
static void factors_run(struct lh_exec_job *job)
{
    const struct lh_unit *unit = job->context;
    const struct lh_engine *engine = unit->engine;

    LH_ASSERT(unit->parts->norm.factors == LH_NORM_STATE_RUNNING);
    for (uint32_t i = 0; i < unit->desc->param_count; i++) {
        struct lh_norm_factors *of = &engine->norm->factors[unit->desc->param_first + i];

        if (engine->gradients[of->param].pointer && of->work.count > 0)
            lh_factor_update(&of->factors, &of->work);
    }
}

static void factors_done(struct lh_engine *engine, struct lh_job *job)
{
    struct lh_unit *unit = job->exec.context;

    for (uint32_t i = 0; i < unit->desc->param_count; i++) {
        uint32_t param = unit->desc->param_first + i;

        engine->gradients[param].factors = &engine->norm->factors[param].factors;
    }
    factors_set(unit, LH_NORM_STATE_DONE);
}

/* Describe the work for a parameter of a unit that is UPDATING. */
static void factors_describe(struct lh_engine *engine, const struct lh_unit *unit, uint32_t param)
{
    const struct lh_engine_param *desc = &engine->params[param];
    const struct lh_adam_hyper *hyper = &engine->hypers[lh_core_step(engine) % 2][desc->group];
    const uint64_t element_bytes = lh_dtype_bytes(unit->desc->dtype);
    struct lh_norm_factors *of = &engine->norm->factors[param];
    double step = (double)(engine->param_steps[param] + 1);

    LH_ASSERT(desc->factor_first >= desc->first + desc->count);
    *of = (struct lh_norm_factors){
        .engine = engine,
        .param = param,
        .factors = {.values = (void *)(unit->memory + desc->factor_first * element_bytes),
                    .rows = desc->factor_rows,
                    .columns = desc->factor_columns,
                    .eps1 = hyper->eps < 0 ? (double)FLT_EPSILON : hyper->eps},
        .work = {.gradient_at = gradient_at,
                 .context = of,
                 .gradient_dtype = engine->gradients[param].dtype,
                 .param = unit->memory + desc->first * element_bytes,
                 .param_dtype = unit->desc->dtype,
                 .count = desc->count,
                 .gradient_scale = engine->gradient_scales[lh_core_step(engine) % 2],
                 .w = pow(step, hyper->beta1),
                 .relative = fmin(hyper->lr, 1 / sqrt(step)),
                 .eps2 = hyper->beta2},
    };
}

static void factors_start(struct lh_engine *engine, struct lh_unit *unit)
{
    LH_ASSERT(unit->parts->norm.state != LH_NORM_STATE_RUNNING);
    factors_set(unit, LH_NORM_STATE_RUNNING);
    for (uint32_t i = 0; i < unit->desc->param_count; i++)
        factors_describe(engine, unit, unit->desc->param_first + i);
    unit->parts->norm.job = (struct lh_job){
        .exec = {.run = factors_run,
                 .context = unit,
                 .work_bytes = FACTOR_PASS_COUNT * unit->update.gradient_bytes + unit->desc->bytes},
        .done = factors_done,
    };
    lh_job_submit(engine, &unit->parts->norm.job);
}

/* Sum units whose updates are queued, of which some gradients may not come, or move factors. */
static bool pump_gradients(struct lh_engine *engine)
{
    bool moved = false;

    LH_ASSERT(engine->updates.first <= engine->updates.count);
    for (uint32_t i = engine->updates.first; i < engine->updates.count; i++) {
        struct lh_unit *unit = lh_engine_unit_at(engine, engine->updates.queue[i]);

        if (awaits_rows(unit) && unit->parts->norm.state == LH_NORM_STATE_NONE &&
            unit->parts->landing.count == 0) {
            norm_start(engine, unit);
            moved = true;
        }
        if (needs_factors(unit) && unit->state == LH_UNIT_STATE_UPDATING &&
            unit->parts->norm.factors == LH_NORM_STATE_NONE && unit->parts->landing.count == 0) {
            factors_start(engine, unit);
            moved = true;
        }
    }
    return moved;
}

static void forget(struct lh_unit *unit)
{
    if (unit->parts->norm.state != LH_NORM_STATE_NONE)
        state_set(unit, LH_NORM_STATE_NONE);
    if (unit->parts->norm.factors != LH_NORM_STATE_NONE)
        factors_set(unit, LH_NORM_STATE_NONE);
}

static void step_forgotten(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        forget(&engine->units[i]);
}

static void gradient_taken(struct lh_engine *engine, uint32_t param)
{
    LH_ASSERT(param < engine->param_count);
    lh_norm_consider(engine, lh_engine_unit_at(engine, engine->params[param].unit));
}

static bool update_may_start(const struct lh_engine *engine, const struct lh_unit *unit)
{
    (void)engine;
    return awaits_rows(unit) ? unit->parts->norm.state == LH_NORM_STATE_DONE
                             : unit->parts->norm.state != LH_NORM_STATE_RUNNING;
}

static bool update_has_begun(const struct lh_engine *engine, const struct lh_unit *unit)
{
    (void)engine;
    return unit->parts->norm.factors != LH_NORM_STATE_NONE;
}

static bool chunk_may_compute(const struct lh_engine *engine, const struct lh_chunk *chunk)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];
    return !needs_factors(unit) || unit->parts->norm.factors == LH_NORM_STATE_DONE;
}

static bool message(struct lh_engine *engine, const struct lh_ring_message *message)
{
    if (message->words[0] != LH_MESSAGE_NORM)
        return false;
    LH_ASSERT(!engine->norm->is_asked); /* lh_norm_wait() sends one request at a time */
    engine->norm->is_asked = true;
    engine->norm->is_taken = true; /* from now on, units are summed during backward */
    lh_spill_consider_all(engine);
    return true;
}

int lh_norm_wait(struct lh_engine *engine, double *square_sum_out, int timeout_ms)
{
    LH_ASSERT(engine->opts.schedule == LH_ENGINE_SCHEDULE_SERIAL ||
              engine->opts.schedule == LH_ENGINE_SCHEDULE_DEFERRED || engine->opts.repeats);
    if (atomic_load(&engine->failed))
        return lh_core_fail_code(engine);
    if (lh_request_is_pending(&engine->requests[LH_REQUEST_NORM])) {
        lh_request_join(engine, LH_REQUEST_NORM);
    } else if (!lh_request_is_current(engine, LH_REQUEST_NORM)) {
        lh_request_send(engine, LH_REQUEST_NORM);
        lh_engine_post(engine, LH_MESSAGE_NORM, 0, 0, 0);
    }
    int rc = lh_request_wait(engine, LH_REQUEST_NORM, timeout_ms);
    if (rc > 0)
        *square_sum_out = engine->norm->square_sum;
    return rc;
}

const double *lh_norm_sums(const struct lh_engine *engine)
{
    LH_ASSERT(!lh_request_is_pending(&engine->requests[LH_REQUEST_NORM]));
    return engine->norm ? engine->norm->sums : NULL;
}

static bool any_unit(const struct lh_engine *engine, bool (*is_so)(const struct lh_unit *unit))
{
    bool is_any = false;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        is_any |= is_so(&engine->units[i]);
    return is_any;
}

bool lh_norm_is_of_rule(const struct lh_engine *engine)
{
    return any_unit(engine, needs_rows) || any_unit(engine, needs_factors);
}

/* Allocate the sums of rows. */
static int rows_create(struct lh_engine *engine, struct lh_error *err)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < engine->param_count; i++) {
        const struct lh_engine_param *param = &engine->params[i];
        engine->norm->row_first[i] = count;
        if (!needs_rows(&engine->units[param->unit]))
            continue;
        LH_ASSERT(param->count == 0 || param->row_elements > 0);
        count += lh_div_ceil(param->count, lh_max_u64(param->row_elements, 1));
    }
    engine->norm->row_sums = lh_alloc_zeroed(engine->alloc, count, sizeof(double));
    if (!engine->norm->row_sums)
        return lh_error_set(err, -ENOMEM, "no memory for the sums of %" PRIu64 " rows", count);
    return 0;
}

static int factors_create(struct lh_engine *engine, struct lh_error *err)
{
    engine->norm->factors =
        lh_alloc_zeroed(engine->alloc, engine->param_count, sizeof(*engine->norm->factors));
    if (!engine->norm->factors)
        return lh_error_set(err, -ENOMEM, "no memory for the factors of %u parameters",
                            engine->param_count);
    return 0;
}

int lh_norm_create(struct lh_engine *engine, struct lh_error *err)
{
    uint64_t count = lh_max_u64(engine->param_count, 1);
    LH_TRY(LH_ENGINE_PART_CREATE(engine, norm, err));
    engine->norm->is_taken = engine->opts.norms;
    engine->norm->sums = lh_alloc_zeroed(engine->alloc, count, 2 * sizeof(double));
    engine->norm->row_first = lh_alloc_zeroed(engine->alloc, count, sizeof(uint64_t));
    if (!engine->norm->sums || !engine->norm->row_first)
        return lh_error_set(err, -ENOMEM, "no memory for the norms of %u parameters",
                            engine->param_count);
    if (any_unit(engine, needs_factors))
        LH_TRY(factors_create(engine, err));
    return any_unit(engine, needs_rows) ? rows_create(engine, err) : 0;
}

void lh_norm_destroy(struct lh_engine *engine)
{
    if (!engine->norm)
        return;
    lh_free(engine->alloc, engine->norm->sums);
    lh_free(engine->alloc, engine->norm->row_sums);
    lh_free(engine->alloc, engine->norm->row_first);
    lh_free(engine->alloc, engine->norm->factors);
}

const struct lh_feature lh_norm_feature = {
    .name = "norm",
    .message = message,
    .gradient_taken = gradient_taken,
    .update_may_start = update_may_start,
    .update_has_begun = update_has_begun,
    .chunk_may_compute = chunk_may_compute,
    .step_forgotten = step_forgotten,
    .pump_gradients = pump_gradients,
    .pump_after = pump_after,
};
