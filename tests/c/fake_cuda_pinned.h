/*
 * Part of fake_cuda.c, which includes it after begin() and unlock(): main memory that is registered
 * (page-locked), and how much of it may be.
 */
#ifndef FAKE_CUDA_PINNED_H
#define FAKE_CUDA_PINNED_H

static struct {
    const uint8_t *base; /* NULL: unused */
    size_t bytes;
} regions[REGION_COUNT_MAX]; /* registered main memory */
static uint64_t pageable_count;
static bool is_in(const uint8_t *address, int region)
{
    return address >= regions[region].base &&
           address < regions[region].base + regions[region].bytes;
}

/* Begin a copy from or to main memory. */
static unsigned begin_copy(const void *host, size_t bytes)
{
    unsigned result = begin(true);
    const uint8_t *first = host;
    int index = 0;
    while (index < REGION_COUNT_MAX && !is_in(first, index) && !is_in(first + bytes - 1, index))
        index++;
    if (result != 0)
        return result;
    if (index == REGION_COUNT_MAX)
        pageable_count++;
    else if (!is_in(first, index) || !is_in(first + bytes - 1, index))
        return INVALID_VALUE;
    return 0;
}

static int region_index(const void *base)
{
    int index = 0;
    while (index < REGION_COUNT_MAX && regions[index].base != base)
        index++;
    return index;
}

/* Whether a region may be registered: 0, or the driver's error. */
static unsigned region_check(const uint8_t *base, size_t bytes)
{
    uint64_t registered_bytes = bytes;
    for (int i = 0; i < REGION_COUNT_MAX; i++) {
        if (!regions[i].base)
            continue;
        registered_bytes += regions[i].bytes;
        if (base < regions[i].base + regions[i].bytes && regions[i].base < base + bytes)
            return ALREADY_REGISTERED;
    }
    bool is_limited = opts.register_bytes_max > 0;
    return is_limited && registered_bytes > opts.register_bytes_max ? LH_CUDA_OUT_OF_MEMORY : 0;
}

static unsigned fake_host_register(void *base, size_t bytes, unsigned flags)
{
    unsigned result = begin(true);
    if (result == 0 && (!base || bytes == 0 || flags != LH_CUDA_REGISTER_PORTABLE))
        result = INVALID_VALUE;
    if (result == 0)
        result = region_check(base, bytes);
    if (result == 0) {
        int index = region_index(NULL);
        LH_CHECK(index < REGION_COUNT_MAX);
        regions[index].base = base;
        regions[index].bytes = bytes;
    }
    return unlock(result);
}

static unsigned fake_host_address(unsigned long long *address, void *base, unsigned flags)
{
    unsigned result = begin(true);
    if (result == 0 && (!base || region_index(base) == REGION_COUNT_MAX || flags != 0))
        result = INVALID_VALUE;
    *address = result == 0 ? (uintptr_t)base + FAKE_CUDA_HOST_SHIFT : 0;
    return unlock(result);
}

static unsigned fake_host_unregister(void *base)
{
    lock();
    int index = region_index(base);
    LH_CHECK(pushed_count > 0 && base && index < REGION_COUNT_MAX);
    regions[index].base = NULL;
    regions[index].bytes = 0;
    return unlock(0);
}

uint64_t fake_cuda_pageable_count(void)
{
    lock();
    uint64_t count = pageable_count;
    unlock(0);
    return count;
}

void fake_cuda_register_limit(uint64_t bytes_max)
{
    lock();
    opts.register_bytes_max = bytes_max;
    unlock(0);
}

#endif
