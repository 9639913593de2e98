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
 * Source: torch.nn.utils.clip_grad_norm_ (the rule; none of the papers clips gradients).
 */
#include "compute/norm.h"

#include <inttypes.h>
#include <stdlib.h>

#include "sched/engine_private.h"

static void state_set(struct lh_unit *unit, enum lh_norm_state state)
{
    LH_ASSERT(lh_states_may(lh_states_norm, (int)unit->parts->norm.state, (int)state));
    unit->parts->norm.state = state;
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
    if (unit->parts->spill.state == LH_SPILL_STATE_DONE)
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

/* Sum units whose updates are queued, of which some gradients may not come. */
static bool pump_gradients(struct lh_engine *engine)
{
    bool moved = false;

    LH_ASSERT(engine->updates.first <= engine->updates.count);
    for (uint32_t i = engine->updates.first; i < engine->updates.count; i++) {
        struct lh_unit *unit = lh_engine_unit_at(engine, engine->updates.queue[i]);

        if (needs_rows(unit) && unit->parts->norm.state == LH_NORM_STATE_NONE &&
            unit->parts->landing.count == 0) {
            norm_start(engine, unit);
            moved = true;
        }
    }
    return moved;
}

static void forget(struct lh_unit *unit)
{
    if (unit->parts->norm.state != LH_NORM_STATE_NONE)
        state_set(unit, LH_NORM_STATE_NONE);
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
    return needs_rows(unit) ? unit->parts->norm.state == LH_NORM_STATE_DONE
                            : unit->parts->norm.state != LH_NORM_STATE_RUNNING;
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
              engine->opts.schedule == LH_ENGINE_SCHEDULE_DEFERRED);
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

bool lh_norm_is_of_rows(const struct lh_engine *engine)
{
    bool is_any = false;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        is_any |= needs_rows(&engine->units[i]);
    return is_any;
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
    return lh_norm_is_of_rows(engine) ? rows_create(engine, err) : 0;
}

void lh_norm_destroy(struct lh_engine *engine)
{
    if (!engine->norm)
        return;
    lh_free(engine->alloc, engine->norm->sums);
    lh_free(engine->alloc, engine->norm->row_sums);
    lh_free(engine->alloc, engine->norm->row_first);
}

const struct lh_feature lh_norm_feature = {
    .name = "norm",
    .message = message,
    .gradient_taken = gradient_taken,
    .update_may_start = update_may_start,
    .step_forgotten = step_forgotten,
    .pump_gradients = pump_gradients,
    .pump_after = pump_after,
};
