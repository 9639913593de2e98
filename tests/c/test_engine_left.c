/* Test what an unfinished step leaves behind: in the store, and in a forked child. */
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_wait.h"

/* Return whether one of the first bytes of an extent's slot in the files is not zero. */
static bool slot_has_bytes(const struct rig *rig, uint32_t extent, uint32_t slot, uint8_t *buffer,
                           uint64_t bytes)
{
    struct lh_store_piece pieces[LH_STORE_PIECE_COUNT_MAX];
    int count = lh_store_map(rig->store, extent, slot, 0, bytes, pieces, LH_STORE_PIECE_COUNT_MAX);
    LH_CHECK(count > 0);
    for (int i = 0; i < count; i++) {
        int fd = lh_store_files(rig->store)[pieces[i].file_index].fd;
        LH_CHECK(pread(fd, buffer, pieces[i].bytes, (off_t)pieces[i].file_offset) ==
                 (ssize_t)pieces[i].bytes);
        for (uint64_t j = 0; j < pieces[i].bytes; j++) {
            if (buffer[j] != 0)
                return true;
        }
    }
    return false;
}

/* A caller's small edit of an extent that reads as zeros is surrounded by zeros. */
static void check_edit(struct rig *rig, uint32_t extent, uint8_t *buffer, uint64_t bytes)
{
    struct lh_error err = {0};
    float value = 3.0f;
    while (lh_engine_pause(rig->engine, 1000) == 0) {
    }
    LH_CHECK(lh_store_write_sync(rig->store, extent, 0, &value, sizeof(value), NULL) == 0);
    int rc = lh_store_read_sync(rig->store, extent, 0, buffer, bytes, &err);
    if (rc < 0)
        fprintf(stderr, "%s\n", err.message);
    LH_CHECK(rc == 0 && memcmp(buffer, &value, sizeof(value)) == 0);
    for (uint64_t i = sizeof(value); i < bytes; i++)
        LH_CHECK(buffer[i] == 0);
    lh_engine_resume(rig->engine);
}

/* Backward of the last unit, which has one parameter, is over, and its update may begin. */
static void last_unit_backward(struct rig *rig)
{
    const uint32_t index = RIG_UNIT_COUNT - 1;
    const uint32_t param = rig->units[index].param_first;
    LH_CHECK(lh_engine_acquire(rig->engine, index) == 1 ||
             lh_engine_acquire_wait(rig->engine, index, RIG_WAIT_S * 1000) == 1);
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
        lh_engine_handle_drop(rig->engine, i);
    lh_engine_unpin(rig->engine, index);
    for (uint32_t i = 0; i < RIG_GROUP_COUNT; i++)
        lh_engine_hyper_set(rig->engine, i, &rig->hypers[i]);
    for (uint64_t i = 0; i < rig->params[param].count; i++)
        ((float *)rig->gradients[param])[i] = 1.0f;
    LH_CHECK(lh_engine_gradient(rig->engine, param, rig->gradients[param], LH_DTYPE_F32) == 0);
}

/* From now on reads of states are held back, but for those of the large unit's first chunk. */
static void reads_hold(struct rig *rig)
{
    const struct lh_engine_unit *unit = &rig->units[RIG_UNIT_COUNT - 1];
    /* the bytes of a chunk's residuals */
    uint64_t chunk_bytes = rig->budget.chunk_elements * sizeof(uint16_t);
    struct lh_io_fault hold = {.kind = LH_IO_FAULT_KIND_HOLD,
                               .request_kinds = LH_IO_FAULT_ON(LH_IO_KIND_READ),
                               .after = chunk_bytes / rig_engine_opts(rig).transfer_bytes};
    LH_CHECK(unit->dtype == LH_DTYPE_BF16 && unit->elements > rig->budget.chunk_elements);
    LH_CHECK(lh_engine_pause(rig->engine, RIG_WAIT_S * 1000) == 1);
    lh_io_faulty_arm(rig->io, hold);
    lh_engine_resume(rig->engine);
}

/*
 * A first step that is aborted once the large unit's first chunk is written: its other chunk is
 * read only after that.
 */
static void abort_half_way(struct rig *rig, uint32_t slot, uint8_t *buffer)
{
    const struct lh_engine_unit *unit = &rig->units[RIG_UNIT_COUNT - 1];
    uint64_t bytes = lh_store_extent(rig->store, unit->moment2_extent).bytes;
    LH_CHECK(rig_forward(rig, LH_ENGINE_MODE_TRAIN) == 0);
    reads_hold(rig);
    uint64_t begin_ns = lh_clock_now_ns(&rig->clock);
    last_unit_backward(rig);
    while (!lh_io_faulty_has_fired(rig->io) ||
           !slot_has_bytes(rig, unit->moment1_extent, slot, buffer, bytes) ||
           !slot_has_bytes(rig, unit->moment2_extent, slot, buffer, bytes)) {
        LH_CHECK(lh_clock_now_ns(&rig->clock) - begin_ns < RIG_WAIT_S * UINT64_C(1000000000));
        usleep(1000);
    }
    LH_CHECK(lh_engine_abort(rig->engine, 1) == 0);
    lh_io_faulty_release(rig->io);
    LH_CHECK(rig_abort(rig) == 0);
}

static void test_abort_half_way(void)
{
    struct rig rig;
    lh_test_name("an edit after a step that was aborted between two writes of a slot finds zeros, "
                 "not the bytes of that step");
    rig_make(&rig, "half-way",
             (struct rig_opts){.large = true, .commit_every = 1, .in_memory = true});
    const struct lh_engine_unit *unit = &rig.units[RIG_UNIT_COUNT - 1];
    uint32_t extents[] = {unit->moment1_extent, unit->moment2_extent};
    uint64_t bytes = lh_store_extent(rig.store, extents[0]).bytes;
    uint32_t slot = lh_store_write_slot(rig.store, unit->store_group);
    uint8_t *buffer = aligned_alloc(LH_BLOCK_BYTES, bytes);
    LH_CHECK(buffer);
    abort_half_way(&rig, slot, buffer);
    for (uint32_t i = 0; i < LH_COUNT_OF(extents); i++) {
        LH_CHECK(lh_store_is_zero(rig.store, extents[i], slot));
        LH_CHECK(slot_has_bytes(&rig, extents[i], slot, buffer, bytes));
        check_edit(&rig, extents[i], buffer, bytes);
    }
    free(buffer);
    rig_unmake(&rig);
}

/* More than the engine's inbox has room for. */
#define FORK_CALL_COUNT 200000

static void test_fork(void)
{
    struct rig rig;
    struct lh_error err = {0};
    int status = 0;
    lh_test_name("in a forked child no call of the engine hangs, and the parent notices nothing");
    rig_make(&rig, "fork", (struct rig_opts){.commit_every = 1});
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    LH_CHECK(rig_forward_backward(&rig, 0x21) == 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        struct lh_engine_step_stats stats;
        alarm(20);
        LH_CHECK(lh_engine_error(rig.engine, &err) == -ECANCELED && err.message[0] != '\0');
        for (int i = 0; i < FORK_CALL_COUNT; i++) {
            lh_engine_handle_add(rig.engine, 1);
            lh_engine_handle_drop(rig.engine, 1);
            LH_CHECK(lh_engine_begin(rig.engine, LH_ENGINE_MODE_EVAL) == 0);
        }
        LH_CHECK(lh_engine_acquire_wait(rig.engine, 0, 100000) == -ECANCELED);
        LH_CHECK(lh_engine_flush(rig.engine, true, 100000) == -ECANCELED);
        LH_CHECK(lh_engine_abort(rig.engine, 100000) == -ECANCELED);
        LH_CHECK(lh_engine_pause(rig.engine, 100000) == -ECANCELED);
        LH_CHECK(lh_engine_commit_hold(rig.engine, 100000) == -ECANCELED);
        LH_CHECK(!lh_engine_stats(rig.engine, &stats));
        lh_engine_resume(rig.engine);
        lh_engine_stop(rig.engine);
        _exit(0);
    }
    LH_CHECK(child > 0 && waitpid(child, &status, 0) == child);
    LH_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    LH_CHECK(rig_close(&rig, 0x21) == 0);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_finish(&rig);
}

int main(void)
{
    test_abort_half_way();
    test_fork();
    return 0;
}
