/*
 * Shared by the tests of csrc/dev: a machine with an accelerator, a stream that computes on it, and
 * the owner's loop.
 *
 * Kinds: "emu"; "fake", the CUDA backend on the driver of fake_cuda.c; "staged", the same, with no
 * registered memory but small slots that copies go through; "cuda", the CUDA backend on this
 * machine's driver, if LH_TEST_CUDA is set.
 */
#ifndef DEV_FIXTURE_H
#define DEV_FIXTURE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <dlfcn.h>
#include <pthread.h>

#include "dev/cuda_abi.h"
#include "dev/dev.h"
#include "dev/dev_private.h"
#include "dev/staged.h"
#include "fake_cuda.h"
#include "lh_test.h"

#define MACHINE_TIMEOUT_NS UINT64_C(20000000000)
#define MACHINE_DELAY_NS_MAX 200000
/* Copied before each computation on a real GPU, so that work that does not wait runs too early. */
#define MACHINE_SCRATCH_BYTES (UINT64_C(128) << 20)
#define MACHINE_SCRATCH_ROUNDS 8
#define MACHINE_STAGING_BYTES (UINT64_C(64) << 10)
#define MACHINE_HOLD_ROUNDS 500 /* on a real GPU: several hundred ms */

/* What holds the compute stream back. */
struct gate {
    pthread_mutex_t mutex;
    pthread_cond_t opened;
    bool is_open;
};
#define GATE_INIT {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false}

struct machine {
    const char *kind;
    struct lh_alloc alloc;
    struct lh_clock clock;
    struct lh_waker waker;
    struct lh_dev *dev;
    struct lh_dev *inner; /* what a staged device wraps, else dev */
    /* the stream that computes; NULL for emu, where the caller's thread computes */
    struct CUstream_st *stream;
    struct CUctx_st *context;
    struct lh_cuda_calls calls;
    unsigned (*memory_allocate)(unsigned long long *address, size_t bytes);
    unsigned (*memory_free)(unsigned long long address);
    unsigned (*copy_within)(unsigned long long to, unsigned long long from, size_t bytes,
                            struct CUstream_st *stream);
    void *scratch;           /* used by cuda only */
    struct lh_dev_pins pins; /* used by staged only, as staging is */
    uint8_t *staging;
};

__attribute__((unused)) static void machine_enter(struct machine *machine)
{
    LH_CHECK(machine->calls.context_push(machine->context) == 0);
}

__attribute__((unused)) static void machine_leave(struct machine *machine)
{
    struct CUctx_st *context = NULL;
    LH_CHECK(machine->calls.context_pop(&context) == 0);
}

/* The memory on which the accelerator computes. */
__attribute__((unused)) static void *machine_allocate(struct machine *machine, uint64_t bytes)
{
    unsigned long long address = 0;
    if (!machine->context)
        return lh_alloc_zeroed(&machine->alloc, 1, bytes);
    machine_enter(machine);
    LH_CHECK(machine->memory_allocate(&address, bytes) == 0);
    machine_leave(machine);
    return (void *)address;
}

__attribute__((unused)) static void machine_free(struct machine *machine, void *memory)
{
    if (!machine->context) {
        lh_free(&machine->alloc, memory);
        return;
    }
    machine_enter(machine);
    LH_CHECK(machine->memory_free((uintptr_t)memory) == 0);
    machine_leave(machine);
}

/* Zeroed main memory, registered with the device: the driver may copy pageable memory synchronously
 * in submit, which would hide a missing fence. */
__attribute__((unused)) static void *machine_host_allocate(struct machine *machine, uint64_t bytes)
{
    void *memory = lh_alloc_zeroed(&machine->alloc, 1, bytes);
    LH_CHECK(memory);
    LH_CHECK(machine->dev->ops->memory_register(machine->dev, memory, bytes, NULL) == 0);
    return memory;
}

__attribute__((unused)) static void machine_host_free(struct machine *machine, void *memory)
{
    machine->dev->ops->memory_unregister(machine->dev, memory);
    lh_free(&machine->alloc, memory);
}

/* Enqueue the assignment to = from on the compute stream. */
__attribute__((unused)) static void machine_compute(struct machine *machine, void *to,
                                                    const void *from, uint64_t bytes)
{
    if (!machine->context) {
        memcpy(to, from, bytes);
        return;
    }
    machine_enter(machine);
    uintptr_t scratch = (uintptr_t)machine->scratch;
    uint64_t half_bytes = MACHINE_SCRATCH_BYTES / 2;
    for (int i = 0; scratch && i < MACHINE_SCRATCH_ROUNDS; i++)
        LH_CHECK(machine->copy_within(scratch, scratch + half_bytes, half_bytes, machine->stream) ==
                 0);
    LH_CHECK(machine->copy_within((uintptr_t)to, (uintptr_t)from, bytes, machine->stream) == 0);
    machine_leave(machine);
}

__attribute__((unused)) static void gate_pass(void *context)
{
    struct gate *gate = context;
    LH_CHECK(pthread_mutex_lock(&gate->mutex) == 0);
    while (!gate->is_open)
        pthread_cond_wait(&gate->opened, &gate->mutex);
    LH_CHECK(pthread_mutex_unlock(&gate->mutex) == 0);
}

__attribute__((unused)) static void gate_open(struct gate *gate)
{
    LH_CHECK(pthread_mutex_lock(&gate->mutex) == 0);
    gate->is_open = true;
    LH_CHECK(pthread_cond_broadcast(&gate->opened) == 0);
    LH_CHECK(pthread_mutex_unlock(&gate->mutex) == 0);
}

/*
 * Hold the compute stream back until the gate opens. A real GPU computes for a long time instead,
 * because one thread executes all of its host calls.
 */
__attribute__((unused)) static void machine_hold(struct machine *machine, struct gate *gate)
{
    machine_enter(machine);
    uintptr_t scratch = (uintptr_t)machine->scratch;
    uint64_t half_bytes = MACHINE_SCRATCH_BYTES / 2;
    for (int i = 0; scratch && i < MACHINE_HOLD_ROUNDS * MACHINE_SCRATCH_ROUNDS; i++)
        LH_CHECK(machine->copy_within(scratch, scratch + half_bytes, half_bytes, machine->stream) ==
                 0);
    if (!scratch)
        LH_CHECK(machine->calls.host_call(machine->stream, gate_pass, gate) == 0);
    machine_leave(machine);
}

/* Open the driver for the test itself. */
__attribute__((unused)) static void machine_driver_open(struct machine *machine,
                                                        lh_dev_cuda_lookup_fn lookup, void *library)
{
    int device = 0;
#define FIND(member, name, symbol, parameters)                                                     \
    *(void **)&machine->calls.member = lookup(library, symbol);
    LH_CUDA_CALLS(FIND)
#undef FIND
    *(void **)&machine->memory_allocate = lookup(library, "cuMemAlloc_v2");
    *(void **)&machine->memory_free = lookup(library, "cuMemFree_v2");
    *(void **)&machine->copy_within = lookup(library, "cuMemcpyDtoDAsync_v2");
    LH_CHECK(machine->calls.init(0) == 0 && machine->calls.device_get(&device, 0) == 0);
    LH_CHECK(machine->calls.context_retain(&machine->context, device) == 0);
    machine_enter(machine);
    LH_CHECK(machine->calls.stream_create(&machine->stream, LH_CUDA_STREAM_NON_BLOCKING) == 0);
    machine_leave(machine);
    if (strcmp(machine->kind, "cuda") == 0)
        machine->scratch = machine_allocate(machine, MACHINE_SCRATCH_BYTES);
}

/* Stage the copies of all memory that machine->pins does not have. */
__attribute__((unused)) static void machine_stage(struct machine *machine, uint32_t copy_count)
{
    struct lh_dev *staged = NULL;
    machine->staging = lh_alloc_zeroed(&machine->alloc, 1, MACHINE_STAGING_BYTES);
    struct lh_dev_staged_opts opts = {
        .copy_count = copy_count,
        .waker = &machine->waker,
        .clock = &machine->clock,
        .pins = &machine->pins,
        .memory = {.base = machine->staging, .bytes = MACHINE_STAGING_BYTES},
    };
    machine->pins.dev = machine->dev;
    LH_CHECK(machine->staging && lh_dev_pins_add(&machine->pins, &opts.memory));
    LH_CHECK(lh_dev_staged_create(&opts, machine->dev, &machine->alloc, &staged, NULL) == 0);
    LH_CHECK(staged->ops->version == LH_DEV_OPS_VERSION && !staged->ops->is_ordered);
    machine->dev = staged;
}

__attribute__((unused)) static void machine_open(struct machine *machine, const char *kind,
                                                 struct lh_dev_opts opts)
{
    struct lh_error err = {0};
    void *library = NULL;
    int rc = 0;
    *machine = (struct machine){.kind = kind, .alloc = LH_ALLOC_INIT, .clock = lh_clock_real()};
    LH_CHECK(lh_waker_init(&machine->waker, NULL) == 0);
    opts.clock = &machine->clock;
    opts.waker = &machine->waker;
    if (strcmp(kind, "fake") == 0 || strcmp(kind, "staged") == 0) {
        fake_cuda_reset((struct fake_cuda_opts){
            .fail_after = -1, .delay_ns_max = MACHINE_DELAY_NS_MAX, .seed = 7});
        machine_driver_open(machine, fake_cuda_lookup, NULL);
        rc = lh_dev_cuda_create_from(fake_cuda_lookup, NULL, &opts, &machine->alloc, &machine->dev,
                                     &err);
    } else {
        if (strcmp(kind, "cuda") == 0) {
            library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
            LH_CHECK(library);
            machine_driver_open(machine, dlsym, library);
        }
        rc = lh_dev_create(kind, &opts, &machine->alloc, &machine->dev, &err);
    }
    if (rc < 0)
        fprintf(stderr, "%s\n", err.message);
    LH_CHECK(rc == 0 && machine->dev && machine->dev->ops->version == LH_DEV_OPS_VERSION);
    machine->inner = machine->dev;
    if (strcmp(kind, "staged") == 0)
        machine_stage(machine, opts.copy_count);
    LH_CHECK(strcmp(machine->dev->ops->name, strcmp(kind, "emu") == 0 ? "emu" : "cuda") == 0);
}

__attribute__((unused)) static void machine_dev_destroy(struct machine *machine)
{
    lh_dev_pins_remove(&machine->pins);
    machine->dev->ops->destroy(machine->dev);
    machine->dev = NULL;
}

/* Check that nothing is left. */
__attribute__((unused)) static void machine_close(struct machine *machine)
{
    if (machine->dev) /* NULL: the test has destroyed it */
        machine_dev_destroy(machine);
    lh_free(&machine->alloc, machine->staging);
    if (machine->scratch)
        machine_free(machine, machine->scratch);
    if (machine->context) {
        machine_enter(machine);
        LH_CHECK(machine->calls.stream_destroy(machine->stream) == 0);
        machine_leave(machine);
        int device = 0;
        LH_CHECK(machine->calls.device_get(&device, 0) == 0);
        LH_CHECK(machine->calls.context_release(device) == 0);
    }
    LH_CHECK(machine->alloc.live_count == 0);
    LH_CHECK(fake_cuda_live_count() == 0);
    lh_waker_deinit(&machine->waker);
}

/*
 * Poll, sleeping on the waker, until at least one copy is back; the count. It sleeps for longer
 * than the test may take, so a wake-up that is lost ends the test.
 */
__attribute__((unused)) static uint32_t machine_wait(struct machine *machine,
                                                     struct lh_dev_copy **done, uint32_t done_max)
{
    uint64_t begin_ns = lh_clock_now_ns(&machine->clock);
    for (;;) {
        lh_waker_prepare(&machine->waker);
        uint32_t count = machine->dev->ops->poll(machine->dev, done, done_max);
        if (count > 0) {
            lh_waker_cancel(&machine->waker);
            return count;
        }
        lh_waker_wait(&machine->waker, (int)(MACHINE_TIMEOUT_NS / 1000000));
        LH_CHECK(lh_clock_now_ns(&machine->clock) - begin_ns < MACHINE_TIMEOUT_NS);
    }
}

/* Until nothing is in flight; every copy well. */
__attribute__((unused)) static void machine_drain(struct machine *machine)
{
    struct lh_dev_copy *done[8];
    while (machine->dev->in_flight_count > 0) {
        uint32_t count = machine_wait(machine, done, 8);
        for (uint32_t i = 0; i < count; i++)
            LH_CHECK(done[i]->result == 0);
    }
}

/* Submit, and where the queue is full take copies back first. */
__attribute__((unused)) static void machine_submit(struct machine *machine,
                                                   struct lh_dev_copy *copy)
{
    struct lh_dev_copy *done[1];
    struct lh_error err = {0};
    int rc = 0;
    while ((rc = machine->dev->ops->submit(machine->dev, copy, &err)) == -EAGAIN) {
        LH_CHECK(err.code == 0 && machine_wait(machine, done, 1) == 1);
        LH_CHECK(done[0]->result == 0);
    }
    if (rc < 0)
        fprintf(stderr, "%s\n", err.message);
    LH_CHECK(rc == 0);
}

/* Run one copy to its end. */
__attribute__((unused)) static void machine_copy(struct machine *machine,
                                                 enum lh_dev_direction direction, void *host,
                                                 void *device, uint64_t bytes)
{
    struct lh_dev_copy copy = {
        .direction = direction, .host = host, .device = device, .bytes = bytes};
    machine_submit(machine, &copy);
    machine_drain(machine);
    LH_CHECK(copy.result == 0);
}

__attribute__((unused)) static struct lh_dev_fence *machine_fence(struct machine *machine)
{
    struct lh_dev_fence *fence = NULL;
    struct lh_error err = {0};
    LH_CHECK(machine->dev->ops->fence_create(machine->dev, &fence, &err) == 0 && fence);
    return fence;
}

__attribute__((unused)) static void machine_record(struct machine *machine,
                                                   struct lh_dev_fence *fence)
{
    LH_CHECK(machine->dev->ops->record(machine->dev, fence, machine->stream, NULL) == 0);
}

/* A fence of a copy orders nothing before the copy is back, if the device is not ordered. */
__attribute__((unused)) static void machine_await(struct machine *machine,
                                                  struct lh_dev_fence *fence)
{
    if (!machine->dev->ops->is_ordered)
        machine_drain(machine);
    LH_CHECK(machine->dev->ops->wait(machine->dev, fence, machine->stream, NULL) == 0);
}

__attribute__((unused)) static void machine_fill(void *memory, uint64_t bytes, uint64_t *seed)
{
    uint8_t *to = memory;
    for (uint64_t i = 0; i < bytes; i++)
        to[i] = (uint8_t)(i % 8 == 0 ? lh_test_random(seed) : to[i - 1] * 5U + 1U);
}

#endif
