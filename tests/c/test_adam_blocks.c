/* Test updates of chunks whose moments are not stored in fp32. */
#include <math.h>

#include "adam_states_fixture.h"
#include "base/crc32c.h"
#include "base/error.h"
#include "fp_fixture.h"

/* More than the scales of one checksum cover. */
#define COUNT_MAX (LH_ADAM_SCALES_ELEMENTS + 5 * 4096 + BLOCK)
#define CHECKSUM_COUNT_MAX 8

/* Moments and gradients that make moments NaN, or larger than any number of their format. */
static const float rare[] = {NAN, INFINITY, -INFINITY, 0x1.FFp127f, -0x1.FEp127f, 1e30f, -1e19f};

enum { PARAM, RESIDUAL, MOMENT1, MOMENT2, SCALES, ARRAY_COUNT };

/* The arrays of a chunk. */
struct arrays {
    unsigned char *at[ARRAY_COUNT];
};

static uint64_t array_bytes(int array, enum lh_dtype dtype, enum lh_adam_states states,
                            uint64_t count)
{
    switch (array) {
    case PARAM:
        return count * lh_dtype_bytes(dtype);
    case RESIDUAL:
        return count * lh_adam_residual_bytes(dtype);
    case SCALES:
        return lh_adam_scale_bytes(states, count);
    case MOMENT1:
        return count * lh_adam_moment1_bytes(states);
    default:
        return count * lh_adam_moment2_bytes(states);
    }
}

/* Arrays as after some steps. Elements that no segment covers are 0. */
static struct arrays arrays_create(enum lh_dtype dtype, enum lh_adam_states states, uint64_t count,
                                   const struct lh_adam_segment *segments, uint32_t segment_count)
{
    struct arrays arrays;
    float *m = bytes_create(count * 4), *v = bytes_create(count * 4);
    struct lh_adam_moments moments = {.states = states};
    uint64_t random = count + 1;

    for (int array = 0; array < ARRAY_COUNT; array++)
        arrays.at[array] = bytes_create(array_bytes(array, dtype, states, count));
    for (uint32_t s = 0; s < segment_count; s++)
        for (uint64_t i = segments[s].first; i < segments[s].first + segments[s].count; i++) {
            uint64_t r = lh_test_random(&random);

            m[i] = (float)(int32_t)r * 0x1p-41f;
            v[i] = (float)(r >> 40) * 0x1p-40f;
            if (i % 499 == 0) {
                m[i] = rare[r % LH_COUNT_OF(rare)];
                v[i] = fabsf(rare[(r >> 8) % LH_COUNT_OF(rare)]);
            }
            if (dtype == LH_DTYPE_BF16) {
                ((uint16_t *)arrays.at[PARAM])[i] = (uint16_t)((r >> 32 & 0x80FF) + 0x3D00);
                ((uint16_t *)arrays.at[RESIDUAL])[i] = (uint16_t)(r >> 16);
            } else {
                ((float *)arrays.at[PARAM])[i] = (float)(int32_t)(r >> 8) * 0x1p-34f;
            }
        }
    moments.moment1 = arrays.at[MOMENT1];
    moments.moment2 = arrays.at[MOMENT2];
    moments.scales = (struct lh_adam_scales *)arrays.at[SCALES];
    encode(kernel_ref(), &moments, m, v, 0, count);
    free(m);
    free(v);
    return arrays;
}

static struct arrays arrays_copy(const struct arrays *source, enum lh_dtype dtype,
                                 enum lh_adam_states states, uint64_t count)
{
    struct arrays copy;

    for (int array = 0; array < ARRAY_COUNT; array++) {
        uint64_t bytes = array_bytes(array, dtype, states, count);

        copy.at[array] = bytes_create(bytes);
        memcpy(copy.at[array], source->at[array], bytes + GUARD);
    }
    return copy;
}

static void arrays_destroy(struct arrays *arrays)
{
    for (int array = 0; array < ARRAY_COUNT; array++)
        free(arrays->at[array]);
}

static bool arrays_equal(const struct arrays *a, const struct arrays *b, enum lh_dtype dtype,
                         enum lh_adam_states states, uint64_t count)
{
    for (int array = 0; array < ARRAY_COUNT; array++)
        if (memcmp(a->at[array], b->at[array], array_bytes(array, dtype, states, count) + GUARD) !=
            0)
            return false;
    return true;
}

static struct lh_adam_scalars scalars_any(double gradient_scale)
{
    const struct lh_adam_hyper hyper = {3e-3, 0.9, 0.999, 1e-8, 0.01, 0};

    return lh_adam_scalars_make(&hyper, 3, gradient_scale);
}

/* Parameters that begin at blocks, some of them without a gradient. Returns the segments' count. */
static uint32_t segments_cut(struct lh_adam_segment *segments, const float *gradients,
                             uint64_t count)
{
    static const uint64_t lengths[] = {1, 63, 64, 65, 1000, 1024, 5000, 300000, 64, 700001, 129};
    uint64_t at = 0;
    uint32_t s = 0;

    for (size_t i = 0; i < 3 * LH_COUNT_OF(lengths) && at < count; i++) {
        uint64_t length = lh_min_u64(lengths[i % LH_COUNT_OF(lengths)], count - at);

        if (i % 3 != 1)
            segments[s++] = (struct lh_adam_segment){
                .first = at,
                .count = length,
                .gradient = gradients + at,
                .scalars = scalars_any(1.0 + (double)i),
                /* The first one began in an earlier chunk. */
                .param_first = i == 0 ? 4096 : 0,
                .random = {random_bits.seed, random_bits.param + (uint32_t)i, random_bits.step},
            };
        at = lh_align_up(at + length, BLOCK);
    }
    return s;
}

/*
 * The definition of a chunk's update: decode everything, update each segment, encode it alone.
 * Returns the first segment whose update makes a parameter NaN, or LH_ADAM_SEGMENT_NONE.
 */
static uint32_t chunk_define(struct arrays *arrays, enum lh_dtype dtype, enum lh_adam_states states,
                             enum lh_rule rule, uint64_t count,
                             const struct lh_adam_segment *segments, uint32_t segment_count)
{
    const bool has1 = lh_rules[rule].has_moment1, has2 = lh_rules[rule].has_moment2;
    float *m = bytes_create(count * 4), *v = bytes_create(count * 4);
    struct lh_adam_moments moments = {
        states, has1 ? arrays->at[MOMENT1] : NULL, has2 ? arrays->at[MOMENT2] : NULL,
        lh_adam_has_scales(states) ? (struct lh_adam_scales *)arrays->at[SCALES] : NULL};

    uint32_t first_nan = LH_ADAM_SEGMENT_NONE;

    lh_adam_states_decode(kernel_ref()->states, &moments, has1 ? m : NULL, has2 ? v : NULL, count);
    for (uint32_t s = 0; s < segment_count; s++) {
        bool has_nan = false;
        uint64_t first = segments[s].first;
        struct lh_adam_run run = {
            .param = arrays->at[PARAM] + first * lh_dtype_bytes(dtype),
            .residual = dtype == LH_DTYPE_F32
                            ? NULL
                            : arrays->at[RESIDUAL] + first * lh_adam_residual_bytes(dtype),
            .moment1 = has1 ? m + first : NULL,
            .moment2 = has2 ? v + first : NULL,
            .gradient = segments[s].gradient,
            .count = segments[s].count,
            .param_dtype = dtype,
            .gradient_dtype = LH_DTYPE_F32,
            .has_nan = &has_nan,
        };
        struct lh_adam_moments part = lh_adam_moments_from(&moments, first);

        memset(m + first + run.count, 0, (lh_align_up(run.count, BLOCK) - run.count) * sizeof(*m));
        memset(v + first + run.count, 0, (lh_align_up(run.count, BLOCK) - run.count) * sizeof(*v));
        kernel_ref()->run[rule](&run, &segments[s].scalars);
        lh_adam_states_root(states, v + first, lh_align_up(run.count, BLOCK));
        lh_adam_states_encode(kernel_ref()->states, &part, run.moment1, run.moment2,
                              segments[s].param_first, lh_align_up(run.count, BLOCK),
                              &segments[s].random);
        if (has_nan && first_nan == LH_ADAM_SEGMENT_NONE)
            first_nan = s;
    }
    free(m);
    free(v);
    return first_nan;
}

/* Compute the checksums of all arrays. */
static void checksums_make(const struct arrays *arrays, enum lh_dtype dtype,
                           enum lh_adam_states states, uint64_t count,
                           uint32_t crcs[ARRAY_COUNT][CHECKSUM_COUNT_MAX])
{
    for (int array = 0; array < ARRAY_COUNT; array++) {
        uint64_t bytes = array_bytes(array, dtype, states, count);
        uint64_t each = array == SCALES ? LH_ADAM_SCALES_ELEMENTS / 16 : LH_CHECKSUM_BYTES;

        for (uint64_t b = 0; b * each < bytes; b++)
            crcs[array][b] =
                lh_crc32c(0, arrays->at[array] + b * each, lh_min_u64(each, bytes - b * each));
    }
}

static struct lh_adam_chunk chunk_of(const struct arrays *arrays, enum lh_dtype dtype,
                                     enum lh_adam_states states, uint64_t count,
                                     uint32_t expected[ARRAY_COUNT][CHECKSUM_COUNT_MAX],
                                     uint32_t made[ARRAY_COUNT][CHECKSUM_COUNT_MAX])
{
    bool has_scales = lh_adam_has_scales(states);

    return (struct lh_adam_chunk){
        .param = arrays->at[PARAM],
        .residual = dtype == LH_DTYPE_F32 ? NULL : arrays->at[RESIDUAL],
        .moment1 = arrays->at[MOMENT1],
        .moment2 = lh_adam_moment2_bytes(states) > 0 ? arrays->at[MOMENT2] : NULL,
        .scales = has_scales ? (struct lh_adam_scales *)arrays->at[SCALES] : NULL,
        .count = count,
        .param_dtype = dtype,
        .states = states,
        .residual_expected = expected ? expected[RESIDUAL] : NULL,
        .moment1_expected = expected ? expected[MOMENT1] : NULL,
        .moment2_expected = expected ? expected[MOMENT2] : NULL,
        .scales_expected = expected && has_scales ? expected[SCALES] : NULL,
        .param_checksums = made ? made[PARAM] : NULL,
        .residual_checksums = made ? made[RESIDUAL] : NULL,
        .moment1_checksums = made ? made[MOMENT1] : NULL,
        .moment2_checksums = made ? made[MOMENT2] : NULL,
        .scales_checksums = made && has_scales ? made[SCALES] : NULL,
    };
}

static void chunk_check(enum lh_dtype dtype, enum lh_adam_states states, enum lh_rule rule,
                        uint64_t count, const float *gradients)
{
    const struct lh_adam_hyper hyper = {3e-3, 0.9, 0.999, 1e-8, 0.01, 0};
    uint32_t before[ARRAY_COUNT][CHECKSUM_COUNT_MAX], after[ARRAY_COUNT][CHECKSUM_COUNT_MAX];
    struct lh_adam_segment segments[40] = {{0}};
    uint32_t segment_count = segments_cut(segments, gradients, count);
    struct arrays start = arrays_create(dtype, states, count, segments, segment_count);
    struct arrays expected = arrays_copy(&start, dtype, states, count);
    const struct lh_adam_kernel *kernels;
    int kernel_count = lh_adam_kernels(&kernels);

    for (uint32_t s = 0; s < segment_count; s++)
        segments[s].scalars = lh_rules[rule].scalars(&hyper, 3, 1.0 + s);
    checksums_make(&start, dtype, states, count, before);
    uint32_t first_nan =
        chunk_define(&expected, dtype, states, rule, count, segments, segment_count);
    checksums_make(&expected, dtype, states, count, after);
    for (int k = 0; k < 2 * kernel_count; k++) {
        uint32_t made[ARRAY_COUNT][CHECKSUM_COUNT_MAX] = {0};
        struct arrays actual = arrays_copy(&start, dtype, states, count);
        bool checks = k < kernel_count;
        struct lh_adam_chunk chunk =
            chunk_of(&actual, dtype, states, count, checks ? before : NULL, checks ? made : NULL);
        struct lh_adam_mismatch mismatch;
        uint32_t nan_segment = 0;

        chunk.rule = rule;
        chunk.moment1 = lh_rules[rule].has_moment1 ? chunk.moment1 : NULL;
        chunk.moment2 = lh_rules[rule].has_moment2 ? chunk.moment2 : NULL;
        chunk.segments = segments;
        chunk.segment_count = segment_count;
        chunk.nan_segment = &nan_segment;
        fp_environment_spoil();
        LH_CHECK(lh_adam_chunk_update(kernels + k % kernel_count, &chunk, &mismatch) == 0);
        LH_CHECK(fp_environment_is_spoilt());
        fesetenv(FE_DFL_ENV);
        LH_CHECK(nan_segment == first_nan);
        LH_CHECK(arrays_equal(&expected, &actual, dtype, states, count));
        for (int array = 0; checks && array < ARRAY_COUNT; array++) {
            uint64_t each = array == SCALES ? LH_ADAM_SCALES_ELEMENTS / 16 : LH_CHECKSUM_BYTES;
            uint64_t bytes = array_bytes(array, dtype, states, count);

            if ((array == MOMENT1 && !chunk.moment1) || (array == MOMENT2 && !chunk.moment2))
                continue;
            LH_CHECK(memcmp(made[array], after[array], lh_div_ceil(bytes, each) * 4) == 0);
        }
        arrays_destroy(&actual);
    }
    arrays_destroy(&start);
    arrays_destroy(&expected);
}

static void test_chunks(const float *gradients)
{
    static const uint64_t counts[] = {0, BLOCK, 4096, 5 * 4096 + BLOCK, COUNT_MAX};

    lh_test_name("a chunk's update is its parameters' updates, each alone, with its checksums");
    for (size_t c = 0; c < LH_COUNT_OF(counts); c++)
        for (size_t f = 0; f < LH_COUNT_OF(formats); f++) {
            chunk_check(LH_DTYPE_BF16, formats[f], LH_RULE_ADAMW, counts[c], gradients);
            chunk_check(LH_DTYPE_F32, formats[f], LH_RULE_ADAMW, counts[c], gradients);
        }
}

static void test_rules(const float *gradients)
{
    for (enum lh_rule rule = LH_RULE_ADAMW; rule < LH_RULE_COUNT; rule++) {
        const struct lh_rule_row *row = &lh_rules[rule];
        bool is_of_whole = row->has_rows || row->has_factors || row->has_matrices;

        if (is_of_whole || (!row->has_moment1 && !row->has_moment2))
            continue;
        lh_test_name("so it is under %s, whose moments every kernel stores as defined",
                     lh_rules[rule].name);
        for (size_t f = 0; f < LH_COUNT_OF(formats); f++)
            for (enum lh_dtype dtype = LH_DTYPE_F32; dtype <= LH_DTYPE_BF16; dtype++)
                if (formats[f] != LH_ADAM_STATES_4BIT || (row->has_moment1 && row->has_moment2))
                    chunk_check(dtype, formats[f], rule, 3 * 4096 + BLOCK, gradients);
    }
}

static void test_chunk_boundaries(const float *gradients)
{
    const uint64_t count = 30 * 4096, first_counts[] = {BLOCK, 4096, 17 * BLOCK};
    const struct lh_adam_segment whole = {.count = count - 5,
                                          .gradient = gradients,
                                          .scalars = scalars_any(1),
                                          .param_first = 4096,
                                          .random = random_bits};

    lh_test_name("where chunks begin does not change the bits");
    for (size_t f = 0; f < LH_COUNT_OF(formats); f++)
        for (size_t c = 0; c < LH_COUNT_OF(first_counts); c++) {
            uint64_t cut = first_counts[c];
            struct arrays one = arrays_create(LH_DTYPE_BF16, formats[f], count, &whole, 1);
            struct arrays two = arrays_copy(&one, LH_DTYPE_BF16, formats[f], count);
            struct lh_adam_chunk chunk =
                chunk_of(&one, LH_DTYPE_BF16, formats[f], count, NULL, NULL);
            struct lh_adam_segment part = whole;
            struct lh_adam_mismatch mismatch;

            chunk.segment_count = 1;
            chunk.segments = &whole;
            LH_CHECK(lh_adam_chunk_update(NULL, &chunk, &mismatch) == 0);
            chunk = chunk_of(&two, LH_DTYPE_BF16, formats[f], cut, NULL, NULL);
            chunk.segment_count = 1;
            chunk.segments = &part;
            part.count = cut;
            LH_CHECK(lh_adam_chunk_update(NULL, &chunk, &mismatch) == 0);
            part.count = count - 5 - cut;
            part.gradient = gradients + cut;
            part.param_first += cut;
            chunk.param = two.at[PARAM] + cut * 2;
            chunk.residual = two.at[RESIDUAL] + cut * 2;
            chunk.moment1 = two.at[MOMENT1] + cut * lh_adam_moment1_bytes(formats[f]);
            if (chunk.moment2)
                chunk.moment2 = two.at[MOMENT2] + cut * lh_adam_moment2_bytes(formats[f]);
            chunk.scales = chunk.scales ? chunk.scales + cut / BLOCK : NULL;
            chunk.count = count - cut;
            LH_CHECK(lh_adam_chunk_update(NULL, &chunk, &mismatch) == 0);
            LH_CHECK(arrays_equal(&one, &two, LH_DTYPE_BF16, formats[f], count));
            arrays_destroy(&one);
            arrays_destroy(&two);
        }
}

static void test_mismatches(const float *gradients)
{
    static const enum lh_adam_array wrong[] = {[RESIDUAL] = LH_ADAM_ARRAY_RESIDUAL,
                                               [MOMENT1] = LH_ADAM_ARRAY_MOMENT1,
                                               [MOMENT2] = LH_ADAM_ARRAY_MOMENT2,
                                               [SCALES] = LH_ADAM_ARRAY_SCALES};
    const enum lh_adam_states states = LH_ADAM_STATES_8BIT;
    const struct lh_adam_segment segment = {.first = 4096,
                                            .count = COUNT_MAX - 4096,
                                            .gradient = gradients,
                                            .scalars = scalars_any(1),
                                            .random = random_bits};

    lh_test_name("a flipped bit of a residual, moment or scale is found with its block");
    for (int array = RESIDUAL; array <= SCALES; array++)
        for (int place = 0; place < 2; place++) {
            uint64_t bytes = array_bytes(array, LH_DTYPE_BF16, states, COUNT_MAX);
            uint64_t each = array == SCALES ? LH_ADAM_SCALES_ELEMENTS / 16 : LH_CHECKSUM_BYTES;
            uint64_t flip = place == 0 ? 3 : bytes - 2;
            uint32_t before[ARRAY_COUNT][CHECKSUM_COUNT_MAX];
            uint32_t made[ARRAY_COUNT][CHECKSUM_COUNT_MAX];
            struct arrays arrays = arrays_create(LH_DTYPE_BF16, states, COUNT_MAX, &segment, 1);
            struct lh_adam_chunk chunk;
            struct lh_adam_mismatch mismatch;

            checksums_make(&arrays, LH_DTYPE_BF16, states, COUNT_MAX, before);
            chunk = chunk_of(&arrays, LH_DTYPE_BF16, states, COUNT_MAX, before, made);
            chunk.segments = &segment;
            chunk.segment_count = 1;
            arrays.at[array][flip] ^= 0x10;
            LH_CHECK(lh_adam_chunk_update(NULL, &chunk, &mismatch) == -EILSEQ);
            LH_CHECK(mismatch.array == wrong[array] && mismatch.block == flip / each);
            LH_CHECK(mismatch.expected == before[array][mismatch.block]);
            LH_CHECK(mismatch.actual != mismatch.expected);
            arrays_destroy(&arrays);
        }
}

/* context: whether there are two parameters, or one that begins inside a block. */
static void misaligned_run(void *context)
{
    uint16_t values[2 * BLOCK] = {0};
    float gradient[BLOCK] = {0};
    struct lh_adam_segment segments[2] = {
        {.count = 5, .gradient = gradient, .scalars = scalars_any(1)},
        {.first = 5, .count = 5, .gradient = gradient, .scalars = scalars_any(1)}};
    struct lh_adam_chunk chunk = {.param = values,
                                  .residual = values,
                                  .moment1 = values,
                                  .moment2 = values,
                                  .count = BLOCK,
                                  .param_dtype = LH_DTYPE_BF16,
                                  .states = LH_ADAM_STATES_BF16,
                                  .segments = segments + !context,
                                  .segment_count = context ? 2 : 1};
    struct lh_adam_mismatch mismatch;

    (void)lh_adam_chunk_update(NULL, &chunk, &mismatch);
}

int main(void)
{
    float *gradients = bytes_create(COUNT_MAX * 4);
    uint64_t random = 1;

    for (uint64_t i = 0; i < COUNT_MAX; i++)
        gradients[i] = i % 211 == 3 ? rare[i / 211 % LH_COUNT_OF(rare)]
                                    : (float)(int32_t)lh_test_random(&random) * 0x1p-40f;
    test_chunks(gradients);
    test_rules(gradients);
    test_chunk_boundaries(gradients);
    test_mismatches(gradients);
    free(gradients);
    lh_test_name("two parameters in one block, or one that begins inside it, end the program");
    LH_CHECK(lh_test_aborts(misaligned_run, &random));
    LH_CHECK(lh_test_aborts(misaligned_run, NULL));
    return 0;
}
