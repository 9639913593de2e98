#include "compute/factor.h"

#include <fenv.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "base/assert.h"
#include "compute/half.h"
#include "compute/norm.h"

/* Elements that are converted or estimated at a time. */
#define PART_ELEMENTS 256
/* The columns whose sums are made at a time. */
#define COLUMN_COUNT 512
#define LANE_COUNT 8

/* Consecutive gradients in memory. */
struct piece {
    const uint8_t *gradients;
    uint64_t count;
};

static struct piece piece_at(const struct lh_factor_work *work, uint64_t at, uint64_t count)
{
    struct piece piece;
    piece.gradients = work->gradient_at(work->context, at, count, &piece.count);
    LH_ASSERT(piece.count > 0 && piece.count <= count);
    return piece;
}

/* Convert gradients to fp32, at most PART_ELEMENTS of a piece. Returns their number. */
static uint64_t widen(const struct lh_factor_work *work, const struct piece *piece, uint64_t first,
                      float *out)
{
    uint64_t count = lh_min_u64(piece->count - first, PART_ELEMENTS);
    const uint8_t *from = piece->gradients + first * lh_dtype_bytes(work->gradient_dtype);
    if (work->gradient_dtype == LH_DTYPE_F32) {
        memcpy(out, from, count * sizeof(*out));
        return count;
    }
    for (uint64_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, from + i * sizeof(half), sizeof(half));
        uint32_t bits =
            work->gradient_dtype == LH_DTYPE_BF16 ? (uint32_t)half << 16 : lh_half_widen(half);
        memcpy(out + i, &bits, sizeof(bits));
    }
    return count;
}

/* An average moved towards a value, of which it takes the part w, in [0, 1]. */
static float moved(float average, double value, double w)
{
    double now = w == 1 ? value : (double)average + w * (value - (double)average);
    return isnan(now) ? NAN : (float)now;
}

/* The sum of squares of a row's gradients, in the order of norms. */
static double row_sum(const struct lh_factor_work *work, uint64_t at, uint64_t count)
{
    struct lh_norm_sum sum = {0};
    for (uint64_t end = at + count; at < end;) {
        struct piece piece = piece_at(work, at, end - at);
        lh_norm_sum_add(&sum, piece.gradients, work->gradient_dtype, piece.count);
        at += piece.count;
    }
    return lh_norm_sum_end(&sum);
}

/* Add the squares of gradients from `at` on to as many sums. */
static void squares_add(const struct lh_factor_work *work, uint64_t at, uint64_t count,
                        double *sums)
{
    float values[PART_ELEMENTS];
    for (uint64_t done = 0; done < count;) {
        struct piece piece = piece_at(work, at + done, count - done);
        for (uint64_t first = 0; first < piece.count;) {
            uint64_t part = widen(work, &piece, first, values);
            for (uint64_t i = 0; i < part; i++)
                sums[done + first + i] += (double)values[i] * (double)values[i];
            first += part;
        }
        done += piece.count;
    }
}

/* Move the factors of the columns [first, end) of the matrix that begins at an element. */
static void columns_move(const struct lh_factors *factors, const struct lh_factor_work *work,
                         uint64_t at, float *of_columns, uint64_t first, uint64_t end)
{
    double sums[COLUMN_COUNT] = {0};
    double scale = work->gradient_scale * work->gradient_scale / (double)factors->rows;
    LH_ASSERT(end - first <= COLUMN_COUNT);
    for (uint64_t row = 0; row < factors->rows; row++)
        squares_add(work, at + row * factors->columns + first, end - first, sums);
    for (uint64_t i = first; i < end; i++)
        of_columns[i] = moved(of_columns[i], sums[i - first] * scale, work->w);
}

/* Move the factors of the matrix that begins at an element, and the mean of those of its rows. */
static void matrix_move(const struct lh_factors *factors, const struct lh_factor_work *work,
                        uint64_t at, float *values)
{
    const uint64_t rows = factors->rows, columns = factors->columns;
    double scale = work->gradient_scale * work->gradient_scale / (double)columns;
    double total = 0;
    for (uint64_t row = 0; row < rows; row++) {
        values[row] =
            moved(values[row], row_sum(work, at + row * columns, columns) * scale, work->w);
        total += (double)values[row];
    }
    for (uint64_t first = 0; first < columns; first += COLUMN_COUNT)
        columns_move(factors, work, at, values + rows, first,
                     lh_min_u64(first + COLUMN_COUNT, columns));
    values[rows + columns] = moved(0, total / (double)rows, 1);
}

/* Move the second moments of a parameter without matrices. */
static void vector_move(const struct lh_factors *factors, const struct lh_factor_work *work)
{
    float values[PART_ELEMENTS];
    for (uint64_t at = 0; at < work->count;) {
        struct piece piece = piece_at(work, at, work->count - at);
        for (uint64_t first = 0; first < piece.count;) {
            uint64_t part = widen(work, &piece, first, values);
            float *own = factors->values + at + first;
            for (uint64_t i = 0; i < part; i++) {
                double g = (double)values[i] * work->gradient_scale;
                own[i] = moved(own[i], g * g, work->w);
            }
            first += part;
        }
        at += piece.count;
    }
}

/* The sum of u^2. Which lane an element is added to depends on the element alone. */
static double update_squares(const struct lh_factors *factors, const struct lh_factor_work *work)
{
    float values[PART_ELEMENTS], estimates[PART_ELEMENTS];
    double lanes[LANE_COUNT] = {0};
    double total = 0;
    for (uint64_t at = 0; at < work->count;) {
        struct piece piece = piece_at(work, at, work->count - at);
        for (uint64_t first = 0; first < piece.count;) {
            uint64_t part = widen(work, &piece, first, values);
            lh_factor_estimate(factors, at + first, part, estimates);
            for (uint64_t i = 0; i < part; i++) {
                double g = (double)values[i] * work->gradient_scale;
                lanes[(at + first + i) % LANE_COUNT] += g * g / (double)estimates[i];
            }
            first += part;
        }
        at += piece.count;
    }
    for (int lane = 0; lane < LANE_COUNT; lane++)
        total += lanes[lane];
    return total;
}

void lh_factor_update(struct lh_factors *factors, const struct lh_factor_work *work)
{
    const uint64_t matrix = factors->rows * factors->columns;
    double count = (double)work->count;
    fenv_t environment;

    LH_ASSERT(work->count > 0 && (matrix == 0 || work->count % matrix == 0));
    fegetenv(&environment);
    fesetenv(FE_DFL_ENV);
    double rms = sqrt(lh_norm_square_sum(work->param, work->param_dtype, work->count) / count);
    if (matrix == 0)
        vector_move(factors, work);
    for (uint64_t i = 0; matrix > 0 && i < work->count / matrix; i++)
        matrix_move(factors, work, i * matrix,
                    factors->values + i * (factors->rows + factors->columns + 1));
    double update = sqrt(update_squares(factors, work) / count);
    /* As Python's max(), which torch calls: what is not a number is not larger. */
    factors->step_size =
        (rms > work->eps2 ? rms : work->eps2) * work->relative / (update > 1 ? update : 1);
    fesetenv(&environment);
}

void lh_factor_estimate(const struct lh_factors *factors, uint64_t first, uint64_t count,
                        float *out)
{
    const double least_mean = fmax(factors->eps1, DBL_MIN);
    const float floor = (float)fmax(factors->eps1 * factors->eps1, (double)FLT_TRUE_MIN);
    if (factors->columns == 0)
        memcpy(out, factors->values + first, count * sizeof(*out));
    for (uint64_t at = 0; factors->columns > 0 && at < count;) {
        uint64_t row = (first + at) / factors->columns;
        uint64_t column = (first + at) % factors->columns;
        uint64_t part = lh_min_u64(count - at, factors->columns - column);
        const float *of_rows =
            factors->values + row / factors->rows * (factors->rows + factors->columns + 1);
        const float *of_columns = of_rows + factors->rows;
        double mean = (double)of_columns[factors->columns];
        double of_row =
            (double)of_rows[row % factors->rows] / (mean < least_mean ? least_mean : mean);
        for (uint64_t i = 0; i < part; i++)
            out[at + i] = (float)(of_row * (double)of_columns[column + i]);
        at += part;
    }
    for (uint64_t i = 0; i < count; i++)
        out[i] = out[i] < floor ? floor : out[i]; /* a NaN remains */
}
