/*
 * The kernel of newton_schulz.c for vectors of any width. The including file defines VECTOR_BYTES,
 * ROWS (of a tile), NAME (of the kernel) and KERNEL, and, after zo_vectors.h, fma_of() and splat().
 */
#ifndef LH_COMPUTE_NEWTON_SCHULZ_BODY_H
#define LH_COMPUTE_NEWTON_SCHULZ_BODY_H

#include <string.h>

#include "compute/newton_schulz_kernels.h"

#define LANES (VECTOR_BYTES / 4)
#define VECTORS (LH_NEWTON_SCHULZ_TILE_COLUMNS / LANES)

/* Load floats of any alignment. */
static INLINE floats floats_load(const float *array)
{
    floats loaded;

    memcpy(&loaded, array, sizeof(loaded));
    return loaded;
}

/* The sums of a tile stay in registers. */
static void tile_run(uint64_t depth, const float *const *a, uint64_t a_stride, const float *b,
                     float *tile)
{
    floats sums[ROWS][VECTORS];

#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++)
            sums[i][j] = floats_load(tile + (i * VECTORS + j) * LANES);
    }
    for (uint64_t k = 0; k < depth; k++, b += LH_NEWTON_SCHULZ_TILE_COLUMNS) {
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; i++) {
            floats left = splat(a[i][k * a_stride]);

#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++)
                sums[i][j] = fma_of(left, floats_load(b + j * LANES), sums[i][j]);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++)
            memcpy(tile + (i * VECTORS + j) * LANES, &sums[i][j], sizeof(floats));
    }
}

const struct lh_newton_schulz_kernel KERNEL = {NAME, ROWS, tile_run};

#endif
