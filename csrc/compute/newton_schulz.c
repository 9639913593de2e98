/*
 * The products of newton_schulz.h, in tiles. A task computes a panel of columns. It packs the
 * columns of the right factor, DEPTH rows at a time, so that a tile's inner loop reads them in
 * order and they stay in the second-level cache; rows of the left factor are read where they are.
 */
#include "compute/newton_schulz.h"

#include <fenv.h>
#include <math.h>

#include "base/assert.h"
#include "base/cpu.h"
#include "compute/newton_schulz_kernels.h"
#include "compute/norm.h"
#include "compute/rule_element.h"

/* Source: torch.optim._muon.DEFAULT_A, DEFAULT_B and DEFAULT_C. */
#define A 3.4445F
#define B (-4.7750F)
#define C 2.0315F

#define TILE_COLUMNS LH_NEWTON_SCHULZ_TILE_COLUMNS
#define PANEL_COLUMNS (4 * TILE_COLUMNS)
#define DEPTH 256

/* A matrix, whose rows and columns have any distance. */
struct view {
    float *at;
    uint64_t row;
    uint64_t column;
};

/* out = beta * start + left * (alpha * right) */
struct product {
    struct view left, right, start, out;
    uint64_t rows, depth, columns;
    float alpha, beta;
    bool is_symmetric; /* out is */
    bool is_in_place;  /* out is right */
};

static inline float *element(const struct view *view, uint64_t row, uint64_t column)
{
    return view->at + row * view->row + column * view->column;
}

static void matrix_views(const struct lh_newton_schulz *matrix, struct view *wide,
                         struct view *turned)
{
    const uint64_t columns = matrix->columns;
    struct view as_is = {matrix->matrix, columns, 1};
    struct view transposed = {matrix->matrix, 1, columns};
    bool is_tall = matrix->rows > columns;

    *wide = is_tall ? transposed : as_is;
    *turned = is_tall ? as_is : transposed;
}

static struct product product_of(const struct lh_newton_schulz *matrix,
                                 enum lh_newton_schulz_stage stage)
{
    const uint64_t least = lh_min_u64(matrix->rows, matrix->columns);
    const uint64_t most = lh_max_u64(matrix->rows, matrix->columns);
    const struct view gram = {matrix->gram, least, 1};
    const struct view polynomial = {matrix->polynomial, least, 1};
    struct view wide, turned;

    matrix_views(matrix, &wide, &turned);
    switch (stage) {
    case LH_NEWTON_SCHULZ_STAGE_GRAM:
        return (struct product){wide, turned, gram, gram, least, most, least, 1, 0, true, false};
    case LH_NEWTON_SCHULZ_STAGE_POLYNOMIAL:
        return (struct product){gram,  gram, gram, polynomial, least, least,
                                least, C,    B,    true,       false};
    default:
        return (struct product){polynomial, wide, wide, wide,  least, least,
                                most,       1,    A,    false, true};
    }
}

/* Pack depth rows of the panel's columns, tile after tile. */
static void panel_pack(const struct product *product, uint64_t first, uint64_t columns,
                       uint64_t depth_first, uint64_t depth, float *packed)
{
    for (uint64_t tile = 0; tile < columns; tile += TILE_COLUMNS, packed += depth * TILE_COLUMNS) {
        uint64_t count = lh_min_u64(columns - tile, TILE_COLUMNS);

        for (uint64_t j = 0; j < TILE_COLUMNS; j++) {
            const float *from = element(&product->right, depth_first, first + tile + j);

            for (uint64_t k = 0; k < depth; k++)
                packed[k * TILE_COLUMNS + j] =
                    j < count ? product->alpha * from[k * product->right.row] : 0;
        }
    }
}

/* Add a part of the depth to a tile of the product. */
static void tile_run(const struct lh_newton_schulz_kernel *kernel, const struct product *product,
                     uint64_t row, uint64_t rows, uint64_t column, uint64_t columns,
                     uint64_t depth_first, uint64_t depth, const float *packed)
{
    float tile[LH_NEWTON_SCHULZ_TILE_ROWS_MAX * TILE_COLUMNS] __attribute__((aligned(64))) = {0};
    const float *left[LH_NEWTON_SCHULZ_TILE_ROWS_MAX];
    const bool is_first = depth_first == 0;
    const struct view *from = is_first ? &product->start : &product->out;
    const float factor = is_first ? product->beta : 1;

    for (uint64_t i = 0; i < kernel->rows; i++) /* rows that are missing repeat the last one */
        left[i] = element(&product->left, row + lh_min_u64(i, rows - 1), depth_first);
    for (uint64_t i = 0; i < rows && factor != 0; i++)
        for (uint64_t j = 0; j < columns; j++)
            tile[i * TILE_COLUMNS + j] = factor * *element(from, row + i, column + j);
    kernel->run(depth, left, product->left.column, packed, tile);
    for (uint64_t i = 0; i < rows; i++)
        for (uint64_t j = 0; j < columns; j++)
            *element(&product->out, row + i, column + j) = tile[i * TILE_COLUMNS + j];
}

/* Compute columns [first, first + columns) of a product. */
static void panel_run(const struct lh_newton_schulz_kernel *kernel, const struct product *product,
                      uint64_t first, uint64_t columns, float *scratch)
{
    const uint64_t packed_columns = lh_align_up(columns, TILE_COLUMNS);
    const uint64_t rows =
        product->is_symmetric ? lh_min_u64(product->rows, first + columns) : product->rows;

    for (uint64_t k = 0; k < product->depth && product->is_in_place; k += DEPTH)
        panel_pack(product, first, columns, k, lh_min_u64(product->depth - k, DEPTH),
                   scratch + k * packed_columns);
    for (uint64_t k = 0; k < product->depth; k += DEPTH) {
        const uint64_t depth = lh_min_u64(product->depth - k, DEPTH);
        const float *packed = product->is_in_place ? scratch + k * packed_columns : scratch;

        if (!product->is_in_place)
            panel_pack(product, first, columns, k, depth, scratch);
        for (uint64_t i = 0; i < rows; i += kernel->rows)
            for (uint64_t j = 0; j < columns; j += TILE_COLUMNS)
                tile_run(kernel, product, i, lh_min_u64(rows - i, kernel->rows), first + j,
                         lh_min_u64(columns - j, TILE_COLUMNS), k, depth, packed + j * depth);
    }
    for (uint64_t j = first; j < first + columns && product->is_symmetric; j++)
        for (uint64_t i = 0; i < j; i++)
            *element(&product->out, j, i) = *element(&product->out, i, j);
}

void lh_newton_schulz_momentum(const struct lh_adam_segment *segment, const float *moment)
{
    const struct lh_adam_scalars *scalars = &segment->scalars;
    const struct lh_adam_run run = {
        .gradient = segment->gradient,
        .gradient_dtype = segment->gradient_dtype,
    };

    for (uint64_t i = 0; i < segment->count; i++) {
        float g = gradient_load(&run, i) * scalars->gradient_scale;
        float m = moment ? moment[i] : 0;

        m = fmaf(g - m, scalars->beta1_rest, m);
        if (scalars->beta2 != 0) /* as torch.Tensor.lerp does, on either side of a half */
            m = scalars->beta1 < 0.5F ? fmaf(m - g, scalars->beta1, g)
                                      : fmaf(g - m, scalars->beta1_rest, m);
        segment->update[i] = m;
    }
}

uint64_t lh_newton_schulz_gram_floats(uint64_t rows, uint64_t columns)
{
    uint64_t least = lh_min_u64(rows, columns);

    return least * least;
}

uint64_t lh_newton_schulz_scratch_floats(uint64_t rows, uint64_t columns)
{
    return lh_max_u64(lh_min_u64(rows, columns), DEPTH) * PANEL_COLUMNS;
}

void lh_newton_schulz_begin(const struct lh_newton_schulz *matrix, float eps)
{
    const uint64_t count = matrix->rows * matrix->columns;
    float norm = (float)sqrt(lh_norm_square_sum(matrix->matrix, LH_DTYPE_F32, count));

    norm = norm < eps ? eps : norm;
    for (uint64_t i = 0; i < count; i++)
        matrix->matrix[i] /= norm;
}

uint64_t lh_newton_schulz_task_count(const struct lh_newton_schulz *matrix,
                                     enum lh_newton_schulz_stage stage)
{
    return lh_div_ceil(product_of(matrix, stage).columns, PANEL_COLUMNS);
}

uint32_t lh_newton_schulz_kernels(const struct lh_newton_schulz_kernel *const **kernels_out)
{
    static const struct lh_newton_schulz_kernel *const all[] = {
#if defined(__x86_64__)
        &lh_newton_schulz_avx512,
        &lh_newton_schulz_avx2,
#elif defined(__aarch64__)
        &lh_newton_schulz_neon,
#endif
        &lh_newton_schulz_ref,
    };
    uint32_t first = 0;

#if defined(__x86_64__)
    first = lh_cpu_has(LH_CPU_ISA_AVX512) ? 0 : lh_cpu_has(LH_CPU_ISA_AVX2) ? 1 : 2;
#endif
    *kernels_out = all + first;
    return (uint32_t)LH_COUNT_OF(all) - first;
}

void lh_newton_schulz_task(const struct lh_newton_schulz_kernel *kernel,
                           const struct lh_newton_schulz *matrix, enum lh_newton_schulz_stage stage,
                           uint64_t task, float *scratch)
{
    const struct product product = product_of(matrix, stage);
    const uint64_t first = task * PANEL_COLUMNS;
    const struct lh_newton_schulz_kernel *const *kernels;
    fenv_t environment;

    LH_ASSERT(first < product.columns);
    if (!kernel) {
        (void)lh_newton_schulz_kernels(&kernels);
        kernel = kernels[0];
    }
    fegetenv(&environment);
    fesetenv(FE_DFL_ENV);
    panel_run(kernel, &product, first, lh_min_u64(product.columns - first, PANEL_COLUMNS), scratch);
    fesetenv(&environment);
}
