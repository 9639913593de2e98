/* Test Newton-Schulz iterations against fp64, and their kernels against the definition. */
#include "compute/newton_schulz.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "lh_test.h"

#define SIDE_MAX 300

static const uint64_t shapes[][2] = {{1, 1},    {1, 40},   {40, 1},    {13, 13},
                                     {24, 300}, {300, 24}, {150, 270}, {270, 130}};

static void matrix_fill(float *matrix, uint64_t count, uint64_t seed)
{
    for (uint64_t i = 0; i < count; i++)
        matrix[i] = (float)((double)(int32_t)lh_test_random(&seed) / 1e10);
}

/* All stages, with the tasks of each from the last to the first if is_reversed. */
static void run(const struct lh_newton_schulz_kernel *kernel, float *matrix, uint64_t rows,
                uint64_t columns, bool is_reversed)
{
    const uint64_t gram = lh_newton_schulz_gram_floats(rows, columns);
    float *memory =
        malloc((2 * gram + lh_newton_schulz_scratch_floats(rows, columns)) * sizeof(*memory));
    struct lh_newton_schulz made = {matrix, rows, columns, memory, memory + gram};

    LH_CHECK(memory != NULL);
    lh_newton_schulz_begin(&made, 1e-7F);
    for (int i = 0; i < LH_NEWTON_SCHULZ_STEPS * LH_NEWTON_SCHULZ_STAGE_COUNT; i++) {
        enum lh_newton_schulz_stage stage = i % LH_NEWTON_SCHULZ_STAGE_COUNT;
        uint64_t count = lh_newton_schulz_task_count(&made, stage);

        for (uint64_t task = 0; task < count; task++)
            lh_newton_schulz_task(kernel, &made, stage, is_reversed ? count - 1 - task : task,
                                  memory + 2 * gram);
    }
    free(memory);
}

/* out (rows x columns) = beta * start + alpha * left right; right is transposed if is_turned. */
static void multiply(const double *left, const double *right, bool is_turned, const double *start,
                     double alpha, double beta, uint64_t rows, uint64_t depth, uint64_t columns,
                     double *out)
{
    for (uint64_t i = 0; i < rows; i++)
        for (uint64_t j = 0; j < columns; j++) {
            double sum = 0;

            for (uint64_t k = 0; k < depth; k++)
                sum += left[i * depth + k] * right[is_turned ? j * depth + k : k * columns + j];
            out[i * columns + j] = (start ? beta * start[i * columns + j] : 0) + alpha * sum;
        }
}

/* The same in fp64, for a matrix of which no side is longer than SIDE_MAX. */
static void run_exactly(const float *matrix, uint64_t rows, uint64_t columns, double *out)
{
    static double x[SIDE_MAX * SIDE_MAX], y[SIDE_MAX * SIDE_MAX], gram[SIDE_MAX * SIDE_MAX],
        polynomial[SIDE_MAX * SIDE_MAX];
    const bool is_tall = rows > columns;
    const uint64_t least = is_tall ? columns : rows, most = is_tall ? rows : columns;
    double norm = 0;

    for (uint64_t i = 0; i < rows * columns; i++)
        norm += (double)matrix[i] * matrix[i];
    for (uint64_t i = 0; i < least; i++)
        for (uint64_t j = 0; j < most; j++)
            x[i * most + j] = matrix[is_tall ? j * columns + i : i * columns + j] / sqrt(norm);
    for (int step = 0; step < LH_NEWTON_SCHULZ_STEPS; step++) {
        multiply(x, x, true, NULL, 1, 0, least, most, least, gram);
        multiply(gram, gram, false, gram, 2.0315, -4.7750, least, least, least, polynomial);
        multiply(polynomial, x, false, x, 1, 3.4445, least, least, most, y);
        memcpy(x, y, sizeof(x));
    }
    for (uint64_t i = 0; i < least; i++)
        for (uint64_t j = 0; j < most; j++)
            out[is_tall ? j * columns + i : i * columns + j] = x[i * most + j];
}

static void test_values(void)
{
    static float matrix[SIDE_MAX * SIDE_MAX];
    static double exact[SIDE_MAX * SIDE_MAX];

    lh_test_name("wide, tall and square matrices become what they become in fp64");
    for (size_t i = 0; i < LH_COUNT_OF(shapes); i++) {
        const uint64_t rows = shapes[i][0], columns = shapes[i][1];
        double worst = 0;

        matrix_fill(matrix, rows * columns, i);
        run_exactly(matrix, rows, columns, exact);
        run(NULL, matrix, rows, columns, false);
        for (uint64_t j = 0; j < rows * columns; j++)
            worst = fmax(worst, fabs(matrix[j] - exact[j]));
        LH_CHECK(worst < 1e-4);
    }
}

static void test_kernels(void)
{
    static float start[SIDE_MAX * SIDE_MAX], expected[SIDE_MAX * SIDE_MAX],
        actual[SIDE_MAX * SIDE_MAX];
    const struct lh_newton_schulz_kernel *const *kernels;
    const uint32_t count = lh_newton_schulz_kernels(&kernels);

    LH_CHECK(strcmp(kernels[count - 1]->name, "ref") == 0);
    for (uint32_t k = 0; k < count; k++) {
        lh_test_name("kernel %s has the bits of the definition, in any order of tasks",
                     kernels[k]->name);
        for (size_t i = 0; i < LH_COUNT_OF(shapes); i++) {
            const uint64_t rows = shapes[i][0], columns = shapes[i][1];
            const uint64_t bytes = rows * columns * sizeof(float);

            matrix_fill(start, rows * columns, i);
            memcpy(expected, start, bytes);
            memcpy(actual, start, bytes);
            run(kernels[count - 1], expected, rows, columns, false);
            run(kernels[k], actual, rows, columns, true);
            LH_CHECK(memcmp(expected, actual, bytes) == 0);
        }
    }
}

static void test_specials(void)
{
    float zeros[6] = {0}, nan[6] = {1, 2, 3, 4, INFINITY, 6};

    lh_test_name("zeros stay zeros, and one element that is not finite makes all of them NaN");
    run(NULL, zeros, 2, 3, false);
    run(NULL, nan, 2, 3, false);
    for (int i = 0; i < 6; i++)
        LH_CHECK(zeros[i] == 0 && isnan(nan[i]));
}

int main(void)
{
    test_values();
    test_kernels();
    test_specials();
    return 0;
}
