/* Test sums of squares against plain fp64 arithmetic. */
#include "compute/norm.h"

#include <math.h>
#include <string.h>

#include "compute/half.h"
#include "lh_test.h"

#define COUNT_MAX 1000

static void test_sums(void)
{
    static float values[COUNT_MAX + 1];
    static uint16_t highs[COUNT_MAX + 1], halves[COUNT_MAX + 1];
    uint64_t seed = 1;

    lh_test_name("sums of squares are those of fp64, at any count and alignment, in all dtypes");
    for (uint64_t i = 0; i <= COUNT_MAX; i++) {
        values[i] = (float)((double)(int32_t)lh_test_random(&seed) / 1e6);
        memcpy(&highs[i], (uint8_t *)&values[i] + 2, sizeof(highs[i]));
        /* includes denormals, but no infinity */
        halves[i] = (uint16_t)lh_test_random(&seed) & 0xBFFF;
    }
    for (uint64_t count = 0; count < COUNT_MAX; count += count < 40 ? 1 : 97) {
        for (uint64_t first = 0; first < 2; first++) {
            double exact = 0;
            double exact_high = 0;
            double exact_half = 0;
            for (uint64_t i = first; i < first + count; i++) {
                uint32_t bits = (uint32_t)highs[i] << 16;
                float high;
                memcpy(&high, &bits, sizeof(high));
                exact += (double)values[i] * values[i];
                exact_high += (double)high * high;
                bits = lh_half_widen(halves[i]);
                memcpy(&high, &bits, sizeof(high));
                exact_half += (double)high * high;
            }
            double sum = lh_norm_square_sum(values + first, LH_DTYPE_F32, count);
            double sum_high = lh_norm_square_sum(highs + first, LH_DTYPE_BF16, count);
            double sum_half = lh_norm_square_sum(halves + first, LH_DTYPE_F16, count);
            LH_CHECK(fabs(sum_half - exact_half) <= 1e-12 * exact_half);
            LH_CHECK(fabs(sum - exact) <= 1e-12 * exact);
            LH_CHECK(fabs(sum_high - exact_high) <= 1e-12 * exact_high);
        }
    }
}

static void test_blocks(void)
{
    const uint64_t count = 2 * LH_NORM_BLOCK_ELEMENTS + 5;
    struct lh_norm_sum sum = {0};
    float *ones = calloc(count, sizeof(*ones));

    lh_test_name("elements are counted once each where a sum has several blocks");
    LH_CHECK(ones != NULL);
    for (uint64_t i = 0; i < count; i++)
        ones[i] = 1;
    LH_CHECK(lh_norm_square_sum(ones, LH_DTYPE_F32, count) == (double)count);

    lh_test_name("a sum that comes in parts has the bits of one that comes at once");
    for (uint64_t i = 0; i < count; i++)
        ones[i] = (float)(i % 1009) / 7;
    for (uint64_t done = 0, part = 1; done < count; done += part, part = part * 3 + 1) {
        part = lh_min_u64(part, count - done);
        lh_norm_sum_add(&sum, ones + done, LH_DTYPE_F32, part);
    }
    LH_CHECK(lh_norm_sum_end(&sum) == lh_norm_square_sum(ones, LH_DTYPE_F32, count));
    free(ones);
}

static void test_specials(void)
{
    float values[9] = {1.0f};

    lh_test_name("infinity and NaN show in the sum");
    values[8] = INFINITY;
    LH_CHECK(isinf(lh_norm_square_sum(values, LH_DTYPE_F32, 9)));
    values[3] = NAN;
    LH_CHECK(isnan(lh_norm_square_sum(values, LH_DTYPE_F32, 9)));
    LH_CHECK(isinf(lh_norm_square_sum(&(uint16_t){0xFC00}, LH_DTYPE_F16, 1)));
    LH_CHECK(isnan(lh_norm_square_sum(&(uint16_t){0x7C01}, LH_DTYPE_F16, 1)));
}

int main(void)
{
    test_sums();
    test_blocks();
    test_specials();
    return 0;
}
