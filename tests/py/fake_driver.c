/* tests/c/fake_cuda.c as libcuda.so.1, for a process that has no real driver. */
#include "../c/fake_cuda.c"

/* A macro's name and its list of parameters must not be in parentheses. */
#define EXPORT(member, name, symbol, parameters)                                                   \
    extern __attribute__((                                                                         \
        visibility("default"),                                                                     \
        alias("fake_" #member))) unsigned exported_##member parameters __asm__(symbol);
LH_CUDA_CALLS(EXPORT)
LH_CUDA_OPTIONAL_CALLS(EXPORT)

__attribute__((visibility("default"))) void driver_drain(void);
__attribute__((visibility("default"))) uint64_t driver_live_count(void);

/* All that was enqueued is executed. */
void driver_drain(void)
{
    pushed_count++;
    LH_CHECK(fake_context_synchronize() == 0);
    pushed_count--;
}

uint64_t driver_live_count(void)
{
    return fake_cuda_live_count();
}

__attribute__((constructor)) static void driver_begin(void)
{
    fake_cuda_reset((struct fake_cuda_opts){.fail_after = -1, .delay_ns_max = 200000, .seed = 3});
}
