/* Test that every backend fulfills the contract of csrc/dev/dev.h. */
#include "dev_fixture.h"

#define LANE_COUNT 12
#define LANE_BYTES (UINT64_C(192) << 10)
#define ITEM_BYTES (UINT64_C(64) << 10)
#define ITEM_COUNT_MAX 96
#define SLOT_COUNT 2
#define SLOW_BYTES_PER_S UINT64_C(500000000)

static const struct lh_dev_opts plain = {.copy_count = 8};

static uint32_t item_count(void)
{
    return lh_test_is_fast() ? 24 : ITEM_COUNT_MAX;
}

/* A lane copies random bytes in, and out again to another place; all lanes do so at once. */
struct lane {
    struct lh_dev_copy copy;
    uint8_t *in;
    uint8_t *out;
    uint8_t *device;
    uint64_t back_count;
};

static void lane_start(struct machine *machine, struct lane *lane, uint64_t *seed)
{
    bool was_in = lane->copy.bytes > 0 && lane->copy.direction == LH_DEV_DIRECTION_IN;
    uint64_t bytes = was_in ? lane->copy.bytes : lh_test_random(seed) % LANE_BYTES + 1;
    if (!was_in)
        machine_fill(lane->in, bytes, seed);
    else
        memset(lane->out, 0xA5, bytes);
    lane->copy = (struct lh_dev_copy){
        .direction = was_in ? LH_DEV_DIRECTION_OUT : LH_DEV_DIRECTION_IN,
        .host = was_in ? lane->out : lane->in,
        .device = lane->device + (LANE_BYTES - bytes),
        .bytes = bytes,
        .owner = lane,
    };
    LH_CHECK(machine->dev->ops->submit(machine->dev, &lane->copy, NULL) == 0);
}

static void test_bytes(const char *kind)
{
    struct machine machine;
    struct lane lanes[LANE_COUNT] = {0};
    struct lh_dev_copy *done[LANE_COUNT];
    uint64_t copy_count = lh_test_is_fast() ? 200 : 1500;
    uint64_t started = LANE_COUNT;
    uint64_t back_count = 0;
    uint64_t seed = 42;
    lh_test_name("%s: what goes in comes out, each copy back once, sleeping in between", kind);
    machine_open(&machine, kind, (struct lh_dev_opts){.copy_count = LANE_COUNT});
    uint64_t begin_ns = lh_clock_now_ns(&machine.clock);
    for (int i = 0; i < LANE_COUNT; i++) {
        lanes[i].in = malloc(LANE_BYTES);
        lanes[i].out = malloc(LANE_BYTES);
        lanes[i].device = machine_allocate(&machine, LANE_BYTES);
        LH_CHECK(lanes[i].in && lanes[i].out && lanes[i].device);
        lane_start(&machine, &lanes[i], &seed);
    }
    while (machine.dev->in_flight_count > 0) {
        uint32_t count = machine_wait(&machine, done, 5);
        for (uint32_t i = 0; i < count; i++, back_count++) {
            struct lane *lane = done[i]->owner;
            LH_CHECK(done[i] == &lane->copy && done[i]->result == 0);
            done[i]->result = 1; /* a second completion would overwrite it */
            LH_CHECK(done[i]->started_ns >= begin_ns);
            LH_CHECK(done[i]->completed_ns >= done[i]->started_ns);
            LH_CHECK(done[i]->completed_ns <= lh_clock_now_ns(&machine.clock));
            if (done[i]->direction == LH_DEV_DIRECTION_OUT)
                LH_CHECK(memcmp(lane->in, lane->out, done[i]->bytes) == 0);
            if (started < copy_count) {
                lane_start(&machine, lane, &seed);
                started++;
            }
        }
    }
    LH_CHECK(back_count == copy_count);
    LH_CHECK(machine.dev->ops->poll(machine.dev, done, LANE_COUNT) == 0);
    for (int i = 0; i < LANE_COUNT; i++) {
        free(lanes[i].in);
        free(lanes[i].out);
        machine_free(&machine, lanes[i].device);
    }
    machine_close(&machine);
}

static void test_marker(const char *kind)
{
    struct machine machine;
    struct gate gate = GATE_INIT;
    struct lh_dev_copy *done[2];
    static uint8_t host[4096];
    lh_test_name("%s: a marker comes back when its fence has passed, before a later copy", kind);
    machine_open(&machine, kind, (struct lh_dev_opts){.copy_count = 2});
    struct lh_dev_fence *fence = machine_fence(&machine);
    uint8_t *device = machine_allocate(&machine, sizeof(host));
    struct lh_dev_copy marker = {.direction = LH_DEV_DIRECTION_IN, .after = fence};
    struct lh_dev_copy copy = {
        .direction = LH_DEV_DIRECTION_IN, .host = host, .device = device, .bytes = sizeof(host)};
    bool is_held = strcmp(kind, "fake") == 0;
    for (int i = 0; i < 3; i++) {
        gate.is_open = !is_held;
        if (is_held)
            machine_hold(&machine, &gate);
        machine_record(&machine, fence);
        LH_CHECK(machine.dev->ops->submit(machine.dev, &marker, NULL) == 0);
        if (i > 0) /* in the same burst */
            LH_CHECK(machine.dev->ops->submit(machine.dev, &copy, NULL) == 0);
        LH_CHECK(!is_held || machine.dev->ops->poll(machine.dev, done, 2) == 0);
        gate_open(&gate);
        LH_CHECK(machine_wait(&machine, done, 1) == 1 && done[0] == &marker && marker.result == 0);
        LH_CHECK(marker.completed_ns >= marker.started_ns);
        machine_drain(&machine);
    }
    LH_CHECK(copy.completed_ns >= copy.started_ns);
    machine.dev->ops->fence_destroy(machine.dev, fence);
    machine_free(&machine, device);
    machine_close(&machine);
}

static void test_queue_full(const char *kind)
{
    struct machine machine;
    struct lh_dev_copy copies[4];
    struct lh_dev_copy *done[4];
    struct lh_error err = {0};
    static uint8_t host[4][4096];
    lh_test_name("%s: one copy too many is EAGAIN, and is not taken", kind);
    machine_open(&machine, kind, (struct lh_dev_opts){.copy_count = 3});
    uint8_t *device = machine_allocate(&machine, sizeof(host));
    for (int i = 0; i < 4; i++)
        copies[i] = (struct lh_dev_copy){
            .direction = (enum lh_dev_direction)(i % 2),
            .host = host[i],
            .device = device + i * sizeof(host[0]),
            .bytes = sizeof(host[0]),
        };
    for (int i = 0; i < 3; i++)
        LH_CHECK(machine.dev->ops->submit(machine.dev, &copies[i], &err) == 0);
    copies[3].result = 77;
    LH_CHECK(machine.dev->ops->submit(machine.dev, &copies[3], &err) == -EAGAIN);
    LH_CHECK(err.code == 0 && copies[3].result == 77 && machine.dev->in_flight_count == 3);
    LH_CHECK(machine_wait(&machine, done, 1) == 1);
    LH_CHECK(machine.dev->in_flight_count == 2);
    LH_CHECK(machine.dev->ops->submit(machine.dev, &copies[3], &err) == 0);
    machine_drain(&machine);
    for (int i = 0; i < 4; i++)
        LH_CHECK(copies[i].result == 0);
    machine_free(&machine, device);
    machine_close(&machine);
}

/* Many copies into one place: the last one wins, and they come back as they were submitted. */
static void test_order_of_a_direction(const char *kind)
{
    struct machine machine;
    static struct lh_dev_copy copies[ITEM_COUNT_MAX];
    struct lh_dev_copy *done[3];
    uint32_t count = item_count();
    uint32_t back_count = 0;
    uint8_t seen[ITEM_BYTES / 64];
    lh_test_name("%s: copies of a direction run, and come back, in the order of submits", kind);
    machine_open(&machine, kind, (struct lh_dev_opts){.copy_count = ITEM_COUNT_MAX});
    uint8_t *host = machine_host_allocate(&machine, count * ITEM_BYTES);
    uint8_t *device = machine_allocate(&machine, ITEM_BYTES);
    LH_CHECK(device);
    for (uint32_t i = 0; i < count; i++) {
        memset(host + i * ITEM_BYTES, (int)i, ITEM_BYTES);
        /* Large ones before small ones: an overtaking copy would show. */
        copies[i] = (struct lh_dev_copy){
            .direction = LH_DEV_DIRECTION_IN,
            .host = host + i * ITEM_BYTES,
            .device = device,
            .bytes = i % 2 == 0 ? ITEM_BYTES : sizeof(seen),
        };
        LH_CHECK(machine.dev->ops->submit(machine.dev, &copies[i], NULL) == 0);
    }
    while (machine.dev->in_flight_count > 0) {
        uint32_t got = machine_wait(&machine, done, 3);
        for (uint32_t i = 0; i < got; i++, back_count++)
            LH_CHECK(done[i] == &copies[back_count]);
    }
    LH_CHECK(back_count == count);
    machine_copy(&machine, LH_DEV_DIRECTION_OUT, seen, device, sizeof(seen));
    for (size_t i = 0; i < sizeof(seen); i++)
        LH_CHECK(seen[i] == count - 1);
    machine_free(&machine, device);
    machine_host_free(&machine, host);
    machine_close(&machine);
}

/*
 * Copy to and from one place in turns; each copy waits for the fence of the previous one, the CPU
 * for none.
 */
static void test_fences_between_directions(const char *kind, bool by_order, bool slow_in)
{
    struct machine machine;
    static struct lh_dev_copy copies[2 * ITEM_COUNT_MAX];
    uint32_t count = item_count();
    uint64_t seed = 9;
    lh_test_name("%s: a copy starts behind a fence of the other direction's, by %s, slow %s", kind,
                 by_order ? "order()" : "after", slow_in ? "in" : "out");
    /* The other direction would be far ahead. */
    machine_open(&machine, kind,
                 (struct lh_dev_opts){.copy_count = 2 * ITEM_COUNT_MAX,
                                      .link_bytes_per_s = {slow_in ? SLOW_BYTES_PER_S : 0,
                                                           slow_in ? 0 : SLOW_BYTES_PER_S}});
    uint8_t *in = machine_host_allocate(&machine, count * ITEM_BYTES);
    uint8_t *out = machine_host_allocate(&machine, count * ITEM_BYTES);
    uint8_t *device = machine_allocate(&machine, ITEM_BYTES);
    LH_CHECK(device);
    machine_fill(in, count * ITEM_BYTES, &seed);
    struct lh_dev_fence *fences[] = {machine_fence(&machine), machine_fence(&machine)};
    for (uint32_t i = 0; i < 2 * count; i++) {
        bool is_in = i % 2 == 0;
        copies[i] = (struct lh_dev_copy){
            .direction = is_in ? LH_DEV_DIRECTION_IN : LH_DEV_DIRECTION_OUT,
            .host = (is_in ? in : out) + i / 2 * ITEM_BYTES,
            .device = device,
            .bytes = ITEM_BYTES,
            /* the first one waits for a fence that was never recorded */
            .after = by_order ? NULL : fences[1 - i % 2],
            .done = fences[i % 2],
        };
        if (by_order)
            LH_CHECK(machine.dev->ops->order(machine.dev, copies[i].direction, fences[1 - i % 2],
                                             NULL) == 0);
        machine_submit(&machine, &copies[i]);
    }
    machine_drain(&machine);
    LH_CHECK(memcmp(in, out, count * ITEM_BYTES) == 0);
    for (int i = 0; i < 2; i++)
        machine.dev->ops->fence_destroy(machine.dev, fences[i]);
    machine.dev->ops->fence_destroy(machine.dev, NULL);
    machine_free(&machine, device);
    machine_host_free(&machine, in);
    machine_host_free(&machine, out);
    machine_close(&machine);
}

/*
 * Two copies: one waits for a computation, the other for nothing. The one that waits is aside, or
 * the other one is.
 */
static void test_aside(const char *kind, bool is_waiting_aside)
{
    struct machine machine;
    struct gate gate = GATE_INIT;
    struct lh_dev_copy copies[2];
    struct lh_dev_copy *done[2];
    uint64_t seed = 17;
    lh_test_name("%s: a copy that is aside %s other copies, and both have their fences", kind,
                 is_waiting_aside ? "does not hold back" : "is not held back by");
    machine_open(&machine, kind, plain);
    const struct lh_dev_ops *ops = machine.dev->ops;
    bool is_cuda = strcmp(kind, "fake") == 0 || strcmp(kind, "cuda") == 0;
    LH_CHECK((ops->side_create != NULL) == is_cuda);
    LH_CHECK(!is_cuda || ops->side_create(machine.dev, NULL) == 0);
    uint8_t *in = machine_host_allocate(&machine, 2 * ITEM_BYTES);
    uint8_t *out = machine_host_allocate(&machine, 2 * ITEM_BYTES);
    uint8_t *device = machine_allocate(&machine, 4 * ITEM_BYTES);
    struct lh_dev_fence *computed = machine_fence(&machine);
    struct lh_dev_fence *arrived[] = {machine_fence(&machine), machine_fence(&machine)};
    machine_fill(in, 2 * ITEM_BYTES, &seed);
    if (is_cuda)
        machine_hold(&machine, &gate);
    /* What was in the place of the copy that waits is written late. */
    machine_compute(&machine, device, device + 2 * ITEM_BYTES, ITEM_BYTES);
    machine_record(&machine, computed);
    if (!is_waiting_aside)
        LH_CHECK(ops->order(machine.dev, LH_DEV_DIRECTION_IN, computed, NULL) == 0);
    for (int i = 0; i < 2; i++) {
        copies[i] = (struct lh_dev_copy){
            .direction = LH_DEV_DIRECTION_IN,
            .host = in + i * ITEM_BYTES,
            .device = device + i * ITEM_BYTES,
            .bytes = ITEM_BYTES,
            .is_aside = (i == 0) == is_waiting_aside,
            .after = i == 0 && is_waiting_aside ? computed : NULL,
            .done = arrived[i],
        };
        machine_submit(&machine, &copies[i]);
    }
    if (is_cuda) {
        LH_CHECK(machine_wait(&machine, done, 2) == 1 && done[0] == &copies[1]);
        LH_CHECK(!ops->has_passed(machine.dev, computed));
    }
    gate_open(&gate);
    for (int i = 0; i < 2; i++)
        machine_await(&machine, arrived[i]);
    machine_compute(&machine, device + 2 * ITEM_BYTES, device, 2 * ITEM_BYTES);
    machine_record(&machine, computed);
    LH_CHECK(ops->order(machine.dev, LH_DEV_DIRECTION_OUT, computed, NULL) == 0);
    machine_drain(&machine);
    machine_copy(&machine, LH_DEV_DIRECTION_OUT, out, device + 2 * ITEM_BYTES, 2 * ITEM_BYTES);
    LH_CHECK(memcmp(in, out, 2 * ITEM_BYTES) == 0);
    ops->fence_destroy(machine.dev, computed);
    for (int i = 0; i < 2; i++)
        ops->fence_destroy(machine.dev, arrived[i]);
    machine_free(&machine, device);
    machine_host_free(&machine, in);
    machine_host_free(&machine, out);
    machine_close(&machine);
}

/* Slots that are filled, computed on, drained and reused as in a step, while the CPU runs ahead. */
struct pipeline {
    uint8_t *in;
    uint8_t *out;
    uint8_t *slots[SLOT_COUNT];
    uint8_t *results[SLOT_COUNT];
    struct lh_dev_fence *arrived[SLOT_COUNT];
    struct lh_dev_fence *released[SLOT_COUNT];
    struct lh_dev_fence *computed[SLOT_COUNT];
    struct lh_dev_fence *drained[SLOT_COUNT];
    struct lh_dev_copy copies[2 * ITEM_COUNT_MAX];
};

static void pipeline_item(struct machine *machine, struct pipeline *line, uint32_t index)
{
    const struct lh_dev_ops *ops = machine->dev->ops;
    uint32_t slot = index % SLOT_COUNT;
    bool by_order = index % 3 == 0;
    if (by_order)
        LH_CHECK(ops->order(machine->dev, LH_DEV_DIRECTION_IN, line->released[slot], NULL) == 0);
    line->copies[2 * index] = (struct lh_dev_copy){
        .direction = LH_DEV_DIRECTION_IN,
        .host = line->in + index * ITEM_BYTES,
        .device = line->slots[slot],
        .bytes = ITEM_BYTES,
        .after = by_order ? NULL : line->released[slot],
        .done = line->arrived[slot],
    };
    machine_submit(machine, &line->copies[2 * index]);
    machine_await(machine, line->arrived[slot]);
    machine_await(machine, line->drained[slot]);
    machine_compute(machine, line->results[slot], line->slots[slot], ITEM_BYTES);
    machine_record(machine, line->released[slot]);
    machine_record(machine, line->computed[slot]);
    line->copies[2 * index + 1] = (struct lh_dev_copy){
        .direction = LH_DEV_DIRECTION_OUT,
        .host = line->out + index * ITEM_BYTES,
        .device = line->results[slot],
        .bytes = ITEM_BYTES,
        .after = line->computed[slot],
        .done = line->drained[slot],
    };
    machine_submit(machine, &line->copies[2 * index + 1]);
}

static void test_pipeline(const char *kind)
{
    struct machine machine;
    static struct pipeline line;
    uint32_t count = item_count();
    uint64_t seed = 11;
    lh_test_name("%s: fences alone keep copies and computation in order", kind);
    machine_open(&machine, kind, plain);
    line.in = machine_host_allocate(&machine, count * ITEM_BYTES);
    line.out = machine_host_allocate(&machine, count * ITEM_BYTES);
    machine_fill(line.in, count * ITEM_BYTES, &seed);
    for (int i = 0; i < SLOT_COUNT; i++) {
        line.slots[i] = machine_allocate(&machine, ITEM_BYTES);
        line.results[i] = machine_allocate(&machine, ITEM_BYTES);
        line.arrived[i] = machine_fence(&machine);
        line.released[i] = machine_fence(&machine);
        line.computed[i] = machine_fence(&machine);
        line.drained[i] = machine_fence(&machine);
    }
    for (uint32_t i = 0; i < count; i++)
        pipeline_item(&machine, &line, i);
    machine_drain(&machine);
    for (uint32_t i = 0; i < count; i++)
        LH_CHECK(memcmp(line.in + i * ITEM_BYTES, line.out + i * ITEM_BYTES, ITEM_BYTES) == 0);
    for (int i = 0; i < SLOT_COUNT; i++) {
        machine_free(&machine, line.slots[i]);
        machine_free(&machine, line.results[i]);
        machine.dev->ops->fence_destroy(machine.dev, line.arrived[i]);
        machine.dev->ops->fence_destroy(machine.dev, line.released[i]);
        machine.dev->ops->fence_destroy(machine.dev, line.computed[i]);
        machine.dev->ops->fence_destroy(machine.dev, line.drained[i]);
    }
    machine_host_free(&machine, line.in);
    machine_host_free(&machine, line.out);
    machine_close(&machine);
}

/* A thread that computes and is not the owner, as autograd's are. */
struct computer {
    struct machine *machine;
    struct lh_dev_fence *arrived;
    struct lh_dev_fence *computed;
    uint8_t *slot;
    uint8_t *result;
};

static void *computer_main(void *context)
{
    struct computer *computer = context;
    machine_await(computer->machine, computer->arrived);
    machine_compute(computer->machine, computer->result, computer->slot, ITEM_BYTES);
    machine_record(computer->machine, computer->computed);
    return NULL;
}

static void test_other_threads(const char *kind)
{
    struct machine machine;
    static uint8_t in[ITEM_BYTES];
    static uint8_t out[ITEM_BYTES];
    uint64_t seed = 13;
    lh_test_name("%s: any thread may wait for fences and record them", kind);
    machine_open(&machine, kind, plain);
    struct computer computer = {
        .machine = &machine,
        .arrived = machine_fence(&machine),
        .computed = machine_fence(&machine),
        .slot = machine_allocate(&machine, ITEM_BYTES),
        .result = machine_allocate(&machine, ITEM_BYTES),
    };
    for (int round = 0; round < 20; round++) {
        struct lh_dev_copy copies[] = {
            {.direction = LH_DEV_DIRECTION_IN,
             .host = in,
             .device = computer.slot,
             .bytes = ITEM_BYTES,
             .after = computer.computed,
             .done = computer.arrived},
            {.direction = LH_DEV_DIRECTION_OUT,
             .host = out,
             .device = computer.result,
             .bytes = ITEM_BYTES,
             .after = computer.computed},
        };
        pthread_t thread;
        machine_fill(in, ITEM_BYTES, &seed);
        machine_submit(&machine, &copies[0]);
        LH_CHECK(pthread_create(&thread, NULL, computer_main, &computer) == 0);
        LH_CHECK(pthread_join(thread, NULL) == 0);
        machine_submit(&machine, &copies[1]);
        machine_drain(&machine);
        LH_CHECK(memcmp(in, out, ITEM_BYTES) == 0);
    }
    machine.dev->ops->fence_destroy(machine.dev, computer.arrived);
    machine.dev->ops->fence_destroy(machine.dev, computer.computed);
    machine_free(&machine, computer.slot);
    machine_free(&machine, computer.result);
    machine_close(&machine);
}

static void test_fence_recorded_again(const char *kind)
{
    struct machine machine;
    static uint8_t in[2][ITEM_BYTES];
    static uint8_t out[ITEM_BYTES];
    lh_test_name("%s: a fence that is recorded again stands for the last time", kind);
    machine_open(&machine, kind, plain);
    struct lh_dev_fence *fence = machine_fence(&machine);
    uint8_t *device = machine_allocate(&machine, ITEM_BYTES);
    for (int round = 0; round < 20; round++) {
        memset(in[0], 2 * round, ITEM_BYTES);
        memset(in[1], 2 * round + 1, ITEM_BYTES);
        struct lh_dev_copy copies[3] = {{0}};
        for (int i = 0; i < 3; i++) {
            copies[i] = (struct lh_dev_copy){
                .direction = i < 2 ? LH_DEV_DIRECTION_IN : LH_DEV_DIRECTION_OUT,
                .host = i < 2 ? in[i] : out,
                .device = device,
                .bytes = ITEM_BYTES,
                .after = i < 2 ? NULL : fence,
                .done = i < 2 ? fence : NULL,
            };
            machine_submit(&machine, &copies[i]);
        }
        machine_drain(&machine);
        LH_CHECK(memcmp(in[1], out, ITEM_BYTES) == 0);
    }
    machine.dev->ops->fence_destroy(machine.dev, fence);
    machine_free(&machine, device);
    machine_close(&machine);
}

static void test_registered_memory(const char *kind)
{
    struct machine machine;
    static uint8_t in[ITEM_BYTES] __attribute__((aligned(4096)));
    static uint8_t out[ITEM_BYTES] __attribute__((aligned(4096)));
    uint64_t seed = 17;
    lh_test_name("%s: registered memory is copied like any, and given back", kind);
    machine_open(&machine, kind, plain);
    uint8_t *device = machine_allocate(&machine, ITEM_BYTES);
    struct lh_error err = {0};
    LH_CHECK(machine.dev->ops->memory_register(machine.dev, in, sizeof(in), &err) == 0);
    LH_CHECK(machine.dev->ops->memory_register(machine.dev, out, sizeof(out), &err) == 0);
    machine_fill(in, sizeof(in), &seed);
    machine_copy(&machine, LH_DEV_DIRECTION_IN, in, device, sizeof(in));
    machine_copy(&machine, LH_DEV_DIRECTION_OUT, out, device, sizeof(out));
    LH_CHECK(memcmp(in, out, sizeof(in)) == 0);
    machine.dev->ops->memory_unregister(machine.dev, in);
    machine.dev->ops->memory_unregister(machine.dev, out);
    machine_free(&machine, device);
    machine_close(&machine);
}

static void test_main_memory_is_read(const char *kind)
{
    struct machine machine;
    static uint8_t in[ITEM_BYTES] __attribute__((aligned(4096)));
    static uint8_t out[ITEM_BYTES];
    uint64_t seed = 19;
    lh_test_name("%s: the device reads registered memory, and synchronize waits for it", kind);
    machine_open(&machine, kind, plain);
    const struct lh_dev_ops *ops = machine.dev->ops;
    uint8_t *device = machine_allocate(&machine, ITEM_BYTES);
    LH_CHECK(ops->memory_address(machine.dev, in, &(struct lh_error){0}) == NULL);
    LH_CHECK(ops->memory_register(machine.dev, in, sizeof(in), NULL) == 0);
    machine_fill(in, sizeof(in), &seed);
    uint8_t *address = ops->memory_address(machine.dev, in, NULL);
    LH_CHECK(address);
    machine_compute(&machine, device, address, sizeof(in));
    LH_CHECK(ops->synchronize(machine.dev, NULL) == 0);
    machine_copy(&machine, LH_DEV_DIRECTION_OUT, out, device, sizeof(out));
    LH_CHECK(memcmp(in, out, sizeof(in)) == 0);
    ops->memory_unregister(machine.dev, in);
    machine_free(&machine, device);
    machine_close(&machine);
}

static void destroy_in_flight(void *context)
{
    struct machine *machine = context;
    static uint8_t host[64];
    struct lh_dev_copy copy = {.host = host, .device = host, .bytes = sizeof(host)};
    /* The parent's threads are not here, so it stays in flight. */
    LH_CHECK(machine->dev->ops->submit(machine->dev, &copy, NULL) == 0);
    machine->dev->ops->destroy(machine->dev);
}

static void test_misuse(void)
{
    struct machine machine;
    lh_test_name("emu: a destroy with a copy in flight is found");
    machine_open(&machine, "emu", plain);
    LH_CHECK(lh_test_aborts(destroy_in_flight, &machine));
    machine_close(&machine);
}

static void test_refusals(void)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_clock clock = lh_clock_real();
    struct lh_dev_opts opts = {.copy_count = 4, .clock = &clock};
    struct lh_dev *dev = (struct lh_dev *)&alloc;
    struct lh_error err = {0};
    lh_test_name("a name that nothing has is EINVAL, and so is a copy_count that nothing can");
    LH_CHECK(lh_dev_create("tpu", &opts, &alloc, &dev, &err) == -EINVAL && !dev);
    LH_CHECK(strstr(err.message, "tpu") && strstr(err.message, "emu, cuda"));
    static const char *const names[] = {"emu", "cuda"};
    for (size_t i = 0; i < LH_COUNT_OF(names); i++) {
        dev = (struct lh_dev *)&alloc;
        opts.copy_count = 0;
        LH_CHECK(lh_dev_create(names[i], &opts, &alloc, &dev, &err) == -EINVAL && !dev);
        opts.copy_count = LH_DEV_COPY_COUNT_MAX + 1;
        LH_CHECK(lh_dev_create(names[i], &opts, &alloc, &dev, &err) == -EINVAL && !dev);
        LH_CHECK(strstr(err.message, "4097") && strstr(err.message, "4096"));
    }
    LH_CHECK(alloc.live_count == 0);
}

int main(void)
{
    const char *kinds[] = {"emu", "fake", "staged", getenv("LH_TEST_CUDA") ? "cuda" : NULL};
    for (size_t i = 0; i < LH_COUNT_OF(kinds) && kinds[i]; i++) {
        test_bytes(kinds[i]);
        test_queue_full(kinds[i]);
        if (strcmp(kinds[i], "staged") != 0)
            test_marker(kinds[i]);
        test_order_of_a_direction(kinds[i]);
        for (int j = 0; j < 4; j++)
            test_fences_between_directions(kinds[i], j % 2 == 0, j < 2);
        for (int j = 0; j < 2; j++)
            test_aside(kinds[i], j == 0);
        test_pipeline(kinds[i]);
        test_other_threads(kinds[i]);
        test_fence_recorded_again(kinds[i]);
        test_registered_memory(kinds[i]);
        if (strcmp(kinds[i], "fake") == 0 || strcmp(kinds[i], "cuda") == 0)
            test_main_memory_is_read(kinds[i]);
    }
    test_misuse();
    test_refusals();
    return 0;
}
