/*
 * Stores for the simulator.
 *
 * A store has no files at all. It determines where bytes would be stored, keeps checksums (which
 * are not verified) and turns commits into requests, for models of any size.
 *
 * Thread: one.
 */
#ifndef LH_SIM_STORE_H
#define LH_SIM_STORE_H

#include "sim/model.h"

/*
 * Create a store without files.
 *
 * Owns:   *store_out owns its tables; release with lh_store_close().
 * Errors: -ENOMEM; *store_out is NULL then.
 */
int lh_sim_store_create(const struct lh_sim_model *model, uint32_t file_count,
                        struct lh_alloc *alloc, struct lh_store **store_out, struct lh_error *err)
    LH_MUST_CHECK;

#endif
