#include "lives/script.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "lives/lives.h"
#include "sched/engine_private.h"

#define GARBAGE 0xff /* as a float or bf16: NaN */

static struct lh_sim_script *of(void *context)
{
    return &((struct lh_sim_lives *)context)->script;
}

void lh_sim_script_init(struct lh_sim_script *script, const struct lh_sim_script_opts *opts,
                        struct lh_alloc *alloc)
{
    const struct lh_sim_model *model = opts->train->opts.model;
    const struct lh_dev *dev = opts->train->opts.dev;
    *script = (struct lh_sim_script){.opts = *opts};
    uint64_t seed = lh_sim_mix(opts->seed, opts->train->step);
    lh_sim_random_init(&script->random, seed, LH_SIM_STREAM_TRAIN);
    lh_sim_random_init(&script->edit_random, seed, LH_SIM_STREAM_EDITS);
    if (!opts->reference)
        return;
    script->is_held = lh_alloc_zeroed(alloc, model->param_count, sizeof(bool));
    script->gradients = lh_alloc_zeroed(alloc, model->param_count, sizeof(void *));
    script->use_max = dev && dev->ops->is_ordered ? LH_SIM_DEV_COMPUTE_COUNT_MAX : 1;
    script->uses = lh_alloc_zeroed(alloc, script->use_max, sizeof(*script->uses));
    LH_ASSERT(script->is_held && script->gradients && script->uses);
    for (uint32_t i = 0; i < model->param_count; i++) {
        uint64_t bytes = lh_dtype_bytes(lh_sim_model_gradient_dtype(opts->reference->model, i));
        script->gradients[i] = lh_alloc_zeroed(alloc, model->params[i].count, bytes);
        LH_ASSERT(script->gradients[i]);
    }
}

void lh_sim_script_deinit(struct lh_sim_script *script, struct lh_alloc *alloc)
{
    for (uint32_t i = 0; script->gradients && i < script->opts.reference->model->param_count; i++)
        lh_free(alloc, script->gradients[i]);
    lh_free(alloc, script->is_held);
    lh_free(alloc, (void *)script->gradients);
    lh_free(alloc, script->uses);
    *script = (struct lh_sim_script){0};
}

static struct lh_sim_use *use_add(struct lh_sim_script *script)
{
    const struct lh_sim_train *train = script->opts.train;
    LH_ASSERT(script->use_count - script->use_ended_count < script->use_max);
    struct lh_sim_use *use = &script->uses[script->use_count++ % script->use_max];
    *use = (struct lh_sim_use){
        .step = train->step, .block = train->block, .phase = train->phase, .param = UINT32_MAX};
    use->is_edited = lh_sim_reference_is_edited(script->opts.reference, train->step);
    return use;
}

/* Check that a use sees the bytes of the last step that was closed when the use was requested. */
static void use_check(const struct lh_sim_script *script, const struct lh_sim_use *use,
                      const char *when)
{
    const struct lh_sim_reference *reference = script->opts.reference;
    const struct lh_sim_model *model = reference->model;
    const struct lh_sim_block *block = &model->blocks[use->block];
    for (uint32_t i = 0; i < block->unit_count; i++) {
        uint32_t unit = block->units[i];
        const uint8_t *expected = lh_sim_reference_array_of(reference, use->step, use->is_edited,
                                                            unit, LH_SIM_ARRAY_PARAM);
        if (memcmp(use->units[i], expected, model->units[unit].bytes) != 0)
            lh_sim_world_fail(script->opts.train->opts.world,
                              "unit %" PRIu32 " does not have the bytes of step %" PRIu64
                              " at the %s of a use (block %" PRIu32 ", phase %d)",
                              unit, use->step, when, use->block, (int)use->phase);
    }
}

void lh_sim_script_use_made(void *context)
{
    struct lh_sim_script *script = of(context);
    const struct lh_sim_train *train = script->opts.train;
    const struct lh_sim_block *block = &train->opts.model->blocks[train->block];
    struct lh_sim_use *use = use_add(script);
    for (uint32_t i = 0; i < block->unit_count; i++)
        use->units[i] = lh_engine_address(train->opts.engine, block->units[i]);
}

const void *lh_sim_script_gradient_made(void *context, uint32_t param)
{
    struct lh_sim_script *script = of(context);
    use_add(script)->param = param;
    script->is_held[param] = true;
    return script->gradients[param];
}

static const struct lh_sim_use *use_now(const struct lh_sim_script *script)
{
    LH_ASSERT(script->use_ended_count < script->use_count);
    return &script->uses[script->use_ended_count % script->use_max];
}

void lh_sim_script_use_begun(void *context)
{
    struct lh_sim_script *script = of(context);
    use_check(script, use_now(script), "begin");
}

void lh_sim_script_use_ended(void *context)
{
    struct lh_sim_script *script = of(context);
    const struct lh_sim_use *use = use_now(script);
    script->use_ended_count++;
    if (use->param == UINT32_MAX)
        use_check(script, use, "end");
    else
        lh_sim_reference_gradient(script->opts.reference, use->step + 1, use->param,
                                  script->gradients[use->param]);
}

/* Draw which parameters have a gradient in the step that begins: at least one. */
static void gradients_draw(struct lh_sim_script *script, bool *has_gradient)
{
    const struct lh_sim_model *model = script->opts.train->opts.model;
    uint32_t first = UINT32_MAX;
    bool has_any = false;
    for (uint32_t i = 0; i < model->param_count; i++) {
        bool is_frozen = model->units[model->params[i].unit].elements == 0;
        bool is_skipped = lh_sim_random_chance(&script->random, script->opts.chances.skip_ppm);
        has_gradient[i] = !is_frozen && !is_skipped;
        has_any |= has_gradient[i];
        if (!is_frozen && first == UINT32_MAX)
            first = i;
    }
    if (!has_any && first != UINT32_MAX)
        has_gradient[first] = true;
}

void lh_sim_script_forward_begun(void *context, bool *has_gradient)
{
    struct lh_sim_script *script = of(context);
    lh_sim_script_hold_begin(script);
    gradients_draw(script, has_gradient);
}

bool lh_sim_script_eval_draw(struct lh_sim_script *script)
{
    struct lh_sim_train *train = script->opts.train;
    if (!lh_sim_random_chance(&script->random, script->opts.chances.eval_ppm))
        return false;
    int rc = lh_engine_begin(train->opts.engine, LH_ENGINE_MODE_EVAL);
    if (rc < 0) {
        (void)lh_sim_train_failed(train, rc);
        return true;
    }
    train->phase = LH_SIM_TRAIN_PHASE_EVAL;
    lh_sim_train_order_reset(train);
    (void)lh_sim_train_forward_begin(train);
    return true;
}

bool lh_sim_script_forward_replaced(void *context)
{
    struct lh_sim_script *script = of(context);
    return lh_sim_script_edit_draw(script) || lh_sim_script_eval_draw(script);
}

bool lh_sim_script_backward_replaced(void *context)
{
    struct lh_sim_script *script = of(context);
    struct lh_sim_train *train = script->opts.train;
    if (train->phase == LH_SIM_TRAIN_PHASE_EVAL) {
        (void)lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_BEGIN);
        return true;
    }
    if (script->edit_is_due) {
        lh_sim_train_backward_enter(train);
        (void)lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_EDIT);
    }
    return script->edit_is_due;
}

/* Simulate an exception in backward: the graph is destroyed, and its handles are dropped. */
bool lh_sim_script_backward_aborted(void *context)
{
    struct lh_sim_script *script = of(context);
    struct lh_sim_train *train = script->opts.train;
    if (!lh_sim_random_chance(&script->random, script->opts.chances.abort_ppm))
        return false;
    for (uint32_t i = 0; i < train->opts.model->unit_count; i++) {
        for (; train->handles[i] > 0; train->handles[i]--)
            lh_engine_handle_drop(train->opts.engine, i);
    }
    script->abort_count++;
    (void)lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_ABORT);
    return true;
}

static bool all_is_over(const struct lh_engine *engine)
{
    return lh_sim_train_steps_are_over(engine) &&
           !lh_request_is_pending(&engine->requests[LH_REQUEST_ABORT]);
}

static enum lh_sim_look give_up(struct lh_sim_train *train)
{
    if (!lh_sim_train_is_worth_asking(train, all_is_over(train->opts.engine)))
        return LH_SIM_LOOK_WAIT;
    int rc = lh_engine_abort(train->opts.engine, 0);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    return rc == 0 ? LH_SIM_LOOK_WAIT : lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_BEGIN);
}

/* The engine measures some steps before it tries a split; here any split may come at any time. */
void lh_sim_script_gradients_begun(void *context)
{
    struct lh_sim_script *script = of(context);
    const struct lh_sim_train *train = script->opts.train;
    struct lh_engine *engine = train->opts.engine;
    if (engine->opts.schedule == LH_ENGINE_SCHEDULE_AUTO &&
        lh_sim_random_chance(&script->random, script->opts.chances.split_ppm)) {
        uint64_t count = lh_sim_random_below(&script->random, train->opts.model->unit_count + 1);
        lh_split_set(engine, (uint32_t)count);
    }
    if (script->opts.reference)
        lh_engine_gradient_scale_set(
            engine, lh_sim_reference_scale(script->opts.reference, train->step + 1));
}

/* The reference advances before the call, as the step may be durable before it returns. */
void lh_sim_script_closing(void *context)
{
    struct lh_sim_script *script = of(context);
    if (!script->is_reference_ahead)
        lh_sim_reference_advance(script->opts.reference, script->opts.train->has_gradient);
    script->is_reference_ahead = true;
}

bool lh_sim_script_closed(void *context)
{
    struct lh_sim_script *script = of(context);
    script->is_reference_ahead = false;
    return lh_sim_random_chance(&script->random, script->opts.chances.flush_ppm);
}

bool lh_sim_script_state_polled(void *context)
{
    struct lh_sim_script *script = of(context);
    switch (script->opts.train->state) {
    case LH_SIM_TRAIN_STATE_ABORT:
        return give_up(script->opts.train) == LH_SIM_LOOK_MOVED;
    case LH_SIM_TRAIN_STATE_EDIT:
        return lh_sim_script_edit(script) == LH_SIM_LOOK_MOVED;
    case LH_SIM_TRAIN_STATE_PAUSE:
        return lh_sim_script_pause(script) == LH_SIM_LOOK_MOVED;
    default:
        return false;
    }
}

/* Overwrite consumed gradients with garbage, so that a later read by the engine is detected. */
static void gradients_spoil(struct lh_sim_script *script)
{
    const struct lh_sim_reference *reference = script->opts.reference;
    for (uint32_t i = 0; reference && i < reference->model->param_count; i++) {
        if (!script->is_held[i] ||
            !lh_engine_gradient_is_consumed(script->opts.train->opts.engine, i))
            continue;
        uint64_t bytes = lh_dtype_bytes(lh_sim_model_gradient_dtype(reference->model, i));
        memset(script->gradients[i], GARBAGE, reference->model->params[i].count * bytes);
        script->is_held[i] = false;
    }
}

bool lh_sim_script_train_polled(void *context)
{
    struct lh_sim_script *script = of(context);
    bool moved = lh_sim_script_hold_poll(script);
    gradients_spoil(script);
    return moved;
}
