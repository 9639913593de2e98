/* The driver of the late device (late.h): libcuda.so.1, made of threads. */
#define STREAM_COUNT_MAX 96
#define EVENT_COUNT_MAX (1 << 16)
#define REGION_COUNT_MAX 64
#define OP_COUNT_MAX (1 << 14)
#include "../py/fake_driver.c"

#include "driver.h"

#define EXPORTED __attribute__((visibility("default")))

EXPORTED void driver_memory(const void *base, size_t bytes, void *view)
{
    lock();
    device_base = base;
    device_bytes = bytes;
    device_view = view;
    unlock(0);
}

EXPORTED void driver_computes(struct CUstream_st *stream)
{
    lock();
    stream->computes = true;
    unlock(0);
}

EXPORTED void driver_tune(int order, size_t piece_bytes, uint64_t delay_ns_max, uint64_t seed)
{
    lock();
    opts.order = (enum fake_cuda_order)order;
    opts.piece_bytes = piece_bytes;
    opts.delay_ns_max = delay_ns_max;
    opts.seed = seed;
    for (int i = 0; i < STREAM_COUNT_MAX; i++)
        streams[i].random = seed + (uint64_t)i;
    unlock(0);
}

EXPORTED void driver_slow(uint64_t item_ns, uint64_t bytes_per_s)
{
    lock();
    compute_ns = item_ns;
    copy_bytes_per_s = bytes_per_s;
    unlock(0);
}

EXPORTED void driver_allow(int64_t count)
{
    fake_cuda_allow(count);
}

EXPORTED void driver_register_limit(uint64_t bytes_max)
{
    fake_cuda_register_limit(bytes_max);
}

EXPORTED uint64_t driver_pageable_count(void)
{
    return fake_cuda_pageable_count();
}

EXPORTED void *driver_seen(void *address)
{
    const void *at = seen(address);
    LH_CHECK(at != address); /* otherwise it is an address of the host */
    return (void *)(uintptr_t)at;
}

EXPORTED bool driver_has_passed(struct CUevent_st *event)
{
    lock();
    bool has_passed = !event->stream || event->stream->executed_count >= event->number;
    unlock(0);
    return has_passed;
}
