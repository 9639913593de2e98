/* Test the length of a zeroth-order step: exactly where it can be derived by hand, else bounds. */
#include "lh_test.h"
#include "plan/zeroth.h"

#define BLOCK_COUNT 12
#define ROUND_COUNT 2000

struct small {
    struct lh_plan_zeroth_block blocks[BLOCK_COUNT];
    struct lh_plan_zeroth zeroth;
};

/* Equal blocks use three slots, and nothing else is on the device. */
static void small_begin(struct small *small, struct lh_plan_zeroth_block block)
{
    for (uint32_t i = 0; i < BLOCK_COUNT; i++)
        small->blocks[i] = block;
    small->zeroth = (struct lh_plan_zeroth){.blocks = small->blocks,
                                            .block_count = BLOCK_COUNT,
                                            .slot_count = 3,
                                            .has_overlap = true,
                                            .has_reuse = true,
                                            .has_deferral = true,
                                            .looks_ahead = true};
}

static uint64_t step_ns(const struct small *small)
{
    LH_CHECK(lh_plan_zeroth_check(&small->zeroth, NULL) == 0);
    return lh_plan_zeroth_step(&small->zeroth).step_ns;
}

static const struct lh_plan_zeroth_block slow_compute = {
    .upload_ns = 60, .compute_ns = 90, .update_ns = 10, .offload_ns = 70, .alloc_ns = 5};
static const struct lh_plan_zeroth_block slow_link = {
    .upload_ns = 100, .compute_ns = 30, .update_ns = 10, .offload_ns = 70, .alloc_ns = 5};

static void the_busiest_stream_bounds_it(void)
{
    struct small small;
    lh_test_name("where blocks compute longer than they move a step takes what computing takes");
    small_begin(&small, slow_compute);
    LH_CHECK(step_ns(&small) == 12 * (90 + 10));
    LH_CHECK(lh_plan_zeroth_step(&small.zeroth).bound_by == LH_PLAN_ZEROTH_COMPUTE);
    small.zeroth.embedding_ns = 7;
    small.zeroth.head_ns = 11;
    LH_CHECK(step_ns(&small) == 12 * (90 + 10) + 7 + 11);

    lh_test_name("where blocks move longer than they compute a step takes what uploads take");
    small_begin(&small, slow_link);
    LH_CHECK(step_ns(&small) == 12 * 100);
    LH_CHECK(lh_plan_zeroth_step(&small.zeroth).bound_by == LH_PLAN_ZEROTH_UPLOAD);
    lh_test_name("or what offloads take");
    for (uint32_t i = 0; i < BLOCK_COUNT; i++)
        small.blocks[i].offload_ns = 130;
    LH_CHECK(step_ns(&small) == 12 * 130);
    LH_CHECK(lh_plan_zeroth_step(&small.zeroth).bound_by == LH_PLAN_ZEROTH_OFFLOAD);

    lh_test_name("with nothing to move a step takes what the device computes");
    small.zeroth.block_count = 0;
    small.zeroth.embedding_ns = 1234;
    LH_CHECK(step_ns(&small) == 1234);
}

static void losses_are_waited_for(void)
{
    struct small small;
    lh_test_name("an upload that waits for the last step's losses hides behind the embedding only");
    small_begin(&small, slow_compute);
    small.zeroth.looks_ahead = false;
    LH_CHECK(step_ns(&small) == 12 * (90 + 10) + 60);
    small.zeroth.embedding_ns = 20;
    LH_CHECK(step_ns(&small) == 20 + 12 * (90 + 10) + 60 - 20);
    small.zeroth.embedding_ns = 80;
    LH_CHECK(step_ns(&small) == 80 + 12 * (90 + 10));
}

static void slots_are_taken_in_turn(void)
{
    struct small small;
    lh_test_name("with one slot a block comes when the one before has gone");
    small_begin(&small, slow_compute);
    small.zeroth.slot_count = 1;
    LH_CHECK(step_ns(&small) == 12 * (60 + 90 + 10 + 70));
    lh_test_name("with two slots a block passes while another computes: half of its way a block");
    small.zeroth.slot_count = 2;
    LH_CHECK(step_ns(&small) == 12 * (60 + 90 + 10 + 70) / 2);
    lh_test_name("three slots are as good as any number where all three streams are as busy");
    small_begin(&small, (struct lh_plan_zeroth_block){
                            .upload_ns = 100, .compute_ns = 100, .offload_ns = 100});
    LH_CHECK(step_ns(&small) == 12 * 100);
    small.zeroth.slot_count = LH_PLAN_ZEROTH_SLOT_COUNT_MAX;
    LH_CHECK(step_ns(&small) == 12 * 100);
}

static void ablations_cost_what_they_say(void)
{
    struct small small;
    lh_test_name("without overlap a step takes the sum of everything");
    small_begin(&small, slow_link);
    small.zeroth.has_overlap = false;
    small.zeroth.embedding_ns = 7;
    small.zeroth.head_ns = 11;
    LH_CHECK(step_ns(&small) == 7 + 12 * (100 + 30 + 10 + 70) + 11);

    lh_test_name("without deferral blocks are uploaded and offloaded once more, for updates");
    small_begin(&small, slow_compute);
    for (uint32_t i = 0; i < BLOCK_COUNT; i++)
        small.blocks[i].offload_ns = 60;
    small.zeroth.has_deferral = false;
    small.zeroth.looks_ahead = false;
    /* After the losses: uploads for updates, the next step's first upload, and its forwards. */
    LH_CHECK(step_ns(&small) == 12 * 60 + 60 + 12 * 90);
    LH_CHECK(lh_plan_zeroth_step(&small.zeroth).busy_ns[LH_PLAN_ZEROTH_UPLOAD] == 2 * 12 * 60);
    lh_test_name("and link-bound steps twice as long");
    small_begin(&small, slow_link);
    small.zeroth.has_deferral = false;
    LH_CHECK(step_ns(&small) == 2 * 12 * 100);

    lh_test_name("without reuse nothing of the next block is there while one computes");
    small_begin(&small, slow_compute);
    small.zeroth.has_reuse = false;
    /*
     * Add each block's allocation, upload (beside an offload) and computation, and the last
     * offload.
     */
    LH_CHECK(step_ns(&small) == 12 * (5 + 60 + 90 + 10) + 70);
    LH_CHECK(lh_plan_zeroth_step(&small.zeroth).alloc_ns == 12 * 5);
}

static void bounds_hold(void)
{
    lh_test_name("a step takes at least its busiest stream, at most the sum of all, and more slots"
                 " never cost");
    uint64_t seed = 5;
    for (int round = 0; round < ROUND_COUNT; round++) {
        struct small small;
        small_begin(&small, slow_link);
        small.zeroth.block_count = 1 + (uint32_t)(lh_test_random(&seed) % BLOCK_COUNT);
        for (uint32_t i = 0; i < small.zeroth.block_count; i++)
            small.blocks[i] =
                (struct lh_plan_zeroth_block){.upload_ns = lh_test_random(&seed) % 100,
                                              .compute_ns = lh_test_random(&seed) % 100,
                                              .update_ns = lh_test_random(&seed) % 20,
                                              .offload_ns = lh_test_random(&seed) % 100,
                                              .alloc_ns = lh_test_random(&seed) % 50};
        small.zeroth.embedding_ns = lh_test_random(&seed) % 300;
        small.zeroth.head_ns = lh_test_random(&seed) % 300;
        small.zeroth.has_deferral = lh_test_random(&seed) % 2;
        small.zeroth.looks_ahead = lh_test_random(&seed) % 2;
        uint64_t last_ns = UINT64_MAX;
        for (uint32_t slots = 1; slots <= LH_PLAN_ZEROTH_SLOT_COUNT_MAX; slots *= 2) {
            small.zeroth.slot_count = slots;
            struct lh_plan_zeroth_step step = lh_plan_zeroth_step(&small.zeroth);
            uint64_t sum_ns = 0;
            for (int i = 0; i < LH_PLAN_ZEROTH_STREAM_COUNT; i++)
                sum_ns += step.busy_ns[i];
            LH_CHECK(step.step_ns >= step.busy_ns[step.bound_by]);
            LH_CHECK(step.step_ns <= sum_ns && step.step_ns <= last_ns);
            last_ns = step.step_ns;
            small.zeroth.has_reuse = false;
            struct lh_plan_zeroth_step allocating = lh_plan_zeroth_step(&small.zeroth);
            LH_CHECK(allocating.step_ns >= step.step_ns);
            LH_CHECK(allocating.step_ns <= sum_ns + allocating.alloc_ns);
            small.zeroth.has_reuse = true;
        }
        small.zeroth.has_overlap = false;
        LH_CHECK(step_ns(&small) >= last_ns);
    }
}

static void what_no_step_has_is_refused(void)
{
    struct small small;
    struct lh_error err = {0};
    lh_test_name("numbers that no step has are refused by name");
    small_begin(&small, slow_link);
    small.zeroth.slot_count = 0;
    LH_CHECK(lh_plan_zeroth_check(&small.zeroth, &err) == -EINVAL);
    LH_CHECK(strstr(err.message, "0 slots") != NULL);
    small.zeroth.slot_count = LH_PLAN_ZEROTH_SLOT_COUNT_MAX + 1;
    LH_CHECK(lh_plan_zeroth_check(&small.zeroth, &err) == -EINVAL);
    small_begin(&small, slow_link);
    small.zeroth.block_count = LH_PLAN_ZEROTH_BLOCK_COUNT_MAX + 1;
    LH_CHECK(lh_plan_zeroth_check(&small.zeroth, &err) == -EINVAL);
    small_begin(&small, slow_link);
    small.blocks[3].update_ns = LH_PLAN_ZEROTH_NS_MAX + 1;
    LH_CHECK(lh_plan_zeroth_check(&small.zeroth, &err) == -EINVAL);
    small.blocks[3].update_ns = LH_PLAN_ZEROTH_NS_MAX;
    LH_CHECK(step_ns(&small) > LH_PLAN_ZEROTH_NS_MAX);
}

int main(void)
{
    the_busiest_stream_bounds_it();
    losses_are_waited_for();
    slots_are_taken_in_turn();
    ablations_cost_what_they_say();
    bounds_hold();
    what_no_step_has_is_refused();
    return 0;
}
