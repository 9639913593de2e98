/* Test that the emulated accelerator's links have the configured speed. */
#include "dev_fixture.h"

#include <time.h>

#define COPY_BYTES (UINT64_C(8) << 20)
#define COPY_COUNT 4
#define COPY_NS 100000000 /* the duration of one copy at COPY_BYTES * 10 a second */
#define SLOW_BYTES_PER_S (UINT64_C(256) << 20)
#define RUN_NS (COPY_COUNT * COPY_BYTES * UINT64_C(1000000000) / SLOW_BYTES_PER_S)
/* A busy machine may be late, never early: it is asked again. */
#define ATTEMPT_COUNT 40

#if defined(__SANITIZE_THREAD__)
#define IS_THREAD_SANITIZED 1
#else
#define IS_THREAD_SANITIZED 0
#endif

static uint8_t host[LH_DEV_DIRECTION_COUNT][COPY_BYTES];
static uint8_t device[LH_DEV_DIRECTION_COUNT][COPY_BYTES];
static struct lh_dev_copy copies[LH_DEV_DIRECTION_COUNT][COPY_COUNT];

static void machine_start(struct machine *machine, enum lh_dev_direction direction, int index,
                          uint64_t bytes)
{
    struct lh_dev_copy *copy = &copies[direction][index];
    *copy = (struct lh_dev_copy){.direction = direction,
                                 .host = host[direction],
                                 .device = device[direction],
                                 .bytes = bytes};
    LH_CHECK(machine->dev->ops->submit(machine->dev, copy, NULL) == 0);
}

static void sleep_ms(long ms)
{
    struct timespec pause = {.tv_nsec = ms * 1000000};
    nanosleep(&pause, NULL);
}

/* Nanoseconds for COPY_COUNT copies in each direction that is asked for. */
static uint64_t run_ns(struct machine *machine, bool in, bool out)
{
    uint64_t begin_ns = lh_clock_now_ns(&machine->clock);
    for (int i = 0; i < COPY_COUNT; i++) {
        if (in)
            machine_start(machine, LH_DEV_DIRECTION_IN, i, COPY_BYTES);
        if (out)
            machine_start(machine, LH_DEV_DIRECTION_OUT, i, COPY_BYTES);
    }
    machine_drain(machine);
    return lh_clock_now_ns(&machine->clock) - begin_ns;
}

static void test_speed(void)
{
    struct machine machine;
    lh_test_name("a link takes bytes / speed for what it copies, copying included");
    machine_open(&machine, "emu",
                 (struct lh_dev_opts){.copy_count = 2 * COPY_COUNT,
                                      .link_bytes_per_s = {SLOW_BYTES_PER_S, SLOW_BYTES_PER_S}});
    /* A link can be late where copying itself is slow, but never early. */
    const double slowness = lh_test_slowness();
    uint64_t best_ns = UINT64_MAX;
    for (int i = 0; i < ATTEMPT_COUNT && best_ns > RUN_NS + RUN_NS / 10; i++) {
        uint64_t took_ns = run_ns(&machine, true, false);
        LH_CHECK(took_ns >= RUN_NS);
        best_ns = lh_min_u64(best_ns, took_ns);
        for (int j = 0; j < COPY_COUNT; j++)
            LH_CHECK(copies[LH_DEV_DIRECTION_IN][j].completed_ns >
                     copies[LH_DEV_DIRECTION_IN][j].started_ns);
    }
    LH_CHECK((double)best_ns <= 1.1 * RUN_NS * slowness);

    lh_test_name("both directions run at their speeds at once");
    best_ns = UINT64_MAX;
    for (int i = 0; i < ATTEMPT_COUNT && best_ns > RUN_NS * 3 / 2; i++)
        best_ns = lh_min_u64(best_ns, run_ns(&machine, true, true));
    LH_CHECK(best_ns >= RUN_NS && (double)best_ns <= 1.5 * RUN_NS * slowness);

    lh_test_name("a link that was idle has saved nothing up");
    sleep_ms(200);
    LH_CHECK(run_ns(&machine, false, true) >= RUN_NS);
    machine_close(&machine);
}

static void test_smoothness(void)
{
    struct machine machine;
    lh_test_name("bytes arrive evenly: half of them in half of the time");
    machine_open(&machine, "emu",
                 (struct lh_dev_opts){.copy_count = 1, .link_bytes_per_s = {COPY_BYTES * 5, 0}});
    bool is_even = false;
    for (int i = 0; i < ATTEMPT_COUNT && !is_even; i++) {
        memset(host[0], 1, COPY_BYTES);
        memset(device[0], 0, COPY_BYTES);
        machine_start(&machine, LH_DEV_DIRECTION_IN, 0, COPY_BYTES);
        sleep_ms(100);
        uint64_t arrived_bytes = 0;
        for (uint64_t at = 0; at < COPY_BYTES; at += LH_MIB / 8)
            arrived_bytes += *(volatile uint8_t *)&device[0][at] * (LH_MIB / 8);
        is_even = arrived_bytes > COPY_BYTES / 4 && arrived_bytes < COPY_BYTES * 3 / 4;
        machine_drain(&machine);
    }
    LH_CHECK(is_even);
    machine_close(&machine);
}

static void test_stays_asleep(void)
{
    struct machine machine;
    struct lh_dev_copy *done[1];
    lh_test_name("a copy that is under way does not come back, whatever small ones follow it");
    machine_open(&machine, "emu",
                 (struct lh_dev_opts){.copy_count = 2, .link_bytes_per_s = {COPY_BYTES * 10, 0}});
    uint64_t begin_ns = lh_clock_now_ns(&machine.clock);
    machine_start(&machine, LH_DEV_DIRECTION_IN, 0, COPY_BYTES);
    machine_start(&machine, LH_DEV_DIRECTION_IN, 1, 1);
    uint32_t early_count = machine.dev->ops->poll(machine.dev, done, 1);
    LH_CHECK(early_count == 0 || lh_clock_now_ns(&machine.clock) - begin_ns >= COPY_NS);
    LH_CHECK(early_count == 1 || machine_wait(&machine, done, 1) == 1);
    LH_CHECK(done[0] == &copies[0][0]);
    machine_drain(&machine);

    lh_test_name("a wait for a copy's fence lasts until the copy is over");
    struct lh_dev_fence *fence = machine_fence(&machine);
    struct lh_dev_copy copy = {
        .host = host[0], .device = device[0], .bytes = COPY_BYTES, .done = fence};
    begin_ns = lh_clock_now_ns(&machine.clock);
    LH_CHECK(machine.dev->ops->submit(machine.dev, &copy, NULL) == 0);
    machine_await(&machine, fence);
    LH_CHECK(lh_clock_now_ns(&machine.clock) - begin_ns >= COPY_NS);
    LH_CHECK(machine.dev->ops->poll(machine.dev, done, 1) == 1);

    lh_test_name("a fence that computation records has passed");
    bool has_passed = false;
    for (int i = 0; i < ATTEMPT_COUNT && !has_passed; i++) {
        LH_CHECK(machine.dev->ops->submit(machine.dev, &copy, NULL) == 0);
        machine_record(&machine, fence);
        machine_await(&machine, fence);
        has_passed = machine.dev->ops->poll(machine.dev, done, 1) == 0;
        machine_drain(&machine);
    }
    LH_CHECK(has_passed);
    machine.dev->ops->fence_destroy(machine.dev, fence);
    machine_close(&machine);
}

static void test_allocations(void)
{
    struct lh_clock clock = lh_clock_real();
    struct lh_dev_opts opts = {.copy_count = 4, .clock = &clock};
    struct lh_error err = {0};
    lh_test_name("emu: an allocation that fails leaves nothing");
    int rc = -ENOMEM;
    int64_t fail_after = 0;
    for (; rc == -ENOMEM; fail_after++) {
        struct lh_alloc alloc = LH_ALLOC_INIT;
        struct lh_dev *dev = (struct lh_dev *)&alloc;
        struct lh_dev_fence *fence = (struct lh_dev_fence *)&alloc;
        alloc.fail_after = fail_after;
        rc = lh_dev_create("emu", &opts, &alloc, &dev, &err);
        LH_CHECK((rc == 0) == (dev != NULL));
        if (rc == 0) {
            rc = dev->ops->fence_create(dev, &fence, &err);
            LH_CHECK((rc == 0) == (fence != NULL));
            dev->ops->fence_destroy(dev, fence);
            dev->ops->destroy(dev);
        }
        LH_CHECK(rc == 0 || (rc == -ENOMEM && err.code == rc));
        LH_CHECK(alloc.live_count == 0);
    }
    LH_CHECK(rc == 0 && fail_after == 5);
}

int main(void)
{
    test_speed();
    /* It looks at bytes that are being written, which is a race. */
    if (!IS_THREAD_SANITIZED)
        test_smoothness();
    test_stays_asleep();
    test_allocations();
    return 0;
}
