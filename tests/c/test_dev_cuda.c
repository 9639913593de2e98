/* Test the CUDA backend: its declarations match the driver's, and no driver error is lost. */
#include "compute/zo_launch.h"
#include "dev_fixture.h"

#include <stdatomic.h>

#include <time.h>

#define CUDA_HEADER "/usr/local/cuda/include/cuda.h"
#if __has_include(CUDA_HEADER)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wstrict-prototypes"
#include CUDA_HEADER
#pragma GCC diagnostic pop
#define HAS_CUDA_HEADER 1
#else
#define HAS_CUDA_HEADER 0
#endif

#define BYTES 4096
#define CALL_COUNT_MAX 1000
#define SILENCE_NS (UINT64_C(1000000) * LH_DEV_SLEEP_MS_MAX)

static _Alignas(64) uint8_t host[2][BYTES];
static _Alignas(64) uint8_t device[BYTES];
static _Alignas(64) uint8_t beside[BYTES];
static struct lh_clock real_clock;
static _Atomic uint64_t hand_ns = SILENCE_NS;

#if HAS_CUDA_HEADER
#define TEXT(name) #name
#define EXPANDED(name) TEXT(name)
#define COMPARE(member, name, symbol, parameters)                                                  \
    _Static_assert(__builtin_types_compatible_p(unsigned(*) parameters, __typeof__(&name)),        \
                   "parameters of " symbol);                                                       \
    LH_CHECK(strcmp(EXPANDED(name), symbol) == 0);

static void test_header(void)
{
    lh_test_name("symbols, parameters and constants are those of " CUDA_HEADER);
    LH_CUDA_CALLS(COMPARE)
    _Static_assert(sizeof(CUdeviceptr) == sizeof(void *), "an address of the device is one of C");
    LH_CHECK(CUDA_ERROR_OUT_OF_MEMORY == LH_CUDA_OUT_OF_MEMORY);
    LH_CHECK(CUDA_ERROR_NO_DEVICE == LH_CUDA_NO_DEVICE);
    LH_CHECK(CUDA_ERROR_INVALID_DEVICE == LH_CUDA_INVALID_DEVICE);
    LH_CHECK(CUDA_ERROR_INVALID_IMAGE == LH_CUDA_INVALID_IMAGE);
    LH_CHECK(CUDA_ERROR_NO_BINARY_FOR_GPU == LH_CUDA_NO_BINARY);
    LH_CHECK(CUDA_ERROR_UNSUPPORTED_PTX_VERSION == LH_CUDA_UNSUPPORTED_PTX);
    LH_CHECK(CUDA_ERROR_NOT_FOUND == LH_CUDA_NOT_FOUND);
    LH_CHECK(CUDA_ERROR_NOT_READY == LH_CUDA_NOT_READY);
    LH_CHECK(CUDA_ERROR_ILLEGAL_ADDRESS == LH_CUDA_ILLEGAL_ADDRESS);
    LH_CHECK(CUDA_ERROR_HARDWARE_STACK_ERROR == LH_CUDA_HARDWARE_STACK_ERROR);
    LH_CHECK(CUDA_ERROR_LAUNCH_FAILED == LH_CUDA_LAUNCH_FAILED);
    LH_CHECK(CU_STREAM_NON_BLOCKING == LH_CUDA_STREAM_NON_BLOCKING);
    LH_CHECK(CU_EVENT_DEFAULT == LH_CUDA_EVENT_DEFAULT);
    LH_CHECK(CU_EVENT_DISABLE_TIMING == LH_CUDA_EVENT_DISABLE_TIMING);
    LH_CHECK(CU_MEMHOSTREGISTER_PORTABLE == LH_CUDA_REGISTER_PORTABLE);
}
#else
static void test_header(void)
{
    printf("  not compared with the driver's header: there is no " CUDA_HEADER "\n");
}
#endif

static int create(struct lh_alloc *alloc, struct lh_waker *waker, int32_t device_index,
                  struct lh_dev **dev_out, struct lh_error *err)
{
    struct lh_dev_opts opts = {
        .device_index = device_index, .copy_count = 4, .clock = &real_clock, .waker = waker};
    *dev_out = (struct lh_dev *)&opts;
    int rc = lh_dev_cuda_create_from(fake_cuda_lookup, NULL, &opts, alloc, dev_out, err);
    LH_CHECK((rc == 0) == (*dev_out != NULL));
    return rc;
}

/* Take all copies back; returns whether none has failed. */
static bool all_back(struct lh_dev *dev, struct lh_waker *waker)
{
    struct lh_dev_copy *done[2];
    bool is_well = true;
    while (dev->in_flight_count > 0) {
        lh_waker_prepare(waker);
        uint32_t count = dev->ops->poll(dev, done, 2);
        for (uint32_t i = 0; i < count; i++) {
            LH_CHECK(done[i]->result == 0 || done[i]->result == -EIO);
            is_well &= done[i]->result == 0;
        }
        if (count == 0)
            lh_waker_wait(waker, LH_DEV_SLEEP_MS_MAX);
    }
    return is_well;
}

/* Register main memory, and find it on the device. On failure it is not registered. */
static int main_memory_use(struct lh_dev *dev, struct lh_error *err)
{
    LH_TRY(dev->ops->memory_register(dev, host[0], BYTES, err));
    int rc = dev->ops->memory_address(dev, host[0], err) ? 0 : err->code;
    if (rc == 0)
        rc = dev->ops->synchronize(dev, err);
    if (rc < 0)
        dev->ops->memory_unregister(dev, host[0]);
    return rc;
}

/* Everything that an owner does, until something fails. */
static int use(struct lh_dev *dev, struct lh_waker *waker, struct lh_error *err)
{
    const struct lh_dev_ops *ops = dev->ops;
    struct lh_dev_fence *fences[2] = {NULL};
    struct lh_dev_kernel *kernel = NULL;
    int rc = ops->side_create(dev, err);
    for (int i = 0; i < 2 && rc == 0; i++)
        rc = ops->fence_create(dev, &fences[i], err);
    if (rc == 0)
        rc = ops->kernel_load(dev, fake_cuda_image, LH_ZO_KERNEL_NAME, &kernel, err);
    LH_CHECK((rc == 0) == (kernel != NULL));
    bool is_registered = rc == 0 && (rc = main_memory_use(dev, err)) == 0;
    struct lh_dev_copy copies[] = {{.direction = LH_DEV_DIRECTION_IN,
                                    .host = host[0],
                                    .device = device,
                                    .bytes = BYTES,
                                    .after = fences[0],
                                    .done = fences[1]},
                                   {.direction = LH_DEV_DIRECTION_OUT,
                                    .host = host[1],
                                    .device = device,
                                    .bytes = BYTES,
                                    .after = fences[0]},
                                   {.direction = LH_DEV_DIRECTION_IN,
                                    .host = host[0],
                                    .device = beside,
                                    .bytes = BYTES,
                                    .is_aside = true,
                                    .after = fences[0]}};
    memset(host[0], 3, BYTES);
    if (rc == 0)
        rc = ops->record(dev, fences[0], NULL, err);
    if (rc == 0)
        rc = ops->order(dev, LH_DEV_DIRECTION_IN, fences[0], err);
    if (rc == 0)
        rc = ops->submit(dev, &copies[2], err);
    if (rc == 0)
        rc = ops->submit(dev, &copies[0], err);
    /* Measuring is refused silently. */
    struct lh_dev_gap *gap = rc == 0 ? ops->gap_begin(dev, NULL) : NULL;
    /* Wait even if it has passed, so that each run makes the same calls. */
    if (rc == 0) {
        (void)ops->has_passed(dev, fences[1]);
        rc = ops->wait(dev, fences[1], NULL, err);
    }
    ops->gap_end(dev, gap, NULL, 0);
    struct lh_zo_op draw = {.kind = LH_ZO_OP_DRAW};
    if (rc == 0)
        rc = lh_zo_launch(dev, kernel, NULL, (float *)(void *)device, 0, BYTES / 4, &draw, 1, err);
    if (rc == 0)
        rc = ops->record(dev, fences[0], NULL, err);
    if (rc == 0)
        rc = ops->submit(dev, &copies[1], err);
    if (rc == 0)
        rc = ops->order(dev, LH_DEV_DIRECTION_OUT, fences[0], err);
    if (all_back(dev, waker) && rc == 0) {
        LH_CHECK(memcmp(host[0], beside, BYTES) == 0);
        lh_zo_apply((float *)(void *)host[0], (float *)(void *)host[0], 0, BYTES / 4, &draw, 1);
        LH_CHECK(memcmp(host[0], host[1], BYTES) == 0);
    }
    (void)ops->gaps_take(dev, 0, &(uint64_t){0});
    /* Teardown has nobody to tell, and only a driver that has shut down refuses it. */
    fake_cuda_fail_after(-1);
    if (is_registered)
        ops->memory_unregister(dev, host[0]);
    for (int i = 0; i < 2; i++)
        ops->fence_destroy(dev, fences[i]);
    ops->kernel_unload(dev, kernel);
    return rc;
}

static void test_every_call_may_fail(void)
{
    static const char *const names[] = {"cuInit",
                                        "cuDeviceGetCount",
                                        "cuDeviceGet",
                                        "cuDevicePrimaryCtxRetain",
                                        "cuStreamCreate",
                                        "cuCtxPushCurrent",
                                        "cuEventCreate",
                                        "cuEventRecord",
                                        "cuLaunchHostFunc",
                                        "cuStreamWaitEvent",
                                        "cuMemcpyHtoDAsync",
                                        "cuMemcpyDtoHAsync",
                                        "cuMemHostRegister",
                                        "cuMemHostGetDevicePointer",
                                        "cuCtxSynchronize",
                                        "cuModuleLoadData",
                                        "cuModuleGetFunction",
                                        "cuLaunchKernel"};
    bool was_named[LH_COUNT_OF(names)] = {false};
    struct lh_waker waker;
    LH_CHECK(lh_waker_init(&waker, NULL) == 0);
    lh_test_name("whichever of the driver's calls fails is named, with what it said");
    int64_t fail_after = 0;
    do {
        struct lh_alloc alloc = LH_ALLOC_INIT;
        struct lh_dev *dev = NULL;
        struct lh_error err = {0};
        fake_cuda_reset((struct fake_cuda_opts){
            .fail_after = fail_after, .delay_ns_max = 20000, .seed = (uint64_t)fail_after});
        int rc = create(&alloc, &waker, 1, &dev, &err);
        if (rc == 0)
            rc = use(dev, &waker, &err);
        if (rc < 0) {
            LH_CHECK(rc == -EIO && err.code == -EIO && err.native == FAKE_CUDA_ERROR);
            LH_CHECK(strstr(err.message, "CUDA_ERROR_UNKNOWN (999: unknown error)"));
            bool is_named = false;
            for (size_t i = 0; i < LH_COUNT_OF(names); i++) {
                size_t length = strlen(names[i]);
                if (strncmp(err.message, names[i], length) != 0 ||
                    !strchr(": ", err.message[length]))
                    continue;
                was_named[i] = is_named = true;
            }
            LH_CHECK(is_named);
        }
        if (dev)
            dev->ops->destroy(dev);
        LH_CHECK(alloc.live_count == 0 && fake_cuda_live_count() == 0);
        LH_CHECK(fail_after < CALL_COUNT_MAX);
        /* Ends with the first run in which nothing was left to fail. */
    } while (fake_cuda_call_count() > fail_after++);
    for (size_t i = 0; i < LH_COUNT_OF(names); i++)
        LH_CHECK(was_named[i]);
    lh_waker_deinit(&waker);
}

static void test_failed_submit_is_over(void)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_dev *dev = NULL;
    struct lh_error err = {0};
    lh_test_name("a copy whose submit fails is not under way any more, whichever call it was");
    int rc = -EIO;
    for (int64_t fail_after = 0; rc < 0; fail_after++) {
        LH_CHECK(fail_after < CALL_COUNT_MAX);
        fake_cuda_reset((struct fake_cuda_opts){
            .fail_after = -1, .delay_ns_max = 2000000, .seed = (uint64_t)fail_after});
        LH_CHECK(create(&alloc, NULL, 0, &dev, NULL) == 0);
        struct lh_dev_copy copy = {.host = host[0], .device = device, .bytes = BYTES};
        memset(device, 0, BYTES);
        memset(host[0], 1, BYTES);
        fake_cuda_fail_after(fail_after);
        rc = dev->ops->submit(dev, &copy, &err);
        fake_cuda_fail_after(-1);
        LH_CHECK((rc == 0) == (dev->in_flight_count == 1));
        if (rc < 0) {
            memset(host[0], 2, BYTES);
        } else {
            struct lh_dev_copy *done[1];
            while (dev->in_flight_count > 0)
                dev->ops->poll(dev, done, 1);
        }
        dev->ops->destroy(dev); /* destroy waits for everything that the driver was given */
        for (int i = 0; i < BYTES; i++)
            LH_CHECK(device[i] != 2);
    }
}

static void test_no_driver(void)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_dev *dev = NULL;
    struct lh_error err = {0};
    struct lh_dev_opts opts = {.copy_count = 4, .clock = &real_clock};
    lh_test_name("a driver that lacks a function is ENODEV, and the function is named");
#define LACK(member, name, symbol, parameters)                                                     \
    fake_cuda_reset((struct fake_cuda_opts){.fail_after = -1, .missing = (symbol)});               \
    LH_CHECK(create(&alloc, NULL, 0, &dev, &err) == -ENODEV);                                      \
    LH_CHECK(strstr(err.message, symbol) && strstr(err.message, "device='cpu'"));
    LH_CUDA_CALLS(LACK)

    lh_test_name("no GPU, or not that one, is ENODEV with the way out");
    fake_cuda_reset((struct fake_cuda_opts){.fail_after = -1, .init_result = LH_CUDA_NO_DEVICE});
    LH_CHECK(create(&alloc, NULL, 0, &dev, &err) == -ENODEV && err.native == LH_CUDA_NO_DEVICE);
    LH_CHECK(strstr(err.message, "CUDA_ERROR_NO_DEVICE") && strstr(err.message, "device='cpu'"));
    LH_CHECK(strstr(err.message, "the driver gives no description"));
    fake_cuda_reset((struct fake_cuda_opts){.fail_after = -1});
    for (int32_t index = -1; index <= FAKE_CUDA_DEVICE_COUNT; index += FAKE_CUDA_DEVICE_COUNT + 1) {
        LH_CHECK(create(&alloc, NULL, index, &dev, &err) == -ENODEV);
        LH_CHECK(strstr(err.message, index < 0 ? "-1" : "2") && strstr(err.message, "has 2"));
    }
    LH_CHECK(alloc.live_count == 0 && fake_cuda_live_count() == 0);

    lh_test_name("without a driver the message says what to install");
    if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
        printf("  not tried: this machine has a driver\n");
        return;
    }
    LH_CHECK(lh_dev_create("cuda", &opts, &alloc, &dev, &err) == -ENODEV && !dev);
    LH_CHECK(strstr(err.message, "libcuda.so.1") && strstr(err.message, "NVIDIA driver"));
    LH_CHECK(strstr(err.message, "device='cpu'") && alloc.live_count == 0);
}

static void test_kernels(void)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_dev *dev = NULL;
    struct lh_error err = {0};
    struct lh_dev_kernel *kernels[LH_DEV_KERNEL_COUNT_MAX + 1];
    lh_test_name("a kernel that is not there is refused by what the driver says, and the way out");
    fake_cuda_reset((struct fake_cuda_opts){.fail_after = -1});
    LH_CHECK(create(&alloc, NULL, 0, &dev, NULL) == 0);
    LH_CHECK(dev->ops->kernel_load(dev, "else", LH_ZO_KERNEL_NAME, &kernels[0], &err) == -EIO);
    LH_CHECK(!kernels[0] && err.native == LH_CUDA_INVALID_IMAGE);
    LH_CHECK(strstr(err.message, "CUDA_ERROR_INVALID_IMAGE") && strstr(err.message, "toolkit"));
    LH_CHECK(dev->ops->kernel_load(dev, fake_cuda_image, "other", &kernels[0], &err) == -EIO);
    LH_CHECK(!kernels[0] && strstr(err.message, "cuModuleGetFunction of other"));
    LH_CHECK(strstr(err.message, "CUDA_ERROR_NOT_FOUND"));
    for (int i = 0; i < 2; i++) { /* the places are reused */
        for (int j = 0; j <= LH_DEV_KERNEL_COUNT_MAX; j++) {
            int rc =
                dev->ops->kernel_load(dev, fake_cuda_image, LH_ZO_KERNEL_NAME, &kernels[j], &err);
            LH_CHECK(rc == (j < LH_DEV_KERNEL_COUNT_MAX ? 0 : -ENOMEM));
        }
        for (int j = 0; j <= LH_DEV_KERNEL_COUNT_MAX; j++)
            dev->ops->kernel_unload(dev, kernels[j]);
    }
    dev->ops->destroy(dev);
    LH_CHECK(alloc.live_count == 0 && fake_cuda_live_count() == 0);
}

static void test_lost(void)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_waker waker;
    struct lh_dev *dev = NULL;
    struct lh_error err = {0};
    struct lh_dev_copy copies[4];
    struct lh_dev_copy *done[2];
    uint32_t back_count = 0;
    lh_test_name("copies of a GPU that stops executing come back with EIO, once, and no more go");
    LH_CHECK(lh_waker_init(&waker, NULL) == 0);
    fake_cuda_reset((struct fake_cuda_opts){.fail_after = -1});
    LH_CHECK(create(&alloc, &waker, 0, &dev, &err) == 0);
    LH_CHECK(dev->ops->side_create(dev, &err) == 0);
    fake_cuda_pause(true);
    for (int i = 0; i < 4; i++) {
        copies[i] = (struct lh_dev_copy){.direction = (enum lh_dev_direction)(i % 2),
                                         .host = host[i % 2],
                                         .device = device,
                                         .bytes = BYTES,
                                         .is_aside = i == 2};
        LH_CHECK(dev->ops->submit(dev, &copies[i], &err) == 0);
    }
    LH_CHECK(dev->ops->poll(dev, done, 2) == 0);
    fake_cuda_break();
    while (dev->in_flight_count > 0) {
        lh_waker_prepare(&waker);
        uint32_t count = dev->ops->poll(dev, done, 2);
        for (uint32_t i = 0; i < count; i++, back_count++) {
            LH_CHECK(done[i]->result == -EIO && done[i]->completed_ns >= done[i]->started_ns);
            done[i]->result = 1;
        }
        if (count == 0)
            lh_waker_wait(&waker, LH_DEV_SLEEP_MS_MAX);
    }
    LH_CHECK(back_count == 4 && dev->ops->poll(dev, done, 2) == 0);
    LH_CHECK(dev->ops->submit(dev, &copies[0], &err) == -EIO && dev->in_flight_count == 0);
    LH_CHECK(err.native == LH_CUDA_ILLEGAL_ADDRESS &&
             strstr(err.message, "has stopped executing work"));
    LH_CHECK(strstr(err.message, "CUDA_LAUNCH_BLOCKING"));
    dev->ops->destroy(dev);
    LH_CHECK(alloc.live_count == 0 && fake_cuda_live_count() == 0);
    lh_waker_deinit(&waker);
}

/* A clock that only the test advances. */
static uint64_t hand_now(void *context)
{
    (void)context;
    return atomic_load(&hand_ns);
}

static void test_refused_once(void)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_dev *dev = NULL;
    struct lh_dev_copy copy = {.host = host[0], .device = device, .bytes = BYTES};
    struct lh_dev_copy *done[1];
    lh_test_name("a query that the driver refuses once loses no copy that is under way");
    fake_cuda_reset((struct fake_cuda_opts){.fail_after = -1});
    LH_CHECK(create(&alloc, NULL, 0, &dev, NULL) == 0);
    real_clock = (struct lh_clock){.now_ns = hand_now};
    for (int64_t fail_after = 0; fail_after < 4; fail_after++) {
        fake_cuda_pause(true);
        LH_CHECK(dev->ops->submit(dev, &copy, NULL) == 0);
        LH_CHECK(dev->ops->poll(dev, done, 1) == 0);
        hand_ns += SILENCE_NS;
        /* The context first, then a query of each stream: a wait for them would not end yet. */
        fake_cuda_fail_after(fail_after == 0 ? 0 : -1);
        LH_CHECK(dev->ops->poll(dev, done, 1) == 0);
        fake_cuda_fail_after(fail_after == 0 ? -1 : fail_after);
        fake_cuda_pause(false);
        while (dev->in_flight_count > 0) {
            hand_ns += SILENCE_NS;
            dev->ops->poll(dev, done, 1);
        }
        LH_CHECK(copy.result == 0);
        fake_cuda_fail_after(-1);
    }
    dev->ops->destroy(dev);
    real_clock = lh_clock_real();
    LH_CHECK(alloc.live_count == 0 && fake_cuda_live_count() == 0);
}

static void test_allocations(void)
{
    struct lh_error err = {0};
    struct lh_dev *dev = NULL;
    lh_test_name("cuda: an allocation that fails leaves nothing, and fences need none");
    fake_cuda_reset((struct fake_cuda_opts){.fail_after = -1});
    int rc = -ENOMEM;
    int64_t fail_after = 0;
    for (; rc == -ENOMEM; fail_after++) {
        struct lh_alloc alloc = LH_ALLOC_INIT;
        alloc.fail_after = fail_after;
        rc = create(&alloc, NULL, 0, &dev, &err);
        LH_CHECK(rc == 0 || (rc == -ENOMEM && err.code == rc));
        if (rc == 0) {
            struct lh_dev_fence *fence = NULL;
            rc = dev->ops->side_create(dev, &err);
            LH_CHECK(rc == 0 || rc == -ENOMEM);
            lh_alloc_seal(&alloc);
            LH_CHECK(dev->ops->fence_create(dev, &fence, &err) == 0);
            dev->ops->fence_destroy(dev, fence);
            dev->ops->destroy(dev);
        }
        LH_CHECK(alloc.live_count == 0 && fake_cuda_live_count() == 0);
    }
    LH_CHECK(rc == 0 && fail_after == 9);
}

int main(void)
{
    real_clock = lh_clock_real();
    test_header();
    test_every_call_may_fail();
    test_failed_submit_is_over();
    test_no_driver();
    test_kernels();
    test_lost();
    test_refused_once();
    test_allocations();
    return 0;
}
