/*
 * The update with NEON, and its variant that computes checksums, with the same division of work as
 * in adam_avx2.c: what is read goes through the crc32 instruction, what is written is folded in
 * registers ([Note: folds] in adam_kernels.h). An iteration takes 16 elements, a cache line of each
 * 4-byte array.
 *
 * Every load and store is of bytes, so that the compiler assumes no alignment.
 */
#if defined(__aarch64__)

#include <arm_acle.h>
#include <arm_neon.h>
#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "compute/adam_kernels.h"

#define STEP_ELEMENTS 16
#define PAIR_ELEMENTS 8 /* two registers of floats, one of a 2-byte array */
#define QUAD_ELEMENTS 4
/* The prefetch distance, in bytes of a 4-byte array, as in adam_avx512.c. */
#define PREFETCH_BYTES 2048

/* x^160 and x^96 modulo the CRC-32C polynomial: as in adam_avx512.c, but advancing 128 bits. */
#define FOLD_LOW UINT64_C(0xF20C0DFE)
#define FOLD_HIGH UINT64_C(0x493C7D27)

struct lanes {
    float32x4_t gradient_scale, beta1_rest, beta2, beta2_rest, bias2_sqrt_inverse, eps, step_size;
    float32x4_t decay;
    poly64x2_t fold;
};

struct mode {
    enum lh_dtype param, gradient;
    bool folding, roots;
};

/* The crcs of the bytes read, without inversions. */
struct read_crcs {
    uint32_t residual, moment1, moment2;
};

static inline struct lanes lanes_make(const struct lh_adam_scalars *scalars)
{
    return (struct lanes){
        .gradient_scale = vdupq_n_f32(scalars->gradient_scale),
        .beta1_rest = vdupq_n_f32(scalars->beta1_rest),
        .beta2 = vdupq_n_f32(scalars->beta2),
        .beta2_rest = vdupq_n_f32(scalars->beta2_rest),
        .bias2_sqrt_inverse = vdupq_n_f32(scalars->bias2_sqrt_inverse),
        .eps = vdupq_n_f32(scalars->eps),
        .step_size = vdupq_n_f32(scalars->step_size),
        .decay = vdupq_n_f32(scalars->decay),
        .fold = vcombine_p64(vcreate_p64(FOLD_LOW), vcreate_p64(FOLD_HIGH)),
    };
}

/* Replace every NaN by LH_ADAM_NAN_BITS. */
static inline uint32x4_t nan_settled(float32x4_t value)
{
    return vbslq_u32(vceqq_f32(value, value), vreinterpretq_u32_f32(value),
                     vdupq_n_u32(LH_ADAM_NAN_BITS));
}

/* Load four floats, starting at element i. */
static inline __attribute__((always_inline)) float32x4_t floats_load(const void *array, uint64_t i,
                                                                     const enum lh_dtype dtype)
{
    const uint8_t *source = (const uint8_t *)array + i * lh_dtype_bytes(dtype);

    if (dtype == LH_DTYPE_BF16)
        return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(source)), 16));
    if (dtype == LH_DTYPE_F16)
        return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(source)));
    return vreinterpretq_f32_u8(vld1q_u8(source));
}

static inline void bits_store(void *array, uint64_t i, uint32x4_t bits)
{
    vst1q_u8((uint8_t *)array + i * sizeof(float), vreinterpretq_u8_u32(bits));
}

/* Returns the masters' bits. */
static inline __attribute__((always_inline)) uint32x4_t
quad_update(const struct lh_adam_run *run, uint64_t i, const struct lanes *lanes,
            const struct mode mode, uint32x4_t *moments_written, uint32x4_t *numbers)
{
    float32x4_t g = floats_load(run->gradient, i, mode.gradient);
    float32x4_t m = floats_load(run->moment1, i, LH_DTYPE_F32);
    float32x4_t v = floats_load(run->moment2, i, LH_DTYPE_F32);
    float32x4_t p, d, root;

    if (mode.param == LH_DTYPE_BF16) {
        const uint8_t *residual = (const uint8_t *)run->residual + i * sizeof(int16_t);
        uint32x4_t high = vreinterpretq_u32_f32(floats_load(run->param, i, LH_DTYPE_BF16));
        int32x4_t low = vmovl_s16(vreinterpret_s16_u8(vld1_u8(residual)));

        p = vreinterpretq_f32_u32(vaddq_u32(high, vreinterpretq_u32_s32(low)));
    } else {
        p = floats_load(mode.param == LH_DTYPE_F16 ? run->residual : run->param, i, LH_DTYPE_F32);
    }
    g = vmulq_f32(g, lanes->gradient_scale);
    m = vfmaq_f32(m, vsubq_f32(g, m), lanes->beta1_rest);
    v = vfmaq_f32(vmulq_f32(vmulq_f32(g, lanes->beta2_rest), g), v, lanes->beta2);
    root = vsqrtq_f32(v);
    d = vfmaq_f32(lanes->eps, root, lanes->bias2_sqrt_inverse);
    p = vfmsq_f32(vmulq_f32(p, lanes->decay), lanes->step_size, vdivq_f32(m, d));

    *numbers = vandq_u32(*numbers, vceqq_f32(p, p));
    moments_written[0] = nan_settled(m);
    moments_written[1] = nan_settled(mode.roots ? root : v);
    bits_store(run->moment1, i, moments_written[0]);
    bits_store(run->moment2, i, moments_written[1]);
    return nan_settled(p);
}

/* P16 of eight masters. The only NaN that can occur rounds to the right NaN in both formats. */
static inline __attribute__((always_inline)) uint8x16_t params_rounded(const uint32x4_t bits[2],
                                                                       const enum lh_dtype dtype)
{
    if (dtype == LH_DTYPE_F16)
        return vcombine_u8(vreinterpret_u8_f16(vcvt_f16_f32(vreinterpretq_f32_u32(bits[0]))),
                           vreinterpret_u8_f16(vcvt_f16_f32(vreinterpretq_f32_u32(bits[1]))));
    return vreinterpretq_u8_u16(vcombine_u16(vrshrn_n_u32(bits[0], 16), vrshrn_n_u32(bits[1], 16)));
}

static inline uint8x16_t fold(uint8x16_t state, uint8x16_t word, poly64x2_t constants)
{
    poly64x2_t halves = vreinterpretq_p64_u8(state);
    poly128_t low = vmull_p64(vgetq_lane_p64(halves, 0), vgetq_lane_p64(constants, 0));
    poly128_t high = vmull_high_p64(halves, constants);

    return veorq_u8(veorq_u8(vreinterpretq_u8_p128(low), vreinterpretq_u8_p128(high)), word);
}

/* Extend a crc by bytes (a multiple of 8; inlined), without inversions. */
static inline __attribute__((always_inline)) uint32_t words_chain(uint32_t crc, const void *source,
                                                                  const int bytes)
{
#pragma GCC unroll 8
    for (int offset = 0; offset < bytes; offset += 8) {
        uint64_t word;

        memcpy(&word, (const char *)source + offset, sizeof(word));
        crc = __crc32cd(crc, word);
    }
    return crc;
}

static inline __attribute__((always_inline)) void prefetch(const struct lh_adam_run *run,
                                                           uint64_t i, const struct mode mode)
{
    uint64_t ahead = i + PREFETCH_BYTES / sizeof(float);
    uint64_t residual_bytes = lh_adam_residual_bytes(mode.param);

    __builtin_prefetch((const char *)run->param + ahead * lh_dtype_bytes(mode.param));
    __builtin_prefetch((const char *)run->gradient + ahead * lh_dtype_bytes(mode.gradient));
    __builtin_prefetch((const char *)run->moment1 + ahead * sizeof(float));
    __builtin_prefetch((const char *)run->moment2 + ahead * sizeof(float));
    if (residual_bytes > 0)
        __builtin_prefetch((const char *)run->residual + ahead * residual_bytes);
}

/* Extend the crcs by what an iteration reads, before it is overwritten. */
static inline __attribute__((always_inline)) void reads_chain(struct read_crcs *crcs,
                                                              const struct lh_adam_run *run,
                                                              uint64_t i, const struct mode mode)
{
    const int residual_bytes = (int)lh_adam_residual_bytes(mode.param);
    const char *residual = (const char *)run->residual + i * (uint64_t)residual_bytes;

    crcs->moment1 = words_chain(crcs->moment1, (const char *)run->moment1 + i * 4,
                                STEP_ELEMENTS * (int)sizeof(float));
    crcs->moment2 = words_chain(crcs->moment2, (const char *)run->moment2 + i * 4,
                                STEP_ELEMENTS * (int)sizeof(float));
    crcs->residual = words_chain(crcs->residual, residual, STEP_ELEMENTS * residual_bytes);
}

/* Returns the number of elements updated: a multiple of 16. */
static inline __attribute__((always_inline)) uint64_t body(const struct lh_adam_run *run,
                                                           const struct lh_adam_scalars *scalars,
                                                           const struct mode mode,
                                                           uint32_t *crcs_out)
{
    const struct lanes lanes = lanes_make(scalars);
    const uint64_t count = run->count / STEP_ELEMENTS * STEP_ELEMENTS;
    uint8x16_t states[LH_ADAM_STREAM_COUNT] = {0};
    struct read_crcs reads = {0};
    uint32x4_t numbers = vdupq_n_u32(UINT32_MAX); /* where a parameter is NaN, all bits are 0 */

#define FOLD(stream, word)                                                                         \
    (states[LH_ADAM_STREAM_##stream] =                                                             \
         mode.folding ? fold(states[LH_ADAM_STREAM_##stream], (word), lanes.fold)                  \
                      : states[LH_ADAM_STREAM_##stream])

    for (uint64_t first = 0; first < count; first += STEP_ELEMENTS) {
        prefetch(run, first, mode);
        if (mode.folding)
            reads_chain(&reads, run, first, mode);
#pragma GCC unroll 2
        for (uint64_t i = first; i < first + STEP_ELEMENTS; i += PAIR_ELEMENTS) {
            uint32x4_t bits[2];

#pragma GCC unroll 2
            for (uint64_t quad = 0; quad < 2; quad++) {
                const uint64_t at = i + quad * QUAD_ELEMENTS;
                uint32x4_t written[2];

                bits[quad] = quad_update(run, at, &lanes, mode, written, &numbers);
                FOLD(MOMENT1, vreinterpretq_u8_u32(written[0]));
                FOLD(MOMENT2, vreinterpretq_u8_u32(written[1]));
                if (mode.param == LH_DTYPE_F32) {
                    bits_store(run->param, at, bits[quad]);
                    FOLD(PARAM, vreinterpretq_u8_u32(bits[quad]));
                } else if (mode.param == LH_DTYPE_F16) {
                    bits_store(run->residual, at, bits[quad]);
                    FOLD(RESIDUAL, vreinterpretq_u8_u32(bits[quad]));
                }
            }
            if (mode.param != LH_DTYPE_F32) {
                uint8x16_t rounded = params_rounded(bits, mode.param);

                vst1q_u8((uint8_t *)run->param + i * sizeof(uint16_t), rounded);
                FOLD(PARAM, rounded);
            }
            if (mode.param == LH_DTYPE_BF16) {
                uint8x16_t low =
                    vreinterpretq_u8_u16(vcombine_u16(vmovn_u32(bits[0]), vmovn_u32(bits[1])));

                vst1q_u8((uint8_t *)run->residual + i * sizeof(int16_t), low);
                FOLD(RESIDUAL, low);
            }
        }
    }
#undef FOLD
    if (run->has_nan && vminvq_u32(numbers) == 0)
        *run->has_nan = true;
    if (mode.folding) {
        for (int stream = LH_ADAM_STREAM_PARAM; stream < LH_ADAM_STREAM_COUNT; stream++)
            crcs_out[stream] = lh_crc32c(UINT32_MAX, states + stream, sizeof(states[stream]));
        crcs_out[LH_ADAM_STREAM_RESIDUAL_READ] = ~reads.residual;
        crcs_out[LH_ADAM_STREAM_MOMENT1_READ] = ~reads.moment1;
        crcs_out[LH_ADAM_STREAM_MOMENT2_READ] = ~reads.moment2;
    }
    return count;
}

static inline __attribute__((always_inline)) uint64_t
body_by_gradient(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars,
                 const enum lh_dtype param, bool folding, bool roots, uint32_t *crcs_out)
{
    if (run->gradient_dtype == LH_DTYPE_BF16)
        return body(run, scalars, (struct mode){param, LH_DTYPE_BF16, folding, roots}, crcs_out);
    if (run->gradient_dtype == LH_DTYPE_F16)
        return body(run, scalars, (struct mode){param, LH_DTYPE_F16, folding, roots}, crcs_out);
    return body(run, scalars, (struct mode){param, LH_DTYPE_F32, folding, roots}, crcs_out);
}

static inline __attribute__((always_inline)) uint64_t
body_by_dtypes(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars, bool folding,
               bool roots, uint32_t *crcs_out)
{
    LH_ASSERT((run->residual != NULL) == (lh_adam_residual_bytes(run->param_dtype) > 0));

    if (run->param_dtype == LH_DTYPE_BF16)
        return body_by_gradient(run, scalars, LH_DTYPE_BF16, folding, roots, crcs_out);
    if (run->param_dtype == LH_DTYPE_F16)
        return body_by_gradient(run, scalars, LH_DTYPE_F16, folding, roots, crcs_out);
    return body_by_gradient(run, scalars, LH_DTYPE_F32, folding, roots, crcs_out);
}

void lh_adam_neon(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars)
{
    uint64_t done = body_by_dtypes(run, scalars, false, false, NULL);

    if (done < run->count) {
        struct lh_adam_run rest = lh_adam_run_from(run, done);

        lh_adam_ref(&rest, scalars);
    }
}

void lh_adam_neon_roots(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars)
{
    uint64_t done = body_by_dtypes(run, scalars, false, true, NULL);

    if (done < run->count) {
        struct lh_adam_run rest = lh_adam_run_from(run, done);

        lh_adam_ref_roots(&rest, scalars);
    }
}

void lh_adam_neon_folding(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars,
                          uint32_t crcs_out[LH_ADAM_STREAM_COUNT])
{
    uint64_t done = body_by_dtypes(run, scalars, true, false, crcs_out);

    LH_ASSERT(done == run->count);
}

#endif
