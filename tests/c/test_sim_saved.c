/*
 * Test steps of the papers' 13B model with offloaded activations, in virtual time: their transfers
 * are hidden as far as links allow, and every byte is counted.
 */
#include "lh_test.h"
#include "sched/engine_private.h"
#include "sim_preset.h"

#define GB UINT64_C(1000000000)
#define BLOCK_FIRST 1 /* the first block after the embedding */
#define BLOCK_COUNT 40
#define STEP 4
/* Source: LoHan V-C: 34 GB for 13B at batch 32, here in pieces of some 100 MB. */
#define PIECE_COUNT 8
#define PIECE_BYTES (34 * GB / BLOCK_COUNT / PIECE_COUNT)

struct result {
    uint64_t step_ns;
    struct lh_sim_train_times times;
    struct lh_engine_step_stats stats;
};

/* ssd_count of every block's pieces go to SSD; the others stay in main memory. */
static struct result step_run(uint32_t piece_count, uint32_t ssd_count, uint64_t memory_bytes)
{
    static struct lh_sim_run run;
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_sim_model model;
    struct lh_sim_run_opts opts;
    struct lh_error err = {0};
    struct result result;
    LH_CHECK(lh_sim_preset_make(LH_SIM_PRESET_PAPERS_13B, &alloc, &model, &opts, &err) == 0);
    for (uint32_t i = BLOCK_FIRST; i < BLOCK_FIRST + BLOCK_COUNT; i++) {
        model.parts[model.blocks[i].part_first].saved_first = model.saved_count;
        model.parts[model.blocks[i].part_first].saved_count = piece_count;
        for (uint32_t j = 0; j < piece_count; j++)
            model.saved[model.saved_count++] = (struct lh_sim_saved){
                PIECE_BYTES, j < ssd_count ? LH_SAVED_TIER_SSD : LH_SAVED_TIER_MEMORY};
    }
    opts.saved = (struct lh_sim_saved_opts){
        .memory_bytes = memory_bytes,
        .transit_bytes = 4 * LH_GIB,
        .ssd_bytes = 64 * LH_GIB,
        .out_bytes = 2 * LH_GIB,
        .ahead_bytes = 4 * LH_GIB,
    };
    opts.step_last = STEP + 1;
    int rc = lh_sim_run_init(&run, &opts, &alloc, &err);
    enum lh_sim_end end = rc == 0 ? lh_sim_run_drive(&run, &err) : LH_SIM_END_FAILED;
    if (end != LH_SIM_END_DONE)
        fprintf(stderr, "%s\n", err.message);
    LH_CHECK(end == LH_SIM_END_DONE && run.plan_around_count == 0);
    result = (struct result){.times = run.train.times[STEP], .stats = run.check.last[STEP]};
    result.step_ns = run.train.times[STEP + 1].begin_ns - result.times.begin_ns;
    lh_sim_run_deinit(&run);
    lh_sim_model_deinit(&model);
    LH_CHECK(alloc.live_count == 0);
    const uint64_t *bytes = result.stats.bytes;
    printf("  %2u pieces a block, %u to SSD, %3" PRIu64
           " GB of memory: %.3f s, waited %.3f s; %.1f "
           "GB out, %.1f in, %.1f written, %.1f read\n",
           piece_count, ssd_count, memory_bytes / GB, (double)result.step_ns / 1e9,
           (double)result.times.saved_wait_ns / 1e9, (double)bytes[LH_ENGINE_LINK_SAVED_OUT] / 1e9,
           (double)bytes[LH_ENGINE_LINK_SAVED_IN] / 1e9,
           (double)bytes[LH_ENGINE_LINK_SAVED_WRITE] / 1e9,
           (double)bytes[LH_ENGINE_LINK_SAVED_READ] / 1e9);
    LH_CHECK(bytes[LH_ENGINE_LINK_SAVED_OUT] == BLOCK_COUNT * piece_count * PIECE_BYTES);
    LH_CHECK(bytes[LH_ENGINE_LINK_SAVED_IN] == bytes[LH_ENGINE_LINK_SAVED_OUT]);
    for (int i = 0; i < LH_ENGINE_LINK_COUNT; i++)
        LH_CHECK(bytes[i] == result.stats.planned_bytes[i]);
    return result;
}

int main(void)
{
    const uint64_t moved = lh_align_up(PIECE_BYTES, LH_BLOCK_BYTES);
    lh_test_name("what leaves for main memory or SSD while there is time is hidden, and what comes "
                 "back is not waited for");
    struct result none = step_run(0, 0, 0);
    struct result half = step_run(PIECE_COUNT, 4, 24 * LH_GIB);
    if (!lh_test_is_sample()) {
        struct result memory = step_run(PIECE_COUNT, 0, 48 * LH_GIB);
        struct result all = step_run(PIECE_COUNT, PIECE_COUNT, 5 * LH_GIB);
        LH_CHECK((double)memory.step_ns < 1.01 * (double)none.step_ns);
        LH_CHECK((double)all.step_ns < 1.01 * (double)none.step_ns);
        LH_CHECK(memory.stats.bytes[LH_ENGINE_LINK_SAVED_WRITE] == 0);
    }
    LH_CHECK((double)half.step_ns < 1.01 * (double)none.step_ns);
    LH_CHECK(half.stats.bytes[LH_ENGINE_LINK_SAVED_WRITE] == BLOCK_COUNT * 4 * moved);

    lh_test_name("what has no room in main memory goes to SSD, whatever was asked for");
    struct result little = step_run(PIECE_COUNT, 0, 8 * LH_GIB);
    LH_CHECK(little.stats.bytes[LH_ENGINE_LINK_SAVED_WRITE] > 0);
    LH_CHECK(little.stats.bytes[LH_ENGINE_LINK_SAVED_WRITE] < BLOCK_COUNT * PIECE_COUNT * moved);
    return 0;
}
