/* Simulate a process that copies the store: commits are held for a while, and happen afterwards. */
#include "sched/engine_private.h"
#include "sim/train_private.h"

/* From a small part of a step to several steps. */
#define HOLD_NS_MAX 30000000
/* A limit, because the reference keeps only a few steps. */
#define HOLD_STEP_COUNT_MAX 3

static void time_passed(void *context)
{
    (void)context; /* the training thread is polled after every event */
}

void lh_sim_train_hold_begin(struct lh_sim_train *train)
{
    struct lh_sim_world *world = train->opts.world;
    if (train->holds_commits || train->opts.chances.hold_ppm == 0 ||
        !lh_sim_random_chance(&train->random, train->opts.chances.hold_ppm))
        return;
    train->holds_commits = true;
    train->hold_step = train->step;
    train->hold_until_ns = world->now_ns + lh_sim_random_below(&train->random, HOLD_NS_MAX);
    train->is_copying = false;
    lh_sim_world_at(world, train->hold_until_ns, time_passed, NULL);
    /* The request is enough: it is granted after the commit in progress. */
    (void)!lh_engine_commit_hold(train->opts.engine, 0);
}

bool lh_sim_train_hold_poll(struct lh_sim_train *train)
{
    struct lh_engine *engine = train->opts.engine;
    struct lh_sim_target *target = train->opts.target;
    if (!train->holds_commits)
        return false;
    bool is_long = train->step >= train->hold_step + HOLD_STEP_COUNT_MAX;
    if (target && !train->is_copying && !is_long && lh_step_holds_commits(engine)) {
        train->is_copying = true;
        lh_sim_target_copy(target, engine->committed_step);
    }
    bool is_over = train->opts.world->now_ns >= train->hold_until_ns;
    if (target && train->is_copying)
        is_over = target->is_over;
    if (!is_over && !is_long)
        return false;
    if (target && train->is_copying)
        lh_sim_target_cancel(target);
    train->holds_commits = false;
    lh_engine_commit_release(engine);
    return true;
}
