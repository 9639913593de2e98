#include "sim/train_private.h"

#include <inttypes.h>
#include <string.h>

#include "sched/engine_private.h"

/* Whether the thread runs ahead of the work that it enqueues on the accelerator. */
static bool is_ahead(const struct lh_sim_train_opts *opts)
{
    return opts->dev && opts->dev->ops->is_ordered;
}

int lh_sim_train_init(struct lh_sim_train *train, const struct lh_sim_train_opts *opts,
                      struct lh_alloc *alloc, struct lh_error *err)
{
    uint32_t param_count = opts->model->param_count;
    *train = (struct lh_sim_train){.opts = *opts, .step = lh_engine_step(opts->engine)};
    train->has_gradient = lh_alloc_zeroed(alloc, param_count, sizeof(bool));
    train->due = lh_alloc_zeroed(alloc, param_count, sizeof(*train->due));
    train->handles = lh_alloc_zeroed(alloc, opts->model->unit_count, sizeof(*train->handles));
    train->saved_items = lh_alloc_zeroed(alloc, lh_max_u64(opts->model->saved_count, 1),
                                         sizeof(*train->saved_items));
    train->order = lh_alloc_zeroed(alloc, opts->model->block_count, sizeof(*train->order));
    train->is_summed = lh_alloc_zeroed(alloc, param_count, sizeof(bool));
    bool failed = !train->has_gradient || !train->due || !train->handles || !train->saved_items ||
                  !train->order || !train->is_summed;
    if (failed) {
        lh_sim_train_deinit(train, alloc);
        return lh_error_set(err, -ENOMEM, "no memory to train %" PRIu32 " parameters", param_count);
    }
    for (uint32_t i = 0; i < param_count; i++)
        train->has_gradient[i] = opts->model->units[opts->model->params[i].unit].elements > 0;
    return 0;
}

void lh_sim_train_deinit(struct lh_sim_train *train, struct lh_alloc *alloc)
{
    lh_free(alloc, train->has_gradient);
    lh_free(alloc, train->due);
    lh_free(alloc, train->handles);
    lh_free(alloc, train->saved_items);
    lh_free(alloc, train->order);
    lh_free(alloc, train->is_summed);
    *train = (struct lh_sim_train){0};
}

static const struct lh_sim_block *block_of(const struct lh_sim_train *train)
{
    return &train->opts.model->blocks[train->block];
}

struct lh_sim_train_times *lh_sim_train_times_of(struct lh_sim_train *train)
{
    return &train->times[(train->step + 1) % LH_SIM_STEP_COUNT_MAX];
}

enum lh_sim_look lh_sim_train_state_set(struct lh_sim_train *train, enum lh_sim_train_state state)
{
    train->state = state;
    train->is_asked = false;
    train->since_ns = train->opts.world->now_ns;
    uint32_t unit = state == LH_SIM_TRAIN_STATE_ACQUIRE ? block_of(train)->units[train->unit] : 0;
    lh_sim_world_trace(train->opts.world, LH_SIM_TRACE_TRAIN, (uint64_t)train->phase << 32 | state,
                       train->step, (uint64_t)train->block << 32 | unit);
    return LH_SIM_LOOK_MOVED;
}

enum lh_sim_look lh_sim_train_failed(struct lh_sim_train *train, int rc)
{
    train->rc = rc;
    return lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_FAILED);
}

uint64_t lh_sim_train_waited_ns(const struct lh_sim_train *train)
{
    return train->opts.world->now_ns - train->since_ns;
}

static void use_began(void *context)
{
    const struct lh_sim_train *train = context;
    LH_SIM_HOOK_CALL(train->opts.world, use_begun);
}

static void use_ended(void *context)
{
    struct lh_sim_train *train = context;
    LH_SIM_HOOK_CALL(train->opts.world, use_ended);
    train->is_computed = true;
}

static void gradient_computed(void *context)
{
    const struct lh_sim_train *train = context;
    LH_SIM_HOOK_CALL(train->opts.world, use_ended);
}

enum lh_sim_look lh_sim_train_block_begin(struct lh_sim_train *train, uint32_t block)
{
    train->block = block;
    train->unit = 0;
    return lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_ACQUIRE);
}

void lh_sim_train_order_reset(struct lh_sim_train *train)
{
    train->order_count = train->opts.model->block_count;
    for (uint32_t i = 0; i < train->order_count; i++)
        train->order[i] = i;
}

enum lh_sim_look lh_sim_train_forward_begin(struct lh_sim_train *train)
{
    train->position = 0;
    return lh_sim_train_block_begin(train, train->order[0]);
}

enum lh_sim_look lh_sim_train_begin(struct lh_sim_train *train)
{
    int rc = lh_engine_begin(train->opts.engine, LH_ENGINE_MODE_TRAIN);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    train->phase = LH_SIM_TRAIN_PHASE_FORWARD;
    lh_sim_train_order_reset(train);
    LH_SIM_HOOK_CALL(train->opts.world, forward_begun, train->has_gradient);
    train->has_hypers = false;
    train->micro_step = 0;
    memset(train->is_summed, 0, train->opts.model->param_count * sizeof(bool));
    *lh_sim_train_times_of(train) =
        (struct lh_sim_train_times){.begin_ns = train->opts.world->now_ns};
    return lh_sim_train_forward_begin(train);
}

enum lh_sim_look lh_sim_train_forward_repeat(struct lh_sim_train *train)
{
    int rc = lh_engine_begin(train->opts.engine, LH_ENGINE_MODE_TRAIN);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    train->phase = LH_SIM_TRAIN_PHASE_FORWARD;
    return lh_sim_train_forward_begin(train);
}

bool lh_sim_train_is_worth_asking(struct lh_sim_train *train, bool is_there)
{
    bool is_first = !train->is_asked;
    train->is_asked = true;
    return is_first || is_there || lh_engine_error(train->opts.engine, NULL) < 0;
}

bool lh_sim_train_steps_are_over(const struct lh_engine *engine)
{
    return !lh_request_is_pending(&engine->requests[LH_REQUEST_CLOSE]) &&
           !lh_request_is_pending(&engine->requests[LH_REQUEST_FLUSH]);
}

static const struct lh_sim_part *part_of(const struct lh_sim_train *train)
{
    return &train->opts.model->parts[train->part];
}

/* Compute a part, whose units and saved tensors are available. */
enum lh_sim_look lh_sim_train_compute_begin(struct lh_sim_train *train)
{
    struct lh_sim_world *world = train->opts.world;
    LH_SIM_HOOK_CALL(world, use_made);
    train->is_computed = is_ahead(&train->opts);
    bool is_backward = train->phase == LH_SIM_TRAIN_PHASE_BACKWARD;
    uint64_t compute_ns = is_backward ? part_of(train)->backward_ns : part_of(train)->forward_ns;
    if (is_ahead(&train->opts)) {
        lh_sim_dev_compute(train->opts.dev, compute_ns, use_began, use_ended, train);
    } else {
        use_began(train);
        lh_sim_world_at(world, world->now_ns + compute_ns, use_ended, train);
    }
    return lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_COMPUTE);
}

static enum lh_sim_look part_begin(struct lh_sim_train *train, uint32_t part)
{
    train->part = part;
    if (train->phase != LH_SIM_TRAIN_PHASE_BACKWARD || part_of(train)->saved_count == 0)
        return lh_sim_train_compute_begin(train);
    train->saved_back = part_of(train)->saved_count;
    lh_sim_train_saved_fetch(train);
    return lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_SAVED);
}

/* Compute a block, whose units are available. */
static enum lh_sim_look block_compute(struct lh_sim_train *train)
{
    const struct lh_sim_block *block = block_of(train);
    bool is_backward = train->phase == LH_SIM_TRAIN_PHASE_BACKWARD;
    return part_begin(train, block->part_first + (is_backward ? block->part_count - 1 : 0));
}

static enum lh_sim_look acquire(struct lh_sim_train *train)
{
    const struct lh_sim_block *block = block_of(train);
    if (block->unit_count == 0)
        return block_compute(train);
    uint32_t unit = block->units[train->unit];
    bool is_first = !train->is_asked;
    uint32_t grants = atomic_load(&train->opts.engine->units[unit].shared.grants);
    if (!lh_sim_train_is_worth_asking(train, grants > 0))
        return LH_SIM_LOOK_WAIT;
    int rc = is_first ? lh_engine_acquire(train->opts.engine, unit)
                      : lh_engine_acquire_wait(train->opts.engine, unit, 0);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    if (rc == 0)
        return LH_SIM_LOOK_WAIT;
    struct lh_sim_train_times *times = lh_sim_train_times_of(train);
    if (train->phase == LH_SIM_TRAIN_PHASE_FORWARD)
        times->forward_wait_ns += lh_sim_train_waited_ns(train);
    else if (train->phase == LH_SIM_TRAIN_PHASE_BACKWARD)
        times->backward_wait_ns += lh_sim_train_waited_ns(train);
    if (++train->unit < block->unit_count)
        return lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_ACQUIRE);
    return block_compute(train);
}

/*
 * List the parameters whose gradients the block passes: units that no earlier block uses, which
 * have no more handles than the block's own.
 */
static void due_fill(struct lh_sim_train *train, uint32_t own_handles)
{
    const struct lh_sim_model *model = train->opts.model;
    const struct lh_sim_block *block = block_of(train);
    train->due_count = 0;
    train->param = 0;
    for (uint32_t i = 0; i < block->unit_count; i++) {
        const struct lh_engine_unit *unit = &model->units[block->units[i]];
        if (train->handles[block->units[i]] > own_handles)
            continue;
        for (uint32_t j = unit->param_first; j < unit->param_first + unit->param_count; j++) {
            if (train->has_gradient[j])
                train->due[train->due_count++] = j;
        }
    }
}

static bool makes_sums(const struct lh_sim_train *train)
{
    return train->opts.micro.step_count > 0;
}

/* Whether the part, in backward, is the last one of a micro-batch, but not of the block. */
static bool ends_visit(const struct lh_sim_train *train)
{
    const struct lh_sim_block *block = block_of(train);
    uint32_t visit_count = lh_max_u64(train->opts.micro.visit_count, 1) & UINT32_MAX;
    return visit_count > 1 && train->part > block->part_first &&
           (train->part - block->part_first) % (block->part_count / visit_count) == 0;
}

static enum lh_sim_look backward_next(struct lh_sim_train *train)
{
    if (ends_visit(train))
        return part_begin(train, train->part - 1);
    if (train->position > 0)
        return lh_sim_train_block_begin(train, train->order[--train->position]);
    if (++train->micro_step < train->opts.micro.step_count)
        return lh_sim_train_forward_repeat(train);
    lh_sim_train_times_of(train)->close_ns = train->opts.world->now_ns;
    if (LH_SIM_HOOK_GET(train->opts.world, false, close_replaced))
        return LH_SIM_LOOK_MOVED;
    return lh_sim_train_state_set(train, makes_sums(train) ? LH_SIM_TRAIN_STATE_SUMS
                                                           : LH_SIM_TRAIN_STATE_CLOSE);
}

void lh_sim_train_backward_enter(struct lh_sim_train *train)
{
    train->phase = LH_SIM_TRAIN_PHASE_BACKWARD;
    lh_sim_train_times_of(train)->backward_ns = train->opts.world->now_ns;
}

static enum lh_sim_look forward_next(struct lh_sim_train *train)
{
    if (train->position + 1 < train->order_count)
        return lh_sim_train_block_begin(train, train->order[++train->position]);
    if (LH_SIM_HOOK_GET(train->opts.world, false, backward_replaced))
        return LH_SIM_LOOK_MOVED;
    lh_sim_train_backward_enter(train);
    return lh_sim_train_block_begin(train, train->block);
}

/* End a block after all its parts were computed. */
static enum lh_sim_look block_end(struct lh_sim_train *train)
{
    const struct lh_sim_block *block = block_of(train);
    for (uint32_t i = 0; i < block->unit_count; i++) {
        uint32_t unit = block->units[i];
        if (train->phase == LH_SIM_TRAIN_PHASE_FORWARD) {
            lh_engine_handle_add(train->opts.engine, unit);
            train->handles[unit]++;
        } else if (train->phase == LH_SIM_TRAIN_PHASE_BACKWARD) {
            lh_engine_handle_drop(train->opts.engine, unit);
            train->handles[unit]--;
        }
        lh_engine_unpin(train->opts.engine, unit);
    }
    if (train->phase != LH_SIM_TRAIN_PHASE_BACKWARD)
        return forward_next(train);
    if (LH_SIM_HOOK_GET(train->opts.world, false, backward_aborted))
        return LH_SIM_LOOK_MOVED;
    due_fill(train, 0);
    return lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_GRADIENT);
}

enum lh_sim_look lh_sim_train_part_next(struct lh_sim_train *train)
{
    const struct lh_sim_block *block = block_of(train);
    if (train->phase == LH_SIM_TRAIN_PHASE_BACKWARD && ends_visit(train)) {
        due_fill(train, 1);
        return lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_GRADIENT);
    }
    if (train->phase == LH_SIM_TRAIN_PHASE_BACKWARD && train->part > block->part_first)
        return part_begin(train, train->part - 1);
    if (train->phase != LH_SIM_TRAIN_PHASE_BACKWARD &&
        train->part + 1 < block->part_first + block->part_count)
        return part_begin(train, train->part + 1);
    return block_end(train);
}

static enum lh_sim_look compute(struct lh_sim_train *train)
{
    if (!train->is_computed)
        return LH_SIM_LOOK_WAIT;
    lh_core_trace_add(train->opts.engine, (struct lh_engine_trace_event){
                                              .kind = LH_ENGINE_TRACE_COMPUTE,
                                              .unit = LH_CHUNK_NONE,
                                              .lane = train->phase,
                                              .start_ns = train->since_ns,
                                              .end_ns = train->opts.world->now_ns,
                                          });
    if (part_of(train)->saved_count == 0)
        return lh_sim_train_part_next(train);
    if (train->phase == LH_SIM_TRAIN_PHASE_BACKWARD) {
        lh_sim_train_saved_drop(train);
        return lh_sim_train_part_next(train);
    }
    int rc = lh_sim_train_saved_put(train);
    return rc < 0 ? lh_sim_train_failed(train, rc)
                  : lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_TAKEN);
}

/* Pass a gradient to the engine, which updates from it, or adds it to the parameter's sum. */
static int gradient_pass(struct lh_sim_train *train, uint32_t param, const void *bytes)
{
    struct lh_engine *engine = train->opts.engine;
    if (!makes_sums(train))
        return lh_engine_gradient(engine, param, bytes,
                                  lh_sim_model_gradient_dtype(train->opts.model, param));
    struct lh_sum_join join = lh_sum_join_one(!train->is_summed[param]);
    train->is_summed[param] = true;
    return lh_sum_post(engine, param, bytes,
                       train->opts.model->units[train->opts.model->params[param].unit].dtype,
                       (float *)(uintptr_t)train->opts.nowhere, &join);
}

static enum lh_sim_look gradient(struct lh_sim_train *train)
{
    struct lh_engine *engine = train->opts.engine;
    if (train->param == train->due_count)
        return backward_next(train);
    /* The gradient of an earlier micro-batch has to be copied first. */
    if (makes_sums(train) && !lh_engine_gradient_is_consumed(engine, train->due[train->param]) &&
        lh_engine_error(engine, NULL) == 0)
        return LH_SIM_LOOK_WAIT;
    if (!lh_sim_train_is_worth_asking(train, lh_sim_train_steps_are_over(engine)))
        return LH_SIM_LOOK_WAIT;
    int rc = lh_engine_over_wait(engine, 0);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    if (rc == 0)
        return LH_SIM_LOOK_WAIT;
    lh_sim_train_times_of(train)->gradient_wait_ns += lh_sim_train_waited_ns(train);
    if (!train->has_hypers)
        LH_SIM_HOOK_CALL(train->opts.world, gradients_begun);
    for (uint32_t i = 0; !train->has_hypers && i < LH_SIM_GROUP_COUNT; i++) {
        struct lh_adam_hyper hyper = lh_sim_model_hyper(i, train->step + 1);
        lh_engine_hyper_set(engine, i, &hyper);
    }
    train->has_hypers = true;
    uint32_t param = train->due[train->param++];
    const void *bytes =
        LH_SIM_HOOK_GET(train->opts.world, train->opts.nowhere, gradient_made, param);
    if (is_ahead(&train->opts))
        lh_sim_dev_compute(train->opts.dev, 0, NULL, gradient_computed, train);
    else
        gradient_computed(train);
    if (LH_SIM_HOOK_GET(train->opts.world, false, gradient_kept, param))
        return lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_GRADIENT);
    rc = gradient_pass(train, param, bytes);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    return lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_ROOM);
}

/* Hand the sums to the engine when all gradients are in them. */
static enum lh_sim_look sums(struct lh_sim_train *train)
{
    struct lh_engine *engine = train->opts.engine;
    const struct lh_sim_model *model = train->opts.model;
    bool is_finished = atomic_load(&engine->sums->finished) == atomic_load(&engine->sums->posted);
    if (!is_finished && lh_engine_error(engine, NULL) == 0)
        return LH_SIM_LOOK_WAIT;
    for (uint32_t i = 0; i < model->param_count; i++) {
        if (!train->is_summed[i])
            continue;
        int rc = lh_engine_gradient(engine, i, train->opts.nowhere,
                                    lh_sim_model_gradient_dtype(model, i));
        if (rc < 0)
            return lh_sim_train_failed(train, rc);
    }
    return lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_CLOSE);
}

static enum lh_sim_look room(struct lh_sim_train *train)
{
    uint64_t held = atomic_load(&train->opts.engine->update_gradient_bytes);
    if (!lh_sim_train_is_worth_asking(train, held <= train->opts.gradient_ahead_bytes))
        return LH_SIM_LOOK_WAIT;
    int rc = lh_engine_gradient_wait(train->opts.engine, train->opts.gradient_ahead_bytes, 0);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    if (rc == 0)
        return LH_SIM_LOOK_WAIT;
    lh_sim_train_times_of(train)->gradient_wait_ns += lh_sim_train_waited_ns(train);
    return lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_GRADIENT);
}

static enum lh_sim_look close_step(struct lh_sim_train *train)
{
    uint8_t scalars[LH_SIM_SCALAR_BYTES_MAX];
    LH_SIM_HOOK_CALL(train->opts.world, closing);
    if (!lh_sim_train_is_worth_asking(train, lh_sim_train_steps_are_over(train->opts.engine)))
        return LH_SIM_LOOK_WAIT;
    uint64_t bytes = lh_sim_model_scalars(train->opts.model, train->step + 1, scalars);
    int rc = lh_engine_close(train->opts.engine, scalars, bytes, 0);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    if (rc == 0)
        return LH_SIM_LOOK_WAIT;
    lh_sim_train_times_of(train)->closed_ns = train->opts.world->now_ns;
    train->step++;
    bool flushes = LH_SIM_HOOK_GET(train->opts.world, false, closed);
    if (train->state != LH_SIM_TRAIN_STATE_CLOSE)
        return LH_SIM_LOOK_MOVED;
    if (train->step >= train->opts.step_last || flushes)
        return lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_FLUSH);
    return lh_sim_train_state_set(train, train->opts.waits_for_updates ? LH_SIM_TRAIN_STATE_OVER
                                                                       : LH_SIM_TRAIN_STATE_BEGIN);
}

static enum lh_sim_look over(struct lh_sim_train *train)
{
    if (!lh_sim_train_is_worth_asking(train, lh_sim_train_steps_are_over(train->opts.engine)))
        return LH_SIM_LOOK_WAIT;
    int rc = lh_engine_over_wait(train->opts.engine, 0);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    return rc == 0 ? LH_SIM_LOOK_WAIT : lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_BEGIN);
}

static enum lh_sim_look flush(struct lh_sim_train *train)
{
    if (!lh_sim_train_is_worth_asking(train, lh_sim_train_steps_are_over(train->opts.engine)))
        return LH_SIM_LOOK_WAIT;
    int rc = lh_engine_flush(train->opts.engine, !train->opts.never_commits, 0);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    if (rc == 0)
        return LH_SIM_LOOK_WAIT;
    bool is_last = train->step >= train->opts.step_last;
    return lh_sim_train_state_set(train,
                                  is_last ? LH_SIM_TRAIN_STATE_DONE : LH_SIM_TRAIN_STATE_BEGIN);
}

static enum lh_sim_look look(struct lh_sim_train *train)
{
    switch (train->state) {
    case LH_SIM_TRAIN_STATE_BEGIN:
        return LH_SIM_HOOK_GET(train->opts.world, false, forward_replaced)
                   ? LH_SIM_LOOK_MOVED
                   : lh_sim_train_begin(train);
    case LH_SIM_TRAIN_STATE_ACQUIRE:
        return acquire(train);
    case LH_SIM_TRAIN_STATE_SAVED:
        return lh_sim_train_saved_wait(train);
    case LH_SIM_TRAIN_STATE_COMPUTE:
        return compute(train);
    case LH_SIM_TRAIN_STATE_TAKEN:
        return lh_sim_train_saved_taken(train);
    case LH_SIM_TRAIN_STATE_GRADIENT:
        return gradient(train);
    case LH_SIM_TRAIN_STATE_ROOM:
        return room(train);
    case LH_SIM_TRAIN_STATE_SUMS:
        return sums(train);
    case LH_SIM_TRAIN_STATE_CLOSE:
        return close_step(train);
    case LH_SIM_TRAIN_STATE_OVER:
        return over(train);
    case LH_SIM_TRAIN_STATE_FLUSH:
        return flush(train);
    default:
        return LH_SIM_HOOK_GET(train->opts.world, false, state_polled) ? LH_SIM_LOOK_MOVED
                                                                       : LH_SIM_LOOK_WAIT;
    }
}

bool lh_sim_train_poll(struct lh_sim_train *train)
{
    bool moved = LH_SIM_HOOK_GET(train->opts.world, false, train_polled);
    while (!lh_sim_world_has_failed(train->opts.world) && look(train) == LH_SIM_LOOK_MOVED)
        moved = true;
    return moved;
}
