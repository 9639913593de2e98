#include "io_faulty.h"

#include <pthread.h>
#include <stdatomic.h>

#include "base/assert.h"
#include "io/io_private.h"

struct faulty {
    struct lh_io io; /* the first member, because the caller's pointer points to it */
    struct lh_io *inner;
    struct lh_alloc *alloc;
    struct lh_waker *waker;
    const struct lh_clock *clock;
    pthread_mutex_t lock; /* of the fault and the victim: a test may arm while requests pass */
    struct lh_io_fault fault;
    atomic_bool has_fired;
    atomic_bool is_released;
    struct lh_io_queue failed;
    struct lh_io_queue held;
    /* The request that was shortened or whose bytes will be flipped, while it is in inner. */
    struct lh_io_request *victim;
    void *victim_buffer; /* SHORT: the request's original values */
    uint64_t victim_bytes;
    uint64_t victim_offset;
    uint64_t victim_least_bytes;
};

/* Return whether the armed fault hits this request; count down if a matching request passes. */
static bool fault_hits(struct faulty *faulty, const struct lh_io_request *request)
{
    struct lh_io_fault *fault = &faulty->fault;
    bool is_transfer = request->kind != LH_IO_KIND_SYNC;
    bool is_over = faulty->has_fired && fault->kind != LH_IO_FAULT_KIND_HOLD;
    if (fault->kind == LH_IO_FAULT_KIND_NONE || is_over || faulty->victim)
        return false;
    if (fault->request_kinds && !(fault->request_kinds & LH_IO_FAULT_ON(request->kind)))
        return false;
    if (fault->kind == LH_IO_FAULT_KIND_SHORT && !(is_transfer && request->bytes > fault->bytes))
        return false;
    if (fault->kind == LH_IO_FAULT_KIND_FLIP && request->kind != LH_IO_KIND_READ)
        return false;
    if (fault->after > 0) {
        fault->after--;
        return false;
    }
    return true;
}

static int request_fail(struct faulty *faulty, struct lh_io_request *request)
{
    request->result = faulty->fault.code;
    request->submitted_ns = lh_clock_now_ns(faulty->clock);
    request->completed_ns = request->submitted_ns;
    lh_io_queue_push(&faulty->failed, request);
    faulty->io.in_flight_count++;
    faulty->has_fired = true;
    if (faulty->waker)
        lh_waker_wake(faulty->waker);
    return 0;
}

/* Queue the request after those already held, so that they reach the inner backend in order. */
static int request_hold(struct faulty *faulty, struct lh_io_request *request)
{
    lh_io_queue_push(&faulty->held, request);
    faulty->io.in_flight_count++;
    faulty->has_fired = true;
    return 0;
}

static void requests_pass_on(struct faulty *faulty)
{
    if (!faulty->is_released)
        return;
    if (faulty->fault.kind == LH_IO_FAULT_KIND_HOLD)
        faulty->fault.kind = LH_IO_FAULT_KIND_NONE;
    while (faulty->held.head) {
        int rc = faulty->inner->ops->submit(faulty->inner, lh_io_queue_pop(&faulty->held));
        LH_ASSERT(rc == 0); /* each was counted when it was held */
    }
}

static void request_restore(struct faulty *faulty, struct lh_io_request *request)
{
    request->buffer = faulty->victim_buffer;
    request->bytes = faulty->victim_bytes;
    request->offset = faulty->victim_offset;
    request->least_bytes = faulty->victim_least_bytes;
}

static int request_submit(struct faulty *faulty, struct lh_io_request *request)
{
    bool hit = fault_hits(faulty, request);
    if (hit && faulty->fault.kind == LH_IO_FAULT_KIND_ERROR)
        return request_fail(faulty, request);
    if (hit && faulty->fault.kind == LH_IO_FAULT_KIND_HOLD)
        return request_hold(faulty, request);
    if (hit) {
        LH_ASSERT(!faulty->victim);
        faulty->victim = request;
        faulty->victim_buffer = request->buffer;
        faulty->victim_bytes = request->bytes;
        faulty->victim_offset = request->offset;
        faulty->victim_least_bytes = request->least_bytes;
        if (faulty->fault.kind == LH_IO_FAULT_KIND_SHORT) {
            request->bytes = faulty->fault.bytes;
            request->least_bytes = lh_min_u64(request->least_bytes, request->bytes);
        }
    }
    int rc = faulty->inner->ops->submit(faulty->inner, request);
    if (rc == 0) {
        faulty->io.in_flight_count++;
    } else if (hit) {
        request_restore(faulty, request);
        faulty->victim = NULL;
    }
    return rc;
}

static int faulty_submit(struct lh_io *io, struct lh_io_request *request)
{
    struct faulty *faulty = (struct faulty *)io;
    pthread_mutex_lock(&faulty->lock);
    int rc = request_submit(faulty, request);
    pthread_mutex_unlock(&faulty->lock);
    return rc;
}

static void faulty_flush(struct lh_io *io)
{
    struct faulty *faulty = (struct faulty *)io;
    if (faulty->inner->ops->flush)
        faulty->inner->ops->flush(faulty->inner);
}

/* The inner backend returned the victim. Returns false if it was submitted again for its rest. */
static bool victim_done(struct faulty *faulty, struct lh_io_request *request)
{
    LH_ASSERT(request == faulty->victim);
    if (faulty->fault.kind == LH_IO_FAULT_KIND_FLIP) {
        faulty->victim = NULL;
        if (request->result == 0) {
            uint64_t bit = faulty->fault.bit % (request->bytes * 8);
            ((uint8_t *)request->buffer)[bit / 8] ^= (uint8_t)(1U << bit % 8);
            faulty->has_fired = true;
        }
        return true;
    }
    bool is_first_part = request->offset == faulty->victim_offset;
    uint64_t first_bytes = request->bytes;
    bool is_enough = faulty->victim_least_bytes > 0 && first_bytes >= faulty->victim_least_bytes;
    if (is_first_part && request->result == 0 && is_enough)
        faulty->has_fired = true;
    if (is_first_part && request->result == 0 && !is_enough) {
        LH_ASSERT(first_bytes < faulty->victim_bytes);
        request->buffer = (uint8_t *)faulty->victim_buffer + first_bytes;
        request->bytes = faulty->victim_bytes - first_bytes;
        request->offset = faulty->victim_offset + first_bytes;
        if (faulty->victim_least_bytes > 0)
            request->least_bytes = faulty->victim_least_bytes - first_bytes;
        int rc = faulty->inner->ops->submit(faulty->inner, request);
        LH_ASSERT(rc == 0); /* its place in the queue is free */
        faulty->has_fired = true;
        return false;
    }
    request_restore(faulty, request);
    faulty->victim = NULL;
    return true;
}

static uint32_t faulty_poll(struct lh_io *io, struct lh_io_request **done, uint32_t done_max)
{
    struct faulty *faulty = (struct faulty *)io;
    uint32_t done_count = 0;
    pthread_mutex_lock(&faulty->lock);
    while (done_count < done_max && faulty->failed.head)
        done[done_count++] = lh_io_queue_pop(&faulty->failed);
    uint32_t inner_begin = done_count;
    uint32_t inner_count =
        faulty->inner->ops->poll(faulty->inner, done + done_count, done_max - done_count);
    for (uint32_t i = inner_begin; i < inner_begin + inner_count; i++) {
        LH_ASSERT(done[i]);
        if (done[i] != faulty->victim || victim_done(faulty, done[i]))
            done[done_count++] = done[i];
    }
    requests_pass_on(faulty);
    pthread_mutex_unlock(&faulty->lock);
    faulty_flush(io);
    LH_ASSERT(io->in_flight_count >= done_count);
    io->in_flight_count -= done_count;
    return done_count;
}

static void faulty_destroy(struct lh_io *io)
{
    struct faulty *faulty = (struct faulty *)io;
    LH_ASSERT(io->in_flight_count == 0);
    faulty->inner->ops->destroy(faulty->inner);
    pthread_mutex_destroy(&faulty->lock);
    lh_free(faulty->alloc, faulty);
}

static const struct lh_io_ops faulty_ops = {
    .version = LH_IO_OPS_VERSION,
    .name = "faulty",
    .submit = faulty_submit,
    .flush = faulty_flush,
    .poll = faulty_poll,
    .destroy = faulty_destroy,
};

int lh_io_faulty_create(const struct lh_io_faulty_opts *opts, struct lh_alloc *alloc,
                        struct lh_io **io_out, struct lh_error *err)
{
    *io_out = NULL;
    LH_ASSERT(opts->inner && opts->clock);
    struct faulty *faulty = lh_alloc_zeroed(alloc, 1, sizeof(*faulty));
    if (!faulty)
        return lh_error_set(err, -ENOMEM, "no memory for a faulty backend");
    faulty->io.ops = &faulty_ops;
    faulty->inner = opts->inner;
    faulty->alloc = alloc;
    faulty->waker = opts->waker;
    faulty->clock = opts->clock;
    pthread_mutex_init(&faulty->lock, NULL);
    *io_out = &faulty->io;
    return 0;
}

void lh_io_faulty_arm(struct lh_io *io, struct lh_io_fault fault)
{
    struct faulty *faulty = (struct faulty *)io;
    LH_ASSERT(io->ops == &faulty_ops);
    pthread_mutex_lock(&faulty->lock);
    LH_ASSERT(!faulty->victim);
    LH_ASSERT(fault.kind != LH_IO_FAULT_KIND_ERROR || fault.code < 0);
    LH_ASSERT(fault.kind != LH_IO_FAULT_KIND_SHORT || fault.bytes > 0);
    LH_ASSERT(!faulty->held.head);
    faulty->fault = fault;
    faulty->has_fired = false;
    faulty->is_released = false;
    pthread_mutex_unlock(&faulty->lock);
}

bool lh_io_faulty_has_fired(const struct lh_io *io)
{
    LH_ASSERT(io->ops == &faulty_ops);
    return ((const struct faulty *)io)->has_fired;
}

void lh_io_faulty_release(struct lh_io *io)
{
    struct faulty *faulty = (struct faulty *)io;
    LH_ASSERT(io->ops == &faulty_ops);
    faulty->is_released = true;
    if (faulty->waker)
        lh_waker_wake(faulty->waker);
}
