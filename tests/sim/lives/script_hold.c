/*
 * Simulate a process that copies the store: commits are held for a while, and happen afterwards.
 *
 * Whether commits are held is only what lh_engine_commit_hold() returned. The engine's own
 * predicate must not be used here: a wrong one would then deceive the check as well.
 */
#include <inttypes.h>

#include "lives/script.h"
#include "sched/engine_private.h"

/* The maximum duration of a hold, which lasts from a small part of a step to several steps. */
#define HOLD_NS_MAX 30000000
/* The maximum number of steps in a hold, because the reference keeps only a few steps. */
#define HOLD_STEP_COUNT_MAX 3

static void time_passed(void *context)
{
    (void)context; /* the training thread is polled after every event */
}

void lh_sim_script_hold_begin(struct lh_sim_script *script)
{
    const struct lh_sim_train *train = script->opts.train;
    struct lh_sim_world *world = train->opts.world;
    if (script->holds_commits || script->opts.chances.hold_ppm == 0 ||
        !lh_sim_random_chance(&script->random, script->opts.chances.hold_ppm))
        return;
    script->holds_commits = true;
    script->hold_step = train->step;
    script->hold_until_ns = world->now_ns + lh_sim_random_below(&script->random, HOLD_NS_MAX);
    script->is_copying = false;
    script->is_granted = false;
    lh_sim_world_at(world, script->hold_until_ns, time_passed, NULL);
    /* The request is enough: the hold is granted after the commit in progress. */
    (void)!lh_engine_commit_hold(train->opts.engine, 0);
}

/* Ask whether commits are held, as a caller does whose wait for it has timed out. */
static bool is_granted(struct lh_sim_script *script)
{
    struct lh_engine *engine = script->opts.train->opts.engine;
    if (!script->is_granted && lh_engine_commit_hold(engine, 0) > 0) {
        script->is_granted = true;
        script->held_step = engine->committed_step;
    }
    return script->is_granted;
}

bool lh_sim_script_hold_poll(struct lh_sim_script *script)
{
    const struct lh_sim_train *train = script->opts.train;
    struct lh_engine *engine = train->opts.engine;
    struct lh_sim_target *target = script->opts.target;
    if (!script->holds_commits)
        return false;
    bool is_long = train->step >= script->hold_step + HOLD_STEP_COUNT_MAX;
    if (is_granted(script) && target && !script->is_copying && !is_long) {
        script->is_copying = true;
        lh_sim_target_copy(target, script->held_step);
    }
    bool is_over = train->opts.world->now_ns >= script->hold_until_ns;
    if (target && script->is_copying)
        is_over = target->is_over;
    if (!is_over && !is_long)
        return false;
    if (target && script->is_copying)
        lh_sim_target_cancel(target);
    script->holds_commits = false;
    lh_engine_commit_release(engine);
    return true;
}

void lh_sim_script_hold_check(struct lh_sim_script *script)
{
    const struct lh_sim_train *train = script->opts.train;
    const struct lh_engine *engine = train->opts.engine;
    if (!script->holds_commits || !script->is_granted)
        return;
    if (engine->step_state == LH_STEP_STATE_COMMITTING || lh_store_is_committing(engine->store))
        lh_sim_world_fail(train->opts.world, "a commit is in progress while commits are held");
    if (engine->committed_step != script->held_step)
        lh_sim_world_fail(train->opts.world,
                          "step %" PRIu64 " was committed while commits were held at step"
                          " %" PRIu64,
                          engine->committed_step, script->held_step);
}
