/*
 * [Note: Requests] Some calls send the engine a request and wait for its reply: the close of a
 * step, its abort, the norm of its gradients, a flush, and a hold of commits. Requests of a kind
 * are numbered from 1, and the engine replies to them in order, so two counters of each kind are
 * the whole protocol: what was sent, and what was replied to.
 *
 * A call may time out before the reply. The next call of the same kind then waits for the same
 * request, so that every call can be polled. An abort or a flush refers to everything that was
 * posted before it: after another message it is not current, and the next call sends a new one.
 *
 * Thread: the training thread sends and waits (request.c, calls.c); the engine's thread replies.
 */
#ifndef LH_SCHED_REQUEST_H
#define LH_SCHED_REQUEST_H

#include <stdatomic.h>

#include "base/base.h"

struct lh_engine;

enum lh_request_kind {
    LH_REQUEST_CLOSE = 0,
    LH_REQUEST_ABORT,
    LH_REQUEST_NORM,
    LH_REQUEST_FLUSH,
    LH_REQUEST_HOLD,
    LH_REQUEST_COUNT,
};

struct lh_request {
    _Atomic uint64_t sent;
    _Atomic uint64_t replied;
    /* The training thread's. */
    uint64_t awaited;    /* the last request that a call waited for; 0: the call has its reply */
    uint64_t post_count; /* messages posted when that request was sent, its own included */
};

static inline bool lh_request_is_pending(const struct lh_request *request)
{
    return atomic_load(&request->replied) < atomic_load(&request->sent);
}

/* Number a new request, and wait for it from now on. The caller then posts its message. */
void lh_request_send(struct lh_engine *engine, enum lh_request_kind kind);
/* Wait from now on for the pending request, which an earlier call sent. */
void lh_request_join(struct lh_engine *engine, enum lh_request_kind kind);
/* Whether an earlier call timed out, and its request still covers all that was posted. */
bool lh_request_is_current(const struct lh_engine *engine, enum lh_request_kind kind);
/* Returns 1 once the reply has come, 0 after timeout_ms, or -errno if the engine failed first. */
int lh_request_wait(struct lh_engine *engine, enum lh_request_kind kind, int timeout_ms);

/* The engine's thread: reply to the pending request, and wake the threads that wait. */
void lh_request_reply(struct lh_engine *engine, enum lh_request_kind kind);

#endif
