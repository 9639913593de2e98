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
#define SPAN_BLOCKS (VECTORS == 1 ? 2 : 1)
#define SPAN (SPAN_BLOCKS * LH_ZO_BLOCK)
#define CHAINS 4
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

/* The four words of the counters first[i], first[i] + 2, ... of each chain. */
INLINE void philox(const struct keys *keys, const uint64_t first[CHAINS],
                   longs out[CHAINS][LH_ZO_WORDS])
{
    const longs zero = {0};
    longs steps = zero;
    for (int i = 0; i < LANES / 2; i++)
        steps[i] = 2 * (uint64_t)i;
#pragma GCC unroll 4
    for (int i = 0; i < CHAINS; i++) {
        out[i][0] = steps + first[i];
        out[i][1] = (out[i][0] >> 32) | (zero + ((uint64_t)keys->stream->sample << 16));
        out[i][2] = zero + keys->stream->param;
        out[i][3] = zero + keys->stream->step;
    }
#pragma GCC unroll 10
    for (int round = 0; round < LH_ZO_ROUND_COUNT; round++) {
#pragma GCC unroll 4
        for (int i = 0; i < CHAINS; i++) {
            longs product0 = multiply32(out[i][0], zero + LH_ZO_MULTIPLIER_0);
            longs product1 = multiply32(out[i][2], zero + LH_ZO_MULTIPLIER_1);
            out[i][0] = (product1 >> 32) ^ out[i][1] ^ (zero + keys->low[round]);
            out[i][1] = product1;
            out[i][2] = (product0 >> 32) ^ out[i][3] ^ (zero + keys->high[round]);
            out[i][3] = product0;
        }
    }
}

#define EACH _Pragma("GCC unroll 4") for (int i = 0; i < CHAINS; i++)

/* As radius_of() in zo_ref.c, which says what it is. */
INLINE void radius_of(const words word[CHAINS], floats radius_out[CHAINS])
{
    ints exponent[CHAINS];
    floats f[CHAINS], square[CHAINS], series[CHAINS], log[CHAINS];
    EACH
    {
        ints bits = (ints) __builtin_convertvector((ints)((word[i] >> 8) + 1), floats);
        exponent[i] = (bits - LH_ZO_ROOT_HALF_BITS) >> 23;
        f[i] = (floats)(bits - (exponent[i] << 23)) - 1.0f;
    }
    EACH series[i] = LH_ZO_L6 * f[i] + LH_ZO_L5;
    EACH series[i] = series[i] * f[i] + LH_ZO_L4;
    EACH series[i] = series[i] * f[i] + LH_ZO_L3;
    EACH series[i] = series[i] * f[i] + LH_ZO_L2;
    EACH series[i] = series[i] * f[i] + LH_ZO_L1;
    EACH series[i] = series[i] * f[i] + LH_ZO_L0;
    EACH square[i] = f[i] * f[i];
    EACH log[i] = (f[i] - square[i] * 0.5f) + (square[i] * f[i]) * series[i];
    EACH log[i] = __builtin_convertvector(exponent[i] - 24, floats) * LH_ZO_LN_2 + log[i];
    EACH radius_out[i] = root(log[i] * -2.0f);
}

/* As turn_of() in zo_ref.c. */
INLINE void turn_of(const words word[CHAINS], floats cosine_out[CHAINS], floats sine_out[CHAINS])
{
    const uint32_t sign = UINT32_C(1) << 31;
    floats x[CHAINS], square[CHAINS], sine[CHAINS], cosine[CHAINS];
    EACH
    {
        ints rest = (ints)((word[i] << 2) & ~UINT32_C(0xFF));
        x[i] = __builtin_convertvector(rest, floats) * LH_ZO_ANGLE_SCALE;
    }
    EACH square[i] = x[i] * x[i];
    EACH sine[i] = (LH_ZO_S2 * square[i] + LH_ZO_S1) * square[i] + LH_ZO_S0;
    EACH sine[i] = x[i] + (x[i] * square[i]) * sine[i];
    EACH cosine[i] = LH_ZO_C1 * square[i] + LH_ZO_C0;
    EACH cosine[i] = (1.0f - square[i] * 0.5f) + (square[i] * square[i]) * cosine[i];
    EACH
    {
        words quarter = word[i] + (UINT32_C(1) << 29); /* in the two highest bits */
        ints swaps = (ints)(quarter << 1) >> 31;
        ints swapped = ((ints)sine[i] ^ (ints)cosine[i]) & swaps;
        words at_cosine = (words)((ints)cosine[i] ^ swapped);
        words at_sine = (words)((ints)sine[i] ^ swapped);
        cosine_out[i] = (floats)(at_cosine ^ ((quarter + (UINT32_C(1) << 30)) & sign));
        sine_out[i] = (floats)(at_sine ^ (quarter & sign));
    }
}

/* A vector of words, and of the z that is made of it. */
union lanes {
    words word;
    floats z;
};

/*
 * z of whole spans, in the order of their elements. All words first, then all that is made of them;
 * in both, chains go on beside one another, so that none waits for the step before.
 */
static void draw(const struct keys *keys, uint64_t first, uint64_t count, union lanes *out)
{
    for (uint64_t column = 0; column < count / LANES / LH_ZO_WORDS; column += 2) {
        uint64_t counters[CHAINS];
        longs made[CHAINS][LH_ZO_WORDS];
        EACH counters[i] = first / LH_ZO_WORDS + (column + (uint64_t)i / 2) * LANES + i % 2;
        philox(keys, counters, made);
#pragma GCC unroll 2
        for (uint64_t i = 0; i < 2; i++) {
            uint64_t block = (column + i) / VECTORS;
            union lanes *at = out + block * LH_ZO_WORDS * VECTORS + (column + i) % VECTORS;
#pragma GCC unroll 4
            for (int j = 0; j < LH_ZO_WORDS; j++)
                at[j * VECTORS].word =
                    (words)((made[2 * i][j] & UINT32_MAX) | (made[2 * i + 1][j] << 32));
        }
    }
    for (uint64_t column = 0; column < count / LANES / LH_ZO_WORDS; column += 2) {
        union lanes *at[CHAINS];
        words radii[CHAINS], turns[CHAINS];
        floats radius[CHAINS], cosine[CHAINS], sine[CHAINS];
        EACH
        {
            uint64_t block = (column + (uint64_t)i / 2) / VECTORS;
            uint64_t vector = (column + (uint64_t)i / 2) % VECTORS;
            at[i] = out + (block * LH_ZO_WORDS + (uint64_t)i % 2 * 2) * VECTORS + vector;
            radii[i] = at[i]->word;
            turns[i] = at[i][VECTORS].word;
        }
        radius_of(radii, radius);
        turn_of(turns, cosine, sine);
        EACH
        {
            at[i]->z = radius[i] * cosine[i];
            at[i][VECTORS].z = radius[i] * sine[i];
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

/* One op to count values that are in cache. */
static void apply(const struct lh_zo_op *op, float *values, const union lanes *z, uint64_t count)
{
    for (uint64_t i = 0; i < count; i += LANES) {
        floats value;
        memcpy(&value, values + i, sizeof(value));
        value = applied(op, value, z[i / LANES].z);
        memcpy(values + i, &value, sizeof(value));
    }
}

void KERNEL(float *values, const float *source, uint64_t first, uint64_t count,
            const struct lh_zo_op *ops, uint32_t op_count)
{
    enum { BATCH = 32 * LH_ZO_BLOCK }; /* it stays in the first cache over all ops */
    union lanes z[BATCH / LANES];
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
            draw(&keys, first + begin, lh_align_up(end - begin, SPAN), z);
            for (uint32_t j = i; j < next; j++)
                apply(&ops[j], values + begin, z, end - begin);
        }
    }
}

#endif
