/*
 * Stores for the simulator.
 *
 * With bytes, stores are created and opened by the production code, on the drives of a lh_sim_disk.
 *
 * Timing only, a store has no files at all. It determines where bytes would be stored, keeps
 * checksums (which are not verified) and turns commits into requests, for models of any size.
 *
 * Thread: one.
 */
#ifndef LH_SIM_STORE_H
#define LH_SIM_STORE_H

#include "sim/fs.h"
#include "sim/reference.h"

/*
 * Create a store for the reference's model; its extents read as zeros.
 *
 * Owns, Errors: as lh_store_create().
 */
int lh_sim_store_create(const struct lh_sim_reference *reference, const struct lh_sim_fs *fs,
                        bool single_slot, struct lh_alloc *alloc, struct lh_store **store_out,
                        struct lh_error *err) LH_MUST_CHECK;
/* Write the reference's masters and commit them as step 0. Errors: as lh_store_commit_sync(). */
int lh_sim_store_fill(struct lh_store *store, const struct lh_sim_reference *reference,
                      struct lh_error *err) LH_MUST_CHECK;

/*
 * Create a store without files.
 *
 * Owns:   *store_out owns its tables; release with lh_store_close().
 * Errors: -ENOMEM; *store_out is NULL then.
 */
int lh_sim_store_create_unreal(const struct lh_sim_model *model, uint32_t file_count,
                               struct lh_alloc *alloc, struct lh_store **store_out,
                               struct lh_error *err) LH_MUST_CHECK;

#endif
