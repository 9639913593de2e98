/*
 * A kernel of zo.h in vectors of any width, with the compiler's own vector types: each file that
 * includes this says how wide (VECTOR_BYTES), how two halves multiply (multiply32), what a square
 * root is (root), and what its kernel is called (KERNEL). Words are kept a counter to 64 bits while
 * Philox goes on, as that is how products come; what their upper halves then hold is of no
 * consequence, because a product reads lower halves alone.
 */
#ifndef LH_COMPUTE_ZO_BODY_H
#define LH_COMPUTE_ZO_BODY_H

#include <string.h>

#include "compute/zo_kernels.h"

#define LANES (VECTOR_BYTES / 4)
#define VECTORS (LH_ZO_COUNTERS / LANES) /* of a word of a block */
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES)));

struct keys {
    uint64_t low[LH_ZO_ROUND_COUNT];
    uint64_t high[LH_ZO_ROUND_COUNT];
    const struct lh_zo_stream *stream;
};

/* What the rounds add: the seed, and so many of Weyl's numbers. */
static void keys_make(struct keys *keys, const struct lh_zo_stream *stream)
{
    for (uint32_t i = 0; i < LH_ZO_ROUND_COUNT; i++) {
        keys->low[i] = (uint32_t)stream->seed + i * LH_ZO_WEYL_0;
        keys->high[i] = (uint32_t)(stream->seed >> 32) + i * LH_ZO_WEYL_1;
    }
    keys->stream = stream;
}

/* Of the counters first, first + 2, ... */
INLINE void philox(const struct keys *keys, uint64_t first, longs out[LH_ZO_WORDS])
{
    const longs zero = {0};
    longs counter = zero + first;
    for (int i = 0; i < LANES / 2; i++)
        counter[i] += 2 * (uint64_t)i;
    longs word0 = counter;
    longs word1 = (counter >> 32) | (zero + ((uint64_t)keys->stream->sample << 16));
    longs word2 = zero + keys->stream->param;
    longs word3 = zero + keys->stream->step;
#pragma GCC unroll 10
    for (int i = 0; i < LH_ZO_ROUND_COUNT; i++) {
        longs product0 = multiply32(word0, zero + LH_ZO_MULTIPLIER_0);
        longs product1 = multiply32(word2, zero + LH_ZO_MULTIPLIER_1);
        word0 = (product1 >> 32) ^ word1 ^ (zero + keys->low[i]);
        word1 = product1;
        word2 = (product0 >> 32) ^ word3 ^ (zero + keys->high[i]);
        word3 = product0;
    }
    out[0] = word0;
    out[1] = word1;
    out[2] = word2;
    out[3] = word3;
}

/* As radius_of() in zo_ref.c, which says what it is. */
INLINE floats radius_of(words word)
{
    ints bits = (ints) __builtin_convertvector((ints)((word >> 8) + 1), floats);
    ints exponent = (bits - LH_ZO_ROOT_HALF_BITS) >> 23;
    floats f = (floats)(bits - (exponent << 23)) - 1.0f;
    floats square = f * f;
    floats series = LH_ZO_L6 * f + LH_ZO_L5;
    series = series * f + LH_ZO_L4;
    series = series * f + LH_ZO_L3;
    series = series * f + LH_ZO_L2;
    series = series * f + LH_ZO_L1;
    series = series * f + LH_ZO_L0;
    floats log = (f - square * 0.5f) + (square * f) * series;
    log = __builtin_convertvector(exponent - 24, floats) * LH_ZO_LN_2 + log;
    return root(log * -2.0f);
}

/* As turn_of() in zo_ref.c. */
INLINE void turn_of(words word, floats *cosine_out, floats *sine_out)
{
    ints rest = (ints)((word << 2) & ~UINT32_C(0xFF));
    floats x = __builtin_convertvector(rest, floats) * LH_ZO_ANGLE_SCALE;
    floats square = x * x;
    floats sine = (LH_ZO_S2 * square + LH_ZO_S1) * square + LH_ZO_S0;
    sine = x + (x * square) * sine;
    floats cosine = LH_ZO_C1 * square + LH_ZO_C0;
    cosine = (1.0f - square * 0.5f) + (square * square) * cosine;
    words quarter = word + (UINT32_C(1) << 29); /* in the two highest bits */
    ints swaps = (ints)(quarter << 1) >> 31;
    ints swapped = ((ints)sine ^ (ints)cosine) & swaps;
    words at_cosine = (words)((ints)cosine ^ swapped);
    words at_sine = (words)((ints)sine ^ swapped);
    const uint32_t sign = UINT32_C(1) << 31;
    *cosine_out = (floats)(at_cosine ^ ((quarter + (UINT32_C(1) << 30)) & sign));
    *sine_out = (floats)(at_sine ^ (quarter & sign));
}

/* Vectors of a block, in the order of its elements. */
INLINE void draw(const struct keys *keys, uint64_t first, floats z_out[LH_ZO_WORDS * VECTORS])
{
    for (int i = 0; i < VECTORS; i++) {
        longs even[LH_ZO_WORDS];
        longs odd[LH_ZO_WORDS];
        uint64_t counter = first / LH_ZO_WORDS + (uint64_t)(i * LANES);
        philox(keys, counter, even);
        philox(keys, counter + 1, odd);
        for (int j = 0; j < LH_ZO_WORDS; j += 2) {
            words word0 = (words)((even[j] & UINT32_MAX) | (odd[j] << 32));
            words word1 = (words)((even[j + 1] & UINT32_MAX) | (odd[j + 1] << 32));
            floats cosine, sine;
            floats radius = radius_of(word0);
            turn_of(word1, &cosine, &sine);
            z_out[j * VECTORS + i] = radius * cosine;
            z_out[(j + 1) * VECTORS + i] = radius * sine;
        }
    }
}

/* As applied() in zo_ref.c. */
INLINE floats applied(const struct lh_zo_op *op, floats value, floats z)
{
    if (op->kind == LH_ZO_OP_PERTURB)
        return value + z * op->scale;
    if (op->kind == LH_ZO_OP_DRAW)
        return z;
    z = z * op->scale;
    if (op->decay != 0)
        z = z + value * op->decay;
    return value - z * op->lr;
}

/* Of a block that is in cache. */
INLINE void apply(const struct lh_zo_op *op, float *values, const floats z[LH_ZO_WORDS * VECTORS])
{
    for (int i = 0; i < LH_ZO_WORDS * VECTORS; i++) {
        floats value;
        memcpy(&value, values + (size_t)i * LANES, sizeof(value));
        value = applied(op, value, z[i]);
        memcpy(values + (size_t)i * LANES, &value, sizeof(value));
    }
}

void KERNEL(float *values, const float *source, uint64_t first, uint64_t count,
            const struct lh_zo_op *ops, uint32_t op_count)
{
    enum { BATCH = 32 * LH_ZO_BLOCK }; /* its values stay in the first cache over all ops */
    for (uint64_t begin = 0; begin < count; begin += BATCH) {
        uint64_t end = lh_min_u64(begin + BATCH, count);
        uint32_t next;
        if (source != values)
            memcpy(values + begin, source + begin, (end - begin) * sizeof(*values));
        for (uint32_t i = 0; i < op_count; i = next) {
            struct keys keys;
            keys_make(&keys, &ops[i].stream);
            next = i + 1;
            while (next < op_count && ops[next].is_same)
                next++;
            for (uint64_t at = begin; at < end; at += LH_ZO_BLOCK) {
                floats z[LH_ZO_WORDS * VECTORS];
                draw(&keys, first + at, z);
                for (uint32_t j = i; j < next; j++)
                    apply(&ops[j], values + at, z);
            }
        }
    }
}

#endif
