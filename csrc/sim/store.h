/*
 * Stores for the simulator.
 *
 * With bytes: a real store in real directories, made and opened by the code that does so in
 * earnest. Between creation and the next opening its files live in a lh_sim_disk.
 *
 * Timing only: a store that has no files at all. It says where bytes would lie, keeps checksums
 * (which nobody looks at) and turns commits into requests, for models of any size.
 *
 * Thread: one.
 */
#ifndef LH_SIM_STORE_H
#define LH_SIM_STORE_H

#include "sim/disk.h"
#include "sim/reference.h"

/*
 * A new store with the reference's masters, committed as step 0.
 *
 * Owns, Errors: as lh_store_create().
 */
int lh_sim_store_create(const struct lh_sim_reference *reference, const char *const *directories,
                        uint32_t directory_count, struct lh_alloc *alloc,
                        struct lh_store **store_out, struct lh_error *err) LH_MUST_CHECK;
/* What its files hold, all durable. Errors: as lh_sim_disk_init() and lh_sim_disk_load(). */
int lh_sim_store_load(const struct lh_store *store, struct lh_sim_world *world,
                      struct lh_sim_disk *disk, struct lh_error *err) LH_MUST_CHECK;

/*
 * A store without files.
 *
 * Owns:   *store_out owns its tables; release with lh_store_close().
 * Errors: -ENOMEM; *store_out is NULL then.
 */
int lh_sim_store_create_unreal(const struct lh_sim_model *model, uint32_t file_count,
                               struct lh_alloc *alloc, struct lh_store **store_out,
                               struct lh_error *err) LH_MUST_CHECK;

#endif
