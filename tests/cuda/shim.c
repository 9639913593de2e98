/*
 * csrc/dev for ctypes: a backend ("cuda" on torch's own memory and streams, or "emu"). Each
 * function answers 0 or -errno, and puts what went wrong into message (LH_ERROR_MESSAGE_BYTES).
 */
#include <string.h>

#include "base/assert.h"
#include "dev/dev.h"

#define EXPORT __attribute__((visibility("default")))
/* The maximum number of copies per direction that shim_stream keeps in flight. */
#define STREAM_DEPTH 4

EXPORT int shim_open(const char *kind, int device_index, char *message);
EXPORT int shim_register(void *base, uint64_t bytes, char *message);
EXPORT void shim_unregister(void *base);
EXPORT int shim_in(void *host, void *device, uint64_t bytes, void *stream, char *message);
EXPORT int shim_out(void *host, void *device, uint64_t bytes, void *stream, char *message);
EXPORT int shim_drain(void);
EXPORT int shim_stream(void *const *host, void *const *device, uint64_t bytes, uint32_t count,
                       uint64_t *took_ns, char *message);
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
    struct lh_dev_copy streamed[LH_DEV_DIRECTION_COUNT][STREAM_DEPTH];
} shim;

static int say(int rc, const struct lh_error *err, char *message)
{
    memcpy(message, err->message, sizeof(err->message));
    return rc;
}

int shim_open(const char *kind, int device_index, char *message)
{
    struct lh_error err = {0};
    shim.alloc = (struct lh_alloc)LH_ALLOC_INIT;
    shim.clock = lh_clock_real();
    int rc = lh_waker_init(&shim.waker, &err);
    struct lh_dev_opts opts = {.device_index = device_index,
                               .copy_count = LH_DEV_DIRECTION_COUNT * STREAM_DEPTH,
                               .waker = &shim.waker,
                               .clock = &shim.clock};
    if (rc == 0)
        rc = lh_dev_create(kind, &opts, &shim.alloc, &shim.dev, &err);
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

/*
 * Copy the same bytes count times in each direction whose host memory is not NULL, both at once;
 * took_ns: from the first submit to the end of each direction's last copy.
 */
int shim_stream(void *const *host, void *const *device, uint64_t bytes, uint32_t count,
                uint64_t *took_ns, char *message)
{
    struct lh_error err = {0};
    uint32_t submitted[LH_DEV_DIRECTION_COUNT] = {0};
    uint32_t back[LH_DEV_DIRECTION_COUNT] = {0};
    uint64_t begin_ns = lh_clock_now_ns(&shim.clock);
    int rc = 0;
    for (;;) {
        for (uint32_t i = 0; i < LH_DEV_DIRECTION_COUNT; i++)
            while (rc == 0 && host[i] && submitted[i] < count &&
                   submitted[i] - back[i] < STREAM_DEPTH) {
                struct lh_dev_copy *copy = &shim.streamed[i][submitted[i] % STREAM_DEPTH];
                *copy = (struct lh_dev_copy){.direction = (enum lh_dev_direction)i,
                                             .host = host[i],
                                             .device = device[i],
                                             .bytes = bytes};
                rc = shim.dev->ops->submit(shim.dev, copy, &err);
                submitted[i] += rc == 0;
            }
        if (shim.dev->in_flight_count == 0)
            return say(rc, &err, message);
        struct lh_dev_copy *done = NULL;
        lh_waker_prepare(&shim.waker);
        if (shim.dev->ops->poll(shim.dev, &done, 1) == 0) {
            lh_waker_wait(&shim.waker, LH_DEV_SLEEP_MS_MAX);
            continue;
        }
        lh_waker_cancel(&shim.waker);
        back[done->direction]++;
        took_ns[done->direction] = done->completed_ns - begin_ns;
        if (rc == 0 && done->result < 0)
            rc = lh_error_set(&err, done->result, "a copy of %llu bytes failed",
                              (unsigned long long)bytes);
    }
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
