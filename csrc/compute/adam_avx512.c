/*
 * The update with AVX-512, and its variants that compute checksums from the same registers
 * ([Note: folds] in adam_kernels.h).
 *
 * One body serves all nine pairs of dtypes, with and without folding: it is inlined into callers
 * that pass constants. An iteration takes 32 elements, a whole 64-byte word of each 2-byte array.
 * The remaining elements are updated by adam_ref.c, with the same bits. Moments that are stored in
 * fewer bits (adam_states.h) are decoded in the registers, and bf16 is rounded there: the passes
 * over a tile that this saves would not fit into the waits for the square root and the division.
 */
#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "compute/adam_8bit.h"
#include "compute/adam_kernels.h"

#define HALF_ELEMENTS 16
/*
 * The prefetch distance, in bytes of a 4-byte array. The hardware's own prefetch streams restart at
 * each 4 KiB page.
 */
#define PREFETCH_BYTES 2048

/*
 * x^544 and x^480 modulo the CRC-32C polynomial, reflected and shifted by one: multiplying the low
 * and the high half of a 16-byte lane by them advances the lane by 512 bits.
 */
#define FOLD_LOW UINT64_C(0x740EEF02)
#define FOLD_HIGH UINT64_C(0x9E4ADDF8)
/* x^288 and x^224: the same for 256 bits. */
#define NARROW_FOLD_LOW UINT64_C(0x1384AA63A)
#define NARROW_FOLD_HIGH UINT64_C(0xBA4FC28E)

struct lanes {
    __m512 gradient_scale, beta1_rest, beta2, beta2_rest, bias2_sqrt_inverse, eps, step_size;
    __m512 decay;
    __m512i fold;
    __m128i narrow_fold;
};

/*
 * How checksums are computed. NARROW needs no VPCLMULQDQ: as in adam_avx2.c, what is read goes
 * through the crc32 instruction, so that two units share the work, and only what is written is
 * folded. Folding from the registers was faster than from the stored bytes, by 1.12 to 1.15 on a
 * Zen 5.
 */
enum folding { FOLDING_NONE, FOLDING_WIDE, FOLDING_NARROW };

struct mode {
    enum lh_dtype param, gradient;
    enum folding folding;
    bool roots;
    enum lh_adam_states states;
};

/* Checksums so far. narrow: two accumulators for each stream that is written. */
struct folds {
    __m512i wide[LH_ADAM_STREAM_COUNT];
    __m128i narrow[LH_ADAM_STREAM_COUNT][2];
    uint64_t read_crcs[LH_ADAM_STREAM_PARAM];
};

/* Stored moments with the random words of their elements: see lh_adam_stored_fn. */
struct stored {
    const struct lh_adam_moments *moments;
    const uint32_t *random;
};

static inline struct lanes lanes_make(const struct lh_adam_scalars *scalars)
{
    return (struct lanes){
        .gradient_scale = _mm512_set1_ps(scalars->gradient_scale),
        .beta1_rest = _mm512_set1_ps(scalars->beta1_rest),
        .beta2 = _mm512_set1_ps(scalars->beta2),
        .beta2_rest = _mm512_set1_ps(scalars->beta2_rest),
        .bias2_sqrt_inverse = _mm512_set1_ps(scalars->bias2_sqrt_inverse),
        .eps = _mm512_set1_ps(scalars->eps),
        .step_size = _mm512_set1_ps(scalars->step_size),
        .decay = _mm512_set1_ps(scalars->decay),
        .fold = _mm512_set4_epi64(FOLD_HIGH, FOLD_LOW, FOLD_HIGH, FOLD_LOW),
        .narrow_fold = _mm_set_epi64x(NARROW_FOLD_HIGH, NARROW_FOLD_LOW),
    };
}

/* Replace every NaN by LH_ADAM_NAN_BITS. */
static inline __m512 nan_settled(__m512 value)
{
    const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(LH_ADAM_NAN_BITS));

    return _mm512_mask_mov_ps(value, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), nan);
}

static inline __m512 bf16_widened(const void *source)
{
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(source));

    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

static inline __attribute__((always_inline)) __m512 floats_load(const void *array, uint64_t i,
                                                                const enum lh_dtype dtype)
{
    if (dtype == LH_DTYPE_BF16)
        return bf16_widened((const uint16_t *)array + i);
    if (dtype == LH_DTYPE_F16)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const void *)((const uint16_t *)array + i)));
    return _mm512_loadu_ps((const float *)array + i);
}

/* Decode moments of 8 bits: lh_adam_8bit_decode_ref(). */
static inline void codes_decode(const struct lh_adam_moments *moments, uint64_t i, __m512 *m_out,
                                __m512 *v_out)
{
    const struct lh_adam_scales *scales = moments->scales + i / LH_ADAM_STATES_BLOCK;
    const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(LH_ADAM_NAN_BITS));
    __m128i bytes1 = _mm_loadu_si128((const void *)((const int8_t *)moments->moment1 + i));
    __m128i bytes2 = _mm_loadu_si128((const void *)((const uint8_t *)moments->moment2 + i));
    __mmask16 is_nan1 = _mm_cmpeq_epi8_mask(bytes1, _mm_set1_epi8(LH_ADAM_8BIT_NAN1));
    __mmask16 is_nan2 = _mm_cmpeq_epi8_mask(bytes2, _mm_set1_epi8((char)LH_ADAM_8BIT_NAN2));
    __m512i code = _mm512_cvtepi8_epi32(bytes1);
    __m512i bits = _mm512_slli_epi32(_mm512_abs_epi32(code), LH_ADAM_8BIT_CODE_SHIFT);
    __m512 m, root;

    bits = _mm512_add_epi32(bits, _mm512_set1_epi32(LH_ADAM_8BIT_ONE));
    m = _mm512_sub_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(1));
    m = _mm512_mul_ps(m, _mm512_set1_ps(lh_adam_8bit_unit1(scales->moment1)));
    m = _mm512_or_ps(m, _mm512_castsi512_ps(_mm512_and_si512(code, _mm512_set1_epi32(INT32_MIN))));
    root = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes2));
    root = _mm512_mul_ps(root, _mm512_set1_ps(lh_adam_8bit_unit2(scales->moment2)));
    *m_out = _mm512_mask_mov_ps(m, is_nan1, nan);
    *v_out = _mm512_mask_mov_ps(_mm512_mul_ps(root, root), is_nan2, nan);
}

/* Add random bits to a value, of which the upper half is then the rounded value or NaN. */
static inline __m512 randomized(__m512 value, __m512i random)
{
    const __m512 largest = _mm512_castsi512_ps(_mm512_set1_epi32(0x7F7F0000));
    const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32(LH_ADAM_NAN_BITS));
    __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    __m512 bounded = _mm512_range_ps(value, largest, 2); /* the smaller magnitude, value's sign */

    bounded = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(bounded), random));
    return _mm512_mask_mov_ps(bounded, is_nan, nan);
}

static inline __attribute__((always_inline)) void
moments_load(const struct lh_adam_run *run, const struct stored *stored, uint64_t i,
             const enum lh_adam_states states, __m512 *m_out, __m512 *v_out)
{
    if (states == LH_ADAM_STATES_8BIT) {
        codes_decode(stored->moments, i, m_out, v_out);
    } else if (states == LH_ADAM_STATES_BF16) {
        *m_out = bf16_widened((const uint16_t *)stored->moments->moment1 + i);
        *v_out = bf16_widened((const uint16_t *)stored->moments->moment2 + i);
    } else {
        *m_out = _mm512_loadu_ps(run->moment1 + i);
        *v_out = _mm512_loadu_ps(run->moment2 + i);
    }
}

/* read_out: m, v and the fp32 parameters (or their master) before the update. */
static inline __attribute__((always_inline)) __m512i
half_update(const struct lh_adam_run *run, const struct stored *stored, uint64_t i,
            const struct lanes *lanes, const struct mode mode, __m512i *read_out,
            __m512i *moments_written, __mmask16 *nans)
{
    __m512 g = floats_load(run->gradient, i, mode.gradient);
    __m512 m, v, p, d, root;

    moments_load(run, stored, i, mode.states, &m, &v);
    if (mode.param == LH_DTYPE_BF16) {
        __m512i high = _mm512_castps_si512(floats_load(run->param, i, LH_DTYPE_BF16));
        __m512i low = _mm512_cvtepi16_epi32(
            _mm256_loadu_si256((const void *)((const int16_t *)run->residual + i)));

        p = _mm512_castsi512_ps(_mm512_add_epi32(high, low));
    } else {
        p = floats_load(mode.param == LH_DTYPE_F16 ? run->residual : run->param, i, LH_DTYPE_F32);
    }
    read_out[0] = _mm512_castps_si512(m);
    read_out[1] = _mm512_castps_si512(v);
    read_out[2] = _mm512_castps_si512(p);

    g = _mm512_mul_ps(g, lanes->gradient_scale);
    m = _mm512_fmadd_ps(_mm512_sub_ps(g, m), lanes->beta1_rest, m);
    v = _mm512_fmadd_ps(v, lanes->beta2, _mm512_mul_ps(_mm512_mul_ps(g, lanes->beta2_rest), g));
    root = _mm512_sqrt_ps(v);
    d = _mm512_fmadd_ps(root, lanes->bias2_sqrt_inverse, lanes->eps);
    p = _mm512_fnmadd_ps(lanes->step_size, _mm512_div_ps(m, d), _mm512_mul_ps(p, lanes->decay));
    *nans |= _mm512_cmp_ps_mask(p, p, _CMP_UNORD_Q);
    if (mode.states == LH_ADAM_STATES_BF16) {
        __m512i random = _mm512_loadu_si512(stored->random + i);

        m = randomized(m, _mm512_srli_epi32(random, 16));
        v = randomized(v, _mm512_and_si512(random, _mm512_set1_epi32(0xFFFF)));
    } else {
        m = nan_settled(m);
        v = nan_settled(mode.roots ? root : v);
        _mm512_storeu_ps(run->moment1 + i, m);
        _mm512_storeu_ps(run->moment2 + i, v);
    }
    moments_written[0] = _mm512_castps_si512(m);
    moments_written[1] = _mm512_castps_si512(v);
    return _mm512_castps_si512(nan_settled(p));
}

static inline __m512i fold(__m512i state, __m512i word, __m512i constants)
{
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(state, constants, 0x00),
                                     _mm512_clmulepi64_epi128(state, constants, 0x11), word, 0x96);
}

/*
 * PCLMULQDQ in its VEX encoding, to which the constraint x limits the registers. From an intrinsic,
 * the compiler could emit the EVEX encoding, which is a part of VPCLMULQDQ.
 */
#define NARROW_PRODUCT(out, left, right, halves)                                                   \
    __asm__("vpclmulqdq $" halves ", %2, %1, %0" : "=x"(out) : "x"(left), "x"(right))

static inline void narrow_fold(__m128i *state, __m128i word, __m128i constants)
{
    __m128i low, high;

    NARROW_PRODUCT(low, *state, constants, "0x00");
    NARROW_PRODUCT(high, *state, constants, "0x11");
    *state = _mm_ternarylogic_epi64(low, high, word, 0x96);
}

/* Fold a word of a stream that is written. */
static inline __attribute__((always_inline)) void written_fold(struct folds *folds, int stream,
                                                               __m512i word,
                                                               const struct lanes *lanes,
                                                               const enum folding folding)
{
    __m128i *states = folds->narrow[stream];

    if (folding == FOLDING_WIDE)
        folds->wide[stream] = fold(folds->wide[stream], word, lanes->fold);
    if (folding != FOLDING_NARROW)
        return;
    narrow_fold(states + 0, _mm512_castsi512_si128(word), lanes->narrow_fold);
    narrow_fold(states + 1, _mm512_extracti32x4_epi32(word, 1), lanes->narrow_fold);
    narrow_fold(states + 0, _mm512_extracti32x4_epi32(word, 2), lanes->narrow_fold);
    narrow_fold(states + 1, _mm512_extracti32x4_epi32(word, 3), lanes->narrow_fold);
}

/* Extend a crc by bytes (a multiple of 8; inlined), without inversions. */
static inline __attribute__((always_inline)) uint64_t words_chain(uint64_t crc, const void *source,
                                                                  const int bytes)
{
#pragma GCC unroll 16
    for (int offset = 0; offset < bytes; offset += 8) {
        uint64_t word;

        memcpy(&word, (const char *)source + offset, sizeof(word));
        crc = _mm_crc32_u64(crc, word);
    }
    return crc;
}

/* Extend the CRCs of the streams that are read by one iteration's elements. */
static inline __attribute__((always_inline)) void read_chain(struct folds *folds,
                                                             const struct lh_adam_run *run,
                                                             uint64_t i, const enum lh_dtype param)
{
    const uint64_t residual_bytes = lh_adam_residual_bytes(param);
    uint64_t *crcs = folds->read_crcs;

    crcs[LH_ADAM_STREAM_RESIDUAL_READ] = words_chain(
        crcs[LH_ADAM_STREAM_RESIDUAL_READ], (const char *)run->residual + i * residual_bytes,
        (int)residual_bytes * LH_ADAM_FOLD_ELEMENTS);
    crcs[LH_ADAM_STREAM_MOMENT1_READ] =
        words_chain(crcs[LH_ADAM_STREAM_MOMENT1_READ], run->moment1 + i, 4 * LH_ADAM_FOLD_ELEMENTS);
    crcs[LH_ADAM_STREAM_MOMENT2_READ] =
        words_chain(crcs[LH_ADAM_STREAM_MOMENT2_READ], run->moment2 + i, 4 * LH_ADAM_FOLD_ELEMENTS);
}

/* Prefetch what follows 32 elements of an array, which has element_bytes 0 if it is NULL. */
static inline __attribute__((always_inline)) void array_prefetch(const void *array, uint64_t i,
                                                                 const uint64_t element_bytes)
{
    if (element_bytes == 0)
        return;
    const char *ahead = (const char *)array + (i * 4 + PREFETCH_BYTES) * element_bytes / 4;
    _mm_prefetch(ahead, _MM_HINT_T0);
    if (element_bytes == 4)
        _mm_prefetch(ahead + 64, _MM_HINT_T0);
}

static inline __attribute__((always_inline)) void prefetch(const struct lh_adam_run *run,
                                                           const struct stored *stored, uint64_t i,
                                                           const struct mode mode)
{
    const bool is_stored = mode.states != LH_ADAM_STATES_F32;
    const uint64_t moment_bytes = lh_adam_moment_bytes(mode.states);

    array_prefetch(run->param, i, lh_dtype_bytes(mode.param));
    array_prefetch(run->gradient, i, lh_dtype_bytes(mode.gradient));
    array_prefetch(is_stored ? stored->moments->moment1 : run->moment1, i, moment_bytes);
    array_prefetch(is_stored ? stored->moments->moment2 : run->moment2, i, moment_bytes);
    array_prefetch(run->residual, i, lh_adam_residual_bytes(mode.param));
}

/* Index vectors that select the high and the low halves of 2 x 16 dwords. */
static inline __m512i word_indices(short first)
{
    const __m512i ramp =
        _mm512_set_epi16(62, 60, 58, 56, 54, 52, 50, 48, 46, 44, 42, 40, 38, 36, 34, 32, 30, 28, 26,
                         24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);

    return _mm512_add_epi16(ramp, _mm512_set1_epi16(first));
}

/* P16 of 32 masters, in order. */
static inline __attribute__((always_inline)) __m512i params_rounded(const __m512i bits[2],
                                                                    const enum lh_dtype dtype)
{
    const __m512i half_place = _mm512_set1_epi32(0x8000);

    if (dtype == LH_DTYPE_F16) {
        __m256i low = _mm512_cvtps_ph(_mm512_castsi512_ps(bits[0]), _MM_FROUND_TO_NEAREST_INT);
        __m256i high = _mm512_cvtps_ph(_mm512_castsi512_ps(bits[1]), _MM_FROUND_TO_NEAREST_INT);

        return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
    return _mm512_permutex2var_epi16(_mm512_add_epi32(bits[0], half_place), word_indices(1),
                                     _mm512_add_epi32(bits[1], half_place));
}

static inline void nans_report(const struct lh_adam_run *run, __mmask16 nans)
{
    if (run->has_nan && nans != 0)
        *run->has_nan = true;
}

/* Returns the number of elements updated: a multiple of 32. */
static inline __attribute__((always_inline)) uint64_t body(const struct lh_adam_run *run,
                                                           const struct lh_adam_scalars *scalars,
                                                           const struct stored *stored,
                                                           const struct mode mode,
                                                           struct folds *folds_out)
{
    const struct lanes lanes = lanes_make(scalars);
    const __m512i low_words = word_indices(0);
    const uint64_t count = run->count / LH_ADAM_FOLD_ELEMENTS * LH_ADAM_FOLD_ELEMENTS;
    struct folds folds = {0};
    __mmask16 nans = 0;

#define FOLD_READ(stream, word)                                                                    \
    (folds.wide[LH_ADAM_STREAM_##stream] =                                                         \
         mode.folding == FOLDING_WIDE                                                              \
             ? fold(folds.wide[LH_ADAM_STREAM_##stream], (word), lanes.fold)                       \
             : folds.wide[LH_ADAM_STREAM_##stream])
#define FOLD(stream, word)                                                                         \
    written_fold(&folds, LH_ADAM_STREAM_##stream, (word), &lanes, mode.folding)

    for (uint64_t i = 0; i < count; i += LH_ADAM_FOLD_ELEMENTS) {
        __m512i bits[2], written[2][2], residual = _mm512_setzero_si512();

        prefetch(run, stored, i, mode);
        if (mode.folding == FOLDING_NARROW)
            read_chain(&folds, run, i, mode.param);
        if (mode.param == LH_DTYPE_BF16 && mode.folding == FOLDING_WIDE)
            residual = _mm512_loadu_si512((const int16_t *)run->residual + i);
        for (int half = 0; half < 2; half++) {
            const uint64_t at = i + (uint64_t)half * HALF_ELEMENTS;
            __m512i read[3];

            bits[half] = half_update(run, stored, at, &lanes, mode, read, written[half], &nans);
            FOLD_READ(MOMENT1_READ, read[0]);
            FOLD_READ(MOMENT2_READ, read[1]);
            FOLD(MOMENT1, written[half][0]);
            FOLD(MOMENT2, written[half][1]);
            if (mode.param == LH_DTYPE_F32) {
                _mm512_storeu_si512((float *)run->param + at, bits[half]);
                FOLD(PARAM, bits[half]);
            } else if (mode.param == LH_DTYPE_F16) {
                _mm512_storeu_si512((float *)run->residual + at, bits[half]);
                FOLD_READ(RESIDUAL_READ, read[2]);
                FOLD(RESIDUAL, bits[half]);
            }
        }
        if (mode.states == LH_ADAM_STATES_BF16) {
            uint16_t *const targets[2] = {stored->moments->moment1, stored->moments->moment2};

            for (int moment = 0; moment < 2; moment++)
                _mm512_storeu_si512(targets[moment] + i,
                                    _mm512_permutex2var_epi16(written[0][moment], word_indices(1),
                                                              written[1][moment]));
        }
        if (mode.param != LH_DTYPE_F32) {
            __m512i rounded = params_rounded(bits, mode.param);

            _mm512_storeu_si512((uint16_t *)run->param + i, rounded);
            FOLD(PARAM, rounded);
        }
        if (mode.param == LH_DTYPE_BF16) {
            __m512i low = _mm512_permutex2var_epi16(bits[0], low_words, bits[1]);

            _mm512_storeu_si512((int16_t *)run->residual + i, low);
            FOLD_READ(RESIDUAL_READ, residual);
            FOLD(RESIDUAL, low);
        }
    }
#undef FOLD
#undef FOLD_READ
    nans_report(run, nans);
    if (mode.folding != FOLDING_NONE)
        *folds_out = folds;
    return count;
}

/* mode: without the dtypes. */
static inline __attribute__((always_inline)) uint64_t
body_by_gradient(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars,
                 const struct stored *stored, const enum lh_dtype param, struct mode mode,
                 struct folds *folds_out)
{
    mode.param = param;
    mode.gradient = LH_DTYPE_BF16;
    if (run->gradient_dtype == LH_DTYPE_BF16)
        return body(run, scalars, stored, mode, folds_out);
    mode.gradient = LH_DTYPE_F16;
    if (run->gradient_dtype == LH_DTYPE_F16)
        return body(run, scalars, stored, mode, folds_out);
    mode.gradient = LH_DTYPE_F32;
    return body(run, scalars, stored, mode, folds_out);
}

static inline __attribute__((always_inline)) uint64_t
body_by_dtypes(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars,
               const struct stored *stored, const struct mode mode, struct folds *folds_out)
{
    LH_ASSERT((run->residual != NULL) == (lh_adam_residual_bytes(run->param_dtype) > 0));

    if (run->param_dtype == LH_DTYPE_BF16)
        return body_by_gradient(run, scalars, stored, LH_DTYPE_BF16, mode, folds_out);
    if (run->param_dtype == LH_DTYPE_F16)
        return body_by_gradient(run, scalars, stored, LH_DTYPE_F16, mode, folds_out);
    return body_by_gradient(run, scalars, stored, LH_DTYPE_F32, mode, folds_out);
}

void lh_adam_avx512(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars)
{
    uint64_t done =
        body_by_dtypes(run, scalars, NULL, (struct mode){.folding = FOLDING_NONE}, NULL);

    if (done < run->count) {
        struct lh_adam_run rest = lh_adam_run_from(run, done);

        lh_adam_ref(&rest, scalars);
    }
}

void lh_adam_avx512_roots(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars)
{
    uint64_t done = body_by_dtypes(run, scalars, NULL, (struct mode){.roots = true}, NULL);

    if (done < run->count) {
        struct lh_adam_run rest = lh_adam_run_from(run, done);

        lh_adam_ref_roots(&rest, scalars);
    }
}

void lh_adam_avx512_stored(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars,
                           const struct lh_adam_moments *moments, const uint32_t *random)
{
    const struct stored stored = {moments, random};
    uint64_t done;

    if (moments->states == LH_ADAM_STATES_BF16)
        done = body_by_dtypes(run, scalars, &stored, (struct mode){.states = LH_ADAM_STATES_BF16},
                              NULL);
    else
        done = body_by_dtypes(run, scalars, &stored,
                              (struct mode){.states = LH_ADAM_STATES_8BIT, .roots = true}, NULL);
    LH_ASSERT(done == run->count);
}

void lh_adam_avx512_folding(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars,
                            uint32_t crcs_out[LH_ADAM_STREAM_COUNT])
{
    struct folds folds;
    uint64_t done =
        body_by_dtypes(run, scalars, NULL, (struct mode){.folding = FOLDING_WIDE}, &folds);

    LH_ASSERT(done == run->count);
    for (int stream = 0; stream < LH_ADAM_STREAM_COUNT; stream++)
        crcs_out[stream] = lh_crc32c(UINT32_MAX, folds.wide + stream, sizeof(folds.wide[stream]));
}

void lh_adam_avx512_pclmul(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars,
                           uint32_t crcs_out[LH_ADAM_STREAM_COUNT])
{
    struct folds folds;
    uint64_t done =
        body_by_dtypes(run, scalars, NULL, (struct mode){.folding = FOLDING_NARROW}, &folds);

    LH_ASSERT(done == run->count);
    for (int stream = 0; stream < LH_ADAM_STREAM_PARAM; stream++)
        crcs_out[stream] = ~(uint32_t)folds.read_crcs[stream];
    for (int stream = LH_ADAM_STREAM_PARAM; stream < LH_ADAM_STREAM_COUNT; stream++)
        crcs_out[stream] =
            lh_crc32c(UINT32_MAX, folds.narrow[stream], sizeof(folds.narrow[stream]));
}

#endif
