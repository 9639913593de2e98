/*
 * Stores with bytes, which the production code creates and opens, on the drives of a lh_sim_disk.
 *
 * Thread: one.
 */
#ifndef LH_TEST_SIM_STORE_H
#define LH_TEST_SIM_STORE_H

#include "lives/fs.h"
#include "lives/reference.h"

/*
 * Create a store for the reference's model; its extents read as zeros.
 *
 * Owns, Errors: as lh_store_create().
 */
int lh_sim_lives_store_create(const struct lh_sim_reference *reference, const struct lh_sim_fs *fs,
                              bool single_slot, struct lh_alloc *alloc, struct lh_store **store_out,
                              struct lh_error *err) LH_MUST_CHECK;
/* Write the reference's masters and commit them as step 0. Errors: as lh_store_commit_sync(). */
int lh_sim_lives_store_fill(struct lh_store *store, const struct lh_sim_reference *reference,
                            struct lh_error *err) LH_MUST_CHECK;

#endif
