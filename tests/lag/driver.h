/*
 * What driver.c exports besides the functions of libcuda.so.1. It is tests/py/fake_driver.c with
 * large tables, and with settings that a test can change while it is in use.
 */
#ifndef LAG_DRIVER_H
#define LAG_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "dev/cuda_abi.h"

/* The addresses from base on are the device's memory, which this process sees at view. */
void driver_memory(const void *base, size_t bytes, void *view);

/* Where this process sees an address of the device: its memory, or registered main memory. */
void *driver_seen(void *address);

/* A stream whose work is computation, as the default stream's is. */
void driver_computes(struct CUstream_st *stream);

/*
 * The order in which streams may proceed (enum fake_cuda_order), the bytes of a copy's pieces, the
 * longest delay before an item of work, and the seed of these delays.
 */
void driver_tune(int order, size_t piece_bytes, uint64_t delay_ns_max, uint64_t seed);

/* Each item of computation takes this much longer; copies move this many bytes a second, 0: any. */
void driver_slow(uint64_t item_ns, uint64_t bytes_per_s);

/* Streams that compute may execute this many further host calls; -1: any number. */
void driver_allow(int64_t count);

/* At most this many bytes of main memory can be registered; 0: no limit; 1: none can be. */
void driver_register_limit(uint64_t bytes_max);
/* The number of asynchronous copies so far whose main memory was not registered. */
uint64_t driver_pageable_count(void);

bool driver_has_passed(struct CUevent_st *event);
void driver_drain(void);
uint64_t driver_live_count(void);

#ifdef __cplusplus
}
#endif

#endif
