/*
 * NVIDIA GPUs, through the driver, which is loaded at run time. The backend uses the primary
 * context, as torch's CUDA runtime does.
 *
 *      submit:  copy stream    wait(after)  copy  record(done) ---+
 *               notify stream                                     wait  host call: lane.ended + 1
 *
 * A host call in the copy stream would delay the next copy until the call has run on the CPU. Each
 * direction therefore has a second stream, which only waits for copies and makes the host calls.
 *
 * [Note: A device that fails]
 * After an error of a kernel the context is broken: the driver executes nothing more, including
 * host calls. If poll has nothing to return, it queries the notify streams. When the driver reports
 * that the context is lost, poll returns all copies in flight. A host call that is still running
 * then accesses only the lane's counter and a slot, which exist until destroy.
 *
 * Thread: the driver's callback thread runs host_call_run(), which calls no function of CUDA.
 */
#include "dev/dev_private.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "dev/cuda_abi.h"

#define DRIVER "libcuda.so.1"

struct cuda;

struct lane {
    struct cuda *cuda;
    enum lh_dev_direction direction;
    struct CUstream_st *copy_stream;
    struct CUstream_st *notify_stream;
    struct CUevent_st *copied; /* recorded after each copy whose done is NULL */
    uint64_t ended_ns;         /* the end of the last copy; used only by the callback thread */
};

struct lh_dev_kernel {
    struct CUmod_st *module; /* NULL: unused */
    struct CUfunc_st *function;
};

struct cuda {
    struct lh_dev_base base; /* must be first: callers have a pointer to it */
    struct lh_cuda_calls calls;
    struct lane lanes[LH_DEV_DIRECTION_COUNT];
    struct lh_dev_kernel kernels[LH_DEV_KERNEL_COUNT_MAX];
    struct CUctx_st *context; /* NULL: not retained */
    int device;
    unsigned lost_result; /* the driver's error when the context broke; 0: the context works */
    bool was_refused;     /* entering the context failed at the last poll that tried it */
};

/* Advice about an error of the driver, or "". */
static const char *way_out(unsigned result)
{
    if (result == LH_CUDA_OUT_OF_MEMORY)
        return "; free memory of the GPU or of the host (nvidia-smi shows who holds it)";
    if (result == LH_CUDA_NO_DEVICE || result == LH_CUDA_INVALID_DEVICE)
        return "; see nvidia-smi and CUDA_VISIBLE_DEVICES, or device='cpu'";
    if (result == LH_CUDA_INVALID_IMAGE || result == LH_CUDA_NO_BINARY ||
        result == LH_CUDA_UNSUPPORTED_PTX)
        return "; the kernels were compiled for other GPUs or newer drivers: build lohan with the "
               "CUDA toolkit of this driver, or device='cpu'";
    if (result == LH_CUDA_ILLEGAL_ADDRESS ||
        (result >= LH_CUDA_HARDWARE_STACK_ERROR && result <= LH_CUDA_LAUNCH_FAILED))
        return "; an earlier kernel may have caused it: CUDA_LAUNCH_BLOCKING=1 shows which one";
    return "";
}

static int code_of(unsigned result)
{
    if (result == LH_CUDA_OUT_OF_MEMORY)
        return -ENOMEM;
    if (result == LH_CUDA_NO_DEVICE || result == LH_CUDA_INVALID_DEVICE)
        return -ENODEV;
    return -EIO;
}

/* Return 0, or record the driver's error for the call that format describes. */
LH_PRINTF(4, 5)
static int judge(const struct cuda *cuda, unsigned result, struct lh_error *err, const char *format,
                 ...)
{
    if (result == 0)
        return 0;
    char call[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(call, sizeof(call), format, arguments);
    va_end(arguments);
    const char *name = NULL;
    const char *text = NULL;
    if (cuda->calls.error_name(result, &name) != 0 || !name)
        name = "an error without a name";
    if (cuda->calls.error_text(result, &text) != 0 || !text)
        text = "the driver gives no description";
    int code = lh_error_set(err, code_of(result), "%s: %s (%u: %s)%s", call, name, result, text,
                            way_out(result));
    if (err)
        err->native = (int64_t)result;
    return code;
}

/* Make the context current on this thread, whose current context may be another one or none. */
static int enter(const struct cuda *cuda, struct lh_error *err)
{
    return judge(cuda, cuda->calls.context_push(cuda->context), err, "cuCtxPushCurrent");
}

static void leave(const struct cuda *cuda)
{
    struct CUctx_st *context = NULL;
    /* Ignore errors (the process is exiting): the next call will report them, too. */
    cuda->calls.context_pop(&context);
}

/* A fence is the driver's event itself, so nothing else has to be allocated. */
static struct CUevent_st *event_of(struct lh_dev_fence *fence)
{
    return (struct CUevent_st *)(void *)fence;
}

static int event_create(const struct cuda *cuda, struct CUevent_st **event_out,
                        struct lh_error *err)
{
    unsigned result = cuda->calls.event_create(event_out, LH_CUDA_EVENT_DISABLE_TIMING);
    if (result != 0)
        *event_out = NULL;
    return judge(cuda, result, err, "cuEventCreate");
}

static int cuda_fence_create(struct lh_dev *dev, struct lh_dev_fence **fence_out,
                             struct lh_error *err)
{
    struct cuda *cuda = (struct cuda *)dev;
    struct CUevent_st *event = NULL;
    *fence_out = NULL;
    LH_TRY(enter(cuda, err));
    int rc = event_create(cuda, &event, err);
    leave(cuda);
    *fence_out = (struct lh_dev_fence *)(void *)event;
    return rc;
}

static void cuda_fence_destroy(struct lh_dev *dev, struct lh_dev_fence *fence)
{
    struct cuda *cuda = (struct cuda *)dev;
    if (!fence || enter(cuda, NULL) < 0)
        return;
    cuda->calls.event_destroy(event_of(fence));
    leave(cuda);
}

static int cuda_record(struct lh_dev *dev, struct lh_dev_fence *fence, void *stream,
                       struct lh_error *err)
{
    struct cuda *cuda = (struct cuda *)dev;
    LH_TRY(enter(cuda, err));
    int rc = judge(cuda, cuda->calls.event_record(event_of(fence), stream), err,
                   "cuEventRecord on stream %p", stream);
    leave(cuda);
    return rc;
}

static int stream_wait(const struct cuda *cuda, struct CUstream_st *stream,
                       struct CUevent_st *event, struct lh_error *err)
{
    return judge(cuda, cuda->calls.stream_wait(stream, event, 0), err,
                 "cuStreamWaitEvent of stream %p", (void *)stream);
}

static int cuda_wait(struct lh_dev *dev, struct lh_dev_fence *fence, void *stream,
                     struct lh_error *err)
{
    struct cuda *cuda = (struct cuda *)dev;
    LH_TRY(enter(cuda, err));
    int rc = stream_wait(cuda, stream, event_of(fence), err);
    leave(cuda);
    return rc;
}

static int cuda_order(struct lh_dev *dev, enum lh_dev_direction direction,
                      struct lh_dev_fence *fence, struct lh_error *err)
{
    return cuda_wait(dev, fence, ((struct cuda *)dev)->lanes[direction].copy_stream, err);
}

/* Record that the lane's oldest copy has finished. A thread of the driver calls this. */
static void host_call_run(void *context)
{
    struct lane *lane = context;
    struct lh_dev_base *base = &lane->cuda->base;
    struct lh_dev_slot *slot = lh_dev_base_oldest(base, lane->direction);
    slot->started_ns = lh_max_u64(slot->submitted_ns, lane->ended_ns);
    slot->completed_ns = lh_clock_now_ns(base->clock);
    lane->ended_ns = slot->completed_ns;
    lh_dev_base_end(base, lane->direction);
    lh_dev_base_wake(base);
}

/* Enqueue the copy itself. */
static int copy_begin(const struct lane *lane, const struct lh_dev_copy *copy, struct lh_error *err)
{
    const struct lh_cuda_calls *calls = &lane->cuda->calls;
    unsigned long long device = (uintptr_t)copy->device;
    if (copy->after)
        LH_TRY(stream_wait(lane->cuda, lane->copy_stream, event_of(copy->after), err));
    bool is_in = lane->direction == LH_DEV_DIRECTION_IN;
    unsigned result = is_in ? calls->copy_in(device, copy->host, copy->bytes, lane->copy_stream)
                            : calls->copy_out(copy->host, device, copy->bytes, lane->copy_stream);
    return judge(lane->cuda, result, err, "%s of %" PRIu64 " bytes from %p to %p",
                 is_in ? "cuMemcpyHtoDAsync" : "cuMemcpyDtoHAsync", copy->bytes,
                 is_in ? copy->host : copy->device, is_in ? copy->device : copy->host);
}

/* Enqueue the notification that the copy has finished. */
static int copy_follow(struct lane *lane, const struct lh_dev_copy *copy, struct lh_error *err)
{
    const struct cuda *cuda = lane->cuda;
    struct CUevent_st *copied = copy->done ? event_of(copy->done) : lane->copied;
    LH_TRY(judge(cuda, cuda->calls.event_record(copied, lane->copy_stream), err,
                 "cuEventRecord after a copy"));
    LH_TRY(stream_wait(cuda, lane->notify_stream, copied, err));
    return judge(cuda, cuda->calls.host_call(lane->notify_stream, host_call_run, lane), err,
                 "cuLaunchHostFunc");
}

static int cuda_submit(struct lh_dev *dev, struct lh_dev_copy *copy, struct lh_error *err)
{
    struct cuda *cuda = (struct cuda *)dev;
    struct lane *lane = &cuda->lanes[copy->direction];
    struct lh_dev_slot *slot = NULL;
    LH_TRY(lh_dev_base_take(&cuda->base, copy, &slot));
    int rc = judge(cuda, cuda->lost_result, err, "the GPU has stopped executing work");
    if (rc == 0)
        rc = enter(cuda, err);
    if (rc == 0) {
        rc = copy_begin(lane, copy, err);
        if (rc == 0) {
            rc = copy_follow(lane, copy, err);
            /* The copy is in flight and its end would not be reported, so wait for it here. The
             * next copy will also report an error of this call. */
            if (rc < 0)
                cuda->calls.stream_synchronize(lane->copy_stream);
        }
        leave(cuda);
    }
    if (rc < 0)
        lh_dev_base_untake(&cuda->base, copy->direction);
    return rc;
}

/* Whether the driver has stopped executing work. See [Note: A device that fails]. */
static bool is_lost(struct cuda *cuda)
{
    unsigned result = 0;
    bool is_refused = cuda->lost_result != 0;
    for (int i = 0; i < LH_DEV_DIRECTION_COUNT; i++) {
        unsigned answer = cuda->calls.stream_query(cuda->lanes[i].notify_stream);
        is_refused |= answer != 0 && answer != LH_CUDA_NOT_READY;
    }
    /* Only if synchronizing repeats the error, the streams themselves have failed and execute
     * nothing more. Synchronize all streams: a host call of one stream may still be running when
     * another stream reports the error. */
    for (int i = 0; i < LH_DEV_DIRECTION_COUNT && is_refused; i++) {
        unsigned answer = cuda->calls.stream_synchronize(cuda->lanes[i].notify_stream);
        result = result ? result : answer;
    }
    if (cuda->lost_result == 0)
        cuda->lost_result = result;
    return cuda->lost_result != 0;
}

static uint32_t cuda_poll(struct lh_dev *dev, struct lh_dev_copy **done, uint32_t done_max)
{
    struct cuda *cuda = (struct cuda *)dev;
    uint32_t done_count = lh_dev_base_poll(dev, done, done_max);
    if (done_count > 0 || dev->in_flight_count == 0 || done_max == 0)
        return done_count;
    /* If the context cannot be entered, the driver may have shut down and then executes nothing.
     * This is confirmed if the next poll fails in the same way. */
    struct lh_error err = {0};
    bool lost = cuda->was_refused;
    cuda->was_refused = enter(cuda, &err) < 0;
    if (!cuda->was_refused) {
        lost = is_lost(cuda);
        leave(cuda);
    } else if (lost) {
        cuda->lost_result = (unsigned)err.native;
    }
    if (!lost)
        return lh_dev_base_poll(dev, done, done_max);
    return lh_dev_base_drop(&cuda->base, -EIO, done, done_max);
}

static int cuda_memory_register(struct lh_dev *dev, void *base, uint64_t bytes,
                                struct lh_error *err)
{
    struct cuda *cuda = (struct cuda *)dev;
    LH_ASSERT(base && bytes > 0);
    LH_TRY(enter(cuda, err));
    int rc = judge(cuda, cuda->calls.host_register(base, bytes, LH_CUDA_REGISTER_PORTABLE), err,
                   "cuMemHostRegister of %" PRIu64 " bytes at %p", bytes, base);
    leave(cuda);
    return rc;
}

static void cuda_memory_unregister(struct lh_dev *dev, void *base)
{
    struct cuda *cuda = (struct cuda *)dev;
    if (enter(cuda, NULL) < 0)
        return;
    cuda->calls.host_unregister(base);
    leave(cuda);
}

/* Load a module and find its function; on failure unload it. */
static int kernel_find(const struct cuda *cuda, struct lh_dev_kernel *kernel, const void *image,
                       const char *name, struct lh_error *err)
{
    unsigned result = cuda->calls.module_load(&kernel->module, image);
    if (result != 0)
        kernel->module = NULL;
    LH_TRY(judge(cuda, result, err, "cuModuleLoadData for kernel %s", name));
    result = cuda->calls.module_function(&kernel->function, kernel->module, name);
    if (result != 0) {
        cuda->calls.module_unload(kernel->module);
        kernel->module = NULL;
    }
    return judge(cuda, result, err, "cuModuleGetFunction of %s", name);
}

static int cuda_kernel_load(struct lh_dev *dev, const void *image, const char *name,
                            struct lh_dev_kernel **kernel_out, struct lh_error *err)
{
    struct cuda *cuda = (struct cuda *)dev;
    struct lh_dev_kernel *kernel = cuda->kernels;
    *kernel_out = NULL;
    while (kernel < cuda->kernels + LH_DEV_KERNEL_COUNT_MAX && kernel->module)
        kernel++;
    if (kernel == cuda->kernels + LH_DEV_KERNEL_COUNT_MAX)
        return lh_error_set(err, -ENOMEM,
                            "kernel %s: %d kernels are loaded already, which is the maximum", name,
                            LH_DEV_KERNEL_COUNT_MAX);
    LH_TRY(enter(cuda, err));
    int rc = kernel_find(cuda, kernel, image, name, err);
    leave(cuda);
    *kernel_out = rc == 0 ? kernel : NULL;
    return rc;
}

static void cuda_kernel_unload(struct lh_dev *dev, struct lh_dev_kernel *kernel)
{
    struct cuda *cuda = (struct cuda *)dev;
    if (!kernel)
        return;
    LH_ASSERT(kernel->module);
    if (enter(cuda, NULL) == 0) {
        cuda->calls.context_synchronize(); /* the kernel may still be running, on any stream */
        cuda->calls.module_unload(kernel->module);
        leave(cuda);
    }
    *kernel = (struct lh_dev_kernel){0};
}

static int cuda_launch(struct lh_dev *dev, struct lh_dev_kernel *kernel, void *stream,
                       uint32_t group_count, uint32_t thread_count, const void *argument,
                       struct lh_error *err)
{
    struct cuda *cuda = (struct cuda *)dev;
    void *arguments[] = {(void *)(uintptr_t)argument};
    LH_ASSERT(kernel->module && group_count > 0 && thread_count > 0);
    LH_TRY(enter(cuda, err));
    unsigned result = cuda->calls.launch(kernel->function, group_count, 1, 1, thread_count, 1, 1, 0,
                                         stream, arguments, NULL);
    int rc = judge(cuda, result, err, "cuLaunchKernel of %u x %u threads on stream %p",
                   (unsigned)group_count, (unsigned)thread_count, stream);
    leave(cuda);
    return rc;
}

/* Free a backend, even a partly created one. Errors of the driver have no consequence here. */
static void cuda_free(struct cuda *cuda)
{
    struct lh_alloc *alloc = cuda->base.alloc;
    if (cuda->context && enter(cuda, NULL) == 0) {
        for (int i = 0; i < LH_DEV_DIRECTION_COUNT; i++) {
            struct CUstream_st *streams[] = {cuda->lanes[i].copy_stream,
                                             cuda->lanes[i].notify_stream};
            for (size_t j = 0; j < LH_COUNT_OF(streams); j++) {
                if (!streams[j])
                    continue;
                /* A host call may still be in its last instructions. */
                cuda->calls.stream_synchronize(streams[j]);
                cuda->calls.stream_destroy(streams[j]);
            }
            if (cuda->lanes[i].copied)
                cuda->calls.event_destroy(cuda->lanes[i].copied);
        }
        leave(cuda);
    }
    if (cuda->context)
        cuda->calls.context_release(cuda->device);
    lh_dev_base_deinit(&cuda->base);
    lh_free(alloc, cuda);
}

static void cuda_destroy(struct lh_dev *dev)
{
    struct cuda *cuda = (struct cuda *)dev;
    LH_ASSERT(dev->in_flight_count == 0);
    for (int i = 0; i < LH_DEV_KERNEL_COUNT_MAX; i++)
        LH_ASSERT(!cuda->kernels[i].module);
    cuda_free(cuda);
}

static const struct lh_dev_ops cuda_ops = {
    .version = LH_DEV_OPS_VERSION,
    .name = "cuda",
    .is_ordered = true,
    .fence_create = cuda_fence_create,
    .fence_destroy = cuda_fence_destroy,
    .record = cuda_record,
    .wait = cuda_wait,
    .order = cuda_order,
    .submit = cuda_submit,
    .poll = cuda_poll,
    .memory_register = cuda_memory_register,
    .memory_unregister = cuda_memory_unregister,
    .kernel_load = cuda_kernel_load,
    .kernel_unload = cuda_kernel_unload,
    .launch = cuda_launch,
    .destroy = cuda_destroy,
};

static int calls_find(struct lh_cuda_calls *calls, lh_dev_cuda_lookup_fn lookup, void *library,
                      struct lh_error *err)
{
    const char *missing = NULL;
#define FIND(member, name, symbol, parameters)                                                     \
    *(void **)&calls->member = lookup(library, symbol);                                            \
    if (!calls->member)                                                                            \
        missing = symbol;
    LH_CUDA_CALLS(FIND)
#undef FIND
    if (!missing)
        return 0;
    return lh_error_set(err, -ENODEV,
                        "the NVIDIA driver (" DRIVER ") has no %s: it is older than CUDA 11; "
                        "install a newer one, or device='cpu'",
                        missing);
}

static int context_open(struct cuda *cuda, int32_t index, struct lh_error *err)
{
    const struct lh_cuda_calls *calls = &cuda->calls;
    int count = 0;
    LH_TRY(judge(cuda, calls->init(0), err, "cuInit"));
    LH_TRY(judge(cuda, calls->device_count(&count), err, "cuDeviceGetCount"));
    if (index < 0 || index >= count)
        return lh_error_set(err, -ENODEV,
                            "device_index %" PRId32 ": the driver has %d GPUs (see nvidia-smi and "
                            "CUDA_VISIBLE_DEVICES), or device='cpu'",
                            index, count);
    LH_TRY(judge(cuda, calls->device_get(&cuda->device, index), err, "cuDeviceGet of %" PRId32,
                 index));
    unsigned result = calls->context_retain(&cuda->context, cuda->device);
    if (result != 0)
        cuda->context = NULL;
    return judge(cuda, result, err, "cuDevicePrimaryCtxRetain of GPU %" PRId32, index);
}

static int stream_create(const struct cuda *cuda, struct CUstream_st **stream_out,
                         struct lh_error *err)
{
    /* A blocking stream and the default stream, which torch uses, would wait for each other. */
    unsigned result = cuda->calls.stream_create(stream_out, LH_CUDA_STREAM_NON_BLOCKING);
    if (result != 0)
        *stream_out = NULL;
    return judge(cuda, result, err, "cuStreamCreate");
}

static int lanes_create(struct cuda *cuda, struct lh_error *err)
{
    LH_TRY(enter(cuda, err));
    int rc = 0;
    for (int i = 0; i < LH_DEV_DIRECTION_COUNT && rc == 0; i++) {
        struct lane *lane = &cuda->lanes[i];
        lane->cuda = cuda;
        lane->direction = (enum lh_dev_direction)i;
        rc = stream_create(cuda, &lane->copy_stream, err);
        if (rc == 0)
            rc = stream_create(cuda, &lane->notify_stream, err);
        if (rc == 0)
            rc = event_create(cuda, &lane->copied, err);
    }
    leave(cuda);
    return rc;
}

int lh_dev_cuda_create_from(lh_dev_cuda_lookup_fn lookup, void *library,
                            const struct lh_dev_opts *opts, struct lh_alloc *alloc,
                            struct lh_dev **dev_out, struct lh_error *err)
{
    *dev_out = NULL;
    struct cuda *cuda = lh_alloc_zeroed(alloc, 1, sizeof(*cuda));
    if (!cuda)
        return lh_error_set(err, -ENOMEM, "no memory for the CUDA backend");
    int rc = lh_dev_base_init(&cuda->base, &cuda_ops, opts, alloc, err);
    if (rc == 0)
        rc = calls_find(&cuda->calls, lookup, library, err);
    if (rc == 0)
        rc = context_open(cuda, opts->device_index, err);
    if (rc == 0)
        rc = lanes_create(cuda, err);
    if (rc < 0) {
        cuda_free(cuda);
        return rc;
    }
    *dev_out = &cuda->base.dev;
    return 0;
}

int lh_dev_cuda_create(const struct lh_dev_opts *opts, struct lh_alloc *alloc,
                       struct lh_dev **dev_out, struct lh_error *err)
{
    *dev_out = NULL;
    /* Never unload the driver: it has its own threads, and torch may use it. */
    void *library = dlopen(DRIVER, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return lh_error_set(err, -ENODEV,
                            "no " DRIVER " (%s): install the NVIDIA driver, or device='cpu'",
                            dlerror());
    return lh_dev_cuda_create_from(dlsym, library, opts, alloc, dev_out, err);
}
