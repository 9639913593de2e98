#include "lives/random.h"

#include "base/assert.h"

void lh_sim_random_init(struct lh_sim_random *random, uint64_t seed, enum lh_sim_stream stream)
{
    uint64_t at = lh_sim_mix(seed, stream);
    for (size_t i = 0; i < LH_COUNT_OF(random->state); i++) {
        at += UINT64_C(0x9E3779B97F4A7C15);
        random->state[i] = lh_sim_scramble(at);
    }
}

static uint64_t rotate(uint64_t value, unsigned count)
{
    return (value << count) | (value >> (64 - count));
}

uint64_t lh_sim_random_next(struct lh_sim_random *random)
{
    uint64_t *s = random->state;
    uint64_t result = rotate(s[1] * 5, 7) * 9;
    uint64_t shifted = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= shifted;
    s[3] = rotate(s[3], 45);
    return result;
}

uint64_t lh_sim_random_below(struct lh_sim_random *random, uint64_t count)
{
    LH_ASSERT(count > 0);
    unsigned __int128 product = (unsigned __int128)lh_sim_random_next(random) * count;
    return (uint64_t)(product >> 64);
}

bool lh_sim_random_chance(struct lh_sim_random *random, uint32_t ppm)
{
    return lh_sim_random_below(random, LH_SIM_PPM_ONE) < ppm;
}
