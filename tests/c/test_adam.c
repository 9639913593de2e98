/* Test AdamW kernels against their definition, and chunks with checksums. */
#include <math.h>

#include "base/crc32c.h"
#include "base/error.h"
#include "compute/adam.h"
#include "compute/half.h"
#include "fp_fixture.h"
#include "lh_test.h"

#define GUARD_BYTES UINT64_C(64)

/* The arrays of a run, in this order, each in its own place with a guard on either side. */
enum { PARAM, RESIDUAL, MOMENT1, MOMENT2, GRADIENT, ARRAY_COUNT };

struct arrays {
    unsigned char *memory; /* ARRAY_COUNT places of place_bytes */
    uint64_t place_bytes;
    /* the offset of each array in its place, which determines its alignment */
    uint64_t offset_bytes;
};

/* Mode 3 * p + g is parameters of dtype p with gradients of dtype g. */
static const enum lh_dtype dtypes[][2] = {
    {LH_DTYPE_F32, LH_DTYPE_F32},  {LH_DTYPE_F32, LH_DTYPE_BF16},  {LH_DTYPE_F32, LH_DTYPE_F16},
    {LH_DTYPE_BF16, LH_DTYPE_F32}, {LH_DTYPE_BF16, LH_DTYPE_BF16}, {LH_DTYPE_BF16, LH_DTYPE_F16},
    {LH_DTYPE_F16, LH_DTYPE_F32},  {LH_DTYPE_F16, LH_DTYPE_BF16},  {LH_DTYPE_F16, LH_DTYPE_F16},
};

static const uint32_t specials[] = {
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000,
    0x7F800000, 0xFF800000, 0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0x3F800000, 0xBF808000, 0x3F818000,
    0x1E3CE508, 0x5F3759DF, 0xA0000001, 0x3A83126F, 0x477FF000, 0x387FE001, 0x7E017C01,
};

static struct lh_adam_scalars scalars_any(double gradient_scale)
{
    const struct lh_adam_hyper hyper = {3e-3, 0.9, 0.999, 1e-8, 0.01, 0};

    return lh_adam_scalars_make(&hyper, 3, gradient_scale);
}

static struct arrays arrays_create(uint64_t count, uint64_t offset_bytes)
{
    struct arrays arrays = {.place_bytes = (count * 4 + 3 * GUARD_BYTES + 63) / 64 * 64,
                            .offset_bytes = GUARD_BYTES + offset_bytes};

    LH_CHECK(offset_bytes < GUARD_BYTES);
    arrays.memory = aligned_alloc(64, ARRAY_COUNT * arrays.place_bytes);
    LH_CHECK(arrays.memory != NULL);
    memset(arrays.memory, 0xA5, ARRAY_COUNT * arrays.place_bytes);
    return arrays;
}

static struct arrays arrays_copy(const struct arrays *source)
{
    struct arrays target = *source;

    target.memory = aligned_alloc(64, ARRAY_COUNT * source->place_bytes);
    LH_CHECK(target.memory != NULL);
    memcpy(target.memory, source->memory, ARRAY_COUNT * source->place_bytes);
    return target;
}

static bool arrays_equal(const struct arrays *a, const struct arrays *b)
{
    return memcmp(a->memory, b->memory, ARRAY_COUNT * a->place_bytes) == 0;
}

static void *array_of(const struct arrays *arrays, int array)
{
    return arrays->memory + (uint64_t)array * arrays->place_bytes + arrays->offset_bytes;
}

/* The bytes per element of a parameter's array. */
static uint64_t element_bytes_of(enum lh_dtype dtype, int array)
{
    if (array == PARAM)
        return lh_dtype_bytes(dtype);
    return array == RESIDUAL ? lh_adam_residual_bytes(dtype) : 4;
}

static void array_set(const struct arrays *arrays, int array, uint64_t index, uint32_t bits)
{
    memcpy((char *)array_of(arrays, array) + index * 4, &bits, 4);
}

/* The run, without the moments that a rule lacks. */
static struct lh_adam_run rule_run_of(const struct lh_adam_run *run, const struct lh_rule_row *rule)
{
    struct lh_adam_run made = *run;

    made.moment1 = rule->has_moment1 ? run->moment1 : NULL;
    bool is_given = rule->has_moment2 || rule->has_factors || rule->has_matrices;
    made.moment2 = is_given ? run->moment2 : NULL;
    return made;
}

static struct lh_adam_run run_of(const struct arrays *arrays, uint64_t count, size_t mode)
{
    return (struct lh_adam_run){
        .param = array_of(arrays, PARAM),
        .residual = dtypes[mode][0] == LH_DTYPE_F32 ? NULL : array_of(arrays, RESIDUAL),
        .moment1 = array_of(arrays, MOMENT1),
        .moment2 = array_of(arrays, MOMENT2),
        .gradient = array_of(arrays, GRADIENT),
        .count = count,
        .param_dtype = dtypes[mode][0],
        .gradient_dtype = dtypes[mode][1],
    };
}

/* Return bits of an element: mostly as in training; sometimes any bits, a denormal or special. */
static uint32_t bits_any(uint64_t *random, int array)
{
    uint64_t r = lh_test_random(random);
    uint32_t low = (uint32_t)r;

    switch ((r >> 32) % 8) {
    case 0:
        return low;
    case 1:
        return low & 0x807FFFFF;
    case 2:
        return specials[low % LH_COUNT_OF(specials)];
    default:
        return (low & (array == MOMENT2 ? 0x03FFFFFF : 0x83FFFFFF)) + 0x3A000000;
    }
}

static void arrays_fill(const struct arrays *arrays, uint64_t count, uint64_t seed)
{
    for (int array = 0; array < ARRAY_COUNT; array++)
        for (uint64_t i = 0; i < count; i++)
            array_set(arrays, array, i, bits_any(&seed, array));
}

static const struct lh_adam_kernel *kernel_ref(void)
{
    const struct lh_adam_kernel *kernels;
    int count = lh_adam_kernels(&kernels);

    LH_CHECK(strcmp(kernels[count - 1].name, "ref") == 0);
    return kernels + count - 1;
}

/* Whether a parameter (fp16: its master) from first on is NaN, which has a residual of 0. */
static bool has_nan(const struct arrays *arrays, uint64_t first, uint64_t count,
                    enum lh_dtype dtype)
{
    uint64_t bytes = dtype == LH_DTYPE_BF16 ? 2 : 4;
    const char *masters = array_of(arrays, dtype == LH_DTYPE_F16 ? RESIDUAL : PARAM);

    for (uint64_t i = first; i < first + count; i++) {
        uint32_t bits = 0;
        memcpy((char *)&bits + 4 - bytes, masters + i * bytes, bytes);
        if ((bits & 0x7FFFFFFF) > 0x7F800000)
            return true;
    }
    return false;
}

/* Run every kernel of a rule on copies of start, guards included. */
static void rule_check(enum lh_rule rule, const struct arrays *start, uint64_t count, size_t mode)
{
    const struct lh_adam_hyper hyper = {3e-3, 0.9, 0.999, 1e-8, 0.01, 0};
    const struct lh_adam_scalars scalars = lh_rules[rule].scalars(&hyper, 3, 0.75);
    struct arrays expected = arrays_copy(start);
    struct lh_adam_run run = run_of(&expected, count, mode);
    const struct lh_adam_kernel *kernels;
    int kernel_count = lh_adam_kernels(&kernels);

    run = rule_run_of(&run, &lh_rules[rule]);
    kernel_ref()->run[rule](&run, &scalars);
    for (int k = 0; k < kernel_count; k++) {
        struct arrays actual = arrays_copy(start);

        bool is_found = false;
        run = run_of(&actual, count, mode);
        run = rule_run_of(&run, &lh_rules[rule]);
        run.has_nan = &is_found;
        kernels[k].run[rule](&run, &scalars);
        LH_CHECK(is_found == has_nan(&expected, 0, count, dtypes[mode][0]));
        if (!arrays_equal(&expected, &actual))
            fprintf(stderr, "kernel %s, rule %s, mode %zu, count %" PRIu64 "\n", kernels[k].name,
                    lh_rules[rule].name, mode, count);
        LH_CHECK(arrays_equal(&expected, &actual));
        free(actual.memory);
    }
    free(expected.memory);
}

static void kernels_check(const struct arrays *start, uint64_t count, size_t mode)
{
    for (enum lh_rule rule = LH_RULE_ADAMW; rule < LH_RULE_COUNT; rule++)
        rule_check(rule, start, count, mode);
}

static void test_kernels_counts_and_alignments(void)
{
    static const uint64_t offsets[] = {0, 4, 36, 1, 2, 63};

    lh_test_name("every kernel writes the definition's bits, at any count, and reports NaNs");
    for (size_t mode = 0; mode < LH_COUNT_OF(dtypes); mode++)
        for (uint64_t count = 0; count <= 200; count += lh_test_is_sample() && count > 66 ? 19 : 1)
            for (size_t o = 0; o < LH_COUNT_OF(offsets); o++) {
                struct arrays start = arrays_create(count, offsets[o]);

                arrays_fill(&start, count, count * 8 + o);
                kernels_check(&start, count, mode);
                free(start.memory);
            }
}

static void test_kernels_specials(void)
{
    const uint64_t n = LH_COUNT_OF(specials); /* a prime number */
    const uint64_t stride = lh_test_is_sample() ? 15 : 1;
    const uint64_t count = n * n * n * n / stride;
    struct arrays start = arrays_create(count, 0);

    lh_test_name("every kernel agrees on every combination of special values");
    for (uint64_t i = 0; i < count; i++) {
        uint64_t at = i * stride;

        array_set(&start, PARAM, i, specials[at % n]);
        array_set(&start, MOMENT1, i, specials[at / n % n]);
        array_set(&start, MOMENT2, i, specials[at / n / n % n]);
        array_set(&start, GRADIENT, i, specials[at / n / n / n]);
        array_set(&start, RESIDUAL, i, (uint32_t)(i * UINT64_C(0x9E3779B97F4A7C15) >> 32));
    }
    for (size_t mode = 0; mode < LH_COUNT_OF(dtypes); mode++)
        kernels_check(&start, count, mode);
    free(start.memory);
}

static void test_nan_written(void)
{
    const uint64_t count = 4096;
    const struct lh_adam_scalars scalars = scalars_any(1);
    uint64_t nan_count = 0;

    lh_test_name("a NaN is written as 0x7FC00000, in bf16 as 0x7FC0 with residual 0");
    for (size_t mode = 0; mode < LH_COUNT_OF(dtypes); mode++) {
        struct arrays arrays = arrays_create(count, 0);
        struct lh_adam_run run = run_of(&arrays, count, mode);

        arrays_fill(&arrays, count, 7);
        kernel_ref()->run[LH_RULE_ADAMW](&run, &scalars);
        for (uint64_t i = 0; i < count; i++) {
            uint32_t bits[3];

            memcpy(bits + 0, run.moment1 + i, 4);
            memcpy(bits + 1, run.moment2 + i, 4);
            if (run.param_dtype == LH_DTYPE_F16)
                memcpy(bits + 2, (float *)run.residual + i, 4);
            else if (run.param_dtype == LH_DTYPE_BF16)
                bits[2] = ((uint32_t)((uint16_t *)run.param)[i] << 16) +
                          (uint32_t)((int16_t *)run.residual)[i];
            else
                memcpy(bits + 2, (float *)run.param + i, 4);
            for (int a = 0; a < 3; a++) {
                bool is_nan = (bits[a] & 0x7FFFFFFF) > 0x7F800000;

                LH_CHECK(!is_nan || bits[a] == 0x7FC00000);
                nan_count += is_nan;
            }
        }
        free(arrays.memory);
    }
    LH_CHECK(nan_count > 1000);
}

static void test_half_param(void)
{
    const uint64_t count = 4096;
    const struct lh_adam_scalars scalars = scalars_any(1);
    struct arrays arrays = arrays_create(count, 0);
    struct lh_adam_run run = run_of(&arrays, count, 8);
    struct arrays alone;
    struct lh_adam_run run32;

    lh_test_name("an fp16 parameter is its master rounded, its master an fp32 parameter's update");
    arrays_fill(&arrays, count, 9);
    memcpy(array_of(&arrays, PARAM), array_of(&arrays, RESIDUAL), count * 4);
    alone = arrays_copy(&arrays);
    run32 = run_of(&alone, count, 2);
    kernel_ref()->run[LH_RULE_ADAMW](&run, &scalars);
    kernel_ref()->run[LH_RULE_ADAMW](&run32, &scalars);
    LH_CHECK(memcmp(run.residual, run32.param, count * 4) == 0);
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits;

        memcpy(&bits, (float *)run.residual + i, 4);
        LH_CHECK(((uint16_t *)run.param)[i] == lh_half_round(bits));
    }
    free(arrays.memory);
    free(alone.memory);
}

static void test_rule(void)
{
    const struct lh_adam_hyper hyper = {1e-3, 0.9, 0.999, 1e-8, 0.1, 0};
    double m = 0, v = 0, p = 0.5;
    float m32 = 0, v32 = 0, p32 = 0.5f;

    lh_test_name("twenty steps of the definition follow AdamW in double");
    for (uint64_t step = 1; step <= 20; step++) {
        struct lh_adam_scalars scalars = lh_adam_scalars_make(&hyper, step, 0.5);
        float gradient = (float)sin((double)step) * 0.1f;
        double g = 0.5 * (double)gradient;
        struct lh_adam_run run = {&p32, NULL,         &m32,         &v32, &gradient,
                                  1,    LH_DTYPE_F32, LH_DTYPE_F32, NULL, false};
        kernel_ref()->run[LH_RULE_ADAMW](&run, &scalars);
        p *= 1 - hyper.lr * hyper.weight_decay;
        m = hyper.beta1 * m + (1 - hyper.beta1) * g;
        v = hyper.beta2 * v + (1 - hyper.beta2) * g * g;
        p -= hyper.lr * (m / (1 - pow(hyper.beta1, (double)step))) /
             (sqrt(v / (1 - pow(hyper.beta2, (double)step))) + hyper.eps);
        LH_CHECK(fabs((double)m32 - m) < 1e-7 * 0.1 && fabs((double)v32 - v) < 1e-6 * v);
        LH_CHECK(fabs((double)p32 - p) < 1e-6 * p);
    }
}

static void test_environment(void)
{
    const uint64_t count = 1000;
    struct arrays start = arrays_create(count, 0);
    struct arrays expected, actual;
    struct lh_adam_segment segment = {.count = count, .scalars = scalars_any(1)};
    struct lh_adam_run run;

    lh_test_name("a thread that rounds upwards and flushes denormals gets the same bits");
    arrays_fill(&start, count, 11);
    expected = arrays_copy(&start);
    run = run_of(&expected, count, 0);
    kernel_ref()->run[LH_RULE_ADAMW](&run, &segment.scalars);
    for (int chunked = 0; chunked < 2; chunked++) {
        struct lh_adam_chunk chunk = {.count = count, .segments = &segment, .segment_count = 1};
        struct lh_adam_mismatch mismatch;

        actual = arrays_copy(&start);
        run = run_of(&actual, count, 0);
        chunk.param = run.param;
        chunk.moment1 = run.moment1;
        chunk.moment2 = run.moment2;
        segment.gradient = run.gradient;
        fp_environment_spoil();
        if (chunked)
            LH_CHECK(lh_adam_chunk_update(NULL, &chunk, &mismatch) == 0);
        else
            lh_adam_update(&run, &segment.scalars);
        LH_CHECK(fp_environment_is_spoilt());
        fesetenv(FE_DFL_ENV);
        LH_CHECK(arrays_equal(&expected, &actual));
        free(actual.memory);
    }
    free(start.memory);
    free(expected.memory);
}

#define BLOCK_ELEMENTS (LH_CHECKSUM_BYTES / 4)
#define CHUNK_ELEMENTS (3 * BLOCK_ELEMENTS + 777)
#define BLOCK_COUNT_MAX 4
#define SEGMENT_COUNT_MAX 16

/* Compute crcs[array][block] of the first count elements. */
static void crcs_of(const struct arrays *arrays, uint64_t count, enum lh_dtype dtype,
                    uint32_t crcs[ARRAY_COUNT][BLOCK_COUNT_MAX])
{
    for (int array = 0; array < GRADIENT; array++) {
        uint64_t bytes = count * element_bytes_of(dtype, array);

        for (uint64_t b = 0; b * LH_CHECKSUM_BYTES < bytes; b++)
            crcs[array][b] =
                lh_crc32c(0, (char *)array_of(arrays, array) + b * LH_CHECKSUM_BYTES,
                          lh_min_u64(LH_CHECKSUM_BYTES, bytes - b * LH_CHECKSUM_BYTES));
    }
}

/* Cut [0, count) at random into ragged and long segments with gaps, each with its own scalars. */
static uint32_t segments_cut(struct lh_adam_segment *segments, const struct arrays *arrays,
                             uint64_t count, uint64_t *random)
{
    static const uint64_t lengths[] = {1, 31, 32, 33, 100, 5000, BLOCK_ELEMENTS, 600001};
    uint64_t at = 0;
    uint32_t s = 0;

    while (s < SEGMENT_COUNT_MAX) {
        uint64_t r = lh_test_random(random);
        enum lh_dtype dtype = dtypes[(r >> 24) % 3][1];

        at += r & 2 ? 0 : (r >> 8) % 300;
        if (at >= count)
            break;
        segments[s] = (struct lh_adam_segment){
            .first = at,
            .count = lh_min_u64(lengths[(r >> 32) % LH_COUNT_OF(lengths)], count - at),
            .gradient = (char *)array_of(arrays, GRADIENT) + at * lh_dtype_bytes(dtype),
            .gradient_dtype = dtype,
            .scalars = scalars_any(1.0 + (double)s),
        };
        at += segments[s++].count;
    }
    return s;
}

static struct lh_adam_chunk chunk_of(const struct arrays *arrays, uint64_t count,
                                     enum lh_dtype dtype,
                                     uint32_t expected[ARRAY_COUNT][BLOCK_COUNT_MAX],
                                     uint32_t made[ARRAY_COUNT][BLOCK_COUNT_MAX])
{
    return (struct lh_adam_chunk){
        .param = array_of(arrays, PARAM),
        .residual = dtype == LH_DTYPE_F32 ? NULL : array_of(arrays, RESIDUAL),
        .moment1 = array_of(arrays, MOMENT1),
        .moment2 = array_of(arrays, MOMENT2),
        .count = count,
        .param_dtype = dtype,
        .residual_expected = expected[RESIDUAL],
        .moment1_expected = expected[MOMENT1],
        .moment2_expected = expected[MOMENT2],
        .param_checksums = made[PARAM],
        .residual_checksums = made[RESIDUAL],
        .moment1_checksums = made[MOMENT1],
        .moment2_checksums = made[MOMENT2],
    };
}

/* Test one layout with every kernel: bytes and checksums equal those of plain runs. */
static void chunk_check(const struct arrays *start, uint64_t count, enum lh_dtype dtype,
                        uint64_t seed)
{
    uint32_t before[ARRAY_COUNT][BLOCK_COUNT_MAX], after[ARRAY_COUNT][BLOCK_COUNT_MAX];
    struct lh_adam_segment segments[SEGMENT_COUNT_MAX];
    struct arrays expected = arrays_copy(start);
    uint32_t segment_count = segments_cut(segments, start, count, &seed);
    uint32_t first_nan = LH_ADAM_SEGMENT_NONE;
    const struct lh_adam_kernel *kernels;
    int kernel_count = lh_adam_kernels(&kernels);

    crcs_of(start, count, dtype, before);
    for (uint32_t s = 0; s < segment_count; s++) {
        const struct lh_adam_segment *segment = segments + s;
        struct lh_adam_run run = run_of(&expected, segment->count, 3 * (size_t)dtype);

        run.param = (char *)run.param + segment->first * lh_dtype_bytes(dtype);
        if (run.residual)
            run.residual = (char *)run.residual + segment->first * lh_adam_residual_bytes(dtype);
        run.moment1 += segment->first;
        run.moment2 += segment->first;
        run.gradient = segment->gradient;
        run.gradient_dtype = segment->gradient_dtype;
        kernel_ref()->run[LH_RULE_ADAMW](&run, &segment->scalars);
        if (s < first_nan && has_nan(&expected, segment->first, segment->count, dtype))
            first_nan = s;
    }
    crcs_of(&expected, count, dtype, after);
    for (int k = 0; k < kernel_count; k++) {
        uint32_t made[ARRAY_COUNT][BLOCK_COUNT_MAX] = {0};
        struct arrays actual = arrays_copy(start);
        struct lh_adam_chunk chunk = chunk_of(&actual, count, dtype, before, made);
        struct lh_adam_mismatch mismatch;

        uint32_t nan_segment = 0;
        chunk.segments = segments;
        chunk.segment_count = segment_count;
        chunk.nan_segment = &nan_segment;
        LH_CHECK(lh_adam_chunk_update(kernels + k, &chunk, &mismatch) == 0);
        LH_CHECK(mismatch.array == LH_ADAM_ARRAY_NONE);
        LH_CHECK(nan_segment == first_nan);
        LH_CHECK(arrays_equal(&expected, &actual));
        for (int array = 0; array < GRADIENT; array++) {
            uint64_t bytes = count * element_bytes_of(dtype, array);
            uint64_t blocks = lh_div_ceil(bytes, LH_CHECKSUM_BYTES);

            LH_CHECK(memcmp(made[array], after[array], blocks * sizeof(uint32_t)) == 0);
        }
        free(actual.memory);
    }
    free(expected.memory);
}

static void test_chunks(void)
{
    static const uint64_t counts[] = {
        0, 1, 31, 64, 5000, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 33, CHUNK_ELEMENTS};

    lh_test_name("a chunk's update is its segments' updates, its checksums those of its bytes");
    for (size_t c = 0; c < LH_COUNT_OF(counts); c++)
        for (uint64_t seed = 0; seed < 9; seed++) {
            struct arrays start = arrays_create(counts[c], seed / 3 * 4);

            arrays_fill(&start, counts[c], seed);
            chunk_check(&start, counts[c], dtypes[seed][1], seed * 100 + c);
            free(start.memory);
        }
}

static void test_chunk_partial_checksums(void)
{
    const uint64_t count = 3000;
    const struct lh_adam_kernel *kernels;
    int kernel_count = lh_adam_kernels(&kernels);
    struct arrays start = arrays_create(count, 0), expected;
    struct lh_adam_run run;
    uint32_t crcs[ARRAY_COUNT][BLOCK_COUNT_MAX], made[ARRAY_COUNT][BLOCK_COUNT_MAX];
    struct lh_adam_segment segment = {.count = count, .scalars = scalars_any(1)};

    lh_test_name("checksums that are not asked for are neither checked nor made");
    arrays_fill(&start, count, 5);
    segment.gradient = array_of(&start, GRADIENT);
    expected = arrays_copy(&start);
    run = run_of(&expected, count, 3);
    kernel_ref()->run[LH_RULE_ADAMW](&run, &segment.scalars);
    crcs_of(&expected, count, LH_DTYPE_BF16, crcs);
    for (int k = 0; k < kernel_count; k++)
        for (int wanted = 0; wanted < 2; wanted++) {
            struct arrays actual = arrays_copy(&start);
            struct lh_adam_chunk chunk = chunk_of(&actual, count, LH_DTYPE_BF16, crcs, made);
            struct lh_adam_mismatch mismatch;

            chunk.segments = &segment;
            chunk.segment_count = 1;
            chunk.residual_expected = chunk.moment1_expected = chunk.moment2_expected = NULL;
            chunk.param_checksums = chunk.residual_checksums = chunk.moment2_checksums = NULL;
            chunk.moment1_checksums = wanted ? made[MOMENT1] : NULL;
            LH_CHECK(lh_adam_chunk_update(kernels + k, &chunk, &mismatch) == 0);
            LH_CHECK(arrays_equal(&expected, &actual));
            LH_CHECK(!wanted || made[MOMENT1][0] == crcs[MOMENT1][0]);
            free(actual.memory);
        }
    free(start.memory);
    free(expected.memory);
}

/* Flip one bit of one array in its last block; every kernel must detect it. */
static void flip_check(const struct arrays *start, enum lh_adam_array wrong, int array,
                       enum lh_dtype dtype)
{
    uint64_t element_bytes = element_bytes_of(dtype, array);
    uint64_t at_bytes = (CHUNK_ELEMENTS - 500) * element_bytes;
    uint32_t before[ARRAY_COUNT][BLOCK_COUNT_MAX], made[ARRAY_COUNT][BLOCK_COUNT_MAX];
    struct lh_adam_segment segment = {.first = 10,
                                      .count = CHUNK_ELEMENTS - 10,
                                      .gradient = array_of(start, GRADIENT),
                                      .scalars = scalars_any(1)};
    const struct lh_adam_kernel *kernels;
    int kernel_count = lh_adam_kernels(&kernels);

    crcs_of(start, CHUNK_ELEMENTS, dtype, before);
    for (int k = 0; k < kernel_count; k++)
        for (uint64_t place = 0; place < 2; place++) {
            /* The bit is in the folded middle of the last block, or in a gap of the first. */
            uint64_t flip_bytes = place == 0 ? at_bytes : 5 * element_bytes;
            struct arrays damaged = arrays_copy(start);
            struct lh_adam_chunk chunk = chunk_of(&damaged, CHUNK_ELEMENTS, dtype, before, made);
            struct lh_adam_mismatch mismatch;

            ((unsigned char *)array_of(&damaged, array))[flip_bytes] ^= 0x10;
            chunk.segments = &segment;
            chunk.segment_count = 1;
            LH_CHECK(lh_adam_chunk_update(kernels + k, &chunk, &mismatch) == -EILSEQ);
            LH_CHECK(mismatch.array == wrong);
            LH_CHECK(mismatch.block == flip_bytes / LH_CHECKSUM_BYTES);
            LH_CHECK(mismatch.expected == before[array][mismatch.block]);
            LH_CHECK(mismatch.actual != mismatch.expected);
            free(damaged.memory);
        }
}

static void test_chunk_mismatch(void)
{
    struct arrays start = arrays_create(CHUNK_ELEMENTS, 0);

    lh_test_name("a flipped bit in residual, moment1 or moment2 is found with its block");
    arrays_fill(&start, CHUNK_ELEMENTS, 3);
    flip_check(&start, LH_ADAM_ARRAY_RESIDUAL, RESIDUAL, LH_DTYPE_BF16);
    flip_check(&start, LH_ADAM_ARRAY_MOMENT1, MOMENT1, LH_DTYPE_BF16);
    flip_check(&start, LH_ADAM_ARRAY_MOMENT2, MOMENT2, LH_DTYPE_BF16);
    flip_check(&start, LH_ADAM_ARRAY_MOMENT1, MOMENT1, LH_DTYPE_F32);
    flip_check(&start, LH_ADAM_ARRAY_MOMENT2, MOMENT2, LH_DTYPE_F32);
    flip_check(&start, LH_ADAM_ARRAY_RESIDUAL, RESIDUAL, LH_DTYPE_F16);
    flip_check(&start, LH_ADAM_ARRAY_MOMENT1, MOMENT1, LH_DTYPE_F16);
    free(start.memory);
}

static void overlapping_run(void *context)
{
    float values[8] = {0};
    struct lh_adam_segment segments[2] = {
        {.count = 5, .gradient = values, .scalars = scalars_any(1)},
        {.first = 4, .count = 4, .gradient = values, .scalars = scalars_any(1)}};
    struct lh_adam_chunk chunk = {.param = values,
                                  .moment1 = values,
                                  .moment2 = values,
                                  .count = 8,
                                  .segments = segments,
                                  .segment_count = 2};
    struct lh_adam_mismatch mismatch;

    (void)context;
    (void)lh_adam_chunk_update(NULL, &chunk, &mismatch);
}

int main(void)
{
    test_rule();
    test_kernels_counts_and_alignments();
    test_kernels_specials();
    test_nan_written();
    test_half_param();
    test_environment();
    test_chunks();
    test_chunk_partial_checksums();
    test_chunk_mismatch();
    lh_test_name("segments that overlap end the program");
    LH_CHECK(lh_test_aborts(overlapping_run, NULL));
    return 0;
}
