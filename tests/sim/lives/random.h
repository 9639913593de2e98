/*
 * Seeded random numbers, the same on every machine.
 *
 * Thread: one.
 */
#ifndef LH_TEST_SIM_RANDOM_H
#define LH_TEST_SIM_RANDOM_H

#include "sim/world.h"

#define LH_SIM_PPM_ONE UINT32_C(1000000)

/* xoshiro256**, with a state that splitmix64 generates from a seed. */
struct lh_sim_random {
    uint64_t state[4];
};

/* Independent sequences of numbers, one per purpose, so that an additional draw for one purpose
 * does not change the others. */
enum lh_sim_stream {
    LH_SIM_STREAM_MODEL = 1,
    LH_SIM_STREAM_FAULTS,
    LH_SIM_STREAM_CRASH,
    LH_SIM_STREAM_TRAIN,
    LH_SIM_STREAM_OPTIONS,
    LH_SIM_STREAM_COPIES,
    LH_SIM_STREAM_ACCELERATOR,
    LH_SIM_STREAM_FILES,
    LH_SIM_STREAM_LIVES,
    LH_SIM_STREAM_EDITS,
    LH_SIM_STREAM_WORLDS,
    LH_SIM_STREAM_TARGET,
    LH_SIM_STREAM_RESUMES,
    LH_SIM_STREAM_NETWORK,
    LH_SIM_STREAM_ORDERS,
    LH_SIM_STREAM_ENDS,
};

/* Initialize: the same seed and stream give the same numbers. */
void lh_sim_random_init(struct lh_sim_random *random, uint64_t seed, enum lh_sim_stream stream);
/* All 64 bits of the next number. */
uint64_t lh_sim_random_next(struct lh_sim_random *random);
/* A number from 0 to count - 1; count is above 0. */
uint64_t lh_sim_random_below(struct lh_sim_random *random, uint64_t count);
/* Returns true with a probability of ppm in a million. Draws one number whatever ppm is. */
bool lh_sim_random_chance(struct lh_sim_random *random, uint32_t ppm);

#endif
