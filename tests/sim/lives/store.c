#include "lives/store.h"

int lh_sim_lives_store_fill(struct lh_store *store, const struct lh_sim_reference *reference,
                            struct lh_error *err)
{
    const struct lh_sim_model *model = reference->model;
    for (uint32_t i = 0; i < model->unit_count; i++) {
        for (uint32_t j = LH_SIM_ARRAY_PARAM; j <= LH_SIM_ARRAY_RESIDUAL; j++) {
            enum lh_sim_array array = (enum lh_sim_array)j;
            uint64_t bytes = lh_sim_model_array_bytes(model, i, array);
            if (bytes > 0 && lh_sim_model_extent(model, i, array) != LH_ENGINE_EXTENT_NONE)
                LH_TRY(lh_store_write_sync(store, lh_sim_model_extent(model, i, array), 0,
                                           lh_sim_reference_array(reference, 0, i, array), bytes,
                                           err));
        }
    }
    /* Commit twice, so that no superblock remains from the creation, when everything was zeros: a
     * store that loses its newest superblock to a misdirected write falls back to the other one. */
    LH_TRY(lh_store_commit_sync(store, 0, "", 0, err));
    return lh_store_commit_sync(store, 0, "", 0, err);
}

int lh_sim_lives_store_create(const struct lh_sim_reference *reference, const struct lh_sim_fs *fs,
                              bool single_slot, struct lh_alloc *alloc, struct lh_store **store_out,
                              struct lh_error *err)
{
    const struct lh_sim_model *model = reference->model;
    struct lh_store_opts opts = {
        .directories = fs->directories,
        .directory_count = fs->disk->file_count,
        .extents = model->extents,
        .extent_count = model->extent_count,
        .groups = model->groups,
        .group_count = model->unit_count,
        .meta = "{}",
        .meta_bytes = 2,
        .scalar_bytes_max = model->scalar_bytes_max + lh_scalars_overhead_bytes(model->param_count),
        .single_slot = single_slot,
        .fs = &fs->fs,
    };
    return lh_store_create(&opts, alloc, store_out, err);
}
