/*
 * What the simulator's programs share: a seed from the command line, directories for the stores,
 * random options.
 */
#ifndef LH_TEST_SIM_FIXTURE_H
#define LH_TEST_SIM_FIXTURE_H

#include "sim/run.h"

/* The seed that the command line names; the program ends with its usage where there is none. */
uint64_t sim_seed(int argc, char **argv);

/* A small model, a small machine and everything else that a seed decides; no faults, no crash. */
struct sim_case {
    struct lh_alloc alloc;
    struct lh_sim_model model;
    struct lh_sim_reference reference;
    struct lh_sim_run_opts opts;
    struct lh_sim_random random; /* for what else the test decides */
    char folder[240];
    char paths[LH_SIM_DISK_FILE_COUNT_MAX][256];
    const char *directories[LH_SIM_DISK_FILE_COUNT_MAX];
};

void sim_case_make(struct sim_case *sim, uint64_t seed);
/* Its stores are removed, and nothing is live. */
void sim_case_unmake(struct sim_case *sim);
/* The stores of a run are removed, so that another can be made. */
void sim_stores_remove(const struct sim_case *sim);

/* The test ends with what and the message where rc is an error. */
void sim_require(int rc, const struct lh_error *err, const char *what);

#endif
