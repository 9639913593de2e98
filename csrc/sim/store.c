#include "sim/store.h"

#include <string.h>

#include "base/assert.h"
#include "store/store_impl.h"

/* Fill in the description as lh_store_create() does before it creates files. */
static int describe(struct lh_store *store, const struct lh_sim_model *model, struct lh_error *err)
{
    struct lh_store_header *header = &store->header;
    header->file_count = store->file_count;
    header->extent_count = model->extent_count;
    header->group_count = model->unit_count;
    header->stripe_bytes = LH_STORE_STRIPE_BYTES;
    header->cycle_stripes = lh_store_cycle_plan(NULL, store->file_count, store->cycle);
    header->scalar_bytes_max =
        model->scalar_bytes_max + lh_scalars_overhead_bytes(model->param_count);
    for (uint32_t i = 0; i < model->extent_count; i++)
        header->checksum_count += lh_store_checksum_count(model->extents[i].bytes);
    LH_TRY(lh_store_description_init(store, err));
    memcpy(store->extents, model->extents, model->extent_count * sizeof(*model->extents));
    for (uint32_t i = 0; i < model->unit_count; i++)
        store->slot_counts[i] = (uint8_t)model->groups[i].slot_count;
    struct lh_store_shape shape = lh_store_shape(store);
    lh_store_tails_plan(&shape, store->tail_files);
    LH_TRY(lh_store_state_init(store, err));
    for (uint32_t i = 0; i < model->extent_count; i++) {
        for (uint32_t slot = 0; slot < store->slot_counts[model->extents[i].group]; slot++)
            lh_store_set_zero(store, i, slot);
    }
    return 0;
}

int lh_sim_store_create(const struct lh_sim_model *model, uint32_t file_count,
                        struct lh_alloc *alloc, struct lh_store **store_out, struct lh_error *err)
{
    struct lh_store *store = NULL;
    *store_out = NULL;
    LH_ASSERT(file_count >= 1 && file_count <= LH_STORE_DIRECTORY_COUNT_MAX);
    LH_TRY(lh_store_new(alloc, file_count, &store, err));
    int rc = describe(store, model, err);
    if (rc < 0) {
        lh_store_delete(store);
        return rc;
    }
    *store_out = store;
    return 0;
}
