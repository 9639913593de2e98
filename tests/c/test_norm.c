/* Sums of squares against plain fp64 arithmetic. */
#include "compute/norm.h"

#include <math.h>
#include <string.h>

#include "lh_test.h"

#define COUNT_MAX 1000

static void test_sums(void)
{
    static float values[COUNT_MAX + 1];
    static uint16_t highs[COUNT_MAX + 1];
    uint64_t seed = 1;

    lh_test_name("sums of squares are those of fp64, at any count and alignment, in both dtypes");
    for (uint64_t i = 0; i <= COUNT_MAX; i++) {
        values[i] = (float)((double)(int32_t)lh_test_random(&seed) / 1e6);
        memcpy(&highs[i], (uint8_t *)&values[i] + 2, sizeof(highs[i]));
    }
    for (uint64_t count = 0; count < COUNT_MAX; count += count < 40 ? 1 : 97) {
        for (uint64_t first = 0; first < 2; first++) {
            double exact = 0;
            double exact_high = 0;
            for (uint64_t i = first; i < first + count; i++) {
                uint32_t bits = (uint32_t)highs[i] << 16;
                float high;
                memcpy(&high, &bits, sizeof(high));
                exact += (double)values[i] * values[i];
                exact_high += (double)high * high;
            }
            double sum = lh_norm_square_sum(values + first, LH_DTYPE_F32, count);
            double sum_high = lh_norm_square_sum(highs + first, LH_DTYPE_BF16, count);
            LH_CHECK(fabs(sum - exact) <= 1e-12 * exact);
            LH_CHECK(fabs(sum_high - exact_high) <= 1e-12 * exact_high);
        }
    }
}

static void test_specials(void)
{
    float values[9] = {1.0f};

    lh_test_name("infinity and NaN show in the sum");
    values[8] = INFINITY;
    LH_CHECK(isinf(lh_norm_square_sum(values, LH_DTYPE_F32, 9)));
    values[3] = NAN;
    LH_CHECK(isnan(lh_norm_square_sum(values, LH_DTYPE_F32, 9)));
}

int main(void)
{
    test_sums();
    test_specials();
    return 0;
}
