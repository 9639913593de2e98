/* Run the GPU's zeroth-order kernel on the CPU: it has to give the bits of lh_zo_apply(). */
#include "../../cuda/zo_counter.h"

#include "lh_test.h"
#include "zo_fixture.h"

#define COUNT 1000
#define MARGIN 70

_Static_assert(sizeof(struct lh_zo_op) == 48 && sizeof(struct lh_zo_batch) == LH_ZO_BATCH_BYTES,
               "as the GPU's compiler lays it out");
_Static_assert(sizeof(struct lh_zo_batch) <= 4096, "a kernel's arguments");

/* The threads run in any order, because they do not depend on each other. */
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
            .values = (uintptr_t)(values + MARGIN),
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

/* Make numbers of every kind in any format, as bytes, except NaN, whose payload is unspecified. */
static void bytes_make(uint8_t *bytes, uint64_t count, enum lh_zo_format format, uint64_t *seed)
{
    const uint64_t size = lh_zo_format_bytes(format);
    for (uint64_t i = 0; i < count * size; i++)
        bytes[i] = (uint8_t)lh_test_random(seed);
    for (uint64_t i = 0; i < count; i++) {
        float value;
        if (format == LH_ZO_FORMAT_F32)
            memcpy(&value, bytes + i * size, size);
        else
            lh_zo_widen_ref(&value, bytes + i * size, format, 1);
        if (isnan(value))
            memset(bytes + i * size, 0, size);
    }
}

static void test_kept(void)
{
    uint64_t seed = 17;
    lh_test_name("threads give the bits of lh_zo_lead, whatever formats, and touch nothing else");
    for (int turn = 0; turn < 600; turn++) {
        enum { BYTES = 4 * (COUNT + 2 * MARGIN) };
        static uint8_t state[BYTES], values[BYTES], state_expected[BYTES], expected[BYTES];
        uint64_t count = turn % 3 ? lh_test_random(&seed) % COUNT : lh_test_random(&seed) % 80;
        struct lh_zo_kept kept = {state_expected + 4 * MARGIN, (enum lh_zo_format)(turn % 4),
                                  expected + 4 * MARGIN, (enum lh_zo_format)(turn / 4 % 3)};
        bool has_values = turn % 7 > 0;
        struct lh_zo_batch batch = {
            .values = has_values ? (uintptr_t)(values + 4 * MARGIN) : 0,
            .state = (uintptr_t)(state + 4 * MARGIN),
            .first = turn % 2 ? lh_test_random(&seed) % (LH_ZO_ELEMENT_COUNT_MAX - COUNT)
                              : lh_test_random(&seed) % 200,
            .count = count,
            .state_format = kept.state_format,
            .value_format = kept.value_format,
            .op_count = (uint32_t)(lh_test_random(&seed) % (turn % 5 ? 6 : LH_ZO_BATCH_OPS + 1)),
        };
        zo_rounds_make(batch.ops, batch.op_count, kept.state_format, &seed);
        bytes_make(state, BYTES / lh_zo_format_bytes(kept.state_format), kept.state_format, &seed);
        memcpy(state_expected, state, BYTES);
        memset(values, 0xA5, BYTES);
        memset(expected, 0xA5, BYTES);
        lh_zo_lead(&kept, batch.first, count, batch.ops, batch.op_count);
        threads_run(&batch, 1 + lh_test_random(&seed) % 500);
        LH_CHECK(memcmp(state, state_expected, BYTES) == 0);
        if (!has_values)
            memset(expected, 0xA5, BYTES);
        LH_CHECK(memcmp(values, expected, BYTES) == 0);
    }
}

static void test_every_number(void)
{
    lh_test_name("every number of every format is loaded and stored as it is");
    for (int format = LH_ZO_FORMAT_BF16; format <= LH_ZO_FORMAT_F8; format++) {
        enum lh_zo_format kind = (enum lh_zo_format)format;
        uint64_t size = lh_zo_format_bytes(kind);
        for (uint32_t i = 0; i < (format == LH_ZO_FORMAT_F8 ? 256 : 65536); i++) {
            uint16_t kept = (uint16_t)i, again = 0;
            float value = 0, loaded = zo_kept_load((uintptr_t)&kept, 0, kind);
            lh_zo_widen_ref(&value, &kept, kind, 1);
            LH_CHECK(isnan(value) ? isnan(loaded) : memcmp(&value, &loaded, sizeof(value)) == 0);
            zo_kept_store((uintptr_t)&again, 0, loaded, kind);
            LH_CHECK(!isfinite(value) || memcmp(&kept, &again, size) == 0);
        }
    }
}

static void test_casts_and_rounding(void)
{
    uint64_t seed = 23;
    lh_test_name("values are cast, and numbers rounded, as the CPU does it");
    for (int turn = 0; turn < 3000000; turn++) {
        uint32_t bits = (uint32_t)lh_test_random(&seed), word = (uint32_t)lh_test_random(&seed);
        if (turn % 2) /* near the limits of fp16 and fp8, small and large */
            bits = (bits & UINT32_C(0x807FFFFF)) | (100 + (uint32_t)turn / 2 % 50) << 23;
        if (turn % 3 == 0)
            bits &= UINT32_C(0xFFFFF000); /* these are ties */
        float value = zo_float(bits);
        uint16_t expected, found;
        for (int i = LH_ZO_FORMAT_BF16; i <= LH_ZO_FORMAT_F16; i++) {
            lh_zo_cast_ref(&expected, &value, (enum lh_zo_format)i, 1);
            zo_value_store((uintptr_t)&found, 0, value, (enum lh_zo_format)i);
            LH_CHECK(expected == found);
        }
        enum lh_zo_format format = (enum lh_zo_format)(turn % 4);
        LH_CHECK(zo_bits(zo_rounded(value, word, format)) == lh_zo_rounded(bits, word, format));
    }
}

static void test_z(void)
{
    enum { N = 1 << 20 };
    static float expected[N], values[N];
    /*
     * Places of the stream below where a radius, a sine or a cosine is 0, and counters that pass
     * 2^32.
     */
    static const uint64_t middles[] = {37343555, 264304521, 74206569, 4951774, UINT64_C(1) << 34};
    lh_test_name("z of a million elements, zeros' signs, counters past 2^32");
    for (size_t i = 0; i < LH_COUNT_OF(middles); i++) {
        struct lh_zo_batch batch = {
            .values = (uintptr_t)values,
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
            .values = (uintptr_t)values,
            .first = 7,
            .count = COUNT,
            .op_count = 2,
            .ops = {{.kind = LH_ZO_OP_PERTURB, .stream = {.seed = 5}, .scale = 0x1p-140f},
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
    test_kept();
    test_every_number();
    test_casts_and_rounding();
    test_z();
    test_extremes();
    return 0;
}
