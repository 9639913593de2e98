/*
 * A CUDA driver without a GPU: each stream is a thread that executes its work in order, after
 * random delays, on main memory. So work that lacks a fence will sooner or later run too early.
 *
 * It is as strict as the real driver: a call without a current context, or from a host function, is
 * refused; and it counts live objects. After fake_cuda_break() it behaves like a GPU whose context
 * is broken.
 */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAKE_CUDA_DEVICE_COUNT 2
/* The only supported image of kernels: those of cuda/, which the CPU executes. */
extern const char fake_cuda_image[];

/*
 * The device reads registered main memory at addresses that are higher by this, which no process
 * can access: code that confuses the two addresses ends the process.
 */
#define FAKE_CUDA_HOST_SHIFT (UINT64_C(1) << 54)
#define FAKE_CUDA_ERROR 999 /* the result of a call that is made to fail: CUDA_ERROR_UNKNOWN */

/*
 * Which streams go first where several could. The default stream computes. Either order is one that
 * a GPU may have, and shows work that lacks a fence: a copy that is executed too late reads or
 * writes what is no longer its own, and one that is executed too early what is not yet its own.
 */
enum fake_cuda_order {
    FAKE_CUDA_ANY,
    FAKE_CUDA_COPIES_LAST,
    FAKE_CUDA_COPIES_FIRST,
};

struct fake_cuda_opts {
    int64_t fail_after;    /* -1: never; else one fallible call fails after this many successes */
    const char *missing;   /* (optional) a symbol that this driver does not export */
    uint64_t delay_ns_max; /* before each item that a stream executes */
    uint64_t copy_ns; /* if not 0, the device's clock advances by this with each copy, only then */
    uint64_t seed;
    enum fake_cuda_order order;
    size_t piece_bytes;   /* a copy is executed in pieces of this size; 0: in one */
    unsigned init_result; /* the result of cuInit */
    /* The number of bytes that may be registered at once; 0: no limit; 1: all are refused. */
    uint64_t register_bytes_max;
};

/* Reset the driver. There must be no live objects. */
void fake_cuda_reset(struct fake_cuda_opts opts);

/*
 * The number of live contexts, streams, events, registered regions, modules and allocations, and of
 * contexts pushed on this thread.
 */
uint64_t fake_cuda_live_count(void);

/*
 * The number of copies since the reset whose main memory was not registered. The real driver's call
 * blocks for them. A copy that spans registered and other memory, or two registered regions, is
 * refused.
 */
uint64_t fake_cuda_pageable_count(void);

/* Change opts.register_bytes_max; regions that are registered remain. */
void fake_cuda_register_limit(uint64_t bytes_max);

/* Let the default stream execute this many further host calls; -1: any number. */
void fake_cuda_allow(int64_t count);

/* The number of fallible calls since the reset. */
int64_t fake_cuda_call_count(void);

/* Make a fallible call fail after count further ones; -1: none. */
void fake_cuda_fail_after(int64_t count);

/* Stop executing anything; every call returns an error from now on. */
void fake_cuda_break(void);

/* Pause streams: they begin nothing until the next call with false. */
void fake_cuda_pause(bool paused);

/* Has the signature of dlsym; library is ignored. */
void *fake_cuda_lookup(void *library, const char *symbol);

#endif
