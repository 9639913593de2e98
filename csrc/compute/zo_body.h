/*
 * A kernel of zo.h for vectors of any width, with the compiler's own vector types. Each file that
 * includes this header defines the width (VECTOR_BYTES), the names of its functions (KERNEL and
 * WORDS), the asm constraint of a vector (REGISTER), the counters of the lanes of the first of two
 * vectors (LANE_COUNTERS), the schedule (below), and the operations for which the target machine
 * has special instructions. During Philox, a word takes 64 bits per counter, because products have
 * 64 bits; the upper halves do not matter, because a product reads only lower halves.
 *
 * [Note: Interleaving] Every operation waits for the previous one: seven cycles for a product, a
 * shift and an exclusive or, eighty for a logarithm and its root. A processor fills the gaps with
 * nearby instructions, but it holds only about a hundred waiting operations, so that long waits
 * block instructions that could run. Therefore a span's words are generated in between the steps
 * that turn the words of the previous span into numbers, and every step is placed about where its
 * operands are ready: two vectors of numbers advance side by side, and their turns follow their
 * radii with a delay, if registers allow. If the words are for rounding, a vector is rounded at
 * regular intervals. Each file defines its own schedule; its values are the best of some hundred
 * that were measured on Zen 5, where a good schedule saves 5 % of the time:
 *
 *      CHAINS          vectors of counters processed side by side: as many as the registers hold
 *      CHAIN_DELAY     from one chain to the next
 *      ROUND_TIME      from one round of a chain to the next
 *      ROUND_9_DELAY   additional delay of the last round
 *      PAIR_TIME       from two vectors of numbers to the next two
 *      RADIUS_TIME     from one step of a radius to the next
 *      TURN_DELAY      from a radius to its turn
 *      TURN_TIME       from one step of a turn to the next
 *      END_DELAY       additional delay, for the root, until radius and turn are combined
 *
 * PIN keeps the compiler from regrouping the steps; HIDE keeps it from holding constants in the
 * registers that the counters need.
 */
#ifndef LH_COMPUTE_ZO_BODY_H
#define LH_COMPUTE_ZO_BODY_H

#include <string.h>

#include "compute/zo_kernels.h"
#include "compute/zo_round.h"
#include "compute/zo_vectors.h"

#define LANES (VECTOR_BYTES / 4)
#define VECTORS (LH_ZO_COUNTERS / LANES) /* per word of a block */
#define RADIUS_STEPS 9
#define TURN_STEPS 6
#define SECOND_DELAY 2 /* the delay of the second of two vectors of numbers */
#define TURN_END (TURN_DELAY + TURN_STEPS * TURN_TIME + END_DELAY)
/* The times at which the last steps are due. */
#define WORDS_TIME ((CHAINS - 1) * CHAIN_DELAY + 8 * ROUND_TIME + ROUND_9_DELAY)
#define NUMBERS_TIME ((CHAINS / 2 - 1) * PAIR_TIME + SECOND_DELAY + TURN_END)
_Static_assert(TURN_END > (RADIUS_STEPS - 1) * RADIUS_TIME, "a radius is ready at the end");
/* The chains produce a part: COLUMNS vectors of each word. PARTS of them fill whole blocks. */
#define COLUMNS (CHAINS / 2)
#define PARTS (VECTORS > COLUMNS ? VECTORS / COLUMNS : 1)
#define PART (COLUMNS * LH_ZO_WORDS)         /* vectors per part */
#define ROUNDED_TIME (9 * ROUND_TIME / PART) /* the time from one rounded vector to the next */
_Static_assert((PART - 1) * ROUNDED_TIME <= WORDS_TIME, "all vectors of a part are rounded");
#define SPAN (PARTS * COLUMNS * LANES * LH_ZO_WORDS)
/* Elements whose counters have the same high bits. */
#define EPOCH (UINT64_C(4) << 32)

/* The words of a span, or the numbers made from them. */
struct span {
    words at[SPAN / LANES];
};

/* The keys of the rounds for words 0 and 2, including all that an epoch's counters share. */
struct keys {
    key low[LH_ZO_ROUND_COUNT];
    key high[LH_ZO_ROUND_COUNT];
};

/* A key for vectors with 64 or 32 bits per counter. */
static INLINE key key_of(uint32_t word)
{
    return (key){0} + word * UINT64_C(0x100000001);
}

/*
 * Compute the keys from the seed and Weyl's sequence. Within an epoch only the lowest word of a
 * counter varies, so half of the first two rounds is computed here, once, and merged into the keys.
 */
static void keys_make(struct keys *keys, const struct lh_zo_stream *stream, uint64_t counter)
{
    const uint32_t low = (uint32_t)stream->seed, high = (uint32_t)(stream->seed >> 32);
    uint64_t product1 = (uint64_t)stream->param * LH_ZO_MULTIPLIER_1;
    uint32_t word1 = (uint32_t)(counter >> 32) | stream->sample << 16;
    uint32_t word0 = (uint32_t)(product1 >> 32) ^ word1 ^ low;
    uint64_t product0 = (uint64_t)word0 * LH_ZO_MULTIPLIER_0;
    for (uint32_t i = 1; i < LH_ZO_ROUND_COUNT; i++) {
        keys->low[i] = key_of(low + i * LH_ZO_WEYL_0);
        keys->high[i] = key_of(high + i * LH_ZO_WEYL_1);
    }
    keys->high[0] = key_of(high ^ stream->step);
    keys->low[1] = key_of((low + LH_ZO_WEYL_0) ^ (uint32_t)product1);
    keys->high[1] = key_of((high + LH_ZO_WEYL_1) ^ (uint32_t)(product0 >> 32));
    keys->high[2] = key_of((high + 2 * LH_ZO_WEYL_1) ^ (uint32_t)product0);
}

struct chains {
    longs word[CHAINS][LH_ZO_WORDS];
};

/* Round 0 of all chains, with counters from first on: products of consecutive counters are sums. */
static INLINE void chains_begin(struct chains *chains, const struct keys *keys, uint64_t first)
{
    const longs zero = {0};
    longs start = zero + (uint32_t)first * (uint64_t)LH_ZO_MULTIPLIER_0;
#pragma GCC unroll 4
    for (int i = 0; i < CHAINS; i++) {
        longs lanes = (longs){LANE_COUNTERS} + (uint64_t)(i / 2 * LANES + i % 2 * 2);
        longs *word = chains->word[i];
        word[3] = start + lanes * LH_ZO_MULTIPLIER_0;
        word[2] = (word[3] >> 32) ^ (zero + keys->high[0]);
        PIN(word[2]);
    }
}

/* Run one of the rounds 1 to 8 of a chain. */
static INLINE void chain_continue(longs word[LH_ZO_WORDS], const struct keys *keys, int round)
{
    const longs zero = {0};
    longs low = zero + keys->low[round], high = zero + keys->high[round];
    longs product1 = multiply32(word[2], zero + LH_ZO_MULTIPLIER_1);
    if (round == 1) {
        word[0] = (product1 >> 32) ^ low;
        word[2] = word[3] ^ high;
    } else {
        longs product0 = multiply32(word[0], zero + LH_ZO_MULTIPLIER_0);
        word[0] = xor3(product1 >> 32, word[1], low);
        word[2] = round == 2 ? (product0 >> 32) ^ high : xor3(product0 >> 32, word[3], high);
        word[3] = product0;
    }
    word[1] = product1;
    PIN(word[0]);
    PIN(word[2]);
}

/* Run round 9 of two chains, and pack their words to 32 bits per counter. */
static INLINE void chains_end(longs a[LH_ZO_WORDS], longs b[LH_ZO_WORDS], const struct keys *keys,
                              words *out)
{
    const longs zero = {0};
    longs low = zero + keys->low[9], high = zero + keys->high[9];
    longs a1 = multiply32(a[2], zero + LH_ZO_MULTIPLIER_1);
    longs b1 = multiply32(b[2], zero + LH_ZO_MULTIPLIER_1);
    out[0] = (words)xor3((longs)uppers_of(a1, b1), (longs)lowers_of(a[1], b[1]), low);
    out[VECTORS] = lowers_of(a1, b1);
    longs a0 = multiply32(a[0], zero + LH_ZO_MULTIPLIER_0);
    longs b0 = multiply32(b[0], zero + LH_ZO_MULTIPLIER_0);
    out[2 * VECTORS] = (words)xor3((longs)uppers_of(a0, b0), (longs)lowers_of(a[3], b[3]), high);
    out[3 * VECTORS] = lowers_of(a0, b0);
}

/*
 * The constants of zo_kernels.h, scaled for f / 2 and x / 2, so that the factor of the squares is
 * 1. Powers of two do not affect rounding, and they cancel here.
 */
static const struct constants {
    int_constant one, root_half, mantissa, half_mantissa, rest, eighth;
    float_constant l[7], ln_2, s[3], c[2], angle, half, minus_16;
} constants = {
    .one = EACH(1),
    .root_half = EACH(LH_ZO_ROOT_HALF_BITS + (24 << 23)), /* U has 24 bits */
    .mantissa = EACH((1 << 23) - 1),
    .half_mantissa = EACH(LH_ZO_ROOT_HALF_BITS - (1 << 23)),
    .rest = EACH(~0xFF),
    .eighth = EACH(1 << 29),
    .l = {EACH(LH_ZO_L0 * 4), EACH(LH_ZO_L1 * 8), EACH(LH_ZO_L2 * 16), EACH(LH_ZO_L3 * 32),
          EACH(LH_ZO_L4 * 64), EACH(LH_ZO_L5 * 128), EACH(LH_ZO_L6 * 256)},
    .ln_2 = EACH(LH_ZO_LN_2 / 0x1p24f), /* half of it, for exponents shifted left by 23 bits */
    .s = {EACH(LH_ZO_S0 * 4), EACH(LH_ZO_S1 * 16), EACH(LH_ZO_S2 * 64)},
    .c = {EACH(LH_ZO_C0 * 8), EACH(LH_ZO_C1 * 32)},
    .angle = EACH(LH_ZO_ANGLE_SCALE / 2),
    .half = EACH(0.5f),
    .minus_16 = EACH(-16.0f),
};

/* Intermediate results between two vectors of words and two vectors of numbers. */
struct normals {
    ints bits;
    floats exponent, f, f_square, log, x, square, sine, cosine;
};

/* Run a step of radius_of(), which zo_ref.c explains. at: the words. */
static INLINE void radius_continue(struct normals *n, int step, const words *at)
{
    const struct constants *k = &constants;
    HIDE(k);
    if (step == 0) {
        n->bits = (ints) __builtin_convertvector((ints)(at[0] >> 8) + k->one, floats);
        n->bits -= k->root_half;
        PIN(n->bits);
    } else if (step == 1) {
        ints mantissa = n->bits & k->mantissa;
        n->bits -= mantissa;
        n->f = (floats)(mantissa + k->half_mantissa) - k->half;
        PIN(n->bits);
        PIN(n->f);
    } else if (step == 2) {
        n->exponent = __builtin_convertvector(n->bits, floats) * k->ln_2;
        n->log = k->l[6] * n->f + k->l[5];
        PIN(n->exponent);
    } else if (step == 8) {
        n->log = (n->f - n->f_square) + (n->f_square * n->f) * n->log;
        n->log = root((n->exponent + n->log) * k->minus_16);
    }
    if (step == 6) {
        n->f_square = n->f * n->f;
        PIN(n->f_square);
    }
    if (step >= 3 && step <= 7)
        n->log = n->log * n->f + k->l[7 - step];
    if (step >= 2 && step <= 8)
        PIN(n->log);
}

/* Run a step of turn_of(). */
static INLINE void turn_continue(struct normals *n, int step, const words *at)
{
    const struct constants *k = &constants;
    HIDE(k);
    if (step == 0) {
        n->x = __builtin_convertvector((ints)(at[VECTORS] << 2) & k->rest, floats) * k->angle;
        PIN(n->x);
    } else if (step == 1) {
        n->square = n->x * n->x;
        PIN(n->square);
    } else if (step == 2) {
        n->sine = k->s[2] * n->square + k->s[1];
        n->cosine = k->c[1] * n->square + k->c[0];
        PIN(n->sine);
        PIN(n->cosine);
    } else if (step == 3) {
        n->sine = n->sine * n->square + k->s[0];
        PIN(n->sine);
    } else if (step == 4) {
        n->sine = n->x + (n->x * n->square) * n->sine;
        PIN(n->sine);
    } else if (step == 5) {
        n->cosine = (k->half - n->square) + (n->square * n->square) * n->cosine;
        PIN(n->cosine);
    }
}

/* Apply the quarter turn and the radius, and store the numbers. */
static INLINE void normals_end(struct normals *n, words *at)
{
    const struct constants *k = &constants;
    HIDE(k);
    words eighth = (words)((ints){0} + k->eighth);
    words quarter = at[VECTORS] + eighth; /* in the two highest bits */
    floats radius = (floats)((words)n->log ^ (quarter & (UINT32_C(1) << 31)));
    turn_quarter(quarter, &n->cosine, &n->sine);
    at[0] = (words)(radius * n->cosine);
    at[VECTORS] = (words)(radius * n->sine);
}

/* The place of the i-th vector of words 0 or 2; that of words 1 or 3 is VECTORS further on. */
static INLINE words *place_of(words *at, int i)
{
    int column = i / 2;
    return at + (column / VECTORS * LH_ZO_WORDS + i % 2 * 2) * VECTORS + column % VECTORS;
}

/* Run the steps of words that are due at a time. */
static INLINE void chains_continue(struct chains *chains, const struct keys *keys, int time,
                                   words *made)
{
#pragma GCC unroll 4
    for (int i = 0; i < CHAINS; i++) {
        int since = time - i * CHAIN_DELAY;
        if (since >= 0 && since % ROUND_TIME == 0 && since < 8 * ROUND_TIME)
            chain_continue(chains->word[i], keys, 1 + since / ROUND_TIME);
        if (i % 2 == 1 && since == 8 * ROUND_TIME + ROUND_9_DELAY)
            chains_end(chains->word[i - 1], chains->word[i], keys, place_of(made, i - 1));
    }
}

/* Run the steps of numbers that are due at a time. */
static INLINE void numbers_continue(struct normals normals[CHAINS], int time, words *numbers)
{
#pragma GCC unroll 4
    for (int i = 0; i < CHAINS; i++) {
        int since = time - i / 2 * PAIR_TIME - i % 2 * SECOND_DELAY;
        int since_turn = since - TURN_DELAY;
        words *at = place_of(numbers, i);
        if (since_turn >= 0 && since_turn % TURN_TIME == 0 && since_turn < TURN_STEPS * TURN_TIME)
            turn_continue(&normals[i], since_turn / TURN_TIME, at);
        if (since == TURN_END)
            normals_end(&normals[i], at);
    }
#pragma GCC unroll 4
    for (int i = 0; i < CHAINS; i++) {
        int since = time - i / 2 * PAIR_TIME - i % 2 * SECOND_DELAY;
        if (since >= 0 && since % RADIUS_TIME == 0 && since < RADIUS_STEPS * RADIUS_TIME)
            radius_continue(&normals[i], since / RADIUS_TIME, place_of(numbers, i));
    }
}

/* A part of a span whose elements are to be rounded with the words in random. */
struct rounds {
    enum lh_zo_format format;
    float *values;
    const float *source;
    const words *random;
};

/* Round one vector of the part. */
static INLINE void rounds_continue(const struct rounds *rounds, int vector)
{
    words bits;
    memcpy(&bits, rounds->source + vector * LANES, sizeof(bits));
    bits = rounded(bits, rounds->random[vector], rounds->format);
    memcpy(rounds->values + vector * LANES, &bits, sizeof(bits));
}

/*
 * Run a whole schedule. It stores the words of the counters from first on in made, converts the
 * words in numbers to numbers in place, and rounds the elements of rounds. Each may be NULL.
 */
static INLINE void stages_advance(const struct keys *keys, uint64_t first, words *made,
                                  words *numbers, const struct rounds *rounds)
{
    struct chains chains;
    struct normals normals[CHAINS];
    if (made)
        chains_begin(&chains, keys, first);
#pragma GCC unroll 100
    for (int time = 0; time <= WORDS_TIME || time <= NUMBERS_TIME; time++) {
        if (numbers)
            numbers_continue(normals, time, numbers);
        if (made)
            chains_continue(&chains, keys, time, made);
        if (rounds && time % ROUNDED_TIME == 0 && time < PART * ROUNDED_TIME)
            rounds_continue(rounds, time / ROUNDED_TIME);
    }
}

/*
 * Make only words, for the first span. This function and the next two are separate so that the
 * compiler keeps their arrays in registers.
 */
static NOINLINE void words_make(const struct keys *keys, uint64_t first, words *made)
{
    stages_advance(keys, first, made, NULL, NULL);
}

/* Make a span's words, and numbers from the words of the previous span. */
static NOINLINE void both_make(const struct keys *keys, uint64_t first, words *restrict made,
                               words *restrict numbers)
{
    stages_advance(keys, first, made, numbers, NULL);
}

/* Make numbers from the last words. */
static NOINLINE void numbers_make(words *numbers)
{
    stages_advance(NULL, 0, NULL, numbers, NULL);
}

/* Apply one op, like applied() in zo_ref.c, from source to values. */
static INLINE void apply(const struct lh_zo_op *op, float *values, const float *source,
                         const struct span *z, uint64_t count)
{
    const floats zero = {0};
    /* Subtract zero to broadcast: adding it would turn -0 into +0. */
    floats scale = op->scale - zero, lr = op->lr - zero, decay = op->decay - zero;
#define APPLY(expression)                                                                          \
    _Pragma("GCC unroll 8") for (uint64_t i = 0; i < count; i += LANES)                            \
    {                                                                                              \
        floats now = (floats)z->at[i / LANES], value;                                              \
        memcpy(&value, source + i, sizeof(value));                                                 \
        value = (expression);                                                                      \
        memcpy(values + i, &value, sizeof(value));                                                 \
    }
    if (op->kind == LH_ZO_OP_PERTURB)
        APPLY(value + now * scale)
    else if (op->kind == LH_ZO_OP_DRAW)
        APPLY(now)
    else if (op->decay != 0)
        APPLY(value - (now * scale + value * decay) * lr)
    else
        APPLY(value - now * scale * lr)
#undef APPLY
}

/* Make a part's words while another part is rounded. Each format has separate code. */
#define ROUND_INTO(name, constant)                                                                 \
    static NOINLINE void name(const struct keys *keys, uint64_t first, words *restrict made,       \
                              float *values, const float *source, const words *restrict random)    \
    {                                                                                              \
        const struct rounds rounds = {(constant), values, source, random};                         \
        stages_advance(keys, first, made, NULL, &rounds);                                          \
    }
ROUND_INTO(round_into_bf16, LH_ZO_FORMAT_BF16)
ROUND_INTO(round_into_f16, LH_ZO_FORMAT_F16)
ROUND_INTO(round_into_f8, LH_ZO_FORMAT_F8)
#undef ROUND_INTO

/* Round the elements of the last span, whose words exist already. */
static void round_last(enum lh_zo_format format, float *values, const float *source,
                       const struct span *random, uint64_t count)
{
    for (uint64_t i = 0; i < count; i += LANES) {
        words bits;
        memcpy(&bits, source + i, sizeof(bits));
        bits = format == LH_ZO_FORMAT_BF16 ? rounded(bits, random->at[i / LANES], LH_ZO_FORMAT_BF16)
               : format == LH_ZO_FORMAT_F16 ? rounded(bits, random->at[i / LANES], LH_ZO_FORMAT_F16)
                                            : rounded(bits, random->at[i / LANES], LH_ZO_FORMAT_F8);
        memcpy(values + i, &bits, sizeof(bits));
    }
}

/* Apply a ROUND. A span's words are made while the elements of the previous span are rounded. */
static void round_all(const struct lh_zo_op *op, float *values, const float *source, uint64_t first,
                      uint64_t count)
{
    const uint64_t part_counters = COLUMNS * LANES;
    struct keys keys;
    struct span spans[2];
    uint64_t counter = first / LH_ZO_WORDS;
    keys_make(&keys, &op->stream, counter);
    for (int part = 0; part < PARTS; part++, counter += part_counters)
        words_make(&keys, counter, spans[0].at + part * COLUMNS);
    for (uint64_t at = 0; at < count; at += SPAN) {
        struct span *now = &spans[at / SPAN % 2], *next = &spans[1 - at / SPAN % 2];
        uint64_t end = lh_min_u64(SPAN, count - at);
        bool is_plain = rounds_are_plain(source + at, end, op->format);
        bool is_last = at + end == count;
        for (int part = 0; part < PARTS && !is_last; part++, counter += part_counters) {
            uint64_t place = at + (uint64_t)part * PART * LANES;
            words *made = next->at + part * COLUMNS;
            const words *random = now->at + part * PART;
            if (!is_plain)
                words_make(&keys, counter, made);
            else if (op->format == LH_ZO_FORMAT_BF16)
                round_into_bf16(&keys, counter, made, values + place, source + place, random);
            else if (op->format == LH_ZO_FORMAT_F16)
                round_into_f16(&keys, counter, made, values + place, source + place, random);
            else
                round_into_f8(&keys, counter, made, values + place, source + place, random);
        }
        if (!is_plain)
            round_rare(op->format, values + at, source + at, now->at, end);
        else if (is_last)
            round_last(op->format, values + at, source + at, now, end);
    }
}

/* Apply the ops of one z. A span's words are made while the previous span's become numbers. */
static void draw(float *values, const float *source, uint64_t first, uint64_t count,
                 const struct lh_zo_op *ops, uint32_t op_count)
{
    const uint64_t part_counters = COLUMNS * LANES;
    struct keys keys;
    struct span spans[2];
    if (ops[0].kind == LH_ZO_OP_ROUND) {
        if (ops[0].format != LH_ZO_FORMAT_F32)
            round_all(&ops[0], values, source, first, count);
        else if (values != source)
            memcpy(values, source, count * sizeof(*values));
        return;
    }
    uint64_t counter = first / LH_ZO_WORDS;
    keys_make(&keys, &ops[0].stream, counter);
    for (int part = 0; part < PARTS; part++, counter += part_counters)
        words_make(&keys, counter, spans[0].at + part * COLUMNS);
    for (uint64_t at = 0; at < count; at += SPAN) {
        struct span *now = &spans[at / SPAN % 2], *next = &spans[1 - at / SPAN % 2];
        for (int part = 0; part < PARTS; part++, counter += part_counters) {
            if (count - at > SPAN)
                both_make(&keys, counter, next->at + part * COLUMNS, now->at + part * COLUMNS);
            else
                numbers_make(now->at + part * COLUMNS);
        }
        uint64_t part = lh_min_u64(SPAN, count - at);
        if (part == SPAN) /* the count is a constant for the compiler */
            apply(&ops[0], values + at, source + at, now, SPAN);
        else
            apply(&ops[0], values + at, source + at, now, part);
        for (uint32_t i = 1; i < op_count; i++)
            apply(&ops[i], values + at, values + at, now, part);
    }
}

void KERNEL(float *values, const float *source, uint64_t first, uint64_t count,
            const struct lh_zo_op *ops, uint32_t op_count)
{
    const uint64_t batch = 32 * LH_ZO_BLOCK; /* a batch stays in the L1 cache over all ops */
    if (op_count == 0 && source != values)
        memcpy(values, source, count * sizeof(*values));
    for (uint64_t begin = 0, end; op_count > 0 && begin < count; begin = end) {
        uint32_t next;
        end = lh_min_u64(count, begin + EPOCH - (first + begin) % EPOCH);
        for (next = 1; next < op_count && ops[next].is_same; next++)
            ;
        if (next < op_count)
            end = lh_min_u64(end, begin + batch);
        draw(values + begin, source + begin, first + begin, end - begin, ops, next);
        for (uint32_t i = next; i < op_count; i = next) {
            for (next = i + 1; next < op_count && ops[next].is_same; next++)
                ;
            draw(values + begin, values + begin, first + begin, end - begin, ops + i, next - i);
        }
    }
}

/* The words of elements that are drawn for nothing else. */
void WORDS(uint32_t *words_out, uint64_t first, uint64_t count, const struct lh_zo_stream *stream)
{
    const uint64_t part_counters = COLUMNS * LANES;
    struct keys keys;
    for (uint64_t at = 0, end; at < count; at = end) {
        uint64_t counter = (first + at) / LH_ZO_WORDS;
        end = lh_min_u64(count, at + EPOCH - (first + at) % EPOCH);
        keys_make(&keys, stream, counter);
        for (; end - at >= SPAN; at += SPAN)
            for (int part = 0; part < PARTS; part++, counter += part_counters)
                words_make(&keys, counter, (words *)(words_out + at) + part * COLUMNS);
        if (at < end) {
            struct span span;
            for (int part = 0; part < PARTS; part++, counter += part_counters)
                words_make(&keys, counter, span.at + part * COLUMNS);
            memcpy(words_out + at, &span, (end - at) * sizeof(*words_out));
        }
    }
}

#endif
