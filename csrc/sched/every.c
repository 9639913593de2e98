/* The steps between commits, if the caller chooses their number only after some steps. */
#include "sched/engine_private.h"

bool lh_every_set(struct lh_engine *engine, uint64_t every)
{
    LH_ASSERT(engine->opts.commit_every > 0 && every > 1);
    LH_ASSERT(atomic_load(&engine->commit_every_later) == 0);
    bool may_skip = LH_FEATURE_ALL(engine, step_may_skip_commit);
    if (!may_skip)
        return false;
    engine->commit_every_from = lh_engine_step(engine) + 1;
    atomic_store(&engine->commit_every_later, every); /* publishes commit_every_from */
    return true;
}
