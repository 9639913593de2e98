/*
 * The rounding of moments to bf16 for vectors of any width: [Note: Moments in bf16] in
 * adam_states.h. The including file defines what adam_8bit_body.h needs, ROUND_BF16 (the function's
 * name) and uppers_store().
 */
#ifndef LH_COMPUTE_ADAM_BF16_BODY_H
#define LH_COMPUTE_ADAM_BF16_BODY_H

/* Below it, a magnitude neither is NaN nor exceeds the largest number of bf16 when rounded. */
#define PLAIN UINT32_C(0x7F000000)
/* The bits of a word that round the second moment. */
#define LOWER UINT32_C(0xFFFF)

/* The bits of a float of any alignment, and an upper bound of all magnitudes so far. */
static INLINE words bits_load(const float *source, words *most)
{
    words bits = (words)floats_load(source);

    *most = greater(*most, bits & MAGNITUDE);
    return bits;
}

void ROUND_BF16(const struct lh_adam_moments *moments, const float *moment1, const float *moment2,
                const uint32_t *random, uint64_t count)
{
    for (uint64_t first = 0; first < count; first += LH_ADAM_STATES_BLOCK) {
        uint16_t *target1 = (uint16_t *)moments->moment1 + first;
        uint16_t *target2 = (uint16_t *)moments->moment2 + first;
        words most = {0};

#pragma GCC unroll 8
        for (uint64_t i = 0; i < LH_ADAM_STATES_BLOCK; i += 2 * LANES) {
            words rounded1[2], rounded2[2];

            for (int half = 0; half < 2; half++) {
                uint64_t at = first + i + (uint64_t)half * LANES;
                words word;

                memcpy(&word, random + at, sizeof(word));
                rounded1[half] = bits_load(moment1 + at, &most) + (word >> 16);
                rounded2[half] = bits_load(moment2 + at, &most) + (word & LOWER);
            }
            uppers_store(target1 + i, rounded1[0], rounded1[1]);
            uppers_store(target2 + i, rounded2[0], rounded2[1]);
        }
        if (largest_of(most) >= PLAIN) {
            const struct lh_adam_moments block = {moments->states, target1, target2, NULL};

            lh_adam_round_bf16_ref(&block, moment1 + first, moment2 + first, random + first,
                                   LH_ADAM_STATES_BLOCK);
        }
    }
}

#endif
