/* The definition of a tile's product: one fused multiply-add at a time. */
#include <math.h>

#include "compute/newton_schulz_kernels.h"

#define ROWS 4

static void tile_run(uint64_t depth, const float *const *a, uint64_t a_stride, const float *b,
                     float *tile)
{
    for (uint64_t k = 0; k < depth; k++)
        for (uint64_t i = 0; i < ROWS; i++)
            for (uint64_t j = 0; j < LH_NEWTON_SCHULZ_TILE_COLUMNS; j++) {
                float *sum = tile + i * LH_NEWTON_SCHULZ_TILE_COLUMNS + j;

                *sum = fmaf(a[i][k * a_stride], b[k * LH_NEWTON_SCHULZ_TILE_COLUMNS + j], *sum);
            }
}

const struct lh_newton_schulz_kernel lh_newton_schulz_ref = {"ref", ROWS, tile_run};
