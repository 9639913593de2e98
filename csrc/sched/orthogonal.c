/* See orthogonal.h. */
#include "sched/orthogonal.h"

#include <fenv.h>
#include <inttypes.h>

#include "sched/engine_private.h"

static void state_set(struct lh_unit *unit, enum lh_orthogonal_state state)
{
    LH_ASSERT(lh_states_may(lh_states_orthogonal, (int)unit->parts->orthogonal.state, (int)state));
    unit->parts->orthogonal.state = state;
}

static bool has_matrices(const struct lh_unit *unit)
{
    return unit->engine->orthogonal && unit->desc->elements > 0 &&
           lh_rules[unit->desc->rule].has_matrices && !lh_unit_is_given(unit);
}

static bool is_matrix(const struct lh_engine *engine, uint32_t param)
{
    return engine->params[param].matrix_rows > 0 && engine->gradients[param].pointer;
}

/* Give the slabs to a unit, or to none: meanwhile, other units of matrices wait. */
static void unit_set(struct lh_engine *engine, struct lh_unit *unit)
{
    engine->orthogonal->unit = unit;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *each = &engine->units[i];

        each->update.turn = !unit || !has_matrices(each) ? LH_UPDATE_TURN_ANY
                            : each == unit               ? LH_UPDATE_TURN_COLLECTS
                                                         : LH_UPDATE_TURN_WAITS;
    }
}

/* Runs on a worker: write what the momentum of a chunk becomes. */
static void chunk_momentum(const struct lh_unit *unit, const struct lh_chunk *chunk)
{
    const struct lh_slab *slab = &unit->engine->slabs[chunk->slab];
    LH_ASSERT(chunk->state == LH_CHUNK_STATE_LOADED);
    const float *moments = (const float *)(const void *)lh_slab_array(slab, unit, 1, chunk->count);

    for (uint32_t i = 0; i < slab->adam.segment_count; i++) {
        const struct lh_adam_segment *segment = &slab->segments[i];

        lh_newton_schulz_momentum(segment, slab->is_zero[1] ? NULL : moments + segment->first);
    }
}

/* --- Stages ------------------------------------------------------------------------------- */

/* Runs on a worker: do tasks of the stage until none is left. */
static void tasks_run(struct lh_exec_job *job)
{
    struct lh_orthogonal_job *own = job->context;
    struct lh_engine *engine = own->engine;
    struct lh_orthogonal *orthogonal = engine->orthogonal;
    const struct lh_unit *unit = orthogonal->unit;
    fenv_t environment;

    fegetenv(&environment);
    fesetenv(FE_DFL_ENV);
    for (;;) {
        uint64_t task = atomic_fetch_add(&orthogonal->task_next, 1);

        if (task >= orthogonal->task_count)
            break;
        if (orthogonal->stage == LH_ORTHOGONAL_STAGE_MOMENTUM)
            chunk_momentum(unit, &engine->chunks[unit->chunk_first + task]);
        else if (orthogonal->stage == LH_ORTHOGONAL_STAGE_BEGIN)
            lh_newton_schulz_begin(&orthogonal->matrix, orthogonal->eps);
        else
            lh_newton_schulz_task(NULL, &orthogonal->matrix,
                                  orthogonal->product % LH_NEWTON_SCHULZ_STAGE_COUNT, task,
                                  own->scratch);
    }
    fesetenv(&environment);
}

static void tasks_done(struct lh_engine *engine, struct lh_job *job);

static void stage_start(struct lh_engine *engine, enum lh_orthogonal_stage stage,
                        uint64_t task_count)
{
    struct lh_orthogonal *orthogonal = engine->orthogonal;
    uint64_t jobs = lh_min_u64(task_count, orthogonal->job_count);

    LH_ASSERT(orthogonal->jobs_running == 0 && task_count > 0);
    orthogonal->stage = stage;
    orthogonal->task_count = task_count;
    atomic_store(&orthogonal->task_next, 0);
    for (uint64_t i = 0; i < jobs; i++) {
        struct lh_orthogonal_job *job = &orthogonal->jobs[i];

        job->job = (struct lh_job){
            .exec = {.run = tasks_run, .context = job},
            .done = tasks_done,
        };
        orthogonal->jobs_running++;
        lh_job_submit(engine, &job->job);
    }
}

/* Begin with the next matrix that has a gradient, from param on. Returns false if there is none. */
static bool matrix_start(struct lh_engine *engine, uint32_t param)
{
    struct lh_orthogonal *orthogonal = engine->orthogonal;
    const struct lh_engine_unit *desc = orthogonal->unit->desc;
    const struct lh_adam_hyper *hypers = engine->hypers[lh_core_step(engine) % 2];

    while (param < desc->param_first + desc->param_count && !is_matrix(engine, param))
        param++;
    if (param == desc->param_first + desc->param_count)
        return false;
    const struct lh_engine_param *made = &engine->params[param];
    LH_ASSERT(made->count % made->matrix_rows == 0);
    orthogonal->param = param;
    orthogonal->product = 0;
    orthogonal->eps = (float)hypers[made->group].eps;
    orthogonal->matrix = (struct lh_newton_schulz){
        .matrix = orthogonal->updates + made->first,
        .rows = made->matrix_rows,
        .columns = made->count / made->matrix_rows,
        .gram = orthogonal->gram,
        .polynomial = orthogonal->polynomial,
    };
    stage_start(engine, LH_ORTHOGONAL_STAGE_BEGIN, 1);
    return true;
}

static void product_start(struct lh_engine *engine)
{
    struct lh_orthogonal *orthogonal = engine->orthogonal;

    LH_ASSERT(orthogonal->product < LH_NEWTON_SCHULZ_STEPS * LH_NEWTON_SCHULZ_STAGE_COUNT);
    stage_start(engine, LH_ORTHOGONAL_STAGE_PRODUCT,
                lh_newton_schulz_task_count(&orthogonal->matrix,
                                            orthogonal->product % LH_NEWTON_SCHULZ_STAGE_COUNT));
}

static void tasks_done(struct lh_engine *engine, struct lh_job *job)
{
    const uint32_t product_count = LH_NEWTON_SCHULZ_STEPS * LH_NEWTON_SCHULZ_STAGE_COUNT;
    struct lh_orthogonal *orthogonal = engine->orthogonal;
    bool is_going = true;

    lh_core_stats(engine, lh_core_step(engine))->update_busy_ns +=
        job->exec.ended_ns - job->exec.started_ns;
    LH_ASSERT(orthogonal->jobs_running > 0 && orthogonal->unit);
    LH_ASSERT(orthogonal->unit->parts->orthogonal.state == LH_ORTHOGONAL_STATE_RUNNING);
    if (--orthogonal->jobs_running > 0)
        return;
    if (orthogonal->stage == LH_ORTHOGONAL_STAGE_MOMENTUM)
        is_going = matrix_start(engine, orthogonal->unit->desc->param_first);
    else if (orthogonal->stage == LH_ORTHOGONAL_STAGE_BEGIN ||
             ++orthogonal->product < product_count)
        product_start(engine);
    else
        is_going = matrix_start(engine, orthogonal->param + 1);
    if (!is_going)
        state_set(orthogonal->unit, LH_ORTHOGONAL_STATE_DONE);
}

/* --- The feature -------------------------------------------------------------------------- */

static bool update_may_start(const struct lh_engine *engine, const struct lh_unit *unit)
{
    (void)engine;
    return unit->update.turn != LH_UPDATE_TURN_WAITS;
}

static void update_started(struct lh_engine *engine, struct lh_unit *unit)
{
    if (!has_matrices(unit))
        return;
    LH_ASSERT(!engine->orthogonal->unit && unit->chunk_count > 0);
    unit_set(engine, unit);
}

static bool chunk_may_compute(const struct lh_engine *engine, const struct lh_chunk *chunk)
{
    const struct lh_unit *unit = &engine->units[chunk->unit];

    return engine->orthogonal->is_asking || !has_matrices(unit) ||
           unit->parts->orthogonal.state == LH_ORTHOGONAL_STATE_DONE;
}

/* Whether the unit's chunks have all that the momentum needs. */
static bool is_whole(struct lh_engine *engine, const struct lh_unit *unit, bool *moved)
{
    for (uint32_t i = 0; i < unit->chunk_count; i++) {
        struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + i];

        if (chunk->state != LH_CHUNK_STATE_LOADED)
            return false;
        bool has_all = LH_FEATURE_ALL(engine, chunk_is_whole, chunk);
        if (!has_all) {
            *moved = true;
            return false;
        }
        engine->orthogonal->is_asking = true;
        bool may = LH_FEATURE_ALL(engine, chunk_may_compute, chunk);
        engine->orthogonal->is_asking = false;
        if (!may)
            return false;
    }
    return true;
}

/* Start once all chunks are read. */
static bool pump_gradients(struct lh_engine *engine)
{
    struct lh_unit *unit = engine->orthogonal->unit;
    bool moved = false;

    if (!unit || unit->parts->orthogonal.state != LH_ORTHOGONAL_STATE_NONE ||
        !is_whole(engine, unit, &moved))
        return moved;
    LH_ASSERT(engine->orthogonal->jobs_running == 0 && unit->state == LH_UNIT_STATE_UPDATING);
    state_set(unit, LH_ORTHOGONAL_STATE_RUNNING);
    unit->update.turn = LH_UPDATE_TURN_ANY;
    for (uint32_t i = 0; i < unit->desc->param_count; i++) {
        uint32_t param = unit->desc->param_first + i;

        engine->gradients[param].update = engine->orthogonal->updates + engine->params[param].first;
    }
    for (uint32_t i = 0; i < unit->chunk_count; i++) {
        const struct lh_chunk *chunk = &engine->chunks[unit->chunk_first + i];
        struct lh_slab *slab = &engine->slabs[chunk->slab];

        slab->adam.segment_count = lh_chunk_segments_fill(engine, chunk, slab->segments);
    }
    stage_start(engine, LH_ORTHOGONAL_STAGE_MOMENTUM, unit->chunk_count);
    return true;
}

static void forget(struct lh_engine *engine)
{
    struct lh_unit *unit = engine->orthogonal->unit;

    LH_ASSERT(engine->orthogonal->jobs_running == 0);
    unit_set(engine, NULL);
    if (unit && unit->parts->orthogonal.state != LH_ORTHOGONAL_STATE_NONE)
        state_set(unit, LH_ORTHOGONAL_STATE_NONE);
}

static void unit_computed(struct lh_engine *engine, struct lh_unit *unit)
{
    if (engine->orthogonal->unit == unit)
        forget(engine);
}

static void step_forgotten(struct lh_engine *engine)
{
    forget(engine);
}

bool lh_orthogonal_is_needed(const struct lh_engine *engine)
{
    bool is_any = false;
    for (uint32_t i = 0; i < engine->param_count; i++)
        is_any |= engine->params[i].matrix_rows > 0;
    return is_any;
}

int lh_orthogonal_create(struct lh_engine *engine, struct lh_error *err)
{
    uint64_t elements = 1, gram = 1, scratch = 1;

    LH_ASSERT(!engine->orthogonal && engine->exec->thread_count > 0);
    LH_TRY(LH_ENGINE_PART_CREATE(engine, orthogonal, err));
    struct lh_orthogonal *orthogonal = engine->orthogonal;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        if (has_matrices(&engine->units[i]))
            elements = lh_max_u64(elements, engine->units[i].desc->elements);
    for (uint32_t i = 0; i < engine->param_count; i++) {
        const struct lh_engine_param *param = &engine->params[i];

        if (param->matrix_rows == 0)
            continue;
        LH_ASSERT(param->count % param->matrix_rows == 0);
        uint64_t columns = param->count / param->matrix_rows;
        gram = lh_max_u64(gram, lh_newton_schulz_gram_floats(param->matrix_rows, columns));
        scratch = lh_max_u64(scratch, lh_newton_schulz_scratch_floats(param->matrix_rows, columns));
    }
    orthogonal->job_count =
        (uint32_t)lh_min_u64(engine->exec->thread_count, LH_ORTHOGONAL_JOB_COUNT_MAX);
    orthogonal->updates = lh_alloc_zeroed(engine->alloc, elements, sizeof(float));
    orthogonal->gram = lh_alloc_zeroed(engine->alloc, gram, sizeof(float));
    orthogonal->polynomial = lh_alloc_zeroed(engine->alloc, gram, sizeof(float));
    orthogonal->scratch =
        lh_alloc_zeroed(engine->alloc, scratch * orthogonal->job_count, sizeof(float));
    if (!orthogonal->updates || !orthogonal->gram || !orthogonal->polynomial ||
        !orthogonal->scratch)
        return lh_error_set(
            err, -ENOMEM, "no memory for the updates of matrices: %" PRIu64 " elements", elements);
    for (uint32_t i = 0; i < orthogonal->job_count; i++) {
        orthogonal->jobs[i].engine = engine;
        orthogonal->jobs[i].scratch = orthogonal->scratch + i * scratch;
    }
    return 0;
}

void lh_orthogonal_destroy(struct lh_engine *engine)
{
    if (!engine->orthogonal)
        return;
    lh_free(engine->alloc, engine->orthogonal->updates);
    lh_free(engine->alloc, engine->orthogonal->gram);
    lh_free(engine->alloc, engine->orthogonal->polynomial);
    lh_free(engine->alloc, engine->orthogonal->scratch);
}

const struct lh_feature lh_orthogonal_feature = {
    .name = "orthogonal",
    .update_may_start = update_may_start,
    .update_started = update_started,
    .chunk_may_compute = chunk_may_compute,
    .unit_computed = unit_computed,
    .step_forgotten = step_forgotten,
    .pump_gradients = pump_gradients,
};
