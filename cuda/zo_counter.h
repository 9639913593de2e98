/*
 * Passes of zeroth-order training, one thread per counter, with the same bits as lh_zo_ref() and
 * lh_zo_lead() (csrc/compute): for the GPU, and as plain C for the tests.
 */
#ifndef CUDA_ZO_COUNTER_H
#define CUDA_ZO_COUNTER_H

#include "zo_kept.h"
#include "zo_numbers.h"

/* Replace the counter in words by its block of Philox 4x32-10. */
ZO_FUNCTION void zo_philox(uint32_t words[LH_ZO_WORDS], uint32_t key0, uint32_t key1)
{
    for (int i = 0; i < LH_ZO_ROUND_COUNT; i++) {
        uint64_t product0 = (uint64_t)words[0] * LH_ZO_MULTIPLIER_0;
        uint64_t product1 = (uint64_t)words[2] * LH_ZO_MULTIPLIER_1;
        words[0] = (uint32_t)(product1 >> 32) ^ words[1] ^ key0;
        words[1] = (uint32_t)product1;
        words[2] = (uint32_t)(product0 >> 32) ^ words[3] ^ key1;
        words[3] = (uint32_t)product0;
        key0 += LH_ZO_WEYL_0;
        key1 += LH_ZO_WEYL_1;
    }
}

/* (L6 f + L5) f + ... + L0 */
ZO_FUNCTION float zo_log_series(float f)
{
    float series = ZO_ADD(ZO_MUL(LH_ZO_L6, f), LH_ZO_L5);
    series = ZO_ADD(ZO_MUL(series, f), LH_ZO_L4);
    series = ZO_ADD(ZO_MUL(series, f), LH_ZO_L3);
    series = ZO_ADD(ZO_MUL(series, f), LH_ZO_L2);
    series = ZO_ADD(ZO_MUL(series, f), LH_ZO_L1);
    return ZO_ADD(ZO_MUL(series, f), LH_ZO_L0);
}

/* sqrt(-2 ln U), where U is a multiple of 2^-24 in (0, 1] made from word. */
ZO_FUNCTION float zo_radius(uint32_t word)
{
    float whole = (float)((word >> 8) + 1); /* exact */
    float mantissa;
    int32_t bits;
    memcpy(&bits, &whole, sizeof(bits));
    int32_t exponent = (bits - LH_ZO_ROOT_HALF_BITS) >> 23;
    bits -= exponent * (1 << 23);
    memcpy(&mantissa, &bits, sizeof(mantissa));
    float f = ZO_SUB(mantissa, 1.0f);
    float square = ZO_MUL(f, f);
    float log =
        ZO_ADD(ZO_SUB(f, ZO_MUL(square, 0.5f)), ZO_MUL(ZO_MUL(square, f), zo_log_series(f)));
    log = ZO_ADD(ZO_MUL((float)(exponent - 24), LH_ZO_LN_2), log);
    return ZO_SQRT(ZO_MUL(log, -2.0f));
}

/* The cosine and sine of an angle. The two highest bits of word count its quarter turns. */
ZO_FUNCTION void zo_turn(uint32_t word, float *cosine_out, float *sine_out)
{
    int32_t rest = (int32_t)((word << 2) & ~UINT32_C(0xFF));
    float x = ZO_MUL((float)rest, LH_ZO_ANGLE_SCALE); /* 24 bits: exact, but for the product */
    float square = ZO_MUL(x, x);
    float sine = ZO_ADD(ZO_MUL(LH_ZO_S2, square), LH_ZO_S1);
    sine = ZO_ADD(ZO_MUL(sine, square), LH_ZO_S0);
    sine = ZO_ADD(x, ZO_MUL(ZO_MUL(x, square), sine));
    float cosine = ZO_ADD(ZO_MUL(LH_ZO_C1, square), LH_ZO_C0);
    cosine = ZO_ADD(ZO_SUB(1.0f, ZO_MUL(square, 0.5f)), ZO_MUL(ZO_MUL(square, square), cosine));
    uint32_t quarter = (word + (UINT32_C(1) << 29)) >> 30;
    float at_cosine = quarter % 2 ? sine : cosine;
    float at_sine = quarter % 2 ? cosine : sine;
    *cosine_out = quarter == 1 || quarter == 2 ? -at_cosine : at_cosine;
    *sine_out = quarter >= 2 ? -at_sine : at_sine;
}

ZO_FUNCTION void zo_words(const struct lh_zo_stream *stream, uint64_t counter,
                          uint32_t words[LH_ZO_WORDS])
{
    words[0] = (uint32_t)counter;
    words[1] = (uint32_t)(counter >> 32) | stream->sample << 16;
    words[2] = stream->param;
    words[3] = stream->step;
    zo_philox(words, (uint32_t)stream->seed, (uint32_t)(stream->seed >> 32));
}

/* Draw z of the elements that belong to one counter. */
ZO_FUNCTION void zo_draw(const struct lh_zo_stream *stream, uint64_t counter, float z[LH_ZO_WORDS])
{
    uint32_t words[LH_ZO_WORDS];
    zo_words(stream, counter, words);
    for (int i = 0; i < LH_ZO_WORDS; i += 2) {
        float cosine, sine;
        float radius = zo_radius(words[i]);
        zo_turn(words[i + 1], &cosine, &sine);
        z[i] = ZO_MUL(radius, cosine);
        z[i + 1] = ZO_MUL(radius, sine);
    }
}

ZO_FUNCTION float zo_applied(const struct lh_zo_op *op, float value, float z)
{
    if (op->kind == LH_ZO_OP_DRAW)
        return z;
    z = ZO_MUL(z, op->scale);
    if (op->kind == LH_ZO_OP_PERTURB)
        return ZO_ADD(value, z);
    if (op->decay != 0)
        z = ZO_ADD(z, ZO_MUL(value, op->decay));
    return ZO_SUB(value, ZO_MUL(z, op->lr));
}

/* The number of counters of the blocks that a batch covers, and thus of its threads. */
ZO_FUNCTION uint64_t zo_counter_count(const struct lh_zo_batch *batch)
{
    uint64_t begin = batch->first / LH_ZO_BLOCK;
    uint64_t end = (batch->first + batch->count + LH_ZO_BLOCK - 1) / LH_ZO_BLOCK;
    return batch->count > 0 ? (end - begin) * LH_ZO_COUNTERS : 0;
}

/* Load four elements from at on, LH_ZO_COUNTERS apart, as far as they are in the batch. */
ZO_FUNCTION void zo_load(const struct lh_zo_batch *batch, int64_t at, float held[LH_ZO_WORDS])
{
    uint64_t source = batch->state ? batch->state : batch->values;
    for (int i = 0; i < LH_ZO_WORDS; i++) {
        int64_t place = at + i * LH_ZO_COUNTERS;
        bool is_there = place >= 0 && place < (int64_t)batch->count;
        held[i] = is_there ? zo_kept_load(source, place, batch->state_format) : 0;
    }
}

ZO_FUNCTION void zo_store(const struct lh_zo_batch *batch, int64_t at,
                          const float held[LH_ZO_WORDS], bool is_state)
{
    for (int i = 0; i < LH_ZO_WORDS; i++) {
        int64_t place = at + i * LH_ZO_COUNTERS;
        if (place < 0 || place >= (int64_t)batch->count)
            continue;
        if (is_state)
            zo_kept_store(batch->state, place, held[i], batch->state_format);
        else
            zo_value_store(batch->values, place, held[i], batch->value_format);
    }
}

/* Apply the batch's ops, in order, to the elements that belong to one of its counters. */
ZO_FUNCTION void zo_counter(const struct lh_zo_batch *batch, uint64_t index)
{
    uint64_t counter = batch->first / LH_ZO_BLOCK * LH_ZO_COUNTERS + index;
    /* The index of the counter's first element in the batch; negative if it precedes the batch. */
    int64_t at = (int64_t)(counter / LH_ZO_COUNTERS * LH_ZO_BLOCK + counter % LH_ZO_COUNTERS) -
                 (int64_t)batch->first;
    float held[LH_ZO_WORDS], kept[LH_ZO_WORDS];
    float z[LH_ZO_WORDS] = {0};
    bool is_kept = false; /* the same for every thread */
    zo_load(batch, at, held);
    for (uint32_t j = 0; j < batch->op_count; j++) {
        const struct lh_zo_op *op = &batch->ops[j];
        if (op->kind == LH_ZO_OP_ROUND) {
            uint32_t words[LH_ZO_WORDS];
            zo_words(&op->stream, counter, words);
            for (int i = 0; i < LH_ZO_WORDS; i++)
                kept[i] = held[i] = zo_rounded(held[i], words[i], op->format);
            is_kept = true;
            continue;
        }
        if (!op->is_same)
            zo_draw(&op->stream, counter, z);
        for (int i = 0; i < LH_ZO_WORDS; i++)
            held[i] = zo_applied(op, held[i], z[i]);
    }
    if (is_kept && batch->state)
        zo_store(batch, at, kept, true);
    if (batch->values)
        zo_store(batch, at, held, false);
}

/* The work of one thread of thread_count. */
ZO_FUNCTION void zo_thread(const struct lh_zo_batch *batch, uint64_t thread, uint64_t thread_count)
{
    uint64_t counter_count = zo_counter_count(batch);
    for (uint64_t i = thread; i < counter_count; i += thread_count)
        zo_counter(batch, i);
}

#endif
