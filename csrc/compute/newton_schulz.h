/*
 * Newton-Schulz iterations, which make the singular values of a matrix almost equal: Muon's update
 * (rule.h) is what they make of the momentum.
 *
 *      X = U / max(|U|, eps)              |U|: the root of the sum of squares (norm.h)
 *      G = X X^T                          five times, where X is no taller than wide;
 *      P = b G + c G G                    a taller U is transposed before and after
 *      X = a X + P X
 *
 * All of it is in fp32, in which a product adds in the order of its inner index, each time with one
 * rounding:
 *
 *      y = beta * d(i,j);  y = fma(a(i,k), alpha * b(k,j), y) for k = 0, 1, ...
 *
 * G and P are computed on and above the diagonal, and mirrored. So every kernel on every machine
 * writes the same bits, whatever tasks a product is divided into. torch.optim.Muon rounds X, G and
 * P to bf16 instead; the two differ as two numbers of bf16 do.
 *
 * A stage is divided into tasks, which may run at the same time on several threads; a stage begins
 * when the stage before it has ended.
 *
 * Thread: pure functions over the caller's memory.
 * Source: torch.optim._muon._zeropower_via_newtonschulz; Jordan et al. 2024, Muon: An optimizer for
 *         hidden layers in neural networks.
 */
#ifndef LH_COMPUTE_NEWTON_SCHULZ_H
#define LH_COMPUTE_NEWTON_SCHULZ_H

#include "base/base.h"

#define LH_NEWTON_SCHULZ_STEPS 5

enum lh_newton_schulz_stage {
    LH_NEWTON_SCHULZ_STAGE_GRAM,
    LH_NEWTON_SCHULZ_STAGE_POLYNOMIAL,
    LH_NEWTON_SCHULZ_STAGE_APPLY,
    LH_NEWTON_SCHULZ_STAGE_COUNT
};

struct lh_newton_schulz {
    float *matrix; /* rows x columns, row after row: U, then X */
    uint64_t rows;
    uint64_t columns;
    float *gram;       /* of the smaller of rows and columns, squared */
    float *polynomial; /* as large as gram */
};

struct lh_newton_schulz_kernel {
    const char *name; /* "avx512", "avx2", "neon" or "ref" */
    uint32_t rows;    /* of a tile, at most LH_NEWTON_SCHULZ_TILE_ROWS_MAX */
    /*
     * Add the product of depth columns of a, whose rows begin at a[0 .. rows - 1] and whose columns
     * are a_stride apart, and of depth rows of b, LH_NEWTON_SCHULZ_TILE_COLUMNS each, to a tile.
     */
    void (*run)(uint64_t depth, const float *const *a, uint64_t a_stride, const float *b,
                float *tile);
};

#define LH_NEWTON_SCHULZ_TILE_ROWS_MAX 12
#define LH_NEWTON_SCHULZ_TILE_COLUMNS 32

/* The kernels this machine can run, best first ("ref" last). */
uint32_t lh_newton_schulz_kernels(const struct lh_newton_schulz_kernel *const **kernels_out);

/* The floats of gram, of polynomial, and of the scratch memory of a task. */
uint64_t lh_newton_schulz_gram_floats(uint64_t rows, uint64_t columns);
uint64_t lh_newton_schulz_scratch_floats(uint64_t rows, uint64_t columns);

struct lh_adam_segment;

/*
 * Write to a segment's update what Muon orthogonalizes: the new momentum, or with Nesterov's form
 * what follows from it. moment: the momentum of the segment's elements; NULL: zeros.
 */
void lh_newton_schulz_momentum(const struct lh_adam_segment *segment, const float *moment);
/* Divide the matrix by its norm. */
void lh_newton_schulz_begin(const struct lh_newton_schulz *matrix, float eps);
/* The number of tasks of a stage. */
uint64_t lh_newton_schulz_task_count(const struct lh_newton_schulz *matrix,
                                     enum lh_newton_schulz_stage stage);
/* Run a task of a stage. kernel: NULL: the best one. */
void lh_newton_schulz_task(const struct lh_newton_schulz_kernel *kernel,
                           const struct lh_newton_schulz *matrix, enum lh_newton_schulz_stage stage,
                           uint64_t task, float *scratch);

#endif
