#include "base/range.h"

#include "lh_test.h"

#define GRANULE 64
#define GRANULE_COUNT 48
#define HELD_MAX 24

/*
 * The naive model has one byte per granule: 0 if it is free, else the held range's number plus one.
 */
struct model {
    uint8_t cells[GRANULE_COUNT];
};

static uint64_t model_first_fit(const struct model *model, uint64_t cell_count)
{
    for (uint64_t start = 0; start + cell_count <= GRANULE_COUNT; start++) {
        uint64_t length = 0;
        while (length < cell_count && model->cells[start + length] == 0)
            length++;
        if (length == cell_count)
            return start * GRANULE;
    }
    return LH_RANGE_NONE;
}

/* The holes of range are exactly the model's free runs, in order. */
static void check_same(const struct lh_range *range, const struct model *model)
{
    uint32_t hole = 0;
    uint64_t free_bytes = 0;
    for (uint64_t i = 0; i < GRANULE_COUNT;) {
        uint64_t end = i;
        while (end < GRANULE_COUNT && model->cells[end] == 0)
            end++;
        if (end > i) {
            LH_CHECK(hole < range->hole_count);
            LH_CHECK(range->holes[hole].offset == i * GRANULE);
            LH_CHECK(range->holes[hole].bytes == (end - i) * GRANULE);
            free_bytes += (end - i) * GRANULE;
            hole++;
        }
        i = end > i ? end : i + 1;
    }
    LH_CHECK(hole == range->hole_count && free_bytes == range->free_bytes);
}

static void test_against_model(struct lh_alloc *alloc, uint64_t seed)
{
    struct lh_range range;
    struct model model = {{0}};
    uint64_t offsets[HELD_MAX];
    uint64_t sizes[HELD_MAX] = {0};
    LH_CHECK(lh_range_init(&range, alloc, GRANULE_COUNT * GRANULE, GRANULE, HELD_MAX + 1, NULL) ==
             0);
    for (int step = 0; step < 4000; step++) {
        uint64_t slot = lh_test_random(&seed) % HELD_MAX;
        if (sizes[slot] > 0) {
            lh_range_release(&range, offsets[slot], sizes[slot]);
            memset(&model.cells[offsets[slot] / GRANULE], 0, lh_div_ceil(sizes[slot], GRANULE));
            sizes[slot] = 0;
        } else {
            uint64_t bytes = 1 + lh_test_random(&seed) % (8 * GRANULE);
            uint64_t expected = model_first_fit(&model, lh_div_ceil(bytes, GRANULE));
            LH_CHECK(lh_range_has(&range, bytes) == (expected != LH_RANGE_NONE));
            uint64_t offset = lh_range_acquire(&range, bytes);
            LH_CHECK(offset == expected);
            if (offset != LH_RANGE_NONE) {
                offsets[slot] = offset;
                sizes[slot] = bytes;
                memset(&model.cells[offset / GRANULE], (int)slot + 1, lh_div_ceil(bytes, GRANULE));
            }
        }
        check_same(&range, &model);
    }
    lh_range_deinit(&range, alloc);
}

static void release_first_granule(void *range)
{
    lh_range_release(range, 0, GRANULE);
}

static void release_beyond_the_end(void *range)
{
    lh_range_release(range, 3 * GRANULE, 2 * GRANULE);
}

static void take_last_two_granules(void *range)
{
    lh_range_take(range, 2 * GRANULE, 2 * GRANULE);
}

static void release_unaligned(void *range)
{
    lh_range_release(range, 1, GRANULE);
}

int main(void)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_error err = {0};
    struct lh_range range;
    struct lh_range copy;

    lh_test_name("a region that is no multiple of its granule is refused, and so is no memory");
    LH_CHECK(lh_range_init(&range, &alloc, 100, 64, 4, &err) == -EINVAL && !range.holes);
    LH_CHECK(lh_range_init(&range, &alloc, 128, 0, 4, &err) == -EINVAL);
    LH_CHECK(lh_range_init(&range, &alloc, 128, 64, 0, &err) == -EINVAL);
    alloc.fail_after = 0;
    LH_CHECK(lh_range_init(&range, &alloc, 128, 64, 4, &err) == -ENOMEM && !range.holes);
    alloc.fail_after = -1;

    lh_test_name("every granule can be held, then nothing fits");
    LH_CHECK(lh_range_init(&range, &alloc, 4 * GRANULE, GRANULE, 5, &err) == 0);
    LH_CHECK(lh_range_init(&copy, &alloc, 4 * GRANULE, GRANULE, 5, &err) == 0);
    for (uint64_t i = 0; i < 4; i++)
        LH_CHECK(lh_range_acquire(&range, 1) == i * GRANULE);
    LH_CHECK(lh_range_acquire(&range, 1) == LH_RANGE_NONE && !lh_range_has(&range, 1));
    LH_CHECK(lh_range_acquire(&range, UINT64_MAX) == LH_RANGE_NONE);
    LH_CHECK(range.free_bytes == 0 && range.hole_count == 0);

    lh_test_name("a copy is independent and gives the same offsets");
    lh_range_release(&range, GRANULE, GRANULE);
    lh_range_copy(&copy, &range);
    LH_CHECK(lh_range_acquire(&copy, GRANULE) == GRANULE && copy.free_bytes == 0);
    LH_CHECK(range.free_bytes == GRANULE && range.hole_count == 1);

    lh_test_name("taking places that are known gives the same holes as acquiring them");
    for (uint64_t i = 0; i < 4; i++) {
        lh_range_reset(&range);
        lh_range_take(&range, i * GRANULE, 1);
        LH_CHECK(range.free_bytes == 3 * GRANULE);
        LH_CHECK(range.hole_count == (i == 0 || i == 3 ? 1 : 2));
        LH_CHECK(lh_range_acquire(&range, GRANULE) == (i == 0 ? GRANULE : 0));
        LH_CHECK(lh_test_aborts(take_last_two_granules, &range) == (i >= 2));
        lh_range_release(&range, i * GRANULE, GRANULE);
    }

    lh_test_name("reset frees everything");
    lh_range_reset(&range);
    LH_CHECK(range.free_bytes == 4 * GRANULE && range.hole_count == 1);
    LH_CHECK(lh_range_acquire(&range, 4 * GRANULE) == 0);

    lh_test_name("a wrong release is a broken invariant");
    lh_range_release(&range, 0, GRANULE);
    LH_CHECK(lh_test_aborts(release_first_granule, &range));
    LH_CHECK(lh_test_aborts(release_beyond_the_end, &range));
    LH_CHECK(lh_test_aborts(release_unaligned, &range));
    lh_range_deinit(&range, &alloc);
    lh_range_deinit(&copy, &alloc);

    lh_test_name("an empty region has nothing, and says so");
    LH_CHECK(lh_range_init(&range, &alloc, 0, GRANULE, 1, &err) == 0);
    LH_CHECK(!lh_range_has(&range, 1) && lh_range_acquire(&range, 1) == LH_RANGE_NONE);
    lh_range_deinit(&range, &alloc);

    for (uint64_t seed = 1; seed <= 8; seed++) {
        lh_test_name("random acquires and releases agree with a map of granules (seed %" PRIu64 ")",
                     seed);
        test_against_model(&alloc, seed);
    }
    LH_CHECK(alloc.live_count == 0);
    return 0;
}
