/*
 * Copies between main memory and an accelerator's memory, ordered with the accelerator's own work.
 *
 * An accelerator executes the work on a stream in order, while the CPU runs ahead. The CPU
 * therefore does not order a copy after a kernel by waiting, but with fences. A fence is recorded
 * (on the computing stream, or by a copy) and waited for (by a stream, or by later copies of a
 * direction); the CPU never waits for it. Each direction is a queue of its own: its copies are
 * executed in the order of submission, concurrently with the other direction and with computation.
 *
 *      record(released, stream)         the slot's last reader is enqueued
 *      order(IN, released)              later copies in start after it
 *      submit(copy, done = arrived)     the slot's new bytes
 *      wait(arrived, stream)            work enqueued from here on reads them
 *
 * Backends: "emu" (emu.c) has no device. Its memory is main memory, and its computation runs on the
 * caller's thread, so that work is complete when a fence is recorded; one thread per direction
 * copies, optionally at a given speed. "cuda" (cuda.c) loads the driver at run time.
 *
 * A device that has failed executes nothing more and wakes nobody. An owner that sleeps with copies
 * in flight must therefore poll again after LH_DEV_SLEEP_MS_MAX: poll detects the failure and
 * returns the copies with -EIO.
 *
 * Invariants:
 *  1. Every submitted copy is returned exactly once, through poll, on the owner thread; copies of
 *     one direction are returned in the order of submission.
 *  2. A backend accesses no byte outside the copies it was given, and no byte of a copy that it has
 *     returned.
 *  3. A fence that was never recorded counts as passed. If it is recorded again, it stands for the
 *     latest record; whatever already waits for it waits for what it stood for at that time.
 *
 * Thread: record and wait: any thread, but one at a time for a fence, including the submit of a
 *         copy that names it. Kernels: any thread, but not while a kernel is loaded or unloaded.
 *         Everything else: the owner.
 */
#ifndef LH_DEV_DEV_H
#define LH_DEV_DEV_H

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/waker.h"

#define LH_DEV_OPS_VERSION 2
#define LH_DEV_COPY_COUNT_MAX 4096
#define LH_DEV_SLEEP_MS_MAX 100
#define LH_DEV_KERNEL_COUNT_MAX 4

enum lh_dev_direction {
    LH_DEV_DIRECTION_IN = 0, /* main memory to device */
    LH_DEV_DIRECTION_OUT = 1,
};
#define LH_DEV_DIRECTION_COUNT 2

/* Defined by the backend: an event that can be recorded repeatedly. */
struct lh_dev_fence;
/* A function that the accelerator executes. */
struct lh_dev_kernel;

struct lh_dev_copy {
    enum lh_dev_direction direction;
    void *host;   /* main memory; borrowed until the copy is returned */
    void *device; /* an address that computation uses */
    uint64_t bytes;
    uint64_t pause_ns;          /* emu: how long the lane waits before the copy */
    struct lh_dev_fence *after; /* (optional) the copy starts after this fence */
    struct lh_dev_fence *done;  /* (optional) recorded after the copy */
    void *owner;                /* for the submitter; never read here */
    int result;                 /* 0 or -errno, valid once polled */
    /*
     * The duration of the copy, as far as the backend knows it. cuda: started_ns is the later of
     * the submit and the end of the previous copy, so it includes waiting for fences.
     */
    uint64_t started_ns;
    uint64_t completed_ns;
    struct lh_dev_copy *next; /* private to the backend */
};

struct lh_dev_opts {
    int32_t device_index; /* cuda */
    uint32_t copy_count;  /* the most copies in flight, both directions together */
    uint64_t link_bytes_per_s[LH_DEV_DIRECTION_COUNT]; /* emu: speed of a direction; 0: memcpy's */
    struct lh_waker *waker;       /* woken after completions; borrowed until destroy; may be NULL */
    const struct lh_clock *clock; /* borrowed until destroy */
};

struct lh_dev;

struct lh_dev_ops {
    uint32_t version; /* LH_DEV_OPS_VERSION */
    const char *name; /* "emu", "cuda" */
    /*
     * True: a stream may wait for a copy's `done` before the copy has finished (the device ensures
     * the order). False: poll must return the copy before computation uses its bytes.
     */
    bool is_ordered;
    int (*fence_create)(struct lh_dev *dev, struct lh_dev_fence **fence_out, struct lh_error *err);
    void (*fence_destroy)(struct lh_dev *dev, struct lh_dev_fence *fence); /* NULL is allowed */
    /* fence passes when everything enqueued on stream (NULL: the default one) has been executed. */
    int (*record)(struct lh_dev *dev, struct lh_dev_fence *fence, void *stream,
                  struct lh_error *err);
    /* Work enqueued on stream from here on is executed after fence. Does not block. */
    int (*wait)(struct lh_dev *dev, struct lh_dev_fence *fence, void *stream, struct lh_error *err);
    /* Copies of a direction that are submitted from here on start after fence. */
    int (*order)(struct lh_dev *dev, enum lh_dev_direction direction, struct lh_dev_fence *fence,
                 struct lh_error *err);
    /*
     * Returns 0; -EAGAIN: copy_count are in flight, and err is unchanged; else the device's error.
     * On failure nothing was taken and nothing is in flight; done may have been recorded.
     */
    int (*submit)(struct lh_dev *dev, struct lh_dev_copy *copy, struct lh_error *err);
    uint32_t (*poll)(struct lh_dev *dev, struct lh_dev_copy **done, uint32_t done_max);
    /*
     * Register main memory that copies use (page-lock it), so that they run at full speed, and
     * unregister it before destroy. Copies of unregistered memory are slow, but correct. -errno: it
     * failed; err says why.
     */
    int (*memory_register)(struct lh_dev *dev, void *base, uint64_t bytes, struct lh_error *err);
    void (*memory_unregister)(struct lh_dev *dev, void *base);
    /*
     * Kernels, for devices whose memory the CPU does not compute on; otherwise all three are NULL.
     * load finds a function by name in an image of code (a fatbin), which is borrowed until unload.
     * unload waits for launched work; a NULL kernel is allowed.
     */
    int (*kernel_load)(struct lh_dev *dev, const void *image, const char *name,
                       struct lh_dev_kernel **kernel_out, struct lh_error *err);
    void (*kernel_unload)(struct lh_dev *dev, struct lh_dev_kernel *kernel);
    /*
     * Enqueue a kernel on stream (NULL: the default one): group_count groups of thread_count
     * threads. Its only argument is a struct that is read before this returns. Does not block.
     */
    int (*launch)(struct lh_dev *dev, struct lh_dev_kernel *kernel, void *stream,
                  uint32_t group_count, uint32_t thread_count, const void *argument,
                  struct lh_error *err);
    /* No copy may be in flight and no kernel may be loaded (asserted). */
    void (*destroy)(struct lh_dev *dev);
};

/* The first member of every implementation. */
struct lh_dev {
    const struct lh_dev_ops *ops;
    uint32_t in_flight_count;
    char note[256]; /* what is unavailable to this backend, and why */
};

/*
 * Create a backend by name.
 *
 * Owns:   *dev_out owns its threads, streams and events; release with (*dev_out)->ops->destroy().
 * Errors: -EINVAL (opts, unknown name), -ENOMEM, -EAGAIN (no thread), cuda: -ENODEV (no driver, no
 *         such device), -EIO (an error of the driver). *dev_out is NULL then.
 */
int lh_dev_create(const char *name, const struct lh_dev_opts *opts, struct lh_alloc *alloc,
                  struct lh_dev **dev_out, struct lh_error *err) LH_MUST_CHECK;

/* The names of the backends of this build, NULL-terminated. */
const char *const *lh_dev_names(void);

#endif
