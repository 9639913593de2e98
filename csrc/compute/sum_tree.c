#include "compute/sum_tree.h"

#include <string.h>

#include "base/assert.h"
#include "compute/sum.h"

/* The elements of all terms that are added at once: small enough to stay in the caches. */
#define BATCH 256

/* The height of the smallest node that has both numbers, which differ. */
static uint32_t height_of(uint64_t one, uint64_t other)
{
    LH_ASSERT(one != other && one < LH_SUM_LEAF_END && other <= LH_SUM_LEAF_END);
    return 64 - (uint32_t)__builtin_clzll(one ^ other);
}

/* Whether the smallest node with both numbers has none that another process has, before `first`. */
static bool is_mine(const struct lh_sum_tree *tree, uint64_t one, uint64_t other)
{
    uint64_t size = UINT64_C(1) << height_of(one, other);
    return one / size * size >= tree->first;
}

/* The places that are left after nodes were added up to which no number from `next` on belongs. */
static uint32_t merged_before(const struct lh_sum_tree *tree, uint64_t next)
{
    uint32_t depth = tree->depth;
    while (depth >= 2 && is_mine(tree, tree->leaves[depth - 2], tree->leaves[depth - 1]) &&
           height_of(tree->leaves[depth - 2], tree->leaves[depth - 1]) <
               height_of(tree->leaves[depth - 1], next))
        depth--;
    return depth;
}

struct lh_sum_join lh_sum_tree_add(struct lh_sum_tree *tree, uint64_t leaf, bool is_last,
                                   uint64_t stride)
{
    struct lh_sum_join join = {.stride = stride, .before = tree->depth};
    LH_ASSERT(leaf < LH_SUM_LEAF_END && (tree->depth == 0 || leaf >= tree->last));
    if (tree->depth > 0 && leaf == tree->last) {
        join.merged = tree->depth;
        join.after = tree->depth;
        return join;
    }
    join.merged = tree->depth > 0 ? merged_before(tree, leaf) : 0;
    uint32_t depth = join.merged;
    while (depth > 0) {
        uint64_t size = UINT64_C(1) << height_of(tree->leaves[depth - 1], leaf);
        bool is_over = (leaf + 1) % size == 0 && is_mine(tree, tree->leaves[depth - 1], leaf);
        if (!is_last && !is_over)
            break;
        depth--;
    }
    LH_ASSERT(depth < LH_SUM_DEPTH_MAX);
    tree->leaves[depth] = leaf;
    tree->last = leaf;
    tree->depth = depth + 1;
    join.after = depth + 1;
    return join;
}

struct lh_sum_join lh_sum_tree_end(struct lh_sum_tree *tree, uint64_t end, uint64_t stride)
{
    struct lh_sum_join join = {.stride = stride, .before = tree->depth};
    LH_ASSERT(tree->depth == 0 || end > tree->last);
    join.merged = tree->depth > 0 ? merged_before(tree, end) : 0;
    join.after = join.merged;
    tree->depth = join.merged;
    return join;
}

struct lh_sum_join lh_sum_tree_close(struct lh_sum_tree *tree, uint64_t stride)
{
    struct lh_sum_join join = {.stride = stride, .before = tree->depth};
    tree->depth = tree->depth > 0 ? 1 : 0;
    join.merged = tree->depth;
    join.after = tree->depth;
    return join;
}

static void add_to(float *sum, const float *later, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        sum[i] += later[i];
}

/* Add the gradient to the last of several places, that to the one before, and so on. */
static void fold(float *sum, const struct lh_sum_join *join, const void *gradient,
                 enum lh_dtype dtype, uint64_t count)
{
    float elements[BATCH];
    for (uint64_t at = 0; at < count; at += BATCH) {
        uint64_t some = lh_min_u64(BATCH, count - at);
        lh_sum_start(elements, (const uint8_t *)gradient + at * lh_dtype_bytes(dtype), dtype, some);
        for (uint32_t i = join->merged; i >= join->after; i--) {
            const float *place = sum + (i - 1) * join->stride + at;
            for (uint64_t j = 0; j < some; j++)
                elements[j] = place[j] + elements[j];
        }
        memcpy(sum + (join->after - 1) * join->stride + at, elements, some * sizeof(*sum));
    }
}

void lh_sum_join(float *sum, const struct lh_sum_join *join, const void *gradient,
                 enum lh_dtype dtype, uint64_t count)
{
    LH_ASSERT(join->merged <= join->before && join->after <= join->merged + 1);
    for (uint32_t i = join->before; i > join->merged; i--)
        add_to(sum + (i - 2) * join->stride, sum + (i - 1) * join->stride, count);
    if (!gradient)
        return;
    LH_ASSERT(join->after > 0);
    float *place = sum + (join->after - 1) * join->stride;
    if (join->after > join->merged)
        lh_sum_start(place, gradient, dtype, count);
    else if (join->after == join->merged)
        lh_sum_add(place, gradient, dtype, count);
    else
        fold(sum, join, gradient, dtype, count);
}

/* A batch of lh_sum_of_tree(): terms are pushed on a stack, whose nodes are added up on the way. */
static void batch_of_tree(float *sum, const void *const *terms, const uint64_t *leaves,
                          uint32_t term_count, enum lh_dtype dtype, uint64_t at, uint64_t count)
{
    float stack[LH_SUM_DEPTH_MAX][BATCH];
    struct lh_sum_tree tree = {.depth = 0};
    uint64_t offset = at * lh_dtype_bytes(dtype);

    for (uint32_t i = 0; i < term_count; i++) {
        uint32_t merged = tree.depth > 0 ? merged_before(&tree, leaves[i]) : 0;
        for (; tree.depth > merged; tree.depth--)
            add_to(stack[tree.depth - 2], stack[tree.depth - 1], count);
        LH_ASSERT(tree.depth < LH_SUM_DEPTH_MAX);
        lh_sum_start(stack[tree.depth], (const uint8_t *)terms[i] + offset, dtype, count);
        tree.leaves[tree.depth++] = leaves[i];
    }
    for (; tree.depth > 1; tree.depth--)
        add_to(stack[tree.depth - 2], stack[tree.depth - 1], count);
    memcpy(sum + at, stack[0], count * sizeof(*sum));
}

void lh_sum_of_tree(float *sum, const void *const *terms, const uint64_t *leaves,
                    uint32_t term_count, enum lh_dtype dtype, uint64_t count)
{
    LH_ASSERT(term_count > 0);
    for (uint64_t at = 0; at < count; at += BATCH)
        batch_of_tree(sum, terms, leaves, term_count, dtype, at, lh_min_u64(BATCH, count - at));
}
