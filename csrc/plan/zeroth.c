#include "plan/zeroth.h"

#include <inttypes.h>
#include <string.h>

/* The maximum number of rounds, each with one step per slot, until the clocks repeat. */
#define ROUND_COUNT_MAX 1000

/* When each stream finishes what was launched on it, and when each slot's last block has left. */
struct clocks {
    uint64_t stream_ns[LH_PLAN_ZEROTH_STREAM_COUNT];
    uint64_t slot_ns[LH_PLAN_ZEROTH_SLOT_COUNT_MAX];
    uint32_t slot; /* the next slot to use */
};

/* A block that is computed but not yet offloaded: the next upload is launched first. */
struct leaving {
    uint64_t ready_ns;
    uint64_t offload_ns;
    uint32_t slot;
    bool is_there;
};

static uint64_t standstill(const struct clocks *clocks)
{
    uint64_t end_ns = 0;
    for (int i = 0; i < LH_PLAN_ZEROTH_STREAM_COUNT; i++)
        end_ns = lh_max_u64(end_ns, clocks->stream_ns[i]);
    return end_ns;
}

static void stand(struct clocks *clocks, uint64_t at_ns)
{
    for (int i = 0; i < LH_PLAN_ZEROTH_STREAM_COUNT; i++)
        clocks->stream_ns[i] = at_ns;
}

/* Launch work on a stream, after its earlier work and not before ready_ns; returns its end. */
static uint64_t launch(struct clocks *clocks, enum lh_plan_zeroth_stream stream, uint64_t ready_ns,
                       uint64_t ns)
{
    clocks->stream_ns[stream] = lh_max_u64(clocks->stream_ns[stream], ready_ns) + ns;
    return clocks->stream_ns[stream];
}

static void leave(struct clocks *clocks, struct leaving *leaving)
{
    if (!leaving->is_there)
        return;
    leaving->is_there = false;
    clocks->slot_ns[leaving->slot] =
        launch(clocks, LH_PLAN_ZEROTH_OFFLOAD, leaving->ready_ns, leaving->offload_ns);
}

/* The number of slots in use: at least 1, at most one per block (every block is offloaded). */
static uint32_t slots_used(const struct lh_plan_zeroth *zeroth)
{
    uint32_t count = zeroth->slot_count;
    if (count > zeroth->block_count)
        count = zeroth->block_count;
    return count > 0 ? count : 1;
}

static uint64_t compute_ns(const struct lh_plan_zeroth *zeroth, uint32_t index, bool is_update)
{
    const struct lh_plan_zeroth_block *block = &zeroth->blocks[index];
    if (is_update)
        return block->update_ns;
    return block->compute_ns + (zeroth->has_deferral ? block->update_ns : 0);
}

/* Pass all blocks through the device once, to compute or to update them. Source: ZO2 alg. 3 */
static void pass_run(const struct lh_plan_zeroth *zeroth, struct clocks *clocks, bool is_update)
{
    uint32_t slot_count = slots_used(zeroth);
    struct leaving leaving = {.is_there = false};
    for (uint32_t i = 0; i < zeroth->block_count; i++) {
        const struct lh_plan_zeroth_block *block = &zeroth->blocks[i];
        if (slot_count == 1 || !zeroth->has_overlap)
            leave(clocks, &leaving);
        if (!zeroth->has_reuse)
            stand(clocks, standstill(clocks) + block->alloc_ns);
        if (!zeroth->has_overlap)
            stand(clocks, standstill(clocks));
        uint64_t here_ns =
            launch(clocks, LH_PLAN_ZEROTH_UPLOAD, clocks->slot_ns[clocks->slot], block->upload_ns);
        leave(clocks, &leaving);
        leaving = (struct leaving){
            .ready_ns =
                launch(clocks, LH_PLAN_ZEROTH_COMPUTE, here_ns, compute_ns(zeroth, i, is_update)),
            .offload_ns = block->offload_ns,
            .slot = clocks->slot,
            .is_there = true,
        };
        clocks->slot = (clocks->slot + 1) % slot_count;
    }
    leave(clocks, &leaving);
    if (!zeroth->has_overlap)
        stand(clocks, standstill(clocks));
}

static void step_run(const struct lh_plan_zeroth *zeroth, struct clocks *clocks)
{
    launch(clocks, LH_PLAN_ZEROTH_COMPUTE, 0, zeroth->embedding_ns);
    if (!zeroth->has_overlap)
        stand(clocks, standstill(clocks));
    pass_run(zeroth, clocks, false);
    uint64_t close_ns = launch(clocks, LH_PLAN_ZEROTH_COMPUTE, 0, zeroth->head_ns);
    if (!zeroth->looks_ahead)
        (void)launch(clocks, LH_PLAN_ZEROTH_UPLOAD, close_ns, 0);
    if (!zeroth->has_deferral)
        pass_run(zeroth, clocks, true);
}

int lh_plan_zeroth_check(const struct lh_plan_zeroth *zeroth, struct lh_error *err)
{
    if (zeroth->block_count > LH_PLAN_ZEROTH_BLOCK_COUNT_MAX)
        return lh_error_set(err, -EINVAL, "%" PRIu32 " blocks: at most %d", zeroth->block_count,
                            LH_PLAN_ZEROTH_BLOCK_COUNT_MAX);
    if (zeroth->slot_count < 1 || zeroth->slot_count > LH_PLAN_ZEROTH_SLOT_COUNT_MAX)
        return lh_error_set(err, -EINVAL, "%" PRIu32 " slots: the number must be from 1 to %d",
                            zeroth->slot_count, LH_PLAN_ZEROTH_SLOT_COUNT_MAX);
    uint64_t longest_ns = lh_max_u64(zeroth->embedding_ns, zeroth->head_ns);
    for (uint32_t i = 0; i < zeroth->block_count; i++) {
        const struct lh_plan_zeroth_block *block = &zeroth->blocks[i];
        longest_ns = lh_max_u64(longest_ns, lh_max_u64(block->compute_ns, block->update_ns));
        longest_ns = lh_max_u64(longest_ns, lh_max_u64(block->upload_ns, block->offload_ns));
        longest_ns = lh_max_u64(longest_ns, block->alloc_ns);
    }
    if (longest_ns > LH_PLAN_ZEROTH_NS_MAX)
        return lh_error_set(err, -EINVAL,
                            "a time of %" PRIu64 " ns exceeds the maximum of %" PRIu64 " ns",
                            longest_ns, LH_PLAN_ZEROTH_NS_MAX);
    return 0;
}

/* Count times from the earliest clock, so that repeating states compare equal. */
static void rebase(struct clocks *clocks, uint32_t slot_count)
{
    uint64_t least_ns = clocks->slot_ns[0];
    for (int i = 0; i < LH_PLAN_ZEROTH_STREAM_COUNT; i++)
        least_ns = lh_min_u64(least_ns, clocks->stream_ns[i]);
    for (uint32_t i = 1; i < slot_count; i++)
        least_ns = lh_min_u64(least_ns, clocks->slot_ns[i]);
    for (int i = 0; i < LH_PLAN_ZEROTH_STREAM_COUNT; i++)
        clocks->stream_ns[i] -= least_ns;
    for (uint32_t i = 0; i < slot_count; i++)
        clocks->slot_ns[i] -= least_ns;
}

/*
 * The mean of as many steps as there are slots, rounded up: after that many steps, the same slot
 * is next again.
 */
static uint64_t settled_ns(const struct lh_plan_zeroth *zeroth)
{
    uint32_t slot_count = slots_used(zeroth);
    struct clocks clocks = {0};
    uint64_t round_ns = 0;
    for (int round = 0; round < ROUND_COUNT_MAX; round++) {
        struct clocks before = clocks;
        for (uint32_t i = 0; i < slot_count; i++)
            step_run(zeroth, &clocks);
        round_ns =
            clocks.stream_ns[LH_PLAN_ZEROTH_COMPUTE] - before.stream_ns[LH_PLAN_ZEROTH_COMPUTE];
        rebase(&clocks, slot_count);
        if (memcmp(clocks.stream_ns, before.stream_ns, sizeof(clocks.stream_ns)) == 0 &&
            memcmp(clocks.slot_ns, before.slot_ns, sizeof(clocks.slot_ns)) == 0)
            break;
    }
    return (round_ns + slot_count - 1) / slot_count;
}

struct lh_plan_zeroth_step lh_plan_zeroth_step(const struct lh_plan_zeroth *zeroth)
{
    struct lh_plan_zeroth_step step = {0};
    uint64_t pass_count = zeroth->has_deferral ? 1 : 2;
    uint64_t *busy_ns = step.busy_ns;
    busy_ns[LH_PLAN_ZEROTH_COMPUTE] = zeroth->embedding_ns + zeroth->head_ns;
    for (uint32_t i = 0; i < zeroth->block_count; i++) {
        const struct lh_plan_zeroth_block *block = &zeroth->blocks[i];
        busy_ns[LH_PLAN_ZEROTH_UPLOAD] += pass_count * block->upload_ns;
        busy_ns[LH_PLAN_ZEROTH_COMPUTE] += block->compute_ns + block->update_ns;
        busy_ns[LH_PLAN_ZEROTH_OFFLOAD] += pass_count * block->offload_ns;
        step.alloc_ns += zeroth->has_reuse ? 0 : pass_count * block->alloc_ns;
    }
    for (int i = 0; i < LH_PLAN_ZEROTH_STREAM_COUNT; i++)
        if (busy_ns[i] > busy_ns[step.bound_by])
            step.bound_by = (enum lh_plan_zeroth_stream)i;
    step.step_ns = busy_ns[step.bound_by];
    if (zeroth->block_count > 0)
        step.step_ns = lh_max_u64(settled_ns(zeroth), step.step_ns);
    return step;
}
