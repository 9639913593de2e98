/*
 * Test plans of a region of copies that continue into the next cycle, with ops executed in any
 * order that they allow.
 */
#include "lh_test.h"
#include "plan/residency.h"

#define UNIT_COUNT_MAX 12
#define OP_COUNT_MAX 256
#define CYCLE_COUNT 5

static struct lh_alloc alloc = LH_ALLOC_INIT;

/* Units and their copies; the value of a unit is the number of its updates. */
struct copies {
    struct lh_residency_unit units[UNIT_COUNT_MAX];
    uint32_t unit_count;
    uint64_t offsets[UNIT_COUNT_MAX];
    uint64_t updates[UNIT_COUNT_MAX];
    uint64_t values[UNIT_COUNT_MAX]; /* the copy's values */
    uint64_t uses[UNIT_COUNT_MAX];
    bool is_open[UNIT_COUNT_MAX];
    struct lh_residency_op ops[2 * OP_COUNT_MAX];
    uint64_t op_count;
    uint64_t loaded_bytes;
    uint64_t seed;
};

static uint64_t below(struct copies *copies, uint64_t end)
{
    return lh_test_random(&copies->seed) % end;
}

static bool may_execute(const struct copies *copies, uint64_t at)
{
    const struct lh_residency_op *op = &copies->ops[at];
    bool is_idle = !copies->is_open[op->unit] && copies->uses[op->unit] >= op->uses_before;
    for (uint64_t i = 0; i < at; i++) {
        if (!lh_residency_commutes(copies->units, &copies->ops[i], op))
            return false;
    }
    return op->kind != LH_RESIDENCY_OP_NONE && is_idle;
}

static void execute(struct copies *copies, struct lh_residency_op *op)
{
    uint64_t bytes = copies->units[op->unit].bytes;
    bool is_there = copies->offsets[op->unit] != LH_RESIDENCY_ABSENT;
    LH_CHECK(is_there == (op->kind == LH_RESIDENCY_OP_EVICT));
    for (uint32_t i = 0; op->kind == LH_RESIDENCY_OP_LOAD && i < copies->unit_count; i++)
        LH_CHECK(copies->offsets[i] == LH_RESIDENCY_ABSENT ||
                 op->offset >= copies->offsets[i] + copies->units[i].bytes ||
                 copies->offsets[i] >= op->offset + bytes);
    copies->offsets[op->unit] = is_there ? LH_RESIDENCY_ABSENT : op->offset;
    copies->values[op->unit] = copies->updates[op->unit];
    copies->loaded_bytes += is_there ? 0 : bytes;
    op->kind = LH_RESIDENCY_OP_NONE;
}

/* Execute some of the possible ops in any order, or all of them. */
static void some_execute(struct copies *copies, bool is_all)
{
    for (bool moved = true; moved && (is_all || below(copies, 2) > 0);) {
        uint64_t first = copies->op_count > 0 ? below(copies, copies->op_count) : 0;
        moved = false;
        for (uint64_t i = 0; i < copies->op_count && !moved; i++) {
            uint64_t at = (first + i) % copies->op_count;
            moved = may_execute(copies, at);
            if (moved)
                execute(copies, &copies->ops[at]);
        }
    }
}

static void event_execute(struct copies *copies, struct lh_residency_event event)
{
    some_execute(copies, false);
    if (event.kind == LH_RESIDENCY_EVENT_END) {
        copies->is_open[event.unit] = false;
        return;
    }
    if (event.kind == LH_RESIDENCY_EVENT_BEGIN) {
        if (copies->offsets[event.unit] == LH_RESIDENCY_ABSENT ||
            copies->values[event.unit] != copies->updates[event.unit])
            some_execute(copies, true);
        LH_CHECK(copies->offsets[event.unit] != LH_RESIDENCY_ABSENT);
        LH_CHECK(copies->values[event.unit] == copies->updates[event.unit]);
        copies->is_open[event.unit] = true;
    } else {
        copies->updates[event.unit]++;
    }
    copies->uses[event.unit]++;
}

/* Forward and backward; an update follows each use or, if deferred, precedes the next forward. */
static uint64_t cycle_make(uint32_t unit_count, bool is_deferred, struct lh_residency_event *events)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < unit_count; i++) {
        if (is_deferred)
            events[count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_UPDATE};
        events[count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_BEGIN};
        events[count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_END};
    }
    for (uint32_t i = unit_count; i-- > 0;) {
        events[count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_BEGIN};
        events[count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_END};
        if (!is_deferred)
            events[count++] = (struct lh_residency_event){i, LH_RESIDENCY_EVENT_UPDATE};
    }
    return count;
}

/* The bytes loaded by the last of several cycles. */
static uint64_t cycles_run(struct copies *copies, uint64_t region_bytes, bool is_ahead,
                           bool is_deferred)
{
    struct lh_residency state;
    struct lh_residency_event events[5 * UNIT_COUNT_MAX];
    uint64_t count = cycle_make(copies->unit_count, is_deferred, events);
    struct lh_error err = {0};
    LH_CHECK(lh_residency_init(&state, &alloc, copies->units, copies->unit_count, region_bytes,
                               &err) == 0);
    state.has_copies = true;
    copies->op_count = 0;
    for (uint32_t i = 0; i < copies->unit_count; i++) {
        copies->offsets[i] = LH_RESIDENCY_ABSENT;
        copies->uses[i] = 0;
    }
    for (int cycle = 0; cycle < CYCLE_COUNT; cycle++) {
        uint64_t bytes[2] = {0, 0};
        uint64_t failed_at = 0;
        int64_t added =
            lh_residency_plan(&state, events, count, true, copies->ops + copies->op_count,
                              OP_COUNT_MAX, &bytes[0], &failed_at, &err);
        LH_CHECK(added >= 0);
        copies->op_count += (uint64_t)added;
        if (is_ahead) {
            added = lh_residency_plan_ahead(&state, events, count, copies->ops + copies->op_count,
                                            OP_COUNT_MAX, &bytes[1], &err);
            LH_CHECK(added >= 0);
            copies->op_count += (uint64_t)added;
        }
        copies->loaded_bytes = 0;
        for (uint64_t i = 0; i < count; i++)
            event_execute(copies, events[i]);
        some_execute(copies, true);
        for (uint64_t i = 0; i < copies->op_count; i++)
            LH_CHECK(copies->ops[i].kind == LH_RESIDENCY_OP_NONE);
        LH_CHECK(copies->loaded_bytes == bytes[0] + bytes[1]);
        copies->op_count = 0;
        for (uint32_t i = 0; i < copies->unit_count; i++)
            LH_CHECK(copies->offsets[i] == state.offsets[i]);
        /* the unit that forward reads first is in memory and up to date */
        if (is_ahead && !is_deferred)
            LH_CHECK(copies->offsets[0] != LH_RESIDENCY_ABSENT &&
                     copies->values[0] == copies->updates[0]);
    }
    lh_residency_deinit(&state, &alloc);
    return copies->loaded_bytes;
}

static void test_cycles(bool is_deferred)
{
    lh_test_name("copies %s, ops in any order that they allow: every use finds the last update's "
                 "values, and no more is loaded than without planning ahead",
                 is_deferred ? "updated before forward" : "made again ahead of the next cycle");
    int round_max = lh_test_is_fast() ? 500 : 4000;
    struct copies copies = {.seed = 21};
    for (int round = 0; round < round_max; round++) {
        uint64_t all = 0;
        uint64_t largest = 0;
        bool is_even = below(&copies, 2) > 0;
        copies.unit_count = 1 + (uint32_t)below(&copies, UNIT_COUNT_MAX);
        for (uint32_t i = 0; i < copies.unit_count; i++) {
            copies.units[i].bytes =
                (is_even ? 2 : 1 + below(&copies, 6)) * (uint64_t)LH_RESIDENCY_GRANULE;
            all += copies.units[i].bytes;
            largest = lh_max_u64(largest, copies.units[i].bytes);
        }
        uint64_t spare = below(&copies, (all - largest) / LH_RESIDENCY_GRANULE + 1);
        uint64_t region_bytes = largest + spare * LH_RESIDENCY_GRANULE;
        uint64_t plain = cycles_run(&copies, region_bytes, false, is_deferred);
        uint64_t ahead = cycles_run(&copies, region_bytes, true, is_deferred);
        if (is_even)
            LH_CHECK(ahead == plain);
    }
    LH_CHECK(alloc.live_count == 0);
}

int main(void)
{
    test_cycles(false);
    test_cycles(true);
    return 0;
}
