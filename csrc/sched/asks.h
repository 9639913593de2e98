/*
 * [Note: Calls that ask] A flush or an abort sends the engine a request, and may time out before
 * the reply. The next call of the same kind then waits for that request, so that both calls can be
 * polled. A new request is sent once the caller has received the reply, and whenever another
 * message was posted since: a reply counts only for what was posted before its request.
 *
 * Thread: the training thread's, except post_count.
 */
#ifndef LH_SCHED_ASKS_H
#define LH_SCHED_ASKS_H

#include <stdatomic.h>

#include "base/base.h"

struct lh_asked {
    uint64_t number;     /* the request that the caller waits for; 0: it has the reply */
    uint64_t post_count; /* at the request, its own message included */
};

struct lh_asks {
    _Atomic uint64_t post_count; /* messages posted by any thread */
    struct lh_asked abort;
    struct lh_asked flush;
    bool flush_commits; /* whether the last flush requested commits */
};

static inline bool lh_asked_is_open(const struct lh_asks *asks, const struct lh_asked *asked)
{
    return asked->number > 0 && asked->post_count == atomic_load(&asks->post_count);
}

#endif
