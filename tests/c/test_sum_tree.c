/* Test sums in the order of a tree against its definition, one addition at a time. */
#include "compute/sum_tree.h"

#include "compute/sum.h"

#include "fp_fixture.h"
#include "lh_test.h"

#define LEAF_COUNT 40
#define COUNT 300 /* more than a batch */
#define PLACE_COUNT 12

struct leaves {
    enum lh_dtype dtype;
    bool is_there[LEAF_COUNT];
    uint8_t gradients[LEAF_COUNT][COUNT * sizeof(float)];
    float values[LEAF_COUNT][COUNT];
};

static void leaves_make(struct leaves *leaves, enum lh_dtype dtype, uint32_t absent_in,
                        uint64_t *seed)
{
    leaves->dtype = dtype;
    for (uint32_t i = 0; i < LEAF_COUNT; i++) {
        leaves->is_there[i] = absent_in == 0 || lh_test_random(seed) % absent_in > 0;
        for (uint64_t j = 0; j < COUNT; j++) {
            uint32_t bits = bits_of((float)((double)(int32_t)lh_test_random(seed) / 1e6));
            uint16_t high = (uint16_t)(bits >> 16);
            if (dtype == LH_DTYPE_F32)
                memcpy(leaves->gradients[i] + 4 * j, &bits, sizeof(bits));
            else
                memcpy(leaves->gradients[i] + 2 * j, &high, sizeof(high));
        }
        lh_sum_start(leaves->values[i], leaves->gradients[i], dtype, COUNT);
    }
}

/* The definition: an aligned range of 2^height numbers, cut to those from first to end. */
static bool node(const struct leaves *leaves, uint64_t at, uint32_t height, uint64_t first,
                 uint64_t end, uint64_t element, float *value_out)
{
    float left = 0, right = 0;
    if (at >= end || at + (UINT64_C(1) << height) <= first)
        return false;
    if (height == 0) {
        *value_out = leaves->values[at][element];
        return leaves->is_there[at];
    }
    uint64_t half = UINT64_C(1) << (height - 1);
    bool has_left = node(leaves, at, height - 1, first, end, element, &left);
    bool has_right = node(leaves, at + half, height - 1, first, end, element, &right);
    *value_out = has_left && has_right ? left + right : has_left ? left : right;
    return has_left || has_right;
}

static void check(const struct leaves *leaves, const float *sum, uint64_t first, uint64_t end)
{
    for (uint64_t j = 0; j < COUNT; j++) {
        float expected = 0;
        LH_CHECK(node(leaves, 0, 6, first, end, j, &expected));
        LH_CHECK(bits_of(sum[j]) == bits_of(expected));
    }
}

/* Add the gradients of a range one by one; returns the most places in use. */
static uint32_t stack_fill(const struct leaves *leaves, uint64_t first, uint64_t end, bool is_whole,
                           struct lh_sum_tree *tree, float *sums)
{
    uint32_t most = 0;
    for (uint64_t i = first; i < end; i++) {
        if (!leaves->is_there[i])
            continue;
        struct lh_sum_join join = lh_sum_tree_add(tree, i, is_whole && i + 1 == end, COUNT);
        lh_sum_join(sums, &join, leaves->gradients[i], leaves->dtype, COUNT);
        most = join.after > most ? join.after : most;
    }
    return most;
}

static bool has_any(const struct leaves *leaves, uint64_t first, uint64_t end)
{
    bool has = false;
    for (uint64_t i = first; i < end; i++)
        has |= leaves->is_there[i];
    return has;
}

static void test_alone(enum lh_dtype dtype, uint32_t absent_in)
{
    static struct leaves leaves;
    static float sums[PLACE_COUNT * COUNT];
    uint64_t seed = 1 + absent_in;

    for (uint64_t count = 1; count <= LEAF_COUNT; count++) {
        struct lh_sum_tree tree = {0};
        leaves_make(&leaves, dtype, absent_in, &seed);
        if (!has_any(&leaves, 0, count))
            continue;
        uint32_t most = stack_fill(&leaves, 0, count, count % 5 > 0, &tree, sums);
        LH_CHECK(count % 5 == 0 || most <= lh_sum_tree_places(count));
        struct lh_sum_join join = lh_sum_tree_close(&tree, COUNT);
        lh_sum_join(sums, &join, NULL, LH_DTYPE_F32, COUNT);
        LH_CHECK(tree.depth == 1);
        check(&leaves, sums, 0, count);
    }
}

/* Several processes add up ranges of any lengths, and one of them adds the partial sums of all. */
static void test_ranges(uint32_t absent_in)
{
    static struct leaves leaves;
    static float sums[LEAF_COUNT][PLACE_COUNT * COUNT];
    static float sum[COUNT];
    uint64_t seed = 7 + absent_in;

    for (uint32_t round = 0; round < 60; round++) {
        const void *terms[LEAF_COUNT];
        uint64_t numbers[LEAF_COUNT], first = 0;
        uint32_t term_count = 0, range = 0;
        uint64_t end = 1 + lh_test_random(&seed) % LEAF_COUNT;
        leaves_make(&leaves, LH_DTYPE_F32, absent_in, &seed); /* in bf16, sums would be exact */
        for (; first < end; range++) {
            struct lh_sum_tree tree = {.first = first};
            uint64_t next = lh_min_u64(end, first + 1 + lh_test_random(&seed) % (1 + round % 12));
            (void)stack_fill(&leaves, first, next, false, &tree, sums[range]);
            struct lh_sum_join join = lh_sum_tree_end(&tree, next, COUNT);
            lh_sum_join(sums[range], &join, NULL, LH_DTYPE_F32, COUNT);
            for (uint32_t i = 0; i < tree.depth; i++) {
                terms[term_count] = sums[range] + i * COUNT;
                numbers[term_count++] = tree.leaves[i];
            }
            first = next;
        }
        if (term_count == 0)
            continue;
        lh_sum_of_tree(sum, terms, numbers, term_count, LH_DTYPE_F32, COUNT);
        check(&leaves, sum, 0, end);
    }
}

static void test_twice(void)
{
    struct lh_sum_tree tree = {0};
    float sums[2] = {0}, gradient = 1e8f, small = 1;

    lh_test_name("several gradients of a micro-batch are added to the node that has the first one");
    for (uint64_t leaf = 0; leaf < 2; leaf++) {
        struct lh_sum_join join = lh_sum_tree_add(&tree, leaf, false, 1);
        lh_sum_join(sums, &join, &gradient, LH_DTYPE_F32, 1);
        join = lh_sum_tree_add(&tree, leaf, false, 1);
        LH_CHECK(join.before == join.after && join.merged == join.after);
        lh_sum_join(sums, &join, &small, LH_DTYPE_F32, 1);
    }
    LH_CHECK(tree.depth == 1 && sums[0] == ((1e8f + 1) + 1e8f) + 1);
}

static void test_zero(void)
{
    struct lh_sum_tree tree = {0};
    float sum = 1, zero = -0.0f;
    const void *term = &zero;
    uint64_t leaf = 3;

    lh_test_name("a node with one half is a copy of it: the sign of a zero stays");
    struct lh_sum_join join = lh_sum_tree_add(&tree, leaf, true, 1);
    lh_sum_join(&sum, &join, &zero, LH_DTYPE_F32, 1);
    LH_CHECK(bits_of(sum) == UINT32_C(0x80000000));
    sum = 1;
    lh_sum_of_tree(&sum, &term, &leaf, 1, LH_DTYPE_F32, 1);
    LH_CHECK(bits_of(sum) == UINT32_C(0x80000000));
}

int main(void)
{
    lh_test_name("gradients that come one by one are added up as the tree says, in few places");
    test_alone(LH_DTYPE_F32, 0);
    test_alone(LH_DTYPE_BF16, 0);
    test_alone(LH_DTYPE_F16, 0);
    lh_test_name("and if some micro-batches have no gradient");
    test_alone(LH_DTYPE_F32, 2);
    test_alone(LH_DTYPE_BF16, 4);
    lh_test_name("partial sums of any ranges add up to the bits of one that has all gradients");
    test_ranges(0);
    test_ranges(3);
    test_twice();
    test_zero();
    return 0;
}
