/* Test the formats in which AdamW's moments are stored. */
#include <math.h>

#include "adam_states_fixture.h"
#include "fp_fixture.h"

static const uint32_t specials[] = {
    0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF,
    0x7F7F8000, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC12345, 0x3F800000, 0xBF808000,
    0x2A000000, 0x29FFFFFF, 0x49FFE000, 0x49FFF000, 0x3A83126F, 0x1E3CE508, 0x15000000,
};

/* Stored moments with room for count elements of any format. */
static struct lh_adam_moments moments_create(enum lh_adam_states states, uint64_t count)
{
    bool has_scales = lh_adam_has_scales(states);

    return (struct lh_adam_moments){
        .states = states,
        .moment1 = bytes_create(count * 2),
        .moment2 = bytes_create(count * 2),
        .scales = has_scales ? bytes_create(lh_adam_scale_bytes(states, count)) : NULL,
    };
}

static void moments_destroy(struct lh_adam_moments *moments)
{
    free(moments->moment1);
    free(moments->moment2);
    free(moments->scales);
}

static bool moments_equal(const struct lh_adam_moments *a, const struct lh_adam_moments *b,
                          uint64_t count)
{
    return memcmp(a->moment1, b->moment1, count * lh_adam_moment1_bytes(a->states)) == 0 &&
           memcmp(a->moment2, b->moment2, count * lh_adam_moment2_bytes(a->states)) == 0 &&
           (!a->scales || memcmp(a->scales, b->scales, lh_adam_scale_bytes(a->states, count)) == 0);
}

/* Fill a block with values of one of several kinds; the second moment is at least 0 or NaN. */
static void block_fill(float *moment1, float *moment2, uint64_t *random)
{
    uint64_t kind = lh_test_random(random) % 8;
    int shift = (int)(lh_test_random(random) % 100) - 60;

    for (int i = 0; i < BLOCK; i++) {
        uint64_t r = lh_test_random(random);
        float unit = (float)(int32_t)r * 0x1p-31f, square = (float)(r >> 40) * 0x1p-24f;

        moment1[i] = ldexpf(unit * unit * unit, kind == 0 ? shift : -10);
        moment2[i] = ldexpf(square * square, kind == 0 ? 2 * shift : -20);
        if (kind == 1 || (kind == 2 && i == 5)) {
            moment1[i] = float_of(specials[r % LH_COUNT_OF(specials)]);
            moment2[i] = fabsf(float_of(specials[(r >> 8) % LH_COUNT_OF(specials)]));
        } else if (kind == 3) {
            moment1[i] = float_of((uint32_t)r);
            moment2[i] = float_of((uint32_t)(r >> 32) & 0x7FFFFFFF);
        } else if (kind == 4) {
            moment1[i] = moment2[i] = 0;
        }
    }
}

static void values_fill(float *moment1, float *moment2, uint64_t count, uint64_t seed)
{
    for (uint64_t i = 0; i < count; i += BLOCK)
        block_fill(moment1 + i, moment2 + i, &seed);
}

static bool values_equal(const float *a, const float *b, uint64_t count)
{
    return memcmp(a, b, count * sizeof(*a)) == 0;
}

static void test_conversions_of_every_kernel(void)
{
    const uint64_t count = lh_test_is_sample() ? 100 * BLOCK : 4000 * BLOCK;
    float *m = bytes_create(count * 4), *v = bytes_create(count * 4);
    float *m_expected = bytes_create(count * 4), *v_expected = bytes_create(count * 4);
    const struct lh_adam_kernel *kernels;
    int kernel_count = lh_adam_kernels(&kernels);

    lh_test_name("every kernel encodes and decodes moments as defined, NaN and denormals included");
    for (size_t f = 0; f < LH_COUNT_OF(formats); f++) {
        struct lh_adam_moments expected = moments_create(formats[f], count);

        values_fill(m, v, count, f);
        encode(kernel_ref(), &expected, m, v, 128, count);
        lh_adam_states_decode(kernel_ref()->states, &expected, m_expected, v_expected, count);
        for (int k = 0; k < kernel_count; k++) {
            struct lh_adam_moments actual = moments_create(formats[f], count);

            encode(kernels + k, &actual, m, v, 128, count);
            LH_CHECK(moments_equal(&expected, &actual, count));
            lh_adam_states_decode(kernels[k].states, &actual, m, v, count);
            LH_CHECK(values_equal(m, m_expected, count));
            LH_CHECK(values_equal(v, v_expected, count));
            values_fill(m, v, count, f);
            moments_destroy(&actual);
        }
        moments_destroy(&expected);
    }
    free(m);
    free(v);
    free(m_expected);
    free(v_expected);
}

static void test_decoding_of_any_codes(enum lh_adam_states states)
{
    const uint64_t count = 500 * BLOCK;
    struct lh_adam_moments moments = moments_create(states, count);
    float *values[4];
    const struct lh_adam_kernel *kernels;
    int kernel_count = lh_adam_kernels(&kernels);
    uint64_t seed = 3;

    lh_test_name("every kernel decodes any bytes as defined, format %d", (int)states);
    for (int i = 0; i < 4; i++)
        values[i] = bytes_create(count * 4);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t r = lh_test_random(&seed);

        /* Two blocks of three have no NaN. */
        ((int8_t *)moments.moment1)[i] =
            (int8_t)(i / BLOCK % 3 == 0 || (r & 0xFF) != 0x80 ? r : 0x7F);
        ((uint8_t *)moments.moment2)[i] = (uint8_t)(i / BLOCK % 3 == 0 ? r >> 8 : (r >> 8) % 255);
        moments.scales[i / BLOCK] =
            (struct lh_adam_scales){(uint16_t)(r >> 16), (uint16_t)(r >> 32)};
    }
    lh_adam_states_decode(kernel_ref()->states, &moments, values[0], values[1], count);
    for (int k = 0; k < kernel_count; k++) {
        lh_adam_states_decode(kernels[k].states, &moments, values[2], values[3], count);
        LH_CHECK(values_equal(values[0], values[2], count));
        LH_CHECK(values_equal(values[1], values[3], count));
    }
    for (int i = 0; i < 4; i++)
        free(values[i]);
    moments_destroy(&moments);
}

static void test_scaled_is_idempotent(enum lh_adam_states states)
{
    const uint64_t count = 4000 * BLOCK;
    struct lh_adam_moments once = moments_create(states, count);
    struct lh_adam_moments twice = moments_create(states, count);
    float *m = bytes_create(count * 4), *v = bytes_create(count * 4);

    lh_test_name("encoding what was decoded gives the same moments, format %d", (int)states);
    values_fill(m, v, count, 17);
    encode(kernel_ref(), &once, m, v, 0, count);
    lh_adam_states_decode(NULL, &once, m, v, count);
    encode(kernel_ref(), &twice, m, v, 0, count);
    LH_CHECK(moments_equal(&once, &twice, count));
    free(m);
    free(v);
    moments_destroy(&once);
    moments_destroy(&twice);
}

static void test_8bit_is_close(void)
{
    const uint64_t count = 1000 * BLOCK;
    struct lh_adam_moments moments = moments_create(LH_ADAM_STATES_8BIT, count);
    float *m = bytes_create(count * 4), *v = bytes_create(count * 4);
    float *m_out = bytes_create(count * 4), *v_out = bytes_create(count * 4);
    uint64_t random = 23;

    lh_test_name("an 8-bit moment is within half a code of its value; a positive one stays so");
    for (uint64_t i = 0; i < count; i++) {
        double size = ldexp(1, -(int)(i / BLOCK % 40));
        double unit = (double)(int32_t)lh_test_random(&random) * 0x1p-31;

        m[i] = (float)(size * unit * fabs(unit));
        v[i] = (float)(size * size * unit * unit * unit * unit);
    }
    encode(kernel_ref(), &moments, m, v, 0, count);
    lh_adam_states_decode(NULL, &moments, m_out, v_out, count);
    for (uint64_t first = 0; first < count; first += BLOCK) {
        double most1 = 0, most2 = 0;

        for (uint64_t i = first; i < first + BLOCK; i++) {
            most1 = fmax(most1, fabs((double)m[i]));
            most2 = fmax(most2, sqrt((double)v[i]));
        }
        for (uint64_t i = first; i < first + BLOCK; i++) {
            double part = fabs((double)m[i]) / most1;
            double part_out = fabs((double)m_out[i]) / most1;
            double v_root = sqrt((double)v[i]), v_root_out = sqrt((double)v_out[i]);

            LH_CHECK(fabs(part_out - part) < 0.501 / 16 * (part + 1.0 / 247) + 0x1p-10 * part);
            LH_CHECK(m_out[i] == 0 || signbit(m_out[i]) == signbit(m[i]));
            LH_CHECK(v_out[i] > 0 || v[i] == 0);
            LH_CHECK(fabs(v_root_out - v_root) < 1.001 * most2 / 254);
            LH_CHECK(v_root < most2 / 254 || fabs(v_root_out - v_root) < 0.6 * most2 / 254);
        }
    }
    free(m);
    free(v);
    free(m_out);
    free(v_out);
    moments_destroy(&moments);
}

static void test_8bit_nan(void)
{
    struct lh_adam_moments moments = moments_create(LH_ADAM_STATES_8BIT, BLOCK);
    float m[BLOCK], v[BLOCK], m_out[BLOCK], v_out[BLOCK];
    uint32_t bits;

    lh_test_name("a NaN stays the NaN of adam.h and leaves its block alone; infinity is bounded");
    for (int i = 0; i < BLOCK; i++) {
        m[i] = (float)(i - 30);
        v[i] = (float)i;
    }
    m[3] = float_of(0xFFC12345);
    v[4] = float_of(0x7F800001);
    encode(kernel_ref(), &moments, m, v, 0, BLOCK);
    lh_adam_states_decode(NULL, &moments, m_out, v_out, BLOCK);
    for (int i = 0; i < BLOCK; i++) {
        LH_CHECK(isnan(m_out[i]) == (i == 3) && isnan(v_out[i]) == (i == 4));
        LH_CHECK(i == 3 || fabsf(m_out[i] - m[i]) < 0.6f);
        LH_CHECK(i == 4 || fabsf(v_out[i] - v[i]) < 0.3f);
    }
    memcpy(&bits, m_out + 3, sizeof(bits));
    LH_CHECK(bits == 0x7FC00000);
    m[3] = -INFINITY;
    v[4] = INFINITY;
    encode(kernel_ref(), &moments, m, v, 0, BLOCK);
    lh_adam_states_decode(NULL, &moments, m_out, v_out, BLOCK);
    LH_CHECK(m_out[3] < -2096000 && m_out[3] > -2097152);
    LH_CHECK(v_out[4] > 0x1p41f && v_out[4] < 0x1p42f);
    moments_destroy(&moments);
}

static void test_4bit_is_nearest(void)
{
    static const double sizes[] = {0, 0.5, 1, 2, 3, 5, 7, 11};
    struct lh_adam_moments moments = moments_create(LH_ADAM_STATES_4BIT, 2 * BLOCK);
    float m[2 * BLOCK] = {0}, v[2 * BLOCK] = {0}, m_out[2 * BLOCK], v_out[2 * BLOCK];

    lh_test_name("a 4-bit moment is the nearest of its codes; a second moment is never 0 beside"
                 " others, and a block of zeros stays one");
    for (int i = 0; i < BLOCK; i++) {
        m[i] = (float)(2 * i - BLOCK + 1) * 11 / (BLOCK - 1);
        v[i] = (float)(i * i) / (BLOCK - 1) / (BLOCK - 1);
    }
    encode(kernel_ref(), &moments, m, v, 0, 2 * BLOCK);
    lh_adam_states_decode(NULL, &moments, m_out, v_out, 2 * BLOCK);
    for (int i = 0; i < BLOCK; i++) {
        double m_best = INFINITY, v_best = INFINITY;

        for (int code = 0; code < 16; code++) {
            double size = sizes[code / 2], m_code = code % 2 ? -size : size;
            double root = (code + 1) / 16.0;

            m_best = fmin(m_best, fabs(m_code - (double)m[i]));
            v_best = fmin(v_best, fabs(root - sqrt((double)v[i])));
        }
        LH_CHECK(fabs(fabs((double)m_out[i] - (double)m[i]) - m_best) < 1e-4);
        LH_CHECK(fabs(fabs(sqrt((double)v_out[i]) - sqrt((double)v[i])) - v_best) < 1e-6);
        LH_CHECK(v_out[i] > 0 && m_out[BLOCK + i] == 0 && v_out[BLOCK + i] == 0);
    }
    moments_destroy(&moments);
}

static void test_4bit_nan(void)
{
    struct lh_adam_moments moments = moments_create(LH_ADAM_STATES_4BIT, BLOCK);
    float m[BLOCK], v[BLOCK], m_out[BLOCK], v_out[BLOCK];

    lh_test_name("in 4 bits a NaN of a first moment stays, and that of a second one becomes small");
    for (int i = 0; i < BLOCK; i++) {
        m[i] = (float)(i - 30);
        v[i] = (float)i;
    }
    m[3] = v[63] = float_of(0xFFC12345);
    encode(kernel_ref(), &moments, m, v, 0, BLOCK);
    lh_adam_states_decode(NULL, &moments, m_out, v_out, BLOCK);
    for (int i = 0; i < BLOCK; i++) {
        LH_CHECK(isnan(m_out[i]) == (i == 3) && (i == 3 || fabsf(m_out[i] - m[i]) < 6.1f));
        LH_CHECK(i == 63 || fabsf(sqrtf(v_out[i]) - sqrtf(v[i])) < 0.51f);
    }
    LH_CHECK(v_out[63] > 0 && v_out[63] < 1);
    moments_destroy(&moments);
}

static void test_bf16_is_unbiased(void)
{
    enum { STEPS = 4096 };
    struct lh_adam_moments moments = moments_create(LH_ADAM_STATES_BF16, BLOCK);
    struct lh_adam_random random = random_bits;
    float m[BLOCK], v[BLOCK];
    double sum1 = 0, sum2 = 0;
    int both = 0;

    lh_test_name("bf16 moments keep their mean, with independent bits for each moment and step");
    for (int step = 0; step < STEPS; step++) {
        for (int i = 0; i < BLOCK; i++) {
            m[i] = -1.0f - 0x1p-8f;
            v[i] = 1.0f + 0x1p-8f;
        }
        random.step = (uint32_t)step;
        lh_adam_states_encode(NULL, &moments, m, v, 64, BLOCK, &random);
        lh_adam_states_decode(NULL, &moments, m, v, BLOCK);
        LH_CHECK((m[9] == -1.0f || m[9] == -1.0f - 0x1p-7f) && (v[9] == 1.0f || v[9] > 1.0f));
        for (int i = 0; i < BLOCK; i++) {
            sum1 += (double)m[i];
            sum2 += (double)v[i];
            both += m[i] < -1.0f && v[i] > 1.0f;
        }
    }
    LH_CHECK(fabs(sum1 / STEPS / BLOCK + 1 + 0x1p-8) < 1e-4);
    LH_CHECK(fabs(sum2 / STEPS / BLOCK - 1 - 0x1p-8) < 1e-4);
    LH_CHECK(abs(both - STEPS * BLOCK / 4) < 2000);
    moments_destroy(&moments);
}

int main(void)
{
    test_conversions_of_every_kernel();
    test_decoding_of_any_codes(LH_ADAM_STATES_8BIT);
    test_decoding_of_any_codes(LH_ADAM_STATES_4BIT);
    test_scaled_is_idempotent(LH_ADAM_STATES_8BIT);
    test_scaled_is_idempotent(LH_ADAM_STATES_4BIT);
    test_8bit_is_close();
    test_4bit_is_nearest();
    test_8bit_nan();
    test_4bit_nan();
    test_bf16_is_unbiased();
    return 0;
}
