/*
 * The hooks of an accelerator's copies: they move bytes, and draw the faults of each copy by seed.
 *
 * A copy's target is garbage from the copy's begin to its end; the target of a copy out is already
 * garbage from its submit. Faults of a copy (lives/fault.h): with SPIKE, the copy takes spike_ns
 * longer. With ERROR, it is refused at submit, or completes with -EIO and garbage bytes; then the
 * accelerator executes nothing more.
 *
 * Always checked: a copy's source does not change from its submit (in) or begin (out) to its end.
 *
 * Thread: one.
 */
#ifndef LH_TEST_SIM_COPIES_H
#define LH_TEST_SIM_COPIES_H

#include "dev/dev.h"
#include "lives/fault.h"

/* The maximum number of copies in flight. */
#define LH_SIM_COPY_COUNT_MAX 64

struct lh_sim_copy {
    const struct lh_dev_copy *copy; /* NULL: free */
    uint32_t crc;                   /* the checksum of the copy's source */
    bool is_failed;
};

struct lh_sim_copies {
    struct lh_sim_fault_log *log; /* borrowed */
    struct lh_sim_faults faults;  /* only SPIKE and ERROR are used */
    struct lh_sim_random random;
    struct lh_sim_copy copies[LH_SIM_COPY_COUNT_MAX];
    bool is_dead; /* a copy failed: the accelerator executes nothing more */
};

/* Begin a life with these faults (NULL: none); log is borrowed. */
void lh_sim_copies_restart(struct lh_sim_copies *copies, struct lh_sim_fault_log *log,
                           const struct lh_sim_faults *faults, uint64_t seed);

/* The hooks; context is a struct lh_sim_lives. */
int lh_sim_copies_copy_taken(void *context, struct lh_dev_copy *copy, uint64_t *extra_ns,
                             struct lh_error *err);
void lh_sim_copies_copy_begun(void *context, struct lh_dev_copy *copy);
int lh_sim_copies_copy_ended(void *context, struct lh_dev_copy *copy);
bool lh_sim_copies_dev_is_dead(void *context);

#endif
