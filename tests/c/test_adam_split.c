/* Test the split of bf16 masters into P16 and residual. */
#include <math.h>

#include "compute/adam.h"
#include "lh_test.h"

/*
 * Return whether p16 is the nearest bf16 by distances in double, ties away from zero; infinity
 * counts as 2^128.
 */
static bool is_nearest(uint32_t bits, uint16_t p16)
{
    const double place = 0x1p-133; /* the value of the last place of a denormal bf16 */
    uint32_t magnitude = bits & 0x7FFFFFFF, exponent = magnitude >> 23;
    double ulp = ldexp(place, exponent > 1 ? (int)exponent - 1 : 0);
    uint32_t rounded = (uint32_t)(p16 & 0x7FFF) << 16;
    float x, y;
    double distance;

    if ((bits >> 31) != (uint32_t)(p16 >> 15))
        return false;
    if (magnitude == 0x7F800000)
        return rounded == magnitude;
    memcpy(&x, &magnitude, 4);
    memcpy(&y, &rounded, 4);
    distance = (isinf(y) ? 0x1p128 : (double)y) - (double)x;
    return distance > -ulp / 2 && distance <= ulp / 2;
}

static void test_split_join(void)
{
    static const uint16_t lows[] = {0,      1,      2,      0x1234, 0x7FFE, 0x7FFF,
                                    0x8000, 0x8001, 0x8002, 0xABCD, 0xFFFE, 0xFFFF};

    lh_test_name("split rounds to nearest, ties away, and join gives the master back");
    for (uint32_t high = 0; high <= 0xFFFF; high++)
        for (size_t l = 0; l < LH_COUNT_OF(lows); l++) {
            uint32_t bits = high << 16 | lows[l], joined_bits;
            float master, joined;
            uint16_t param;
            int16_t residual;

            memcpy(&master, &bits, 4);
            lh_adam_split(&master, &param, &residual, 1);
            lh_adam_join(&param, &residual, &joined, 1);
            memcpy(&joined_bits, &joined, 4);
            if ((bits & 0x7FFFFFFF) > 0x7F800000) {
                LH_CHECK(param == ((high & 0x8000) | 0x7FC0) && residual == 0);
            } else {
                LH_CHECK(joined_bits == bits);
                LH_CHECK(is_nearest(bits, param));
            }
        }
}

int main(void)
{
    test_split_join();
    return 0;
}
