/*
 * Test what steps write if not every one commits: what stays dirty in memory, what a commit, a
 * flush and an eviction write, and that bytes equal the plan's.
 */
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define STATE_WRITE LH_ENGINE_LINK_STATE_WRITE
#define PARAM_WRITE LH_ENGINE_LINK_PARAM_WRITE
#define COMMIT_WRITE LH_ENGINE_LINK_COMMIT_WRITE

static struct rig_opts opts_of(uint64_t commit_every)
{
    return (struct rig_opts){.manual = true, .in_memory = true, .commit_every = commit_every};
}

/* Bytes of R, M and V, and of P, of the units that have one of the gradients. */
struct sizes {
    uint64_t state;
    uint64_t param;
};

static struct sizes sizes_of(const struct rig *rig, unsigned gradients)
{
    struct sizes sizes = {0};
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        const struct lh_engine_unit *unit = &rig->units[i];
        unsigned mask = ((1u << unit->param_count) - 1) << unit->param_first;
        if (unit->elements == 0 || !(gradients & mask))
            continue;
        sizes.state += unit->elements * (8 + lh_adam_residual_bytes(unit->dtype));
        sizes.param += unit->bytes;
    }
    return sizes;
}

static void check_dirty(const struct rig *rig, unsigned gradients)
{
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        const struct lh_unit *unit = &rig->engine->units[i];
        unsigned mask = ((1u << unit->desc->param_count) - 1) << unit->desc->param_first;
        bool is_dirty = unit->desc->elements > 0 && (gradients & mask);
        LH_CHECK(unit->update.is_param_dirty == is_dirty);
        for (uint32_t j = 0; j < unit->chunk_count; j++) {
            const struct lh_chunk *chunk = &rig->engine->chunks[unit->chunk_first + j];
            LH_CHECK(chunk->is_dirty == is_dirty && !chunk->is_flushing);
            LH_CHECK(!is_dirty || chunk->state == LH_CHUNK_STATE_LOADED);
        }
    }
}

static void test_in_memory(uint64_t commit_every)
{
    static const unsigned gradients[] = {RIG_GRADIENTS_ALL, 0x21, 0x80, 0x0c,
                                         RIG_GRADIENTS_ALL, 0x40, 0x01};
    struct rig rig;
    unsigned dirty = 0;
    lh_test_name("with memory for all, a step between commits writes nothing; the one that commits "
                 "writes what it and those before it changed, once (a commit in %d steps)",
                 (int)commit_every);
    rig_make(&rig, "write-memory", opts_of(commit_every));
    for (size_t i = 0; i < LH_COUNT_OF(gradients); i++) {
        LH_CHECK(rig_step(&rig, gradients[i]) == 0);
        struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
        bool commits = commit_every > 0 && (i + 1) % commit_every == 0;
        dirty |= gradients[i];
        struct sizes expected = commits ? sizes_of(&rig, dirty) : (struct sizes){0};
        LH_CHECK(stats.bytes[STATE_WRITE] == expected.state);
        LH_CHECK(stats.bytes[PARAM_WRITE] == expected.param);
        LH_CHECK(stats.bytes[COMMIT_WRITE] == (commits ? lh_store_commit_bytes(rig.store) : 0));
        /* each is read at most once */
        LH_CHECK(stats.bytes[LH_ENGINE_LINK_STATE_READ] == 0 || i < 4);
        dirty = commits ? 0 : dirty;
        check_dirty(&rig, dirty);
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == 0);
    }
    rig_finish(&rig);
}

static void test_every_is_set(void)
{
    struct rig rig;
    lh_test_name("the steps between commits may be set once: the open step is the first that "
                 "follows the new number, and bytes stay as planned");
    rig_make(&rig, "write-set", opts_of(1 << 20));
    for (int step = 1; step <= 9; step++) {
        if (step == 6)
            lh_every_set(rig.engine, 3);
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
        bool commits = step == 6 || step == 9; /* not 3, whose number was set later */
        struct sizes expected = commits ? sizes_of(&rig, RIG_GRADIENTS_ALL) : (struct sizes){0};
        LH_CHECK(stats.bytes[STATE_WRITE] == expected.state);
        LH_CHECK(stats.bytes[PARAM_WRITE] == expected.param);
        LH_CHECK(lh_store_step(rig.store) == (uint64_t)(step < 6 ? 0 : step / 3 * 3));
    }
    rig_finish(&rig);
}

static void test_every_is_set_while_a_step_is_closed(void)
{
    struct rig rig;
    lh_test_name("a step that is closed when the number of steps between commits is set does not "
                 "commit, though its number is a multiple");
    struct rig_opts opts = opts_of(1 << 20);
    opts.least_memory = true;
    rig_make(&rig, "write-closed", opts);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    lh_every_set(rig.engine, 2);
    rig_over(&rig);
    LH_CHECK(lh_store_step(rig.store) == 0);
    for (int step = 3; step <= 4; step++) {
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_over_as_planned(&rig);
    }
    LH_CHECK(lh_store_step(rig.store) == 4);
    rig_finish(&rig);
}

static void test_flush(bool commit)
{
    struct rig rig;
    lh_test_name("a flush%s writes what is dirty, once and for no step, and the next steps are "
                 "planned without it",
                 commit ? " that commits" : "");
    rig_make(&rig, "write-flush", opts_of(4));
    for (int i = 0; i < 2; i++)
        LH_CHECK(rig_step(&rig, i ? 0x21 : RIG_GRADIENTS_ALL) == 0);
    rig_over_as_planned(&rig);
    check_dirty(&rig, RIG_GRADIENTS_ALL);
    struct sizes all = sizes_of(&rig, RIG_GRADIENTS_ALL);
    uint64_t *other = rig.engine->stats[LH_STATS_OF_EVALUATIONS].bytes;
    LH_CHECK(rig_flush(&rig, commit) == 0);
    LH_CHECK(other[STATE_WRITE] == all.state && other[PARAM_WRITE] == all.param);
    check_dirty(&rig, 0);
    LH_CHECK(lh_store_step(rig.store) == (commit ? 2 : 0));
    LH_CHECK(rig_flush(&rig, commit) == 0);
    LH_CHECK(other[STATE_WRITE] == all.state); /* they are not written again */
    for (int i = 0; i < 2; i++) {
        LH_CHECK(rig_step(&rig, 0x0c) == 0);
        struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
        struct sizes expected = sizes_of(&rig, 0x0c);
        LH_CHECK(stats.bytes[STATE_WRITE] == (i ? expected.state : 0));
        LH_CHECK(stats.bytes[PARAM_WRITE] == (i ? expected.param : 0));
    }
    LH_CHECK(lh_store_step(rig.store) == 4);
    check_dirty(&rig, 0);
    rig_finish(&rig);
}

static void test_least_memory(void)
{
    struct rig rig;
    lh_test_name("what has no place of its own is written by every step; what has one, by the step "
                 "that commits");
    struct rig_opts opts = opts_of(3);
    opts.least_memory = true;
    rig_make(&rig, "write-least", opts);
    struct sizes all = sizes_of(&rig, RIG_GRADIENTS_ALL);
    for (int i = 0; i < 6; i++) {
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
        bool commits = i % 3 == 2;
        /* No slab is kept, and the first unit alone stays in the region. */
        LH_CHECK(stats.bytes[STATE_WRITE] == all.state);
        LH_CHECK(stats.bytes[PARAM_WRITE] == all.param - (commits ? 0 : rig.units[0].bytes));
        LH_CHECK(rig.engine->units[0].update.is_param_dirty == !commits);
        for (uint32_t j = 1; j < RIG_UNIT_COUNT; j++)
            LH_CHECK(!rig.engine->units[j].update.is_param_dirty);
    }
    rig_finish(&rig);
}

static void test_sizes(void)
{
    lh_test_name("for every budget a step writes what its chunks and units have no place for");
    for (uint64_t spare_bytes = 0; spare_bytes < 300000; spare_bytes += 20480) {
        struct rig rig;
        struct rig_opts opts = opts_of(2);
        opts.least_memory = true;
        opts.spare_bytes = spare_bytes;
        rig_make(&rig, "write-sizes", opts);
        for (int i = 0; i < 2; i++) {
            struct sizes expected = {0};
            for (uint32_t j = 0; j < RIG_UNIT_COUNT; j++) {
                const struct lh_unit *unit = &rig.engine->units[j];
                struct sizes sizes = sizes_of(&rig, 1u << unit->desc->param_first);
                bool stays = lh_residency_has_place(&rig.engine->host_region.plan, j);
                expected.param += stays && i == 0 ? 0 : sizes.param;
                bool is_kept =
                    unit->chunk_count > 0 && rig.engine->chunks[unit->chunk_first].is_kept;
                expected.state += is_kept && i == 0 ? 0 : sizes.state;
            }
            LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
            struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
            LH_CHECK(stats.bytes[STATE_WRITE] == expected.state);
            LH_CHECK(stats.bytes[PARAM_WRITE] == expected.param);
        }
        rig_finish(&rig);
    }
}

static void test_slots(void)
{
    struct rig rig;
    lh_test_name("until a commit the store's committed slots have the committed step, bit for bit");
    rig_make(&rig, "write-slots", opts_of(3));
    for (int i = 0; i < 7; i++) {
        LH_CHECK(rig_step(&rig, i % 2 ? 0xa5 : RIG_GRADIENTS_ALL) == 0);
        if (i == 4)
            LH_CHECK(rig_flush(&rig, false) == 0); /* this writes into the other slots */
        rig_over(&rig);
        uint64_t step = (rig.step / 3) * 3;
        LH_CHECK(lh_store_step(rig.store) == step && rig.engine->committed_step == step);
        if (rig.step % 3 == 0)
            rig_check_store(&rig, step);
    }
    rig_shut(&rig);
    rig_reopen(&rig); /* this checks every array */
    LH_CHECK(rig.step == 6 && rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_finish(&rig);
}

static void test_checksums(void)
{
    struct rig rig;
    struct lh_error err = {0};
    lh_test_name("a slab that keeps its chunk is checked against the sums of its own bytes: a byte "
                 "that changes in memory is found by the next update");
    rig_make(&rig, "write-sums", opts_of(5));
    for (int i = 0; i < 3; i++) {
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_over(&rig);
    }
    const struct lh_chunk *chunk = &rig.engine->chunks[2];
    LH_CHECK(chunk->is_kept && chunk->slab == chunk->kept_slab);
    rig.engine->slabs[chunk->slab].memory[4000] ^= 1;
    int rc = rig_step(&rig, RIG_GRADIENTS_ALL);
    rc = rc == 0 ? rig_flush(&rig, false) : rc;
    LH_CHECK(rc == -EILSEQ && lh_engine_error(rig.engine, &err) == -EILSEQ);
    LH_CHECK(strstr(err.message, "unit 3: its fp32 master"));
    rig_unmake(&rig);
}

static void test_write_errors(void)
{
    uint64_t round_count = 0;
    lh_test_name("the N-th write of a step that commits fails, for every N: the store stays at the "
                 "commit before");
    for (uint64_t after = 0;; after++) {
        struct rig rig;
        struct lh_error err = {0};
        rig_make(&rig, "write-errors", opts_of(2));
        for (int i = 0; i < 3; i++)
            LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_over(&rig);
        LH_CHECK(rig_forward_backward(&rig, 0x21) == 0);
        lh_io_faulty_arm(rig.io,
                         (struct lh_io_fault){.kind = LH_IO_FAULT_KIND_ERROR,
                                              .request_kinds = LH_IO_FAULT_ON(LH_IO_KIND_WRITE),
                                              .after = after,
                                              .code = -EIO});
        LH_CHECK(rig_close(&rig, 0x21) == 0);
        int rc = rig_flush(&rig, false);
        if (rc == 0) {
            LH_CHECK(!lh_io_faulty_has_fired(rig.io));
            rig_finish(&rig);
            break;
        }
        round_count++;
        LH_CHECK(rc == -EIO && lh_engine_error(rig.engine, &err) == -EIO);
        LH_CHECK(strstr(err.message, "lohan.") != NULL);
        rig_shut(&rig);
        rig_reopen(&rig);
        LH_CHECK(rig.step == 2 || rig.step == 4); /* the last writes are the superblock's */
        rig_unmake(&rig);
    }
    LH_CHECK(round_count > 17);
}

static void test_never(void)
{
    struct rig rig;
    lh_test_name("with no commits at all only a flush writes, and only one that commits commits");
    rig_make(&rig, "write-never", opts_of(LH_ENGINE_COMMIT_NEVER));
    for (int i = 0; i < 5; i++) {
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
        LH_CHECK(stats.bytes[STATE_WRITE] == 0 && stats.bytes[PARAM_WRITE] == 0);
        LH_CHECK(stats.bytes[COMMIT_WRITE] == 0 && stats.commit_ns == 0);
        if (i == 2)
            LH_CHECK(rig_flush(&rig, false) == 0);
        LH_CHECK(lh_store_step(rig.store) == 0);
    }
    LH_CHECK(rig_flush(&rig, true) == 0 && lh_store_step(rig.store) == 5);
    rig_finish(&rig);
}

int main(void)
{
    test_in_memory(1);
    test_in_memory(2);
    test_in_memory(3);
    test_in_memory(LH_ENGINE_COMMIT_NEVER);
    test_every_is_set();
    test_every_is_set_while_a_step_is_closed();
    test_flush(false);
    test_flush(true);
    test_least_memory();
    test_sizes();
    test_slots();
    test_checksums();
    test_write_errors();
    test_never();
    return 0;
}
