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

/* A number from least to most. */
uint64_t sim_between(struct lh_sim_random *random, uint64_t least, uint64_t most);
/* The same, where every order of magnitude is as likely as every other. */
uint64_t sim_scaled(struct lh_sim_random *random, uint64_t least, uint64_t most);
/* A machine without an accelerator. */
struct lh_sim_machine sim_machine_random(struct lh_sim_random *random);
/* Half of the seeds have an accelerator; of these, half the least memory that works. */
struct lh_sim_accelerator sim_accelerator_random(const struct lh_sim_model *model, uint64_t seed);
/*
 * The main memory of a run whose other options are set. Half of the seeds have the least that
 * works, where each transfer waits for another one.
 */
uint64_t sim_host_bytes_random(const struct lh_sim_run_opts *run, struct lh_sim_random *random);

/* If rc is an error, print what and the error, and end the test. */
void sim_require(int rc, const struct lh_error *err, const char *what);

#endif
