/*
 * csrc/dev for ctypes: the CUDA backend on torch's own memory and streams. Each function answers 0
 * or -errno, and puts what went wrong into message (LH_ERROR_MESSAGE_BYTES).
 */
#include <string.h>

#include "base/assert.h"
#include "dev/dev.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT int shim_open(int device_index, char *message);
EXPORT int shim_register(void *base, uint64_t bytes, char *message);
EXPORT void shim_unregister(void *base);
EXPORT int shim_in(void *host, void *device, uint64_t bytes, void *stream, char *message);
EXPORT int shim_out(void *host, void *device, uint64_t bytes, void *stream, char *message);
EXPORT int shim_drain(void);
EXPORT void shim_close(void);

static struct {
    struct lh_alloc alloc;
    struct lh_clock clock;
    struct lh_waker waker;
    struct lh_dev *dev;
    struct lh_dev_fence *arrived;
    struct lh_dev_fence *computed;
    struct lh_dev_copy in;
    struct lh_dev_copy out;
} shim;

static int say(int rc, const struct lh_error *err, char *message)
{
    memcpy(message, err->message, sizeof(err->message));
    return rc;
}

int shim_open(int device_index, char *message)
{
    struct lh_error err = {0};
    shim.alloc = (struct lh_alloc)LH_ALLOC_INIT;
    shim.clock = lh_clock_real();
    int rc = lh_waker_init(&shim.waker, &err);
    struct lh_dev_opts opts = {
        .device_index = device_index, .copy_count = 2, .waker = &shim.waker, .clock = &shim.clock};
    if (rc == 0)
        rc = lh_dev_create("cuda", &opts, &shim.alloc, &shim.dev, &err);
    if (rc == 0)
        rc = shim.dev->ops->fence_create(shim.dev, &shim.arrived, &err);
    if (rc == 0)
        rc = shim.dev->ops->fence_create(shim.dev, &shim.computed, &err);
    return say(rc, &err, message);
}

int shim_register(void *base, uint64_t bytes, char *message)
{
    struct lh_error err = {0};
    return say(shim.dev->ops->memory_register(shim.dev, base, bytes, &err), &err, message);
}

void shim_unregister(void *base)
{
    shim.dev->ops->memory_unregister(shim.dev, base);
}

/* Copy in; what stream is given from here on reads the new bytes. */
int shim_in(void *host, void *device, uint64_t bytes, void *stream, char *message)
{
    struct lh_error err = {0};
    shim.in = (struct lh_dev_copy){.direction = LH_DEV_DIRECTION_IN,
                                   .host = host,
                                   .device = device,
                                   .bytes = bytes,
                                   .after = shim.computed,
                                   .done = shim.arrived};
    int rc = shim.dev->ops->record(shim.dev, shim.computed, stream, &err);
    if (rc == 0)
        rc = shim.dev->ops->submit(shim.dev, &shim.in, &err);
    if (rc == 0)
        rc = shim.dev->ops->wait(shim.dev, shim.arrived, stream, &err);
    return say(rc, &err, message);
}

/* Copy out what stream has computed. */
int shim_out(void *host, void *device, uint64_t bytes, void *stream, char *message)
{
    struct lh_error err = {0};
    shim.out = (struct lh_dev_copy){.direction = LH_DEV_DIRECTION_OUT,
                                    .host = host,
                                    .device = device,
                                    .bytes = bytes,
                                    .after = shim.computed};
    int rc = shim.dev->ops->record(shim.dev, shim.computed, stream, &err);
    if (rc == 0)
        rc = shim.dev->ops->submit(shim.dev, &shim.out, &err);
    return say(rc, &err, message);
}

/* Until every copy is back; the first error among them. */
int shim_drain(void)
{
    int rc = 0;
    while (shim.dev->in_flight_count > 0) {
        struct lh_dev_copy *done = NULL;
        lh_waker_prepare(&shim.waker);
        if (shim.dev->ops->poll(shim.dev, &done, 1) == 0)
            lh_waker_wait(&shim.waker, LH_DEV_SLEEP_MS_MAX);
        else if (rc == 0)
            rc = done->result;
    }
    lh_waker_cancel(&shim.waker);
    return rc;
}

void shim_close(void)
{
    if (shim.dev) {
        shim.dev->ops->fence_destroy(shim.dev, shim.computed);
        shim.dev->ops->fence_destroy(shim.dev, shim.arrived);
        shim.dev->ops->destroy(shim.dev);
    }
    lh_waker_deinit(&shim.waker);
    LH_ASSERT(shim.alloc.live_count == 0);
    memset(&shim, 0, sizeof(shim));
}
