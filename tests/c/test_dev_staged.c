/*
 * Test registered main memory that a driver refuses, and the device that stages copies of the rest.
 * test_dev.c tests that it fulfills the contract of dev.h.
 */
#include "dev_fixture.h"

#define PAGE_BYTES UINT64_C(4096)
#define UNIT_BYTES (UINT64_C(64) << 10)
#define AREA_BYTES (UINT64_C(512) << 10)
#define COPY_COUNT 6

struct area {
    uint8_t *host;
    uint8_t *device;
};

static struct area area_make(struct machine *machine)
{
    struct area area = {.host = lh_alloc_zeroed(&machine->alloc, 1, AREA_BYTES),
                        .device = machine_allocate(machine, AREA_BYTES)};
    LH_CHECK(area.host && area.device);
    return area;
}

static void area_free(struct machine *machine, struct area *area)
{
    lh_free(&machine->alloc, area->host);
    machine_free(machine, area->device);
}

static void staged_open(struct machine *machine)
{
    machine_open(machine, "staged", (struct lh_dev_opts){.copy_count = COPY_COUNT});
}

static void submit(struct machine *machine, struct lh_dev_copy *copy)
{
    LH_CHECK(machine->dev->ops->submit(machine->dev, copy, NULL) == 0);
}

/* --- Which memory is registered --------------------------------------------------------------- */

static void pin(struct machine *machine, uint8_t *base, uint64_t bytes)
{
    struct lh_dev_buffer range = {.base = base, .bytes = bytes};
    LH_CHECK(lh_dev_pins_add(&machine->pins, &range));
}

static void test_mixed(void)
{
    struct machine machine;
    uint64_t seed = 5;
    lh_test_name("a copy of registered and other memory is cut between them, and the driver gets "
                 "no other memory than registered");
    staged_open(&machine);
    struct area area = area_make(&machine);
    uint8_t *found = lh_alloc_zeroed(&machine.alloc, 1, AREA_BYTES);
    uint8_t *expected = lh_alloc_zeroed(&machine.alloc, 1, AREA_BYTES);
    LH_CHECK(found && expected);
    /* Ranges that touch, that are apart, and that are smaller than a slot, not in order. */
    pin(&machine, area.host + 60 * PAGE_BYTES, 20 * PAGE_BYTES);
    pin(&machine, area.host + 10 * PAGE_BYTES, PAGE_BYTES);
    pin(&machine, area.host + 11 * PAGE_BYTES, 9 * PAGE_BYTES);
    pin(&machine, found + 30 * PAGE_BYTES, 40 * PAGE_BYTES);
    for (int round = 0; round < (lh_test_is_fast() ? 40 : 300); round++) {
        uint64_t at = lh_test_random(&seed) % AREA_BYTES;
        uint64_t bytes = lh_test_random(&seed) % (AREA_BYTES - at) + 1;
        machine_fill(area.host + at, bytes, &seed);
        memcpy(expected + at, area.host + at, bytes);
        machine_copy(&machine, LH_DEV_DIRECTION_IN, area.host + at, area.device + at, bytes);
        machine_copy(&machine, LH_DEV_DIRECTION_OUT, found + at, area.device + at, bytes);
        LH_CHECK(memcmp(found, expected, AREA_BYTES) == 0);
    }
    LH_CHECK(fake_cuda_pageable_count() == 0);
    lh_dev_pins_remove(&machine.pins);
    lh_free(&machine.alloc, found);
    lh_free(&machine.alloc, expected);
    area_free(&machine, &area);
    machine_close(&machine);
}

struct pins_row {
    /* in units of UNIT_BYTES */
    uint64_t bytes_max; /* the driver's limit; 0: none */
    uint64_t buffer_bytes[2];
    uint64_t pinned_bytes[2]; /* expected */
    bool is_staging_pinned;
};

static void check_pins(const struct pins_row *row, uint64_t bytes_max)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_clock clock = lh_clock_real();
    struct lh_dev_opts opts = {.copy_count = 4, .clock = &clock};
    struct lh_dev_pins pins = {0};
    fake_cuda_reset((struct fake_cuda_opts){.fail_after = -1, .register_bytes_max = bytes_max});
    LH_CHECK(lh_dev_cuda_create_from(fake_cuda_lookup, NULL, &opts, &alloc, &pins.dev, NULL) == 0);
    uint8_t *memory = lh_alloc_zeroed(&alloc, 128, UNIT_BYTES);
    LH_CHECK(memory);
    struct lh_dev_buffer staging = {.base = memory, .bytes = 8 * UNIT_BYTES};
    struct lh_dev_buffer buffers[2];
    uint8_t *next = memory + staging.bytes;
    bool is_complete = true;
    for (int i = 0; i < 2; i++) {
        buffers[i] =
            (struct lh_dev_buffer){.base = next, .bytes = row->buffer_bytes[i] * UNIT_BYTES};
        next += buffers[i].bytes;
        is_complete &= lh_dev_pins_add(&pins, &buffers[i]);
    }
    LH_CHECK(next <= memory + 128 * UNIT_BYTES);
    LH_CHECK(is_complete == (row->bytes_max == 0) && is_complete == (pins.refusal.code == 0));
    LH_CHECK(is_complete || pins.refusal.native == LH_CUDA_OUT_OF_MEMORY);
    if (!is_complete)
        lh_dev_pins_fit(&pins, &staging, buffers, 2, 4 * UNIT_BYTES);
    for (int i = 0; i < 2; i++)
        LH_CHECK(lh_dev_pins_bytes(&pins, &buffers[i]) == row->pinned_bytes[i] * UNIT_BYTES);
    LH_CHECK(lh_dev_pins_bytes(&pins, &staging) == (row->is_staging_pinned ? staging.bytes : 0));
    lh_dev_pins_remove(&pins);
    lh_dev_pins_remove(&pins);
    LH_CHECK(pins.count == 0);
    pins.dev->ops->destroy(pins.dev);
    lh_free(&alloc, memory);
    LH_CHECK(alloc.live_count == 0 && fake_cuda_live_count() == 0);
}

static void test_pins(void)
{
    static const struct pins_row rows[] = {
        {0, {40, 20}, {40, 20}, false}, /* no limit, so nothing is staged */
        {48, {40, 20}, {40, 0}, true},  /* the staging memory takes what is left */
        {50, {40, 20}, {40, 2}, true},  /* a small piece fits beside it */
        {44, {40, 20}, {36, 0}, true},  /* a whole buffer makes room for it, and is cut */
        {30, {40, 20}, {2, 20}, true},  /* a buffer that fits as a whole comes first */
        {9, {40, 20}, {1, 0}, true},    /* one unit */
        {7, {40, 20}, {7, 0}, false},   /* too little for the staging memory */
    };
    lh_test_name("what a driver refuses as a whole is registered in pieces, after the staging "
                 "memory; and all of it is unregistered once");
    for (size_t i = 0; i < LH_COUNT_OF(rows); i++)
        check_pins(&rows[i], rows[i].bytes_max * UNIT_BYTES);
    lh_test_name("a driver that refuses everything has nothing to unregister");
    check_pins(&(struct pins_row){1, {40, 20}, {0, 0}, false}, 1);
}

/* --- Order ------------------------------------------------------------------------------------ */

/*
 * The direction OUT is busy with a copy of many pieces when a result is to be copied after it. The
 * default stream computes the result, but only when the first copy has been back for some time, so
 * a copy that does not wait for the computation is too early.
 */
#define EARLY_NS UINT64_C(20000000)

struct busy {
    struct machine machine;
    struct CUstream_st *idle; /* a stream without work */
    struct area big;
    struct area result;
    struct lh_dev_fence *fence;
    struct lh_dev_copy copies[2];
    uint8_t *source;
};

static void nothing(void *context)
{
    (void)context;
}

static void busy_open(struct busy *busy)
{
    struct machine *machine = &busy->machine;
    uint64_t seed = 23;
    staged_open(machine);
    busy->idle = machine->stream;
    machine->stream = NULL;
    busy->big = area_make(machine);
    busy->result = area_make(machine);
    busy->source = machine_allocate(machine, AREA_BYTES);
    busy->fence = machine_fence(machine);
    machine_fill(busy->source, AREA_BYTES, &seed);
    memset(busy->result.device, 0, AREA_BYTES);
    fake_cuda_allow(0);
    fake_cuda_pause(true);
    busy->copies[0] = (struct lh_dev_copy){.direction = LH_DEV_DIRECTION_OUT,
                                           .host = busy->big.host,
                                           .device = busy->big.device,
                                           .bytes = AREA_BYTES};
    busy->copies[1] = (struct lh_dev_copy){.direction = LH_DEV_DIRECTION_OUT,
                                           .host = busy->result.host,
                                           .device = busy->result.device,
                                           .bytes = AREA_BYTES};
}

static void busy_compute(struct busy *busy)
{
    machine_enter(&busy->machine);
    LH_CHECK(busy->machine.calls.host_call(NULL, nothing, NULL) == 0);
    machine_leave(&busy->machine);
    machine_compute(&busy->machine, busy->result.device, busy->source, AREA_BYTES);
}

/*
 * Let the copies run, and the computation some time after the first copy is back. is_ordered: the
 * first copy may wait for the computation, too.
 */
static void busy_run(struct busy *busy, bool is_ordered)
{
    struct machine *machine = &busy->machine;
    struct lh_dev_copy *done[1];
    fake_cuda_pause(false);
    bool is_back = is_ordered || busy->copies[0].result == 0;
    uint64_t back_ns = lh_clock_now_ns(&machine->clock);
    uint64_t early_ns = is_ordered ? 10 * EARLY_NS : EARLY_NS;
    while (!is_back || lh_clock_now_ns(&machine->clock) - back_ns < early_ns) {
        if (machine->dev->ops->poll(machine->dev, done, 1) > 0) {
            LH_CHECK(done[0] == &busy->copies[0] && done[0]->result == 0);
            is_back = true;
            back_ns = lh_clock_now_ns(&machine->clock);
        }
    }
    fake_cuda_allow(-1);
    machine_drain(machine);
}

/* The result must have been copied after it was computed. */
static void busy_close(struct busy *busy)
{
    struct machine *machine = &busy->machine;
    LH_CHECK(memcmp(busy->result.host, busy->source, AREA_BYTES) == 0);
    LH_CHECK(fake_cuda_pageable_count() == 0);
    machine->dev->ops->fence_destroy(machine->dev, busy->fence);
    machine_free(machine, busy->source);
    area_free(machine, &busy->big);
    area_free(machine, &busy->result);
    machine->stream = busy->idle;
    machine_close(machine);
}

static void test_queued_order(bool by_order, bool is_recorded_again)
{
    struct busy busy;
    lh_test_name("a copy that is queued starts after its fence, by %s%s",
                 by_order ? "order()" : "after",
                 is_recorded_again ? ", recorded again on a stream without work" : "");
    busy_open(&busy);
    struct lh_dev *dev = busy.machine.dev;
    submit(&busy.machine, &busy.copies[0]);
    busy_compute(&busy);
    machine_record(&busy.machine, busy.fence);
    if (by_order)
        LH_CHECK(dev->ops->order(dev, LH_DEV_DIRECTION_OUT, busy.fence, NULL) == 0);
    else
        busy.copies[1].after = busy.fence;
    submit(&busy.machine, &busy.copies[1]);
    if (is_recorded_again)
        LH_CHECK(dev->ops->record(dev, busy.fence, busy.idle, NULL) == 0);
    busy_run(&busy, is_recorded_again);
    busy_close(&busy);
}

static void test_many_orders(void)
{
    struct busy busy;
    struct lh_dev_fence *others[3 * COPY_COUNT];
    lh_test_name("more orders than the queue holds are kept, too");
    busy_open(&busy);
    struct lh_dev *dev = busy.machine.dev;
    submit(&busy.machine, &busy.copies[0]);
    busy_compute(&busy);
    for (size_t i = 0; i < LH_COUNT_OF(others); i++) {
        others[i] = machine_fence(&busy.machine);
        LH_CHECK(dev->ops->record(dev, others[i], busy.idle, NULL) == 0);
        LH_CHECK(dev->ops->order(dev, LH_DEV_DIRECTION_OUT, others[i], NULL) == 0);
    }
    machine_record(&busy.machine, busy.fence);
    LH_CHECK(dev->ops->order(dev, LH_DEV_DIRECTION_OUT, busy.fence, NULL) == 0);
    submit(&busy.machine, &busy.copies[1]);
    busy_run(&busy, true);
    for (size_t i = 0; i < LH_COUNT_OF(others); i++)
        dev->ops->fence_destroy(dev, others[i]);
    busy_close(&busy);
}

static void test_order_at_the_end(void)
{
    struct busy busy;
    struct lh_dev_copy *done[1];
    lh_test_name("an order after all copies is passed on, and outlives its fence");
    busy_open(&busy);
    struct lh_dev *dev = busy.machine.dev;
    submit(&busy.machine, &busy.copies[0]);
    busy_compute(&busy);
    struct lh_dev_fence *fence = machine_fence(&busy.machine);
    machine_record(&busy.machine, fence);
    LH_CHECK(dev->ops->order(dev, LH_DEV_DIRECTION_OUT, fence, NULL) == 0);
    fake_cuda_pause(false);
    LH_CHECK(machine_wait(&busy.machine, done, 1) == 1);
    dev->ops->fence_destroy(dev, fence);
    submit(&busy.machine, &busy.copies[1]);
    busy_run(&busy, false);
    busy_close(&busy);
}

static void test_done_recorded_again(void)
{
    struct busy busy;
    lh_test_name("a fence that is recorded again before its copy is submitted in full stands for "
                 "the record");
    busy_open(&busy);
    busy.copies[0].done = busy.fence;
    submit(&busy.machine, &busy.copies[0]);
    busy_compute(&busy);
    machine_record(&busy.machine, busy.fence);
    busy.copies[1].after = busy.fence;
    submit(&busy.machine, &busy.copies[1]);
    busy_run(&busy, false);
    busy_close(&busy);
}

/* --- Failures --------------------------------------------------------------------------------- */

/* A staged device, and nothing else that uses the driver. */
struct alone {
    struct lh_alloc alloc;
    struct lh_clock clock;
    struct lh_waker waker;
    struct lh_dev_pins pins;
    struct lh_dev *dev;
};

static _Alignas(64) uint8_t alone_in[AREA_BYTES];
static _Alignas(64) uint8_t alone_out[AREA_BYTES];
static _Alignas(64) uint8_t alone_device[AREA_BYTES];
static _Alignas(64) uint8_t alone_staging[MACHINE_STAGING_BYTES];

static int alone_open(struct alone *alone, int64_t fail_after)
{
    *alone = (struct alone){.alloc = LH_ALLOC_INIT, .clock = lh_clock_real()};
    alone->alloc.fail_after = fail_after;
    LH_CHECK(lh_waker_init(&alone->waker, NULL) == 0);
    fake_cuda_reset((struct fake_cuda_opts){.fail_after = -1});
    struct lh_dev_opts opts = {
        .copy_count = COPY_COUNT, .clock = &alone->clock, .waker = &alone->waker};
    LH_TRY(lh_dev_cuda_create_from(fake_cuda_lookup, NULL, &opts, &alone->alloc, &alone->pins.dev,
                                   NULL));
    struct lh_dev_staged_opts staged_opts = {
        .copy_count = COPY_COUNT,
        .waker = &alone->waker,
        .clock = &alone->clock,
        .pins = &alone->pins,
        .memory = {.base = alone_staging, .bytes = sizeof(alone_staging)},
    };
    LH_CHECK(lh_dev_pins_add(&alone->pins, &staged_opts.memory));
    alone->dev = (struct lh_dev *)&opts;
    int rc = lh_dev_staged_create(&staged_opts, alone->pins.dev, &alone->alloc, &alone->dev, NULL);
    LH_CHECK((rc == 0) == (alone->dev != NULL));
    return rc;
}

static void alone_close(struct alone *alone)
{
    lh_dev_pins_remove(&alone->pins);
    struct lh_dev *dev = alone->dev ? alone->dev : alone->pins.dev;
    if (dev)
        dev->ops->destroy(dev);
    LH_CHECK(alone->alloc.live_count == 0 && fake_cuda_live_count() == 0);
    lh_waker_deinit(&alone->waker);
}

/* Poll until nothing is in flight; returns the number of copies that came back. */
static uint32_t alone_drain(struct alone *alone)
{
    struct lh_dev_copy *done[4];
    uint32_t back_count = 0;
    while (alone->dev->in_flight_count > 0) {
        lh_waker_prepare(&alone->waker);
        uint32_t count = alone->dev->ops->poll(alone->dev, done, 4);
        for (uint32_t i = 0; i < count; i++, back_count++) {
            LH_CHECK(done[i]->completed_ns >= done[i]->started_ns);
            LH_CHECK(done[i]->result <= 0 && done[i]->result != -EINPROGRESS && done[i]->owner);
            done[i]->owner = NULL; /* it must not come back again */
        }
        if (count == 0)
            lh_waker_wait(&alone->waker, LH_DEV_SLEEP_MS_MAX);
        else
            lh_waker_cancel(&alone->waker);
    }
    LH_CHECK(alone->dev->ops->poll(alone->dev, done, 4) == 0);
    return back_count;
}

static void test_lost(void)
{
    struct alone alone;
    struct lh_dev_copy copies[COPY_COUNT];
    struct lh_error err = {0};
    lh_test_name("copies of a GPU that stops executing come back with EIO, once, whether they are "
                 "in flight, cut in part or queued; and no more go");
    LH_CHECK(alone_open(&alone, -1) == 0);
    fake_cuda_pause(true);
    for (int i = 0; i < COPY_COUNT; i++) {
        copies[i] = (struct lh_dev_copy){.direction = (enum lh_dev_direction)(i % 2),
                                         .host = i % 2 == 0 ? alone_in : alone_out,
                                         .device = alone_device,
                                         .bytes = AREA_BYTES,
                                         .owner = &alone};
        LH_CHECK(alone.dev->ops->submit(alone.dev, &copies[i], NULL) == 0);
    }
    fake_cuda_break();
    LH_CHECK(alone_drain(&alone) == COPY_COUNT);
    for (int i = 0; i < COPY_COUNT; i++)
        LH_CHECK(copies[i].result == -EIO);
    LH_CHECK(alone.dev->ops->submit(alone.dev, &copies[0], &err) == -EIO);
    LH_CHECK(alone.dev->in_flight_count == 0 && strlen(err.message) > 0);
    alone_close(&alone);
}

/* Copy in and out, one after another, with one failure; returns whether the failure happened. */
static bool use(int64_t fail_after)
{
    struct alone alone;
    struct lh_dev_copy copies[COPY_COUNT];
    struct lh_dev_fence *fence = NULL;
    uint32_t submitted_count = 0;
    LH_CHECK(alone_open(&alone, -1) == 0);
    const struct lh_dev_ops *ops = alone.dev->ops;
    LH_CHECK(ops->fence_create(alone.dev, &fence, NULL) == 0);
    memset(alone_out, 0, sizeof(alone_out));
    int64_t call_count = fake_cuda_call_count();
    fake_cuda_fail_after(fail_after);
    bool is_clean = ops->record(alone.dev, fence, NULL, NULL) == 0;
    for (int i = 0; i < COPY_COUNT; i++) {
        bool is_in = i % 2 == 0;
        copies[i] = (struct lh_dev_copy){.direction = (enum lh_dev_direction)(i % 2),
                                         .host = is_in ? alone_in : alone_out,
                                         .device = alone_device,
                                         .bytes = AREA_BYTES / 4,
                                         .after = fence,
                                         .done = fence,
                                         .owner = &alone};
        int rc = ops->submit(alone.dev, &copies[i], NULL);
        submitted_count += rc == 0;
        is_clean &= rc == 0;
    }
    LH_CHECK(alone.dev->in_flight_count == submitted_count);
    LH_CHECK(alone_drain(&alone) == submitted_count);
    bool has_failed = fake_cuda_call_count() - call_count > fail_after;
    for (uint32_t i = 0; i < submitted_count; i++)
        is_clean &= copies[i].result == 0;
    LH_CHECK(is_clean || has_failed);
    LH_CHECK(!is_clean || memcmp(alone_in, alone_out, AREA_BYTES / 4) == 0);
    fake_cuda_fail_after(-1);
    ops->fence_destroy(alone.dev, fence);
    alone_close(&alone);
    return has_failed;
}

static void test_every_call_may_fail(void)
{
    uint64_t seed = 3;
    int64_t fail_after = 0;
    lh_test_name(
        "whichever call of the driver fails, each copy comes back once, and a run in which "
        "all came back well has the right bytes");
    machine_fill(alone_in, AREA_BYTES, &seed);
    while (use(fail_after))
        fail_after += lh_test_is_fast() ? 7 : 1;
    LH_CHECK(fail_after > 100);
}

static void test_allocations(void)
{
    int64_t fail_after = 0;
    int rc = -ENOMEM;
    lh_test_name("an allocation that fails leaves the wrapped device as it was");
    for (; rc < 0; fail_after++) {
        struct alone alone;
        rc = alone_open(&alone, fail_after);
        LH_CHECK(rc == 0 || rc == -ENOMEM);
        alone_close(&alone);
    }
    LH_CHECK(fail_after == 6 + 1 + 2 + 6 + 1);
}

int main(void)
{
    test_mixed();
    test_pins();
    for (int i = 0; i < 4; i++)
        test_queued_order(i % 2 == 0, i >= 2);
    test_many_orders();
    test_order_at_the_end();
    test_done_recorded_again();
    test_lost();
    test_every_call_may_fail();
    test_allocations();
    return 0;
}
