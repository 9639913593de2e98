/*
 * Test zeroth-order training on an accelerator: the stream's results have the bits of
 * lh_zo_apply(). Runs on a GPU if LH_TEST_CUDA is set and LH_TEST_FATBIN names its kernels.
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
        if (ops[i].is_same) /* the stream of such an op is not read */
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
    for (int turn = 0; turn < (lh_test_is_fast() ? 20 : 60); turn++) {
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
        memset(ops, 0xa5, sizeof(ops)); /* the ops were read, so they may change */
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

#define KEPT_COUNT_MAX 10000
#define STATE_BYTES (4 * KEPT_COUNT_MAX)

/* Bytes of the state followed by the values, copied in and out at once. */
struct kept_rig {
    struct machine machine;
    struct lh_dev_kernel *kernel;
    struct lh_dev_fence *arrived, *computed;
    char *in, *out, *expected, *device;
};

static void kept_rig_open(struct kept_rig *rig, const char *kind, void *image)
{
    machine_open(&rig->machine, kind, (struct lh_dev_opts){.copy_count = 8});
    LH_CHECK(rig->machine.dev->ops->kernel_load(rig->machine.dev, image, LH_ZO_KERNEL_NAME,
                                                &rig->kernel, NULL) == 0);
    rig->in = machine_host_allocate(&rig->machine, 2 * STATE_BYTES);
    rig->out = machine_host_allocate(&rig->machine, 2 * STATE_BYTES);
    rig->expected = calloc(2, STATE_BYTES);
    rig->device = machine_allocate(&rig->machine, 2 * STATE_BYTES);
    rig->arrived = machine_fence(&rig->machine);
    rig->computed = machine_fence(&rig->machine);
}

static void kept_rig_close(struct kept_rig *rig)
{
    const struct lh_dev_ops *dev_ops = rig->machine.dev->ops;
    dev_ops->kernel_unload(rig->machine.dev, rig->kernel);
    dev_ops->fence_destroy(rig->machine.dev, rig->arrived);
    dev_ops->fence_destroy(rig->machine.dev, rig->computed);
    machine_free(&rig->machine, rig->device);
    machine_host_free(&rig->machine, rig->in);
    machine_host_free(&rig->machine, rig->out);
    free(rig->expected);
    machine_close(&rig->machine);
}

/* Advance `in` on the device, into `out`, and in main memory, into `expected`. */
static void kept_rig_lead(struct kept_rig *rig, const struct lh_zo_kept *formats, uint64_t first,
                          uint64_t count, struct lh_zo_op *ops, uint32_t op_count)
{
    struct machine *machine = &rig->machine;
    struct lh_zo_kept kept = *formats;
    struct lh_dev_copy in = {.direction = LH_DEV_DIRECTION_IN,
                             .host = rig->in,
                             .device = rig->device,
                             .bytes = 2 * STATE_BYTES,
                             .done = rig->arrived};
    struct lh_dev_copy out = {.direction = LH_DEV_DIRECTION_OUT,
                              .host = rig->out,
                              .device = rig->device,
                              .bytes = 2 * STATE_BYTES,
                              .after = rig->computed};
    memcpy(rig->expected, rig->in, 2 * STATE_BYTES);
    kept.state = rig->expected;
    kept.values = rig->expected + STATE_BYTES;
    lh_zo_lead(&kept, first, count, ops, op_count);
    kept.state = rig->device;
    kept.values = rig->device + STATE_BYTES;
    machine_submit(machine, &in);
    machine_await(machine, rig->arrived);
    LH_CHECK(lh_zo_launch_lead(machine->dev, rig->kernel, machine->stream, &kept, first, count, ops,
                               op_count, NULL) == 0);
    memset(ops, 0xa5, op_count * sizeof(*ops)); /* the ops were read, so they may change */
    machine_record(machine, rig->computed);
    machine_submit(machine, &out);
    machine_drain(machine);
    LH_CHECK(memcmp(rig->out, rig->expected, 2 * STATE_BYTES) == 0);
}

static void test_launch_lead(const char *kind)
{
    static struct lh_zo_op ops[OP_COUNT_MAX];
    struct kept_rig rig;
    void *image = image_of(kind);
    uint64_t seed = 6;
    lh_test_name("%s: what is kept is led by launches with the bits of lh_zo_lead", kind);
    kept_rig_open(&rig, kind, image);
    for (int turn = 0; turn < (lh_test_is_fast() ? 24 : 72); turn++) {
        struct lh_zo_kept formats = {.state_format = (enum lh_zo_format)(turn % 4),
                                     .value_format = (enum lh_zo_format)(turn / 4 % 3)};
        uint64_t count = lh_test_random(&seed) % (turn % 4 ? 3000 : KEPT_COUNT_MAX);
        uint64_t first = lh_test_random(&seed) % (turn % 2 ? 300 : UINT64_C(1) << 49);
        uint32_t op_count = (uint32_t)(lh_test_random(&seed) % (turn % 3 ? 7 : OP_COUNT_MAX));
        float *wide = (float *)rig.in;
        zo_rounds_make(ops, op_count, formats.state_format, &seed);
        for (int i = 0; i < 2 * KEPT_COUNT_MAX; i++)
            wide[i] = (float)(int32_t)lh_test_random(&seed) * 0x1p-31f;
        if (formats.state_format != LH_ZO_FORMAT_F32)
            for (int i = 0; i < KEPT_COUNT_MAX; i++) /* the numbers are finite in every format */
                ((uint16_t *)rig.in)[i] = (uint16_t)lh_test_random(&seed) & 0xBBBB;
        kept_rig_lead(&rig, &formats, first, count, ops, op_count);
    }
    kept_rig_close(&rig);
    free(image == (const void *)fake_cuda_image ? NULL : image);
}

/*
 * Add update_count operations of a step and a ROUND, step_count times, and perturb_count
 * operations.
 */
static uint32_t steps_make(struct lh_zo_op *ops, uint32_t step_count, uint32_t update_count,
                           uint32_t perturb_count)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i <= step_count; i++) {
        uint32_t end = n + (i < step_count ? update_count : perturb_count);
        for (; n < end; n++)
            ops[n] = (struct lh_zo_op){
                .kind = LH_ZO_OP_PERTURB, .stream = {1, n % 1000, 2, i}, .scale = 0x1p-8f};
        if (i < step_count)
            ops[n++] = (struct lh_zo_op){.kind = LH_ZO_OP_ROUND,
                                         .stream = {1, LH_ZO_SAMPLE_ROUND, 2, i},
                                         .format = LH_ZO_FORMAT_F8};
    }
    return n;
}

static void test_cuts(void)
{
    static struct lh_zo_op ops[OP_COUNT_MAX];
    static const uint32_t rows[][3] = {{0, 0, 0},  {1, 63, 0},  {1, 63, 64}, {1, 63, 1},
                                       {0, 0, 64}, {2, 31, 64}, {7, 12, 40}, {100, 1, 2}};
    static const uint32_t refused[][3] = {{0, 0, 65}, {1, 64, 0}, {3, 2, 65}, {2, 64, 1}};
    struct kept_rig rig;
    struct lh_zo_kept formats = {.state_format = LH_ZO_FORMAT_F8, .value_format = LH_ZO_FORMAT_F16};
    lh_test_name("launches are cut behind rounds alone, and what cannot be cut is refused");
    kept_rig_open(&rig, "fake", (void *)(uintptr_t)fake_cuda_image);
    for (size_t i = 0; i < LH_COUNT_OF(rows); i++) {
        uint32_t op_count = steps_make(ops, rows[i][0], rows[i][1], rows[i][2]);
        memset(rig.in, 0x31, 2 * STATE_BYTES);
        kept_rig_lead(&rig, &formats, 5, 1000, ops, op_count);
    }
    for (size_t i = 0; i < LH_COUNT_OF(refused); i++) {
        struct lh_error err = {0};
        uint32_t op_count = steps_make(ops, refused[i][0], refused[i][1], refused[i][2]);
        LH_CHECK(lh_zo_launch_check(ops, op_count, &err) == -EINVAL);
        LH_CHECK(strstr(err.message, "at most 64 operations") != NULL);
        LH_CHECK(lh_zo_launch_lead(rig.machine.dev, rig.kernel, rig.machine.stream, &formats, 0, 0,
                                   ops, op_count, NULL) == -EINVAL);
    }
    kept_rig_close(&rig);
}

int main(void)
{
    test_launch("fake");
    test_launch_lead("fake");
    test_cuts();
    if (getenv("LH_TEST_CUDA") && getenv("LH_TEST_FATBIN")) {
        test_launch("cuda");
        test_launch_lead("cuda");
    }
    return 0;
}
