/*
 * The update with AVX2 and FMA, and its variants that compute checksums. The structure is that of
 * adam_avx512.c, whose comments explain more. An iteration takes 16 elements, a whole register of
 * each 2-byte array.
 *
 * What is written is folded in registers ([Note: folds] in adam_kernels.h); what is read goes
 * through the crc32 instruction. With seven carry-less chains, the products alone took a Zen 4 core
 * longer than memory (0.76 of its bandwidth for bf16), so only four streams are folded, and integer
 * units that were idle handle the rest (0.88). The crc32 instruction is unsuitable for what is
 * written: its 8-byte loads would wait for the 32-byte stores (0.50).
 */
#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "compute/adam_kernels.h"

#define STEP_ELEMENTS 16
#define HALF_ELEMENTS 8
/* The prefetch distance, in bytes of a 4-byte array; see adam_avx512.c. */
#define PREFETCH_BYTES 2048

/* x^288 and x^224 modulo the CRC-32C polynomial: as in adam_avx512.c, but advancing 256 bits. */
#define FOLD_LOW UINT64_C(0x1384AA63A)
#define FOLD_HIGH UINT64_C(0xBA4FC28E)

struct lanes {
    __m256 gradient_scale, beta1_rest, beta2, beta2_rest, bias2_sqrt_inverse, eps, step_size;
    __m256 decay;
    __m256i fold;
};

/* How checksums are computed; NARROW needs no VPCLMULQDQ. */
enum folding { FOLDING_NONE, FOLDING_WIDE, FOLDING_NARROW };

struct mode {
    enum lh_dtype param, gradient;
    enum folding folding;
    bool roots;
};

/* The states of [Note: folds], which are 256 bits in either form. */
struct folds {
    __m256i wide[LH_ADAM_STREAM_COUNT];
    __m128i narrow[LH_ADAM_STREAM_COUNT][2];
};

static inline struct lanes lanes_make(const struct lh_adam_scalars *scalars)
{
    return (struct lanes){
        .gradient_scale = _mm256_set1_ps(scalars->gradient_scale),
        .beta1_rest = _mm256_set1_ps(scalars->beta1_rest),
        .beta2 = _mm256_set1_ps(scalars->beta2),
        .beta2_rest = _mm256_set1_ps(scalars->beta2_rest),
        .bias2_sqrt_inverse = _mm256_set1_ps(scalars->bias2_sqrt_inverse),
        .eps = _mm256_set1_ps(scalars->eps),
        .step_size = _mm256_set1_ps(scalars->step_size),
        .decay = _mm256_set1_ps(scalars->decay),
        .fold = _mm256_set_epi64x(FOLD_HIGH, FOLD_LOW, FOLD_HIGH, FOLD_LOW),
    };
}

/* Replace every NaN by LH_ADAM_NAN_BITS. */
static inline __m256 nan_settled(__m256 value)
{
    const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(LH_ADAM_NAN_BITS));

    return _mm256_blendv_ps(value, nan, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
}

static inline __m256 bf16_widened(const void *source)
{
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(source));

    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

static inline __attribute__((always_inline)) __m256 floats_load(const void *array, uint64_t i,
                                                                const enum lh_dtype dtype)
{
    if (dtype == LH_DTYPE_BF16)
        return bf16_widened((const uint16_t *)array + i);
    if (dtype == LH_DTYPE_F16)
        return _mm256_cvtph_ps(_mm_loadu_si128((const void *)((const uint16_t *)array + i)));
    return _mm256_loadu_ps((const float *)array + i);
}

static inline __attribute__((always_inline)) __m256i
half_update(const struct lh_adam_run *run, uint64_t i, const struct lanes *lanes,
            const struct mode mode, __m256i *moments_written, __m256 *nans)
{
    __m256 g = floats_load(run->gradient, i, mode.gradient);
    __m256 m = _mm256_loadu_ps(run->moment1 + i);
    __m256 v = _mm256_loadu_ps(run->moment2 + i);
    __m256 p, d, root;

    if (mode.param == LH_DTYPE_BF16) {
        __m256i high = _mm256_castps_si256(floats_load(run->param, i, LH_DTYPE_BF16));
        __m256i low = _mm256_cvtepi16_epi32(
            _mm_loadu_si128((const void *)((const int16_t *)run->residual + i)));

        p = _mm256_castsi256_ps(_mm256_add_epi32(high, low));
    } else {
        p = floats_load(mode.param == LH_DTYPE_F16 ? run->residual : run->param, i, LH_DTYPE_F32);
    }
    g = _mm256_mul_ps(g, lanes->gradient_scale);
    m = _mm256_fmadd_ps(_mm256_sub_ps(g, m), lanes->beta1_rest, m);
    v = _mm256_fmadd_ps(v, lanes->beta2, _mm256_mul_ps(_mm256_mul_ps(g, lanes->beta2_rest), g));
    root = _mm256_sqrt_ps(v);
    d = _mm256_fmadd_ps(root, lanes->bias2_sqrt_inverse, lanes->eps);
    p = _mm256_fnmadd_ps(lanes->step_size, _mm256_div_ps(m, d), _mm256_mul_ps(p, lanes->decay));

    *nans = _mm256_or_ps(*nans, _mm256_cmp_ps(p, p, _CMP_UNORD_Q));
    m = nan_settled(m);
    v = nan_settled(mode.roots ? root : v);

    _mm256_storeu_ps(run->moment1 + i, m);
    _mm256_storeu_ps(run->moment2 + i, v);
    moments_written[0] = _mm256_castps_si256(m);
    moments_written[1] = _mm256_castps_si256(v);
    return _mm256_castps_si256(nan_settled(p));
}

/* Pack the low words of 2 x 8 dwords, whose high words are 0, in order. */
static inline __m256i words_packed(__m256i first, __m256i second)
{
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xD8);
}

/* P16 of 16 masters, in order. */
static inline __attribute__((always_inline)) __m256i params_rounded(const __m256i bits[2],
                                                                    const enum lh_dtype dtype)
{
    const __m256i half_place = _mm256_set1_epi32(0x8000);

    if (dtype == LH_DTYPE_F16)
        return _mm256_set_m128i(
            _mm256_cvtps_ph(_mm256_castsi256_ps(bits[1]), _MM_FROUND_TO_NEAREST_INT),
            _mm256_cvtps_ph(_mm256_castsi256_ps(bits[0]), _MM_FROUND_TO_NEAREST_INT));
    return words_packed(_mm256_srli_epi32(_mm256_add_epi32(bits[0], half_place), 16),
                        _mm256_srli_epi32(_mm256_add_epi32(bits[1], half_place), 16));
}

static inline __attribute__((always_inline)) void prefetch(const struct lh_adam_run *run,
                                                           uint64_t i, const struct mode mode)
{
    uint64_t ahead = i + PREFETCH_BYTES / 4;
    uint64_t residual_bytes = lh_adam_residual_bytes(mode.param);

    _mm_prefetch((const char *)run->param + ahead * lh_dtype_bytes(mode.param), _MM_HINT_T0);
    _mm_prefetch((const char *)run->gradient + ahead * lh_dtype_bytes(mode.gradient), _MM_HINT_T0);
    _mm_prefetch((const char *)run->moment1 + ahead * 4, _MM_HINT_T0);
    _mm_prefetch((const char *)run->moment2 + ahead * 4, _MM_HINT_T0);
    if (residual_bytes > 0)
        _mm_prefetch((const char *)run->residual + ahead * residual_bytes, _MM_HINT_T0);
}

static inline __m256i wide_fold(__m256i state, __m256i word, __m256i constants)
{
    __m256i low = _mm256_clmulepi64_epi128(state, constants, 0x00);
    __m256i high = _mm256_clmulepi64_epi128(state, constants, 0x11);

    return _mm256_xor_si256(_mm256_xor_si256(low, high), word);
}

static inline __m128i narrow_fold(__m128i state, __m128i word, __m128i constants)
{
    __m128i low = _mm_clmulepi64_si128(state, constants, 0x00);
    __m128i high = _mm_clmulepi64_si128(state, constants, 0x11);

    return _mm_xor_si128(_mm_xor_si128(low, high), word);
}

static inline __attribute__((always_inline)) void
fold(struct folds *folds, int stream, __m256i word, __m256i constants, const enum folding folding)
{
    __m128i *narrow = folds->narrow[stream];
    __m128i half_constants = _mm256_castsi256_si128(constants);

    if (folding == FOLDING_WIDE) {
        folds->wide[stream] = wide_fold(folds->wide[stream], word, constants);
    } else if (folding == FOLDING_NARROW) {
        narrow[0] = narrow_fold(narrow[0], _mm256_castsi256_si128(word), half_constants);
        narrow[1] = narrow_fold(narrow[1], _mm256_extracti128_si256(word, 1), half_constants);
    }
}

/* Extend a crc by bytes (a multiple of 8; inlined), without inversions. */
static inline __attribute__((always_inline)) uint64_t words_chain(uint64_t crc, const void *source,
                                                                  const int bytes)
{
#pragma GCC unroll 8
    for (int offset = 0; offset < bytes; offset += 8) {
        uint64_t word;

        memcpy(&word, (const char *)source + offset, sizeof(word));
        crc = _mm_crc32_u64(crc, word);
    }
    return crc;
}

static inline void nans_report(const struct lh_adam_run *run, __m256 nans)
{
    if (run->has_nan && _mm256_movemask_ps(nans) != 0)
        *run->has_nan = true;
}

/* Returns the number of elements updated: a multiple of 16. */
static inline __attribute__((always_inline)) uint64_t body(const struct lh_adam_run *run,
                                                           const struct lh_adam_scalars *scalars,
                                                           const struct mode mode,
                                                           uint32_t *crcs_out)
{
    const struct lanes lanes = lanes_make(scalars);
    const __m256i low_mask = _mm256_set1_epi32(0xFFFF);
    const uint64_t count = run->count / STEP_ELEMENTS * STEP_ELEMENTS;
    const uint64_t residual_bytes = lh_adam_residual_bytes(mode.param);
    struct folds folds = {0};
    __m256 nans = _mm256_setzero_ps(); /* where a parameter is NaN, all bits are set */
    uint64_t moment1_crc = 0, moment2_crc = 0, residual_crc = 0; /* CRCs of the bytes read */

#define FOLD(stream, word) fold(&folds, LH_ADAM_STREAM_##stream, (word), lanes.fold, mode.folding)

    for (uint64_t i = 0; i < count; i += STEP_ELEMENTS) {
        __m256i bits[2];

        prefetch(run, i, mode);
        if (mode.folding != FOLDING_NONE) {
            moment1_crc = words_chain(moment1_crc, run->moment1 + i, 4 * STEP_ELEMENTS);
            moment2_crc = words_chain(moment2_crc, run->moment2 + i, 4 * STEP_ELEMENTS);
            residual_crc =
                words_chain(residual_crc, (const char *)run->residual + i * residual_bytes,
                            (int)residual_bytes * STEP_ELEMENTS);
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const uint64_t at = i + (uint64_t)half * HALF_ELEMENTS;
            __m256i written[2];

            bits[half] = half_update(run, at, &lanes, mode, written, &nans);
            FOLD(MOMENT1, written[0]);
            FOLD(MOMENT2, written[1]);
            if (mode.param == LH_DTYPE_F32) {
                _mm256_storeu_si256((__m256i *)((float *)run->param + at), bits[half]);
                FOLD(PARAM, bits[half]);
            } else if (mode.param == LH_DTYPE_F16) {
                _mm256_storeu_si256((__m256i *)((float *)run->residual + at), bits[half]);
                FOLD(RESIDUAL, bits[half]);
            }
        }
        if (mode.param != LH_DTYPE_F32) {
            __m256i rounded = params_rounded(bits, mode.param);

            _mm256_storeu_si256((__m256i *)((uint16_t *)run->param + i), rounded);
            FOLD(PARAM, rounded);
        }
        if (mode.param == LH_DTYPE_BF16) {
            __m256i low = words_packed(_mm256_and_si256(bits[0], low_mask),
                                       _mm256_and_si256(bits[1], low_mask));

            _mm256_storeu_si256((__m256i *)((int16_t *)run->residual + i), low);
            FOLD(RESIDUAL, low);
        }
    }
#undef FOLD
    nans_report(run, nans);
    if (mode.folding != FOLDING_NONE) {
        for (int stream = LH_ADAM_STREAM_PARAM; stream < LH_ADAM_STREAM_COUNT; stream++)
            crcs_out[stream] =
                lh_crc32c(UINT32_MAX,
                          mode.folding == FOLDING_WIDE ? (const void *)(folds.wide + stream)
                                                       : (const void *)folds.narrow[stream],
                          sizeof(__m256i));
        crcs_out[LH_ADAM_STREAM_MOMENT1_READ] = ~(uint32_t)moment1_crc;
        crcs_out[LH_ADAM_STREAM_MOMENT2_READ] = ~(uint32_t)moment2_crc;
        crcs_out[LH_ADAM_STREAM_RESIDUAL_READ] = ~(uint32_t)residual_crc;
    }
    return count;
}

static inline __attribute__((always_inline)) uint64_t
body_by_gradient(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars,
                 const enum lh_dtype param, enum folding folding, bool roots, uint32_t *crcs_out)
{
    if (run->gradient_dtype == LH_DTYPE_BF16)
        return body(run, scalars, (struct mode){param, LH_DTYPE_BF16, folding, roots}, crcs_out);
    if (run->gradient_dtype == LH_DTYPE_F16)
        return body(run, scalars, (struct mode){param, LH_DTYPE_F16, folding, roots}, crcs_out);
    return body(run, scalars, (struct mode){param, LH_DTYPE_F32, folding, roots}, crcs_out);
}

static inline __attribute__((always_inline)) uint64_t
body_by_dtypes(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars,
               enum folding folding, bool roots, uint32_t *crcs_out)
{
    LH_ASSERT((run->residual != NULL) == (lh_adam_residual_bytes(run->param_dtype) > 0));

    if (run->param_dtype == LH_DTYPE_BF16)
        return body_by_gradient(run, scalars, LH_DTYPE_BF16, folding, roots, crcs_out);
    if (run->param_dtype == LH_DTYPE_F16)
        return body_by_gradient(run, scalars, LH_DTYPE_F16, folding, roots, crcs_out);
    return body_by_gradient(run, scalars, LH_DTYPE_F32, folding, roots, crcs_out);
}

void lh_adam_avx2(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars)
{
    uint64_t done = body_by_dtypes(run, scalars, FOLDING_NONE, false, NULL);

    if (done < run->count) {
        struct lh_adam_run rest = lh_adam_run_from(run, done);

        lh_adam_ref(&rest, scalars);
    }
}

void lh_adam_avx2_roots(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars)
{
    uint64_t done = body_by_dtypes(run, scalars, FOLDING_NONE, true, NULL);

    if (done < run->count) {
        struct lh_adam_run rest = lh_adam_run_from(run, done);

        lh_adam_ref_roots(&rest, scalars);
    }
}

void lh_adam_avx2_folding(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars,
                          uint32_t crcs_out[LH_ADAM_STREAM_COUNT])
{
    uint64_t done = body_by_dtypes(run, scalars, FOLDING_WIDE, false, crcs_out);

    LH_ASSERT(done == run->count);
}

void lh_adam_avx2_pclmul(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars,
                         uint32_t crcs_out[LH_ADAM_STREAM_COUNT])
{
    uint64_t done = body_by_dtypes(run, scalars, FOLDING_NARROW, false, crcs_out);

    LH_ASSERT(done == run->count);
}

#endif
