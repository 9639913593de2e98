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
#include <stdint.h>

#define FAKE_CUDA_DEVICE_COUNT 2
/* The only image of kernels that it knows: it has those of cuda/, which the CPU executes. */
extern const char fake_cuda_image[];

#define FAKE_CUDA_ERROR 999 /* what a call that is told to fail answers: CUDA_ERROR_UNKNOWN */

struct fake_cuda_opts {
    int64_t fail_after;    /* -1: never; else fallible calls that still succeed, then one fails */
    const char *missing;   /* (optional) a symbol that this driver does not export */
    uint64_t delay_ns_max; /* before each thing that a stream executes */
    uint64_t seed;
    unsigned init_result; /* what cuInit answers */
};

/* Start anew. Nothing may be alive. */
void fake_cuda_reset(struct fake_cuda_opts opts);

/* Contexts, streams, events, registered regions, modules and allocations, contexts pushed here. */
uint64_t fake_cuda_live_count(void);

/* Fallible calls since reset. */
int64_t fake_cuda_call_count(void);

/* From now on the fallible call behind count others fails; -1: none. */
void fake_cuda_fail_after(int64_t count);

/* Nothing is executed any more, and every call says why. */
void fake_cuda_break(void);

/* Streams do not begin anything until the next call with false. */
void fake_cuda_pause(bool paused);

/* dlsym's shape; library is ignored. */
void *fake_cuda_lookup(void *library, const char *symbol);

#endif
