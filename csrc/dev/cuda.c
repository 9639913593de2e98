/*
 * NVIDIA GPUs, through the driver, which is loaded at run time. The backend uses the primary
 * context, as torch's CUDA runtime does.
 *
 *      submit:  copy stream    wait(after)  record(begun)  copy  record(done)
 *      poll:                                                     record(ended) --+
 *               notify stream                                                    wait  host call
 *
 * A host call in the copy stream would delay the next copy until the call has run on the CPU. Each
 * direction therefore has a second stream, which only waits for copies and makes the host calls.
 * One host call ends a burst of copies (cuda_lane.c). The side queue has two more streams.
 *
 * [Note: A device that fails]
 * After an error of a kernel the context is broken: the driver executes nothing more, including
 * host calls. If nothing has come back for LH_DEV_SLEEP_MS_MAX, poll queries the notify streams.
 * When the driver reports that the context is lost, poll returns all copies in flight. A host call
 * that is still running then accesses only the lane, a burst and slots, which exist until destroy.
 *
 * Thread: the driver's callback thread runs host_call_run(), which calls no function of CUDA.
 */
#include "dev/cuda_private.h"

#include <dlfcn.h>
#include <inttypes.h>

#include "base/assert.h"

#define DRIVER "libcuda.so.1"

static int cuda_fence_create(struct lh_dev *dev, struct lh_dev_fence **fence_out,
                             struct lh_error *err)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    struct CUevent_st *event = NULL;
    *fence_out = NULL;
    LH_TRY(lh_cuda_enter(cuda, err));
    int rc = lh_cuda_event_create(cuda, &event, LH_CUDA_EVENT_DISABLE_TIMING, err);
    lh_cuda_leave(cuda);
    *fence_out = (struct lh_dev_fence *)(void *)event;
    return rc;
}

static void cuda_fence_destroy(struct lh_dev *dev, struct lh_dev_fence *fence)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    if (!fence || lh_cuda_enter(cuda, NULL) < 0)
        return;
    cuda->calls.event_destroy(lh_cuda_event_of(fence));
    lh_cuda_leave(cuda);
}

static int cuda_record(struct lh_dev *dev, struct lh_dev_fence *fence, void *stream,
                       struct lh_error *err)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    LH_TRY(lh_cuda_enter(cuda, err));
    int rc = lh_cuda_event_record(cuda, lh_cuda_event_of(fence), stream, err);
    lh_cuda_leave(cuda);
    return rc;
}

static int cuda_wait(struct lh_dev *dev, struct lh_dev_fence *fence, void *stream,
                     struct lh_error *err)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    LH_TRY(lh_cuda_enter(cuda, err));
    int rc = lh_cuda_stream_wait(cuda, stream, lh_cuda_event_of(fence), err);
    lh_cuda_leave(cuda);
    return rc;
}

static bool cuda_has_passed(struct lh_dev *dev, struct lh_dev_fence *fence)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    if (lh_cuda_enter(cuda, NULL) < 0)
        return false;
    unsigned result = cuda->calls.event_query(lh_cuda_event_of(fence));
    lh_cuda_leave(cuda);
    return result == 0; /* otherwise it is not, or the next call reports the error */
}

static int cuda_memory_register(struct lh_dev *dev, void *base, uint64_t bytes,
                                struct lh_error *err)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    LH_ASSERT(base && bytes > 0);
    LH_TRY(lh_cuda_enter(cuda, err));
    int rc = lh_cuda_judge(cuda, cuda->calls.host_register(base, bytes, LH_CUDA_REGISTER_PORTABLE),
                           err, "cuMemHostRegister of %" PRIu64 " bytes at %p", bytes, base);
    lh_cuda_leave(cuda);
    return rc;
}

static void cuda_memory_unregister(struct lh_dev *dev, void *base)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    if (lh_cuda_enter(cuda, NULL) < 0)
        return;
    cuda->calls.host_unregister(base);
    lh_cuda_leave(cuda);
}

/*
 * Registered memory is always mapped into the GPU's address space, because a 64-bit process has
 * unified addressing. An integrated GPU may nevertheless find it at another address.
 */
static uint8_t *cuda_memory_address(struct lh_dev *dev, void *base, struct lh_error *err)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    unsigned long long address = 0;
    if (lh_cuda_enter(cuda, err) < 0)
        return NULL;
    unsigned result = cuda->calls.host_address(&address, base, 0);
    lh_cuda_leave(cuda);
    int rc = lh_cuda_judge(cuda, result, err, "cuMemHostGetDevicePointer of %p", base);
    return rc == 0 ? (uint8_t *)(uintptr_t)address : NULL;
}

static int cuda_synchronize(struct lh_dev *dev, struct lh_error *err)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    LH_TRY(lh_cuda_enter(cuda, err));
    int rc = lh_cuda_judge(cuda, cuda->calls.context_synchronize(), err, "cuCtxSynchronize");
    lh_cuda_leave(cuda);
    return rc;
}

/* Load a module and find its function; on failure unload it. */
static int kernel_find(const struct lh_cuda *cuda, struct lh_dev_kernel *kernel, const void *image,
                       const char *name, struct lh_error *err)
{
    unsigned result = cuda->calls.module_load(&kernel->module, image);
    if (result != 0)
        kernel->module = NULL;
    LH_TRY(lh_cuda_judge(cuda, result, err, "cuModuleLoadData for kernel %s", name));
    result = cuda->calls.module_function(&kernel->function, kernel->module, name);
    if (result != 0) {
        cuda->calls.module_unload(kernel->module);
        kernel->module = NULL;
    }
    return lh_cuda_judge(cuda, result, err, "cuModuleGetFunction of %s", name);
}

static int cuda_kernel_load(struct lh_dev *dev, const void *image, const char *name,
                            struct lh_dev_kernel **kernel_out, struct lh_error *err)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    struct lh_dev_kernel *kernel = cuda->kernels;
    *kernel_out = NULL;
    while (kernel < cuda->kernels + LH_DEV_KERNEL_COUNT_MAX && kernel->module)
        kernel++;
    if (kernel == cuda->kernels + LH_DEV_KERNEL_COUNT_MAX)
        return lh_error_set(err, -ENOMEM,
                            "kernel %s: %d kernels are loaded already, which is the maximum", name,
                            LH_DEV_KERNEL_COUNT_MAX);
    LH_TRY(lh_cuda_enter(cuda, err));
    int rc = kernel_find(cuda, kernel, image, name, err);
    lh_cuda_leave(cuda);
    *kernel_out = rc == 0 ? kernel : NULL;
    return rc;
}

static void cuda_kernel_unload(struct lh_dev *dev, struct lh_dev_kernel *kernel)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    if (!kernel)
        return;
    LH_ASSERT(kernel->module);
    if (lh_cuda_enter(cuda, NULL) == 0) {
        cuda->calls.context_synchronize(); /* the kernel may still be running, on any stream */
        cuda->calls.module_unload(kernel->module);
        lh_cuda_leave(cuda);
    }
    *kernel = (struct lh_dev_kernel){0};
}

static int cuda_launch(struct lh_dev *dev, struct lh_dev_kernel *kernel, void *stream,
                       uint32_t group_count, uint32_t thread_count, const void *argument,
                       struct lh_error *err)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
    void *arguments[] = {(void *)(uintptr_t)argument};
    LH_ASSERT(kernel->module && group_count > 0 && thread_count > 0);
    LH_TRY(lh_cuda_enter(cuda, err));
    unsigned result = cuda->calls.launch(kernel->function, group_count, 1, 1, thread_count, 1, 1, 0,
                                         stream, arguments, NULL);
    int rc = lh_cuda_judge(cuda, result, err, "cuLaunchKernel of %u x %u threads on stream %p",
                           (unsigned)group_count, (unsigned)thread_count, stream);
    lh_cuda_leave(cuda);
    return rc;
}

/* Free a backend, even a partly created one. Errors of the driver have no consequence here. */
static void cuda_free(struct lh_cuda *cuda)
{
    struct lh_alloc *alloc = cuda->base.alloc;
    if (cuda->context && lh_cuda_enter(cuda, NULL) == 0) {
        lh_cuda_lanes_close(cuda);
        lh_cuda_gaps_close(cuda);
        lh_cuda_leave(cuda);
    }
    if (cuda->context)
        cuda->calls.context_release(cuda->device);
    for (int i = 0; i < LH_DEV_LANE_COUNT_MAX; i++)
        lh_free(alloc, cuda->lanes[i].bursts);
    lh_cuda_gaps_free(cuda);
    lh_dev_base_deinit(&cuda->base);
    lh_free(alloc, cuda);
}

static void cuda_destroy(struct lh_dev *dev)
{
    struct lh_cuda *cuda = (struct lh_cuda *)dev;
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
    .has_passed = cuda_has_passed,
    .gap_begin = lh_cuda_gap_begin,
    .gap_end = lh_cuda_gap_end,
    .gaps_take = lh_cuda_gaps_take,
    .side_create = lh_cuda_side_create,
    .order = lh_cuda_order,
    .submit = lh_cuda_submit,
    .poll = lh_cuda_poll,
    .memory_register = cuda_memory_register,
    .memory_unregister = cuda_memory_unregister,
    .memory_address = cuda_memory_address,
    .synchronize = cuda_synchronize,
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
#define FIND(member, name, symbol, parameters) *(void **)&calls->member = lookup(library, symbol);
    LH_CUDA_OPTIONAL_CALLS(FIND)
#undef FIND
    if (!missing)
        return 0;
    return lh_error_set(err, -ENODEV,
                        "the NVIDIA driver (" DRIVER ") has no %s: it is older than CUDA 11; "
                        "install a newer one, or device='cpu'",
                        missing);
}

static int context_open(struct lh_cuda *cuda, int32_t index, struct lh_error *err)
{
    const struct lh_cuda_calls *calls = &cuda->calls;
    int count = 0;
    LH_TRY(lh_cuda_judge(cuda, calls->init(0), err, "cuInit"));
    LH_TRY(lh_cuda_judge(cuda, calls->device_count(&count), err, "cuDeviceGetCount"));
    if (index < 0 || index >= count)
        return lh_error_set(err, -ENODEV,
                            "device_index %" PRId32 ": the driver has %d GPUs (see nvidia-smi and "
                            "CUDA_VISIBLE_DEVICES), or device='cpu'",
                            index, count);
    LH_TRY(lh_cuda_judge(cuda, calls->device_get(&cuda->device, index), err,
                         "cuDeviceGet of %" PRId32, index));
    unsigned result = calls->context_retain(&cuda->context, cuda->device);
    if (result != 0)
        cuda->context = NULL;
    return lh_cuda_judge(cuda, result, err, "cuDevicePrimaryCtxRetain of GPU %" PRId32, index);
}

int lh_dev_cuda_create_from(lh_dev_cuda_lookup_fn lookup, void *library,
                            const struct lh_dev_opts *opts, struct lh_alloc *alloc,
                            struct lh_dev **dev_out, struct lh_error *err)
{
    *dev_out = NULL;
    struct lh_cuda *cuda = lh_alloc_zeroed(alloc, 1, sizeof(*cuda));
    if (!cuda)
        return lh_error_set(err, -ENOMEM, "no memory for the CUDA backend");
    int rc = lh_dev_base_init(&cuda->base, &cuda_ops, opts, alloc, err);
    if (rc == 0)
        rc = calls_find(&cuda->calls, lookup, library, err);
    if (rc == 0)
        rc = context_open(cuda, opts->device_index, err);
    if (rc == 0)
        rc = lh_cuda_lanes_create(cuda, err);
    if (rc == 0)
        rc = lh_cuda_gaps_create(cuda, err);
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
