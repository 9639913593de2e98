/*
 * Test gradients that wait on SSD: which units' do, where they lie and when their tensors are free,
 * what is counted, and that errors, an abort and a late gradient are noticed.
 */
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define GRADIENT_WRITE LH_ENGINE_LINK_GRADIENT_WRITE
#define GRADIENT_READ LH_ENGINE_LINK_GRADIENT_READ

/* The least memory, in which no gradient has room to wait. */
static const struct rig_opts opts_spill = {.manual = true,
                                           .in_memory = true,
                                           .least_memory = true,
                                           .plain_gradients = true,
                                           .schedule = LH_ENGINE_SCHEDULE_DEFERRED,
                                           .commit_every = 1};

static const struct lh_spill_unit *spill_of(const struct rig *rig, uint32_t unit)
{
    return &rig->engine->units[unit].parts->spill;
}

/* Bytes of the units that have all their gradients, of the parameters' dtype, and are chosen. */
static uint64_t spilled_bytes(const struct rig *rig, unsigned gradients)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        const struct lh_engine_unit *unit = &rig->units[i];
        bool is_whole = spill_of(rig, i)->is_chosen;
        for (uint32_t j = unit->param_first; j < unit->param_first + unit->param_count; j++)
            is_whole &= (gradients & (1u << j)) && rig_gradient_dtype(rig, j) == unit->dtype;
        bytes += is_whole ? unit->bytes : 0;
    }
    return bytes;
}

/* --- Which units ------------------------------------------------------------------------------ */

static void test_choice(void)
{
    uint32_t partly_count = 0;
    lh_test_name("gradients wait in memory for the units that forward uses first, as far as there "
                 "is room, and on SSD for all others");
    for (uint64_t spare_bytes = 0; spare_bytes < 400000; spare_bytes += 16384) {
        struct rig rig;
        struct rig_opts opts = opts_spill;
        uint64_t waiting_bytes = 0;
        uint64_t next_bytes = 0;
        bool is_any = false;
        opts.spare_bytes = spare_bytes;
        rig_make(&rig, "spill-choice", opts);
        for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
            bool is_chosen = spill_of(&rig, i)->is_chosen;
            if (rig.units[i].elements == 0) {
                LH_CHECK(!is_chosen);
                continue;
            }
            LH_CHECK(is_chosen || !is_any);
            next_bytes = is_chosen && !is_any ? rig.units[i].bytes : next_bytes;
            waiting_bytes += is_chosen ? 0 : rig.units[i].bytes;
            is_any |= is_chosen;
        }
        LH_CHECK(waiting_bytes <= rig.budget.gradient_waiting_bytes);
        LH_CHECK(!is_any || waiting_bytes + next_bytes > rig.budget.gradient_waiting_bytes);
        LH_CHECK(is_any == (rig.engine->spill != NULL));
        partly_count += is_any && waiting_bytes > 0;
        rig_unmake(&rig);
    }
    LH_CHECK(partly_count > 2);
}

static void test_never(void)
{
    lh_test_name("none waits on SSD if updates are eager, if a slot between commits holds newer "
                 "parameters, or if memory has room for all");
    for (int i = 0; i < 5; i++) {
        struct rig rig;
        struct rig_opts opts = opts_spill;
        opts.schedule = i == 0   ? LH_ENGINE_SCHEDULE_OPTIMIZED
                        : i == 1 ? LH_ENGINE_SCHEDULE_AUTO
                                 : LH_ENGINE_SCHEDULE_SERIAL;
        opts.commit_every = i == 2 ? 2 : 1;
        opts.least_memory = i != 3;
        rig_make(&rig, "spill-never", opts);
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
        LH_CHECK((stats.bytes[GRADIENT_WRITE] > 0) == (i == 4));
        LH_CHECK((stats.bytes[GRADIENT_READ] > 0) == (i == 4));
        rig_finish(&rig);
    }
}

/* --- Bytes ------------------------------------------------------------------------------------ */

static void test_counts(bool plain, bool large, enum lh_engine_schedule schedule)
{
    static const unsigned gradients[] = {RIG_GRADIENTS_ALL, 0xad, 0x01, RIG_GRADIENTS_ALL, 0x6e};
    struct rig rig;
    struct rig_opts opts = opts_spill;
    uint64_t most = 0;
    lh_test_name("complete units' gradients are written and read once, as planned, and incomplete "
                 "ones' wait in memory, schedule %d, %s%s",
                 (int)schedule, plain ? "all of the parameters' dtype" : "some in fp32",
                 large ? ", several chunks" : "");
    opts.plain_gradients = plain;
    opts.large = large;
    opts.schedule = schedule;
    rig_make(&rig, "spill-counts", opts);
    for (size_t i = 0; i < (large ? 2 : LH_COUNT_OF(gradients)); i++) {
        uint64_t expected = spilled_bytes(&rig, gradients[i]);
        LH_CHECK(rig_step(&rig, gradients[i]) == 0);
        struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
        LH_CHECK(stats.bytes[GRADIENT_WRITE] == expected);
        LH_CHECK(stats.bytes[GRADIENT_READ] == expected);
        most = lh_max_u64(most, expected);
        if (i % 2 == 0)
            LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == 0);
    }
    LH_CHECK(most > 0);
    rig_finish(&rig);
}

/* Check that the slot that no commit needs holds the unit's gradients, each at its place. */
static void check_on_ssd(const struct rig *rig, uint32_t index)
{
    const struct lh_engine_unit *unit = &rig->units[index];
    uint32_t slot = lh_store_write_slot(rig->store, unit->store_group);
    struct lh_store_piece pieces[LH_STORE_PIECE_COUNT_MAX];
    uint8_t *found = aligned_alloc(LH_BLOCK_BYTES, unit->bytes);
    uint8_t *expected = calloc(1, unit->bytes);
    LH_CHECK(found && expected && slot != lh_store_read_slot(rig->store, unit->store_group));
    int count = lh_store_map(rig->store, unit->param_extent, slot, 0, unit->bytes, pieces,
                             LH_STORE_PIECE_COUNT_MAX);
    LH_CHECK(count > 0);
    for (int i = 0; i < count; i++) {
        int fd = lh_store_files(rig->store)[pieces[i].file_index].fd;
        LH_CHECK(pread(fd, found + pieces[i].buffer_offset, pieces[i].bytes,
                       (off_t)pieces[i].file_offset) == (ssize_t)pieces[i].bytes);
    }
    for (uint32_t i = unit->param_first; i < unit->param_first + unit->param_count; i++) {
        const struct lh_engine_param *param = &rig->params[i];
        uint64_t element_bytes = lh_dtype_bytes(unit->dtype);
        memcpy(expected + param->first * element_bytes, rig->gradients[i],
               param->count * element_bytes);
    }
    LH_CHECK(memcmp(found, expected, unit->bytes) == 0);
    free(found);
    free(expected);
}

static void test_tensors_are_free(bool large)
{
    struct rig rig;
    struct rig_opts opts = opts_spill;
    lh_test_name("before the close the gradients are on SSD, zeros between them, and their tensors "
                 "are free: nothing reads them again%s",
                 large ? " (several chunks)" : "");
    opts.large = large;
    rig_make(&rig, "spill-free", opts);
    for (int i = 0; i < (large ? 1 : 2); i++) {
        LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_settle(&rig);
        for (uint32_t j = 0; j < RIG_UNIT_COUNT; j++) {
            if (rig.units[j].elements == 0)
                continue;
            LH_CHECK(spill_of(&rig, j)->state == LH_SPILL_STATE_DONE);
            check_on_ssd(&rig, j);
        }
        for (uint32_t j = 0; j < RIG_PARAM_COUNT; j++)
            LH_CHECK(lh_engine_gradient_is_consumed(rig.engine, j));
        LH_CHECK(lh_engine_gradient_wait(rig.engine, 0, 0) == 1);
        /* Nothing was read ahead: slabs were for gradients. */
        LH_CHECK(lh_core_stats(rig.engine, rig.step + 1)->bytes[LH_ENGINE_LINK_STATE_READ] == 0);
        LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
        for (uint32_t j = 0; j < RIG_PARAM_COUNT; j++)
            memset(rig.gradients[j], 0x7f, rig.params[j].count * lh_dtype_bytes(LH_DTYPE_BF16));
        rig_over_as_planned(&rig);
    }
    rig_finish(&rig);
}

static void test_held(void)
{
    struct rig rig;
    lh_test_name("a tensor stays the engine's until its gradient is written and summed");
    rig_make(&rig, "spill-held", opts_spill);
    rig.holds.requests = LH_IO_FAULT_ON(LH_IO_KIND_WRITE);
    LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0);
    rig_handles_drop(&rig);
    rig_hypers_set(&rig);
    LH_CHECK(lh_engine_gradient(rig.engine, 5, rig.gradients[5], LH_DTYPE_F16) == 0);
    rig_settle(&rig);
    LH_CHECK(spill_of(&rig, 3)->state == LH_SPILL_STATE_RUNNING);
    LH_CHECK(!lh_engine_gradient_is_consumed(rig.engine, 5));
    /* so that backward does not run ahead */
    LH_CHECK(lh_engine_gradient_wait(rig.engine, 0, 0) == 0);
    LH_CHECK(lh_engine_gradient_wait(rig.engine, 5000 * 2, 0) == 1);
    rig.holds.requests = 0;
    rig_settle(&rig);
    LH_CHECK(spill_of(&rig, 3)->state == LH_SPILL_STATE_DONE);
    LH_CHECK(lh_engine_gradient_is_consumed(rig.engine, 5));
    LH_CHECK(lh_engine_gradient_wait(rig.engine, 0, 0) == 1);
    LH_CHECK(rig_close(&rig, 0x20) == 0);
    rig_over_as_planned(&rig);
    rig_finish(&rig);
}

/* --- What may go wrong ------------------------------------------------------------------------ */

static void test_write_errors(void)
{
    uint64_t round_count = 0;
    lh_test_name("the N-th write of gradients fails, for every N: the step ends with that error, "
                 "and the store is at the step before");
    for (uint64_t after = 0;; after++) {
        struct rig rig;
        struct lh_error err = {0};
        struct rig_opts opts = opts_spill;
        rig_make(&rig, "spill-write", opts);
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_over(&rig);
        lh_io_faulty_arm(rig.io,
                         (struct lh_io_fault){.kind = LH_IO_FAULT_KIND_ERROR,
                                              .request_kinds = LH_IO_FAULT_ON(LH_IO_KIND_WRITE),
                                              .after = after,
                                              .code = -ENOSPC});
        int rc = rig_forward_backward(&rig, RIG_GRADIENTS_ALL);
        rc = rc == 0 ? rig_flush(&rig, false) : rc;
        if (rc == 0) {
            LH_CHECK(!lh_io_faulty_has_fired(rig.io));
            rig_unmake(&rig);
            break;
        }
        round_count++;
        LH_CHECK(rc == -ENOSPC && lh_engine_error(rig.engine, &err) == -ENOSPC);
        LH_CHECK(strstr(err.message, "gradients written") && strstr(err.message, "lohan.data"));
        LH_CHECK(lh_engine_abort(rig.engine, 0) == -ENOSPC);
        rig_shut(&rig);
        rig_reopen(&rig);
        LH_CHECK(rig.step == 1 && rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_finish(&rig);
    }
    LH_CHECK(round_count == 5); /* there is one round for each trainable unit */
}

static void test_read_errors(enum lh_io_fault_kind kind)
{
    uint64_t gradient_count = 0;
    int code = kind == LH_IO_FAULT_KIND_FLIP ? -EILSEQ : -EIO;
    lh_test_name("the N-th read after the close fails (%s), for every N: a wrong gradient is not "
                 "used, and the store is at the step before",
                 strerror(-code));
    for (uint64_t after = 0;; after++) {
        struct rig rig;
        struct lh_error err = {0};
        rig_make(&rig, "spill-read", opts_spill);
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_over(&rig);
        LH_CHECK(rig_forward_backward(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_settle(&rig);
        LH_CHECK(rig_close(&rig, RIG_GRADIENTS_ALL) == 0);
        lh_io_faulty_arm(rig.io,
                         (struct lh_io_fault){.kind = kind,
                                              .request_kinds = LH_IO_FAULT_ON(LH_IO_KIND_READ),
                                              .after = after,
                                              .bit = 1001 * after,
                                              .code = code});
        int rc = rig_flush(&rig, true);
        if (rc == 0) {
            LH_CHECK(!lh_io_faulty_has_fired(rig.io));
            rig_finish(&rig);
            break;
        }
        LH_CHECK(rc == code && lh_engine_error(rig.engine, &err) == code);
        gradient_count += strstr(err.message, "gradients read") != NULL;
        rig_shut(&rig);
        rig_reopen(&rig);
        LH_CHECK(rig.step == 1);
        rig_unmake(&rig);
    }
    LH_CHECK(gradient_count == 5);
}

static void test_abort(void)
{
    struct rig rig;
    lh_test_name("an abort waits for gradients on their way to SSD and takes the slabs back; the "
                 "step trains from the same values again");
    rig_make(&rig, "spill-abort", opts_spill);
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_over(&rig);
    for (uint32_t rounds = 0; rounds < 40; rounds += 2) {
        rig.holds.requests = rounds % 4 ? LH_IO_FAULT_ON(LH_IO_KIND_WRITE) : 0;
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0);
        rig_handles_drop(&rig);
        for (uint32_t i = 0; i < RIG_PARAM_COUNT; i++) {
            if (i != 4)
                LH_CHECK(lh_engine_gradient(rig.engine, i, rig.gradients[i],
                                            rig_gradient_dtype(&rig, i)) == 0);
        }
        for (uint32_t i = 0; i < rounds; i++)
            rig_poll(&rig);
        LH_CHECK(lh_engine_abort(rig.engine, 0) == 0);
        rig_settle(&rig);
        if (rig.holds.requests && rounds > 10)
            LH_CHECK(lh_engine_abort(rig.engine, 0) == 0); /* a slab is still lent at this time */
        rig.holds.requests = 0;
        LH_CHECK(rig_abort(&rig) == 0);
        for (uint32_t i = 0; i < rig.engine->budget.slab_count; i++)
            LH_CHECK(rig.engine->slabs[i].chunk == LH_CHUNK_NONE && !rig.engine->slabs[i].is_lent);
        for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
            LH_CHECK(spill_of(&rig, i)->state == LH_SPILL_STATE_NONE);
        LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_EVAL) == 0);
    }
    LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
    rig_over_as_planned(&rig);
    rig_finish(&rig);
}

static void test_abort_without_step(void)
{
    struct rig rig;
    lh_test_name("a step without gradients after an abort has no bytes of spilled gradients in its "
                 "plan, which the abort reset");
    rig_make(&rig, "spill-nothing", opts_spill);
    for (int i = 0; i < 2; i++) {
        LH_CHECK(rig_step(&rig, RIG_GRADIENTS_ALL) == 0);
        rig_over_as_planned(&rig);
    }
    LH_CHECK(rig_forward(&rig, LH_ENGINE_MODE_TRAIN) == 0); /* plans that units are spilled */
    rig_handles_drop(&rig);
    LH_CHECK(rig_abort(&rig) == 0);
    LH_CHECK(rig_close(&rig, 0) == 0);
    struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
    LH_CHECK(stats.bytes[GRADIENT_WRITE] == 0 && stats.bytes[GRADIENT_READ] == 0);
    rig_finish(&rig);
}

static void test_late_gradient(void)
{
    struct rig rig;
    struct lh_error err = {0};
    double square_sum = 0;
    struct rig_opts opts = opts_spill;
    lh_test_name("once the norm is asked for, an accelerator's gradients of incomplete units go to "
                 "SSD, too, and another gradient of such a unit is refused");
    opts.device = "emu";
    opts.device_bytes = 81920;
    rig_make(&rig, "spill-late", opts);
    for (int i = 0; i < 2; i++) {
        /* units 0 and 1 in part, and all of unit 3 */
        LH_CHECK(rig_forward_backward(&rig, 0x25) == 0);
        rig_settle(&rig);
        LH_CHECK(spill_of(&rig, 1)->state == LH_SPILL_STATE_NONE);
        LH_CHECK(spill_of(&rig, 3)->state == LH_SPILL_STATE_DONE);
        LH_CHECK(lh_norm_wait(rig.engine, &square_sum, 0) == 0);
        rig_settle(&rig);
        LH_CHECK(spill_of(&rig, 0)->state == LH_SPILL_STATE_DONE);
        LH_CHECK(spill_of(&rig, 1)->state == LH_SPILL_STATE_DONE);
        if (i == 0) {
            LH_CHECK(rig_close(&rig, 0x25) == 0);
            struct lh_engine_step_stats stats = rig_over_as_planned(&rig);
            LH_CHECK(stats.bytes[GRADIENT_WRITE] ==
                     rig.units[0].bytes + rig.units[1].bytes + rig.units[3].bytes);
        }
    }
    LH_CHECK(lh_engine_gradient(rig.engine, 3, rig.gradients[3], LH_DTYPE_F32) == 0);
    rig_settle(&rig);
    LH_CHECK(lh_engine_error(rig.engine, &err) == -EINVAL);
    LH_CHECK(strstr(err.message, "a gradient of unit 1 arrived after the norm"));
    rig_unmake(&rig);
}

int main(void)
{
    test_choice();
    test_never();
    for (int i = 0; i < 2; i++) {
        test_counts(true, false, i ? LH_ENGINE_SCHEDULE_SERIAL : LH_ENGINE_SCHEDULE_DEFERRED);
        test_counts(false, false, i ? LH_ENGINE_SCHEDULE_SERIAL : LH_ENGINE_SCHEDULE_DEFERRED);
        test_tensors_are_free(i != 0);
    }
    test_counts(true, true, LH_ENGINE_SCHEDULE_DEFERRED);
    test_held();
    test_write_errors();
    test_read_errors(LH_IO_FAULT_KIND_ERROR);
    test_read_errors(LH_IO_FAULT_KIND_FLIP);
    test_abort();
    test_abort_without_step();
    test_late_gradient();
    return 0;
}
