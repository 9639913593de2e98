/*
 * Test gradients that land from an accelerator: the blocks that they land in and who gets them, in
 * which order, what is counted, and that an abort with copies in flight leaves nothing.
 */
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_device.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define HOLD_OUT (1U << LH_DEV_DIRECTION_OUT)

/*
 * One block, with the minimum of memory; with a little more, a second one, because one is reserved.
 */
#define SPARE_BYTES 30000

static struct rig_opts opts_of(enum lh_engine_schedule schedule, uint64_t spare_bytes)
{
    return (struct rig_opts){.manual = true,
                             .in_memory = true,
                             .device = "emu",
                             .device_bytes = 81920, /* room for all units */
                             .schedule = schedule,
                             .least_memory = true,
                             .spare_bytes = spare_bytes,
                             .commit_every = 1};
}

static const struct lh_landing_unit *landing_of(const struct rig *rig, uint32_t unit)
{
    return &rig->engine->units[unit].parts->landing;
}

/* Compute a gradient of small positive numbers on the accelerator, and post it. */
static void gradient_give(struct rig *rig, uint32_t param)
{
    enum lh_dtype dtype = rig_gradient_dtype(rig, param);
    for (uint64_t i = 0; i < rig->params[param].count; i++) {
        if (dtype == LH_DTYPE_F32)
            ((float *)rig->gradients[param])[i] = (float)(1 + i % 7) / 8;
        else
            ((uint16_t *)rig->gradients[param])[i] = (uint16_t)(0x3000 + (i + param) % 1000);
    }
    LH_CHECK(lh_engine_gradient(rig->engine, param, rig_device_gradient(rig, param), dtype) == 0);
}

static void handle_drop(struct rig *rig, uint32_t unit)
{
    lh_engine_handle_drop(rig->engine, unit);
    rig_settle(rig);
}

/* --- Blocks ----------------------------------------------------------------------------------- */

static void test_layout(void)
{
    lh_test_name("the budget's memory for gradients is cut into blocks of a chunk in the widest "
                 "dtype, after the slabs; the largest unit's number of them is reserved");
    for (int i = 0; i < 4; i++) {
        struct rig rig;
        struct rig_opts opts = opts_of(
            i & 1 ? LH_ENGINE_SCHEDULE_DEFERRED : LH_ENGINE_SCHEDULE_OPTIMIZED, SPARE_BYTES);
        opts.large = i & 2;
        opts.device_bytes = opts.large ? 6 << 20 : opts.device_bytes;
        rig_make(&rig, "landing-layout", opts);
        const struct lh_landing *landing = rig.engine->landing;
        const struct lh_budget *budget = &rig.budget;
        LH_CHECK(landing->block_bytes == budget->chunk_elements * sizeof(float));
        LH_CHECK(landing->blocks.base ==
                 rig.memory + budget->region_bytes + budget->slab_count * budget->slab_bytes);
        LH_CHECK(landing->blocks.free_count == budget->gradient_bytes / landing->block_bytes);
        LH_CHECK(landing->blocks.base + landing->blocks.free_count * landing->block_bytes <=
                 rig.memory + rig.memory_bytes);
        LH_CHECK(landing->reserve == (opts.large ? rig.engine->units[5].chunk_count : 1));
        for (uint32_t j = 0; j < RIG_UNIT_COUNT; j++)
            LH_CHECK(lh_landing_waiting_bytes(rig.engine, &rig.engine->units[j]) ==
                     rig.engine->units[j].chunk_count * landing->block_bytes);
        rig_unmake(&rig);
    }
}

static void test_lands(void)
{
    struct rig rig;
    lh_test_name("a gradient is the caller's again when its copy is over, and lies in its chunk's "
                 "block, each element at its place");
    rig_make(&rig, "landing-lands", opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED, SPARE_BYTES));
    LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0);
    rig_settle(&rig);
    rig_hypers_set(&rig);
    rig.holds.copies = HOLD_OUT;
    gradient_give(&rig, 3); /* the second parameter of unit 1 */
    rig_settle(&rig);
    const struct lh_chunk *chunk = &rig.engine->chunks[rig.engine->units[1].chunk_first];
    LH_CHECK(!lh_engine_gradient_is_consumed(rig.engine, 3));
    LH_CHECK(landing_of(&rig, 1)->count == 1 && landing_of(&rig, 1)->posted_count == 0);
    LH_CHECK(chunk->landing.block && chunk->landing.count == 1);
    rig.holds.copies = 0;
    uint64_t released = lh_engine_gradient_release_count(rig.engine);
    rig_settle(&rig);
    LH_CHECK(lh_engine_gradient_is_consumed(rig.engine, 3));
    LH_CHECK(lh_engine_gradient_release_count(rig.engine) == released + 1);
    LH_CHECK(landing_of(&rig, 1)->count == 0 && chunk->landing.count == 0);
    const uint8_t *found = lh_gradient_at(rig.engine, 3, rig.params[3].first);
    LH_CHECK(found == chunk->landing.block + 4 * rig.params[3].first);
    LH_CHECK(memcmp(found, rig.gradients[3], 4 * rig.params[3].count) == 0);
    /* The unit is incomplete: its block waits for the other parameter or for the close. */
    handle_drop(&rig, 1);
    LH_CHECK(chunk->landing.block && !rig.engine->units[1].update.is_queued);
    gradient_give(&rig, 2);
    rig_settle(&rig);
    LH_CHECK(rig.engine->units[1].update.is_done && !chunk->landing.block);
    rig_handles_drop(&rig);
    LH_CHECK(rig_close(&rig, 0x0c) == 0);
    rig_over_as_planned(&rig);
    rig_finish(&rig);
}

static void test_waits(void)
{
    struct rig rig;
    struct rig_opts opts = opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED, SPARE_BYTES);
    lh_test_name("of a gradient's pieces, only the first one waits until it is computed");
    opts.large = true;
    opts.device_bytes = 6 << 20;
    rig_make(&rig, "landing-waits", opts);
    LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0);
    rig_hypers_set(&rig);
    const struct rig_copies_out *copies = rig_device_count(&rig);
    gradient_give(&rig, 7);
    gradient_give(&rig, 6);
    rig_handles_drop(&rig);
    LH_CHECK(rig_close(&rig, 0xc0) == 0);
    rig_settle(&rig);
    LH_CHECK(lh_engine_gradient_is_consumed(rig.engine, 6));
    LH_CHECK(lh_engine_gradient_is_consumed(rig.engine, 7));
    LH_CHECK(copies->wait_count == 2 && copies->count > 2);
    rig_finish(&rig);
}

static void test_reserve(void)
{
    struct rig rig;
    lh_test_name("without a free block a gradient waits on the accelerator; the reserve is for a "
                 "unit whose update can end by itself, and comes back");
    rig_make(&rig, "landing-reserve", opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED, SPARE_BYTES));
    const struct lh_landing *landing = rig.engine->landing;
    LH_CHECK(landing->blocks.free_count == 2 && landing->reserve == 1);
    LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0);
    rig_hypers_set(&rig);
    gradient_give(&rig, 7); /* completes unit 5, whose graph still holds it */
    rig_settle(&rig);
    LH_CHECK(landing->blocks.free_count == 1 && landing_of(&rig, 5)->count == 0);
    gradient_give(&rig, 6); /* a gradient of unit 4 */
    gradient_give(&rig, 5); /* a gradient of unit 3 */
    rig_settle(&rig);
    LH_CHECK(landing->blocks.free_count == 1 && landing_of(&rig, 4)->posted_count == 1);
    LH_CHECK(!lh_engine_gradient_is_consumed(rig.engine, 6));
    /* Unit 3, which came later, overtakes unit 4, which nothing but its caller can free. */
    handle_drop(&rig, 3);
    LH_CHECK(rig.engine->units[3].update.is_done && landing->blocks.free_count == 1);
    LH_CHECK(lh_engine_gradient_is_consumed(rig.engine, 5));
    LH_CHECK(!lh_engine_gradient_is_consumed(rig.engine, 6));
    handle_drop(&rig, 5);
    LH_CHECK(rig.engine->units[5].update.is_done);
    /* Its block was given to unit 4. */
    LH_CHECK(landing->blocks.free_count == 1 && landing_of(&rig, 4)->count == 0);
    LH_CHECK(lh_engine_gradient_is_consumed(rig.engine, 6));
    handle_drop(&rig, 4);
    LH_CHECK(rig.engine->units[4].update.is_done && landing->blocks.free_count == 2);
    rig_handles_drop(&rig);
    LH_CHECK(rig_close(&rig, 0xe0) == 0);
    rig_over_as_planned(&rig);
    rig_finish(&rig);
}

static void test_incomplete(void)
{
    struct rig rig;
    lh_test_name("with one block, gradients of incomplete units stay on the accelerator until the "
                 "close, and then land one unit after another");
    rig_make(&rig, "landing-one", opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED, 0));
    LH_CHECK(rig.engine->landing->blocks.free_count == 1);
    LH_CHECK(rig_forward_backward(&rig, 0x25) == 0); /* units 0 and 1 in part, and all of unit 3 */
    rig_settle(&rig);
    LH_CHECK(rig.engine->units[3].update.is_done && landing_of(&rig, 0)->posted_count == 1);
    LH_CHECK(landing_of(&rig, 1)->posted_count == 1 && rig.engine->landing->blocks.free_count == 1);
    LH_CHECK(lh_core_stats(rig.engine, 1)->bytes[LH_ENGINE_LINK_COPY_OUT] == 5000 * 2);
    LH_CHECK(rig_close(&rig, 0x25) == 0);
    struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
    LH_CHECK(stats.bytes[LH_ENGINE_LINK_COPY_OUT] == 5000 * 2 + 1500 * 2 + 3000 * 4);
    LH_CHECK(rig.engine->landing->blocks.free_count == 1 && landing_of(&rig, 0)->moved_bytes == 0);
    rig_finish(&rig);
}

static void test_order(void)
{
    static const uint32_t params[] = {7, 2, 6, 0, 5, 1, 3};
    struct rig rig;
    struct rig_opts opts = opts_of(LH_ENGINE_SCHEDULE_SERIAL, 0);
    lh_test_name("with room for all, gradients land in the order in which they were posted");
    opts.least_memory = false;
    rig_make(&rig, "landing-order", opts);
    LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0);
    rig_handles_drop(&rig);
    rig_settle(&rig);
    rig_hypers_set(&rig);
    rig.holds.copies = HOLD_OUT;
    for (size_t i = 0; i < LH_COUNT_OF(params); i++)
        gradient_give(&rig, params[i]);
    rig_settle(&rig);
    rig.holds.copies = 0;
    for (size_t i = 0; i < LH_COUNT_OF(params); i++) {
        while (!lh_engine_gradient_is_consumed(rig.engine, params[i])) {
            for (size_t j = i + 1; j < LH_COUNT_OF(params); j++)
                LH_CHECK(!lh_engine_gradient_is_consumed(rig.engine, params[j]));
            LH_CHECK(rig_poll(&rig));
        }
    }
    LH_CHECK(rig.engine->updates.count == 0); /* all were updated before the close */
    LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_over_as_planned(&rig);
    rig_finish(&rig);
}

/* --- Large units ------------------------------------------------------------------------------ */

static bool computes_early;

/* Look for a chunk of the large unit that is computed while others have not landed. */
static void early_watch(struct rig *rig)
{
    const struct lh_unit *unit = &rig->engine->units[RIG_UNIT_COUNT - 1];
    for (uint32_t i = 0; i < unit->chunk_count; i++) {
        const struct lh_chunk *chunk = &rig->engine->chunks[unit->chunk_first + i];
        bool is_begun =
            chunk->state == LH_CHUNK_STATE_COMPUTING || chunk->state == LH_CHUNK_STATE_COMPUTED;
        LH_CHECK(!is_begun || chunk->landing.count == 0);
        computes_early |= is_begun && unit->parts->landing.count > 0;
    }
}

static void test_chunks(bool norms)
{
    struct rig rig;
    struct rig_opts opts =
        opts_of(norms ? LH_ENGINE_SCHEDULE_SERIAL : LH_ENGINE_SCHEDULE_OPTIMIZED, SPARE_BYTES);
    lh_test_name(norms ? "if the norm is to be known, no chunk is computed before all have landed"
                       : "a large gradient lands in a piece for each chunk, and each chunk is "
                         "updated as soon as its own piece is there");
    opts.large = true;
    opts.norms = norms;
    opts.device_bytes = 6 << 20;
    rig_make(&rig, "landing-large", opts);
    LH_CHECK(rig.engine->units[5].chunk_count > 1);
    computes_early = false;
    rig.watch = early_watch;
    for (int i = 0; i < 2; i++) {
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_over_as_planned(&rig);
    }
    LH_CHECK(computes_early == !norms);
    rig.watch = NULL;
    rig_device_check(&rig);
    rig_finish(&rig);
}

/* --- Counts and aborts ------------------------------------------------------------------------ */

static void test_counts(enum lh_engine_schedule schedule)
{
    static const unsigned gradients[] = {RIG_GRADIENTS_ALL, 0x05, 0, RIG_GRADIENTS_ALL, 0x6e, 0x81};
    struct rig rig;
    lh_test_name("each step copies out the bytes of its gradients, and its plan is corrected for "
                 "those that did not come, schedule %d",
                 (int)schedule);
    rig_make(&rig, "landing-counts", opts_of(schedule, SPARE_BYTES));
    for (size_t i = 0; i < LH_COUNT_OF(gradients); i++) {
        uint64_t expected = 0;
        for (uint32_t j = 0; j < RIG_PARAM_COUNT; j++) {
            if (gradients[i] & (1u << j))
                expected += rig.params[j].count * lh_dtype_bytes(rig_gradient_dtype(&rig, j));
        }
        LH_CHECK(rig_step(&rig, gradients[i]) == 0);
        LH_CHECK(rig_over_as_planned(&rig).bytes[LH_ENGINE_LINK_COPY_OUT] == expected);
    }
    rig_device_check(&rig);
    rig_finish(&rig);
}

static void test_forward_again(void)
{
    struct rig rig;
    lh_test_name("a step with two forwards, as for two micro-batches, plans its copies once");
    rig_make(&rig, "landing-again", opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED, SPARE_BYTES));
    for (int i = 0; i < 3; i++) {
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0);
        rig_handles_drop(&rig);
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        LH_CHECK(rig_over_as_planned(&rig).bytes[LH_ENGINE_LINK_COPY_OUT] > 0);
    }
    rig_device_check(&rig);
    rig_finish(&rig);
}

static void test_dtype(void)
{
    struct rig rig;
    lh_test_name("a gradient of another dtype than its parameter's is refused, and costs nothing");
    rig_make(&rig, "landing-dtype", opts_of(LH_ENGINE_SCHEDULE_OPTIMIZED, 0));
    LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0);
    LH_CHECK(lh_engine_gradient(rig.engine, 0, rig.gradients[0], LH_DTYPE_F32) == -EINVAL);
    LH_CHECK(lh_engine_gradient(rig.engine, 4, rig.gradients[4], LH_DTYPE_F32) == -EINVAL);
    LH_CHECK(rig_backward(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_over_as_planned(&rig);
    rig_finish(&rig);
}

static void test_abort(enum lh_engine_schedule schedule)
{
    struct rig rig;
    uint32_t in_flight_count = 0;
    lh_test_name("an abort waits for copies in flight, gives all blocks back and forgets what was "
                 "posted, schedule %d",
                 (int)schedule);
    rig_make(&rig, "landing-abort", opts_of(schedule, SPARE_BYTES));
    uint32_t block_count = rig.engine->landing->blocks.free_count;
    for (uint32_t rounds = 0; rounds < 16; rounds++) {
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0);
        rig_handles_drop(&rig);
        rig.holds.copies = rounds % 2 ? HOLD_OUT : 0;
        for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++) {
            if (i != 4)
                gradient_give(&rig, i);
        }
        for (uint32_t i = 0; i < rounds; i++)
            rig_poll(&rig);
        LH_CHECK(lh_engine_abort(rig.engine, 0) == 0);
        rig_settle(&rig);
        if (rig.engine->copies->in_flight > 0) {
            in_flight_count++;
            LH_CHECK(lh_engine_abort(rig.engine, 0) == 0);
        }
        rig.holds.copies = 0;
        LH_CHECK(rig_abort(&rig) == 0);
        LH_CHECK(rig.engine->landing->blocks.free_count == block_count);
        LH_CHECK(rig.engine->landing->first == rig.engine->landing->end);
        LH_CHECK(lh_engine_gradient_wait(rig.engine, 0, 0) == 1);
        for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
            LH_CHECK(landing_of(&rig, i)->count == 0 && landing_of(&rig, i)->moved_bytes == 0);
        for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++)
            LH_CHECK(lh_engine_gradient_is_consumed(rig.engine, i));
    }
    LH_CHECK(in_flight_count > 3);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_over_as_planned(&rig);
    rig_device_check(&rig);
    rig_finish(&rig);
}

int main(void)
{
    test_layout();
    test_lands();
    test_waits();
    test_reserve();
    test_incomplete();
    test_order();
    test_chunks(false);
    test_chunks(true);
    test_counts(LH_ENGINE_SCHEDULE_OPTIMIZED);
    test_counts(LH_ENGINE_SCHEDULE_NAIVE);
    test_counts(LH_ENGINE_SCHEDULE_DEFERRED);
    test_forward_again();
    test_dtype();
    test_abort(LH_ENGINE_SCHEDULE_OPTIMIZED);
    test_abort(LH_ENGINE_SCHEDULE_DEFERRED);
    return 0;
}
