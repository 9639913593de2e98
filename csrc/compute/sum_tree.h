/*
 * Sums of the gradients of micro-batches in the order of a tree, in fp32.
 *
 * [Note: Trees of sums] The micro-batches of a step have numbers, from 0. A node of the tree is an
 * aligned range of 2^h numbers, and its value is the sum of its two halves, rounded to fp32; a leaf
 * is a gradient. What has no gradient is skipped: a node with one half has the value of that half.
 *
 *      ((0 + 1) + (2 + 3)) + ((4 + 5) + 6)        seven micro-batches
 *      (0 + (2 + 3)) + ((4 + 5) + 6)              the same, if 1 has no gradient
 *
 * So whoever has an aligned range of micro-batches computes its node alone, exactly as one process
 * that has all of them, and the result does not depend on who has which range. Sums in the order of
 * the numbers, ((0 + 1) + 2) + 3, have the same bits for at most two gradients.
 *
 * Whoever gets the gradients one after the other keeps a stack of partial sums, as in a binary
 * counter: nodes that are complete, or that may get further gradients, from the first numbers to
 * the last ones, in places that are `stride` apart. With K micro-batches from number 0 on, of which
 * the last one is known as such, at most floor(log2(K)) places are in use, and one at the end.
 *
 * Pure. Thread: any, but one at a time for each struct and for each element of a sum.
 */
#ifndef LH_COMPUTE_SUM_TREE_H
#define LH_COMPUTE_SUM_TREE_H

#include "base/dtype.h"

/* Numbers of micro-batches are below this. */
#define LH_SUM_LEAF_END (UINT64_C(1) << 32)
#define LH_SUM_DEPTH_MAX 64

/* The partial sums of one parameter; zero-initialized: there are none, and numbers start at 0. */
struct lh_sum_tree {
    uint64_t first; /* whoever has smaller numbers adds up the nodes that have some of them */
    uint32_t depth; /* the places in use */
    uint64_t last;  /* the number of the last gradient */
    uint64_t leaves[LH_SUM_DEPTH_MAX]; /* for each place, a number inside its node */
};

/* How many places the partial sums of this many micro-batches from number 0 on need; 0: of any that
 * are added without a tree. */
static inline uint32_t lh_sum_tree_places(uint64_t leaf_count)
{
    return leaf_count < 4 ? 1 : 63 - (uint32_t)__builtin_clzll(leaf_count);
}

/* What happens to the places as a gradient comes: those from `merged` on are added to the ones
 * before them, then the gradient to those from `after` - 1 on, which leaves `after` of them. */
struct lh_sum_join {
    uint64_t stride; /* from place to place, in elements */
    uint32_t before;
    uint32_t merged;
    uint32_t after;
};

/* Start a sum, or add to it: the order of sums without a tree. */
static inline struct lh_sum_join lh_sum_join_one(bool is_first)
{
    uint32_t before = is_first ? 0 : 1;
    return (struct lh_sum_join){.before = before, .merged = before, .after = 1};
}

/*
 * Count the gradient of a micro-batch, whose number is at least that of the last gradient. Several
 * gradients of one micro-batch are added one after the other. is_last: no larger number follows, so
 * that all places are added up.
 */
struct lh_sum_join lh_sum_tree_add(struct lh_sum_tree *tree, uint64_t leaf, bool is_last,
                                   uint64_t stride);
/* Add up the nodes that are complete, because no gradient with a number below `end` follows. */
struct lh_sum_join lh_sum_tree_end(struct lh_sum_tree *tree, uint64_t end, uint64_t stride);
/* Add up all places, because no gradient follows. */
struct lh_sum_join lh_sum_tree_close(struct lh_sum_tree *tree, uint64_t stride);

/* Do what a join says with `count` elements of the places, which begin at sum. The gradient is NULL
 * if the join is one of lh_sum_tree_end() or lh_sum_tree_close(). */
void lh_sum_join(float *sum, const struct lh_sum_join *join, const void *gradient,
                 enum lh_dtype dtype, uint64_t count);

/*
 * Set sum to that of several nodes of a tree, which do not overlap. leaves: for each term, a number
 * inside its node, in ascending order. A term may begin at sum.
 */
void lh_sum_of_tree(float *sum, const void *const *terms, const uint64_t *leaves,
                    uint32_t term_count, enum lh_dtype dtype, uint64_t count);

#endif
