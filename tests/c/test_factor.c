/* Test Adafactor's factors: against plain fp64 arithmetic, and wherever gradients are cut. */
#include "compute/factor.h"

#include <math.h>
#include <string.h>

#include "fp_fixture.h"
#include "lh_test.h"

#define MATRICES 2
#define ROWS 5
#define COLUMNS 600
#define COUNT (MATRICES * ROWS * COLUMNS)
#define FLOATS (MATRICES * (ROWS + COLUMNS + 1))
#define SCALE 0.75
#define W 0.4
#define RELATIVE 0.01
#define EPS1 1e-4
#define EPS2 1e-3

/* Gradients of which at most `most` are consecutive in memory, from multiples of it on. */
struct cut {
    const float *gradients;
    uint64_t most;
};

static const void *gradient_at(const void *context, uint64_t at, uint64_t count,
                               uint64_t *count_out)
{
    const struct cut *cut = context;
    *count_out = lh_min_u64(count, cut->most - at % cut->most);
    return cut->gradients + at;
}

/* Two updates, of which the second moves factors that are not 0. */
static struct lh_factor_work work_of(struct cut *cut, const float *param)
{
    return (struct lh_factor_work){
        .gradient_at = gradient_at,
        .context = cut,
        .gradient_dtype = LH_DTYPE_F32,
        .param = param,
        .param_dtype = LH_DTYPE_F32,
        .count = COUNT,
        .gradient_scale = SCALE,
        .w = 1,
        .relative = RELATIVE,
        .eps2 = EPS2,
    };
}

static struct lh_factors updated(const float *gradients, const float *param, uint64_t columns,
                                 uint64_t most, float *values)
{
    struct cut cut = {gradients, most};
    struct lh_factors factors = {values, columns > 0 ? ROWS : 0, columns, EPS1, 0};
    struct lh_factor_work work = work_of(&cut, param);
    memset(values, 0, COUNT * sizeof(*values));
    lh_factor_update(&factors, &work);
    cut.gradients += COUNT;
    work.w = W;
    lh_factor_update(&factors, &work);
    return factors;
}

/* The mean of the squares of `count` gradients, `stride` apart, after both updates. */
static double mean_of(const float *gradients, uint64_t count, uint64_t stride)
{
    double means[2] = {0};
    for (uint64_t i = 0; i < 2 * count; i++) {
        double g = (double)gradients[i / count * COUNT + i % count * stride] * SCALE;
        means[i / count] += g * g / (double)count;
    }
    return means[0] + W * (means[1] - means[0]);
}

static void test_definition(const float *gradients, const float *param, uint64_t columns)
{
    static float values[COUNT], estimates[COUNT];
    struct lh_factors factors = updated(gradients, param, columns, COUNT, values);
    double squares = 0, param_squares = 0;

    lh_test_name("%s have the second moments and the step of the definition",
                 columns > 0 ? "matrices" : "vectors");
    lh_factor_estimate(&factors, 0, COUNT, estimates);
    for (uint64_t i = 0; i < COUNT; i++) {
        uint64_t matrix = i / (ROWS * COLUMNS) * ROWS * COLUMNS, row = i / COLUMNS * COLUMNS;
        double v = mean_of(gradients + i, 1, 1), g = (double)gradients[COUNT + i] * SCALE;
        if (columns > 0)
            v = mean_of(gradients + row, COLUMNS, 1) *
                mean_of(gradients + matrix + i % COLUMNS, ROWS, COLUMNS) /
                fmax(mean_of(gradients + matrix, ROWS * COLUMNS, 1), EPS1);
        v = fmax(v, EPS1 * EPS1);
        LH_CHECK(fabs((double)estimates[i] - v) <= 1e-6 * v);
        squares += g * g / v;
        param_squares += (double)param[i] * (double)param[i];
    }
    double update = sqrt(squares / COUNT), rms = sqrt(param_squares / COUNT);
    double expected = fmax(EPS2, rms) * RELATIVE / fmax(1, update);
    LH_CHECK(update > 1 && rms > EPS2);
    LH_CHECK(fabs(factors.step_size - expected) <= 1e-6 * expected);
}

static void test_cuts(const float *gradients, const float *param, uint64_t columns)
{
    static const uint64_t cuts[] = {64, 576, 1000, 4096};
    static float values[COUNT], expected[COUNT];
    double step_size = updated(gradients, param, columns, COUNT, expected).step_size;

    lh_test_name("%s have the same bits wherever gradients are cut",
                 columns > 0 ? "matrices" : "vectors");
    for (size_t i = 0; i < sizeof(cuts) / sizeof(*cuts); i++) {
        struct lh_factors factors = updated(gradients, param, columns, cuts[i], values);
        LH_CHECK(memcmp(&factors.step_size, &step_size, sizeof(step_size)) == 0);
        LH_CHECK(memcmp(values, expected, sizeof(values)) == 0);
    }
}

static void test_environment(const float *gradients, const float *param, uint64_t columns)
{
    static float values[COUNT], expected[COUNT], small[2 * COUNT];

    lh_test_name("a thread that rounds upwards and flushes denormals moves %s to the same bits",
                 columns > 0 ? "matrices" : "vectors");
    for (uint64_t i = 0; i < 2 * COUNT; i++)
        small[i] = gradients[i] * 0x1p-66f; /* the squares are denormals */
    double step_size = updated(small, param, columns, COUNT, expected).step_size;
    fenv_t environment;
    fegetenv(&environment);
    fp_environment_spoil();
    double spoilt = updated(small, param, columns, COUNT, values).step_size;
    bool is_spoilt = fp_environment_is_spoilt();
    fesetenv(&environment);
    LH_CHECK(is_spoilt && memcmp(&spoilt, &step_size, sizeof(step_size)) == 0);
    LH_CHECK(memcmp(values, expected, sizeof(values)) == 0);
}

/* Gradients of 0 among others, with an eps1 whose square is 0 in fp32. */
static void test_zeros(const float *param, uint64_t columns, double eps1)
{
    static float values[COUNT], estimates[COUNT], gradients[COUNT];
    const uint64_t all_zero = columns > 0 ? ROWS * COLUMNS : COLUMNS;
    struct cut cut = {gradients, COUNT};
    struct lh_factors factors = {values, columns > 0 ? ROWS : 0, columns, eps1, 0};
    struct lh_factor_work work = work_of(&cut, param);

    lh_test_name("a gradient of 0 is not a step of %s, with an eps1 of %g",
                 columns > 0 ? "matrices" : "vectors", eps1);
    for (uint64_t i = 0; i < COUNT; i++)
        gradients[i] = i < all_zero || i % 3 == 0 ? 0 : 1;
    lh_factor_update(&factors, &work);
    lh_factor_estimate(&factors, 0, COUNT, estimates);
    LH_CHECK(isfinite(factors.step_size) && factors.step_size > 0);
    for (uint64_t i = 0; i < COUNT; i++)
        LH_CHECK(gradients[i] / sqrtf(estimates[i]) == 0 || gradients[i] == 1);
}

int main(void)
{
    static float gradients[2 * COUNT], param[COUNT];
    uint64_t seed = 1;

    for (uint64_t i = 0; i < 2 * COUNT; i++)
        gradients[i] = (float)((double)(int32_t)lh_test_random(&seed) * 0x1p-31);
    for (uint64_t i = COUNT; i < 2 * COUNT; i++)
        gradients[i] *= 3; /* an update whose RMS is above 1 */
    for (uint64_t i = 0; i < COUNT; i++)
        param[i] = (float)((double)(int32_t)lh_test_random(&seed) * 0x1p-31);
    for (uint64_t columns = 0; columns <= COLUMNS; columns += COLUMNS) {
        test_definition(gradients, param, columns);
        test_cuts(gradients, param, columns);
        test_environment(gradients, param, columns);
        test_zeros(param, columns, 0);
        test_zeros(param, columns, 1e-30);
    }
    return 0;
}
