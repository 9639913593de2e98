/* Test uses that cycle in one direction: the next unit is read while the current one computes. */
#include "lh_test.h"
#include "plan/residency.h"

#define UNIT_COUNT_MAX 12
#define EVENT_COUNT_MAX (8 * UNIT_COUNT_MAX)
#define OP_COUNT_MAX (4 * EVENT_COUNT_MAX + UNIT_COUNT_MAX)
#define CYCLE_COUNT 24 /* the set of blocks that are read changes from one cycle to the next */

static struct lh_alloc alloc = LH_ALLOC_INIT;

struct scan {
    struct lh_residency_unit units[UNIT_COUNT_MAX];
    uint32_t unit_count;
    struct lh_residency_event events[EVENT_COUNT_MAX]; /* the events as they happen */
    struct lh_residency_event moved[EVENT_COUNT_MAX];  /* the events as they are planned */
    uint64_t count;
    struct lh_residency_op ops[OP_COUNT_MAX];
    uint64_t op_first;
    uint64_t op_count;
    bool is_here[UNIT_COUNT_MAX];
    bool is_open[UNIT_COUNT_MAX];
    uint64_t use_counts[UNIT_COUNT_MAX];
    /* the number of begins whose unit was absent when the previous use had begun */
    uint64_t late_count;
    uint64_t loaded_bytes;
    uint64_t seed;
};

static uint64_t below(struct scan *scan, uint64_t end)
{
    return lh_test_random(&scan->seed) % end;
}

static void put(struct scan *scan, uint32_t unit, uint32_t kind)
{
    scan->events[scan->count++] = (struct lh_residency_event){unit, kind};
}

/* Some uses of units, in any order and any nesting: none is open twice. */
static void events_random(struct scan *scan)
{
    bool is_open[UNIT_COUNT_MAX] = {false};
    uint32_t open_count = 0;
    scan->count = 0;
    for (int i = 0; i < 3 * UNIT_COUNT_MAX; i++) {
        uint32_t unit = (uint32_t)below(scan, scan->unit_count);
        if (!is_open[unit] && open_count > 0 && below(scan, 3) > 0)
            continue;
        put(scan, unit, is_open[unit] ? LH_RESIDENCY_EVENT_END : LH_RESIDENCY_EVENT_BEGIN);
        open_count += is_open[unit] ? UINT32_MAX : 1;
        is_open[unit] = !is_open[unit];
    }
    for (uint32_t i = 0; i < scan->unit_count; i++) {
        if (is_open[i])
            put(scan, i, LH_RESIDENCY_EVENT_END);
    }
}

static void events_in_order(struct scan *scan)
{
    scan->count = 0;
    for (uint32_t i = 0; i < scan->unit_count; i++) {
        put(scan, i, LH_RESIDENCY_EVENT_BEGIN);
        put(scan, i, LH_RESIDENCY_EVENT_END);
    }
}

/* Every op that can go. */
static void ops_execute(struct scan *scan)
{
    for (; scan->op_first < scan->op_count; scan->op_first++) {
        const struct lh_residency_op *op = &scan->ops[scan->op_first];
        bool is_load = op->kind == LH_RESIDENCY_OP_LOAD;
        if (!is_load && (scan->is_open[op->unit] || scan->use_counts[op->unit] < op->uses_before))
            return;
        LH_CHECK(scan->is_here[op->unit] == !is_load);
        scan->is_here[op->unit] = is_load;
        scan->loaded_bytes += is_load ? scan->units[op->unit].bytes : 0;
    }
}

static uint32_t next_begin(const struct scan *scan, uint64_t after)
{
    for (uint64_t i = after + 1; i < scan->count; i++) {
        if (scan->events[i].kind == LH_RESIDENCY_EVENT_BEGIN)
            return scan->events[i].unit;
    }
    return UINT32_MAX;
}

/* The events happen in their own order, whatever order they were planned in. */
static void events_execute(struct scan *scan)
{
    for (uint64_t i = 0; i < scan->count; i++) {
        uint32_t unit = scan->events[i].unit;
        bool begins = scan->events[i].kind == LH_RESIDENCY_EVENT_BEGIN;
        ops_execute(scan);
        LH_CHECK(!begins || scan->is_here[unit]);
        scan->is_open[unit] = begins;
        scan->use_counts[unit] += begins;
        ops_execute(scan);
        uint32_t next = begins ? next_begin(scan, i) : UINT32_MAX;
        scan->late_count += next < UINT32_MAX && !scan->is_here[next];
    }
}

static void moved_check(const struct scan *scan)
{
    bool is_open[UNIT_COUNT_MAX] = {false};
    uint64_t at = 0;
    for (uint64_t i = 0; i < scan->count; i++) {
        bool begins = scan->moved[i].kind == LH_RESIDENCY_EVENT_BEGIN;
        LH_CHECK(is_open[scan->moved[i].unit] == !begins);
        is_open[scan->moved[i].unit] = begins;
        while (begins && scan->events[at].kind != LH_RESIDENCY_EVENT_BEGIN)
            at++;
        LH_CHECK(!begins || scan->events[at++].unit == scan->moved[i].unit);
    }
}

enum order { AS_THEY_HAPPEN, AHEAD, AHEAD_WHERE_CHEAP };

/* The next cycle's events: in a plan of them there is room wherever there is without moving. */
static void order_choose(struct scan *scan, const struct lh_residency *state,
                         struct lh_residency *scratch, enum order order)
{
    struct lh_residency_event events[EVENT_COUNT_MAX];
    struct lh_residency_trial trial = {scratch, events, scan->ops, OP_COUNT_MAX};
    uint64_t bytes = 0;
    uint64_t failed_at = 0;
    memcpy(scan->moved, scan->events, sizeof(scan->events));
    if (order == AHEAD)
        lh_residency_read_ahead(state, scan->moved, scan->count);
    else if (order == AHEAD_WHERE_CHEAP &&
             lh_residency_read_ahead_where_cheap(state, scan->moved, scan->count, &trial)) {
        lh_residency_copy(scratch, state);
        LH_CHECK(lh_residency_plan(scratch, scan->moved, scan->count, true, scan->ops, OP_COUNT_MAX,
                                   &bytes, &failed_at, NULL) >= 0);
    }
    moved_check(scan);
}

/*
 * Run cycles of scan's events. Returns false if a cycle found no contiguous room, and ended there.
 */
static bool cycles_run(struct scan *scan, uint64_t region_bytes, enum order order)
{
    struct lh_residency state;
    struct lh_residency scratch;
    struct lh_error err = {0};
    int64_t added = 0;
    LH_CHECK(lh_residency_init(&state, &alloc, scan->units, scan->unit_count, region_bytes, &err) ==
             0);
    LH_CHECK(lh_residency_init(&scratch, &alloc, scan->units, scan->unit_count, region_bytes,
                               &err) == 0);
    scan->late_count = 0;
    scan->loaded_bytes = 0;
    memset(scan->is_here, 0, sizeof(scan->is_here));
    memset(scan->use_counts, 0, sizeof(scan->use_counts));
    for (int cycle = 0; cycle < CYCLE_COUNT && added >= 0; cycle++) {
        uint64_t bytes = 0;
        uint64_t before = scan->loaded_bytes;
        uint64_t failed_at = 0;
        order_choose(scan, &state, &scratch, order);
        added = lh_residency_plan(&state, scan->moved, scan->count, true, scan->ops, OP_COUNT_MAX,
                                  &bytes, &failed_at, &err);
        LH_CHECK(added >= 0 || added == -ENOSPC);
        scan->op_first = 0;
        scan->op_count = added < 0 ? 0 : (uint64_t)added;
        if (added >= 0)
            events_execute(scan);
        LH_CHECK(added < 0 || scan->loaded_bytes == before + bytes);
    }
    lh_residency_deinit(&scratch, &alloc);
    lh_residency_deinit(&state, &alloc);
    return added >= 0;
}

static void test_scan(void)
{
    lh_test_name("of equal blocks that repeat, and a larger one that stays, each is there as "
                 "soon as the one before it has begun, for a read or so more in a cycle");
    struct scan scan = {.seed = 5};
    for (uint32_t count = 3; count <= UNIT_COUNT_MAX; count++) {
        for (uint32_t places = 2; places < count; places++) {
            for (uint64_t large = 0; large <= 3; large += 3) {
                scan.unit_count = count;
                for (uint32_t i = 0; i < count; i++)
                    scan.units[i].bytes = 2 * LH_RESIDENCY_GRANULE;
                if (large > 0)
                    scan.units[0].bytes = large * LH_RESIDENCY_GRANULE;
                events_in_order(&scan);
                if (large > 0) { /* like an embedding whose weights are also the head's */
                    put(&scan, 0, LH_RESIDENCY_EVENT_BEGIN);
                    put(&scan, 0, LH_RESIDENCY_EVENT_END);
                }
                uint64_t region = (2 * places + large) * LH_RESIDENCY_GRANULE;
                LH_CHECK(cycles_run(&scan, region, AS_THEY_HAPPEN));
                uint64_t least = scan.loaded_bytes;
                LH_CHECK(scan.late_count > 0 || count == places + 1);
                bool is_tight = large > 0 && places == 2;
                for (enum order order = AHEAD; order <= AHEAD_WHERE_CHEAP; order++) {
                    LH_CHECK(cycles_run(&scan, region, order));
                    /*
                     * There is room for two blocks and the larger unit, which is used after two of
                     * them.
                     */
                    LH_CHECK(scan.late_count <= (is_tight ? CYCLE_COUNT : 0));
                    LH_CHECK(scan.loaded_bytes <= least + CYCLE_COUNT * 3 * LH_RESIDENCY_GRANULE);
                }
            }
        }
    }
    LH_CHECK(alloc.live_count == 0);
}

static void test_no_room(void)
{
    lh_test_name("where two do not fit at once nothing is moved");
    struct scan scan = {.unit_count = 4};
    for (uint32_t i = 0; i < scan.unit_count; i++)
        scan.units[i].bytes = 2 * LH_RESIDENCY_GRANULE;
    events_in_order(&scan);
    LH_CHECK(cycles_run(&scan, 3 * LH_RESIDENCY_GRANULE, AHEAD));
    LH_CHECK(memcmp(scan.moved, scan.events, scan.count * sizeof(scan.events[0])) == 0);
}

static void test_large(void)
{
    lh_test_name("blocks of many sizes beside one much larger do not drive it out in each cycle");
    static const uint64_t sizes[] = {300, 4, 13, 5, 17, 17, 13, 5, 17, 17, 1};
    struct scan scan = {.unit_count = LH_COUNT_OF(sizes)};
    uint64_t large_bytes = sizes[0] * LH_RESIDENCY_GRANULE;
    int driven_out = 0;
    uint64_t least_bytes = 0;
    uint64_t loaded_bytes = 0;
    for (uint32_t i = 0; i < scan.unit_count; i++)
        scan.units[i].bytes = sizes[i] * LH_RESIDENCY_GRANULE;
    events_in_order(&scan);
    put(&scan, 0, LH_RESIDENCY_EVENT_BEGIN);
    put(&scan, 0, LH_RESIDENCY_EVENT_END);
    for (uint64_t spare = 17; spare <= 60; spare++) {
        uint64_t region = large_bytes + spare * LH_RESIDENCY_GRANULE;
        LH_CHECK(cycles_run(&scan, region, AS_THEY_HAPPEN));
        uint64_t least = scan.loaded_bytes;
        bool is_planned = cycles_run(&scan, region, AHEAD);
        driven_out += !is_planned || scan.loaded_bytes > least + CYCLE_COUNT / 2 * large_bytes;
        LH_CHECK(cycles_run(&scan, region, AHEAD_WHERE_CHEAP));
        least_bytes += least;
        loaded_bytes += scan.loaded_bytes;
    }
    LH_CHECK(driven_out > 0);
    LH_CHECK(loaded_bytes <= least_bytes + least_bytes / 20);
    LH_CHECK(alloc.live_count == 0);
}

static void test_random(void)
{
    lh_test_name("whatever uses there are, begins keep their order, and a plan that read ahead "
                 "holds for them as they happen");
    int round_max = lh_test_is_fast() ? 2000 : 20000;
    struct scan scan = {.seed = 77};
    int planned = 0;
    for (int round = 0; round < round_max; round++) {
        uint64_t all = 0;
        uint64_t largest = 0;
        scan.unit_count = 2 + (uint32_t)below(&scan, UNIT_COUNT_MAX - 1);
        for (uint32_t i = 0; i < scan.unit_count; i++) {
            scan.units[i].bytes = (1 + below(&scan, 6)) * (uint64_t)LH_RESIDENCY_GRANULE;
            all += scan.units[i].bytes;
            largest = lh_max_u64(largest, scan.units[i].bytes);
        }
        uint64_t spare = below(&scan, (all - largest) / LH_RESIDENCY_GRANULE + 1);
        events_random(&scan);
        uint64_t region = largest + spare * LH_RESIDENCY_GRANULE;
        planned += cycles_run(&scan, region, AHEAD);
        if (cycles_run(&scan, region, AS_THEY_HAPPEN))
            LH_CHECK(cycles_run(&scan, region, AHEAD_WHERE_CHEAP));
    }
    LH_CHECK(planned > round_max / 4);
    LH_CHECK(alloc.live_count == 0);
}

int main(void)
{
    test_scan();
    test_no_room();
    test_large();
    test_random();
    return 0;
}
