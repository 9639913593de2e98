/*
 * Test slabs: where their memory and arrays are, which one is found for a chunk or a feature, and
 * that one that is in use is not given again.
 */
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define SLAB_COUNT 3

/* An engine that has not begun, with fewer slabs than chunks, of which none is kept. */
static struct lh_engine *engine_make(struct rig *rig)
{
    rig_make(rig, "slab",
             (struct rig_opts){
                 .manual = true, .in_memory = true, .least_memory = true, .commit_every = 1});
    struct lh_engine *engine = rig->engine;
    LH_CHECK(engine->budget.slab_count == SLAB_COUNT && engine->budget.kept_chunk_count == 0);
    LH_CHECK(engine->chunk_count == 5); /* there is one for each trainable unit */
    return engine;
}

static struct lh_unit *unit_of(struct lh_engine *engine, uint32_t chunk)
{
    return &engine->units[engine->chunks[chunk].unit];
}

/* Put a chunk into a slab, as if it was being read or has been. */
static void chunk_put(struct lh_engine *engine, uint32_t chunk, uint32_t slab, bool is_loaded)
{
    lh_slab_give(engine, &engine->slabs[slab], &engine->chunks[chunk]);
    lh_chunk_state_set(engine, &engine->chunks[chunk], LH_CHUNK_STATE_READING);
    if (is_loaded)
        lh_chunk_state_set(engine, &engine->chunks[chunk], LH_CHUNK_STATE_LOADED);
}

/* Free every slab, and queue no update. */
static void empty(struct lh_engine *engine)
{
    for (uint32_t i = 0; i < SLAB_COUNT; i++) {
        struct lh_slab *slab = &engine->slabs[i];
        if (slab->is_lent)
            lh_slab_return(engine, slab);
        if (slab->chunk == LH_CHUNK_NONE)
            continue;
        if (engine->chunks[slab->chunk].state == LH_CHUNK_STATE_READING)
            lh_chunk_state_set(engine, &engine->chunks[slab->chunk], LH_CHUNK_STATE_LOADED);
        lh_slab_clear(engine, slab);
    }
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        engine->units[i].update.is_queued = false;
        engine->units[i].state = LH_UNIT_STATE_ABSENT;
    }
}

static void test_layout(void)
{
    struct rig rig;
    lh_test_name("slabs follow the parameters' region one after another, within the memory given");
    struct lh_engine *engine = engine_make(&rig);
    const struct lh_budget *budget = &engine->budget;
    for (uint32_t i = 0; i < SLAB_COUNT; i++) {
        const struct lh_slab *slab = &engine->slabs[i];
        LH_CHECK(slab->memory == rig.memory + budget->region_bytes + i * budget->slab_bytes);
        LH_CHECK(lh_is_aligned((uintptr_t)slab->memory, LH_BLOCK_BYTES));
        LH_CHECK(slab->memory + budget->slab_bytes <= rig.memory + rig.memory_bytes);
        LH_CHECK(slab->chunk == LH_CHUNK_NONE && !slab->is_lent && slab->engine == engine);
    }
    lh_test_name("R, M and V of a chunk lie one after another, without the arrays that a dtype "
                 "does not have, and end within the slab");
    for (uint32_t i = 0; i < engine->chunk_count; i++) {
        const struct lh_unit *unit = unit_of(engine, i);
        const uint64_t residual = unit->desc->dtype == LH_DTYPE_F32    ? 0
                                  : unit->desc->dtype == LH_DTYPE_BF16 ? 2
                                                                       : 4;
        const uint64_t count = engine->chunks[i].count;
        const uint64_t offsets[] = {0, residual * count, (residual + 4) * count,
                                    (residual + 8) * count};
        for (uint32_t j = 0; j < LH_COUNT_OF(offsets); j++)
            LH_CHECK(lh_slab_array(&engine->slabs[1], unit, j, count) ==
                     engine->slabs[1].memory + offsets[j]);
        LH_CHECK(lh_is_aligned(residual * count, LH_BLOCK_BYTES)); /* as direct I/O requires */
        LH_CHECK(offsets[3] <= budget->slab_bytes);
    }
    rig_unmake(&rig);
}

static void test_free_first(void)
{
    struct rig rig;
    lh_test_name("the first free slab is found, for an update, to read ahead, and for a feature");
    struct lh_engine *engine = engine_make(&rig);
    for (uint32_t taken = 0; taken < SLAB_COUNT; taken++) {
        struct lh_unit *unit = unit_of(engine, taken);
        unit->update.is_queued = false;
        LH_CHECK(lh_slab_find(engine, unit) == taken);
        unit->update.is_queued = true;
        LH_CHECK(lh_slab_find(engine, unit) == taken);
        LH_CHECK(lh_slab_find(engine, NULL) == taken);
        chunk_put(engine, taken, taken, true);
    }
    lh_slab_clear(engine, &engine->slabs[1]);
    LH_CHECK(engine->chunks[1].state == LH_CHUNK_STATE_IDLE);
    LH_CHECK(engine->chunks[1].slab == LH_CHUNK_NONE);
    LH_CHECK(lh_slab_find(engine, NULL) == 1);
    LH_CHECK(engine->slabs[0].chunk == 0 && engine->slabs[2].chunk == 2); /* no slab was taken */
    empty(engine);
    rig_unmake(&rig);
}

static void test_ahead_gives_way(void)
{
    struct rig rig;
    lh_test_name("a chunk that was read ahead gives its slab to a queued update or a feature, is "
                 "read ahead again later, and does not give it to another reading ahead");
    struct lh_engine *engine = engine_make(&rig);
    for (uint32_t who = 0; who < 3; who++) {
        struct lh_unit *unit = who < 2 ? unit_of(engine, 4) : NULL;
        chunk_put(engine, 0, 0, false); /* it is still being read, so it cannot be taken */
        chunk_put(engine, 1, 1, true);
        chunk_put(engine, 2, 2, true);
        unit_of(engine, 2)->update.is_queued = true; /* its update waits for its parameters */
        if (unit)
            unit->update.is_queued = who == 1;
        engine->updates.ahead_first = 4;
        uint32_t found = lh_slab_find(engine, unit);
        if (who == 0) {
            LH_CHECK(found == LH_CHUNK_NONE && engine->updates.ahead_first == 4);
            LH_CHECK(engine->slabs[1].chunk == 1 && engine->slabs[2].chunk == 2);
        } else {
            LH_CHECK(found == 1 && engine->updates.ahead_first == 0);
            LH_CHECK(engine->slabs[1].chunk == LH_CHUNK_NONE);
            LH_CHECK(engine->chunks[1].state == LH_CHUNK_STATE_IDLE);
            LH_CHECK(unit_of(engine, 1)->update.chunks_loaded == 0);
            LH_CHECK(engine->slabs[0].chunk == 0 && engine->slabs[2].chunk == 2);
        }
        empty(engine);
    }
    rig_unmake(&rig);
}

/* Every slab holds a chunk of a unit that is queued, and that waits for its parameters. */
static void all_blocked(struct lh_engine *engine)
{
    empty(engine);
    for (uint32_t i = 0; i < SLAB_COUNT; i++) {
        chunk_put(engine, i, i, true);
        unit_of(engine, i)->update.is_queued = true;
    }
    unit_of(engine, 4)->update.is_queued = true;
}

static void test_blocked_gives_way(void)
{
    struct rig rig;
    lh_test_name("if every slab holds a chunk whose unit waits for its parameters, a unit that has "
                 "its own takes one; a unit that has not waits");
    struct lh_engine *engine = engine_make(&rig);
    struct lh_unit *unit = unit_of(engine, 4);
    all_blocked(engine);
    LH_CHECK(lh_slab_find(engine, unit) == LH_CHUNK_NONE);
    unit->state = LH_UNIT_STATE_UPDATING;
    uint32_t found = lh_slab_find(engine, unit);
    LH_CHECK(found < SLAB_COUNT && engine->slabs[found].chunk == LH_CHUNK_NONE);
    LH_CHECK(engine->chunks[found].state == LH_CHUNK_STATE_IDLE);
    all_blocked(engine);
    /* the gradients are being written to SSD */
    LH_CHECK(lh_slab_find(engine, NULL) != LH_CHUNK_NONE);

    lh_test_name("it waits if a slab will become free: one that is read, computed or lent");
    all_blocked(engine);
    unit->state = LH_UNIT_STATE_UPDATING;
    unit_of(engine, 1)->state = LH_UNIT_STATE_UPDATING;
    LH_CHECK(lh_slab_find(engine, unit) == LH_CHUNK_NONE);
    LH_CHECK(lh_slab_find(engine, NULL) == LH_CHUNK_NONE);
    all_blocked(engine);
    unit->state = LH_UNIT_STATE_UPDATING;
    lh_slab_clear(engine, &engine->slabs[2]);
    lh_slab_lend(engine, &engine->slabs[2], &engine->chunks[3]);
    LH_CHECK(lh_slab_find(engine, unit) == LH_CHUNK_NONE);
    lh_slab_return(engine, &engine->slabs[2]);
    LH_CHECK(lh_slab_find(engine, unit) == 2);
    chunk_put(engine, 2, 2, false);
    LH_CHECK(lh_slab_find(engine, unit) == LH_CHUNK_NONE);

    lh_test_name("it does not wait for chunks that wait until all chunks of their unit have slabs");
    for (int is_collecting = 0; is_collecting < 2; is_collecting++) {
        all_blocked(engine);
        lh_slab_clear(engine, &engine->slabs[1]);
        chunk_put(engine, 4, 1, true);
        unit->state = LH_UNIT_STATE_UPDATING;
        unit->update.turn = is_collecting ? LH_UPDATE_TURN_COLLECTS : LH_UPDATE_TURN_ANY;
        found = lh_slab_find(engine, unit);
        LH_CHECK(is_collecting ? found == 0 || found == 2 : found == LH_CHUNK_NONE);
        LH_CHECK(engine->slabs[1].chunk == 4);
    }
    empty(engine);
    rig_unmake(&rig);
}

static void test_kept(void)
{
    struct rig rig;
    lh_test_name("slabs that keep a chunk are never found, free or not");
    struct lh_engine *engine = engine_make(&rig);
    engine->budget.kept_chunk_count = 2;
    unit_of(engine, 0)->update.is_queued = true;
    LH_CHECK(lh_slab_find(engine, unit_of(engine, 0)) == 2);
    chunk_put(engine, 0, 2, false);
    LH_CHECK(lh_slab_find(engine, unit_of(engine, 0)) == LH_CHUNK_NONE);
    LH_CHECK(lh_slab_find(engine, NULL) == LH_CHUNK_NONE);
    engine->budget.kept_chunk_count = 0;
    empty(engine);
    rig_unmake(&rig);

    struct rig_opts opts = {.manual = true, .in_memory = true, .commit_every = 1};
    rig_make(&rig, "slab-all", opts);
    engine = rig.engine;
    LH_CHECK(engine->budget.kept_chunk_count == engine->budget.slab_count);
    LH_CHECK(lh_slab_find(engine, NULL) == LH_CHUNK_NONE);
    rig_unmake(&rig);
}

/* --- Wrong use -------------------------------------------------------------------------------- */

static void give_taken(void *context)
{
    struct lh_engine *engine = context;
    lh_slab_give(engine, &engine->slabs[0], &engine->chunks[3]);
}

static void give_twice(void *context)
{
    struct lh_engine *engine = context;
    lh_slab_give(engine, &engine->slabs[2], &engine->chunks[0]);
}

static void lend_taken(void *context)
{
    struct lh_engine *engine = context;
    lh_slab_lend(engine, &engine->slabs[0], &engine->chunks[3]);
}

static void lend_lent(void *context)
{
    struct lh_engine *engine = context;
    lh_slab_lend(engine, &engine->slabs[1], &engine->chunks[3]);
}

static void return_given(void *context)
{
    struct lh_engine *engine = context;
    lh_slab_return(engine, &engine->slabs[0]);
}

static void clear_lent(void *context)
{
    struct lh_engine *engine = context;
    lh_slab_clear(engine, &engine->slabs[1]);
}

static void clear_free(void *context)
{
    struct lh_engine *engine = context;
    lh_slab_clear(engine, &engine->slabs[2]);
}

static void clear_reading(void *context)
{
    struct lh_engine *engine = context;
    lh_slab_clear(engine, &engine->slabs[0]);
}

static void array_beyond(void *context)
{
    struct lh_engine *engine = context;
    lh_slab_array(&engine->slabs[0], &engine->units[0], LH_STATE_ARRAY_COUNT + 1, 1);
}

static void test_wrong_use(void)
{
    static void (*const actions[])(void *context) = {give_taken, give_twice,    lend_taken,
                                                     lend_lent,  return_given,  clear_lent,
                                                     clear_free, clear_reading, array_beyond};
    struct rig rig;
    lh_test_name("a slab is given, lent, returned and cleared only in its turn");
    struct lh_engine *engine = engine_make(&rig);
    chunk_put(engine, 0, 0, false);
    lh_slab_lend(engine, &engine->slabs[1], &engine->chunks[1]);
    LH_CHECK(engine->chunks[1].slab == LH_CHUNK_NONE); /* its states are not in memory */
    for (size_t i = 0; i < LH_COUNT_OF(actions); i++)
        LH_CHECK(lh_test_aborts(actions[i], engine));
    empty(engine);
    rig_unmake(&rig);
}

static void test_account(void)
{
    struct rig rig;
    struct lh_engine_trace_event events[2];
    lh_test_name("a job on a slab is counted in the open step's time and traced with its unit");
    struct lh_engine *engine = engine_make(&rig);
    lh_slab_lend(engine, &engine->slabs[1], &engine->chunks[3]);
    struct lh_job job = {.exec = {.context = &engine->slabs[1],
                                  .work_bytes = 77,
                                  .started_ns = 1000,
                                  .ended_ns = 1250,
                                  .worker_index = 6}};
    lh_slab_job_account(engine, &job, LH_ENGINE_TRACE_GATHER);
    job.exec.ended_ns = 1001;
    lh_slab_job_account(engine, &job, LH_ENGINE_TRACE_UPDATE);
    LH_CHECK(lh_core_stats(engine, 1)->update_busy_ns == 251);
    LH_CHECK(lh_engine_trace(engine, events, 2) == 2);
    LH_CHECK(events[0].kind == LH_ENGINE_TRACE_GATHER && events[1].kind == LH_ENGINE_TRACE_UPDATE);
    LH_CHECK(events[0].unit == engine->chunks[3].unit && events[0].lane == 6);
    LH_CHECK(events[0].start_ns == 1000 && events[0].end_ns == 1250 && events[0].bytes == 77);
    LH_CHECK(events[0].step == 1);
    empty(engine);
    rig_unmake(&rig);
}

int main(void)
{
    test_layout();
    test_free_first();
    test_ahead_gives_way();
    test_blocked_gives_way();
    test_kept();
    test_wrong_use();
    test_account();
    return 0;
}
