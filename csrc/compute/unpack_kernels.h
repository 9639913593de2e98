/*
 * The kernels of lh_unpack(), one file for each instruction set. Only csrc/compute includes this
 * header.
 */
#ifndef LH_COMPUTE_UNPACK_KERNELS_H
#define LH_COMPUTE_UNPACK_KERNELS_H

#include "compute/unpack.h"

/* Elements per step of a kernel; a count is a multiple of it. */
#define LH_UNPACK_BATCH 32
/* Scales per step of e2m1(). */
#define LH_UNPACK_SCALE_BATCH 8
/* Blocks per call of nibbles(), whose scales are widened first. */
#define LH_UNPACK_BLOCK_COUNT_MAX 64

#define LH_UNPACK_Q8_0_BYTES 34  /* fp16, 32 integers */
#define LH_UNPACK_Q4_K_BYTES 144 /* 2 of fp16, 12 bytes of scales and minima, 128 of values */
#define LH_UNPACK_Q6_K_BYTES 210 /* 128 bytes of low bits, 64 of high bits, 16 scales, fp16 */

/* The values of a grain of Q8_0, Q4_K or Q6_K. */
void lh_unpack_grain_ref(uint32_t format, const uint8_t *grain, float *values);
/* The scales and the minima of the 8 parts of a grain of Q4_K, as integers of 6 bits. */
void lh_unpack_q4_k_scales(const uint8_t *grain, uint8_t *scales, uint8_t *minima);

/*
 * The caller has set the default floating-point environment. Kernels go from front to back, and
 * read the elements that they write next before they write them: see lh_unpack() for the overlap of
 * `packed` and `out`.
 */
struct lh_unpack_kernel {
    /* Formats of which each element begins at a byte; all elements have one scale. */
    void (*bytes)(const struct lh_unpack *unpack, const uint8_t *packed, float scale,
                  uint64_t count, void *out);
    /*
     * Format NIBBLES with a result of 16 bits: decode blocks, each of a multiple of LH_UNPACK_BATCH
     * elements, with a scale each.
     */
    void (*nibbles)(const struct lh_unpack *unpack, const uint8_t *packed, const float *table,
                    const float *scales, uint64_t blocks, uint16_t *out);
    /*
     * Format E2M1 with scales of E8M0, or of E4M3 to be divided by `divisor`, and blocks of 16 or
     * 32 elements: decode batches of LH_UNPACK_SCALE_BATCH blocks, up to the first batch with a
     * scale that is not finite. Returns how many batches are decoded.
     */
    uint64_t (*e2m1)(const struct lh_unpack *unpack, const uint8_t *packed, const uint8_t *scales,
                     float divisor, uint64_t batches, void *out);
    /*
     * Formats with scales in grains: decode grains, up to the first one with a scale of fp16 that
     * is not finite. Returns how many grains are decoded.
     */
    uint64_t (*grains)(const struct lh_unpack *unpack, const uint8_t *packed, uint64_t count,
                       void *out);
};

#if defined(__x86_64__)
/* Needs AVX2 and F16C. */
extern const struct lh_unpack_kernel lh_unpack_avx2;
#endif

#endif
