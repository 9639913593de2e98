/* The part of a session that lends keep alive: see [Note: What outlives what]. */
#include "base/assert.h"
#include "base/thread.h"
#include "py/lhpy.h"

#include <stdlib.h>

struct lhpy_core *lhpy_core_create(void)
{
    struct lh_alloc bootstrap = LH_ALLOC_INIT;
    struct lhpy_core *core = lh_alloc_zeroed(&bootstrap, 1, sizeof(*core));
    if (!core)
        return NULL;
    core->alloc = (struct lh_alloc)LH_ALLOC_INIT;
    atomic_store(&core->references, 1);
    core->fork_count = lh_thread_fork_count();
    return core;
}

bool lhpy_core_is_forked(const struct lhpy_core *core)
{
    return core->fork_count != lh_thread_fork_count();
}

void lhpy_core_retain(struct lhpy_core *core)
{
    uint32_t before = atomic_fetch_add(&core->references, 1);
    LH_ASSERT(before > 0);
}

void lhpy_core_release(struct lhpy_core *core)
{
    uint32_t before = atomic_fetch_sub(&core->references, 1);
    LH_ASSERT(before > 0);
    if (before > 1)
        return;
    if (core->alloc.sealed) /* not sealed if creating the engine failed */
        lh_alloc_unseal(&core->alloc);
    lh_engine_destroy(core->engine);
    lhpy_device_destroy(core);
    lhpy_team_close(core);
    if (core->arena)
        lh_arena_destroy(core->arena, &core->alloc);
    if (core->has_waker)
        lh_waker_deinit(&core->waker);
    struct lh_alloc bootstrap = LH_ALLOC_INIT;
    bootstrap.live_count = 1;
    lh_free(&bootstrap, core);
}
