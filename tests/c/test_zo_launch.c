/*
 * Zeroth-order training on an accelerator: what a stream executes has the bits of lh_zo_apply().
 * On a GPU where LH_TEST_CUDA asks for it, and LH_TEST_FATBIN names its kernels.
 */
#include "compute/zo_launch.h"

#include "compute/zo_kernels.h"
#include "dev_fixture.h"
#include "zo_fixture.h"

#define COUNT_MAX 40000
#define OP_COUNT_MAX 300

static void ops_make(struct lh_zo_op *ops, uint32_t op_count, uint64_t *seed)
{
    zo_ops_make(ops, op_count, LH_ZO_OP_DRAW, seed);
    for (uint32_t i = 0; i < op_count; i++)
        if (ops[i].is_same) /* whose stream is not looked at */
            ops[i].stream = (struct lh_zo_stream){0};
}

static void *image_of(const char *kind)
{
    if (strcmp(kind, "fake") == 0)
        return (void *)(uintptr_t)fake_cuda_image;
    FILE *file = fopen(getenv("LH_TEST_FATBIN"), "rb");
    void *image = calloc(1, 1 << 22);
    LH_CHECK(file && image && fread(image, 1, 1 << 22, file) > 0);
    LH_CHECK(fclose(file) == 0);
    return image;
}

static void test_launch(const char *kind)
{
    struct machine machine;
    struct lh_dev_kernel *kernel = NULL;
    static struct lh_zo_op ops[OP_COUNT_MAX];
    uint64_t seed = 5;
    lh_test_name("%s: launches give the bits of lh_zo_apply, ordered with copies", kind);
    machine_open(&machine, kind, (struct lh_dev_opts){.copy_count = 8});
    const struct lh_dev_ops *dev_ops = machine.dev->ops;
    void *image = image_of(kind);
    LH_CHECK(dev_ops->kernel_load(machine.dev, image, LH_ZO_KERNEL_NAME, &kernel, NULL) == 0);
    float *in = machine_host_allocate(&machine, COUNT_MAX * sizeof(float));
    float *out = machine_host_allocate(&machine, COUNT_MAX * sizeof(float));
    float *expected = calloc(COUNT_MAX, sizeof(float));
    float *device = machine_allocate(&machine, COUNT_MAX * sizeof(float));
    struct lh_dev_fence *arrived = machine_fence(&machine), *computed = machine_fence(&machine);
    for (int turn = 0; turn < (machine_is_fast() ? 20 : 60); turn++) {
        uint64_t count = lh_test_random(&seed) % (turn % 4 ? 3000 : COUNT_MAX);
        uint64_t skip = lh_test_random(&seed) % (COUNT_MAX - count);
        uint64_t first = lh_test_random(&seed) % (turn % 2 ? 300 : UINT64_C(1) << 49);
        uint32_t op_count = (uint32_t)(lh_test_random(&seed) % (turn % 3 ? 7 : OP_COUNT_MAX));
        ops_make(ops, op_count, &seed);
        for (int i = 0; i < COUNT_MAX; i++)
            in[i] = expected[i] = (float)(int32_t)lh_test_random(&seed) * 0x1p-31f;
        lh_zo_apply(expected + skip, expected + skip, first, count, ops, op_count);
        struct lh_dev_copy copies[] = {
            {.direction = LH_DEV_DIRECTION_IN, .host = in, .done = arrived},
            {.direction = LH_DEV_DIRECTION_OUT, .host = out, .after = computed}};
        for (int i = 0; i < 2; i++) {
            copies[i].device = device;
            copies[i].bytes = COUNT_MAX * sizeof(float);
        }
        machine_submit(&machine, &copies[0]);
        machine_await(&machine, arrived);
        LH_CHECK(lh_zo_launch(machine.dev, kernel, machine.stream, device + skip, first, count, ops,
                              op_count, NULL) == 0);
        memset(ops, 0xa5, sizeof(ops)); /* they were read */
        machine_record(&machine, computed);
        machine_submit(&machine, &copies[1]);
        machine_drain(&machine);
        LH_CHECK(memcmp(out, expected, COUNT_MAX * sizeof(float)) == 0);
    }
    dev_ops->kernel_unload(machine.dev, kernel);
    dev_ops->fence_destroy(machine.dev, arrived);
    dev_ops->fence_destroy(machine.dev, computed);
    machine_free(&machine, device);
    machine_host_free(&machine, in);
    machine_host_free(&machine, out);
    free(expected);
    free(image == (const void *)fake_cuda_image ? NULL : image);
    machine_close(&machine);
}

int main(void)
{
    test_launch("fake");
    if (getenv("LH_TEST_CUDA") && getenv("LH_TEST_FATBIN"))
        test_launch("cuda");
    return 0;
}
