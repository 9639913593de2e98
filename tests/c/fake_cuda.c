#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "fake_cuda.h"

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../../cuda/zo_counter.h"
#include "compute/zo_launch.h"
#include "dev/cuda_abi.h"
#include "lh_test.h"

#ifndef STREAM_COUNT_MAX /* tests/lag includes this file with larger tables */
#define STREAM_COUNT_MAX 16
#define EVENT_COUNT_MAX 4096
#define REGION_COUNT_MAX 16
#define OP_COUNT_MAX 4096
#endif

#define INVALID_VALUE 1
#define INVALID_CONTEXT 201
#define ALREADY_REGISTERED 712
#define NOT_PERMITTED 800

struct op {
    enum { OP_COPY, OP_WAIT, OP_CALL, OP_LAUNCH, OP_STAMP } kind;
    void *to;
    const void *from;
    size_t bytes;
    struct CUstream_st *stream; /* OP_WAIT: until it has executed number */
    uint64_t number;
    void (*function)(void *context);
    void *context;
    struct CUevent_st *event;  /* OP_STAMP */
    struct lh_zo_batch *batch; /* OP_LAUNCH: a copy of the argument, and the number of threads */
    uint64_t thread_count;
};

struct CUstream_st {
    bool is_used;
    bool is_stopping;
    bool computes; /* its work is computation, not copies and what follows them */
    pthread_t thread;
    uint64_t random;
    struct op ops[OP_COUNT_MAX];
    /*
     * both counts continue when a stream is destroyed and created again: an event may still refer
     * to them
     */
    uint64_t issued_count;
    uint64_t executed_count;
};

/* Recorded: passed when stream has executed number. */
struct CUevent_st {
    bool is_used;
    bool is_timed;
    struct CUstream_st *stream;
    uint64_t number;
    uint64_t passed_ns; /* is_timed */
};

struct CUmod_st {
    int load_count;
};

struct CUfunc_st {
    const char *name;
};

struct CUctx_st {
    int retain_count;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* protects everything in this file */
static pthread_cond_t has_news = PTHREAD_COND_INITIALIZER;
static struct fake_cuda_opts opts;
static struct CUctx_st context_only;
static struct CUstream_st streams[STREAM_COUNT_MAX]; /* the first is the default stream */
static struct CUevent_st events[EVENT_COUNT_MAX];
const char fake_cuda_image[] = "kernels of cuda/";
static struct CUmod_st module_only;
static struct CUfunc_st zo_batch = {LH_ZO_KERNEL_NAME};
static int64_t allocation_count;
static int64_t launch_count; /* the number of launches in progress */
static int64_t call_count;
static uint64_t copied_ns; /* the time that copies have taken, if opts.copy_ns is set */
static bool is_broken;
static uint64_t compute_ns; /* how long an item of a stream that computes takes, in addition */
static uint64_t copy_bytes_per_s; /* 0: that of memcpy */
static bool is_paused;
static int64_t allowance = -1; /* of host calls in streams that compute; -1: no limit */
/* Addresses in device memory, and where this process sees it; NULL: at the same addresses. */
static const uint8_t *device_base;
static size_t device_bytes;
static uint8_t *device_view;
static _Thread_local int pushed_count;
static _Thread_local bool is_in_host_call;

static void lock(void)
{
    LH_CHECK(pthread_mutex_lock(&mutex) == 0);
}

/* End a call: release the lock, and return the call's result. */
static unsigned unlock(unsigned result)
{
    LH_CHECK(pthread_cond_broadcast(&has_news) == 0);
    LH_CHECK(pthread_mutex_unlock(&mutex) == 0);
    return result;
}

/* Begin a fallible call. */
static unsigned begin(bool needs_context)
{
    lock();
    call_count++;
    if (is_in_host_call)
        return NOT_PERMITTED;
    if (needs_context && pushed_count == 0)
        return INVALID_CONTEXT;
    if (is_broken)
        return LH_CUDA_ILLEGAL_ADDRESS;
    if (opts.fail_after >= 0 && opts.fail_after-- == 0)
        return FAKE_CUDA_ERROR;
    return 0;
}

#include "fake_cuda_turn.h"

/* What an item of work changes besides memory. The caller holds the lock. */
static void op_end(const struct op *op)
{
    struct timespec now;
    launch_count -= op->kind == OP_LAUNCH;
    copied_ns += op->kind == OP_COPY ? opts.copy_ns : 0;
    if (op->kind != OP_STAMP)
        return;
    LH_CHECK(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
    uint64_t now_ns = (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
    op->event->passed_ns = opts.copy_ns > 0 ? copied_ns : now_ns;
}

/* How much longer an item takes because the device is slow (driver_slow() in tests/lag). */
static uint64_t slowness_of(const struct CUstream_st *stream, const struct op *op)
{
    if (op->kind == OP_COPY && !stream->computes && copy_bytes_per_s > 0)
        return op->bytes * UINT64_C(1000000000) / copy_bytes_per_s;
    return op->kind == OP_CALL && stream->computes ? compute_ns : 0;
}

static void pass(uint64_t ns)
{
    struct timespec left = {.tv_sec = (time_t)(ns / UINT64_C(1000000000)),
                            .tv_nsec = (long)(ns % UINT64_C(1000000000))};
    if (ns > 0)
        nanosleep(&left, NULL);
}

static void *stream_main(void *argument)
{
    struct CUstream_st *stream = argument;
    lock();
    for (;;) {
        while (!next_of(stream) && !stream->is_stopping)
            pthread_cond_wait(&has_news, &mutex);
        if (!next_of(stream))
            break;
        struct op op = *next_of(stream);
        uint64_t delay_ns = opts.delay_ns_max;
        unlock(0);
        pass(delay_ns > 0 ? lh_test_random(&stream->random) % delay_ns : 0);
        lock();
        turn_wait(stream, &op);
        bool is_skipped = is_broken;
        uint64_t slow_ns = slowness_of(stream, &op);
        unlock(0);
        pass(slow_ns);
        is_in_host_call = true;
        if (op.kind == OP_COPY && !is_skipped)
            copy_run(stream, &op);
        if (op.kind == OP_CALL && !is_skipped)
            op.function(op.context);
        for (uint64_t i = 0; op.kind == OP_LAUNCH && !is_skipped && i < op.thread_count; i++)
            zo_thread(op.batch, i, op.thread_count);
        free(op.kind == OP_LAUNCH ? op.batch : NULL);
        is_in_host_call = false;
        lock();
        op_end(&op);
        stream->executed_count++;
        pthread_cond_broadcast(&has_news);
    }
    unlock(0);
    return NULL;
}

/* The caller holds the lock. */
static struct CUstream_st *stream_start(struct CUstream_st *stream)
{
    stream->is_used = true;
    stream->is_stopping = false;
    stream->computes = stream == &streams[0];
    stream->random = opts.seed + (uint64_t)(stream - streams);
    LH_CHECK(pthread_create(&stream->thread, NULL, stream_main, stream) == 0);
    return stream;
}

/* The stream first executes what it was given. */
static void stream_stop(struct CUstream_st *stream)
{
    lock();
    stream->is_stopping = true;
    unlock(0);
    LH_CHECK(pthread_join(stream->thread, NULL) == 0);
    lock();
    stream->is_used = false;
    unlock(0);
}

static struct CUstream_st *stream_of(struct CUstream_st *stream)
{
    stream = stream ? stream : &streams[0];
    LH_CHECK(stream->is_used);
    return stream;
}

/* Give a stream something to execute. The caller holds the lock. */
static void push(struct CUstream_st *stream, struct op op)
{
    LH_CHECK(stream->issued_count - stream->executed_count < OP_COUNT_MAX);
    stream->ops[stream->issued_count++ % OP_COUNT_MAX] = op;
}

/* The middle and the end of a call: give a stream something to execute. */
static unsigned issue(unsigned result, struct CUstream_st *stream, struct op op)
{
    if (result == 0)
        push(stream_of(stream), op);
    return unlock(result);
}

static unsigned fake_init(unsigned flags)
{
    LH_CHECK(flags == 0);
    unsigned result = begin(false);
    return unlock(result ? result : opts.init_result);
}

static unsigned fake_device_count(int *count)
{
    *count = FAKE_CUDA_DEVICE_COUNT;
    return unlock(begin(false));
}

static unsigned fake_device_get(int *device, int index)
{
    LH_CHECK(index >= 0 && index < FAKE_CUDA_DEVICE_COUNT);
    *device = 40 + index;
    return unlock(begin(false));
}

static unsigned fake_context_retain(struct CUctx_st **context, int device)
{
    unsigned result = begin(false);
    LH_CHECK(device >= 40 && device < 40 + FAKE_CUDA_DEVICE_COUNT);
    if (result == 0 && context_only.retain_count++ == 0)
        stream_start(&streams[0]);
    *context = result == 0 ? &context_only : (struct CUctx_st *)-1;
    return unlock(result);
}

static unsigned fake_context_release(int device)
{
    LH_CHECK(device >= 40 && device < 40 + FAKE_CUDA_DEVICE_COUNT);
    lock();
    LH_CHECK(context_only.retain_count > 0);
    bool is_last = --context_only.retain_count == 0;
    unlock(0);
    if (is_last)
        stream_stop(&streams[0]);
    return 0;
}

static unsigned fake_context_push(struct CUctx_st *context)
{
    /* Like the driver, report what failed only to callers that query the streams. */
    unsigned result = begin(false);
    LH_CHECK(context == &context_only && context->retain_count > 0);
    if (result == LH_CUDA_ILLEGAL_ADDRESS)
        result = 0;
    if (result == 0)
        pushed_count++;
    return unlock(result);
}

static unsigned fake_context_pop(struct CUctx_st **context)
{
    LH_CHECK(pushed_count > 0);
    pushed_count--;
    *context = &context_only;
    return 0;
}

static unsigned fake_stream_create(struct CUstream_st **stream, unsigned flags)
{
    unsigned result = begin(true);
    int index = 1;
    LH_CHECK(flags == LH_CUDA_STREAM_NON_BLOCKING);
    while (index < STREAM_COUNT_MAX && streams[index].is_used)
        index++;
    LH_CHECK(index < STREAM_COUNT_MAX);
    *stream = result == 0 ? stream_start(&streams[index]) : (struct CUstream_st *)-1;
    return unlock(result);
}

static unsigned fake_stream_destroy(struct CUstream_st *stream)
{
    LH_CHECK(pushed_count > 0 && stream && stream->is_used);
    stream_stop(stream);
    return 0;
}

static unsigned fake_stream_query(struct CUstream_st *stream)
{
    unsigned result = begin(true);
    stream = stream_of(stream);
    if (result == 0 && stream->executed_count < stream->issued_count)
        result = LH_CUDA_NOT_READY;
    return unlock(result);
}

static unsigned fake_stream_synchronize(struct CUstream_st *stream)
{
    LH_CHECK(pushed_count > 0 && !is_in_host_call);
    lock();
    stream = stream_of(stream);
    uint64_t number = stream->issued_count;
    while (stream->executed_count < number)
        pthread_cond_wait(&has_news, &mutex);
    return unlock(is_broken ? LH_CUDA_ILLEGAL_ADDRESS : 0);
}

static unsigned fake_stream_wait(struct CUstream_st *stream, struct CUevent_st *event,
                                 unsigned flags)
{
    unsigned result = begin(true);
    LH_CHECK(flags == 0 && event && event->is_used);
    if (!event->stream)
        return unlock(result);
    return issue(result, stream,
                 (struct op){.kind = OP_WAIT, .stream = event->stream, .number = event->number});
}

static unsigned fake_event_create(struct CUevent_st **event, unsigned flags)
{
    unsigned result = begin(true);
    int index = 0;
    LH_CHECK(flags == LH_CUDA_EVENT_DISABLE_TIMING || flags == LH_CUDA_EVENT_DEFAULT);
    while (index < EVENT_COUNT_MAX && events[index].is_used)
        index++;
    LH_CHECK(index < EVENT_COUNT_MAX);
    *event = result == 0 ? &events[index] : (struct CUevent_st *)-1;
    if (result == 0)
        events[index] =
            (struct CUevent_st){.is_used = true, .is_timed = flags == LH_CUDA_EVENT_DEFAULT};
    return unlock(result);
}

static unsigned fake_event_destroy(struct CUevent_st *event)
{
    lock();
    LH_CHECK(pushed_count > 0 && event && event->is_used);
    event->is_used = false;
    return unlock(0);
}

static unsigned fake_event_record(struct CUevent_st *event, struct CUstream_st *stream)
{
    unsigned result = begin(true);
    LH_CHECK(event && event->is_used);
    if (result == 0) {
        event->stream = stream_of(stream);
        if (event->is_timed)
            push(event->stream, (struct op){.kind = OP_STAMP, .event = event});
        event->number = event->stream->issued_count;
    }
    return unlock(result);
}

static unsigned fake_event_query(struct CUevent_st *event)
{
    unsigned result = begin(true);
    LH_CHECK(event && event->is_used);
    if (result == 0 && event->stream && event->stream->executed_count < event->number)
        result = LH_CUDA_NOT_READY;
    return unlock(result);
}

static unsigned fake_event_elapsed(float *ms, struct CUevent_st *begun, struct CUevent_st *ended)
{
    unsigned result = begin(true);
    const struct CUevent_st *pair[] = {begun, ended};
    for (int i = 0; i < 2; i++) {
        LH_CHECK(pair[i] && pair[i]->is_used && pair[i]->is_timed && pair[i]->stream);
        if (result == 0 && pair[i]->stream->executed_count < pair[i]->number)
            result = LH_CUDA_NOT_READY;
    }
    if (result == 0)
        *ms = (float)((double)ended->passed_ns - (double)begun->passed_ns) / 1e6F;
    return unlock(result);
}

#include "fake_cuda_pinned.h"

static unsigned fake_copy_in(unsigned long long to, const void *from, size_t bytes,
                             struct CUstream_st *stream)
{
    struct op op = {.kind = OP_COPY, .to = (void *)to, .from = from, .bytes = bytes};
    return issue(begin_copy(from, bytes), stream, op);
}

static unsigned fake_copy_out(void *to, unsigned long long from, size_t bytes,
                              struct CUstream_st *stream)
{
    struct op op = {.kind = OP_COPY, .to = to, .from = (void *)from, .bytes = bytes};
    return issue(begin_copy(to, bytes), stream, op);
}

static unsigned fake_copy_within(unsigned long long to, unsigned long long from, size_t bytes,
                                 struct CUstream_st *stream)
{
    struct op op = {.kind = OP_COPY, .to = (void *)to, .from = (void *)from, .bytes = bytes};
    return issue(begin(true), stream, op);
}

static unsigned fake_host_call(struct CUstream_st *stream, void (*function)(void *context),
                               void *context)
{
    struct op op = {.kind = OP_CALL, .function = function, .context = context};
    return issue(begin(true), stream, op);
}

static unsigned fake_context_synchronize(void)
{
    LH_CHECK(pushed_count > 0 && !is_in_host_call);
    unsigned result = unlock(begin(true));
    for (int i = 0; i < STREAM_COUNT_MAX; i++) {
        if (streams[i].is_used)
            fake_stream_synchronize(&streams[i]);
    }
    return is_broken ? LH_CUDA_ILLEGAL_ADDRESS : result;
}

#include "fake_cuda_kernel.h"

static unsigned fake_error_name(unsigned result, const char **text)
{
    *text = result == FAKE_CUDA_ERROR           ? "CUDA_ERROR_UNKNOWN"
            : result == LH_CUDA_OUT_OF_MEMORY   ? "CUDA_ERROR_OUT_OF_MEMORY"
            : result == LH_CUDA_ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
            : result == LH_CUDA_NO_DEVICE       ? "CUDA_ERROR_NO_DEVICE"
            : result == LH_CUDA_INVALID_IMAGE   ? "CUDA_ERROR_INVALID_IMAGE"
            : result == LH_CUDA_NOT_FOUND       ? "CUDA_ERROR_NOT_FOUND"
                                                : NULL;
    return *text ? 0 : INVALID_VALUE;
}

static unsigned fake_error_text(unsigned result, const char **text)
{
    *text = result == FAKE_CUDA_ERROR ? "unknown error" : NULL;
    return *text ? 0 : INVALID_VALUE;
}

static unsigned fake_memory_allocate(unsigned long long *address, size_t bytes)
{
    unsigned result = begin(true);
    LH_CHECK(result == 0);
    *address = (uintptr_t)malloc(bytes);
    LH_CHECK(*address != 0);
    allocation_count++;
    return unlock(0);
}

static unsigned fake_memory_free(unsigned long long address)
{
    lock();
    free((void *)address);
    allocation_count--;
    return unlock(0);
}

void *fake_cuda_lookup(void *library, const char *symbol)
{
    (void)library;
    if (opts.missing && strcmp(symbol, opts.missing) == 0)
        return NULL;
#define FAKE(member, name, exported, parameters)                                                   \
    if (strcmp(symbol, exported) == 0)                                                             \
        return (void *)fake_##member;
    LH_CUDA_CALLS(FAKE)
    LH_CUDA_OPTIONAL_CALLS(FAKE)
#undef FAKE
    if (strcmp(symbol, "cuMemcpyDtoDAsync_v2") == 0)
        return (void *)fake_copy_within;
    if (strcmp(symbol, "cuMemAlloc_v2") == 0)
        return (void *)fake_memory_allocate;
    if (strcmp(symbol, "cuMemFree_v2") == 0)
        return (void *)fake_memory_free;
    return NULL;
}

void fake_cuda_reset(struct fake_cuda_opts new_opts)
{
    LH_CHECK(fake_cuda_live_count() == 0);
    lock();
    opts = new_opts;
    call_count = 0;
    pageable_count = 0;
    is_broken = false;
    is_paused = false;
    unlock(0);
}

uint64_t fake_cuda_live_count(void)
{
    lock();
    int64_t count = context_only.retain_count + allocation_count + pushed_count;
    count += module_only.load_count;
    for (int i = 0; i < STREAM_COUNT_MAX; i++)
        count += streams[i].is_used;
    for (int i = 0; i < EVENT_COUNT_MAX; i++)
        count += events[i].is_used;
    for (int i = 0; i < REGION_COUNT_MAX; i++)
        count += regions[i].base != NULL;
    unlock(0);
    return (uint64_t)count;
}

int64_t fake_cuda_call_count(void)
{
    lock();
    int64_t count = call_count;
    unlock(0);
    return count;
}

void fake_cuda_fail_after(int64_t count)
{
    lock();
    opts.fail_after = count;
    unlock(0);
}

void fake_cuda_break(void)
{
    lock();
    is_broken = true;
    unlock(0);
}

void fake_cuda_pause(bool paused)
{
    lock();
    is_paused = paused;
    unlock(0);
}
