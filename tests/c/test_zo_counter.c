/* What a GPU's threads do in zeroth-order training, done by the CPU: the bits of lh_zo_apply(). */
#include "../../cuda/zo_counter.h"

#include "lh_test.h"
#include "zo_fixture.h"

#define COUNT 1000
#define MARGIN 70

_Static_assert(sizeof(struct lh_zo_op) == 48 && sizeof(struct lh_zo_batch) == LH_ZO_BATCH_BYTES,
               "as the GPU's compiler lays it out");
_Static_assert(sizeof(struct lh_zo_batch) <= 4096, "a kernel's arguments");

/* In any order of the threads, which know nothing of each other. */
static void threads_run(const struct lh_zo_batch *batch, uint64_t thread_count)
{
    for (uint64_t i = thread_count; i-- > 0;)
        zo_thread(batch, i, thread_count);
}

static void test_batches(void)
{
    uint64_t seed = 11;
    lh_test_name("threads give the bits of lh_zo_apply, and touch nothing else");
    for (int turn = 0; turn < 300; turn++) {
        float expected[COUNT + 2 * MARGIN], values[COUNT + 2 * MARGIN];
        uint64_t count = turn % 3 ? lh_test_random(&seed) % COUNT : lh_test_random(&seed) % 80;
        struct lh_zo_batch batch = {
            .address = (uintptr_t)(values + MARGIN),
            .first = turn % 2 ? lh_test_random(&seed) % (LH_ZO_ELEMENT_COUNT_MAX - COUNT)
                              : lh_test_random(&seed) % 200,
            .count = count,
            .op_count = (uint32_t)(lh_test_random(&seed) % (LH_ZO_BATCH_OPS + 1)),
        };
        zo_ops_make(batch.ops, batch.op_count, LH_ZO_OP_DRAW + 1, &seed);
        for (size_t i = 0; i < LH_COUNT_OF(values); i++)
            values[i] = expected[i] = (float)(int32_t)lh_test_random(&seed) * 0x1p-31f;
        lh_zo_apply(expected + MARGIN, expected + MARGIN, batch.first, count, batch.ops,
                    batch.op_count);
        threads_run(&batch, 1 + lh_test_random(&seed) % 500);
        LH_CHECK(memcmp(values, expected, sizeof(values)) == 0);
    }
}

static void test_z(void)
{
    enum { N = 1 << 20 };
    static float expected[N], values[N];
    /* Of the stream below: where a radius, a sine, a cosine are 0; and counters that pass 2^32. */
    static const uint64_t middles[] = {37343555, 264304521, 74206569, 4951774, UINT64_C(1) << 34};
    lh_test_name("z of a million elements, zeros' signs, counters past 2^32");
    for (size_t i = 0; i < LH_COUNT_OF(middles); i++) {
        struct lh_zo_batch batch = {
            .address = (uintptr_t)values,
            .first = middles[i] - N / 2,
            .count = N,
            .op_count = 1,
            .ops = {{.kind = LH_ZO_OP_DRAW, .stream = {1, 2, 3, 4}}},
        };
        lh_zo_apply(expected, expected, batch.first, N, batch.ops, 1);
        threads_run(&batch, LH_ZO_BATCH_THREADS);
        LH_CHECK(memcmp(values, expected, sizeof(values)) == 0);
    }
}

static void test_extremes(void)
{
    static const float numbers[] = {0.0f,     -0.0f,     0x1p-149f, -0x1p-126f,  0x1p127f,
                                    INFINITY, -INFINITY, 1.0f,      -0x1.8p-130f};
    float expected[COUNT], values[COUNT];
    lh_test_name("zeros, subnormal numbers and infinities come out as on the CPU");
    for (size_t i = 0; i < LH_COUNT_OF(numbers); i++) {
        struct lh_zo_batch batch = {
            .address = (uintptr_t)values,
            .first = 7,
            .count = COUNT,
            .op_count = 2,
            .ops = {{.kind = LH_ZO_OP_PERTURB, .stream = {5}, .scale = 0x1p-140f},
                    {.kind = LH_ZO_OP_UPDATE, .is_same = true, .scale = -0.0f, .lr = 0x1p-130f}},
        };
        for (int j = 0; j < COUNT; j++)
            values[j] = expected[j] = numbers[i];
        lh_zo_apply(expected, expected, 7, COUNT, batch.ops, 2);
        threads_run(&batch, 100);
        LH_CHECK(memcmp(values, expected, sizeof(values)) == 0);
    }
}

int main(void)
{
    test_batches();
    test_z();
    test_extremes();
    return 0;
}
