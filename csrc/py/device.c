/*
 * The accelerator that a session computes on: creation, registered main memory, torch's streams,
 * destruction.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "dev/staged.h"
#include "py/lhpy.h"

/* The least staging memory, of which all other sizes are multiples: slots of 4 KiB. */
#define STAGING_BYTES_MIN (LH_DEV_DIRECTION_COUNT * LH_DEV_STAGED_SLOT_COUNT * UINT64_C(4096))

static struct lh_clock real_clock; /* the backends borrow it for life; it has no state */

static int memory_make(struct lhpy_core *core, const struct lhpy_device_opts *opts,
                       struct lh_error *err)
{
    if (core->device_memory) {
        core->device_base =
            (uint8_t *)core->device_memory->tensor.data + core->device_memory->tensor.byte_offset;
        return 0;
    }
    if (opts->is_unified)
        return 0; /* lhpy_device_find() finds it */
    struct lh_arena_opts arena_opts = {.bytes = opts->bytes, .numa_node = -1};
    LH_TRY(lh_arena_create(&arena_opts, &core->alloc, &core->device_arena, err));
    core->device_base = core->device_arena->base;
    return 0;
}

int lhpy_device_make(struct lhpy_core *core, const struct lhpy_device_opts *opts,
                     struct lh_error *err)
{
    real_clock = lh_clock_real();
    core->device_type = LHPY_DL_DEVICE_CPU;
    if (strcmp(opts->name, "cpu") == 0)
        return 0;
    struct lh_dev_opts dev_opts = {
        .device_index = opts->index,
        .copy_count = LHPY_COPY_COUNT,
        .waker = &core->waker,
        .clock = &real_clock,
    };
    memcpy(dev_opts.link_bytes_per_s, opts->link_bytes_per_s, sizeof(dev_opts.link_bytes_per_s));
    LH_TRY(lh_dev_create(opts->name, &dev_opts, &core->alloc, &core->dev, err));
    LH_TRY(memory_make(core, opts, err));
    if (strcmp(opts->name, "cuda") == 0) {
        core->device_type = LHPY_DL_DEVICE_CUDA;
        core->device_id = opts->index;
    }
    return 0;
}

/* Record in the device's note what is not registered. */
static void pins_note(struct lhpy_core *core, const struct lh_dev_buffer *staging,
                      const struct lh_dev_buffer *buffers, uint32_t count)
{
    const struct lh_dev_pins *pins = core->pins;
    uint64_t bytes = 0;
    uint64_t pinned_bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        bytes += buffers[i].bytes;
        pinned_bytes += lh_dev_pins_bytes(pins, &buffers[i]);
    }
    bool is_staging_pinned = lh_dev_pins_bytes(pins, staging) == staging->bytes;
    snprintf(core->dev->note, sizeof(core->dev->note),
             "the driver page-locks only %" PRIu64 " of the %" PRIu64
             " bytes of main memory that are copied to and from the GPU (CUDA error %" PRId64
             "); the rest is copied through %" PRIu64
             " bytes of %s memory beyond host_bytes, which "
             "is slower",
             pinned_bytes, bytes, pins->refusal.native, staging->bytes,
             is_staging_pinned ? "page-locked" : "pageable");
}

/* Register what the driver accepts, and stage copies of the rest. */
static int stage(struct lhpy_core *core, const struct lh_dev_buffer *buffers, uint32_t count,
                 struct lh_error *err)
{
    struct lh_arena_opts arena_opts = {.numa_node = -1};
    struct lh_dev *staged = NULL;
    for (uint32_t i = 0; i < count; i++)
        arena_opts.bytes += buffers[i].bytes / 4; /* a small model needs little */
    arena_opts.bytes = lh_min_u64(arena_opts.bytes + STAGING_BYTES_MIN, LH_DEV_STAGED_BYTES);
    arena_opts.bytes -= arena_opts.bytes % STAGING_BYTES_MIN;
    LH_TRY(lh_arena_create(&arena_opts, &core->alloc, &core->staging, err));
    struct lh_dev_staged_opts opts = {
        .copy_count = LHPY_COPY_COUNT,
        .waker = &core->waker,
        .clock = &real_clock,
        .pins = core->pins,
        .memory = {.base = core->staging->base, .bytes = arena_opts.bytes},
    };
    lh_dev_pins_fit(core->pins, &opts.memory, buffers, count, LH_DEV_PIN_PIECE_BYTES);
    LH_TRY(lh_dev_staged_create(&opts, core->dev, &core->alloc, &staged, err));
    core->dev = staged;
    pins_note(core, &opts.memory, buffers, count);
    return 0;
}

int lhpy_device_pin(struct lhpy_core *core, const struct lh_dev_buffer *buffers, uint32_t count,
                    struct lh_error *err)
{
    bool is_complete = true;
    if (!core->dev)
        return 0;
    core->pins = lh_alloc_zeroed(&core->alloc, 1, sizeof(*core->pins));
    if (!core->pins)
        return lh_error_set(err, -ENOMEM, "no memory for the records of registered memory");
    core->pins->dev = core->dev;
    for (uint32_t i = 0; i < count; i++)
        is_complete &= lh_dev_pins_add(core->pins, &buffers[i]);
    return is_complete ? 0 : stage(core, buffers, count, err);
}

int lhpy_device_find(struct lhpy_core *core, uint8_t *region, struct lh_error *err)
{
    const struct lh_dev_pins *pins = core->pins;
    LH_ASSERT(core->dev && pins && !core->device_base);
    if (core->staging)
        return lh_error_set(
            err, -ENOMEM,
            "the driver does not page-lock the main memory in which the GPU is to"
            " read parameters (CUDA error %" PRId64
            "): lower host_bytes, or pass debug=lohan.Debug(device_param_bytes=) to copy them",
            pins->refusal.native);
    core->device_base = core->dev->ops->memory_address(core->dev, region, err);
    return core->device_base ? 0 : err->code;
}

void lhpy_device_destroy(struct lhpy_core *core)
{
    if (core->pins)
        lh_dev_pins_remove(core->pins);
    if (core->dev)
        core->dev->ops->destroy(core->dev);
    lh_free(&core->alloc, core->pins);
    if (core->staging)
        lh_arena_destroy(core->staging, &core->alloc);
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
