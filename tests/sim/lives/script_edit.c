/*
 * Edits: the caller changes parameters, and their states, between two steps:
 *
 *      flush, with a commit -> pause -> writes to the store -> resume
 *      flush -> pause -> commit of what was written -> resume
 *
 * The second line happens at once, or before the next backward, as in csrc/py's session, or not at
 * all if a later step's commit includes what was written. A program that ends before that drops the
 * edit.
 */
#include "lives/script.h"
#include "sched/engine_private.h"

#define WRITE_COUNT_MAX 4

static bool has_trainable(const struct lh_sim_model *model)
{
    for (uint32_t i = 0; i < model->unit_count; i++) {
        if (model->units[i].elements > 0)
            return true;
    }
    return false;
}

bool lh_sim_script_edit_draw(struct lh_sim_script *script)
{
    const struct lh_sim_script_opts *opts = &script->opts;
    struct lh_sim_train *train = opts->train;
    if (opts->chances.edit_ppm == 0 || !has_trainable(train->opts.model) || script->edit_is_due ||
        lh_sim_reference_is_edited(opts->reference, train->step) ||
        !lh_sim_random_chance(&script->edit_random, opts->chances.edit_ppm))
        return false;
    (void)lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_EDIT);
    return true;
}

/* Grant a pause, as the engine's own thread does when it is requested. */
static bool pause_is_granted(struct lh_engine *engine)
{
    engine->shared.is_paused = lh_step_is_quiet(engine);
    return engine->shared.is_paused;
}

/* Write new values for some elements of a parameter, or of its states. */
static int write_some(struct lh_sim_script *script)
{
    const struct lh_sim_script_opts *opts = &script->opts;
    const struct lh_sim_model *model = opts->reference->model;
    struct lh_sim_random *random = &script->edit_random;
    uint32_t index = 0;
    do
        index = (uint32_t)lh_sim_random_below(random, model->param_count);
    while (model->units[model->params[index].unit].elements == 0);
    const struct lh_engine_param *param = &model->params[index];
    uint64_t from = lh_sim_random_below(random, param->count);
    uint64_t count = 1 + lh_sim_random_below(random, param->count - from);
    enum lh_sim_array array =
        (enum lh_sim_array)(lh_sim_random_below(random, 8) % LH_SIM_ARRAY_COUNT);
    uint64_t array_bytes = lh_sim_model_array_bytes(model, param->unit, array);
    if (array_bytes == 0)
        return 0;
    uint64_t element_bytes = array_bytes / model->units[param->unit].elements;
    lh_sim_reference_edit(opts->reference, param->unit, array, param->first + from, count,
                          lh_sim_random_next(random));
    uint64_t offset = (param->first + from) * element_bytes;
    const uint8_t *bytes =
        lh_sim_reference_array(opts->reference, script->opts.train->step, param->unit, array) +
        offset;
    return lh_store_write_sync(opts->train->opts.engine->store,
                               lh_sim_model_extent(model, param->unit, array), offset, bytes,
                               count * element_bytes, &script->err);
}

static int commit(struct lh_sim_script *script)
{
    struct lh_store *store = script->opts.train->opts.engine->store;
    uint64_t scalar_bytes = 0;
    const void *scalars = lh_store_scalars(store, &scalar_bytes);
    lh_sim_reference_edit_set(script->opts.reference, LH_SIM_EDIT_COMMITTING);
    int rc =
        lh_store_commit_sync(store, script->opts.train->step, scalars, scalar_bytes, &script->err);
    if (rc == 0)
        lh_sim_reference_edit_set(script->opts.reference, LH_SIM_EDIT_COMMITTED);
    return rc;
}

/* Make an edit, with the engine paused. */
static int edit(struct lh_sim_script *script)
{
    const struct lh_sim_script_opts *opts = &script->opts;
    const struct lh_sim_model *model = opts->reference->model;
    struct lh_engine *engine = opts->train->opts.engine;
    struct lh_sim_random *random = &script->edit_random;
    uint64_t write_count = 1 + lh_sim_random_below(random, WRITE_COUNT_MAX);
    bool is_single = lh_store_is_single_slot(engine->store);
    bool commits_now = is_single || lh_sim_random_below(random, 2) == 0;
    /* The slot of uncommitted data may also hold spilled gradients (sched/spill.c). */
    bool may_carry = engine->opts.commit_every > 1 && !is_single;
    bool carries = lh_sim_random_below(random, 2) == 0 && may_carry;
    bool quits = lh_sim_random_below(random, 8) == 0 && !opts->never_quits;
    script->edit_count++;
    lh_sim_reference_edit_begin(opts->reference);
    if (opts->edit_dies_after != UINT64_MAX)
        lh_sim_fs_kill_after(opts->fs, opts->edit_dies_after);
    for (uint64_t i = 0; i < write_count; i++)
        LH_TRY(write_some(script));
    for (uint32_t i = 0; i < model->unit_count; i++) {
        if (lh_store_is_staged(engine->store, model->units[i].store_group))
            lh_engine_invalidate(engine, i);
    }
    if (commits_now)
        LH_TRY(commit(script));
    script->edit_is_due = !commits_now && !carries;
    return quits ? lh_error_set(&script->err, -ECANCELED, "the program ended after an edit") : 0;
}

enum lh_sim_look lh_sim_script_edit(struct lh_sim_script *script)
{
    struct lh_sim_train *train = script->opts.train;
    struct lh_engine *engine = train->opts.engine;
    if (script->holds_commits ||
        !lh_sim_train_is_worth_asking(train, lh_sim_train_steps_are_over(engine)))
        return LH_SIM_LOOK_WAIT;
    int rc = lh_engine_flush(engine, !script->edit_is_due, 0);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    return rc == 0 ? LH_SIM_LOOK_WAIT : lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_PAUSE);
}

enum lh_sim_look lh_sim_script_pause(struct lh_sim_script *script)
{
    struct lh_sim_train *train = script->opts.train;
    struct lh_engine *engine = train->opts.engine;
    int rc = train->is_asked ? 0 : lh_engine_pause(engine, 0);
    train->is_asked = true;
    if (rc == 0)
        rc = lh_engine_error(engine, NULL);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    if (!pause_is_granted(engine))
        return LH_SIM_LOOK_WAIT;
    bool is_commit = script->edit_is_due;
    script->edit_is_due = false;
    rc = is_commit ? commit(script) : edit(script);
    lh_engine_resume(engine);
    engine->shared.is_paused = false;
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    if (is_commit)
        return lh_sim_train_block_begin(train, train->block);
    return lh_sim_script_eval_draw(script) ? LH_SIM_LOOK_MOVED : lh_sim_train_begin(train);
}
