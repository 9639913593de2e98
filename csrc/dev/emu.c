/*
 * An emulated accelerator: its memory is main memory, and the caller's thread computes.
 *
 *      owner: submit --> slots --> the direction's thread: wait for fences, memcpy --> poll
 *
 * A fence stands for a copy, which is identified by its number in its lane. Copies that wait for
 * the fence store that number. Computation has finished when it records a fence, so such a fence
 * stands for no copy. The copies of a lane are ordered anyway, so a copy waits only for a number of
 * the other lane, and later copies of the lane inherit that number.
 *
 * mutex M (struct emu.mutex) protects the lanes' taken_count and slots not yet begun, behind_count,
 * fences and stopping. It is held for a few instructions, never while bytes are copied. Deadlock is
 * impossible, because a stored number belongs to a copy that was submitted earlier.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* pthread_setname_np */
#endif
#include "dev/dev_private.h"

#include <pthread.h>
#include <string.h>
#include <time.h>

#include "base/assert.h"
#include "base/thread.h"

#define NS_PER_S UINT64_C(1000000000)
/* The number of bytes copied between two checks of the time; small compared with any chunk. */
#define PIECE_BYTES LH_MIB
/*
 * A thread that was not scheduled in time catches up at the speed of memcpy, so that the link keeps
 * its speed on a busy machine. The part of a delay beyond this limit is not caught up.
 */
#define LATE_NS_MAX UINT64_C(10000000)

struct lh_dev_fence {
    uint64_t ended_count[LH_DEV_DIRECTION_COUNT]; /* a fence passes when each lane has reached it */
};

struct emu;

struct copier {
    struct emu *emu;
    enum lh_dev_direction direction;
    pthread_t id;
    uint64_t bytes_per_s;
    uint64_t behind_count; /* under M: the other lane's ended_count that later copies wait for */
    uint64_t free_ns;      /* when the link has finished all its work; used only by the thread */
};

struct emu {
    struct lh_dev_base base; /* must be first: callers have a pointer to it */
    struct lh_clock real;    /* the clock of the kernel's timers */
    struct copier copiers[LH_DEV_DIRECTION_COUNT];
    uint32_t thread_count; /* the number of running threads */
    pthread_mutex_t mutex;
    pthread_cond_t has_news; /* a copy was submitted or has finished, or stopping is set */
    bool stopping;
};

static void lock(struct emu *emu)
{
    int rc = pthread_mutex_lock(&emu->mutex);
    LH_ASSERT(rc == 0);
}

static void unlock(struct emu *emu)
{
    int rc = pthread_mutex_unlock(&emu->mutex);
    LH_ASSERT(rc == 0);
}

static enum lh_dev_direction other(enum lh_dev_direction direction)
{
    return direction == LH_DEV_DIRECTION_IN ? LH_DEV_DIRECTION_OUT : LH_DEV_DIRECTION_IN;
}

static uint64_t ended_count(struct emu *emu, enum lh_dev_direction direction)
{
    return atomic_load(&emu->base.lanes[direction].ended_count);
}

static void sleep_until(const struct emu *emu, uint64_t deadline_ns)
{
    struct timespec deadline = {
        .tv_sec = (time_t)(deadline_ns / NS_PER_S),
        .tv_nsec = (long)(deadline_ns % NS_PER_S),
    };
    while (lh_clock_now_ns(&emu->real) < deadline_ns)
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &deadline, NULL);
}

static uint64_t transfer_ns(uint64_t bytes, uint64_t bytes_per_s)
{
    return (uint64_t)(((unsigned __int128)bytes * NS_PER_S + bytes_per_s - 1) / bytes_per_s);
}

/* Execute a copy that was ready at ready_ns, at the speed of the link. */
static void copy_run(struct copier *copier, const struct lh_dev_copy *copy, uint64_t ready_ns)
{
    bool is_in = copier->direction == LH_DEV_DIRECTION_IN;
    uint8_t *to = is_in ? copy->device : copy->host;
    const uint8_t *from = is_in ? copy->host : copy->device;
    uint64_t begin_ns = lh_max_u64(copier->free_ns, ready_ns);
    begin_ns = lh_max_u64(begin_ns, lh_clock_now_ns(&copier->emu->real) - LATE_NS_MAX);
    if (copy->pause_ns > 0)
        sleep_until(copier->emu, begin_ns += copy->pause_ns);
    copier->free_ns = begin_ns;
    for (uint64_t done_bytes = 0; done_bytes < copy->bytes;) {
        uint64_t bytes = lh_min_u64(copy->bytes - done_bytes, PIECE_BYTES);
        memcpy(to + done_bytes, from + done_bytes, bytes);
        done_bytes += bytes;
        if (copier->bytes_per_s == 0)
            continue;
        copier->free_ns = begin_ns + transfer_ns(done_bytes, copier->bytes_per_s);
        sleep_until(copier->emu, copier->free_ns);
    }
}

/* Wait until the lane's next copy is ready (at *ready_ns_out). Returns NULL when stopping. */
static struct lh_dev_slot *slot_next(struct copier *copier, uint64_t *ready_ns_out)
{
    struct emu *emu = copier->emu;
    struct lh_dev_lane *lane = &emu->base.lanes[copier->direction];
    struct lh_dev_slot *slot = lh_dev_base_oldest(&emu->base, copier->direction);
    bool has_waited = false;
    lock(emu);
    while (!emu->stopping && (ended_count(emu, copier->direction) == lane->taken_count ||
                              ended_count(emu, other(copier->direction)) < slot->behind_count)) {
        pthread_cond_wait(&emu->has_news, &emu->mutex);
        has_waited = true;
    }
    bool stopping = emu->stopping;
    unlock(emu);
    if (stopping)
        return NULL;
    /* An idle link does not accumulate transfer time. */
    *ready_ns_out = has_waited ? lh_clock_now_ns(&emu->real) : slot->submitted_ns;
    return slot;
}

static void *copier_main(void *context)
{
    struct copier *copier = context;
    struct emu *emu = copier->emu;
    struct lh_dev_slot *slot = NULL;
    uint64_t ready_ns = 0;
    /* Cosmetic; ignore errors. */
    pthread_setname_np(pthread_self(),
                       copier->direction == LH_DEV_DIRECTION_IN ? "lohan-in" : "lohan-out");
    while ((slot = slot_next(copier, &ready_ns)) != NULL) {
        slot->started_ns = lh_clock_now_ns(emu->base.clock);
        copy_run(copier, slot->copy, ready_ns);
        slot->completed_ns = lh_clock_now_ns(emu->base.clock);
        lock(emu);
        lh_dev_base_end(&emu->base, copier->direction);
        pthread_cond_broadcast(&emu->has_news);
        unlock(emu);
        lh_dev_base_wake(&emu->base);
    }
    return NULL;
}

static int emu_fence_create(struct lh_dev *dev, struct lh_dev_fence **fence_out,
                            struct lh_error *err)
{
    struct emu *emu = (struct emu *)dev;
    *fence_out = lh_alloc_zeroed(emu->base.alloc, 1, sizeof(**fence_out));
    return *fence_out ? 0 : lh_error_set(err, -ENOMEM, "no memory for a fence");
}

static void emu_fence_destroy(struct lh_dev *dev, struct lh_dev_fence *fence)
{
    lh_free(((struct emu *)dev)->base.alloc, fence);
}

static int emu_record(struct lh_dev *dev, struct lh_dev_fence *fence, void *stream,
                      struct lh_error *err)
{
    struct emu *emu = (struct emu *)dev;
    (void)stream;
    (void)err;
    lock(emu);
    *fence = (struct lh_dev_fence){0};
    unlock(emu);
    return 0;
}

static int emu_wait(struct lh_dev *dev, struct lh_dev_fence *fence, void *stream,
                    struct lh_error *err)
{
    struct emu *emu = (struct emu *)dev;
    (void)stream;
    (void)err;
    lock(emu);
    struct lh_dev_fence then = *fence;
    for (int i = 0; i < LH_DEV_DIRECTION_COUNT; i++)
        while (ended_count(emu, (enum lh_dev_direction)i) < then.ended_count[i])
            pthread_cond_wait(&emu->has_news, &emu->mutex);
    unlock(emu);
    return 0;
}

/* Make later copies wait for fence. The caller holds M. */
static void copier_order(struct copier *copier, const struct lh_dev_fence *fence)
{
    uint64_t count = fence->ended_count[other(copier->direction)];
    copier->behind_count = lh_max_u64(copier->behind_count, count);
}

static int emu_order(struct lh_dev *dev, enum lh_dev_direction direction,
                     struct lh_dev_fence *fence, struct lh_error *err)
{
    struct emu *emu = (struct emu *)dev;
    (void)err;
    lock(emu);
    copier_order(&emu->copiers[direction], fence);
    unlock(emu);
    return 0;
}

static int emu_submit(struct lh_dev *dev, struct lh_dev_copy *copy, struct lh_error *err)
{
    struct emu *emu = (struct emu *)dev;
    struct copier *copier = &emu->copiers[copy->direction];
    struct lh_dev_slot *slot = NULL;
    (void)err;
    lock(emu);
    int rc = lh_dev_base_take(&emu->base, copy, &slot);
    if (rc == 0) {
        if (copy->after)
            copier_order(copier, copy->after);
        slot->behind_count = copier->behind_count;
        slot->submitted_ns = lh_clock_now_ns(&emu->real);
        if (copy->done) {
            *copy->done = (struct lh_dev_fence){0};
            copy->done->ended_count[copy->direction] = emu->base.lanes[copy->direction].taken_count;
        }
        pthread_cond_broadcast(&emu->has_news);
    }
    unlock(emu);
    return rc;
}

static int emu_memory_register(struct lh_dev *dev, void *base, uint64_t bytes, struct lh_error *err)
{
    (void)dev;
    (void)err;
    LH_ASSERT(base && bytes > 0);
    return 0;
}

static void emu_memory_unregister(struct lh_dev *dev, void *base)
{
    (void)dev;
    LH_ASSERT(base);
}

static void emu_free(struct emu *emu)
{
    struct lh_alloc *alloc = emu->base.alloc;
    lock(emu);
    emu->stopping = true;
    pthread_cond_broadcast(&emu->has_news);
    unlock(emu);
    for (uint32_t i = 0; i < emu->thread_count; i++) {
        int rc = pthread_join(emu->copiers[i].id, NULL);
        LH_ASSERT(rc == 0);
    }
    pthread_cond_destroy(&emu->has_news);
    pthread_mutex_destroy(&emu->mutex);
    lh_dev_base_deinit(&emu->base);
    lh_free(alloc, emu);
}

static void emu_destroy(struct lh_dev *dev)
{
    LH_ASSERT(dev->in_flight_count == 0);
    emu_free((struct emu *)dev);
}

static const struct lh_dev_ops emu_ops = {
    .version = LH_DEV_OPS_VERSION,
    .name = "emu",
    .is_ordered = true,
    .fence_create = emu_fence_create,
    .fence_destroy = emu_fence_destroy,
    .record = emu_record,
    .wait = emu_wait,
    .order = emu_order,
    .submit = emu_submit,
    .poll = lh_dev_base_poll,
    .memory_register = emu_memory_register,
    .memory_unregister = emu_memory_unregister,
    .destroy = emu_destroy,
};

/* Returns 0 or -errno of lh_thread_start(). */
static int copiers_start(struct emu *emu)
{
    int rc = 0;
    while (emu->thread_count < LH_DEV_DIRECTION_COUNT && rc == 0) {
        struct copier *copier = &emu->copiers[emu->thread_count];
        rc = lh_thread_start(&copier->id, NULL, copier_main, copier);
        if (rc == 0)
            emu->thread_count++;
    }
    return rc;
}

int lh_dev_emu_create(const struct lh_dev_opts *opts, struct lh_alloc *alloc,
                      struct lh_dev **dev_out, struct lh_error *err)
{
    *dev_out = NULL;
    struct emu *emu = lh_alloc_zeroed(alloc, 1, sizeof(*emu));
    if (!emu)
        return lh_error_set(err, -ENOMEM, "no memory for an emulated accelerator");
    emu->real = lh_clock_real();
    for (int i = 0; i < LH_DEV_DIRECTION_COUNT; i++)
        emu->copiers[i] = (struct copier){
            .emu = emu,
            .direction = (enum lh_dev_direction)i,
            .bytes_per_s = opts->link_bytes_per_s[i],
        };
    int rc = -pthread_mutex_init(&emu->mutex, NULL);
    LH_ASSERT(rc == 0);
    rc = -pthread_cond_init(&emu->has_news, NULL);
    LH_ASSERT(rc == 0);
    rc = lh_dev_base_init(&emu->base, &emu_ops, opts, alloc, err);
    if (rc == 0) {
        rc = copiers_start(emu);
        if (rc < 0)
            lh_error_set(err, rc,
                         "only %u of %d copy threads could be started: %s (see ulimit -u, -v)",
                         emu->thread_count, LH_DEV_DIRECTION_COUNT, strerror(-rc));
    }
    if (rc < 0) {
        emu_free(emu);
        return rc;
    }
    *dev_out = &emu->base.dev;
    return 0;
}
