#include "lives/model.h"

/* A unit of this size has two chunks if memory is scarce; only such a unit tests their order. */
#define LARGE_COUNT_MIN (LH_BUDGET_CHUNK_ELEMENTS_MIN + 1)
#define BLOCK_NS_MAX 2000000

/* A unit of one to four parameters: bf16, fp16, fp32, or frozen bytes. */
static uint32_t random_unit_add(struct lh_sim_model *model, const struct lh_sim_sizes *sizes,
                                struct lh_sim_random *random, bool is_large)
{
    static const enum lh_dtype dtypes[] = {LH_DTYPE_BF16, LH_DTYPE_F16, LH_DTYPE_F32,
                                           LH_DTYPE_BF16, LH_DTYPE_F32, LH_DTYPE_BYTES};
    uint64_t counts[4];
    uint32_t count = 1 + (uint32_t)lh_sim_random_below(random, LH_COUNT_OF(counts));
    for (uint32_t i = 0; i < count; i++)
        counts[i] = 1 + lh_sim_random_below(random, sizes->count_max);
    if (is_large)
        counts[0] = LARGE_COUNT_MIN + lh_sim_random_below(random, sizes->count_max);
    uint64_t dtype = lh_sim_random_below(random, LH_COUNT_OF(dtypes));
    struct lh_sim_unit_desc desc = {
        .dtype = is_large ? LH_DTYPE_BF16 : dtypes[dtype], .counts = counts, .count = count};
    return lh_sim_model_unit_add(model, &desc);
}

int lh_sim_model_random(struct lh_sim_model *model, const struct lh_sim_sizes *sizes,
                        struct lh_sim_random *random, struct lh_alloc *alloc, struct lh_error *err)
{
    uint32_t block_count = 2 + (uint32_t)lh_sim_random_below(random, 6);
    struct lh_sim_model_opts opts = {.unit_max = 2 * block_count + 2,
                                     .param_max = 8 * block_count + 8,
                                     .block_max = block_count};
    LH_TRY(lh_sim_model_init(model, &opts, alloc, err));
    bool has_large = lh_sim_random_chance(random, sizes->large_ppm);
    uint32_t large_block = (uint32_t)lh_sim_random_below(random, block_count);
    /* The first unit belongs to a scope around all others, or is tied, or neither. */
    uint64_t kind = lh_sim_random_below(random, 3);
    const uint64_t first_counts[] = {1 + lh_sim_random_below(random, sizes->count_max)};
    struct lh_sim_unit_desc first = {
        .dtype = LH_DTYPE_BF16, .always = kind == 0, .counts = first_counts, .count = 1};
    uint32_t shared = lh_sim_model_unit_add(model, &first);
    for (uint32_t i = 0; i < block_count; i++) {
        struct lh_sim_block block = {
            .forward_ns = lh_sim_random_below(random, BLOCK_NS_MAX),
            .backward_ns = lh_sim_random_below(random, 2 * BLOCK_NS_MAX),
        };
        if (i == 0 || (kind == 1 && i + 1 == block_count))
            block.units[block.unit_count++] = shared;
        bool is_large = has_large && i == large_block;
        block.units[block.unit_count++] = random_unit_add(model, sizes, random, is_large);
        if (lh_sim_random_below(random, 4) == 0)
            block.units[block.unit_count++] = random_unit_add(model, sizes, random, false);
        lh_sim_model_block_add(model, &block);
    }
    return 0;
}
