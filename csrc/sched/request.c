#include "sched/request.h"

#include "sched/engine_private.h"

static struct lh_request *request_of(struct lh_engine *engine, enum lh_request_kind kind)
{
    LH_ASSERT((uint32_t)kind < LH_REQUEST_COUNT);
    return &engine->requests[kind];
}

void lh_request_send(struct lh_engine *engine, enum lh_request_kind kind)
{
    struct lh_request *request = request_of(engine, kind);
    LH_ASSERT(!lh_request_is_pending(request));
    request->post_count = atomic_load(&engine->post_count) + 1;
    request->awaited = atomic_fetch_add(&request->sent, 1) + 1;
}

void lh_request_join(struct lh_engine *engine, enum lh_request_kind kind)
{
    struct lh_request *request = request_of(engine, kind);
    LH_ASSERT(request->awaited <= atomic_load(&request->sent));
    request->post_count = atomic_load(&engine->post_count);
    request->awaited = atomic_load(&request->sent);
}

bool lh_request_is_current(const struct lh_engine *engine, enum lh_request_kind kind)
{
    const struct lh_request *request = &engine->requests[kind];
    LH_ASSERT(request->awaited <= atomic_load(&request->sent));
    return request->awaited > 0 && request->post_count == atomic_load(&engine->post_count);
}

static bool is_replied(struct lh_engine *engine, uint64_t kind)
{
    const struct lh_request *request = request_of(engine, (enum lh_request_kind)kind);
    return atomic_load(&request->replied) >= request->awaited;
}

int lh_request_wait(struct lh_engine *engine, enum lh_request_kind kind, int timeout_ms)
{
    int rc = lh_engine_wait_until(engine, is_replied, kind, timeout_ms);
    if (rc != 0)
        request_of(engine, kind)->awaited = 0;
    return rc;
}

void lh_request_reply(struct lh_engine *engine, enum lh_request_kind kind)
{
    struct lh_request *request = request_of(engine, kind);
    LH_ASSERT(lh_request_is_pending(request));
    atomic_fetch_add(&request->replied, 1);
    lh_core_notify(engine);
}
