/*
 * Copies by the CUDA backend, in bursts.
 *
 *      open --copy, copy, ...--> closed: `ended` is recorded, and the host call is enqueued
 *
 * A burst consists of copies of one lane between which the copy stream waits for nothing.
 * They follow one another at once, and one host call ends them all. poll closes the burst; so does
 * the first wait of a later copy, because the copies before that wait must not end after it, and so
 * do BURST_BYTES_MAX bytes. The time from the burst's beginning to its end is the device's own (if
 * the device is faster, it includes the host's time from the first submit to the close). It is
 * divided among the copies by their bytes.
 */
#include "dev/cuda_private.h"

#include <inttypes.h>

#include "base/assert.h"

/* This takes less than half a millisecond, by which a burst may delay the end of its copies. */
#define BURST_BYTES_MAX (UINT64_C(8) << 20)
#define NS_PER_MS UINT64_C(1000000)

/* Record that the copies of a burst have finished. A thread of the driver calls this. */
static void host_call_run(void *context)
{
    const struct lh_cuda_burst *burst = context;
    struct lh_cuda_lane *lane = burst->lane;
    struct lh_dev_base *base = &lane->cuda->base;
    const struct lh_dev_lane *ends = &base->lanes[lane->index];
    uint64_t end = burst->end;
    uint64_t now = lh_clock_now_ns(base->clock);
    while (atomic_load(&ends->ended_count) < end) {
        struct lh_dev_slot *slot = lh_dev_base_oldest(base, lane->index);
        slot->started_ns = lh_max_u64(slot->submitted_ns, lane->ended_ns);
        slot->completed_ns = now;
        lane->ended_ns = now;
        lh_dev_base_end(base, lane->index);
    }
    lh_dev_base_wake(base);
}

static struct lh_cuda_burst *burst_at(const struct lh_cuda_lane *lane, uint64_t number)
{
    return &lane->bursts[number % lane->cuda->base.copy_count];
}

static int copy_stream_record(const struct lh_cuda_lane *lane, struct CUevent_st *event,
                              struct lh_error *err)
{
    return lh_cuda_event_record(lane->cuda, event, lane->copy_stream, err);
}

static int burst_open(const struct lh_cuda_lane *lane, struct lh_error *err)
{
    struct lh_cuda_burst *burst = burst_at(lane, lane->closed_count);
    LH_ASSERT(lane->open_copy_count == 0);
    burst->bytes = 0;
    burst->polled_bytes = 0;
    burst->is_measured = false;
    return burst->begun ? copy_stream_record(lane, burst->begun, err) : 0;
}

static void burst_closed(struct lh_cuda_lane *lane)
{
    lane->closed_copy_count += lane->open_copy_count;
    lane->open_copy_count = 0;
    lane->closed_count++;
}

/* Enqueue the notification that the copies of the open burst have finished, if there is one. */
static int burst_close(struct lh_cuda_lane *lane, struct lh_error *err)
{
    const struct lh_cuda *cuda = lane->cuda;
    struct lh_cuda_burst *burst = burst_at(lane, lane->closed_count);
    if (lane->open_copy_count == 0)
        return 0;
    burst->end = lane->closed_copy_count + lane->open_copy_count;
    LH_TRY(copy_stream_record(lane, burst->ended, err));
    LH_TRY(lh_cuda_stream_wait(cuda, lane->notify_stream, burst->ended, err));
    LH_TRY(lh_cuda_judge(cuda, cuda->calls.host_call(lane->notify_stream, host_call_run, burst),
                         err, "cuLaunchHostFunc"));
    burst->is_measured = burst->begun != NULL;
    burst_closed(lane);
    return 0;
}

/* As burst_close(). If the driver refuses a call, wait here for the copies. */
static void burst_close_surely(struct lh_cuda_lane *lane)
{
    const struct lh_cuda_calls *calls = &lane->cuda->calls;
    if (burst_close(lane, NULL) == 0)
        return;
    /* A broken context is found when the driver is queried. */
    if (calls->stream_synchronize(lane->copy_stream) != 0 ||
        calls->stream_synchronize(lane->notify_stream) != 0)
        return;
    host_call_run(burst_at(lane, lane->closed_count));
    burst_closed(lane);
}

int lh_cuda_order(struct lh_dev *dev, enum lh_dev_direction direction, struct lh_dev_fence *fence,
                  struct lh_error *err)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    struct lh_cuda_lane *lane = &cuda->lanes[direction];
    LH_TRY(lh_cuda_enter(cuda, err));
    int rc = burst_close(lane, err);
    if (rc == 0)
        rc = lh_cuda_stream_wait(cuda, lane->copy_stream, lh_cuda_event_of(fence), err);
    lh_cuda_leave(cuda);
    return rc;
}

/* Enqueue the copy itself. */
static int copy_start(const struct lh_cuda_lane *lane, const struct lh_dev_copy *copy,
                      struct lh_error *err)
{
    const struct lh_cuda_calls *calls = &lane->cuda->calls;
    unsigned long long device = (uintptr_t)copy->device;
    bool is_in = lane->direction == LH_DEV_DIRECTION_IN;
    if (copy->bytes == 0)
        return 0;
    unsigned result = is_in ? calls->copy_in(device, copy->host, copy->bytes, lane->copy_stream)
                            : calls->copy_out(copy->host, device, copy->bytes, lane->copy_stream);
    return lh_cuda_judge(lane->cuda, result, err, "%s of %" PRIu64 " bytes from %p to %p",
                         is_in ? "cuMemcpyHtoDAsync" : "cuMemcpyDtoHAsync", copy->bytes,
                         is_in ? copy->host : copy->device, is_in ? copy->device : copy->host);
}

static int copy_enqueue(struct lh_cuda_lane *lane, const struct lh_dev_copy *copy,
                        struct lh_error *err)
{
    struct lh_cuda_burst *burst = NULL;
    if (copy->after) {
        LH_TRY(burst_close(lane, err));
        LH_TRY(
            lh_cuda_stream_wait(lane->cuda, lane->copy_stream, lh_cuda_event_of(copy->after), err));
    }
    if (lane->open_copy_count == 0)
        LH_TRY(burst_open(lane, err));
    LH_TRY(copy_start(lane, copy, err));
    burst = burst_at(lane, lane->closed_count);
    burst->bytes += copy->bytes;
    lane->open_copy_count++;
    int rc = copy->done ? copy_stream_record(lane, lh_cuda_event_of(copy->done), err) : 0;
    if (rc == 0 && burst->bytes >= BURST_BYTES_MAX)
        rc = burst_close(lane, err);
    if (rc == 0)
        return 0;
    /* The copy is in flight and its end would not be reported, so wait for it here. The next copy
     * will also report an error of this call. */
    lane->cuda->calls.stream_synchronize(lane->copy_stream);
    burst->bytes -= copy->bytes;
    lane->open_copy_count--;
    return rc;
}

int lh_cuda_submit(struct lh_dev *dev, struct lh_dev_copy *copy, struct lh_error *err)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    uint32_t lane = lh_dev_base_lane(&cuda->base, copy);
    struct lh_dev_slot *slot = NULL;
    LH_TRY(lh_dev_base_take(&cuda->base, copy, &slot));
    if (dev->in_flight_count == 1)
        cuda->heard_ns = slot->submitted_ns;
    int rc = lh_cuda_judge(cuda, cuda->lost_result, err, "the GPU has stopped executing work");
    if (rc == 0)
        rc = lh_cuda_enter(cuda, err);
    if (rc == 0) {
        rc = copy_enqueue(&cuda->lanes[lane], copy, err);
        lh_cuda_leave(cuda);
    }
    if (rc < 0)
        lh_dev_base_untake(&cuda->base, lane);
    return rc;
}

/* Close the open bursts, so that the copies submitted so far will come back. */
static void bursts_close(struct lh_cuda *cuda)
{
    uint32_t open_copy_count = 0;
    for (uint32_t i = 0; i < cuda->base.lane_count; i++)
        open_copy_count += cuda->lanes[i].open_copy_count;
    if (open_copy_count == 0 || lh_cuda_enter(cuda, NULL) < 0)
        return;
    for (uint32_t i = 0; i < cuda->base.lane_count; i++)
        burst_close_surely(&cuda->lanes[i]);
    lh_cuda_leave(cuda);
}

/* Ask the driver how long a burst took, of which all copies have ended. */
static void burst_measure(const struct lh_cuda *cuda, struct lh_cuda_burst *burst, bool can_ask)
{
    /* Without the driver's answer, the times that the host has seen are kept. */
    burst->is_measured = can_ask && burst->is_measured &&
                         lh_cuda_elapsed(cuda, burst->begun, burst->ended, &burst->elapsed_ns) == 0;
}

/* The part of a burst's time that its first bytes took. */
static uint64_t share_ns(const struct lh_cuda_burst *burst, uint64_t bytes)
{
    return (uint64_t)((unsigned __int128)burst->elapsed_ns * bytes / burst->bytes);
}

/* Take a returned copy into account, and set its times to the device's. */
static void copy_measure(struct lh_cuda_lane *lane, struct lh_dev_copy *copy, bool can_ask)
{
    struct lh_cuda_burst *burst = burst_at(lane, lane->polled_count);
    LH_ASSERT(lane->polled_count < lane->closed_count);
    if (burst->polled_bytes == 0)
        burst_measure(lane->cuda, burst, can_ask);
    if (burst->is_measured && copy->bytes > 0) {
        uint64_t begun_ns = copy->completed_ns - lh_min_u64(burst->elapsed_ns, copy->completed_ns);
        copy->started_ns = begun_ns + share_ns(burst, burst->polled_bytes);
        copy->completed_ns = begun_ns + share_ns(burst, burst->polled_bytes + copy->bytes);
    }
    burst->polled_bytes += copy->bytes;
    LH_ASSERT(burst->polled_bytes <= burst->bytes);
    lane->polled_count += burst->polled_bytes == burst->bytes;
}

/* As lh_dev_base_poll(); the copies' durations are the device's, if the driver measures them. */
static uint32_t ended_poll(struct lh_cuda *cuda, struct lh_dev_copy **done, uint32_t done_max)
{
    uint32_t done_count = lh_dev_base_poll(&cuda->base.dev, done, done_max);
    /* Copies of a lost device were dropped, whatever burst they were in. */
    if (done_count == 0 || !cuda->calls.event_elapsed || cuda->lost_result != 0)
        return done_count;
    bool can_ask = lh_cuda_enter(cuda, NULL) == 0;
    for (uint32_t i = 0; i < done_count; i++)
        copy_measure(&cuda->lanes[lh_dev_base_lane(&cuda->base, done[i])], done[i], can_ask);
    if (can_ask)
        lh_cuda_leave(cuda);
    return done_count;
}

/* Whether the driver has stopped executing work. See [Note: A device that fails] in cuda.c. */
static bool is_lost(struct lh_cuda *cuda)
{
    unsigned result = 0;
    bool is_refused = cuda->lost_result != 0;
    for (uint32_t i = 0; i < cuda->base.lane_count; i++) {
        unsigned answer = cuda->calls.stream_query(cuda->lanes[i].notify_stream);
        is_refused |= answer != 0 && answer != LH_CUDA_NOT_READY;
    }
    /* Only if synchronizing repeats the error, the streams themselves have failed and execute
     * nothing more. Synchronize all streams: a host call of one stream may still be running when
     * another stream reports the error. */
    for (uint32_t i = 0; i < cuda->base.lane_count && is_refused; i++) {
        unsigned answer = cuda->calls.stream_synchronize(cuda->lanes[i].notify_stream);
        result = result ? result : answer;
    }
    if (cuda->lost_result == 0)
        cuda->lost_result = result;
    return cuda->lost_result != 0;
}

/* Whether to ask the driver if it still works. Queries delay torch, which uses the same locks. */
static bool is_silent(struct lh_cuda *cuda)
{
    uint64_t now = lh_clock_now_ns(cuda->base.clock);
    if (cuda->lost_result == 0 && now - cuda->heard_ns < LH_DEV_SLEEP_MS_MAX * NS_PER_MS)
        return false;
    cuda->heard_ns = now;
    return true;
}

uint32_t lh_cuda_poll(struct lh_dev *dev, struct lh_dev_copy **done, uint32_t done_max)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    bursts_close(cuda);
    uint32_t done_count = ended_poll(cuda, done, done_max);
    if (done_count > 0)
        cuda->heard_ns = lh_clock_now_ns(cuda->base.clock);
    if (done_count > 0 || dev->in_flight_count == 0 || done_max == 0 || !is_silent(cuda))
        return done_count;
    /* If the context cannot be entered, the driver may have shut down and then executes nothing.
     * This is confirmed if the next query fails in the same way. */
    struct lh_error err = {0};
    bool lost = cuda->was_refused;
    cuda->was_refused = lh_cuda_enter(cuda, &err) < 0;
    if (!cuda->was_refused) {
        lost = is_lost(cuda);
        lh_cuda_leave(cuda);
    } else if (lost) {
        cuda->lost_result = (unsigned)err.native;
    }
    if (!lost)
        return ended_poll(cuda, done, done_max);
    return lh_dev_base_drop(&cuda->base, -EIO, done, done_max);
}

static int stream_create(const struct lh_cuda *cuda, struct CUstream_st **stream_out,
                         struct lh_error *err)
{
    /* A blocking stream and the default stream, which torch uses, would wait for each other. */
    unsigned result = cuda->calls.stream_create(stream_out, LH_CUDA_STREAM_NON_BLOCKING);
    if (result != 0)
        *stream_out = NULL;
    return lh_cuda_judge(cuda, result, err, "cuStreamCreate");
}

/* Events are created here and reused: creating one for a copy could take longer than the copy. */
static int lane_create(struct lh_cuda *cuda, uint32_t index, struct lh_error *err)
{
    struct lh_cuda_lane *lane = &cuda->lanes[index];
    uint32_t count = cuda->base.copy_count;
    bool is_timed = cuda->calls.event_elapsed != NULL;
    unsigned flags = is_timed ? LH_CUDA_EVENT_DEFAULT : LH_CUDA_EVENT_DISABLE_TIMING;
    lane->cuda = cuda;
    lane->index = index;
    lane->direction =
        index == LH_DEV_LANE_SIDE ? LH_DEV_DIRECTION_IN : (enum lh_dev_direction)index;
    LH_TRY(stream_create(cuda, &lane->copy_stream, err));
    LH_TRY(stream_create(cuda, &lane->notify_stream, err));
    lane->bursts = lh_alloc_zeroed(cuda->base.alloc, count, sizeof(*lane->bursts));
    if (!lane->bursts)
        return lh_error_set(err, -ENOMEM, "no memory for the records of %u copies", count);
    for (uint32_t i = 0; i < count; i++) {
        struct lh_cuda_burst *burst = &lane->bursts[i];
        burst->lane = lane;
        LH_TRY(lh_cuda_event_create(cuda, &burst->ended, flags, err));
        if (is_timed)
            LH_TRY(lh_cuda_event_create(cuda, &burst->begun, flags, err));
    }
    return 0;
}

int lh_cuda_lanes_create(struct lh_cuda *cuda, struct lh_error *err)
{
    LH_TRY(lh_cuda_enter(cuda, err));
    int rc = 0;
    for (uint32_t i = 0; i < LH_DEV_DIRECTION_COUNT && rc == 0; i++)
        rc = lane_create(cuda, i, err);
    lh_cuda_leave(cuda);
    return rc;
}

int lh_cuda_side_create(struct lh_dev *dev, struct lh_error *err)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    LH_TRY(lh_cuda_enter(cuda, err));
    int rc = lane_create(cuda, LH_DEV_LANE_SIDE, err);
    lh_cuda_leave(cuda);
    /* A lane that was created only in part has no copies, and is closed with the others. */
    return rc == 0 ? lh_dev_base_side_init(&cuda->base, err) : rc;
}

void lh_cuda_lanes_close(struct lh_cuda *cuda)
{
    for (int i = 0; i < LH_DEV_LANE_COUNT_MAX; i++) {
        const struct lh_cuda_lane *lane = &cuda->lanes[i];
        struct CUstream_st *streams[] = {lane->copy_stream, lane->notify_stream};
        for (size_t j = 0; j < LH_COUNT_OF(streams); j++) {
            if (!streams[j])
                continue;
            /* A host call may still be in its last instructions. */
            cuda->calls.stream_synchronize(streams[j]);
            cuda->calls.stream_destroy(streams[j]);
        }
        for (uint32_t j = 0; lane->bursts && j < cuda->base.copy_count; j++) {
            lh_cuda_event_destroy(cuda, lane->bursts[j].begun);
            lh_cuda_event_destroy(cuda, lane->bursts[j].ended);
        }
    }
}
