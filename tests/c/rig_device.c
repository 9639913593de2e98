#include "rig_in_place.h"
#include "rig_device.h"

#include "dev_fixture.h"
#include "rig_inline.h"

#define READ_COUNT_MAX 512
#define COPY_COUNT 3 /* few, so that copies have to wait for one another */

struct read {
    void *found; /* the bytes that were read, in device memory */
    void *expected;
    uint64_t bytes;
};

struct rig_device {
    struct machine machine;
    uint8_t *memory;
    uint64_t bytes;
    uint8_t *garbage;
    uint8_t *gradients[RIG_PARAM_COUNT];
    bool is_posted[RIG_PARAM_COUNT];
    struct read reads[READ_COUNT_MAX];
    uint32_t read_count;
    const struct lh_dev_ops *real_ops;
    struct lh_dev_ops counting_ops;
    struct rig_copies_out copies_out;
};

static struct rig_device *counting; /* NULL: no accelerator counts its copies */

static uint64_t gradient_bytes(const struct rig *rig, uint32_t param)
{
    return rig->params[param].count * lh_dtype_bytes(rig_gradient_dtype(rig, param));
}

/* Let the accelerator read the rig's own memory. */
static void memory_lend(struct rig *rig, struct rig_device *device)
{
    struct lh_dev *dev = device->machine.dev;
    LH_CHECK(dev->ops->memory_register(dev, rig->memory, rig->memory_bytes, NULL) == 0);
    device->memory = dev->ops->memory_address(dev, rig->memory, NULL);
    LH_CHECK(device->memory && device->memory != rig->memory);
}

/* The engine was destroyed: the memory that it was given is freed at once. */
static void memory_take_back(struct rig *rig, struct rig_device *device)
{
    struct lh_dev *dev = device->machine.dev;
    memset(rig->memory, 0x5a, rig->memory_bytes);
    dev->ops->memory_unregister(dev, rig->memory);
}

struct rig_device *rig_device_open(struct rig *rig, const char *kind, uint64_t bytes)
{
    struct rig_device *device = calloc(1, sizeof(*device));
    uint64_t longest_bytes = 0;
    LH_CHECK(device);
    machine_open(&device->machine, rig->opts.manual ? "emu" : kind,
                 (struct lh_dev_opts){.copy_count = COPY_COUNT});
    if (rig->opts.manual) {
        machine_dev_destroy(&device->machine);
        device->machine.dev = rig_inline_dev(rig);
    } else {
        ((struct lh_dev_base *)device->machine.dev)->waker = &rig->waker;
        ((struct lh_dev_base *)device->machine.inner)->waker = &rig->waker;
    }
    if (rig->opts.units_in_memory) {
        memory_lend(rig, device);
    } else {
        device->bytes = bytes;
        device->memory = machine_allocate(&device->machine, bytes);
        memset(device->memory, 0xa5, bytes);
    }
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++) {
        uint64_t param_bytes = rig->params[i].count * sizeof(float);
        device->gradients[i] = machine_allocate(&device->machine, param_bytes);
        longest_bytes = lh_max_u64(longest_bytes, param_bytes);
    }
    device->garbage = machine_allocate(&device->machine, longest_bytes);
    memset(device->garbage, 0x5a, longest_bytes);
    return device;
}

void rig_device_begin(struct rig *rig)
{
    if (rig->device)
        lh_engine_stream_set(rig->engine, rig->device->machine.stream);
}

void rig_device_opts(struct rig *rig, struct lh_engine_opts *opts)
{
    if (!rig->device)
        return;
    opts->dev = rig->device->machine.dev;
    opts->device_memory = rig->device->memory;
    opts->device_bytes = rig->device->bytes;
    opts->copy_count = COPY_COUNT;
    opts->units_in_memory = rig->opts.units_in_memory;
}

/* Overwrite the gradients that the engine has read: their memory may be reused. */
static void gradients_sweep(struct rig *rig)
{
    struct rig_device *device = rig->device;
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++) {
        if (!device->is_posted[i] || !lh_engine_gradient_is_consumed(rig->engine, i))
            continue;
        machine_compute(&device->machine, device->gradients[i], device->garbage,
                        gradient_bytes(rig, i));
        device->is_posted[i] = false;
    }
}

void rig_device_read(struct rig *rig, uint32_t unit, const void *expected)
{
    struct rig_device *device = rig->device;
    struct read read = {.bytes = rig_in_place_param_bytes(rig, unit)};
    uintptr_t address = (uintptr_t)lh_engine_address(rig->engine, unit);
    LH_CHECK((address >= FAKE_CUDA_HOST_SHIFT) == rig->opts.units_in_memory);
    if (device->read_count == READ_COUNT_MAX)
        rig_device_check(rig);
    gradients_sweep(rig);
    read.found = machine_allocate(&device->machine, read.bytes);
    read.expected = malloc(read.bytes);
    LH_CHECK(read.found && read.expected);
    memcpy(read.expected, expected, read.bytes);
    machine_compute(&device->machine, read.found, lh_engine_address(rig->engine, unit), read.bytes);
    device->reads[device->read_count++] = read;
    machine_compute(&device->machine, lh_engine_address(rig->engine, unit) + read.bytes,
                    device->garbage, rig->opts.beside_bytes);
}

void *rig_device_gradient(struct rig *rig, uint32_t param)
{
    struct rig_device *device = rig->device;
    uint64_t bytes = gradient_bytes(rig, param);
    gradients_sweep(rig);
    machine_compute(&device->machine, device->gradients[param], device->garbage, bytes);
    machine_compute(&device->machine, device->gradients[param], rig->gradients[param], bytes);
    device->is_posted[param] = true;
    return device->gradients[param];
}

static void stream_drain(struct machine *machine)
{
    if (!machine->context)
        return;
    machine_enter(machine);
    LH_CHECK(machine->calls.stream_synchronize(machine->stream) == 0);
    machine_leave(machine);
}

void rig_device_drain(struct rig *rig)
{
    if (rig->device)
        stream_drain(&rig->device->machine);
}

struct machine *rig_device_machine(struct rig *rig)
{
    return &rig->device->machine;
}

static int counting_submit(struct lh_dev *dev, struct lh_dev_copy *copy, struct lh_error *err)
{
    if (copy->direction == LH_DEV_DIRECTION_OUT) {
        counting->copies_out.count++;
        counting->copies_out.wait_count += copy->after != NULL;
    }
    return counting->real_ops->submit(dev, copy, err);
}

const struct rig_copies_out *rig_device_count(struct rig *rig)
{
    struct rig_device *device = rig->device;
    LH_CHECK(!counting);
    counting = device;
    device->real_ops = device->machine.dev->ops;
    device->counting_ops = *device->real_ops;
    device->counting_ops.submit = counting_submit;
    device->machine.dev->ops = &device->counting_ops;
    return &device->copies_out;
}

void rig_device_check(struct rig *rig)
{
    struct rig_device *device = rig->device;
    stream_drain(&device->machine);
    for (uint32_t i = 0; i < device->read_count; i++) {
        struct read *read = &device->reads[i];
        LH_CHECK(memcmp(read->found, read->expected, read->bytes) == 0);
        machine_free(&device->machine, read->found);
        free(read->expected);
    }
    device->read_count = 0;
}

void rig_device_close(struct rig *rig)
{
    struct rig_device *device = rig->device;
    if (!device)
        return;
    /*
     * As in torch, the device's memory is freed with the device, even if something still has to be
     * read.
     */
    if (rig->opts.units_in_memory)
        memory_take_back(rig, device);
    machine_dev_destroy(&device->machine);
    counting = counting == device ? NULL : counting;
    memset(device->memory, 0x5a, device->bytes);
    rig_device_check(rig);
    for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++)
        machine_free(&device->machine, device->gradients[i]);
    machine_free(&device->machine, device->garbage);
    if (device->bytes > 0)
        machine_free(&device->machine, device->memory);
    machine_close(&device->machine);
    free(device);
    rig->device = NULL;
}
