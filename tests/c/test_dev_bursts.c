/*
 * Test what the CUDA backend asks of the driver for copies: how long they took, when they end, and
 * how many calls that takes.
 */
#include "dev_fixture.h"

#include <stdatomic.h>

#define BYTES 4096
#define COPY_COUNT 16
#define COPY_NS 1000000
#define SILENCE_NS (UINT64_C(1000000) * LH_DEV_SLEEP_MS_MAX)
#define LARGE_BYTES (UINT64_C(1) << 20)
#define LARGE_COUNT 8 /* together, as much as a burst may have */

static _Alignas(64) uint8_t host[COPY_COUNT][BYTES];
static _Alignas(64) uint8_t device[COPY_COUNT][BYTES];
static uint8_t large[2][LARGE_BYTES];
static _Atomic uint64_t hand_ns = SILENCE_NS;

/* A clock that only the test advances. */
static uint64_t hand_now(void *context)
{
    (void)context;
    return atomic_load(&hand_ns);
}

static const struct lh_clock by_hand = {.now_ns = hand_now};

struct rig {
    struct lh_alloc alloc;
    struct lh_waker waker;
    struct lh_dev *dev;
    struct lh_clock clock;
};

static void rig_open(struct rig *rig, const struct lh_clock *clock, struct fake_cuda_opts opts)
{
    *rig = (struct rig){.alloc = LH_ALLOC_INIT, .clock = clock ? *clock : lh_clock_real()};
    struct lh_dev_opts dev_opts = {
        .copy_count = COPY_COUNT, .clock = &rig->clock, .waker = &rig->waker};
    opts.fail_after = -1;
    fake_cuda_reset(opts);
    LH_CHECK(lh_waker_init(&rig->waker, NULL) == 0);
    LH_CHECK(lh_dev_cuda_create_from(fake_cuda_lookup, NULL, &dev_opts, &rig->alloc, &rig->dev,
                                     NULL) == 0);
}

static void rig_close(struct rig *rig)
{
    rig->dev->ops->destroy(rig->dev);
    LH_CHECK(rig->alloc.live_count == 0 && fake_cuda_live_count() == 0);
    lh_waker_deinit(&rig->waker);
}

static struct lh_dev_copy copy_of(enum lh_dev_direction direction, int index, uint64_t bytes)
{
    return (struct lh_dev_copy){
        .direction = direction, .host = host[index], .device = device[index], .bytes = bytes};
}

static void submit(const struct rig *rig, struct lh_dev_copy *copy)
{
    LH_CHECK(rig->dev->ops->submit(rig->dev, copy, NULL) == 0);
}

static void drain(const struct rig *rig, uint32_t done_max)
{
    struct lh_dev_copy *done[COPY_COUNT];
    while (rig->dev->in_flight_count > 0) {
        uint32_t count = rig->dev->ops->poll(rig->dev, done, done_max);
        for (uint32_t i = 0; i < count; i++)
            LH_CHECK(done[i]->result == 0);
    }
}

/* The clock of the device advances only with copies: by COPY_NS for each, whatever its size. */
static void test_durations(void)
{
    struct rig rig;
    struct lh_dev_copy in[4];
    struct lh_dev_fence *fence = NULL;
    lh_test_name("a copy's duration is measured on the device and excludes waits for fences");
    for (uint32_t done_max = 1; done_max <= COPY_COUNT; done_max += 3) {
        rig_open(&rig, NULL, (struct fake_cuda_opts){.copy_ns = COPY_NS});
        LH_CHECK(rig.dev->ops->fence_create(rig.dev, &fence, NULL) == 0);
        fake_cuda_pause(true);
        for (int i = 0; i < 4; i++) {
            in[i] = copy_of(LH_DEV_DIRECTION_IN, i, i == 3 ? BYTES : BYTES / 3);
            submit(&rig, &in[i]);
        }
        LH_CHECK(rig.dev->ops->poll(rig.dev, &(struct lh_dev_copy *){NULL}, 1) == 0);
        /* The other direction waits for a copy after the burst, so for its last event, too. */
        struct lh_dev_copy between = copy_of(LH_DEV_DIRECTION_IN, 6, BYTES);
        between.done = fence;
        submit(&rig, &between);
        struct lh_dev_copy out = copy_of(LH_DEV_DIRECTION_OUT, 4, BYTES);
        struct lh_dev_copy later = copy_of(LH_DEV_DIRECTION_OUT, 5, BYTES);
        out.after = fence;
        submit(&rig, &out);
        LH_CHECK(rig.dev->ops->order(rig.dev, LH_DEV_DIRECTION_OUT, fence, NULL) == 0);
        submit(&rig, &later);
        LH_CHECK(rig.dev->ops->poll(rig.dev, &(struct lh_dev_copy *){NULL}, 1) == 0);
        fake_cuda_pause(false);
        drain(&rig, done_max);
        /* A burst of 4 ms, of which each copy has its share; nothing overlaps, nothing is lost. */
        for (int i = 0; i < 4; i++) {
            uint64_t expected = 4 * COPY_NS * in[i].bytes / (3 * (BYTES / 3) + BYTES);
            uint64_t found = in[i].completed_ns - in[i].started_ns;
            LH_CHECK(found >= expected - 2 && found <= expected + 2);
            LH_CHECK(i == 0 || in[i].started_ns == in[i - 1].completed_ns);
        }
        LH_CHECK(in[3].completed_ns - in[0].started_ns == 4 * COPY_NS);
        LH_CHECK(out.completed_ns - out.started_ns == COPY_NS);
        LH_CHECK(later.completed_ns - later.started_ns == COPY_NS);
        rig.dev->ops->fence_destroy(rig.dev, fence);
        rig_close(&rig);
    }
}

static void test_durations_of_the_host(void)
{
    struct rig rig;
    struct lh_dev_copy copies[2];
    for (int i = 0; i < 2; i++) {
        lh_test_name(i == 0 ? "without cuEventElapsedTime, a copy lasts from the previous one's end"
                            : "a driver that refuses to tell a duration changes nothing else");
        rig_open(&rig, &by_hand,
                 (struct fake_cuda_opts){.copy_ns = COPY_NS,
                                         .missing = i == 0 ? "cuEventElapsedTime" : NULL});
        fake_cuda_pause(true);
        uint64_t begin_ns = atomic_load(&hand_ns);
        for (int j = 0; j < 2; j++) {
            struct lh_dev_copy *done[1];
            copies[j] = copy_of(LH_DEV_DIRECTION_IN, j, BYTES);
            submit(&rig, &copies[j]);
            LH_CHECK(rig.dev->ops->poll(rig.dev, done, 1) == 0); /* closes the burst */
        }
        hand_ns += 7;
        fake_cuda_pause(false);
        while (rig.dev->in_flight_count > 0) {
            struct lh_dev_copy *done[1];
            lh_waker_prepare(&rig.waker);
            /* Refused are the context, or the duration, or nothing. */
            fake_cuda_fail_after(i == 0 ? -1 : (int64_t)rig.dev->in_flight_count - 1);
            uint32_t count = rig.dev->ops->poll(rig.dev, done, 1);
            fake_cuda_fail_after(-1);
            if (count == 0)
                lh_waker_wait(&rig.waker, LH_DEV_SLEEP_MS_MAX);
            else
                lh_waker_cancel(&rig.waker);
        }
        LH_CHECK(copies[0].started_ns == begin_ns && copies[0].completed_ns == begin_ns + 7);
        LH_CHECK(copies[1].started_ns == copies[0].completed_ns);
        LH_CHECK(copies[1].completed_ns == begin_ns + 7);
        rig_close(&rig);
    }
}

static void test_calls(void)
{
    struct rig rig;
    struct lh_dev_copy copies[8];
    struct lh_dev_fence *fence = NULL;
    lh_test_name("a burst costs one wait, two events and one host call, whatever its pieces");
    for (int count = 1; count <= 8; count++) {
        rig_open(&rig, NULL, (struct fake_cuda_opts){0});
        LH_CHECK(rig.dev->ops->fence_create(rig.dev, &fence, NULL) == 0);
        int64_t before = fake_cuda_call_count();
        fake_cuda_pause(true);
        for (int i = 0; i < count; i++) {
            copies[i] = copy_of(LH_DEV_DIRECTION_OUT, i, BYTES);
            copies[i].after = i == 0 ? fence : NULL;
            submit(&rig, &copies[i]);
        }
        lh_waker_prepare(&rig.waker);
        struct lh_dev_copy *done[COPY_COUNT];
        LH_CHECK(rig.dev->ops->poll(rig.dev, done, COPY_COUNT) == 0);
        fake_cuda_pause(false);
        /* The host call wakes the owner after it has ended all copies. */
        lh_waker_wait(&rig.waker, (int)(MACHINE_TIMEOUT_NS / 1000000));
        LH_CHECK(rig.dev->ops->poll(rig.dev, done, COPY_COUNT) == (uint32_t)count);
        /* Each copy: the context, and the copy. The burst: a wait, an event; the context, an event,
         * a wait, the host call; the context, the duration. */
        LH_CHECK(fake_cuda_call_count() - before == 2 * count + 8);
        rig.dev->ops->fence_destroy(rig.dev, fence);
        rig_close(&rig);
    }
}

static void test_later_waits(void)
{
    struct machine machine;
    lh_test_name("a copy comes back although a later one waits, by order() or by `after`");
    for (int by_order = 0; by_order < 2; by_order++) {
        struct gate gate = GATE_INIT;
        struct lh_dev_copy first = copy_of(LH_DEV_DIRECTION_IN, 0, BYTES);
        struct lh_dev_copy second = copy_of(LH_DEV_DIRECTION_IN, 1, BYTES);
        struct lh_dev_copy *done[2];
        machine_open(&machine, "fake", (struct lh_dev_opts){.copy_count = COPY_COUNT});
        struct lh_dev_fence *fence = machine_fence(&machine);
        machine_hold(&machine, &gate);
        machine_record(&machine, fence);
        machine_submit(&machine, &first);
        if (by_order)
            LH_CHECK(machine.dev->ops->order(machine.dev, LH_DEV_DIRECTION_IN, fence, NULL) == 0);
        else
            second.after = fence;
        machine_submit(&machine, &second);
        LH_CHECK(machine_wait(&machine, done, 2) == 1 && done[0] == &first);
        gate_open(&gate);
        machine_drain(&machine);
        machine.dev->ops->fence_destroy(machine.dev, fence);
        machine_close(&machine);
    }
}

static void test_full_burst(void)
{
    struct rig rig;
    struct lh_dev_copy copies[LARGE_COUNT];
    lh_test_name("the owner is woken after 8 MiB, though it has not polled since they began");
    rig_open(&rig, NULL, (struct fake_cuda_opts){0});
    lh_waker_prepare(&rig.waker);
    for (int i = 0; i < LARGE_COUNT; i++) {
        copies[i] =
            (struct lh_dev_copy){.host = large[0], .device = large[1], .bytes = LARGE_BYTES};
        copies[i].direction = LH_DEV_DIRECTION_IN;
        int64_t before = fake_cuda_call_count();
        submit(&rig, &copies[i]);
        bool is_last = i == LARGE_COUNT - 1;
        LH_CHECK(fake_cuda_call_count() - before == 2 + (i == 0) + 3 * is_last);
    }
    lh_waker_wait(&rig.waker, (int)(MACHINE_TIMEOUT_NS / 1000000));
    int64_t before = fake_cuda_call_count();
    struct lh_dev_copy *done[LARGE_COUNT];
    LH_CHECK(rig.dev->ops->poll(rig.dev, done, LARGE_COUNT) == LARGE_COUNT);
    LH_CHECK(fake_cuda_call_count() - before == 2);
    rig_close(&rig);
}

static void test_refused_notification(void)
{
    struct rig rig;
    struct lh_dev_copy copies[2];
    struct lh_dev_copy *done[COPY_COUNT];
    lh_test_name("copies come back well if the driver refuses to notify, whichever call it was");
    for (int64_t fail_after = 0; fail_after < 5; fail_after++) {
        rig_open(&rig, NULL, (struct fake_cuda_opts){.delay_ns_max = 200000});
        memset(host, (int)fail_after + 1, sizeof(host));
        for (int i = 0; i < 2; i++) {
            copies[i] = copy_of(LH_DEV_DIRECTION_IN, i, BYTES);
            submit(&rig, &copies[i]);
        }
        /* The context, an event, a wait, the host call. */
        fake_cuda_fail_after(fail_after);
        uint32_t count = rig.dev->ops->poll(rig.dev, done, COPY_COUNT);
        LH_CHECK(count == 2 || fail_after == 0 || fail_after == 4);
        fake_cuda_fail_after(-1);
        drain(&rig, 1);
        for (int i = 0; i < 2; i++) {
            LH_CHECK(copies[i].result == 0 && memcmp(device[i], host[i], BYTES) == 0);
            LH_CHECK(copies[i].completed_ns >= copies[i].started_ns);
        }
        rig_close(&rig);
    }
}

static void test_silence(void)
{
    struct rig rig;
    struct lh_dev_copy copy = copy_of(LH_DEV_DIRECTION_IN, 0, BYTES);
    struct lh_dev_copy *done[1];
    lh_test_name(
        "polls ask the driver only when nothing has come back for as long as owners sleep");
    rig_open(&rig, &by_hand, (struct fake_cuda_opts){0});
    for (int round = 0; round < 3; round++) {
        hand_ns += 5 * SILENCE_NS; /* without a copy in flight, silence means nothing */
        fake_cuda_pause(true);
        submit(&rig, &copy);
        LH_CHECK(rig.dev->ops->poll(rig.dev, done, 1) == 0); /* closes the burst */
        for (int i = 0; i < 3; i++) {
            int64_t before = fake_cuda_call_count();
            for (int j = 0; j < 9; j++, hand_ns += SILENCE_NS / 10)
                LH_CHECK(rig.dev->ops->poll(rig.dev, done, 1) == 0);
            LH_CHECK(fake_cuda_call_count() == before);
            hand_ns += SILENCE_NS / 10;
            LH_CHECK(rig.dev->ops->poll(rig.dev, done, 1) == 0);
            LH_CHECK(fake_cuda_call_count() == before + 3); /* the context, and both directions */
        }
        fake_cuda_pause(false);
        drain(&rig, 1);
    }
    rig_close(&rig);
}

/* Wait until the default stream has executed everything so far. */
static void stream_pass(const struct rig *rig, struct lh_dev_fence *fence)
{
    LH_CHECK(rig->dev->ops->record(rig->dev, fence, NULL, NULL) == 0);
    while (!rig->dev->ops->has_passed(rig->dev, fence))
        continue;
}

/* Copies of 3 ms by the device's clock, after which arrived passes. */
static void copies_submit(const struct rig *rig, struct lh_dev_copy *copies,
                          struct lh_dev_fence *arrived)
{
    for (int i = 0; i < 3; i++) {
        copies[i] = copy_of(LH_DEV_DIRECTION_IN, i, BYTES);
        copies[i].done = i == 2 ? arrived : NULL;
        submit(rig, &copies[i]);
    }
}

static uint64_t gaps_of(const struct rig *rig, uint32_t kind)
{
    uint64_t ns = 1;
    LH_CHECK(rig->dev->ops->gaps_take(rig->dev, kind, &ns));
    return ns;
}

static void test_gaps(void)
{
    struct rig rig;
    struct lh_dev_fence *fences[2];
    struct lh_dev_copy copies[3];
    rig_open(&rig, NULL, (struct fake_cuda_opts){.copy_ns = COPY_NS});
    const struct lh_dev_ops *ops = rig.dev->ops;
    for (int i = 0; i < 2; i++)
        LH_CHECK(ops->fence_create(rig.dev, &fences[i], NULL) == 0);
    LH_CHECK(ops->has_passed(rig.dev, fences[1])); /* it was never recorded */
    for (int round = 0; round < 3; round++) {
        lh_test_name("a gap is how long the stream has nothing to execute, while it waits");
        struct lh_dev_gap *gap = ops->gap_begin(rig.dev, NULL);
        stream_pass(&rig, fences[0]);
        fake_cuda_pause(true);
        copies_submit(&rig, copies, fences[1]);
        LH_CHECK(!ops->has_passed(rig.dev, fences[1]));
        LH_CHECK(ops->wait(rig.dev, fences[1], NULL, NULL) == 0);
        ops->gap_end(rig.dev, gap, NULL, 1);
        LH_CHECK(gaps_of(&rig, 1) == 0); /* not yet */
        fake_cuda_pause(false);
        drain(&rig, COPY_COUNT);
        stream_pass(&rig, fences[0]);
        LH_CHECK(gaps_of(&rig, 0) == 0 && gaps_of(&rig, 1) == 3 * COPY_NS);
        LH_CHECK(gaps_of(&rig, 1) == 0); /* taken */

        lh_test_name("a gap is 0 while the stream still has something to execute");
        fake_cuda_pause(true);
        copies_submit(&rig, copies, fences[1]);
        LH_CHECK(ops->wait(rig.dev, fences[1], NULL, NULL) == 0); /* as long as work takes */
        gap = ops->gap_begin(rig.dev, NULL);
        ops->gap_end(rig.dev, gap, NULL, 2);
        fake_cuda_pause(false);
        drain(&rig, COPY_COUNT);
        stream_pass(&rig, fences[0]);
        LH_CHECK(gaps_of(&rig, 2) == 0);
    }
    lh_test_name("a device that is hundreds of gaps late measures those that it has room for");
    fake_cuda_pause(true);
    int measured_count = 0;
    for (int i = 0; i < 1000; i++) {
        struct lh_dev_gap *gap = ops->gap_begin(rig.dev, NULL);
        measured_count += gap != NULL;
        ops->gap_end(rig.dev, gap, NULL, 3);
    }
    fake_cuda_pause(false);
    LH_CHECK(measured_count == 256);
    stream_pass(&rig, fences[0]);
    for (int i = 0; i < 1000; i++) {
        struct lh_dev_gap *gap = ops->gap_begin(rig.dev, NULL);
        LH_CHECK(gap);
        ops->gap_end(rig.dev, gap, NULL, 3);
        stream_pass(&rig, fences[0]);
    }
    for (int i = 0; i < 2; i++)
        ops->fence_destroy(rig.dev, fences[i]);
    rig_close(&rig);

    lh_test_name("without cuEventElapsedTime, no gap is measured");
    rig_open(&rig, NULL, (struct fake_cuda_opts){.missing = "cuEventElapsedTime"});
    uint64_t ns = 0;
    LH_CHECK(!rig.dev->ops->gap_begin(rig.dev, NULL));
    LH_CHECK(!rig.dev->ops->gaps_take(rig.dev, 0, &ns));
    rig_close(&rig);
}

int main(void)
{
    test_durations();
    test_durations_of_the_host();
    test_calls();
    test_later_waits();
    test_full_burst();
    test_refused_notification();
    test_silence();
    test_gaps();
    return 0;
}
