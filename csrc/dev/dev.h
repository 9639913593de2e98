/*
 * Copies between main memory and an accelerator's memory, ordered with the accelerator's own work.
 *
 * An accelerator executes the work on a stream in order, while the CPU runs ahead. The CPU
 * therefore does not order a copy after a kernel by waiting, but with fences. A fence is recorded
 * (on the computing stream, or by a copy) and waited for (by a stream, or by later copies of a
 * direction); the CPU does not wait for it, except in "emu". Each direction is a separate queue:
 * its copies are executed in the order of submission, concurrently with the other direction and
 * with computation.
 *
 * A copy whose fence passes late holds back all later copies of its queue. An IN copy can therefore
 * be aside (is_aside): it does not hold back other IN copies, nor do they or order() hold it back.
 * Copies aside are in order among themselves. Only "cuda" has the side queue that this takes; with
 * other backends, such a copy is in order with all IN copies.
 *
 *      record(released, stream)         the last reader of a slot has been enqueued
 *      order(IN, released)              later IN copies start after that reader
 *      submit(copy, done = arrived)     this copies new bytes into the slot
 *      wait(arrived, stream)            work that is enqueued later can read the new bytes
 *
 * Backends: "emu" (emu.c) has no device. Its memory is main memory, and its computation runs on the
 * caller's thread, so that work is complete when a fence is recorded; one thread per direction
 * copies, optionally at a given speed. "cuda" (cuda.c) loads the driver at run time. A device that
 * refuses to register memory is wrapped in one that stages copies (staged.h).
 *
 * A copy of 0 bytes is a marker: it only waits for its fence, so that the owner is woken, and poll
 * returns it, when the fence has passed. Its addresses are not used. Devices that stage copies
 * (staged.h) accept no markers.
 *
 * An owner must poll after its last submit before it sleeps: poll completes what a backend has put
 * off in order to notify the owner once of several copies ("cuda").
 *
 * A device that has failed executes nothing more and does not wake the owner. An owner that sleeps
 * with copies in flight must therefore poll again after LH_DEV_SLEEP_MS_MAX: poll detects the
 * failure and returns the copies with -EIO.
 *
 * Invariants:
 *  1. Every submitted copy is returned exactly once, through poll, on the owner thread; copies of
 *     one queue are returned in the order of submission.
 *  2. A backend accesses no byte outside the copies it was given, and no byte of a copy that it has
 *     returned.
 *  3. A fence that was never recorded counts as passed. A fence that is recorded again stands for
 *     the latest record; work that already waits for the fence waits for the earlier record.
 *
 * Thread: record, wait and has_passed: any thread, but one at a time for a fence, including the
 *         submit of a copy that names the fence. Kernel functions: any thread, but a kernel must
 *         not be loaded or unloaded during another call of them. Functions of gaps: any thread. All
 *         other functions: the owner.
 */
#ifndef LH_DEV_DEV_H
#define LH_DEV_DEV_H

#include "base/alloc.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/waker.h"

#define LH_DEV_OPS_VERSION 4
#define LH_DEV_COPY_COUNT_MAX 4096
#define LH_DEV_SLEEP_MS_MAX 100
#define LH_DEV_KERNEL_COUNT_MAX 4
#define LH_DEV_GAP_KIND_COUNT 4

enum lh_dev_direction {
    LH_DEV_DIRECTION_IN = 0, /* main memory to device */
    LH_DEV_DIRECTION_OUT = 1,
};
#define LH_DEV_DIRECTION_COUNT 2

/* Defined by the backend: an event that can be recorded repeatedly. */
struct lh_dev_fence;
/* A function that the accelerator executes. */
struct lh_dev_kernel;
/* A measurement of how long a stream has nothing to execute. */
struct lh_dev_gap;

struct lh_dev_copy {
    enum lh_dev_direction direction;
    void *host;                 /* main memory; borrowed until the copy is returned */
    void *device;               /* an address that computation uses */
    uint64_t bytes;             /* 0: a marker, which needs `after` */
    bool is_aside;              /* IN: the copy is in the side queue, if there is one */
    uint64_t pause_ns;          /* emu: the time that the direction waits before the copy */
    struct lh_dev_fence *after; /* (optional) the copy starts after this fence */
    struct lh_dev_fence *done;  /* (optional) recorded after the copy */
    void *owner;                /* for the submitter; backends never read it */
    int result;                 /* 0 or -errno; valid when poll has returned the copy */
    /*
     * The start and end of the copy, as far as the backend knows them. cuda: completed_ns is when
     * the host was notified; the difference is the device's own time, without waits for fences. If
     * the driver cannot measure it, started_ns is the later of the submit and the end of the
     * previous copy, so waits for fences are included.
     */
    uint64_t started_ns;
    uint64_t completed_ns;
    struct lh_dev_copy *next; /* private to the backend */
};

struct lh_dev_opts {
    int32_t device_index; /* cuda */
    uint32_t copy_count;  /* the maximum number of copies in flight in both directions together */
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
     * the order). False: poll must return the copy before computation uses its bytes, and a wait
     * for `done` before that may order nothing.
     */
    bool is_ordered;
    int (*fence_create)(struct lh_dev *dev, struct lh_dev_fence **fence_out, struct lh_error *err);
    void (*fence_destroy)(struct lh_dev *dev, struct lh_dev_fence *fence); /* NULL is allowed */
    /* fence passes when all work enqueued on stream so far (NULL: the default) was executed. */
    int (*record)(struct lh_dev *dev, struct lh_dev_fence *fence, void *stream,
                  struct lh_error *err);
    /* Work enqueued on stream later is executed after fence. cuda: wait() itself does not block. */
    int (*wait)(struct lh_dev *dev, struct lh_dev_fence *fence, void *stream, struct lh_error *err);
    /* (optional) Whether the fence has passed, so that wait() would have no effect. */
    bool (*has_passed)(struct lh_dev *dev, struct lh_dev_fence *fence);
    /*
     * (optional) Measure how long stream has nothing to execute between two calls: because the
     * caller waits between them, or because of a wait() between them. gap_begin returns NULL if it
     * cannot measure now, which gap_end accepts. gaps_take returns how much the gaps of a kind
     * that the device has passed since the last call took together; false: not measured.
     */
    struct lh_dev_gap *(*gap_begin)(struct lh_dev *dev, void *stream);
    void (*gap_end)(struct lh_dev *dev, struct lh_dev_gap *gap, void *stream, uint32_t kind);
    bool (*gaps_take)(struct lh_dev *dev, uint32_t kind, uint64_t *ns_out);
    /*
     * (optional) Create the side queue, once, before any copy that is aside. Otherwise there is
     * none, and it costs nothing.
     */
    int (*side_create)(struct lh_dev *dev, struct lh_error *err);
    /* Copies of a direction that are submitted later, and are not aside, start after fence. */
    int (*order)(struct lh_dev *dev, enum lh_dev_direction direction, struct lh_dev_fence *fence,
                 struct lh_error *err);
    /*
     * Returns 0; -EAGAIN: copy_count copies are in flight, and err is unchanged; else the device's
     * error. On failure this copy is not in flight, but its fence done may have been recorded.
     */
    int (*submit)(struct lh_dev *dev, struct lh_dev_copy *copy, struct lh_error *err);
    uint32_t (*poll)(struct lh_dev *dev, struct lh_dev_copy **done, uint32_t done_max);
    /*
     * Register main memory that copies use (page-lock it), so that they run at full speed, and
     * unregister it before destroy. Copies of unregistered memory are correct, but submit may block
     * until the device has reached them: pins.h and staged.h. Returns 0 or -errno.
     */
    int (*memory_register)(struct lh_dev *dev, void *base, uint64_t bytes, struct lh_error *err);
    void (*memory_unregister)(struct lh_dev *dev, void *base);
    /*
     * (optional) Return the address at which the device itself reads and writes the registered
     * memory that begins at base; NULL: it cannot.
     */
    uint8_t *(*memory_address)(struct lh_dev *dev, void *base, struct lh_error *err);
    /* (optional) Wait until the device has executed all work that it was given. */
    int (*synchronize)(struct lh_dev *dev, struct lh_error *err);
    /*
     * Kernels, for devices whose memory the CPU does not compute on; otherwise the next three
     * functions are NULL. kernel_load finds a function by name in an image of code (a fatbin),
     * which is borrowed until kernel_unload. kernel_unload waits for launched work; kernel may be
     * NULL.
     */
    int (*kernel_load)(struct lh_dev *dev, const void *image, const char *name,
                       struct lh_dev_kernel **kernel_out, struct lh_error *err);
    void (*kernel_unload)(struct lh_dev *dev, struct lh_dev_kernel *kernel);
    /*
     * Enqueue a kernel on stream (NULL: the default stream), with group_count groups of
     * thread_count threads. The kernel's only argument is a struct, which is read before this
     * returns. This does not block.
     */
    int (*launch)(struct lh_dev *dev, struct lh_dev_kernel *kernel, void *stream,
                  uint32_t group_count, uint32_t thread_count, const void *argument,
                  struct lh_error *err);
    /* No copy may be in flight and no kernel may be loaded (asserted). */
    void (*destroy)(struct lh_dev *dev);
};

/* Every implementation begins with this struct. */
struct lh_dev {
    const struct lh_dev_ops *ops;
    uint32_t in_flight_count;
    char note[512]; /* what is unavailable to this backend, and why */
};

/*
 * Create a backend by name.
 *
 * Owns:   *dev_out owns its threads, streams and events; release with (*dev_out)->ops->destroy().
 * Errors: -EINVAL (opts, unknown name), -ENOMEM, -EAGAIN (no thread), cuda: -ENODEV (no driver, no
 *         such device), -EIO (an error of the driver). On error *dev_out is NULL.
 */
int lh_dev_create(const char *name, const struct lh_dev_opts *opts, struct lh_alloc *alloc,
                  struct lh_dev **dev_out, struct lh_error *err) LH_MUST_CHECK;

#endif
