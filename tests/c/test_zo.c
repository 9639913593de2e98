/* Test the direction z of zeroth-order training: its values, and that all kernels agree. */
#include "compute/zo.h"

#include <fenv.h>
#include <math.h>
#include <string.h>

#include "fp_fixture.h"
#include "lh_test.h"
#include "zo_fixture.h"

#define COUNT 1000
#define OP_COUNT 5

static void test_philox(void)
{
    /* Random123's published results for philox4x32-10. */
    static const struct {
        uint32_t counter[4], key[2], words[4];
    } rows[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX},
         {UINT32_MAX, UINT32_MAX},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    lh_test_name("Philox gives the published words");
    for (size_t i = 0; i < LH_COUNT_OF(rows); i++) {
        uint32_t words[4];
        lh_zo_philox(rows[i].counter, rows[i].key, words);
        LH_CHECK(memcmp(words, rows[i].words, sizeof(words)) == 0);
    }
}

/* Compute the numbers of Box and Muller in double precision. */
static double expected_at(const struct lh_zo_stream *stream, uint64_t index)
{
    uint64_t counter = index / 64 * 16 + index % 16;
    uint32_t word = (uint32_t)(index % 64 / 16);
    const uint32_t counters[4] = {(uint32_t)counter,
                                  (uint32_t)(counter >> 32) + (stream->sample << 16), stream->param,
                                  stream->step};
    const uint32_t key[2] = {(uint32_t)stream->seed, (uint32_t)(stream->seed >> 32)};
    uint32_t words[4];
    lh_zo_philox(counters, key, words);
    double uniform = (double)((words[word & 2] >> 8) + 1) / 0x1p24;
    double angle = 2 * M_PI * (double)words[(word & 2) + 1] / 0x1p32;
    return sqrt(-2 * log(uniform)) * (word % 2 ? sin(angle) : cos(angle));
}

static void test_values(void)
{
    static const uint64_t firsts[] = {0, 640, LH_ZO_ELEMENT_COUNT_MAX - COUNT, UINT64_C(1) << 34};
    lh_test_name("z is Box and Muller's normal number of its own counter");
    for (size_t i = 0; i < LH_COUNT_OF(firsts); i++) {
        float z[COUNT];
        struct lh_zo_op op = {.kind = LH_ZO_OP_DRAW, .stream = {UINT64_MAX - i, 65535, 7, 3}};
        lh_zo_apply(z, z, firsts[i], COUNT, &op, 1);
        for (uint64_t j = 0; j < COUNT; j++)
            LH_CHECK(fabs(z[j] - expected_at(&op.stream, firsts[i] + j)) < 4e-6);
    }
}

static void test_kernels(void)
{
    const struct lh_zo_kernel *kernels;
    int count = lh_zo_kernels(&kernels);
    uint64_t seed = 1;
    lh_test_name("every kernel gives the bits of the definition");
    for (int turn = 0; turn < 40; turn++) {
        struct lh_zo_op ops[OP_COUNT];
        float before[COUNT], expected[COUNT], values[COUNT];
        uint64_t first = lh_test_random(&seed) % (LH_ZO_ELEMENT_COUNT_MAX - COUNT);
        uint64_t length = lh_test_random(&seed) % COUNT;
        zo_ops_make(ops, OP_COUNT, LH_ZO_OP_DRAW, &seed);
        for (int i = 0; i < COUNT; i++)
            before[i] = (float)(int32_t)lh_test_random(&seed) * 0x1p-31f;
        memcpy(expected, before, sizeof(before));
        lh_zo_apply_by(&kernels[count - 1], expected, expected, first, length, ops, OP_COUNT);
        LH_CHECK(memcmp(expected + length, before + length, (COUNT - length) * 4) == 0);
        for (int i = 0; i < count; i++) {
            memcpy(values, before, sizeof(before));
            lh_zo_apply_by(&kernels[i], values, values, first, length, ops, OP_COUNT);
            LH_CHECK(memcmp(values, expected, sizeof(values)) == 0);
        }
        memset(values, 0, sizeof(values)); /* from one buffer to another */
        lh_zo_apply(values, before, first, length, ops, OP_COUNT);
        LH_CHECK(memcmp(values, expected, length * 4) == 0);
        memcpy(values, before, sizeof(before));
        for (uint64_t at = 0, piece; at < length; at += piece) { /* cut the range anywhere */
            piece = lh_min_u64(1 + lh_test_random(&seed) % 200, length - at);
            lh_zo_apply(values + at, values + at, first + at, piece, ops, OP_COUNT);
        }
        LH_CHECK(memcmp(values, expected, sizeof(values)) == 0);
    }
}

static void test_corners(void)
{
    /*
     * Places of the stream below with a radius of 0, a sine of 0, a cosine of 0, and counters that
     * pass 2^32.
     */
    static const uint64_t zeros[] = {37343555, 37343571, 264304521, 74206569, 4951774, 12442630};
    const uint64_t passes[] = {UINT64_C(1) << 34, UINT64_C(3) << 34};
    const struct lh_zo_kernel *kernels;
    int count = lh_zo_kernels(&kernels);
    struct lh_zo_op op = {.kind = LH_ZO_OP_DRAW, .stream = {1, 2, 3, 4}};
    lh_test_name("kernels agree about the signs of zeros, and past 2^32 counters");
    for (size_t i = 0; i < LH_COUNT_OF(zeros) + LH_COUNT_OF(passes); i++) {
        float expected[COUNT], values[COUNT];
        bool is_zero = i < LH_COUNT_OF(zeros);
        uint64_t middle = is_zero ? zeros[i] : passes[i - LH_COUNT_OF(zeros)];
        uint64_t first = middle - COUNT / 2;
        lh_zo_apply_by(&kernels[count - 1], expected, expected, first, COUNT, &op, 1);
        LH_CHECK((expected[COUNT / 2] == 0) == is_zero);
        for (int j = 0; j < count; j++) {
            lh_zo_apply_by(&kernels[j], values, values, first, COUNT, &op, 1);
            LH_CHECK(memcmp(values, expected, sizeof(values)) == 0);
        }
    }
}

/* The random word of an element: [Note: Counters]. */
static uint32_t word_at(const struct lh_zo_stream *stream, uint64_t element)
{
    const uint64_t counter = element / 64 * 16 + element % 16;
    const uint32_t key[2] = {(uint32_t)stream->seed, (uint32_t)(stream->seed >> 32)};
    const uint32_t in[4] = {(uint32_t)counter, (uint32_t)(counter >> 32) | stream->sample << 16,
                            stream->param, stream->step};
    uint32_t out[4];
    lh_zo_philox(in, key, out);
    return out[element % 64 / 16];
}

static void test_words(void)
{
    static const uint64_t firsts[] = {0, 64, (UINT64_C(1) << 34) - 192, UINT64_C(3) << 34};
    const struct lh_zo_stream stream = {UINT64_C(0x123456789), 65534, 7, 9};
    const struct lh_zo_kernel *kernels;
    int count = lh_zo_kernels(&kernels);
    lh_test_name("every kernel makes the words of an element's counter, and no others");
    for (size_t i = 0; i < LH_COUNT_OF(firsts); i++)
        for (uint64_t length = 0; length <= 512; length += 64)
            for (int j = 0; j < count; j++) {
                uint32_t words[576] __attribute__((aligned(64)));
                memset(words, 0xAB, sizeof(words));
                kernels[j].words(words, firsts[i], length, &stream);
                for (uint64_t at = 0; at < length; at++)
                    LH_CHECK(words[at] == word_at(&stream, firsts[i] + at));
                for (uint64_t at = length; at < LH_COUNT_OF(words); at++)
                    LH_CHECK(words[at] == UINT32_C(0xABABABAB));
            }
}

static void test_formulas(void)
{
    float z[COUNT], moved[COUNT];
    struct lh_zo_op ops[] = {
        {.kind = LH_ZO_OP_PERTURB, .stream = {9, 0, 1, 2}, .scale = 1e-3f},
        {.kind = LH_ZO_OP_PERTURB, .is_same = true, .scale = -2e-3f},
        {.kind = LH_ZO_OP_PERTURB, .is_same = true, .scale = 1e-3f},
        {.kind = LH_ZO_OP_UPDATE, .is_same = true, .scale = 37.5f, .lr = 1e-2f, .decay = 0.1f},
    };
    struct lh_zo_op draw = {.kind = LH_ZO_OP_DRAW, .stream = ops[0].stream};
    lh_test_name("a step's four passes are the formula's operations, each rounded");
    lh_zo_apply(z, z, 5, COUNT, &draw, 1);
    for (int i = 0; i < COUNT; i++)
        moved[i] = 0.5f + 0.001f * (float)i;
    lh_zo_apply(moved, moved, 5, COUNT, ops, LH_COUNT_OF(ops));
    for (int i = 0; i < COUNT; i++) {
        float value = 0.5f + 0.001f * (float)i;
        value += 1e-3f * z[i];
        value += -2e-3f * z[i];
        value += 1e-3f * z[i];
        float gradient = 37.5f * z[i];
        gradient += 0.1f * value;
        value -= 1e-2f * gradient;
        LH_CHECK(value == moved[i]);
    }
}

static void test_zero_factors(void)
{
    static const float factors[] = {0.0f, -0.0f};
    const struct lh_zo_kernel *kernels;
    int count = lh_zo_kernels(&kernels);
    lh_test_name("kernels agree about factors that are zero, of either sign");
    for (int i = 0; i < 8; i++) {
        float expected[COUNT], values[COUNT];
        struct lh_zo_op op = {.kind = i < 4 ? LH_ZO_OP_PERTURB : LH_ZO_OP_UPDATE,
                              .stream = {.seed = 5},
                              .scale = factors[i % 2],
                              .lr = factors[i / 2 % 2]};
        for (int j = 0; j < COUNT; j++)
            expected[j] = -0.0f;
        lh_zo_apply_by(&kernels[count - 1], expected, expected, 7, COUNT, &op, 1);
        for (int j = 0; j < count; j++) {
            for (int k = 0; k < COUNT; k++)
                values[k] = -0.0f;
            lh_zo_apply_by(&kernels[j], values, values, 7, COUNT, &op, 1);
            LH_CHECK(memcmp(values, expected, sizeof(values)) == 0);
        }
    }
}

static void test_environment(void)
{
    float before[COUNT], after[COUNT];
    struct lh_zo_op op = {.kind = LH_ZO_OP_DRAW, .stream = {1, 2, 3, 4}};
    lh_test_name("the thread's rounding mode does not show, and stays");
    lh_zo_apply(before, before, 3, COUNT, &op, 1);
    fp_environment_spoil();
    lh_zo_apply(after, after, 3, COUNT, &op, 1);
    LH_CHECK(fp_environment_is_spoilt());
    fesetenv(FE_DFL_ENV);
    LH_CHECK(memcmp(before, after, sizeof(before)) == 0);
}

/* The bound is 5 standard deviations of n pairs of independent normal numbers. */
static bool is_near(double found, double expected, double variance, double n)
{
    return fabs(found - expected) < 5 * sqrt(variance / n);
}

static void test_moments(void)
{
    enum { N = 1 << 20 };
    static float z[N], other[N];
    struct lh_zo_op op = {.kind = LH_ZO_OP_DRAW, .stream = {42, 0, 0, 0}};
    lh_test_name("z has the moments of a normal number, and no other stream's z in it");
    lh_zo_apply(z, z, 0, N, &op, 1);
    for (int turn = 0; turn < 6; turn++) {
        double sums[5] = {0};
        struct lh_zo_op next = op;
        next.stream.seed += turn == 0;
        next.stream.sample += turn == 1;
        next.stream.param += turn == 2;
        next.stream.step += turn == 3;
        lh_zo_apply(other, other, turn == 4 ? 16 : turn == 5 ? 1 : 0, N, &next, 1);
        for (int i = 0; i < N; i++) {
            double square = (double)other[i] * other[i];
            sums[0] += other[i];
            sums[1] += square;
            sums[2] += square * square;
            sums[3] += (double)z[i] * other[i];
            sums[4] += fabs(other[i]) > 3;
        }
        LH_CHECK(is_near(sums[0] / N, 0, 1, N) && is_near(sums[1] / N, 1, 2, N));
        LH_CHECK(is_near(sums[2] / N, 3, 96, N) && is_near(sums[3] / N, 0, 1, N));
        LH_CHECK(is_near(sums[4] / N, 0.0026998, 0.0026998, N));
    }
}

int main(void)
{
    test_philox();
    test_values();
    test_kernels();
    test_corners();
    test_words();
    test_formulas();
    test_zero_factors();
    test_environment();
    test_moments();
    return 0;
}
