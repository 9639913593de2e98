/*
 * Shared by the simulator's programs: a seed from the command line, and random options.
 */
#ifndef LH_TEST_SIM_FIXTURE_H
#define LH_TEST_SIM_FIXTURE_H

#include "lives/lives.h"
#include "lives/model.h"

/* The seed that the command line names; the program ends with its usage where there is none. */
uint64_t sim_seed(int argc, char **argv);

/* A small model, a small machine and everything else that a seed decides; no faults, no crash. */
struct sim_case {
    struct lh_alloc alloc;
    struct lh_sim_model model;
    struct lh_sim_reference reference;
    struct lh_sim_lives_opts opts;
    struct lh_sim_random random; /* for what else the test decides */
};

void sim_case_make(struct sim_case *sim, uint64_t seed, const struct lh_sim_sizes *sizes);
/* Nothing is live then. */
void sim_case_unmake(struct sim_case *sim);

/* If rc is an error, print what and the error, and end the test. */
void sim_require(int rc, const struct lh_error *err, const char *what);

#endif
