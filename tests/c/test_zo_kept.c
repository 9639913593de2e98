/* Test parameters that zeroth-order training stores in narrow formats: rounding, and updates. */
#include <fenv.h>
#include <math.h>

#include "compute/half.h"
#include "compute/zo_kernels.h"
#include "fp_fixture.h"
#include "zo_fixture.h"

#define COUNT_MAX 5000
#define MARGIN 64
#define OP_COUNT 8

static const int mantissa_bits[] = {23, 7, 10, 3};
static const int exponent_min[] = {-126, -126, -14, -6}; /* the least exponent of a normal number */
static const double largest[] = {0x1.fffffep127, 0x1.fep127, 65504, 448};

/* The number of the format below a magnitude, and how far the next one is. */
static double below(double magnitude, int format, double *step_out)
{
    int exponent;
    frexp(magnitude, &exponent);
    exponent = exponent - 1 < exponent_min[format] ? exponent_min[format] : exponent - 1;
    *step_out = ldexp(1, exponent - mantissa_bits[format]);
    return floor(magnitude / *step_out) * *step_out;
}

/* A finite value becomes a neighbor, and which one is a matter of the word alone. */
static void rounded_check(uint32_t bits, uint32_t word, int format)
{
    double magnitude = fabsf(float_of(bits)), step;
    double low = below(magnitude, format, &step);
    uint32_t out = lh_zo_rounded(bits, word, (enum lh_zo_format)format);
    double found = fabsf(float_of(out));
    double share = (magnitude - low) / step; /* the share of words that select the upper one */
    double chance = (double)word / 0x1p32;
    LH_CHECK((out ^ bits) >> 31 == 0);
    if (magnitude > largest[format]) {
        LH_CHECK(found == largest[format]);
        return;
    }
    LH_CHECK(found == low || found == fmin(low + step, largest[format]));
    if (chance + share < 1)
        LH_CHECK(found == low);
    if (chance + share >= 1 + 0x1p-30) /* the lowest bits of a word do not count for tiny numbers */
        LH_CHECK(found == fmin(low + step, largest[format]));
}

static void test_rounded(void)
{
    uint64_t seed = 3;
    lh_test_name("rounding gives a neighbor, a number of the format itself, the largest beyond");
    for (int format = LH_ZO_FORMAT_BF16; format <= LH_ZO_FORMAT_F8; format++) {
        for (int turn = 0; turn < 1000000; turn++) {
            uint32_t word = (uint32_t)lh_test_random(&seed), bits = (uint32_t)lh_test_random(&seed);
            if (turn % 2) /* a number in the format's range */
                bits = bits_of(
                    ldexpf((float)(int32_t)bits * 0x1p-31f, exponent_min[format] + turn / 2 % 26));
            if (isfinite(float_of(bits)))
                rounded_check(bits, word, format);
        }
        for (uint32_t sign = 0; sign < 2; sign++) {
            enum lh_zo_format f = (enum lh_zo_format)format;
            uint32_t high = sign << 31;
            for (uint32_t word = 0; word < 2; word++) {
                LH_CHECK(lh_zo_rounded(high, 0 - word, f) == high);
                LH_CHECK(lh_zo_rounded(high | 0x7F800001, 0 - word, f) == (high | LH_ZO_NAN));
                LH_CHECK(lh_zo_rounded(high | 0x7FFFFFFF, 0 - word, f) == (high | LH_ZO_NAN));
                LH_CHECK(float_of(lh_zo_rounded(high | 0x7F800000, 0 - word, f)) ==
                         (float)(sign ? -largest[format] : largest[format]));
            }
        }
    }
    LH_CHECK(lh_zo_rounded(0x7F800001, UINT32_MAX, LH_ZO_FORMAT_F32) == 0x7F800001);
}

static void test_mean(void)
{
    uint64_t seed = 4;
    lh_test_name("the mean over all words is the number");
    for (int format = LH_ZO_FORMAT_BF16; format <= LH_ZO_FORMAT_F8; format++) {
        /* the bits of a word that count for a normal number */
        int bits = 23 - mantissa_bits[format];
        for (int turn = 0; turn < 8; turn++) {
            float value = (float)(int32_t)lh_test_random(&seed) * 0x1p-28f;
            double sum = 0;
            for (uint32_t i = 0; i < UINT32_C(1) << bits; i++)
                sum += (double)float_of(
                    lh_zo_rounded(bits_of(value), i << (32 - bits), (enum lh_zo_format)format));
            LH_CHECK(sum == ldexp((double)value, bits));
        }
        if (format == LH_ZO_FORMAT_BF16)
            continue;
        /* below the least normal number, the bound is 5 standard deviations */
        for (int turn = 0; turn < 20; turn++) {
            enum { N = 1 << 18 };
            double step = ldexp(1, exponent_min[format] - mantissa_bits[format]), sum = 0;
            double value = (double)lh_test_random(&seed) * 0x1p-64 * step * (turn % 2 ? 1 : 7);
            value = (double)(float)value;
            for (int i = 0; i < N; i++)
                sum += (double)float_of(lh_zo_rounded(bits_of((float)value),
                                                      (uint32_t)lh_test_random(&seed),
                                                      (enum lh_zo_format)format));
            LH_CHECK(fabs(sum / N - value) < 5 * step * 0.5 / sqrt(N));
        }
    }
}

/* Make numbers of all kinds, and some near those of the format. */
static float number_make(uint64_t *seed)
{
    static const uint32_t odd[] = {0x00000000, 0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF,
                                   0x00000001, 0x00800000, 0x33000000, 0x38800000, 0x387FFFFF,
                                   0x3C800000, 0x3C7FFFFF, 0x477FE000, 0x477FF000, 0x43E00000,
                                   0x43E00001, 0x7F7F0000, 0x7F7FFFFF, 0x3F800000, 0x3B000000};
    uint64_t random = lh_test_random(seed);
    uint32_t sign = (uint32_t)(random >> 63) << 31, which = (uint32_t)random % 8;
    if (which == 0)
        return float_of(sign | odd[(random >> 8) % LH_COUNT_OF(odd)]);
    if (which == 1)
        return float_of((uint32_t)(random >> 8));
    return ldexpf((float)(int32_t)(random >> 8) * 0x1p-31f, (int)(which * 4) - 27);
}

/* Bits, of which NaNs are one: which of two operands' an operation keeps is the processor's. */
static bool is_same_number(float a, float b)
{
    return isnan(a) ? isnan(b) : bits_of(a) == bits_of(b);
}

static void test_kernels(void)
{
    const struct lh_zo_kernel *kernels;
    int count = lh_zo_kernels(&kernels);
    uint64_t seed = 1;
    lh_test_name("every kernel rounds to the bits of the definition");
    for (int turn = 0; turn < 200; turn++) {
        static float before[COUNT_MAX], expected[COUNT_MAX], values[COUNT_MAX];
        struct lh_zo_op ops[OP_COUNT];
        enum lh_zo_format format = (enum lh_zo_format)(turn % 4);
        uint64_t first = lh_test_random(&seed) % (LH_ZO_ELEMENT_COUNT_MAX - COUNT_MAX);
        uint64_t length = lh_test_random(&seed) % (COUNT_MAX + 1);
        uint32_t op_count = turn % 5 ? (uint32_t)lh_test_random(&seed) % OP_COUNT : 1;
        zo_rounds_make(ops, op_count, format, &seed);
        if (turn % 5 == 0)
            ops[0].kind = LH_ZO_OP_ROUND, ops[0].format = format;
        for (int i = 0; i < COUNT_MAX; i++)
            before[i] = number_make(&seed);
        for (int i = 0; i < count; i++) {
            float *out = i == 0 ? expected : values;
            memset(out, 0, sizeof(values));
            lh_zo_apply_by(&kernels[count - 1 - i], out, before, first, length, ops, op_count);
            for (uint64_t j = 0; i > 0 && j < COUNT_MAX; j++)
                LH_CHECK(is_same_number(values[j], expected[j]));
        }
        for (uint64_t j = 0; op_count == 1 && turn % 5 == 0 && j < length; j++) {
            uint64_t index = first + j, counter = index / 64 * 16 + index % 16;
            const struct lh_zo_stream *stream = &ops[0].stream;
            const uint32_t key[2] = {(uint32_t)stream->seed, (uint32_t)(stream->seed >> 32)};
            const uint32_t counters[4] = {(uint32_t)counter,
                                          (uint32_t)(counter >> 32) + (stream->sample << 16),
                                          stream->param, stream->step};
            uint32_t words[4];
            lh_zo_philox(counters, key, words);
            LH_CHECK(bits_of(expected[j]) ==
                     lh_zo_rounded(bits_of(before[j]), words[index % 64 / 16], format));
        }
    }
}

/* Widen by arithmetic, to compare with the definition, which uses bits. */
static float widened(const char *kept, int format)
{
    uint16_t half;
    float value;
    if (format == LH_ZO_FORMAT_F8) {
        int byte = *kept & 0xFF, exponent = byte >> 3 & 15;
        int mantissa = byte % 8 + (exponent > 0 ? 8 : 0);
        value = byte % 128 == 127 ? NAN : ldexpf((float)mantissa, exponent - (exponent > 0) - 9);
        return byte > 127 ? -value : value;
    }
    memcpy(&value, kept, format == LH_ZO_FORMAT_F32 ? 4 : 0);
    memcpy(&half, kept, 2);
    return format == LH_ZO_FORMAT_F32    ? value
           : format == LH_ZO_FORMAT_BF16 ? float_of((uint32_t)half << 16)
                                         : float_of(lh_half_widen(half));
}

/* Round to nearest, ties to even, and convert back to fp32. */
static float nearest(float value, int format)
{
    double step, magnitude = fabsf(value);
    if (format == LH_ZO_FORMAT_F32 || !isfinite(value))
        return value;
    below(magnitude, format, &step);
    double out = rint(magnitude / step) * step;
    return copysignf(out > largest[format] ? INFINITY : (float)out, value);
}

struct led {
    char state[4 * COUNT_MAX + MARGIN], values[4 * COUNT_MAX + MARGIN];
};

static void led_check(const struct led *led, const struct led *before, const float *state,
                      const float *values, uint64_t length, const struct lh_zo_kept *kept)
{
    uint64_t state_bytes = lh_zo_format_bytes(kept->state_format);
    uint64_t value_bytes = lh_zo_format_bytes(kept->value_format);
    for (uint64_t i = 0; i < length; i++) {
        float found = widened(led->state + i * state_bytes, (int)kept->state_format);
        LH_CHECK(is_same_number(found, state[i]));
        found = widened(led->values + i * value_bytes, (int)kept->value_format);
        LH_CHECK(is_same_number(found, nearest(values[i], (int)kept->value_format)));
    }
    uint64_t end = length * state_bytes;
    LH_CHECK(memcmp(led->state + end, before->state + end, sizeof(led->state) - end) == 0);
    end = length * value_bytes;
    LH_CHECK(memcmp(led->values + end, before->values + end, sizeof(led->values) - end) == 0);
}

static void test_lead(void)
{
    const struct lh_zo_kernel *kernels;
    int count = lh_zo_kernels(&kernels);
    uint64_t seed = 9;
    lh_test_name("what is led is what ops give in fp32, whatever formats, kernels and cuts");
    for (int turn = 0; turn < (LH_TEST_IS_SLOW ? 60 : 360); turn++) {
        static struct led before, led;
        static float state[COUNT_MAX], values[COUNT_MAX];
        struct lh_zo_op ops[OP_COUNT];
        struct lh_zo_kept kept = {led.state, (enum lh_zo_format)(turn % 4), led.values,
                                  (enum lh_zo_format)(turn / 4 % 3)};
        uint64_t length = lh_test_random(&seed) % (turn % 3 ? 400 : COUNT_MAX + 1);
        uint64_t first = turn % 2 ? lh_test_random(&seed) % 4096
                                  : lh_test_random(&seed) % (LH_ZO_ELEMENT_COUNT_MAX - COUNT_MAX);
        uint32_t op_count = (uint32_t)lh_test_random(&seed) % (OP_COUNT + 1), round_count = 0;
        zo_rounds_make(ops, op_count, kept.state_format, &seed);
        for (uint32_t i = 0; i < op_count; i++)
            round_count = ops[i].kind == LH_ZO_OP_ROUND ? i + 1 : round_count;
        for (size_t i = 0; i < sizeof(before.state); i++)
            before.state[i] = (char)lh_test_random(&seed);
        for (uint64_t i = 0; i < length; i++)
            state[i] = widened(before.state + i * lh_zo_format_bytes(kept.state_format),
                               (int)kept.state_format);
        lh_zo_apply_by(&kernels[count - 1], state, state, first, length, ops, round_count);
        lh_zo_apply_by(&kernels[count - 1], values, state, first, length, ops + round_count,
                       op_count - round_count);
        for (int i = 0; i < count; i++) {
            led = before;
            lh_zo_lead_by(&kernels[i], &kept, first, length, ops, op_count);
            led_check(&led, &before, state, values, length, &kept);
        }
        led = before;
        for (uint64_t at = 0, piece; at < length; at += piece) {
            struct lh_zo_kept part = kept;
            piece = lh_min_u64(1 + lh_test_random(&seed) % 200, length - at);
            part.state = led.state + at * lh_zo_format_bytes(kept.state_format);
            part.values = led.values + at * lh_zo_format_bytes(kept.value_format);
            lh_zo_lead(&part, first + at, piece, ops, op_count);
        }
        led_check(&led, &before, state, values, length, &kept);
    }
}

static void test_all_numbers(void)
{
    const struct lh_zo_kernel *kernels;
    int count = lh_zo_kernels(&kernels);
    lh_test_name("every number of a format is kept as it is, bit for bit");
    for (int i = 0; i < count; i++) {
        for (int format = LH_ZO_FORMAT_BF16; format <= LH_ZO_FORMAT_F8; format++) {
            static uint16_t state[65536], before[65536];
            static float values[65536];
            uint64_t number_count = format == LH_ZO_FORMAT_F8 ? 256 : 65536;
            uint64_t bytes = lh_zo_format_bytes((enum lh_zo_format)format);
            struct lh_zo_op op = {.kind = LH_ZO_OP_ROUND,
                                  .stream = {1, LH_ZO_SAMPLE_ROUND, 2, 3},
                                  .format = (enum lh_zo_format)format};
            struct lh_zo_kept kept = {state, (enum lh_zo_format)format, values, LH_ZO_FORMAT_F32};
            for (uint32_t j = 0; j < number_count; j++) {
                ((uint8_t *)state)[j] = (uint8_t)j;
                if (bytes == 2)
                    state[j] = (uint16_t)j;
            }
            memcpy(before, state, sizeof(before));
            lh_zo_lead_by(&kernels[i], &kept, 0, number_count, &op, 1);
            for (uint64_t j = 0; j < number_count; j++) {
                const char *now = (const char *)state + j * bytes;
                float value = widened((const char *)before + j * bytes, format);
                bool is_infinite = isinf(value) != 0; /* infinity becomes the largest number */
                LH_CHECK(is_infinite || is_same_number(widened(now, format), value));
                LH_CHECK(!is_infinite ||
                         widened(now, format) == copysignf((float)largest[format], value));
                LH_CHECK(is_same_number(widened(now, format), values[j]));
                if (isfinite(value))
                    LH_CHECK(memcmp(now, (const char *)before + j * bytes, bytes) == 0);
            }
        }
    }
}

static void test_widen(void)
{
    const struct lh_zo_kernel *kernels;
    int count = lh_zo_kernels(&kernels);
    lh_test_name("every kernel widens to the bits of the definition, NaNs too");
    for (int format = LH_ZO_FORMAT_BF16; format <= LH_ZO_FORMAT_F8; format++) {
        static uint16_t kept[65536];
        static float expected[65536], values[65536];
        uint64_t number_count = format == LH_ZO_FORMAT_F8 ? 256 : 65536;
        for (uint32_t i = 0; i < number_count; i++)
            kept[i] = (uint16_t)i;
        for (uint32_t i = 0; format == LH_ZO_FORMAT_F8 && i < number_count; i++)
            ((uint8_t *)kept)[i] = (uint8_t)i;
        lh_zo_widen_ref(expected, kept, (enum lh_zo_format)format, number_count);
        for (int i = 0; i < count; i++) {
            kernels[i].widen(values, kept, (enum lh_zo_format)format, number_count);
            LH_CHECK(memcmp(values, expected, number_count * sizeof(*values)) == 0);
        }
    }
}

static void test_environment(void)
{
    enum { N = 1000 };
    uint64_t seed = 2;
    lh_test_name("the thread's rounding mode does not show, and stays");
    for (int i = 0; i < 12; i++) {
        static struct led before, after;
        enum lh_zo_format format = (enum lh_zo_format)(i % 4);
        struct lh_zo_op ops[] = {
            {.kind = LH_ZO_OP_PERTURB, .stream = {.seed = 5}, .scale = 0x1p-12f},
            {.kind = LH_ZO_OP_ROUND, .stream = {5, LH_ZO_SAMPLE_ROUND, 0, 0}, .format = format},
            {.kind = LH_ZO_OP_PERTURB, .stream = {.seed = 6}, .scale = 0x1p-9f}};
        struct lh_zo_kept kept = {before.state, format, before.values, (enum lh_zo_format)(i / 4)};
        for (size_t j = 0; j < sizeof(before.state); j++)
            before.state[j] = (char)lh_test_random(&seed);
        after = before;
        lh_zo_lead(&kept, 3, N, ops, 3);
        kept.state = after.state;
        kept.values = after.values;
        fp_environment_spoil();
        lh_zo_lead(&kept, 3, N, ops, 3);
        LH_CHECK(fp_environment_is_spoilt());
        fesetenv(FE_DFL_ENV);
        LH_CHECK(memcmp(&before, &after, sizeof(before)) == 0);
    }
}

int main(void)
{
    test_rounded();
    test_mean();
    test_kernels();
    test_lead();
    test_all_numbers();
    test_widen();
    test_environment();
    return 0;
}
