/*
 * Test the tables of transitions of the engine's state machines: which transitions exist, and that
 * the functions that change a state refuse all others.
 */
#include "lh_test.h"
#include "sched/engine_private.h"

#define STATE_COUNT_MAX 8

/* A machine, and what is expected of it: one row per state, 'x' where a transition to a column is
 * allowed. The states are in the order of their enum. */
struct machine {
    const char *name;
    const struct lh_transition *table;
    int state_count;
    const char *rows[STATE_COUNT_MAX];
};

static const struct machine machines[] = {
    /* ABSENT LOADING READY UPDATING */
    {"unit", lh_states_unit, 4, {".x..", "x.x.", "x..x", "x.x."}},
    /* IDLE READING LOADED COMPUTING COMPUTED WRITING */
    {"chunk", lh_states_chunk, 6, {".x....", "..x...", "xx.x.x", "....x.", "x....x", "x.x..."}},
    /* OPEN CLOSED COMMITTING ABORTING */
    {"step", lh_states_step, 4, {".xxx", "x.x.", "x...", "x..."}},
    /* ABSENT COPYING READY LEAVING */
    {"copy", lh_states_copy, 4, {".x..", "..x.", "x..x", "x..."}},
    /* NONE RUNNING DONE */
    {"spill", lh_states_spill, 3, {".x.", "x.x", "x.."}},
    {"norm", lh_states_norm, 3, {".x.", "..x", "x.."}},
    /* FREE QUEUED COPYING SUMMING HELD WRITING AWAY READING */
    {"saved",
     lh_states_saved,
     8,
     {".x......", "..xx....", "...xx...", "....x...", "x....xx.", "....x...", "x......x",
      "....x..."}},
};

static void test_tables(void)
{
    for (size_t i = 0; i < LH_COUNT_OF(machines); i++) {
        const struct machine *machine = &machines[i];
        lh_test_name("a %s changes its state along its diagram and in no other way", machine->name);
        /* The states beyond the last and before the first are rejected, too. */
        for (int from = -1; from <= machine->state_count; from++) {
            for (int to = -1; to <= machine->state_count; to++) {
                bool is_state = from >= 0 && to >= 0 && from < machine->state_count &&
                                to < machine->state_count;
                bool expected = is_state && machine->rows[from][to] == 'x';
                if (lh_states_may(machine->table, from, to) != expected)
                    fprintf(stderr, "%s: %d -> %d\n", machine->name, from, to);
                LH_CHECK(lh_states_may(machine->table, from, to) == expected);
            }
        }
    }
}

static void test_ways_back(void)
{
    lh_test_name("from every state a machine comes back to its first one, and reaches every other");
    for (size_t i = 0; i < LH_COUNT_OF(machines); i++) {
        int count = machines[i].state_count;
        for (int start = 0; start < count; start++) {
            bool is_reached[STATE_COUNT_MAX] = {false};
            is_reached[start] = true;
            for (int round = 0; round < count; round++) {
                for (int edge = 0; edge < count * count; edge++)
                    is_reached[edge % count] |=
                        is_reached[edge / count] &&
                        lh_states_may(machines[i].table, edge / count, edge % count);
            }
            for (int j = 0; j < count; j++)
                LH_CHECK(is_reached[j]);
        }
    }
}

/* --- The setters ------------------------------------------------------------------------------ */

/* One unit with one chunk, and the parts of an engine that the setters read. */
struct small {
    struct lh_engine engine;
    struct lh_unit unit;
    struct lh_engine_unit desc;
    struct lh_unit_parts parts;
    struct lh_chunk chunk;
    int to;
};

static struct small *small_make(int from, int to)
{
    static struct small small;
    memset(&small, 0, sizeof(small));
    small.engine.units = &small.unit;
    small.engine.opts.unit_count = 1;
    small.unit.desc = &small.desc;
    small.unit.parts = &small.parts;
    small.engine.chunks = &small.chunk;
    small.engine.chunk_count = 1;
    small.unit.chunk_count = 1;
    small.unit.state = (enum lh_unit_state)from;
    small.chunk.state = (enum lh_chunk_state)from;
    small.unit.update.chunks_loaded = 1;
    small.unit.update.chunks_to_pass = 1;
    small.to = to;
    if (to == LH_CHUNK_STATE_LOADED) { /* the chunk is counted when it arrives there */
        small.unit.update.chunks_loaded = 0;
        small.unit.update.chunks_to_pass = 0;
    }
    return &small;
}

static void unit_set(void *context)
{
    struct small *small = context;
    lh_unit_state_set(&small->unit, (enum lh_unit_state)small->to);
}

static void chunk_set(void *context)
{
    struct small *small = context;
    lh_chunk_state_set(&small->engine, &small->chunk, (enum lh_chunk_state)small->to);
}

static void check_setter(const struct machine *machine, void (*set)(void *context),
                         const int *state)
{
    for (int from = 0; from < machine->state_count; from++) {
        for (int to = 0; to < machine->state_count; to++) {
            struct small *small = small_make(from, to);
            if (machine->rows[from][to] != 'x') {
                LH_CHECK(lh_test_aborts(set, small));
                continue;
            }
            set(small);
            LH_CHECK(*state == to);
        }
    }
}

static void test_setters(void)
{
    struct small *small = small_make(0, 0);
    lh_test_name("a unit's and a chunk's setter make every allowed transition and die of the rest");
    _Static_assert(sizeof(enum lh_unit_state) == sizeof(int), "read through a pointer to int");
    check_setter(&machines[0], unit_set, (const int *)(const void *)&small->unit.state);
    check_setter(&machines[1], chunk_set, (const int *)(const void *)&small->chunk.state);
}

static void step_close(void *context)
{
    lh_step_close(context);
}

static void step_abort(void *context)
{
    lh_step_abort(context);
}

static void test_step_calls(void)
{
    lh_test_name("a step is closed or aborted only while it is open");
    for (int from = LH_STEP_STATE_CLOSED; from <= LH_STEP_STATE_ABORTING; from++) {
        struct small *small = small_make(0, 0);
        small->engine.step_state = (enum lh_step_state)from;
        LH_CHECK(lh_test_aborts(step_close, &small->engine));
        LH_CHECK(lh_test_aborts(step_abort, &small->engine));
    }
    struct small *small = small_make(0, 0);
    lh_step_abort(&small->engine);
    LH_CHECK(small->engine.step_state == LH_STEP_STATE_ABORTING);
}

static void norms_forget(void *context)
{
    lh_norm_feature.step_forgotten(context);
}

static void test_feature_calls(void)
{
    lh_test_name("a step is not forgotten while a worker sums a unit's gradients, and gradients "
                 "that wait on SSD are released only when they are written and summed");
    struct small *small = small_make(0, 0);
    small->unit.parts->norm.state = LH_NORM_STATE_RUNNING;
    LH_CHECK(lh_test_aborts(norms_forget, &small->engine));
    small->unit.parts->norm.state = LH_NORM_STATE_DONE;
    norms_forget(&small->engine);
    LH_CHECK(small->unit.parts->norm.state == LH_NORM_STATE_NONE);
    for (int written = 0; written <= LH_SPILL_STATE_DONE; written++) {
        for (int summed = 0; summed <= LH_NORM_STATE_DONE; summed++) {
            small->unit.parts->spill.state = (enum lh_spill_state)written;
            small->unit.parts->norm.state = (enum lh_norm_state)summed;
            if (written == LH_SPILL_STATE_DONE && summed == LH_NORM_STATE_DONE)
                continue;
            lh_spill_release(&small->engine, &small->unit);
            LH_CHECK(!small->unit.parts->spill.is_released);
        }
    }
    small->unit.parts->spill.written_count = small->unit.chunk_count;
    small->unit.update.chunks_computed = small->unit.chunk_count;
    lh_spill_release(&small->engine, &small->unit);
    LH_CHECK(small->unit.parts->spill.is_released);
    LH_CHECK(small->unit.update.gradient_bytes == 0);
}

int main(void)
{
    test_tables();
    test_ways_back();
    test_setters();
    test_step_calls();
    test_feature_calls();
    return 0;
}
