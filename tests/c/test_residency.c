/* Test the residency plan: invariants on random event lists, and that its loads are minimal. */
#include "lh_test.h"
#include "plan/budget.h"
#include "plan/residency.h"

#define UNIT_COUNT_MAX 10
#define EVENT_COUNT_MAX 120
#define OP_COUNT_MAX (4 * EVENT_COUNT_MAX + UNIT_COUNT_MAX)

static struct lh_alloc alloc = LH_ALLOC_INIT;

/* The machine that executes a plan: memory as it is, not as it was planned. */
struct machine {
    const struct lh_residency_unit *units;
    uint32_t unit_count;
    uint64_t region_bytes;
    uint64_t offsets[UNIT_COUNT_MAX];
    uint64_t use_counts[UNIT_COUNT_MAX];
    uint32_t open_uses[UNIT_COUNT_MAX];
    /* a NEED follows: the unit must not be evicted before it, used or not */
    bool is_owed[UNIT_COUNT_MAX];
    struct lh_residency_op ops[OP_COUNT_MAX];
    uint64_t op_first;
    uint64_t op_count;
    uint64_t loaded_bytes;
};

static void machine_init(struct machine *machine, const struct lh_residency_unit *units,
                         uint32_t unit_count, uint64_t region_bytes)
{
    *machine =
        (struct machine){.units = units, .unit_count = unit_count, .region_bytes = region_bytes};
    for (uint32_t i = 0; i < unit_count; i++)
        machine->offsets[i] = LH_RESIDENCY_ABSENT;
}

static void load_execute(struct machine *machine, const struct lh_residency_op *op)
{
    uint64_t bytes = machine->units[op->unit].bytes;
    LH_CHECK(machine->offsets[op->unit] == LH_RESIDENCY_ABSENT);
    LH_CHECK(op->offset + bytes <= machine->region_bytes);
    LH_CHECK(lh_is_aligned(op->offset, LH_RESIDENCY_GRANULE));
    for (uint32_t i = 0; i < machine->unit_count; i++) {
        bool is_apart = machine->offsets[i] == LH_RESIDENCY_ABSENT ||
                        op->offset >= machine->offsets[i] + machine->units[i].bytes ||
                        machine->offsets[i] >= op->offset + bytes;
        LH_CHECK(is_apart);
    }
    machine->offsets[op->unit] = op->offset;
    machine->loaded_bytes += bytes;
}

/* The next op, if its time has come. Returns whether it was executed. */
static bool op_execute(struct machine *machine)
{
    if (machine->op_first == machine->op_count)
        return false;
    const struct lh_residency_op *op = &machine->ops[machine->op_first];
    if (op->kind == LH_RESIDENCY_OP_LOAD) {
        load_execute(machine, op);
    } else {
        bool is_idle = machine->open_uses[op->unit] == 0 && !machine->is_owed[op->unit] &&
                       machine->use_counts[op->unit] >= op->uses_before;
        if (!is_idle)
            return false;
        LH_CHECK(machine->offsets[op->unit] != LH_RESIDENCY_ABSENT);
        LH_CHECK(!machine->units[op->unit].always);
        machine->offsets[op->unit] = LH_RESIDENCY_ABSENT;
    }
    machine->op_first++;
    return true;
}

/* Execute ops as early as possible, as the engine does (eager), or else as late as allowed. */
static void event_execute(struct machine *machine, struct lh_residency_event event, bool is_eager)
{
    uint32_t unit = event.unit;
    while (is_eager && op_execute(machine)) {
    }
    if (event.kind == LH_RESIDENCY_EVENT_END) {
        LH_CHECK(machine->open_uses[unit] > 0);
        machine->open_uses[unit]--;
        return;
    }
    while (machine->offsets[unit] == LH_RESIDENCY_ABSENT)
        LH_CHECK(op_execute(machine));
    if (event.kind == LH_RESIDENCY_EVENT_NEED) {
        machine->is_owed[unit] = false;
        return;
    }
    machine->use_counts[unit]++;
    machine->open_uses[unit] += event.kind == LH_RESIDENCY_EVENT_BEGIN;
}

static void check_same(const struct machine *machine, const struct lh_residency *state)
{
    for (uint32_t i = 0; i < machine->unit_count; i++) {
        LH_CHECK(machine->offsets[i] == state->offsets[i]);
        LH_CHECK(machine->use_counts[i] == state->use_counts[i]);
        LH_CHECK(machine->open_uses[i] == state->open_uses[i]);
    }
}

/*
 * What is owed comes first, which is never here; then uses that nest and overlap as they like.
 * open: uses of each unit that are open, before and after.
 */
static uint64_t events_random(uint64_t *seed, const struct machine *machine,
                              uint64_t open_bytes_max, uint32_t *open,
                              struct lh_residency_event *events)
{
    uint64_t count = lh_test_below(seed, EVENT_COUNT_MAX);
    uint64_t owed_count = lh_test_below(seed, 3);
    for (uint64_t i = 0; i < count; i++) {
        uint32_t unit = (uint32_t)lh_test_below(seed, machine->unit_count);
        uint64_t open_bytes = open[unit] > 0 ? 0 : machine->units[unit].bytes;
        for (uint32_t j = 0; j < machine->unit_count; j++)
            open_bytes += open[j] > 0 ? machine->units[j].bytes : 0;
        bool is_owed = i < owed_count && machine->offsets[unit] == LH_RESIDENCY_ABSENT &&
                       (i == 0 || events[0].unit != unit); /* each only once */
        uint32_t kind = is_owed ? LH_RESIDENCY_EVENT_NEED : (uint32_t)lh_test_below(seed, 3);
        owed_count = is_owed ? owed_count : 0;
        if (kind == LH_RESIDENCY_EVENT_BEGIN && open_bytes > open_bytes_max)
            kind = LH_RESIDENCY_EVENT_UPDATE;
        if (kind == LH_RESIDENCY_EVENT_END && open[unit] == 0)
            kind = LH_RESIDENCY_EVENT_UPDATE;
        open[unit] += kind == LH_RESIDENCY_EVENT_BEGIN;
        open[unit] -= kind == LH_RESIDENCY_EVENT_END;
        events[i] = (struct lh_residency_event){.unit = unit, .kind = kind};
    }
    return count;
}

struct trial {
    struct lh_residency_unit units[UNIT_COUNT_MAX];
    uint32_t unit_count;
    uint64_t region_bytes;
    uint64_t open_bytes_max;
};

static struct trial trial_random(uint64_t *seed)
{
    struct trial trial = {.unit_count = (uint32_t)(1 + lh_test_below(seed, UNIT_COUNT_MAX))};
    uint64_t always = 0;
    uint64_t largest = 0; /* the largest of the others */
    uint64_t all = 0;
    for (uint32_t i = 0; i < trial.unit_count; i++) {
        uint64_t bytes = (1 + lh_test_below(seed, 6)) * LH_RESIDENCY_GRANULE;
        trial.units[i].bytes = bytes;
        trial.units[i].unread_bytes = lh_test_below(seed, 3) * bytes / 2;
        trial.units[i].always = lh_test_below(seed, 8) == 0;
        all += bytes;
        always += trial.units[i].always ? bytes : 0;
        largest = lh_max_u64(largest, trial.units[i].always ? 0 : bytes);
    }
    uint64_t least = always + largest;
    uint64_t spare =
        lh_test_below(seed, (all - least) / LH_RESIDENCY_GRANULE + 1) * LH_RESIDENCY_GRANULE;
    trial.region_bytes = least + spare;
    trial.open_bytes_max = lh_test_below(seed, trial.region_bytes + 1);
    return trial;
}

static uint64_t brought_bytes(const struct lh_residency_unit *unit)
{
    return unit->bytes - unit->unread_bytes;
}

/*
 * Plan events, or as much as can be planned, as the engine does. Returns how many are; some of a
 * plan's future may be cut, which may change its choices and so cut more.
 */
static uint64_t plan_some(struct lh_residency *state, struct lh_residency *before,
                          const struct lh_residency_event *events, uint64_t count, bool cyclic,
                          struct machine *machine, uint64_t *cut_again_count)
{
    uint64_t loaded_bytes = 0;
    uint64_t failed_at = 0;
    struct lh_error err = {0};
    for (int attempt = 0;; attempt++) {
        int64_t added = lh_residency_plan_apart(state, before, events, count, cyclic, machine->ops,
                                                OP_COUNT_MAX, &loaded_bytes, &failed_at, &err);
        if (added >= 0) {
            machine->op_first = 0;
            machine->op_count = (uint64_t)added;
            machine->loaded_bytes = 0;
            uint64_t bytes = 0;
            for (int64_t i = 0; i < added; i++) {
                if (machine->ops[i].kind == LH_RESIDENCY_OP_LOAD)
                    bytes += brought_bytes(&machine->units[machine->ops[i].unit]);
            }
            LH_CHECK(bytes == loaded_bytes);
            return count;
        }
        LH_CHECK(added == -ENOSPC && err.code == -ENOSPC && failed_at < count);
        *cut_again_count += attempt > 0;
        count = failed_at;
    }
}

static void test_random(bool is_eager)
{
    lh_test_name("random uses: resident at every begin, never overlapping, never evicted in use, "
                 "ops %s; plans chain",
                 is_eager ? "early" : "late");
    static struct machine machine;
    uint64_t seed = 11;
    uint64_t planned_count = 0;
    uint64_t cut_again_count = 0;
    int round_max = lh_test_is_fast() ? 2000 : 10000;
    for (int round = 0; round < round_max; round++) {
        struct trial trial = trial_random(&seed);
        struct lh_residency state;
        struct lh_residency before;
        LH_CHECK(lh_residency_init(&state, &alloc, trial.units, trial.unit_count,
                                   trial.region_bytes, NULL) == 0);
        LH_CHECK(lh_residency_init(&before, &alloc, trial.units, trial.unit_count,
                                   trial.region_bytes, NULL) == 0);
        machine_init(&machine, trial.units, trial.unit_count, trial.region_bytes);
        for (int chain = 0; chain < 4; chain++) {
            struct lh_residency_event events[EVENT_COUNT_MAX];
            uint32_t open[UNIT_COUNT_MAX];
            memcpy(open, machine.open_uses, sizeof(open));
            uint64_t count = events_random(&seed, &machine, trial.open_bytes_max, open, events);
            lh_residency_copy(&before, &state);
            count = plan_some(&state, &before, events, count, lh_test_below(&seed, 2) > 0, &machine,
                              &cut_again_count);
            for (uint64_t i = 0; i < count; i++)
                machine.is_owed[events[i].unit] |= events[i].kind == LH_RESIDENCY_EVENT_NEED;
            for (uint64_t i = 0; i < count; i++)
                event_execute(&machine, events[i], is_eager);
            LH_CHECK(machine.op_first == machine.op_count);
            check_same(&machine, &state);
            planned_count += count;
        }
        lh_residency_deinit(&before, &alloc);
        lh_residency_deinit(&state, &alloc);
    }
    LH_CHECK(alloc.live_count == 0);
    LH_CHECK(planned_count > 20 * (uint64_t)round_max);
    printf("  %" PRIu64 " events; a plan that was cut had to be cut again %" PRIu64 " times\n",
           planned_count, cut_again_count);
}

/* Return the fewest loads of any schedule, by trying all: equal units, one use at a time. */
static uint64_t fewest_loads(const uint32_t *uses, uint32_t use_count, uint32_t unit_count,
                             uint32_t slot_count)
{
    uint64_t loads[1 << 5];
    uint32_t mask_count = 1u << unit_count;
    for (uint32_t mask = 0; mask < mask_count; mask++)
        loads[mask] = mask == 0 ? 0 : UINT32_MAX;
    for (uint32_t i = 0; i < use_count; i++) {
        uint64_t next[1 << 5];
        uint32_t bit = 1u << uses[i];
        for (uint32_t mask = 0; mask < mask_count; mask++)
            next[mask] = UINT32_MAX;
        for (uint32_t mask = 0; mask < mask_count; mask++) {
            if (mask & bit) {
                next[mask] = lh_min_u64(next[mask], loads[mask]);
                continue;
            }
            /* Load into any subset of what was there: whatever is evicted, and however much. */
            for (uint32_t kept = mask;; kept = (kept - 1) & mask) {
                if ((uint32_t)__builtin_popcount(kept) < slot_count)
                    next[kept | bit] = lh_min_u64(next[kept | bit], loads[mask] + 1);
                if (kept == 0)
                    break;
            }
        }
        memcpy(loads, next, sizeof(loads));
    }
    uint64_t fewest = UINT32_MAX;
    for (uint32_t mask = 0; mask < mask_count; mask++)
        fewest = lh_min_u64(fewest, loads[mask]);
    return fewest;
}

static uint64_t planned_loads(const uint32_t *uses, uint32_t use_count, struct lh_residency *state)
{
    struct lh_residency_event events[32];
    struct lh_residency_op ops[64];
    uint64_t loaded_bytes = 0;
    uint64_t failed_at = 0;
    for (uint32_t i = 0; i < use_count; i++)
        events[i] = (struct lh_residency_event){uses[i], LH_RESIDENCY_EVENT_UPDATE};
    int64_t count = lh_residency_plan(state, events, use_count, false, ops, LH_COUNT_OF(ops),
                                      &loaded_bytes, &failed_at, NULL);
    LH_CHECK(count >= 0);
    return loaded_bytes / state->units[0].bytes;
}

static void test_optimal(void)
{
    lh_test_name("equal units: as few loads as the best of all schedules, in every small case");
    static const struct lh_residency_unit units[5] = {{.bytes = 2 * LH_RESIDENCY_GRANULE},
                                                      {.bytes = 2 * LH_RESIDENCY_GRANULE},
                                                      {.bytes = 2 * LH_RESIDENCY_GRANULE},
                                                      {.bytes = 2 * LH_RESIDENCY_GRANULE},
                                                      {.bytes = 2 * LH_RESIDENCY_GRANULE}};
    struct lh_residency empty;
    struct lh_residency state;
    uint64_t case_count = 0;
    for (uint32_t unit_count = 2; unit_count <= 4; unit_count++) {
        uint32_t use_count = unit_count == 4 ? 7 : 8;
        for (uint32_t slot_count = 1; slot_count < unit_count; slot_count++) {
            uint64_t region_bytes = slot_count * units[0].bytes;
            LH_CHECK(lh_residency_init(&empty, &alloc, units, unit_count, region_bytes, NULL) == 0);
            LH_CHECK(lh_residency_init(&state, &alloc, units, unit_count, region_bytes, NULL) == 0);
            uint32_t uses[8] = {0};
            for (bool more = true; more;) {
                lh_residency_copy(&state, &empty);
                LH_CHECK(planned_loads(uses, use_count, &state) ==
                         fewest_loads(uses, use_count, unit_count, slot_count));
                case_count++;
                uint32_t digit = 0; /* count up to the next sequence of uses */
                while (digit < use_count && ++uses[digit] == unit_count)
                    uses[digit++] = 0;
                more = digit < use_count;
            }
            lh_residency_deinit(&state, &alloc);
            lh_residency_deinit(&empty, &alloc);
        }
    }
    printf("  %" PRIu64 " cases\n", case_count);
    LH_CHECK(case_count > 50000 && alloc.live_count == 0);
}

static void test_always(void)
{
    lh_test_name("a unit that is always there is loaded once, whatever else comes and goes");
    const struct lh_residency_unit units[3] = {{.bytes = LH_RESIDENCY_GRANULE, .always = true},
                                               {.bytes = LH_RESIDENCY_GRANULE},
                                               {.bytes = LH_RESIDENCY_GRANULE}};
    const uint32_t uses[] = {0, 1, 2, 1, 2, 0, 1, 2, 0};
    struct lh_residency state;
    LH_CHECK(lh_residency_init(&state, &alloc, units, 3, 2 * LH_RESIDENCY_GRANULE, NULL) == 0);
    LH_CHECK(planned_loads(uses, LH_COUNT_OF(uses), &state) == 1 + 6);
    lh_residency_deinit(&state, &alloc);
}

/* Use the units of one scope at a time, in any order, as backward requests them. */
static uint64_t scopes_random(uint64_t *seed, const uint32_t *scope_of, uint32_t unit_count,
                              uint32_t scope_count, struct lh_residency_event *events)
{
    uint64_t count = 0;
    for (uint64_t uses = lh_test_below(seed, 12); uses > 0; uses--) {
        uint32_t scope = (uint32_t)lh_test_below(seed, scope_count);
        uint32_t order[UNIT_COUNT_MAX];
        uint32_t size = 0;
        for (uint32_t i = 0; i < unit_count; i++) {
            if (scope_of[i] != scope)
                continue;
            uint32_t at = (uint32_t)lh_test_below(seed, size + 1);
            order[size++] = order[at];
            order[at] = i;
        }
        for (uint32_t i = 0; i < size; i++)
            events[count++] = (struct lh_residency_event){order[i], LH_RESIDENCY_EVENT_BEGIN};
        for (uint32_t i = 0; i < size; i++)
            events[count++] = (struct lh_residency_event){order[i], LH_RESIDENCY_EVENT_END};
    }
    return count;
}

/* Units that are always there, and scopes of several units; the region is what a budget gives. */
static uint32_t least_random(uint64_t *seed, struct lh_residency_unit *units, uint32_t unit_count,
                             uint32_t *scope_of, uint64_t *region_bytes_out)
{
    struct lh_budget_unit described[UNIT_COUNT_MAX] = {0};
    struct lh_budget budget;
    struct lh_error err = {0};
    uint32_t scope_count = 2 + (uint32_t)lh_test_below(seed, 5);
    uint64_t large = 2 + lh_test_below(seed, 10);
    uint64_t small = 1 + lh_test_below(seed, large);
    for (uint32_t i = 0; i < unit_count; i++) {
        bool always = lh_test_below(seed, 6) == 0;
        bool is_first =
            lh_test_below(seed, 2) == 0; /* whether the unit belongs to the large scope */
        uint64_t blocks = 1 + lh_test_below(seed, is_first ? large : small);
        units[i] =
            (struct lh_residency_unit){.bytes = blocks * LH_RESIDENCY_GRANULE, .always = always};
        scope_of[i] = always     ? UINT32_MAX
                      : is_first ? 0
                                 : 1 + (uint32_t)lh_test_below(seed, scope_count - 1);
        described[i] = (struct lh_budget_unit){.bytes = units[i].bytes, .always = always};
    }
    for (uint32_t scope = 0; scope < scope_count; scope++) {
        uint64_t bytes[UNIT_COUNT_MAX];
        uint32_t size = 0;
        uint32_t first = unit_count;
        for (uint32_t i = unit_count; i-- > 0;) {
            if (scope_of[i] != scope)
                continue;
            bytes[size++] = units[i].bytes;
            described[i].is_together = true;
            first = i;
        }
        if (size == 0)
            continue;
        described[first].is_together = false;
        for (uint32_t i = 0; i < size; i++)
            described[first].together_bytes += bytes[i];
        described[first].apart_bytes = lh_budget_apart_bytes(bytes, size);
    }
    (void)!lh_budget_make(described, unit_count, 0, 0, &budget, &err);
    LH_CHECK(lh_budget_make(described, unit_count, budget.host_bytes_min, 0, &budget, &err) == 0);
    *region_bytes_out = budget.region_bytes;
    return scope_count;
}

static void test_least(void)
{
    lh_test_name("the least budget's region holds every scope of several units, in any order, "
                 "wherever units in use and those that are always there came to lie");
    static struct machine machine;
    uint64_t seed = 12;
    uint64_t loads = 0;
    int round_max = lh_test_is_fast() ? 4000 : 40000;
    for (int round = 0; round < round_max; round++) {
        struct lh_residency_unit units[UNIT_COUNT_MAX];
        uint32_t scope_of[UNIT_COUNT_MAX];
        uint32_t unit_count = 1 + (uint32_t)lh_test_below(&seed, UNIT_COUNT_MAX);
        uint64_t region_bytes = 0;
        uint32_t scope_count = least_random(&seed, units, unit_count, scope_of, &region_bytes);
        struct lh_residency state;
        struct lh_error err = {0};
        LH_CHECK(lh_residency_init(&state, &alloc, units, unit_count, region_bytes, &err) == 0);
        machine_init(&machine, units, unit_count, region_bytes);
        for (int chain = 0; chain < 4; chain++) {
            struct lh_residency_event events[EVENT_COUNT_MAX * 2];
            uint64_t loaded_bytes = 0;
            uint64_t failed_at = 0;
            uint64_t count = scopes_random(&seed, scope_of, unit_count, scope_count, events);
            uint32_t other = (uint32_t)lh_test_below(&seed, unit_count);
            if (units[other].always) /* its first use may be anywhere */
                events[count++] = (struct lh_residency_event){other, LH_RESIDENCY_EVENT_UPDATE};
            int64_t added =
                lh_residency_plan(&state, events, count, lh_test_below(&seed, 2) > 0, machine.ops,
                                  LH_COUNT_OF(machine.ops), &loaded_bytes, &failed_at, &err);
            LH_CHECK(added >= 0);
            machine.op_first = 0;
            machine.op_count = (uint64_t)added;
            loads += (uint64_t)added;
            for (uint64_t i = 0; i < count; i++)
                event_execute(&machine, events[i], false);
            check_same(&machine, &state);
        }
        lh_residency_deinit(&state, &alloc);
    }
    LH_CHECK(alloc.live_count == 0 && loads > 4 * (uint64_t)round_max);
}

enum { FILLER, FIRST, GAP, SECOND, LAST };

/* FIRST and SECOND stay in use, with the units before them in the region used only meanwhile. */
static const struct lh_residency_event kept_events[] = {
    {FILLER, LH_RESIDENCY_EVENT_BEGIN}, {FIRST, LH_RESIDENCY_EVENT_BEGIN},
    {GAP, LH_RESIDENCY_EVENT_BEGIN},    {GAP, LH_RESIDENCY_EVENT_END},
    {FILLER, LH_RESIDENCY_EVENT_END},   {SECOND, LH_RESIDENCY_EVENT_BEGIN},
    {LAST, LH_RESIDENCY_EVENT_BEGIN},
};

static const struct lh_residency_unit kept_units[] = {{.bytes = 2 * LH_RESIDENCY_GRANULE},
                                                      {.bytes = 3 * LH_RESIDENCY_GRANULE},
                                                      {.bytes = 2 * LH_RESIDENCY_GRANULE},
                                                      {.bytes = 3 * LH_RESIDENCY_GRANULE},
                                                      {.bytes = 3 * LH_RESIDENCY_GRANULE}};

static void test_reserved(void)
{
    lh_test_name("a plan places units that stay in use such that the next one has room in one "
                 "piece");
    const uint64_t count = LH_COUNT_OF(kept_events);
    const uint64_t region_bytes = 12 * LH_RESIDENCY_GRANULE;
    struct lh_residency state;
    struct lh_residency before;
    struct lh_residency_op ops[OP_COUNT_MAX];
    struct lh_error err = {0};
    uint64_t loaded_bytes = 0;
    uint64_t failed_at = 0;
    LH_CHECK(lh_residency_init(&state, &alloc, kept_units, 5, region_bytes, NULL) == 0);
    LH_CHECK(lh_residency_init(&before, &alloc, kept_units, 5, region_bytes, NULL) == 0);
    LH_CHECK(lh_residency_plan(&state, kept_events, count, false, ops, OP_COUNT_MAX, &loaded_bytes,
                               &failed_at, NULL) == -ENOSPC);
    LH_CHECK(failed_at == count - 1);
    LH_CHECK(lh_residency_plan_apart(&state, &before, kept_events, count, false, ops, OP_COUNT_MAX,
                                     &loaded_bytes, &failed_at, &err) > 0);
    LH_CHECK(state.scratch->reserved_count == 0 && err.code == 0);
    lh_residency_deinit(&before, &alloc);
    lh_residency_deinit(&state, &alloc);
}

static void test_refusals(void)
{
    lh_test_name("no room, too few ops, a unit larger than the region: each said with its numbers");
    struct lh_residency_unit units[2] = {{.bytes = 2 * LH_RESIDENCY_GRANULE},
                                         {.bytes = 2 * LH_RESIDENCY_GRANULE}};
    const struct lh_residency_event events[] = {{0, LH_RESIDENCY_EVENT_BEGIN},
                                                {1, LH_RESIDENCY_EVENT_BEGIN}};
    struct lh_residency_op ops[4];
    struct lh_residency state;
    struct lh_error err = {0};
    uint64_t loaded_bytes = 0;
    uint64_t failed_at = 9;
    LH_CHECK(lh_residency_init(&state, &alloc, units, 2, 3 * LH_RESIDENCY_GRANULE, NULL) == 0);
    LH_CHECK(lh_residency_plan(&state, events, 2, true, ops, 4, &loaded_bytes, &failed_at, &err) ==
             -ENOSPC);
    LH_CHECK(failed_at == 1 && strstr(err.message, "8192 bytes") && strstr(err.message, "unit 1"));
    lh_residency_deinit(&state, &alloc);
    LH_CHECK(lh_residency_init(&state, &alloc, units, 2, 4 * LH_RESIDENCY_GRANULE, NULL) == 0);
    LH_CHECK(lh_residency_plan(&state, events, 2, true, ops, 1, &loaded_bytes, &failed_at, &err) ==
             -E2BIG);
    lh_residency_deinit(&state, &alloc);
    LH_CHECK(lh_residency_init(&state, &alloc, units, 2, LH_RESIDENCY_GRANULE, &err) == -EINVAL);
    LH_CHECK(strstr(err.message, "8192") && strstr(err.message, "4096"));
    for (int64_t fail_after = 0;; fail_after++) {
        alloc.fail_after = fail_after;
        int rc = lh_residency_init(&state, &alloc, units, 2, 4 * LH_RESIDENCY_GRANULE, &err);
        bool is_through = alloc.fail_after > 0;
        alloc.fail_after = -1;
        if (rc == 0)
            lh_residency_deinit(&state, &alloc);
        LH_CHECK(alloc.live_count == 0 && (rc == 0 || rc == -ENOMEM));
        if (rc == 0 && is_through)
            break;
    }
}

int main(void)
{
    test_random(true);
    test_random(false);
    test_optimal();
    test_always();
    test_least();
    test_reserved();
    test_refusals();
    return 0;
}
