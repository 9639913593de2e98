/*
 * Every rule for vectors of any width, with the compiler's own vector types. One body makes all
 * kernels: it is inlined into callers that pass constants (struct form). The variants for checksums
 * compute them from the same registers ([Note: folds] in adam_kernels.h). The variants for moments
 * in fewer bits decode them in registers, and round bf16 there: the passes over a tile that this
 * saves would not fit into the waits for the square root and the division.
 *
 * The including file defines VECTOR_BYTES, TABLE(kind) (the names of the tables of kernels) and,
 * after zo_vectors.h, the operations of its machine, those of rule_core.h among them:
 *
 *      flags                       a flag for each lane; several are joined by |
 *      equal_of(), nan_of()        the lanes of words that are equal, of values that are NaN
 *      nan_where(), any_of()       LH_ADAM_NAN_BITS where flagged; whether a flag is set
 *      lesser(), greater()         of signed integers
 *      signed_load(), unsigned_load()      bytes of codes: to words, to values
 *      shorts_load(), uppers_load()        signed shorts to words, and shorts to the upper halves
 *      halves_load(), halves_of()  from fp16, and two vectors to fp16
 *      uppers_of(), lowers_of()    the upper and the lower halves of the words of two vectors
 *      struct sum, fold(), sum_crc()       the checksum of words
 *      READS_ARE_FOLDED(folding)   false: what is read goes through word_crc(), 8 bytes at a time
 *
 * An iteration takes two vectors of each 4-byte array, and one of each 2-byte array. The arithmetic
 * is rule_core.h, as in rule_ref.c, to which elements that fill no iteration are left: both write
 * the same bits.
 */
#ifndef LH_COMPUTE_RULE_BODY_H
#define LH_COMPUTE_RULE_BODY_H

#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "compute/adam_8bit.h"
#include "compute/rule_core.h"

#define LANES (VECTOR_BYTES / 4)
#define STEP_ELEMENTS (2 * LANES)
/*
 * How far ahead memory is prefetched, in elements. The hardware's own prefetch streams restart at
 * each 4 KiB page.
 */
#define PREFETCH_ELEMENTS 512
#define CACHE_LINE_BYTES 64
#define MAGNITUDE UINT32_C(0x7FFFFFFF)
#define BF16_MAX UINT32_C(0x7F7F0000)

/* What a body is inlined for: constants. */
struct form {
    rule_fn rule;
    bool has_moment1, has_moment2;
    enum lh_adam_folding folding;
    enum lh_adam_states states;
    enum lh_dtype param;
};

/* Stored moments with the random words of their elements: see lh_adam_stored_fn. */
struct stored {
    struct lh_adam_moments moments;
    const uint32_t *random;
};

/* Checksums so far: those of what is read are folded, or made by word_crc() without inversions. */
struct folds {
    struct sum sums[LH_ADAM_STREAM_COUNT];
    uint64_t crcs[LH_ADAM_STREAM_PARAM];
};

/* Load words of any alignment from an array of 4-byte elements. */
static INLINE words words_load(const void *array, uint64_t i)
{
    words loaded;

    memcpy(&loaded, (const uint32_t *)array + i, sizeof(loaded));
    return loaded;
}

/* Store a vector at an element of an array, at any alignment. */
static INLINE void words_store(void *array, uint64_t i, const uint64_t element_bytes, words stored)
{
    memcpy((char *)array + i * element_bytes, &stored, sizeof(stored));
}

/* Load gradients, not yet multiplied by gradient_scale. The branches are predicted. */
static INLINE values gradient_load(const struct lh_adam_run *run, uint64_t i)
{
    if (run->gradient_dtype == LH_DTYPE_BF16)
        return (values)uppers_load((const uint16_t *)run->gradient + i);
    if (run->gradient_dtype == LH_DTYPE_F16)
        return halves_load((const uint16_t *)run->gradient + i);
    return (values)words_load(run->gradient, i);
}

/* Load masters: [Note: 12P], [Note: 14P]. */
static INLINE values param_load(const struct lh_adam_run *run, uint64_t i,
                                const enum lh_dtype dtype)
{
    if (dtype != LH_DTYPE_BF16)
        return (values)words_load(dtype == LH_DTYPE_F16 ? run->residual : run->param, i);
    return (values)(uppers_load((const uint16_t *)run->param + i) +
                    shorts_load((const int16_t *)run->residual + i));
}

/* Replace every NaN by LH_ADAM_NAN_BITS. */
static INLINE values nan_settled(values a)
{
    return nan_where(a, nan_of(a));
}

/* What the codes of a block are multiplied by. */
struct units {
    float moment1, root;
};

/* The units of the block that an element is in. */
static INLINE struct units units_of(const struct lh_adam_moments *moments, uint64_t i,
                                    const enum lh_adam_states states)
{
    const struct lh_adam_scales scales = moments->scales[i / LH_ADAM_STATES_BLOCK];

    if (states == LH_ADAM_STATES_4BIT)
        return (struct units){lh_adam_4bit_unit1(scales.moment1),
                              lh_adam_4bit_unit2(scales.moment2)};
    return (struct units){lh_adam_8bit_unit1(scales.moment1), lh_adam_8bit_unit2(scales.moment2)};
}

/* Decode first moments of 8 bits: lh_adam_8bit_decode_ref(). */
static INLINE values codes1_decode(const void *codes, uint64_t i, struct units units)
{
    words code = signed_load((const int8_t *)codes + i);
    words bits = (greater(code, -code) << LH_ADAM_8BIT_CODE_SHIFT) + LH_ADAM_8BIT_ONE;
    values m = ((values)bits - splat(1)) * splat(units.moment1);

    m = (values)((words)m | (code & ~MAGNITUDE));
    return nan_where(m, equal_of(code, (words){0} + (uint32_t)LH_ADAM_8BIT_NAN1));
}

/* Decode second moments of 8 bits. */
static INLINE values codes2_decode(const void *codes, uint64_t i, struct units units)
{
    values code = unsigned_load((const uint8_t *)codes + i);
    values root = code * splat(units.root);

    return nan_where(root * root, equal_of((words)code, (words)splat(LH_ADAM_8BIT_NAN2)));
}

/* Decode both moments of 4 bits: lh_adam_4bit_decode_ref(). */
static INLINE void pairs_decode(const void *codes, uint64_t i, struct units units, values *m_out,
                                values *v_out)
{
    words byte = signed_load((const int8_t *)codes + i);
    words code = (words)((ints)(byte << 28) >> 28);
    words bits = (greater(code, -code) << LH_ADAM_4BIT_CODE_SHIFT) + LH_ADAM_8BIT_ONE;
    values m = ((values)bits - splat(1)) * splat(units.moment1);
    values root = __builtin_convertvector((ints)((byte >> 4 & 0xF) + 1), values);

    root *= splat(units.root);
    m = (values)((words)m | (code & ~MAGNITUDE));
    *m_out = nan_where(m, equal_of(code, (words){0} + (uint32_t)LH_ADAM_4BIT_NAN));
    *v_out = root * root;
}

/* Add random bits to values, whose upper halves are then the rounded values or NaN. */
static INLINE words randomized(values a, words random)
{
    words bounded = lesser((words)a & MAGNITUDE, (words){0} + BF16_MAX);

    bounded |= (words)a & ~MAGNITUDE;
    return (words)nan_where((values)(bounded + random), nan_of(a));
}

/* Load or decode the moments that the rule has. */
static INLINE void moments_load(struct element *e, const struct lh_adam_run *run,
                                const struct stored *stored, uint64_t i, struct units units,
                                const struct form form)
{
    const bool is_8bit = form.states == LH_ADAM_STATES_8BIT;
    const bool is_bf16 = form.states == LH_ADAM_STATES_BF16;
    const bool is_stored = form.states != LH_ADAM_STATES_F32;
    const uint16_t *const first = is_stored ? stored->moments.moment1 : NULL;
    const uint16_t *const second = is_stored ? stored->moments.moment2 : NULL;

    if (form.states == LH_ADAM_STATES_4BIT) {
        pairs_decode(first, i, units, &e->m, &e->v);
        return;
    }
    if (form.has_moment1)
        e->m = is_8bit   ? codes1_decode(first, i, units)
               : is_bf16 ? (values)uppers_load(first + i)
                         : (values)words_load(run->moment1, i);
    if (form.has_moment2)
        e->v = is_8bit   ? codes2_decode(second, i, units)
               : is_bf16 ? (values)uppers_load(second + i)
                         : (values)words_load(run->moment2, i);
}

/* Prefetch what follows the elements of an iteration; the array is absent if they have 0 bytes. */
static INLINE void prefetch(const void *array, uint64_t i, const uint64_t element_bytes)
{
    const char *ahead = (const char *)array + (i + PREFETCH_ELEMENTS) * element_bytes;

#pragma GCC unroll 2
    for (uint64_t at = 0; at < STEP_ELEMENTS * element_bytes; at += CACHE_LINE_BYTES)
        __builtin_prefetch(ahead + at);
}

/* Prefetch what follows the elements of an iteration in every array. */
static INLINE void prefetch_all(const struct lh_adam_run *run, const struct stored *stored,
                                uint64_t i, const struct form form)
{
    const bool is_stored = form.states != LH_ADAM_STATES_F32;
    const uint64_t moment1_bytes = lh_adam_moment1_bytes(form.states);
    const uint64_t moment2_bytes = lh_adam_moment2_bytes(form.states);

    prefetch(run->param, i, lh_dtype_bytes(form.param));
    if (run->gradient_dtype == LH_DTYPE_F32)
        prefetch(run->gradient, i, 4);
    else
        prefetch(run->gradient, i, 2);
    prefetch(run->residual, i, lh_adam_residual_bytes(form.param));
    if (form.has_moment1)
        prefetch(is_stored ? stored->moments.moment1 : run->moment1, i, moment1_bytes);
    if (form.has_moment2 && moment2_bytes > 0)
        prefetch(is_stored ? stored->moments.moment2 : run->moment2, i, moment2_bytes);
}

/* Extend the checksum of a stream by what an iteration reads from it. */
static INLINE void read_fold(struct folds *folds, const enum lh_adam_stream stream,
                             const void *array, uint64_t i, const uint64_t element_bytes,
                             const enum lh_adam_folding folding)
{
    const char *source = (const char *)array + i * element_bytes;

    if (READS_ARE_FOLDED(folding)) {
#pragma GCC unroll 2
        for (uint64_t at = 0; at < STEP_ELEMENTS * element_bytes; at += VECTOR_BYTES)
            fold(&folds->sums[stream], words_load(source + at, 0), folding);
        return;
    }
#pragma GCC unroll 16
    for (uint64_t at = 0; at < STEP_ELEMENTS * element_bytes; at += sizeof(uint64_t)) {
        uint64_t word;

        memcpy(&word, source + at, sizeof(word));
        folds->crcs[stream] = word_crc(folds->crcs[stream], word);
    }
}

/* Extend the checksums of what an iteration reads, before it is overwritten. */
static INLINE void reads_fold(struct folds *folds, const struct lh_adam_run *run, uint64_t i,
                              const struct form form)
{
    if (form.folding == LH_ADAM_FOLDING_NONE)
        return;
    read_fold(folds, LH_ADAM_STREAM_RESIDUAL_READ, run->residual, i,
              lh_adam_residual_bytes(form.param), form.folding);
    if (form.has_moment1)
        read_fold(folds, LH_ADAM_STREAM_MOMENT1_READ, run->moment1, i, 4, form.folding);
    if (form.has_moment2)
        read_fold(folds, LH_ADAM_STREAM_MOMENT2_READ, run->moment2, i, 4, form.folding);
}

/* Store a vector at an element of an array, and extend the checksum of its stream. */
static INLINE void written_store(struct folds *folds, const enum lh_adam_stream stream, void *array,
                                 uint64_t i, const uint64_t element_bytes, words written,
                                 const struct form form)
{
    words_store(array, i, element_bytes, written);
    if (form.folding != LH_ADAM_FOLDING_NONE)
        fold(&folds->sums[stream], written, form.folding);
}

/* Store two vectors of masters, as [Note: 12P] and [Note: 14P] have them. */
static INLINE void params_store(struct folds *folds, const struct lh_adam_run *run, uint64_t i,
                                const values masters[2], const struct form form)
{
    const words low = (words)masters[0], high = (words)masters[1];
    const bool is_f16 = form.param == LH_DTYPE_F16;

    if (form.param == LH_DTYPE_BF16) {
        written_store(folds, LH_ADAM_STREAM_PARAM, run->param, i, 2,
                      uppers_of(low + 0x8000, high + 0x8000), form);
        written_store(folds, LH_ADAM_STREAM_RESIDUAL, run->residual, i, 2, lowers_of(low, high),
                      form);
        return;
    }
    for (uint64_t half = 0; half < 2; half++)
        written_store(folds, is_f16 ? LH_ADAM_STREAM_RESIDUAL : LH_ADAM_STREAM_PARAM,
                      is_f16 ? run->residual : run->param, i + half * LANES, 4, half ? high : low,
                      form);
    if (is_f16)
        written_store(folds, LH_ADAM_STREAM_PARAM, run->param, i, 2,
                      halves_of(masters[0], masters[1]), form);
}

/* Store a vector of new moments, or round them to bf16, which two vectors fill. */
static INLINE void moments_store(struct folds *folds, const struct lh_adam_run *run,
                                 const struct stored *stored, uint64_t i, const struct element *e,
                                 words rounded_out[2], const struct form form)
{
    const bool has_roots =
        lh_adam_has_scales(form.states) || (form.folding == LH_ADAM_FOLDING_NONE && run->has_roots);

    if (form.states == LH_ADAM_STATES_BF16) {
        const words random = words_load(stored->random, i);

        rounded_out[0] = randomized(e->m, random >> 16);
        rounded_out[1] = randomized(e->v, random & 0xFFFF);
        return;
    }
    if (form.has_moment1)
        written_store(folds, LH_ADAM_STREAM_MOMENT1, run->moment1, i, 4, (words)nan_settled(e->m),
                      form);
    if (form.has_moment2)
        written_store(folds, LH_ADAM_STREAM_MOMENT2, run->moment2, i, 4,
                      (words)nan_settled(has_roots ? root_of(e->v) : e->v), form);
}

/*
 * Returns the number of elements updated: a multiple of STEP_ELEMENTS. The run and the scalars are
 * copied, because the compiler cannot know that no store changes them.
 */
static INLINE uint64_t body(const struct lh_adam_run *run_of, const struct lh_adam_scalars *scalars,
                            const struct stored *stored, const struct form form,
                            struct folds *folds_out)
{
    const struct lh_adam_run run = *run_of;
    const struct lh_adam_scalars constants = *scalars;
    const uint64_t count = run.count / STEP_ELEMENTS * STEP_ELEMENTS;
    struct folds folds = {0};
    flags nans = {0};

    for (uint64_t i = 0; i < count; i += STEP_ELEMENTS) {
        words rounded[2][2];
        values masters[2];
        struct units units = {0};

        if (lh_adam_has_scales(form.states))
            units = units_of(&stored->moments, i, form.states);
        prefetch_all(&run, stored, i, form);
        reads_fold(&folds, &run, i, form);
#pragma GCC unroll 2
        for (uint64_t half = 0; half < 2; half++) {
            const uint64_t at = i + half * LANES;
            struct element e = {
                .p = param_load(&run, at, form.param),
                .g = gradient_load(&run, at) * splat(constants.gradient_scale),
            };

            moments_load(&e, &run, stored, at, units, form);
            form.rule(&e, &constants);
            moments_store(&folds, &run, stored, at, &e, rounded[half], form);
            nans |= nan_of(e.p);
            masters[half] = nan_settled(e.p);
        }
        params_store(&folds, &run, i, masters, form);
        if (form.states == LH_ADAM_STATES_BF16 && form.has_moment1)
            words_store(stored->moments.moment1, i, 2, uppers_of(rounded[0][0], rounded[1][0]));
        if (form.states == LH_ADAM_STATES_BF16 && form.has_moment2)
            words_store(stored->moments.moment2, i, 2, uppers_of(rounded[0][1], rounded[1][1]));
    }
    if (run.has_nan && any_of(nans))
        *run.has_nan = true;
    if (form.folding != LH_ADAM_FOLDING_NONE)
        *folds_out = folds;
    return count;
}

/* The body for the parameters' dtype. form: without it. */
static INLINE uint64_t body_by_param(const struct lh_adam_run *run,
                                     const struct lh_adam_scalars *scalars,
                                     const struct stored *stored, struct form form,
                                     struct folds *folds_out)
{
    LH_ASSERT((run->residual != NULL) == (lh_adam_residual_bytes(run->param_dtype) > 0));
    form.param = LH_DTYPE_BF16;
    if (run->param_dtype == LH_DTYPE_BF16)
        return body(run, scalars, stored, form, folds_out);
    form.param = LH_DTYPE_F16;
    if (run->param_dtype == LH_DTYPE_F16)
        return body(run, scalars, stored, form, folds_out);
    form.param = LH_DTYPE_F32;
    return body(run, scalars, stored, form, folds_out);
}

/* Update a run, whose last elements are left to the definition. */
static INLINE void update(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars,
                          enum lh_rule rule, const struct form form)
{
    uint64_t done = body_by_param(run, scalars, NULL, form, NULL);

    if (done < run->count) {
        struct lh_adam_run rest = lh_adam_run_from(run, done);

        lh_rule_ref[rule](&rest, scalars);
    }
}

/* Update a run of whole iterations, and compute its checksums. */
static INLINE void checking_update(const struct lh_adam_run *run,
                                   const struct lh_adam_scalars *scalars, uint32_t *crcs_out,
                                   const struct form form)
{
    struct folds folds;
    uint64_t done = body_by_param(run, scalars, NULL, form, &folds);

    LH_ASSERT(done == run->count);
    for (int stream = 0; stream < LH_ADAM_STREAM_COUNT; stream++)
        crcs_out[stream] = stream >= LH_ADAM_STREAM_PARAM || READS_ARE_FOLDED(form.folding)
                               ? sum_crc(&folds.sums[stream], form.folding)
                               : ~(uint32_t)folds.crcs[stream];
}

/* Update whole blocks whose moments are not in fp32. */
static INLINE void stored_update(const struct lh_adam_run *run,
                                 const struct lh_adam_scalars *scalars,
                                 const struct lh_adam_moments *moments, const uint32_t *random,
                                 struct form form)
{
    const struct stored stored = {*moments, random};
    uint64_t done = 0;

    if (!form.has_moment1 && !form.has_moment2)
        return;
    form.states = LH_ADAM_STATES_BF16;
    if (moments->states == LH_ADAM_STATES_BF16) {
        done = body_by_param(run, scalars, &stored, form, NULL);
    } else if (moments->states == LH_ADAM_STATES_8BIT) {
        form.states = LH_ADAM_STATES_8BIT;
        done = body_by_param(run, scalars, &stored, form, NULL);
    } else if (form.has_moment1 && form.has_moment2) {
        form.states = LH_ADAM_STATES_4BIT;
        done = body_by_param(run, scalars, &stored, form, NULL);
    }
    LH_ASSERT(done == run->count);
}

#define RUN(rule, name, has_moment1, has_moment2)                                                  \
    static void name##_run(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars)   \
    {                                                                                              \
        update(run, scalars, (rule), (struct form){name, has_moment1, has_moment2, 0, 0, 0});      \
    }
#define CHECKING(name, has_moment1, has_moment2, folding, suffix)                                  \
    static void name##suffix(const struct lh_adam_run *run, const struct lh_adam_scalars *scalars, \
                             uint32_t crcs_out[LH_ADAM_STREAM_COUNT])                              \
    {                                                                                              \
        checking_update(run, scalars, crcs_out,                                                    \
                        (struct form){name, has_moment1, has_moment2, folding, 0, 0});             \
    }
#define WIDE(rule, name, has_moment1, has_moment2)                                                 \
    CHECKING(name, has_moment1, has_moment2, LH_ADAM_FOLDING_WIDE, _folding)
#define NARROW(rule, name, has_moment1, has_moment2)                                               \
    CHECKING(name, has_moment1, has_moment2, LH_ADAM_FOLDING_NARROW, _pclmul)
#define STORED(rule, name, has_moment1, has_moment2)                                               \
    static void name##_stored(const struct lh_adam_run *run,                                       \
                              const struct lh_adam_scalars *scalars,                               \
                              const struct lh_adam_moments *moments, const uint32_t *random)       \
    {                                                                                              \
        stored_update(run, scalars, moments, random,                                               \
                      (struct form){name, has_moment1, has_moment2, 0, 0, 0});                     \
    }
#define RUN_ENTRY(rule, name, has_moment1, has_moment2) [rule] = name##_run,
#define WIDE_ENTRY(rule, name, has_moment1, has_moment2) [rule] = name##_folding,
#define NARROW_ENTRY(rule, name, has_moment1, has_moment2) [rule] = name##_pclmul,
#define STORED_ENTRY(rule, name, has_moment1, has_moment2) [rule] = name##_stored,

/* The functions of each rule, and the tables of them. */
RULES_EACH(RUN)
RULES_EACH(WIDE)
RULES_EACH(STORED)
const lh_adam_fn TABLE(_run)[LH_RULE_COUNT] = {RULES_EACH(RUN_ENTRY)};
const lh_adam_checking_fn TABLE(_folding)[LH_RULE_COUNT] = {RULES_EACH(WIDE_ENTRY)};
const lh_adam_stored_fn TABLE(_stored)[LH_RULE_COUNT] = {RULES_EACH(STORED_ENTRY)};
#ifdef HAS_NARROW_FOLDING
/* The same without VPCLMULQDQ. */
RULES_EACH(NARROW)
const lh_adam_checking_fn TABLE(_pclmul)[LH_RULE_COUNT] = {RULES_EACH(NARROW_ENTRY)};
#endif

#endif
