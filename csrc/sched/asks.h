/*
 * [Note: Calls that ask] A flush or an abort asks the engine, and may time out before the answer.
 * The next call of its kind waits on for that one, so that both can be polled. It asks anew once
 * its caller was told, and when anything was posted since: an answer from before is none to what
 * came after it.
 *
 * Thread: the training thread's, but for post_count.
 */
#ifndef LH_SCHED_ASKS_H
#define LH_SCHED_ASKS_H

#include <stdatomic.h>

#include "base/base.h"

struct lh_asked {
    uint64_t number;     /* which one its caller waits for; 0: he was told */
    uint64_t post_count; /* its own message included */
};

struct lh_asks {
    _Atomic uint64_t post_count; /* of all messages, by any thread */
    struct lh_asked abort;
    struct lh_asked flush;
    bool flush_commits; /* the last one */
};

static inline bool lh_asked_is_open(const struct lh_asks *asks, const struct lh_asked *asked)
{
    return asked->number > 0 && asked->post_count == atomic_load(&asks->post_count);
}

#endif
