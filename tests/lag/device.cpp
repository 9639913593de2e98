/* The late device: the driver, memory, streams and events. See late.h. */
#include "late.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <unordered_map>

namespace
{

constexpr auto LATE = late::DEVICE;
constexpr size_t ALIGNMENT = 512;
constexpr size_t MEMORY_BYTES = size_t{8} << 30;
constexpr int STREAM_COUNT_MAX = 32;
constexpr int STREAM_POOL_COUNT = 16;

using late::Work;

/* --- the driver: the functions of libcuda.so.1 that torch itself would call --- */

struct Driver {
    lh_cuda_calls calls;
    CUctx_st *context = nullptr;
    void open();
};

Driver driver;

/* Calls of the driver need a current context. */
struct Entered {
    Entered()
    {
        check(driver.calls.context_push(driver.context), "cuCtxPushCurrent");
    }
    ~Entered()
    {
        CUctx_st *context = nullptr;
        driver.calls.context_pop(&context);
    }
    static void check(unsigned result, const char *call)
    {
        TORCH_CHECK(result == 0, "late: ", call, " returned ", result);
    }
};

void Driver::open()
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    TORCH_CHECK(library, "late: ", dlerror());
#define FIND(member, name, symbol, parameters)                                                     \
    *reinterpret_cast<void **>(&calls.member) = dlsym(library, symbol);                            \
    TORCH_CHECK(calls.member, "late: the driver has no " symbol);
    LH_CUDA_CALLS(FIND)
#undef FIND
    int device = 0;
    Entered::check(calls.init(0), "cuInit");
    Entered::check(calls.device_get(&device, 0), "cuDeviceGet");
    Entered::check(calls.context_retain(&context, device), "cuDevicePrimaryCtxRetain");
}

std::atomic<int64_t> enqueued_count{0}, executed_count{0}, wait_count{0}, live_count{0};
std::atomic<void (*)(const char *)> hook{nullptr};
std::atomic<bool> is_ending{false};
CUstream_st *handles[STREAM_COUNT_MAX];
std::atomic<int> stream_count{1}; /* the first is the default stream, whose handle is NULL */
thread_local int current = 0;
std::mutex hold_mutex;
std::condition_variable hold_ends;
std::atomic<bool> is_held{false};
std::mutex failure_mutex;
std::string failure; /* of the first operation that failed; the next wait raises it */

void run(void *context)
{
    std::unique_ptr<Work> work(static_cast<Work *>(context));
    c10::InferenceMode no_inference(false);
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    try {
        (*work)();
    } catch (const std::exception &error) {
        std::lock_guard<std::mutex> guard(failure_mutex);
        failure = failure.empty() ? error.what() : failure;
    }
}

void enqueue(int stream, Work work)
{
    auto *given = new Work(std::move(work));
    Entered entered;
    Entered::check(driver.calls.host_call(handles[stream], run, given), "cuLaunchHostFunc");
}

/* The host waits for a stream; reason is reported. */
void wait_for(int stream, const char *reason)
{
    ++wait_count;
    if (auto *report = hook.load())
        report(reason);
    Entered entered;
    Entered::check(driver.calls.stream_synchronize(handles[stream]), "cuStreamSynchronize");
    std::lock_guard<std::mutex> guard(failure_mutex);
    std::string found = std::exchange(failure, "");
    TORCH_CHECK(found.empty(), "late: an operation failed on the device: ", found);
}

/* --- memory ---- */

struct Block {
    size_t bytes;
    int stream;
    std::vector<int> others; /* streams that use it, too (record_stream) */
};

struct Memory {
    std::mutex mutex;
    uint8_t *base = nullptr; /* what tensors are made of; not accessible */
    uint8_t *view = nullptr; /* the same memory, for the driver's threads */
    size_t used_bytes = 0;
    size_t live_bytes = 0;
    std::unordered_map<void *, Block> live;
    std::multimap<std::pair<int, size_t>, void *> free;

    void *seen(void *address) const
    {
        return driver_seen(address);
    }
    void open();
    void *take(size_t bytes);
    void give(void *address);
    void order(int stream, int after);
    void use(void *address, int stream);
};

Memory memory;

void Memory::open()
{
    int file = memfd_create("late", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, MEMORY_BYTES) == 0, "late: memfd_create");
    auto map = [&](int protection) {
        void *at = mmap(nullptr, MEMORY_BYTES, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
        TORCH_CHECK(at != MAP_FAILED, "late: mmap");
        return static_cast<uint8_t *>(at);
    };
    base = map(PROT_NONE);
    view = map(PROT_READ | PROT_WRITE);
    close(file);
}

void *Memory::take(size_t bytes)
{
    std::lock_guard<std::mutex> guard(mutex);
    auto found = free.find({current, bytes});
    void *address = base + used_bytes;
    if (found != free.end()) {
        address = found->second;
        free.erase(found);
    } else {
        TORCH_CHECK_WITH(OutOfMemoryError, used_bytes + bytes <= MEMORY_BYTES,
                         "late: the device is full");
        used_bytes += bytes;
        memset(seen(address), 0xff, bytes);
    }
    live[address] = {bytes, current, {}};
    live_bytes += bytes;
    return address;
}

/* stream waits for what is enqueued in another one. */
void Memory::order(int stream, int after)
{
    Entered entered;
    CUevent_st *event = nullptr;
    Entered::check(driver.calls.event_create(&event, LH_CUDA_EVENT_DISABLE_TIMING),
                   "cuEventCreate");
    Entered::check(driver.calls.event_record(event, handles[after]), "cuEventRecord");
    Entered::check(driver.calls.stream_wait(handles[stream], event, 0), "cuStreamWaitEvent");
    driver.calls.event_destroy(event);
}

/* The memory is the next one's at once: from here on in its stream, it has no values. */
void Memory::give(void *address)
{
    Block block;
    {
        std::lock_guard<std::mutex> guard(mutex);
        block = live.at(address);
        live.erase(address);
        live_bytes -= block.bytes;
    }
    if (is_ending)
        return;
    for (int other : block.others)
        order(block.stream, other);
    void *at = seen(address);
    enqueue(block.stream, [at, bytes = block.bytes] { memset(at, 0xff, bytes); });
    std::lock_guard<std::mutex> guard(mutex);
    free.insert({{block.stream, block.bytes}, address});
}

void Memory::use(void *address, int stream)
{
    std::lock_guard<std::mutex> guard(mutex);
    auto found = live.find(address);
    if (found != live.end() && found->second.stream != stream)
        found->second.others.push_back(stream);
}

struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        c10::Device device(LATE, 0);
        if (bytes == 0)
            return {nullptr, nullptr, &release, device};
        void *address = memory.take((bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
        return {address, address, &release, device};
    }
    static void release(void *address)
    {
        if (address)
            memory.give(address);
    }
    c10::DeleterFnPtr raw_deleter() const override
    {
        return &release;
    }
    void copy_data(void *to, const void *from, size_t bytes) const override
    {
        void *target = memory.seen(to);
        const void *source = memory.seen(const_cast<void *>(from));
        late::launch([=] { memcpy(target, source, bytes); });
    }
};

Allocator only_allocator;
REGISTER_ALLOCATOR(LATE, &only_allocator);

/* --- the device, its streams and its events ---- */

c10::Stream stream_of(int number)
{
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(LATE, 0), number);
}

int stream_make()
{
    int number = stream_count++;
    TORCH_CHECK(number < STREAM_COUNT_MAX, "late: too many streams");
    Entered entered;
    Entered::check(driver.calls.stream_create(&handles[number], LH_CUDA_STREAM_NON_BLOCKING),
                   "cuStreamCreate");
    driver_computes(handles[number]);
    return number;
}

/* Like torch's pool of 32 streams a priority, it gives streams away again in turn. */
int stream_from_pool()
{
    static int pool[STREAM_POOL_COUNT];
    static unsigned taken;
    static std::mutex mutex;
    std::lock_guard<std::mutex> guard(mutex);
    int &number = pool[taken++ % STREAM_POOL_COUNT];
    if (!number) /* the default stream is 0 */
        number = stream_make();
    return number;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override
    {
        return LATE;
    }
    c10::Device exchangeDevice(c10::Device) const override
    {
        return getDevice();
    }
    c10::Device getDevice() const override
    {
        return {LATE, 0};
    }
    void setDevice(c10::Device) const override
    {
    }
    void uncheckedSetDevice(c10::Device) const noexcept override
    {
    }
    c10::Stream getStream(c10::Device) const override
    {
        return stream_of(current);
    }
    c10::Stream getDefaultStream(c10::Device) const override
    {
        return stream_of(0);
    }
    c10::Stream getNewStream(c10::Device, int) const override
    {
        return stream_of(stream_make());
    }
    c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override
    {
        return stream_of(stream_from_pool());
    }
    c10::Stream exchangeStream(c10::Stream stream) const override
    {
        return stream_of(std::exchange(current, static_cast<int>(stream.id())));
    }
    void *getStreamNativeHandle(const c10::Stream stream) const override
    {
        return handles[stream.id()];
    }
    c10::DeviceIndex deviceCount() const noexcept override
    {
        return 1;
    }
    void record(void **event, const c10::Stream &stream, c10::DeviceIndex,
                c10::EventFlag) const override
    {
        Entered entered;
        auto *made = static_cast<CUevent_st *>(*event);
        if (!made)
            Entered::check(driver.calls.event_create(&made, LH_CUDA_EVENT_DISABLE_TIMING),
                           "cuEventCreate");
        *event = made;
        Entered::check(driver.calls.event_record(made, handles[stream.id()]), "cuEventRecord");
    }
    void block(void *event, const c10::Stream &stream) const override
    {
        Entered entered;
        Entered::check(
            driver.calls.stream_wait(handles[stream.id()], static_cast<CUevent_st *>(event), 0),
            "cuStreamWaitEvent");
    }
    bool queryEvent(void *event) const override
    {
        return !event || driver_has_passed(static_cast<CUevent_st *>(event));
    }
    void synchronizeEvent(void *event) const override
    {
        static const int helper = stream_make(); /* there is no cuEventSynchronize */
        block(event, stream_of(helper));
        wait_for(helper, "event");
    }
    void destroyEvent(void *event, c10::DeviceIndex) const noexcept override
    {
        if (!event || is_ending)
            return;
        Entered entered;
        driver.calls.event_destroy(static_cast<CUevent_st *>(event));
    }
    bool queryStream(const c10::Stream &stream) const override
    {
        Entered entered;
        return driver.calls.stream_query(handles[stream.id()]) == 0;
    }
    void synchronizeStream(const c10::Stream &stream) const override
    {
        wait_for(static_cast<int>(stream.id()), "stream");
    }
    void synchronizeDevice(c10::DeviceIndex) const override
    {
        for (int i = 0; i < stream_count; i++)
            wait_for(i, "device");
    }
    void recordDataPtrOnStream(const c10::DataPtr &data, const c10::Stream &stream) const override
    {
        memory.use(data.get_context(), static_cast<int>(stream.id()));
    }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

} // namespace

namespace late
{

void launch(Work work)
{
    ++enqueued_count;
    enqueue(current, [work = std::move(work)] {
        work();
        ++executed_count;
    });
}

void wait(const char *reason)
{
    wait_for(current, reason);
}

void wait_for_all()
{
    Guard().synchronizeDevice(0);
}

void *seen(void *address)
{
    return memory.seen(address);
}

c10::Allocator *allocator()
{
    return &only_allocator;
}

void use(const at::Tensor &tensor, c10::Stream stream)
{
    memory.use(tensor.storage().data_ptr().get_context(), static_cast<int>(stream.id()));
}

} // namespace late

/* --- what late.py calls ---- */

extern "C" {

void late_open(void)
{
    memory.open();
    driver.open();
    driver_memory(memory.base, MEMORY_BYTES, memory.view);
}

void late_end(void)
{
    driver_drain();
    is_ending = true;
}

void late_hook(void (*report)(const char *))
{
    hook = report;
}

void late_counts(int64_t *counts)
{
    counts[0] = enqueued_count;
    counts[1] = executed_count;
    counts[2] = wait_count;
    counts[3] = static_cast<int64_t>(memory.live_bytes);
}

/* Forget free memory, if none is in use. */
bool late_trim(void)
{
    driver_drain();
    std::lock_guard<std::mutex> guard(memory.mutex);
    if (!memory.live.empty())
        return false;
    memory.free.clear();
    memory.used_bytes = 0;
    return madvise(memory.view, MEMORY_BYTES, MADV_REMOVE) == 0;
}

int late_stream_make(void)
{
    return stream_from_pool();
}

int late_stream_set(int number)
{
    return std::exchange(current, number);
}

void late_stream_order(int stream, int after)
{
    memory.order(stream, after);
}

void late_stream_wait(int number)
{
    wait_for(number, "stream");
}

void late_device_wait(void)
{
    late::wait_for_all();
}

/* Make a stream stop at this place of its work, until late_release(). */
void late_hold(int number)
{
    is_held = true;
    enqueue(number, [] {
        std::unique_lock<std::mutex> guard(hold_mutex);
        hold_ends.wait(guard, [] { return !is_held; });
    });
}

void late_release(void)
{
    std::lock_guard<std::mutex> guard(hold_mutex);
    is_held = false;
    hold_ends.notify_all();
}

void *late_stream_handle(int number)
{
    return handles[number];
}

/* For DLPack's exchange table: the stream of the calling thread. */
int late_current_work_stream(int32_t type, int32_t, void **stream)
{
    *stream = type == static_cast<int32_t>(2) ? handles[current] : nullptr;
    return 0;
}
}
