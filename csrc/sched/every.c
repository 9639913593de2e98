/* The steps between commits, if the caller chooses their number only after some steps. */
#include "sched/engine_private.h"

bool lh_every_set(struct lh_engine *engine, uint64_t every)
{
    LH_ASSERT(engine->opts.commit_every > 0 && every > 1);
    LH_ASSERT(atomic_load(&engine->commit_every_later) == 0);
    if (engine->spill.is_any)
        return false;
    engine->commit_every_from = lh_engine_step(engine) + 1;
    atomic_store(&engine->commit_every_later, every); /* publishes commit_every_from */
    return true;
}
