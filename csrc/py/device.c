/* The accelerator that a session computes on: creation, torch's streams, destruction. */
#include <string.h>

#include "base/assert.h"
#include "py/lhpy.h"

static int memory_make(struct lhpy_core *core, const struct lhpy_device_opts *opts,
                       struct lh_error *err)
{
    if (core->device_memory) {
        core->device_base =
            (uint8_t *)core->device_memory->tensor.data + core->device_memory->tensor.byte_offset;
        return 0;
    }
    struct lh_arena_opts arena_opts = {.bytes = opts->bytes, .numa_node = -1};
    LH_TRY(lh_arena_create(&arena_opts, &core->alloc, &core->device_arena, err));
    core->device_base = core->device_arena->base;
    return 0;
}

int lhpy_device_make(struct lhpy_core *core, const struct lhpy_device_opts *opts, const void *base,
                     uint64_t bytes, struct lh_error *err)
{
    static struct lh_clock clock; /* the backend borrows it for life; it has no state */
    clock = lh_clock_real();
    core->device_type = LHPY_DL_DEVICE_CPU;
    if (strcmp(opts->name, "cpu") == 0)
        return 0;
    struct lh_dev_opts dev_opts = {
        .device_index = opts->index,
        .copy_count = LHPY_COPY_COUNT,
        .waker = &core->waker,
        .clock = &clock,
    };
    memcpy(dev_opts.link_bytes_per_s, opts->link_bytes_per_s, sizeof(dev_opts.link_bytes_per_s));
    LH_TRY(lh_dev_create(opts->name, &dev_opts, &core->alloc, &core->dev, err));
    LH_TRY(memory_make(core, opts, err));
    if (strcmp(opts->name, "cuda") == 0) {
        core->device_type = LHPY_DL_DEVICE_CUDA;
        core->device_id = opts->index;
    }
    struct lh_error slow = {0}; /* ignored: after a failure, copies are slower, but correct */
    if (core->dev->ops->memory_register(core->dev, (void *)(uintptr_t)base, bytes, &slow) == 0)
        core->is_registered = true;
    return 0;
}

void lhpy_device_destroy(struct lhpy_core *core, const void *base)
{
    if (core->dev) {
        if (core->is_registered)
            core->dev->ops->memory_unregister(core->dev, (void *)(uintptr_t)base);
        core->dev->ops->destroy(core->dev);
    }
    if (core->device_arena)
        lh_arena_destroy(core->device_arena, &core->alloc);
    if (core->device_memory)
        core->device_memory->deleter(core->device_memory);
}

void *lhpy_device_stream(const struct lhpy_engine *self)
{
    const struct lhpy_core *core = self->core;
    void *stream = NULL;
    if (core->device_type == LHPY_DL_DEVICE_CUDA &&
        lhpy_exchange()->current_work_stream(core->device_type, core->device_id, &stream) < 0) {
        PyErr_Clear();
        stream = NULL; /* the default stream */
    }
    return stream;
}

/* Return the previous stream. */
void *lhpy_device_stream_note(struct lhpy_engine *self)
{
    return lh_engine_stream_set(self->core->engine, lhpy_device_stream(self));
}
