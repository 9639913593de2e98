/*
 * Copies between main memory and an accelerator's memory, ordered with the accelerator's own work.
 *
 * An accelerator executes what is enqueued on a stream in order, while the CPU runs ahead. So
 * "this copy comes after that kernel" cannot be said by waiting: it is said with fences. A fence is
 * recorded (on the stream that computes, or by a copy) and waited for (by a stream, or by a
 * direction's later copies); the CPU waits for none of it. Each direction is a queue of its own:
 * its copies are executed in the order of their submits, beside the other direction and beside
 * computation.
 *
 *      record(released, stream)         the slot's last reader is enqueued
 *      order(IN, released)              later copies in start behind it
 *      submit(copy, done = arrived)     the slot's new bytes
 *      wait(arrived, stream)            what is enqueued from here on reads them
 *
 * Backends: "emu" (emu.c) has no device: its memory is main memory, its computation is the
 * caller's thread, whose work is over when it records a fence; a thread a direction copies, at a
 * given speed if asked to. "cuda" (cuda.c) loads the driver at run time.
 *
 * A device that fails executes nothing more and wakes nobody. So whoever sleeps with copies in
 * flight looks again after LH_DEV_SLEEP_MS_MAX: poll finds out, and gives them back with -EIO.
 *
 * Invariants:
 *  1. A copy submitted comes back exactly once, through poll, on the owner thread; copies of one
 *     direction in the order of their submits.
 *  2. A backend touches no byte outside the copies it was given, and none of a copy that is back.
 *  3. A fence that was never recorded counts as passed; recorded again, it stands for the last
 *     time. What waits for it already waits for what it stood for then.
 *
 * Thread: record and wait: any, one at a time for one fence, the submit of a copy that names it
 *         included. Kernels: any that is not there while one is loaded or unloaded. Everything
 *         else: the owner.
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

/* The backend's: an event that is recorded again and again. */
struct lh_dev_fence;
/* A function that the accelerator executes. */
struct lh_dev_kernel;

struct lh_dev_copy {
    enum lh_dev_direction direction;
    void *host;   /* main memory; borrowed until the copy comes back */
    void *device; /* an address that computation uses */
    uint64_t bytes;
    uint64_t pause_ns;          /* emu: the lane does nothing for so long first */
    struct lh_dev_fence *after; /* (optional) the copy starts behind it */
    struct lh_dev_fence *done;  /* (optional) recorded behind the copy */
    void *owner;                /* the submitter's; never read here */
    int result;                 /* 0 or -errno, valid once polled */
    /*
     * Of the copy itself, as far as the backend knows. cuda: the later one of its submit and the
     * end of the copy before it, so that waiting for fences counts in.
     */
    uint64_t started_ns;
    uint64_t completed_ns;
    struct lh_dev_copy *next; /* private to the backend */
};

struct lh_dev_opts {
    int32_t device_index; /* cuda */
    uint32_t copy_count;  /* in flight at once, both directions together */
    uint64_t link_bytes_per_s[LH_DEV_DIRECTION_COUNT]; /* emu: speed of a direction; 0: memcpy's */
    struct lh_waker *waker;       /* woken after completions; borrowed until destroy; may be NULL */
    const struct lh_clock *clock; /* borrowed until destroy */
};

struct lh_dev;

struct lh_dev_ops {
    uint32_t version; /* LH_DEV_OPS_VERSION */
    const char *name; /* "emu", "cuda" */
    /*
     * True: a copy's `done` may be waited for by a stream before the copy is over (the device keeps
     * the order). False: whoever computes must see the copy come back first.
     */
    bool is_ordered;
    int (*fence_create)(struct lh_dev *dev, struct lh_dev_fence **fence_out, struct lh_error *err);
    void (*fence_destroy)(struct lh_dev *dev, struct lh_dev_fence *fence); /* NULL is allowed */
    /* fence passes when all that stream (NULL: the default one) holds so far is executed. */
    int (*record)(struct lh_dev *dev, struct lh_dev_fence *fence, void *stream,
                  struct lh_error *err);
    /* What stream is given from here on is executed behind fence. Does not wait. */
    int (*wait)(struct lh_dev *dev, struct lh_dev_fence *fence, void *stream, struct lh_error *err);
    /* Copies of a direction that are submitted from here on start behind fence. */
    int (*order)(struct lh_dev *dev, enum lh_dev_direction direction, struct lh_dev_fence *fence,
                 struct lh_error *err);
    /*
     * 0; -EAGAIN: copy_count are in flight, err is untouched; else the device's error. On failure
     * nothing was taken and nothing is under way; done may have been recorded.
     */
    int (*submit)(struct lh_dev *dev, struct lh_dev_copy *copy, struct lh_error *err);
    uint32_t (*poll)(struct lh_dev *dev, struct lh_dev_copy **done, uint32_t done_max);
    /*
     * Announce main memory that copies use, so that they run at full speed (page-locked), and take
     * it back before destroy. Without it a copy is slow, not wrong. -errno: not possible; err says
     * why.
     */
    int (*memory_register)(struct lh_dev *dev, void *base, uint64_t bytes, struct lh_error *err);
    void (*memory_unregister)(struct lh_dev *dev, void *base);
    /*
     * Kernels, where the CPU does not compute on the device's memory; NULL, all three, where it
     * does. load finds a function by its name in an image of code (a fatbin), which is borrowed
     * until unload. unload waits for what was launched; NULL is allowed.
     */
    int (*kernel_load)(struct lh_dev *dev, const void *image, const char *name,
                       struct lh_dev_kernel **kernel_out, struct lh_error *err);
    void (*kernel_unload)(struct lh_dev *dev, struct lh_dev_kernel *kernel);
    /*
     * Enqueue on stream (NULL: the default one) a kernel of one argument, a struct that is read
     * before this returns: group_count groups of thread_count threads. Does not wait.
     */
    int (*launch)(struct lh_dev *dev, struct lh_dev_kernel *kernel, void *stream,
                  uint32_t group_count, uint32_t thread_count, const void *argument,
                  struct lh_error *err);
    /* No copy may be in flight, no kernel be loaded: asserted. */
    void (*destroy)(struct lh_dev *dev);
};

/* First member of every implementation. */
struct lh_dev {
    const struct lh_dev_ops *ops;
    uint32_t in_flight_count;
    char note[256]; /* what this backend could not have and why */
};

/*
 * Make one named backend.
 *
 * Owns:   *dev_out owns its threads, streams and events; release with (*dev_out)->ops->destroy().
 * Errors: -EINVAL (opts, unknown name), -ENOMEM, -EAGAIN (no thread), cuda: -ENODEV (no driver, no
 *         such device), -EIO (what the driver said). *dev_out is NULL then.
 */
int lh_dev_create(const char *name, const struct lh_dev_opts *opts, struct lh_alloc *alloc,
                  struct lh_dev **dev_out, struct lh_error *err) LH_MUST_CHECK;

/* Names of the backends of this build, NULL-terminated. */
const char *const *lh_dev_names(void);

#endif
