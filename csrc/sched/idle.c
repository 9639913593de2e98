/* What units owe, and the computation of it. settle.c decides when. */
#include "sched/idle.h"

#include <inttypes.h>
#include <string.h>

#include "sched/engine_private.h"

/* Owed steps that one pass over a chunk makes. */
#define STEPS_PER_PASS 32

static bool is_on(const struct lh_engine *engine)
{
    return engine->idle != NULL;
}

bool lh_idle_is_needed(const struct lh_engine *engine)
{
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        if (engine->units[i].desc->family > 0)
            return true;
    }
    return false;
}

int lh_idle_create(struct lh_engine *engine, struct lh_error *err)
{
    LH_TRY(LH_ENGINE_PART_CREATE(engine, idle, err));
    struct lh_idle *idle = engine->idle;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_engine_unit *desc = engine->units[i].desc;
        if (desc->family == 0)
            continue;
        if (desc->elements == 0 || desc->param_count > LH_IDLE_PARAMS_MAX ||
            desc->family > engine->opts.unit_count)
            return lh_error_set(err, -EINVAL,
                                "unit %u of family %u: a trained unit of at most %d parameters is"
                                " needed",
                                i, desc->family, LH_IDLE_PARAMS_MAX);
        if (desc->family > idle->family_count)
            idle->family_count = desc->family;
    }
    idle->family_steps =
        lh_alloc_zeroed(engine->alloc, (uint64_t)idle->family_count + 1, sizeof(uint64_t));
    idle->history =
        lh_alloc_zeroed(engine->alloc, (uint64_t)LH_IDLE_STEPS_MAX * engine->opts.group_count,
                        sizeof(struct lh_adam_hyper));
    if (!idle->family_steps || !idle->history)
        return lh_error_set(err, -ENOMEM, "no memory for the hyper-parameters of %d steps",
                            LH_IDLE_STEPS_MAX);
    return 0;
}

void lh_idle_destroy(struct lh_engine *engine)
{
    if (!is_on(engine))
        return;
    lh_free(engine->alloc, engine->idle->family_steps);
    lh_free(engine->alloc, engine->idle->history);
}

static uint64_t unit_steps(const struct lh_engine *engine, const struct lh_unit *unit)
{
    return engine->param_steps[unit->desc->param_first];
}

void lh_idle_owed_set(struct lh_engine *engine, struct lh_unit *unit, uint32_t owed)
{
    uint32_t before = atomic_exchange(&unit->update.idle.owed, owed);
    LH_ASSERT(unit->desc->family > 0 && owed <= LH_IDLE_STEPS_MAX);
    if (before == 0 && owed > 0)
        atomic_fetch_add(&engine->idle->owing, 1);
    if (before > 0 && owed == 0)
        atomic_fetch_sub(&engine->idle->owing, 1);
}

int lh_idle_resume(struct lh_engine *engine, struct lh_error *err)
{
    uint64_t *steps = engine->idle->family_steps;
    LH_ASSERT(is_on(engine));
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        uint64_t *most = &steps[unit->desc->family];
        if (unit->desc->family > 0)
            *most = lh_max_u64(*most, unit_steps(engine, unit));
    }
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        uint64_t owed = steps[unit->desc->family] - unit_steps(engine, unit);
        if (unit->desc->family == 0 || unit->desc->averages_idle)
            continue;
        if (owed > LH_IDLE_STEPS_MAX)
            return lh_error_set(err, -EBADMSG,
                                "unit %u was updated in %" PRIu64 " of %" PRIu64 " steps: the store"
                                " was trained without the updates of idle units; use idle=\"skip\"",
                                i, unit_steps(engine, unit), steps[unit->desc->family]);
        lh_idle_owed_set(engine, unit, (uint32_t)owed);
        unit->update.idle.last = engine->step;
    }
    return 0;
}

static struct lh_adam_hyper *history_at(const struct lh_engine *engine, uint64_t step)
{
    return engine->idle->history + step % LH_IDLE_STEPS_MAX * engine->opts.group_count;
}

void lh_idle_history_keep(struct lh_engine *engine)
{
    uint64_t step = engine->step;
    LH_ASSERT(step > 0 && engine->step_state == LH_STEP_STATE_CLOSED);
    memcpy(history_at(engine, step), engine->hypers[step % 2],
           engine->opts.group_count * sizeof(struct lh_adam_hyper));
}

void lh_idle_want(struct lh_engine *engine, struct lh_unit *unit)
{
    struct lh_idle_unit *idle = &unit->update.idle;
    if (atomic_load(&idle->owed) == 0 || idle->is_wanted || idle->is_due)
        return;
    LH_ASSERT(unit->desc->family > 0);
    idle->is_wanted = true;
    engine->idle->wanted_count++;
}

/*
 * Fill segments with the parts of the unit's parameters that lie in the chunk, and the scalars of
 * owed steps [begin, end), where 0 is the oldest one. Returns the number of segments.
 */
static uint32_t segments_fill(const struct lh_slab *slab,
                              struct lh_adam_scalars scalars[][STEPS_PER_PASS], uint32_t begin,
                              uint32_t end)
{
    const struct lh_engine *engine = slab->engine;
    const struct lh_chunk *chunk = &engine->chunks[slab->chunk];
    const struct lh_unit *unit = &engine->units[chunk->unit];
    uint32_t owed = atomic_load(&unit->update.idle.owed);
    uint64_t step = unit->update.idle.last - owed + 1 + begin;
    uint32_t count = 0;
    LH_ASSERT(begin < end && end <= owed && owed <= unit->update.idle.last);
    LH_ASSERT(unit->update.idle.last <= engine->step);
    for (uint32_t i = 0; i < unit->desc->param_count; i++) {
        uint32_t index = unit->desc->param_first + i;
        const struct lh_engine_param *param = &engine->params[index];
        uint64_t first = lh_max_u64(param->first, chunk->first);
        uint64_t last = lh_min_u64(param->first + param->count, chunk->first + chunk->count);
        if (first >= last)
            continue;
        for (uint32_t j = begin; j < end; j++)
            scalars[count][j - begin] = lh_rules[unit->desc->rule].scalars(
                &history_at(engine, step + j - begin)[param->group],
                engine->param_steps[index] + 1 + j, 1.0);
        slab->segments[count] = (struct lh_adam_segment){
            .first = first - chunk->first,
            .count = last - first,
            .zeros = scalars[count],
            .zero_count = end - begin,
            .averages_only = unit->desc->averages_idle,
            .param_first = first - param->first,
            .row_elements = param->row_elements,
            .random = {LH_ADAM_SEED, param->number, (uint32_t)step},
        };
        count++;
    }
    return count;
}

/* A pass after the first one reads what the previous one has left, which has no checksums. */
static void expect_nothing(struct lh_adam_chunk *chunk)
{
    LH_ASSERT(chunk->scales || chunk->rows || !chunk->scales_expected);
    LH_ASSERT(chunk->average || !chunk->average_expected);
    chunk->residual_expected = NULL;
    chunk->scales_expected = NULL;
    chunk->moment1_expected = NULL;
    chunk->moment2_expected = NULL;
    chunk->average_expected = NULL;
}

/* A pass before the last one leaves what is not written. */
static void store_nothing(struct lh_adam_chunk *chunk)
{
    LH_ASSERT(chunk->scales || chunk->rows || !chunk->scales_checksums);
    chunk->param_checksums = NULL;
    chunk->scales_checksums = NULL;
    chunk->residual_checksums = NULL;
    chunk->moment1_checksums = NULL;
    chunk->moment2_checksums = NULL;
    chunk->average_checksums = NULL;
}

void lh_idle_run(struct lh_exec_job *job)
{
    struct lh_slab *slab = job->context;
    struct lh_engine *engine = slab->engine;
    struct lh_adam_scalars scalars[LH_IDLE_PARAMS_MAX][STEPS_PER_PASS];
    uint32_t owed = lh_idle_owed(engine, engine->chunks[slab->chunk].unit);
    LH_ASSERT(owed > 0 && owed <= LH_IDLE_STEPS_MAX);
    lh_chunk_zeros_fill(slab);
    slab->result = 0;
    for (uint32_t begin = 0; begin < owed && slab->result == 0; begin += STEPS_PER_PASS) {
        uint32_t end = begin + STEPS_PER_PASS < owed ? begin + STEPS_PER_PASS : owed;
        struct lh_adam_chunk adam = slab->adam;
        adam.nan_segment = NULL; /* no gradient can be the cause */
        adam.segment_count = segments_fill(slab, scalars, begin, end);
        if (begin > 0)
            expect_nothing(&adam);
        if (end < owed)
            store_nothing(&adam);
        slab->result = lh_adam_chunk_update(NULL, &adam, &slab->mismatch);
    }
}

void lh_idle_settled(struct lh_engine *engine, struct lh_unit *unit)
{
    if (!unit->update.idle.is_due)
        return;
    LH_ASSERT(unit->update.idle.made == 0 && engine->idle->queued_count > 0);
    engine->idle->queued_count--;
    unit->update.idle.made = atomic_load(&unit->update.idle.owed);
    lh_idle_owed_set(engine, unit, 0);
}

void lh_idle_steps_advance(struct lh_engine *engine)
{
    LH_ASSERT(is_on(engine));
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        bool counts = unit->update.idle.made > 0 && !unit->desc->averages_idle;
        for (uint32_t j = 0; counts && j < unit->desc->param_count; j++)
            engine->param_steps[unit->desc->param_first + j] += unit->update.idle.made;
        unit->update.idle.made = 0;
    }
}

bool lh_idle_holds(struct lh_engine *engine, const struct lh_ring_message *message)
{
    uint64_t kind = message->words[0];
    LH_ASSERT(atomic_load(&engine->is_reopened));
    if (kind != LH_MESSAGE_GRADIENT && kind != LH_MESSAGE_CLOSE && kind != LH_MESSAGE_ABORT)
        return false;
    engine->idle->is_drained = true;
    return true;
}

uint32_t lh_idle_owed(const struct lh_engine *engine, uint32_t unit)
{
    LH_ASSERT(unit < engine->opts.unit_count);
    return atomic_load(&engine->units[unit].update.idle.owed);
}

void lh_idle_history_set(struct lh_engine *engine, uint64_t step, uint32_t group,
                         const struct lh_adam_hyper *hyper)
{
    LH_ASSERT(is_on(engine) && group < engine->opts.group_count);
    history_at(engine, step)[group] = *hyper;
}
