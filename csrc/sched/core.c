#include "sched/core.h"

#include "base/thread.h"
#include "sched/engine_private.h"

bool lh_core_is_forked(const struct lh_engine *engine)
{
    return engine->fork_count != lh_thread_fork_count();
}

uint64_t lh_core_now(const struct lh_engine *engine)
{
    return lh_clock_now_ns(&engine->clock);
}

void lh_core_notify(struct lh_engine *engine)
{
    if (atomic_load(&engine->waiting) == 0)
        return;
    pthread_mutex_lock(&engine->shared.mutex);
    pthread_cond_broadcast(&engine->shared.changed);
    pthread_mutex_unlock(&engine->shared.mutex);
}

void lh_core_fail(struct lh_engine *engine, const struct lh_error *err)
{
    pthread_mutex_lock(&engine->shared.mutex);
    if (engine->shared.error.code == 0)
        engine->shared.error = *err;
    atomic_store(&engine->failed, true);
    pthread_cond_broadcast(&engine->shared.changed);
    pthread_mutex_unlock(&engine->shared.mutex);
}

void lh_core_trace_add(struct lh_engine *engine, struct lh_engine_trace_event event)
{
    if (engine->opts.trace_count == 0)
        return;
    LH_ASSERT(engine->trace != NULL);
    event.step = (uint32_t)lh_core_step(engine);
    engine->trace[engine->trace_written++ % engine->opts.trace_count] = event;
}

int lh_core_error(struct lh_engine *engine, struct lh_error *err)
{
    if (lh_core_is_forked(engine))
        return lh_error_set(err, -ECANCELED,
                            "the engine works only in the process that created it");
    if (!atomic_load(&engine->failed))
        return 0;
    pthread_mutex_lock(&engine->shared.mutex);
    int code = engine->shared.error.code;
    if (err)
        *err = engine->shared.error;
    pthread_mutex_unlock(&engine->shared.mutex);
    return code;
}

int lh_core_fail_code(struct lh_engine *engine)
{
    int code = lh_core_error(engine, NULL);
    return code < 0 ? code : -ECANCELED;
}

struct lh_engine_step_stats *lh_core_stats(struct lh_engine *engine, uint64_t step)
{
    LH_ASSERT(step <= engine->step + 1); /* only one step can follow the closed steps */
    return step == 0 ? &engine->stats[LH_STATS_OF_EVALUATIONS] : &engine->stats[step % 2];
}

void lh_core_device_fail(struct lh_engine *engine, const struct lh_error *cause, const char *what)
{
    struct lh_error err = {0};
    LH_ASSERT(engine->dev != NULL);
    lh_error_set(&err, cause->code, "%s: %s: %s", engine->dev->ops->name, what, cause->message);
    lh_core_fail(engine, &err);
}
