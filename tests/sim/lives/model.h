/*
 * Small random models (sim/model.h).
 *
 * Thread: one.
 */
#ifndef LH_TEST_SIM_MODEL_H
#define LH_TEST_SIM_MODEL_H

#include "lives/random.h"
#include "sim/model.h"

struct lh_sim_sizes {
    uint64_t count_max; /* elements of a parameter */
    uint32_t large_ppm; /* how many models have a unit of two chunks if memory is scarce */
};

/* Make a small random model. Errors: -ENOMEM. */
int lh_sim_model_random(struct lh_sim_model *model, const struct lh_sim_sizes *sizes,
                        struct lh_sim_random *random, struct lh_alloc *alloc, struct lh_error *err)
    LH_MUST_CHECK;

#endif
