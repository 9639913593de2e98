#include "sched/split.h"

#include "sched/engine_private.h"

/* The number of steps ignored after a split changes, while the new order of uses is recorded. */
#define UNSETTLED_STEP_COUNT 2
/* The duration of a step is the minimum of this many samples. */
#define SAMPLE_COUNT 2
/* An improvement of less than 1 / GAIN_DIVISOR is no gain. */
#define GAIN_DIVISOR 200
#define TRIAL_COUNT_MAX 2
/* Backward hides all work that takes less than this fraction of backward's duration. */
#define FULL_LOAD 0.9

/*
 * Whether trainable unit `at` of count is deferred. The first and the last unit are chosen last,
 * because one of them may be an embedding.
 */
static bool is_chosen(uint32_t at, uint32_t count, uint32_t deferred_count)
{
    LH_ASSERT(at < count);
    uint64_t halves = UINT64_C(2) * deferred_count;
    return (at * halves + count) / (2 * (uint64_t)count) !=
           ((at + 1) * halves + count) / (2 * (uint64_t)count);
}

static uint32_t trainable_count(const struct lh_engine *engine)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        count += engine->units[i].desc->elements > 0;
    return count;
}

/* The room for a unit's waiting gradients; those from an accelerator lie in blocks. */
static uint64_t waiting_bytes(const struct lh_engine *engine, const struct lh_unit *unit)
{
    LH_ASSERT(unit->desc->elements > 0);
    if (engine->dev)
        return unit->chunk_count * engine->landing->block_bytes;
    return unit->desc->elements * lh_dtype_bytes(unit->desc->dtype);
}

static bool has_room(const struct lh_engine *engine, uint32_t deferred_count)
{
    uint32_t count = trainable_count(engine);
    uint64_t bytes = 0;
    uint32_t at = 0;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        const struct lh_unit *unit = &engine->units[i];
        if (unit->desc->elements > 0 && is_chosen(at++, count, deferred_count))
            bytes += waiting_bytes(engine, unit);
    }
    return bytes <= engine->budget.gradient_waiting_bytes;
}

void lh_split_set(struct lh_engine *engine, uint32_t deferred_count)
{
    uint32_t count = trainable_count(engine);
    uint32_t at = 0;
    deferred_count = deferred_count < count ? deferred_count : count;
    while (deferred_count > 0 && !has_room(engine, deferred_count))
        deferred_count--;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        struct lh_unit *unit = &engine->units[i];
        if (unit->desc->elements > 0)
            lh_defer_set(unit, is_chosen(at++, count, deferred_count));
    }
    LH_ASSERT(at == count);
    engine->split->deferred_count = deferred_count;
    engine->split->step_count = 0;
    engine->split->step_ns = UINT64_MAX;
    engine->split->is_settled = deferred_count == 0;
}

/* Compute from an all-eager step how many units to defer. */
static uint32_t candidate(const struct lh_engine *engine, const struct lh_engine_step_stats *stats)
{
    const struct lh_split *split = engine->split;
    LH_ASSERT(engine->exec->thread_count > 0);
    LH_ASSERT(split->gradient_ns >= stats->begin_ns && split->gradient_ns <= stats->close_ns);
    uint32_t count = trainable_count(engine);
    double forward_ns = (double)(split->gradient_ns - stats->begin_ns);
    double backward_ns = (double)(stats->close_ns - split->gradient_ns);
    double workers_ns = (double)stats->update_busy_ns / engine->exec->thread_count;
    double bytes = 0;
    for (uint32_t i = 0; i < LH_ENGINE_LINK_COUNT; i++)
        bytes += lh_engine_link_is_ssd((enum lh_engine_link)i) ? (double)stats->bytes[i] : 0;
    double params_bytes = (double)stats->bytes[LH_ENGINE_LINK_PARAM_READ];
    double byte_ns = bytes > 0 ? (double)stats->ssd_busy_ns / bytes : 0;
    double forward_load_ns = byte_ns * (double)split->forward_bytes;
    double load_ns = (double)stats->ssd_busy_ns;
    double updates_ns = byte_ns * (bytes - params_bytes);
    if (workers_ns > updates_ns) {
        updates_ns = workers_ns;
        load_ns = workers_ns;
        forward_load_ns = 0;
    }
    if ((load_ns - forward_load_ns) < FULL_LOAD * backward_ns)
        return 0;
    double best_ns = load_ns * forward_ns / (forward_ns + backward_ns) - forward_load_ns;
    double share = updates_ns > 0 && best_ns > 0 ? best_ns / updates_ns : 0;
    return share < 1 ? (uint32_t)(share * count + 0.5) : count;
}

/* Note the time and the bytes read at the step's first gradient. */
static void gradient_taken(struct lh_engine *engine, uint32_t param)
{
    const struct lh_engine_step_stats *stats = lh_core_stats(engine, lh_core_step(engine));
    LH_ASSERT(param < engine->param_count);
    const struct lh_unit *unit = &engine->units[engine->params[param].unit];
    if (engine->updates.gradient_unit_count > 1 || unit->update.gradient_count > 1)
        return;
    engine->split->gradient_ns = lh_core_now(engine);
    engine->split->forward_bytes = stats->bytes[LH_ENGINE_LINK_PARAM_READ];
}

static void step_over(struct lh_engine *engine, const struct lh_engine_step_stats *stats)
{
    struct lh_split *split = engine->split;
    bool is_whole = split->gradient_ns >= stats->begin_ns; /* the step had its own forward */
    if (split->is_settled || !is_whole || split->step_count++ < UNSETTLED_STEP_COUNT)
        return;
    split->step_ns = lh_min_u64(split->step_ns, stats->close_ns - stats->begin_ns);
    if (split->step_count < UNSETTLED_STEP_COUNT + SAMPLE_COUNT)
        return;
    if (split->deferred_count == 0) {
        split->eager_ns = split->step_ns;
        lh_split_set(engine, candidate(engine, stats));
    } else if (split->step_ns + split->eager_ns / GAIN_DIVISOR < split->eager_ns) {
        split->is_settled = true;
    } else {
        bool is_slower = split->step_ns > split->eager_ns + split->eager_ns / GAIN_DIVISOR;
        bool is_last = ++split->trial_count == TRIAL_COUNT_MAX;
        lh_split_set(engine, is_slower && !is_last ? split->deferred_count / 2 : 0);
    }
}

int lh_split_create(struct lh_engine *engine, struct lh_error *err)
{
    LH_TRY(LH_ENGINE_PART_CREATE(engine, split, err));
    engine->split->step_ns = UINT64_MAX;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++)
        lh_defer_set(&engine->units[i], false);
    return 0;
}

const struct lh_feature lh_split_feature = {
    .name = "split",
    .gradient_taken = gradient_taken,
    .step_over = step_over,
};
