/* Test sums of gradients against one addition at a time. */
#include "compute/sum.h"

#include "compute/half.h"

#include "fp_fixture.h"
#include "lh_test.h"

#define COUNT_MAX 300

static float widened(uint16_t bits16, enum lh_dtype dtype)
{
    uint32_t bits = dtype == LH_DTYPE_F16 ? lh_half_widen(bits16) : (uint32_t)bits16 << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static void test_sums(enum lh_dtype dtype)
{
    static float values[COUNT_MAX + 1];
    static uint16_t halves[COUNT_MAX + 1];
    static float sum[COUNT_MAX + 1];
    uint64_t seed = 1;

    for (uint64_t i = 0; i <= COUNT_MAX; i++) {
        values[i] = (float)((double)(int32_t)lh_test_random(&seed) / 1e6);
        halves[i] = dtype == LH_DTYPE_F16 ? lh_half_round(bits_of(values[i]))
                                          : (uint16_t)(bits_of(values[i]) >> 16);
    }
    for (uint64_t count = 0; count < COUNT_MAX; count += count < 140 ? 1 : 37) {
        const void *first = dtype == LH_DTYPE_F32 ? (const void *)values : halves;
        const void *second = dtype == LH_DTYPE_F32 ? (const void *)(values + 1) : halves + 1;

        sum[count] = 7.0f;
        lh_sum_start(sum, first, dtype, count);
        lh_sum_add(sum, second, dtype, count);
        for (uint64_t i = 0; i < count; i++) {
            float a = dtype == LH_DTYPE_F32 ? values[i] : widened(halves[i], dtype);
            float b = dtype == LH_DTYPE_F32 ? values[i + 1] : widened(halves[i + 1], dtype);
            LH_CHECK(bits_of(sum[i]) == bits_of(a + b));
        }
        LH_CHECK(sum[count] == 7.0f);
    }
}

/* Up to four gradients, at any count and alignment of the sum. */
static void test_several(enum lh_dtype dtype)
{
    static uint8_t bytes[4][COUNT_MAX * sizeof(float)];
    static _Alignas(16) float sum[COUNT_MAX + 8], expected[COUNT_MAX + 8];
    const void *gradients[4];
    uint64_t seed = 2;

    for (uint32_t j = 0; j < 4; j++) {
        gradients[j] = bytes[j];
        for (uint64_t i = 0; i < COUNT_MAX; i++) {
            float value = (float)((double)(int32_t)lh_test_random(&seed) / 1e6);
            uint32_t bits = bits_of(value);
            uint16_t half = dtype == LH_DTYPE_F16 ? lh_half_round(bits) : (uint16_t)(bits >> 16);
            if (dtype == LH_DTYPE_F32)
                memcpy(bytes[j] + 4 * i, &bits, sizeof(bits));
            else
                memcpy(bytes[j] + 2 * i, &half, sizeof(half));
        }
    }
    for (uint32_t round = 0; round < 400; round++) {
        uint32_t count_of_gradients = 1 + round % 4;
        uint64_t shift = round / 4 % 5;
        uint64_t count = lh_test_random(&seed) % (COUNT_MAX + 1);
        bool is_first = round % 3 > 0;

        for (uint64_t i = 0; i < COUNT_MAX + 8; i++)
            sum[i] = expected[i] = (float)i / 3;
        for (uint32_t j = 0; j < count_of_gradients; j++) {
            if (is_first && j == 0)
                lh_sum_start(expected + 1 + shift, gradients[j], dtype, count);
            else
                lh_sum_add(expected + 1 + shift, gradients[j], dtype, count);
        }
        lh_sum_add_all(sum + 1 + shift, gradients, count_of_gradients, dtype, count, is_first);
        LH_CHECK(memcmp(sum, expected, sizeof(sum)) == 0);
    }
}

static void test_zeros(void)
{
    float zero = -0.0f;
    float sum = 1.0f;

    lh_test_name("a sum starts as a copy: the sign of a zero stays");
    lh_sum_start(&sum, &zero, LH_DTYPE_F32, 1);
    LH_CHECK(bits_of(sum) == UINT32_C(0x80000000));
    uint16_t high = 0x8000;
    lh_sum_start(&sum, &high, LH_DTYPE_BF16, 1);
    LH_CHECK(bits_of(sum) == UINT32_C(0x80000000));
}

int main(void)
{
    lh_test_name("sums are those of one fp32 addition an element, at any count, from fp32");
    test_sums(LH_DTYPE_F32);
    lh_test_name("and from bf16");
    test_sums(LH_DTYPE_BF16);
    lh_test_name("and from fp16");
    test_sums(LH_DTYPE_F16);
    lh_test_name("several gradients at once have the bits of one after the other, at any address");
    test_several(LH_DTYPE_F32);
    test_several(LH_DTYPE_BF16);
    test_several(LH_DTYPE_F16);
    test_zeros();
    return 0;
}
