/* Test averages of parameters: their formula, and chunks that have them. */
#include <math.h>

#include "base/crc32c.h"
#include "base/error.h"
#include "compute/adam_kernels.h"
#include "fp_fixture.h"
#include "lh_test.h"

/* Two checksums of an fp32 array, the second of an incomplete block. */
#define COUNT UINT64_C(263168)
#define CHECKSUM_COUNT 2

static const uint32_t specials[] = {
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
    0xFF800000, 0x7F800001, 0xFFC12345, 0x3F800000, 0xBF808000, 0x1E3CE508,
};

static float *floats_create(uint64_t count, uint64_t seed)
{
    float *values = malloc(count * sizeof(*values));

    LH_CHECK(values != NULL);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t random = lh_test_random(&seed);
        values[i] = random % 97 == 0 ? float_of(specials[random / 97 % LH_COUNT_OF(specials)])
                                     : (float)(int32_t)(random >> 32) * 0x1p-33f;
    }
    return values;
}

static float *floats_copy(const float *source, uint64_t count)
{
    float *values = malloc(count * sizeof(*values));

    LH_CHECK(values != NULL);
    memcpy(values, source, count * sizeof(*values));
    return values;
}

static void test_formula(void)
{
    static const float rests[] = {0.0F, 1e-4F, 0.1F, 0.49F, 0.5F, 0.7F, 1.0F};

    lh_test_name("an average moves by the formula, on any input, in any environment");
    for (size_t r = 0; r < LH_COUNT_OF(rests); r++)
        for (uint64_t count = 0; count < 100; count++) {
            float *values = floats_create(count, 3 + count), *before = floats_create(count, 5);
            float *made = floats_copy(before, count);

            fp_environment_spoil();
            lh_adam_average(made, values, count, rests[r]);
            LH_CHECK(fp_environment_is_spoilt());
            fesetenv(FE_DFL_ENV);
            for (uint64_t i = 0; i < count; i++) {
                float rest = rests[r], e = before[i], p = values[i];
                float right = rest < 0.5F    ? fmaf(rest, p - e, e)
                              : rest == 1.0F ? p
                                             : fmaf(rest - 1.0F, p - e, p);
                uint32_t bits = isnan(right) ? LH_ADAM_NAN_BITS : bits_of(right);

                LH_CHECK(bits_of(made[i]) == bits);
            }
            free(values);
            free(before);
            free(made);
        }
}

static void crcs_make(const float *values, uint32_t crcs[CHECKSUM_COUNT])
{
    uint64_t first_bytes = LH_CHECKSUM_BYTES;

    crcs[0] = lh_crc32c(0, values, first_bytes);
    crcs[1] = lh_crc32c(0, (const char *)values + first_bytes, COUNT * 4 - first_bytes);
}

/* The arrays of a chunk of bf16 parameters, and its one gradient. */
struct arrays {
    float *masters;
    uint16_t *param;
    int16_t *residual;
    float *moment1, *moment2, *average, *gradient;
};

static struct arrays arrays_create(void)
{
    struct arrays arrays = {
        .masters = floats_create(COUNT, 1),
        .param = calloc(COUNT, 2),
        .residual = calloc(COUNT, 2),
        .moment1 = calloc(COUNT, 4),
        .moment2 = calloc(COUNT, 4),
        .average = floats_create(COUNT, 2),
        .gradient = floats_create(COUNT, 3),
    };

    LH_CHECK(arrays.param && arrays.residual && arrays.moment1 && arrays.moment2);
    lh_adam_split(arrays.masters, arrays.param, arrays.residual, COUNT);
    return arrays;
}

static void arrays_destroy(struct arrays *arrays)
{
    free(arrays->masters);
    free(arrays->param);
    free(arrays->residual);
    free(arrays->moment1);
    free(arrays->moment2);
    free(arrays->average);
    free(arrays->gradient);
}

static struct lh_adam_chunk chunk_of(struct arrays *arrays, const struct lh_adam_segment *segment)
{
    return (struct lh_adam_chunk){
        .param = arrays->param,
        .residual = arrays->residual,
        .moment1 = arrays->moment1,
        .moment2 = arrays->moment2,
        .average = arrays->average,
        .count = COUNT,
        .param_dtype = LH_DTYPE_BF16,
        .segments = segment,
        .segment_count = 1,
    };
}

static struct lh_adam_segment segment_of(const struct arrays *arrays)
{
    const struct lh_adam_hyper hyper = {1e-2, 0.9, 0.999, 1e-8, 0.01, 0.25};

    return (struct lh_adam_segment){
        .first = 17,
        .count = COUNT - 17 - 33,
        .gradient = arrays->gradient,
        .gradient_dtype = LH_DTYPE_F32,
        .scalars = lh_adam_scalars_make(&hyper, 1, 1),
    };
}

static void test_chunks(void)
{
    const struct lh_adam_kernel *kernels;
    int kernel_count = lh_adam_kernels(&kernels);

    lh_test_name("a chunk's averages follow its masters, with checksums and without");
    for (int k = 0; k < 2 * kernel_count; k++) {
        struct arrays arrays = arrays_create();
        struct lh_adam_segment segment = segment_of(&arrays);
        struct lh_adam_chunk chunk = chunk_of(&arrays, &segment);
        float *right = floats_copy(arrays.average, COUNT);
        uint32_t before[CHECKSUM_COUNT], made[CHECKSUM_COUNT], after[CHECKSUM_COUNT];
        struct lh_adam_mismatch mismatch;

        crcs_make(arrays.average, before);
        if (k % 2 == 0) {
            chunk.average_expected = before;
            chunk.average_checksums = made;
        }
        LH_CHECK(lh_adam_chunk_update(kernels + k / 2, &chunk, &mismatch) == 0);
        lh_adam_join(arrays.param, arrays.residual, arrays.masters, COUNT);
        lh_adam_average_ref(right + 17, arrays.masters + 17, segment.count, 0.25F);
        LH_CHECK(memcmp(right, arrays.average, COUNT * 4) == 0);
        crcs_make(arrays.average, after);
        LH_CHECK(k % 2 != 0 || memcmp(made, after, sizeof(after)) == 0);
        free(right);
        arrays_destroy(&arrays);
    }
    lh_test_name("a flipped bit of an average is found with its block");
    for (uint32_t block = 0; block < CHECKSUM_COUNT; block++) {
        struct arrays arrays = arrays_create();
        struct lh_adam_segment segment = segment_of(&arrays);
        struct lh_adam_chunk chunk = chunk_of(&arrays, &segment);
        uint32_t before[CHECKSUM_COUNT];
        struct lh_adam_mismatch mismatch;

        crcs_make(arrays.average, before);
        chunk.average_expected = before;
        ((char *)arrays.average)[block == 0 ? 5 : COUNT * 4 - 3] ^= 0x10;
        LH_CHECK(lh_adam_chunk_update(NULL, &chunk, &mismatch) == -EILSEQ);
        LH_CHECK(mismatch.array == LH_ADAM_ARRAY_AVERAGE && mismatch.block == block);
        LH_CHECK(mismatch.expected == before[block] && mismatch.actual != before[block]);
        arrays_destroy(&arrays);
    }
}

int main(void)
{
    test_formula();
    test_chunks();
    return 0;
}
