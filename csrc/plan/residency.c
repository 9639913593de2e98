#include "plan/residency.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"

#define NEVER UINT64_MAX
/* Cycles per trial of reading ahead: later cycles show the cost of the first one's evictions. */
#define TRIAL_CYCLE_COUNT 4
/* The limit for all trials together: planning time is quadratic, some ms for a thousand events. */
#define TRIAL_EVENT_COUNT_MAX 4096

static uint64_t load_bytes(const struct lh_residency_unit *unit)
{
    LH_ASSERT(unit->unread_bytes <= unit->bytes);
    return unit->bytes - unit->unread_bytes;
}

/* The total size of the fixed places of units before `end`, which are laid out from 0. */
static uint64_t places_bytes(const struct lh_residency *state, uint32_t end)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < end; i++) {
        if (lh_residency_has_place(state, i))
            bytes += lh_align_up(state->units[i].bytes, LH_RESIDENCY_GRANULE);
    }
    return bytes;
}

static int units_check(struct lh_residency *state, uint64_t region_bytes, struct lh_error *err)
{
    state->holds_all = true;
    state->holds_all = places_bytes(state, state->unit_count) <= region_bytes;
    uint64_t places = places_bytes(state, state->unit_count);
    for (uint32_t i = 0; i < state->unit_count; i++) {
        uint64_t bytes = state->units[i].bytes;
        uint64_t taken =
            lh_residency_has_place(state, i) ? places - lh_min_u64(places, bytes) : places;
        if (bytes == 0 || taken + bytes > region_bytes)
            return lh_error_set(err, -EINVAL,
                                "unit %u has %" PRIu64 " bytes, which must be more than 0 and fit"
                                " into the region: it has %" PRIu64 " bytes, of which %" PRIu64
                                " always belong to other units",
                                i, bytes, region_bytes, taken);
    }
    return 0;
}

static bool scratch_init(struct lh_residency *state, struct lh_alloc *alloc)
{
    uint32_t count = state->unit_count;
    struct lh_residency_scratch *scratch = lh_alloc_zeroed(alloc, 1, sizeof(*scratch));
    state->scratch = scratch;
    if (!scratch)
        return false;
    scratch->next_uses = lh_alloc_zeroed(alloc, count, sizeof(*scratch->next_uses));
    scratch->first_uses = lh_alloc_zeroed(alloc, count, sizeof(*scratch->first_uses));
    scratch->is_open_before = lh_alloc_zeroed(alloc, count, sizeof(*scratch->is_open_before));
    /* One array for all places: it belongs to the first one. */
    bool *avoids =
        lh_alloc_zeroed(alloc, (size_t)count * LH_RESIDENCY_RESERVED_COUNT_MAX, sizeof(*avoids));
    for (uint32_t i = 0; avoids && i < LH_RESIDENCY_RESERVED_COUNT_MAX; i++)
        scratch->reserved[i].avoids = avoids + (size_t)i * count;
    return scratch->next_uses && scratch->first_uses && scratch->is_open_before && avoids;
}

static void scratch_deinit(struct lh_residency *state, struct lh_alloc *alloc)
{
    if (!state->scratch)
        return;
    lh_free(alloc, state->scratch->reserved[0].avoids);
    lh_free(alloc, state->scratch->is_open_before);
    lh_free(alloc, state->scratch->first_uses);
    lh_free(alloc, state->scratch->next_uses);
    lh_free(alloc, state->scratch);
}

int lh_residency_init(struct lh_residency *state, struct lh_alloc *alloc,
                      const struct lh_residency_unit *units, uint32_t unit_count,
                      uint64_t region_bytes, struct lh_error *err)
{
    memset(state, 0, sizeof(*state));
    state->units = units;
    state->unit_count = unit_count;
    LH_TRY(units_check(state, region_bytes, err));
    LH_TRY(lh_range_init(&state->range, alloc, region_bytes, LH_RESIDENCY_GRANULE, unit_count + 2,
                         err));
    state->is_stale = lh_alloc_zeroed(alloc, unit_count, sizeof(*state->is_stale));
    state->offsets = lh_alloc_zeroed(alloc, unit_count, sizeof(*state->offsets));
    state->use_counts = lh_alloc_zeroed(alloc, unit_count, sizeof(*state->use_counts));
    state->open_uses = lh_alloc_zeroed(alloc, unit_count, sizeof(*state->open_uses));
    if (!scratch_init(state, alloc) || !state->is_stale || !state->offsets || !state->use_counts ||
        !state->open_uses) {
        lh_residency_deinit(state, alloc);
        return lh_error_set(err, -ENOMEM, "no memory for the residency plan of %u units",
                            unit_count);
    }
    lh_residency_reset(state);
    return 0;
}

void lh_residency_reset(struct lh_residency *state)
{
    lh_range_reset(&state->range);
    uint64_t places = places_bytes(state, state->unit_count);
    if (places > 0)
        lh_range_take(&state->range, 0, places);
    for (uint32_t i = 0; i < state->unit_count; i++)
        state->offsets[i] = LH_RESIDENCY_ABSENT;
}

void lh_residency_put(struct lh_residency *state, uint32_t unit, uint64_t offset)
{
    LH_ASSERT(state->offsets[unit] == LH_RESIDENCY_ABSENT);
    state->offsets[unit] = offset;
    if (!lh_residency_has_place(state, unit))
        lh_range_take(&state->range, offset, state->units[unit].bytes);
    else
        LH_ASSERT(offset == places_bytes(state, unit));
}

void lh_residency_deinit(struct lh_residency *state, struct lh_alloc *alloc)
{
    scratch_deinit(state, alloc);
    lh_free(alloc, state->open_uses);
    lh_free(alloc, state->use_counts);
    lh_free(alloc, state->offsets);
    lh_free(alloc, state->is_stale);
    if (state->range.holes)
        lh_range_deinit(&state->range, alloc);
    memset(state, 0, sizeof(*state));
}

void lh_residency_copy(struct lh_residency *target, const struct lh_residency *source)
{
    LH_ASSERT(target->units == source->units && target->unit_count == source->unit_count);
    uint64_t count = source->unit_count;
    lh_range_copy(&target->range, &source->range);
    memcpy(target->is_stale, source->is_stale, count * sizeof(*source->is_stale));
    memcpy(target->offsets, source->offsets, count * sizeof(*source->offsets));
    memcpy(target->use_counts, source->use_counts, count * sizeof(*source->use_counts));
    memcpy(target->open_uses, source->open_uses, count * sizeof(*source->open_uses));
}

static bool is_use_begin(const struct lh_residency *state, const struct lh_residency_event *event)
{
    return event->kind == LH_RESIDENCY_EVENT_BEGIN ||
           (event->kind == LH_RESIDENCY_EVENT_UPDATE && !state->has_copies);
}

/*
 * The index of unit's first use after event `after`, or NEVER; uses in the next cycle count from
 * event_count.
 */
static uint64_t next_use_find(const struct lh_residency *state,
                              const struct lh_residency_event *events, uint64_t event_count,
                              uint64_t after, uint32_t unit, bool cyclic)
{
    for (uint64_t i = after + 1; i < event_count; i++) {
        if (events[i].unit == unit && is_use_begin(state, &events[i]))
            return i;
    }
    if (!cyclic || state->scratch->first_uses[unit] == NEVER)
        return NEVER;
    return event_count + state->scratch->first_uses[unit];
}

/*
 * Set every unit's next use to its first use, which is right before the first event, whether the
 * events repeat or not.
 */
static void next_uses_start(struct lh_residency *state, const struct lh_residency_event *events,
                            uint64_t event_count)
{
    for (uint32_t i = 0; i < state->unit_count; i++)
        state->scratch->first_uses[i] = NEVER;
    for (uint64_t i = event_count; i-- > 0;) {
        LH_ASSERT(events[i].unit < state->unit_count);
        if (is_use_begin(state, &events[i]))
            state->scratch->first_uses[events[i].unit] = i;
    }
    memcpy(state->scratch->next_uses, state->scratch->first_uses,
           state->unit_count * sizeof(*state->scratch->next_uses));
    for (uint32_t i = 0; i < state->unit_count; i++) {
        if (state->is_stale[i])
            state->scratch->next_uses[i] = NEVER;
    }
}

/*
 * The unit to evict: the one with the farthest next use of the resident units that are neither in
 * use nor always resident; unit_count if no unit qualifies.
 */
static uint32_t victim_find(const struct lh_residency *state)
{
    uint32_t victim = state->unit_count;
    for (uint32_t i = 0; i < state->unit_count; i++) {
        if (state->offsets[i] == LH_RESIDENCY_ABSENT || state->open_uses[i] > 0 ||
            state->units[i].always)
            continue;
        if (victim == state->unit_count ||
            state->scratch->next_uses[i] > state->scratch->next_uses[victim])
            victim = i;
    }
    return victim;
}

struct op_list {
    struct lh_residency_op *ops;
    uint64_t count;
    uint64_t max;
    uint64_t event; /* the event that needs the ops being added */
};

static int op_add(struct op_list *list, struct lh_residency_op op, struct lh_error *err)
{
    if (list->count == list->max)
        return lh_error_set(err, -E2BIG, "the plan needs more than %" PRIu64 " ops", list->max);
    op.event = list->event;
    list->ops[list->count++] = op;
    return 0;
}

static int evict_plan(struct lh_residency *state, uint32_t victim, struct op_list *list,
                      struct lh_error *err)
{
    LH_TRY(op_add(list,
                  (struct lh_residency_op){.kind = LH_RESIDENCY_OP_EVICT,
                                           .unit = victim,
                                           .offset = state->offsets[victim],
                                           .uses_before = state->use_counts[victim]},
                  err));
    if (!lh_residency_has_place(state, victim))
        lh_range_release(&state->range, state->offsets[victim], state->units[victim].bytes);
    state->offsets[victim] = LH_RESIDENCY_ABSENT;
    state->is_stale[victim] = false;
    return 0;
}

static int load_add(struct lh_residency *state, uint32_t unit, struct op_list *list,
                    struct lh_error *err)
{
    return op_add(list,
                  (struct lh_residency_op){.kind = LH_RESIDENCY_OP_LOAD,
                                           .unit = unit,
                                           .offset = state->offsets[unit],
                                           .uses_before = state->use_counts[unit]},
                  err);
}

/* Reload a stale copy in place. */
static int renew_plan(struct lh_residency *state, uint32_t unit, struct op_list *list,
                      struct lh_error *err)
{
    uint64_t offset = state->offsets[unit];
    LH_TRY(evict_plan(state, unit, list, err));
    lh_residency_put(state, unit, offset);
    return load_add(state, unit, list, err);
}

/*
 * The reserved place that a unit may not overlap if it is loaded at `offset` for event `at`; NULL:
 * none. The number of reserved places is small, and it is 0 in nearly all plans.
 */
static const struct lh_residency_reserved *
obstacle_find(const struct lh_residency *state, uint32_t unit, uint64_t offset, uint64_t at)
{
    for (uint32_t i = 0; i < state->scratch->reserved_count; i++) {
        const struct lh_residency_reserved *place = &state->scratch->reserved[i];
        if (place->avoids[unit] && at < place->event && offset < place->offset + place->bytes &&
            place->offset < offset + state->units[unit].bytes)
            return place;
    }
    return NULL;
}

/* The first free offset at which the unit may be loaded for event `at`, or LH_RANGE_NONE. */
static uint64_t room_find(const struct lh_residency *state, uint32_t unit, uint64_t at)
{
    uint64_t bytes = lh_align_up(state->units[unit].bytes, LH_RESIDENCY_GRANULE);
    for (uint32_t i = 0; i < state->range.hole_count; i++) {
        uint64_t offset = state->range.holes[i].offset;
        uint64_t end = offset + state->range.holes[i].bytes;
        const struct lh_residency_reserved *place = obstacle_find(state, unit, offset, at);
        while (place && offset + bytes <= end) {
            offset = place->offset + place->bytes;
            place = obstacle_find(state, unit, offset, at);
        }
        if (offset + bytes <= end)
            return offset;
    }
    return LH_RANGE_NONE;
}

/* Evict units that are not in use from places that they must not occupy when they will be. */
static int reserved_clear(struct lh_residency *state, struct op_list *list, struct lh_error *err)
{
    for (uint32_t i = 0; state->scratch->reserved_count > 0 && i < state->unit_count; i++) {
        if (state->offsets[i] != LH_RESIDENCY_ABSENT && state->open_uses[i] == 0 &&
            !lh_residency_has_place(state, i) &&
            obstacle_find(state, i, state->offsets[i], list->event))
            LH_TRY(evict_plan(state, i, list, err));
    }
    return 0;
}

static int load_plan(struct lh_residency *state, uint32_t unit, struct op_list *list,
                     struct lh_error *err)
{
    uint64_t bytes = state->units[unit].bytes;
    bool is_placed = lh_residency_has_place(state, unit);
    LH_TRY(reserved_clear(state, list, err));
    if (state->is_stale[unit])
        return renew_plan(state, unit, list, err);
    uint64_t offset = is_placed ? places_bytes(state, unit) : room_find(state, unit, list->event);
    while (offset == LH_RANGE_NONE) {
        uint32_t victim = victim_find(state);
        if (victim == state->unit_count)
            return lh_error_set(
                err, -ENOSPC,
                "use %" PRIu64 " needs %" PRIu64 " bytes of contiguous space for unit %u; %" PRIu64
                " of %" PRIu64 " bytes are free, and everything else is in use",
                list->event, bytes, unit, state->range.free_bytes, state->range.total_bytes);
        LH_TRY(evict_plan(state, victim, list, err));
        offset = room_find(state, unit, list->event);
    }
    lh_residency_put(state, unit, offset);
    return load_add(state, unit, list, err);
}

/*
 * Mark the copy as stale. The update counts as a use, so that an eviction can wait for it. Of all
 * stale copies, the one that has been stale the longest is evicted first.
 */
static void copy_invalidate(struct lh_residency *state, uint32_t unit, uint64_t event)
{
    state->use_counts[unit]++;
    if (state->offsets[unit] == LH_RESIDENCY_ABSENT)
        return;
    state->is_stale[unit] = true;
    state->scratch->next_uses[unit] = NEVER - 1 - event;
}

int64_t lh_residency_plan(struct lh_residency *state, const struct lh_residency_event *events,
                          uint64_t event_count, bool cyclic, struct lh_residency_op *ops,
                          uint64_t op_max, uint64_t *loaded_bytes_out, uint64_t *failed_event_out,
                          struct lh_error *err)
{
    struct op_list list = {.ops = ops, .max = op_max};
    uint64_t loaded_bytes = 0;
    next_uses_start(state, events, event_count);
    for (uint32_t i = 0; i < state->unit_count; i++)
        state->scratch->is_open_before[i] = state->open_uses[i] > 0;
    for (uint64_t i = 0; i < event_count; i++) {
        uint32_t unit = events[i].unit;
        if (events[i].kind == LH_RESIDENCY_EVENT_END) {
            if (state->open_uses[unit] > 0)
                state->open_uses[unit]--;
            state->scratch->is_open_before[unit] &= state->open_uses[unit] > 0;
            continue;
        }
        if (events[i].kind == LH_RESIDENCY_EVENT_UPDATE && state->has_copies) {
            copy_invalidate(state, unit, i);
            continue;
        }
        if (state->offsets[unit] == LH_RESIDENCY_ABSENT || state->is_stale[unit]) {
            *failed_event_out = i;
            list.event = i;
            LH_TRY(load_plan(state, unit, &list, err));
            loaded_bytes += load_bytes(&state->units[unit]);
        }
        if (events[i].kind == LH_RESIDENCY_EVENT_NEED)
            continue;
        state->use_counts[unit]++;
        state->scratch->next_uses[unit] =
            next_use_find(state, events, event_count, i, unit, cyclic);
        if (events[i].kind == LH_RESIDENCY_EVENT_BEGIN)
            state->open_uses[unit]++;
    }
    *loaded_bytes_out = loaded_bytes;
    return (int64_t)list.count;
}

/* Whether a place contains bytes of a unit that is in use, and is not always resident. */
static bool is_in_place(const struct lh_residency *state, uint32_t unit,
                        const struct lh_residency_reserved *place)
{
    return state->open_uses[unit] > 0 && !lh_residency_has_place(state, unit) &&
           state->offsets[unit] < place->offset + place->bytes &&
           place->offset < state->offsets[unit] + state->units[unit].bytes;
}

/* The bytes of the units in use that a place would displace; NEVER if one of them cannot move. */
static uint64_t displaced_bytes(const struct lh_residency *state,
                                const struct lh_residency_reserved *place)
{
    uint64_t bytes = 0;
    LH_ASSERT(place->bytes <= state->range.total_bytes);
    if (place->offset < places_bytes(state, state->unit_count) ||
        place->offset > state->range.total_bytes - place->bytes)
        return NEVER;
    for (uint32_t i = 0; i < state->unit_count; i++) {
        if (!is_in_place(state, i, place))
            continue;
        if (state->scratch->is_open_before[i])
            return NEVER;
        bytes += state->units[i].bytes;
    }
    return bytes;
}

/* The place beside a unit in use, or at the region's start, that displaces the fewest bytes. */
static uint64_t displace_least(const struct lh_residency *state,
                               struct lh_residency_reserved *place)
{
    struct lh_residency_reserved trial = *place;
    trial.offset = place->offset = places_bytes(state, state->unit_count);
    uint64_t least = displaced_bytes(state, &trial);
    for (uint32_t i = 0; i < 2 * state->unit_count; i++) {
        uint32_t unit = i / 2;
        uint64_t bytes = lh_align_up(state->units[unit].bytes, LH_RESIDENCY_GRANULE);
        bool is_behind = i % 2 == 0;
        if (state->open_uses[unit] == 0 || state->offsets[unit] == LH_RESIDENCY_ABSENT ||
            (!is_behind && state->offsets[unit] < place->bytes))
            continue;
        trial.offset =
            is_behind ? state->offsets[unit] + bytes : state->offsets[unit] - place->bytes;
        uint64_t displaced = displaced_bytes(state, &trial);
        if (displaced < least) {
            least = displaced;
            place->offset = trial.offset;
        }
    }
    return least;
}

/*
 * After a plan found no room for the event `at`, in the state that it left: reserve a place for
 * that event. Returns false if none helps.
 */
static bool place_reserve(struct lh_residency *state, const struct lh_residency_event *events,
                          uint64_t at)
{
    if (state->scratch->reserved_count == LH_RESIDENCY_RESERVED_COUNT_MAX)
        return false;
    struct lh_residency_reserved *place = &state->scratch->reserved[state->scratch->reserved_count];
    uint64_t bytes = state->units[events[at].unit].bytes;
    place->event = at;
    place->bytes = lh_align_up(bytes, LH_RESIDENCY_GRANULE);
    if (displace_least(state, place) == NEVER)
        return false;
    for (uint32_t i = 0; i < state->unit_count; i++)
        place->avoids[i] = state->open_uses[i] > 0 && !state->scratch->is_open_before[i];
    state->scratch->reserved_count++;
    return true;
}

int64_t lh_residency_plan_apart(struct lh_residency *state, const struct lh_residency *before,
                                const struct lh_residency_event *events, uint64_t event_count,
                                bool cyclic, struct lh_residency_op *ops, uint64_t op_max,
                                uint64_t *loaded_bytes_out, uint64_t *failed_event_out,
                                struct lh_error *err)
{
    int64_t added = 0;
    bool is_again = true;
    LH_ASSERT(state->scratch->reserved_count == 0);
    while (is_again) {
        lh_residency_copy(state, before);
        added = lh_residency_plan(state, events, event_count, cyclic, ops, op_max, loaded_bytes_out,
                                  failed_event_out, err);
        is_again = added == -ENOSPC && place_reserve(state, events, *failed_event_out);
    }
    bool is_reserved = state->scratch->reserved_count > 0;
    state->scratch->reserved_count = 0;
    if (added >= 0 && is_reserved && err)
        *err = (struct lh_error){0}; /* of the plans without all of the places */
    if (added != -ENOSPC || !is_reserved)
        return added;
    /* Reserved places did not help: report where the plan ends without them. */
    lh_residency_copy(state, before);
    return lh_residency_plan(state, events, event_count, cyclic, ops, op_max, loaded_bytes_out,
                             failed_event_out, err);
}

/* The bytes that unit takes from the space that units without fixed places share. */
static uint64_t shared_bytes(const struct lh_residency *state, uint32_t unit)
{
    uint64_t bytes = lh_align_up(state->units[unit].bytes, LH_RESIDENCY_GRANULE);
    return lh_residency_has_place(state, unit) ? 0 : bytes;
}

static uint64_t shared_bytes_max(const struct lh_residency *state)
{
    uint64_t largest = 0;
    for (uint32_t i = 0; i < state->unit_count; i++)
        largest = lh_max_u64(largest, shared_bytes(state, i));
    return largest;
}

void lh_residency_read_ahead(const struct lh_residency *state, struct lh_residency_event *events,
                             uint64_t event_count)
{
    uint64_t total = state->range.total_bytes - places_bytes(state, state->unit_count);
    uint64_t largest = shared_bytes_max(state);
    uint64_t open_bytes = 0; /* the size of the units whose uses are open at events[i] */
    for (uint64_t i = event_count; i-- > 0;) {
        struct lh_residency_event event = events[i];
        uint64_t bytes = shared_bytes(state, event.unit);
        uint64_t first = i;
        uint64_t ended_bytes = 0;
        if (event.kind == LH_RESIDENCY_EVENT_END)
            open_bytes += bytes;
        if (event.kind != LH_RESIDENCY_EVENT_BEGIN)
            continue;
        while (first > 0 && events[first - 1].kind == LH_RESIDENCY_EVENT_END &&
               events[first - 1].unit != event.unit)
            ended_bytes += shared_bytes(state, events[--first].unit);
        open_bytes = lh_max_u64(open_bytes, bytes) + ended_bytes;
        if (open_bytes + (bytes == largest ? 0 : largest) <= total) {
            memmove(events + first + 1, events + first, (i - first) * sizeof(*events));
            events[first] = event;
            i = first;
        } else {
            open_bytes -= ended_bytes;
        }
        open_bytes -= bytes;
    }
}

/*
 * The bytes that cycles of events load, starting from state; NEVER if no contiguous room was left
 * for event *failed_at_out, or no room for the ops.
 */
static uint64_t cycles_bytes(const struct lh_residency *state,
                             const struct lh_residency_event *events, uint64_t event_count,
                             const struct lh_residency_trial *trial, uint64_t *failed_at_out)
{
    uint64_t sum = 0;
    lh_residency_copy(trial->state, state);
    for (int i = 0; i < TRIAL_CYCLE_COUNT; i++) {
        uint64_t bytes = 0;
        *failed_at_out = 0;
        if (lh_residency_plan(trial->state, events, event_count, true, trial->ops, trial->op_max,
                              &bytes, failed_at_out, NULL) < 0)
            return NEVER;
        sum += bytes;
    }
    return sum;
}

/* The index in events[] of the begin at `at` in moved[], which has the begins in the same order. */
static uint64_t begin_find(const struct lh_residency_event *events,
                           const struct lh_residency_event *moved, uint64_t at)
{
    uint64_t count = 0;
    uint64_t found = 0;
    for (uint64_t i = 0; i <= at; i++)
        count += moved[i].kind == LH_RESIDENCY_EVENT_BEGIN;
    while (count > 0)
        count -= events[found++].kind == LH_RESIDENCY_EVENT_BEGIN;
    return found - 1;
}

/* Undo the move of the begin at `at`. Returns false if `at` is not a begin, or was not moved. */
static bool begin_put_back(const struct lh_residency_event *events,
                           struct lh_residency_event *moved, uint64_t at)
{
    struct lh_residency_event event = moved[at];
    if (event.kind != LH_RESIDENCY_EVENT_BEGIN)
        return false;
    uint64_t from = begin_find(events, moved, at);
    if (from == at)
        return false;
    memmove(moved + at, moved + at + 1, (from - at) * sizeof(*moved));
    moved[from] = event;
    return true;
}

bool lh_residency_read_ahead_where_cheap(const struct lh_residency *state,
                                         struct lh_residency_event *events, uint64_t event_count,
                                         const struct lh_residency_trial *trial)
{
    uint64_t all_bytes = 0;
    uint64_t unit_count = 0;
    for (uint32_t i = 0; i < state->unit_count; i++) {
        all_bytes += shared_bytes(state, i);
        unit_count += shared_bytes(state, i) > 0;
    }
    if (unit_count == 0 || 2 * event_count > TRIAL_EVENT_COUNT_MAX)
        return false; /* nothing is ever evicted, or trials would take too long */
    memcpy(trial->events, events, event_count * sizeof(*events));
    lh_residency_read_ahead(state, trial->events, event_count);
    uint64_t failed_at = 0;
    uint64_t moved_bytes = cycles_bytes(state, trial->events, event_count, trial, &failed_at);
    uint64_t trials = TRIAL_EVENT_COUNT_MAX / lh_max_u64(event_count, 1) - 2;
    for (; trials > 0 && moved_bytes == NEVER; trials--) {
        if (!begin_put_back(events, trial->events, failed_at))
            return false;
        moved_bytes = cycles_bytes(state, trial->events, event_count, trial, &failed_at);
    }
    if (moved_bytes == NEVER)
        return false;
    uint64_t bytes = cycles_bytes(state, events, event_count, trial, &failed_at);
    uint64_t more_bytes = lh_max_u64(bytes / 4, TRIAL_CYCLE_COUNT * 2 * (all_bytes / unit_count));
    if (bytes < moved_bytes && moved_bytes - bytes > more_bytes)
        return false;
    memcpy(events, trial->events, event_count * sizeof(*events));
    return true;
}

/* Make room for an absent unit for event `at`, without evicting what is needed sooner. */
static int room_plan(struct lh_residency *state, uint32_t unit, uint64_t at, bool *has_room,
                     struct op_list *list, struct lh_error *err)
{
    uint64_t bytes = state->units[unit].bytes;
    *has_room = lh_residency_has_place(state, unit) || lh_range_has(&state->range, bytes);
    while (!*has_room) {
        uint32_t victim = victim_find(state);
        if (victim == state->unit_count || state->scratch->next_uses[victim] <= at)
            return 0;
        LH_TRY(evict_plan(state, victim, list, err));
        *has_room = lh_range_has(&state->range, bytes);
    }
    return 0;
}

int64_t lh_residency_plan_ahead(struct lh_residency *state, const struct lh_residency_event *events,
                                uint64_t event_count, struct lh_residency_op *ops, uint64_t op_max,
                                uint64_t *loaded_bytes_out, struct lh_error *err)
{
    struct op_list list = {.ops = ops, .max = op_max};
    *loaded_bytes_out = 0;
    LH_ASSERT(state->has_copies);
    next_uses_start(state, events, event_count);
    for (uint64_t i = 0; i < event_count; i++) {
        uint32_t unit = events[i].unit;
        if (events[i].kind == LH_RESIDENCY_EVENT_UPDATE && state->scratch->first_uses[unit] > i)
            state->scratch->first_uses[unit] = NEVER;
        if (state->scratch->first_uses[unit] != i)
            continue;
        bool is_absent = state->offsets[unit] == LH_RESIDENCY_ABSENT;
        bool has_room = true;
        if (is_absent)
            LH_TRY(room_plan(state, unit, i, &has_room, &list, err));
        if (!has_room)
            break;
        if (is_absent || state->is_stale[unit]) {
            LH_TRY(load_plan(state, unit, &list, err));
            *loaded_bytes_out += load_bytes(&state->units[unit]);
        }
        state->scratch->next_uses[unit] = i;
    }
    return (int64_t)list.count;
}

bool lh_residency_commutes(const struct lh_residency_unit *units, const struct lh_residency_op *a,
                           const struct lh_residency_op *b)
{
    if (a->kind == LH_RESIDENCY_OP_NONE)
        return true;
    return a->unit != b->unit && (a->offset + units[a->unit].bytes <= b->offset ||
                                  b->offset + units[b->unit].bytes <= a->offset);
}
