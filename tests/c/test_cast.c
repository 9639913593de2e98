/* Test half precision against plain arithmetic, and the recognition of casts. */
#include "compute/cast.h"

#include <math.h>

#include "compute/half.h"
#include "fp_fixture.h"
#include "lh_test.h"

#define HALF_INFINITY 0x7C00u

static uint16_t rounded(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return lh_half_round(bits);
}

/* Return the value of a half by the format's definition; 2^16 for infinity. */
static double meaning(uint32_t half)
{
    uint32_t exponent = half >> 10 & 0x1F, mantissa = half & 0x3FF;

    return exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, (int)exponent - 25);
}

static void test_widen(void)
{
    lh_test_name("every half is widened to the float that it means, and rounds back to itself");
    for (uint32_t half = 0; half < HALF_INFINITY; half++) {
        float value = float_of(lh_half_widen((uint16_t)half));
        float negative = float_of(lh_half_widen((uint16_t)(half | 0x8000)));

        LH_CHECK((double)value == meaning(half) && negative == -value && signbit(negative));
        LH_CHECK(rounded(value) == half && rounded(negative) == (half | 0x8000));
    }
    LH_CHECK(lh_half_widen(HALF_INFINITY) == 0x7F800000 && lh_half_widen(0xFC00) == 0xFF800000);
    for (uint32_t half = HALF_INFINITY + 1; half < 0x8000; half++)
        LH_CHECK(isnan(float_of(lh_half_widen((uint16_t)half))));
}

static void test_round(void)
{
    lh_test_name("a float between two halves rounds to the nearer one, half-way to the even one");
    for (uint32_t half = 0; half < HALF_INFINITY; half++) {
        uint16_t even = (uint16_t)(half + (half & 1));
        float middle = (float)((meaning(half) + meaning(half + 1)) / 2);

        LH_CHECK(rounded(middle) == even && rounded(-middle) == (even | 0x8000));
        LH_CHECK(rounded(nextafterf(middle, 0)) == half);
        LH_CHECK(rounded(nextafterf(middle, INFINITY)) == half + 1);
    }
    LH_CHECK(rounded(0x1p-149f) == 0 && rounded(0x1p16f) == HALF_INFINITY);
    LH_CHECK(rounded(-INFINITY) == 0xFC00 && rounded(NAN) == 0x7E00);
    LH_CHECK(lh_half_round(0xFF800001) == 0xFE00);
}

static void test_environment(void)
{
    lh_test_name("the thread's rounding mode does not show");
    fesetround(FE_UPWARD);
    test_round();
    test_widen();
    fesetround(FE_TONEAREST);
}

/* Round to nearest by the 16 bits that are dropped, ties by the last bit that is kept. */
static uint16_t high_of(uint32_t bits)
{
    uint32_t high = bits >> 16, low = bits & 0xFFFF;

    if (isnan(float_of(bits)))
        return 0x7FC0;
    return (uint16_t)(high + (low > 0x8000 || (low == 0x8000 && (high & 1))));
}

static void test_casts_any(void)
{
    enum { COUNT = 1 << 20 };
    static float values[COUNT];
    static uint16_t halves[COUNT], highs[COUNT];

    lh_test_name("a cast of any values is recognized, by a thread that flushes denormals too");
    for (uint32_t i = 0; i < COUNT; i++) { /* covers all exponents, NaN, and ties of both formats */
        values[i] = float_of(i * 4099);
        halves[i] = lh_half_round(i * 4099);
        highs[i] = high_of(i * 4099);
    }
    for (int spoilt = 0; spoilt < 2; spoilt++) {
        if (spoilt)
            fp_environment_spoil();
        LH_CHECK(lh_cast_is_of(halves, LH_DTYPE_F16, values, COUNT));
        LH_CHECK(lh_cast_is_of(highs, LH_DTYPE_BF16, values, COUNT));
        LH_CHECK(!spoilt || fp_environment_is_spoilt());
        fesetenv(FE_DFL_ENV);
    }
}

static void test_casts(void)
{
    enum { COUNT = 700 };
    static float values[COUNT];
    static uint16_t halves[COUNT], highs[COUNT];
    uint64_t seed = 3;

    lh_test_name("a cast is recognized, and one element that differs is seen");
    for (int i = 0; i < COUNT; i++) {
        values[i] = ldexpf((float)(int32_t)lh_test_random(&seed), -31 - i % 20);
        halves[i] = rounded(values[i]);
        values[i] = i % 3 == 0 ? float_of(lh_half_widen(halves[i]) & 0xFFFF0000) : values[i];
        halves[i] = rounded(values[i]);
    }
    LH_CHECK(lh_cast_is_of(halves, LH_DTYPE_F16, values, COUNT));
    for (int i = 0; i < COUNT; i++) {
        halves[i] ^= 1;
        LH_CHECK(!lh_cast_is_of(halves, LH_DTYPE_F16, values, COUNT));
        halves[i] ^= 1;
    }
    for (int i = 0; i < COUNT; i++) {
        uint32_t bits = (uint32_t)lh_test_random(&seed) & 0x7FFF0000;

        values[i] = float_of(bits > 0x7F000000 ? 0 : bits);
        memcpy(&highs[i], (char *)&values[i] + 2, 2);
    }
    LH_CHECK(lh_cast_is_of(highs, LH_DTYPE_BF16, values, COUNT));
    for (int i = 0; i < COUNT; i++) {
        highs[i] ^= 1;
        LH_CHECK(!lh_cast_is_of(highs, LH_DTYPE_BF16, values, COUNT));
        highs[i] ^= 1;
    }
}

int main(void)
{
    test_widen();
    test_round();
    test_environment();
    test_casts_any();
    test_casts();
    return 0;
}
