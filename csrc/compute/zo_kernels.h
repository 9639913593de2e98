/*
 * The kernels of lh_zo_apply(), one file for each instruction set, and the constants that they
 * share. Only csrc/compute, cuda/ and their tests include this header, which is valid C++, too.
 */
#ifndef LH_COMPUTE_ZO_KERNELS_H
#define LH_COMPUTE_ZO_KERNELS_H

#include "compute/zo.h"

#define LH_ZO_BLOCK 64 /* the number of elements of sixteen counters */
#define LH_ZO_COUNTERS 16
#define LH_ZO_WORDS 4

#define LH_ZO_MULTIPLIER_0 UINT32_C(0xD2511F53)
#define LH_ZO_MULTIPLIER_1 UINT32_C(0xCD9E8D57)
#define LH_ZO_WEYL_0 UINT32_C(0x9E3779B9)
#define LH_ZO_WEYL_1 UINT32_C(0xBB67AE85)

/*
 * ln(1 + f) = f - f^2 / 2 + f^3 L(f) for 1 + f in [sqrt(1/2), sqrt(2)); sin x = x + x^3 S(x^2) and
 * cos x = 1 - x^2 / 2 + x^4 C(x^2) for |x| <= pi / 4: least-squares fits, with weights that
 * equalize the error.
 */
#define LH_ZO_L0 0x1.5556d6p-2f
#define LH_ZO_L1 (-0x1.ffff0ep-3f)
#define LH_ZO_L2 0x1.98d24ap-3f
#define LH_ZO_L3 (-0x1.5489cp-3f)
#define LH_ZO_L4 0x1.32e6d4p-3f
#define LH_ZO_L5 (-0x1.1c270cp-3f)
#define LH_ZO_L6 0x1.45f9f2p-4f
#define LH_ZO_S0 (-0x1.555546p-3f)
#define LH_ZO_S1 0x1.110798p-7f
#define LH_ZO_S2 (-0x1.995e58p-13f)
#define LH_ZO_C0 0x1.5549f6p-5f
#define LH_ZO_C1 (-0x1.65dffp-10f)
#define LH_ZO_LN_2 0x1.62e43p-1f
#define LH_ZO_ROOT_HALF_BITS 0x3F3504F3   /* the bits of sqrt(1/2) as a float */
#define LH_ZO_ANGLE_SCALE 0x1.921fb6p-32f /* a quarter turn has 32 bits */

/*
 * The argument of a GPU's kernel, by value: the arguments of lh_zo_lead(). An absent array has the
 * address 0: without a state, values are updated in place (both formats are F32); without values,
 * only the state is updated. Every GPU accepts at least 4 KiB of kernel arguments.
 */
#define LH_ZO_BATCH_OPS 64
#define LH_ZO_BATCH_BYTES (48 + LH_ZO_BATCH_OPS * 48)
#define LH_ZO_BATCH_THREADS 256
struct lh_zo_batch {
    uint64_t values; /* the address of element first on the device */
    uint64_t state;
    uint64_t first;
    uint64_t count;
    enum lh_zo_format state_format;
    enum lh_zo_format value_format;
    uint32_t op_count; /* in the first op, is_same is false */
    struct lh_zo_op ops[LH_ZO_BATCH_OPS];
};

/* Properties of a format, whose numbers are represented in fp32. */
struct lh_zo_shape {
    uint32_t mantissa_bits;
    uint32_t exponent_min; /* the exponent of the smallest normal number, biased as in fp32 */
    uint32_t max;          /* the bits of the largest finite number */
};
#define LH_ZO_SHAPE_BF16 {7, 1, 0x7F7F0000}
#define LH_ZO_SHAPE_F16 {10, 113, 0x477FE000}
#define LH_ZO_SHAPE_F8 {3, 121, 0x43E00000}
#define LH_ZO_NAN 0x7FC00000

/* The definition of ROUND: round a value, given by its bits, with a random word. */
uint32_t lh_zo_rounded(uint32_t bits, uint32_t word, enum lh_zo_format format);

/* The definitions, which run on any machine. */
void lh_zo_ref(float *values, const float *source, uint64_t first, uint64_t count,
               const struct lh_zo_op *ops, uint32_t op_count);
void lh_zo_words_ref(uint32_t *words, uint64_t first, uint64_t count,
                     const struct lh_zo_stream *stream);
void lh_zo_widen_ref(float *values, const void *kept, enum lh_zo_format format, uint64_t count);
void lh_zo_narrow_ref(void *kept, const float *values, enum lh_zo_format format, uint64_t count);
void lh_zo_cast_ref(void *cast, const float *values, enum lh_zo_format format, uint64_t count);

#if defined(__x86_64__)
/* These need AVX2 and F16C. */
void lh_zo_avx2(float *values, const float *source, uint64_t first, uint64_t count,
                const struct lh_zo_op *ops, uint32_t op_count);
void lh_zo_words_avx2(uint32_t *words, uint64_t first, uint64_t count,
                      const struct lh_zo_stream *stream);
void lh_zo_widen_avx2(float *values, const void *kept, enum lh_zo_format format, uint64_t count);
void lh_zo_narrow_avx2(void *kept, const float *values, enum lh_zo_format format, uint64_t count);
void lh_zo_cast_avx2(void *cast, const float *values, enum lh_zo_format format, uint64_t count);
/* These need AVX-512 F, BW, VL and DQ. */
void lh_zo_avx512(float *values, const float *source, uint64_t first, uint64_t count,
                  const struct lh_zo_op *ops, uint32_t op_count);
void lh_zo_words_avx512(uint32_t *words, uint64_t first, uint64_t count,
                        const struct lh_zo_stream *stream);
void lh_zo_widen_avx512(float *values, const void *kept, enum lh_zo_format format, uint64_t count);
void lh_zo_narrow_avx512(void *kept, const float *values, enum lh_zo_format format, uint64_t count);
void lh_zo_cast_avx512(void *cast, const float *values, enum lh_zo_format format, uint64_t count);
#elif defined(__aarch64__)
void lh_zo_neon(float *values, const float *source, uint64_t first, uint64_t count,
                const struct lh_zo_op *ops, uint32_t op_count);
void lh_zo_words_neon(uint32_t *words, uint64_t first, uint64_t count,
                      const struct lh_zo_stream *stream);
void lh_zo_widen_neon(float *values, const void *kept, enum lh_zo_format format, uint64_t count);
void lh_zo_narrow_neon(void *kept, const float *values, enum lh_zo_format format, uint64_t count);
void lh_zo_cast_neon(void *cast, const float *values, enum lh_zo_format format, uint64_t count);
#endif

#endif
