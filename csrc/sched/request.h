/*
 * [Note: Requests] Some calls send the engine a request and wait for its reply: the close of a
 * step, its abort or repetition, the norm of its gradients, a flush, a hold of commits, and the
 * updates that idle units owe. Requests of a kind are numbered from 1, and the engine replies to
 * them in order, so the whole protocol is two counters per kind: the requests sent, and the
 * replies.
 *
 * A call may time out before the reply. The next call of the same kind then waits for the same
 * request, so that every call can be polled. An abort or a flush refers to everything that was
 * posted before it: once another message has been posted, the request is no longer current, and the
 * next call sends a new request.
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
    LH_REQUEST_REPEAT,
    LH_REQUEST_FLUSH,
    LH_REQUEST_HOLD,
    LH_REQUEST_SETTLE,
    LH_REQUEST_COUNT,
};

struct lh_request {
    _Atomic uint64_t sent;
    _Atomic uint64_t replied;
    /* Owned by the training thread: */
    /* the request for which the last call waited; 0: that call has its reply */
    uint64_t awaited;
    uint64_t post_count; /* messages posted up to that request, including its own */
};

static inline bool lh_request_is_pending(const struct lh_request *request)
{
    return atomic_load(&request->replied) < atomic_load(&request->sent);
}

/*
 * Number a new request, the one for which the next lh_request_wait() waits. The caller then posts
 * the request's message.
 */
void lh_request_send(struct lh_engine *engine, enum lh_request_kind kind);
/* Make the next lh_request_wait() wait for the last request sent, which an earlier call sent. */
void lh_request_join(struct lh_engine *engine, enum lh_request_kind kind);
/* Whether an earlier call timed out and nothing has been posted since its request. */
bool lh_request_is_current(const struct lh_engine *engine, enum lh_request_kind kind);
/* Returns 1 once the reply has come, 0 after timeout_ms, or -errno if the engine failed first. */
int lh_request_wait(struct lh_engine *engine, enum lh_request_kind kind, int timeout_ms);

/* The engine's thread: reply to the pending request, and wake the threads that wait. */
void lh_request_reply(struct lh_engine *engine, enum lh_request_kind kind);

#endif
