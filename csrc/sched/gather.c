/*
 * Gathers: the processes of a team (team/team.h), each with an accelerator of its own, bring a unit
 * onto all of them with one copy of it over their links to main memory. Each copies its own part;
 * a thread of the caller then gathers the other parts from the other accelerators.
 *
 * A load of the plan begins with the copy of this process's part into the unit's place, which the
 * unit's earlier readers have left by then. The part is offered to the others (see [Note: Offers]
 * in team/team.h). All processes have offered it in a training loop whose processes make the same
 * uses in the same order, each as early as its own plan allows; the gathers themselves are made in
 * one order, that of the team's list. A READY unit is complete, as without gathers.
 *
 * A unit is updated in main memory only if no process copies it. So the parts that are offered at
 * the same time are of the same step.
 *
 * [Note: Uneven uses] An offer is withdrawn, and the rest of the unit is copied over the link, if
 *  1. another process will not offer the unit in this round, because its plan has no load of the
 *     unit any more (it skips the module, or has the unit already), or because it waits itself for
 *     what others compute (it has ended its backward, or failed); it says so once a thread waits
 *     for the unit (answers_pump);
 *  2. a thread waits for the unit, and a thread of another process waits for a unit that this one
 *     has not offered: they use units in different orders, and may wait for each other
 *     (is_crossed);
 *  3. something of this process, or a thread of a mate of the owner, waits for the unit's place in
 *     main memory, or for the end of what is in flight (is_in_the_way, must_withdraw);
 *  4. a thread has waited for gather_wait_ns: another process does something else, and may itself
 *     wait for this one. Then no more gathers are begun in this round.
 * None of this happens if all processes make the same uses. It counts as a replan, and the rest of
 * the unit as planned, as after any other use that was not predicted.
 *
 * All processes make the same number of backwards, and none ends before all of them have made it:
 * these are rounds. A process in an earlier round than another one, or that has not begun the
 * round, will come to what the other one waits for; in the same round its plan knows.
 *
 * Units are loaded whole in evaluations, and in a cycle whose order of uses is not known.
 *
 * Source: Elixir V (each process copies its shard of a chunk, and gathers the rest), FCDP IV-C.
 */
#include "sched/gather.h"

#include <errno.h>
#include <time.h>

#include "sched/engine_private.h"

static uint32_t index_of(const struct lh_engine *engine, const struct lh_unit *unit)
{
    LH_ASSERT(unit >= engine->units && unit < engine->units + engine->opts.unit_count);
    return (uint32_t)(unit - engine->units);
}

static void state_set(struct lh_engine *engine, uint32_t index, enum lh_gather_state state)
{
    struct lh_gather *gather = engine->gather;
    struct lh_gather_unit *unit = &gather->units[index];
    LH_ASSERT(lh_states_may(lh_states_gather, (int)unit->state, (int)state));
    if (unit->state == LH_GATHER_STATE_NONE)
        gather->active_count++;
    if (state == LH_GATHER_STATE_NONE)
        gather->active_count--;
    unit->state = state;
}

static uint64_t rest_bytes(const struct lh_engine *engine, uint32_t index)
{
    uint64_t bytes = engine->units[index].desc->bytes;
    LH_ASSERT(lh_gather_divides(&engine->opts, bytes));
    return bytes - lh_gather_link_bytes(&engine->opts, bytes);
}

/*
 * Move the bytes that other processes give from one link to another: in the counters, which count
 * a load as a copy of the whole unit when it begins, and in the plan, which always does.
 */
static void rest_move(struct lh_engine *engine, uint32_t index, uint64_t step,
                      enum lh_engine_link from, enum lh_engine_link to)
{
    uint64_t rest = rest_bytes(engine, index);
    struct lh_engine_step_stats *stats = lh_core_stats(engine, step);
    LH_ASSERT(stats->bytes[from] >= rest);
    stats->bytes[from] -= rest;
    stats->planned_bytes[from] -= rest;
    stats->bytes[to] += rest;
    stats->planned_bytes[to] += rest;
}

/* A load that has begun as a gather, maybe for a step that is over, copies the rest as well. */
static void returned_count(struct lh_engine *engine, uint32_t index)
{
    uint64_t step = engine->gather->units[index].step;
    LH_ASSERT(step <= engine->step + 1);
    uint64_t now = step == 0 ? 0 : lh_max_u64(step, lh_core_step(engine));
    if (now == step) {
        rest_move(engine, index, step, LH_ENGINE_LINK_GATHERED, LH_ENGINE_LINK_COPY_IN);
    } else {
        uint64_t rest = rest_bytes(engine, index);
        lh_core_stats(engine, now)->bytes[LH_ENGINE_LINK_COPY_IN] += rest;
        lh_core_stats(engine, now)->planned_bytes[LH_ENGINE_LINK_COPY_IN] += rest;
    }
    lh_core_stats(engine, now)->replans++;
}

/* Whether something waits until nothing is in flight. */
static bool is_ending(const struct lh_engine *engine)
{
    return engine->flush_is_asked || engine->step_state == LH_STEP_STATE_ABORTING ||
           atomic_load(&engine->pausing);
}

static bool may_gather(const struct lh_engine *engine)
{
    const struct lh_gather *gather = engine->gather;
    return engine->mode == LH_ENGINE_MODE_TRAIN && !engine->device_region->is_guess &&
           !gather->is_out && !gather->is_broken && !is_ending(engine);
}

static void finish(struct lh_engine *engine, uint32_t index)
{
    LH_ASSERT(engine->gather->active_count > 0);
    state_set(engine, index, LH_GATHER_STATE_NONE);
    lh_device_arrived(engine, lh_engine_unit_at(engine, index));
}

static void rest_copied(struct lh_engine *engine, struct lh_copy *copy)
{
    const struct lh_gather_unit *part = &engine->gather->units[copy->unit];
    struct lh_unit *unit = lh_engine_unit_at(engine, copy->unit);
    LH_ASSERT(part->state == LH_GATHER_STATE_RETURNED);
    lh_device_part_end(engine, unit);
    if (unit->copy.part_count == 0 && !part->rest_before && !part->rest_after)
        finish(engine, copy->unit);
}

/* Copy what another process does not give. Returns whether a copy was started. */
static bool rest_copy(struct lh_engine *engine, uint32_t index)
{
    struct lh_gather_unit *part = &engine->gather->units[index];
    struct lh_unit *unit = lh_engine_unit_at(engine, index);
    const struct lh_team *team = engine->opts.team;
    uint64_t bytes = unit->desc->bytes;
    bool moved = false;
    LH_ASSERT(part->state == LH_GATHER_STATE_RETURNED && unit->copy.is_copying);
    if (part->rest_before && lh_copy_is_free(engine, LH_COPY_USER_UNIT)) {
        uint64_t end = lh_gather_edge(bytes, team->mate_count + 1, team->mate);
        part->rest_before = false;
        moved |= lh_device_part_copy(engine, unit, 0, end, rest_copied);
    }
    if (part->rest_after && lh_copy_is_free(engine, LH_COPY_USER_UNIT)) {
        uint64_t first = lh_gather_edge(bytes, team->mate_count + 1, team->mate + 1);
        part->rest_after = false;
        moved |= lh_device_part_copy(engine, unit, first, bytes, rest_copied);
    }
    return moved;
}

static void rest_begin(struct lh_engine *engine, uint32_t index)
{
    struct lh_gather_unit *part = &engine->gather->units[index];
    const struct lh_team *team = engine->opts.team;
    returned_count(engine, index);
    state_set(engine, index, LH_GATHER_STATE_RETURNED);
    LH_ASSERT(!part->rest_before && !part->rest_after);
    part->rest_before = team->mate > 0;
    part->rest_after = team->mate < team->mate_count;
    (void)rest_copy(engine, index);
}

/* Withdraw an offer, unless it is too late. Returns whether it was withdrawn. */
static bool withdraw(struct lh_engine *engine, uint32_t index)
{
    LH_ASSERT(engine->gather->units[index].state == LH_GATHER_STATE_OFFERED);
    if (!lh_team_offer_withdraw(engine->opts.team, index))
        return false;
    if (engine->units[index].copy.is_stale)
        finish(engine, index);
    else
        rest_begin(engine, index);
    return true;
}

static void part_copied(struct lh_engine *engine, struct lh_copy *copy)
{
    struct lh_gather_unit *part = &engine->gather->units[copy->unit];
    LH_ASSERT(part->state == LH_GATHER_STATE_COPYING);
    lh_device_part_end(engine, lh_engine_unit_at(engine, copy->unit));
    part->awaited_ns = 0;
    state_set(engine, copy->unit, LH_GATHER_STATE_OFFERED);
    lh_team_offer(engine->opts.team, copy->unit);
}

static bool copy_may_be_whole(struct lh_engine *engine, struct lh_unit *unit, uint64_t step)
{
    uint32_t index = index_of(engine, unit);
    uint64_t bytes = unit->desc->bytes;
    const struct lh_team *team = engine->opts.team;
    if (!lh_gather_divides(&engine->opts, bytes) || !may_gather(engine))
        return true;
    uint64_t first = lh_gather_edge(bytes, team->mate_count + 1, team->mate);
    uint64_t end = lh_gather_edge(bytes, team->mate_count + 1, team->mate + 1);
    LH_ASSERT(first < end && end <= bytes && unit->state == LH_UNIT_STATE_READY);
    rest_move(engine, index, step, LH_ENGINE_LINK_COPY_IN, LH_ENGINE_LINK_GATHERED);
    engine->gather->units[index].step = step;
    state_set(engine, index, LH_GATHER_STATE_COPYING);
    (void)lh_device_part_copy(engine, unit, first, end, part_copied);
    return false;
}

static bool copy_may_precede_update(const struct lh_engine *engine, const struct lh_unit *unit)
{
    return !lh_gather_divides(&engine->opts, unit->desc->bytes);
}

/* Twice the number of the round, and one more once this process has begun it. */
static void progress_set(struct lh_engine *engine, uint64_t progress)
{
    LH_ASSERT(progress >= engine->gather->progress);
    engine->gather->progress = progress;
    lh_team_progress_set(engine->opts.team, progress);
}

static void use_begun(struct lh_engine *engine, uint32_t unit)
{
    (void)unit;
    bool is_first = engine->mode == LH_ENGINE_MODE_TRAIN && engine->recording.count == 0;
    if (is_first && !(engine->gather->progress & 1))
        progress_set(engine, engine->gather->progress | 1);
}

static void round_take(struct lh_engine *engine, uint64_t round)
{
    LH_ASSERT(round >= engine->gather->progress / 2);
    if (2 * round < engine->gather->progress)
        return; /* the round did not end in all processes */
    engine->gather->is_out = false;
    progress_set(engine, 2 * round);
}

/* Whether the current cycle has further uses of units. */
static bool has_uses_left(const struct lh_region *region)
{
    uint64_t at = region->position;
    LH_ASSERT(at <= region->predicted.count);
    while (at < region->predicted.count &&
           region->predicted.events[at].kind != LH_RESIDENCY_EVENT_BEGIN)
        at++;
    return at < region->predicted.count;
}

static bool is_load_planned(const struct lh_region *region, uint32_t index)
{
    bool is_any = region->planned_until < region->predicted.count; /* it may be planned later */
    for (uint64_t i = region->op_first; i < region->op_count && !is_any; i++)
        is_any = region->ops[i].unit == index && region->ops[i].kind == LH_RESIDENCY_OP_LOAD;
    return is_any;
}

/* Whether a process that offers a unit is further than this one. */
static bool is_behind(const struct lh_engine *engine, uint64_t offers)
{
    const struct lh_team *team = engine->opts.team;
    bool is_any = false;
    /* A process that waits for others in a round does not begin to use units in it. */
    uint64_t progress = engine->gather->progress | (engine->gather->is_still ? 1 : 0);
    for (uint32_t process = 0; process <= team->mate_count; process++) {
        if (offers >> process & 1)
            is_any |= lh_team_progress(team, process) > progress;
    }
    return is_any;
}

/* Whether this process will offer a unit that others have offered. See [Note: Uneven uses]. */
static bool will_offer(const struct lh_engine *engine, uint32_t index, uint64_t offers)
{
    enum lh_gather_state state = engine->gather->units[index].state;
    LH_ASSERT(state != LH_GATHER_STATE_OFFERED || !(offers >> engine->opts.team->mate & 1));
    if (state == LH_GATHER_STATE_COPYING)
        return true;
    if (engine->gather->is_broken)
        return false;
    if (is_behind(engine, offers))
        return true;
    return may_gather(engine) && !engine->gather->is_still &&
           has_uses_left(engine->device_region) && is_load_planned(engine->device_region, index);
}

/* Decline units that threads of other processes wait for, and that this one will not offer. */
static void answers_pump(struct lh_engine *engine)
{
    struct lh_team *team = engine->opts.team;
    const uint64_t answered = LH_TEAM_DECLINED | UINT64_C(1) << team->mate;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        uint64_t offers = lh_team_offers(team, i);
        if ((offers & LH_TEAM_AWAITED) && !(offers & answered) && !will_offer(engine, i, offers))
            lh_team_offer_decline(team, i);
    }
}

/* Whether a thread of another process waits for a unit that this one has not offered. */
static bool is_crossed(const struct lh_engine *engine, uint32_t index)
{
    const struct lh_team *team = engine->opts.team;
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        uint64_t offers = i == index ? 0 : lh_team_offers(team, i);
        bool is_mine = offers >> team->mate & 1;
        if ((offers & LH_TEAM_AWAITED) && !is_mine &&
            engine->gather->units[i].state != LH_GATHER_STATE_COPYING)
            return true;
    }
    return false;
}

/* Whether a thread has waited for the offered unit for too long, or must not wait. */
static bool awaited_look(struct lh_engine *engine, uint32_t index)
{
    struct lh_gather_unit *part = &engine->gather->units[index];
    LH_ASSERT(part->state == LH_GATHER_STATE_OFFERED);
    if (engine->units[index].waiter_count == 0)
        return false;
    if (part->awaited_ns == 0)
        part->awaited_ns = lh_core_now(engine);
    lh_team_offer_await(engine->opts.team, index);
    if (lh_core_now(engine) - part->awaited_ns > engine->opts.gather_wait_ns)
        engine->gather->is_out = true;
    bool is_outside = !(engine->gather->progress & 1); /* it reads parameters between forwards */
    return engine->gather->is_out || is_outside || is_crossed(engine, index);
}

/* Whether offers must be withdrawn, whoever waits for them. */
static bool must_withdraw(struct lh_engine *engine)
{
    const struct lh_team *team = engine->opts.team;
    bool is_in_the_way = atomic_exchange(&engine->gather->queue->is_in_the_way, false);
    bool is_room_asked = team->mate > 0 && lh_team_needs_room(team);
    return is_in_the_way || is_room_asked || is_ending(engine) || engine->gather->is_broken;
}

static bool offers_pump(struct lh_engine *engine)
{
    bool moved = false;
    bool is_any = must_withdraw(engine);
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        enum lh_gather_state state = engine->gather->units[i].state;
        if (state == LH_GATHER_STATE_RETURNED)
            moved |= rest_copy(engine, i);
        if (state != LH_GATHER_STATE_OFFERED)
            continue;
        bool is_declined = lh_team_offers(engine->opts.team, i) & LH_TEAM_DECLINED;
        if (is_any || is_declined || engine->units[i].copy.is_stale || awaited_look(engine, i))
            moved |= withdraw(engine, i);
    }
    return moved;
}

static void queue_put(struct lh_engine *engine, uint32_t index)
{
    struct lh_gather_queue *queue = engine->gather->queue;
    uint32_t room = engine->opts.unit_count;
    pthread_mutex_lock(&queue->mutex);
    LH_ASSERT(queue->count < room);
    queue->units[(queue->first + queue->count++) % room] = index;
    pthread_cond_signal(&queue->changed);
    pthread_mutex_unlock(&queue->mutex);
}

/* Hand the next units of the team's list to the caller's thread. */
static bool list_pump(struct lh_engine *engine)
{
    struct lh_gather *gather = engine->gather;
    uint32_t index = lh_team_gather_at(engine->opts.team, gather->place);
    bool moved = index != LH_TEAM_UNIT_NONE;
    for (; index != LH_TEAM_UNIT_NONE;
         index = lh_team_gather_at(engine->opts.team, gather->place)) {
        gather->place++;
        LH_ASSERT(engine->units[index].copy.state == LH_COPY_STATE_COPYING);
        state_set(engine, index, LH_GATHER_STATE_RUNNING);
        queue_put(engine, index);
    }
    return moved;
}

static bool gather_pump(struct lh_engine *engine)
{
    struct lh_team *team = engine->opts.team;
    if (team->mate == 0 && team->mate_count > 1)
        lh_team_offers_pass_on(team);
    bool moved = list_pump(engine);
    if (engine->gather->active_count > 0)
        moved |= offers_pump(engine);
    answers_pump(engine);
    return moved;
}

static void gathered(struct lh_engine *engine, uint32_t index, bool is_complete)
{
    LH_ASSERT(index < engine->opts.unit_count);
    LH_ASSERT(engine->gather->units[index].state == LH_GATHER_STATE_RUNNING);
    if (is_complete) {
        finish(engine, index);
        return;
    }
    engine->gather->is_broken = true;
    rest_begin(engine, index);
}

static bool message(struct lh_engine *engine, const struct lh_ring_message *message)
{
    if (message->words[0] == LH_MESSAGE_GATHERED)
        gathered(engine, (uint32_t)message->words[1], message->words[2] != 0);
    else if (message->words[0] == LH_MESSAGE_ROUND)
        round_take(engine, message->words[1]);
    else if (message->words[0] == LH_MESSAGE_STANDSTILL)
        engine->gather->is_still = message->words[1] != 0;
    else
        return false;
    return true;
}

static bool is_idle(const struct lh_engine *engine)
{
    return engine->gather->active_count == 0;
}

/* Whether a thread of a mate waits for a unit that this process, the owner, has no room for. */
static bool is_mate_waiting(const struct lh_engine *engine)
{
    const struct lh_team *team = engine->opts.team;
    LH_ASSERT(engine->gather && team->unit_count == engine->opts.unit_count);
    for (uint32_t i = 0; team->mate == 0 && i < engine->opts.unit_count; i++) {
        bool is_awaited = lh_team_wants(team, i) != 0 && lh_team_is_awaited(team, i);
        if (is_awaited && engine->units[i].state == LH_UNIT_STATE_ABSENT)
            return true;
    }
    return false;
}

/*
 * Whether what a thread waits for is under way. If it is not, offered units may be in its way,
 * because their bytes in main memory cannot be evicted. Nothing else of this process is in flight.
 */
static bool is_under_way(const struct lh_engine *engine)
{
    bool is_any = is_mate_waiting(engine);
    bool may_wait = !is_any; /* the mate may need the room before it offers what is awaited here */
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        enum lh_gather_state state = engine->gather->units[i].state;
        bool is_moving = state != LH_GATHER_STATE_NONE && state != LH_GATHER_STATE_OFFERED;
        bool is_awaited = engine->units[i].waiter_count > 0;
        if (is_moving || (state == LH_GATHER_STATE_OFFERED && is_awaited && may_wait))
            return true;
        is_any |= is_awaited;
    }
    bool is_awaited = is_any || atomic_load(&engine->waiting) > 0;
    if (is_awaited && engine->gather->active_count > 0)
        atomic_store(&engine->gather->queue->is_in_the_way, true);
    return false;
}

int lh_gather_next(struct lh_engine *engine, uint32_t *unit_out, int timeout_ms)
{
    LH_ASSERT(engine->gather && timeout_ms >= 0);
    struct lh_gather_queue *queue = engine->gather->queue;
    struct lh_clock clock = lh_clock_real();
    uint64_t until_ns = lh_clock_now_ns(&clock) + (uint64_t)timeout_ms * UINT64_C(1000000);
    struct timespec deadline = {.tv_sec = (time_t)(until_ns / UINT64_C(1000000000)),
                                .tv_nsec = (long)(until_ns % UINT64_C(1000000000))};
    int rc = 0;
    pthread_mutex_lock(&queue->mutex);
    while (queue->count == 0 && !queue->is_ended && rc == 0)
        rc = pthread_cond_timedwait(&queue->changed, &queue->mutex, &deadline);
    bool is_ended = queue->is_ended;
    bool is_there = queue->count > 0 && !is_ended;
    if (is_there) {
        *unit_out = queue->units[queue->first];
        queue->first = (queue->first + 1) % engine->opts.unit_count;
        queue->count--;
    }
    pthread_mutex_unlock(&queue->mutex);
    return is_ended ? -ECANCELED : is_there;
}

void lh_gather_done(struct lh_engine *engine, uint32_t unit, bool is_complete)
{
    LH_ASSERT(unit < engine->opts.unit_count && engine->gather);
    lh_engine_post(engine, LH_MESSAGE_GATHERED, unit, is_complete, 0);
}

void lh_gather_round(struct lh_engine *engine, uint64_t round)
{
    LH_ASSERT(engine->gather);
    lh_engine_post(engine, LH_MESSAGE_ROUND, round, 0, 0);
}

void lh_gather_wait(struct lh_engine *engine, bool waits)
{
    LH_ASSERT(engine->gather);
    lh_engine_post(engine, LH_MESSAGE_STANDSTILL, waits, 0, 0);
}

int lh_gather_create(struct lh_engine *engine, struct lh_error *err)
{
    uint32_t count = engine->opts.unit_count;
    const struct lh_team *team = engine->opts.team;
    LH_ASSERT(engine->dev && team);
    if (team->mate_count >= LH_TEAM_GATHERING_COUNT_MAX)
        return lh_error_set(err, -EINVAL,
                            "%u processes of one machine cannot gather units, only %u",
                            team->mate_count + 1, LH_TEAM_GATHERING_COUNT_MAX);
    LH_TRY(LH_ENGINE_PART_CREATE(engine, gather, err));
    struct lh_gather *gather = engine->gather;
    gather->units = lh_alloc_zeroed(engine->alloc, count, sizeof(*gather->units));
    struct lh_gather_queue *queue = lh_alloc_zeroed(engine->alloc, 1, sizeof(*queue));
    gather->queue = queue;
    if (queue) {
        pthread_condattr_t attributes;
        pthread_condattr_init(&attributes);
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        pthread_mutex_init(&queue->mutex, NULL);
        pthread_cond_init(&queue->changed, &attributes);
        pthread_condattr_destroy(&attributes);
        queue->units = lh_alloc_zeroed(engine->alloc, count, sizeof(*queue->units));
    }
    if (!gather->units || !queue || !queue->units)
        return lh_error_set(err, -ENOMEM, "no memory for the gathers of %u units", count);
    return 0;
}

void lh_gather_stop(struct lh_engine *engine)
{
    struct lh_gather_queue *queue = engine->gather->queue;
    LH_ASSERT(queue && !engine->has_thread);
    for (uint32_t i = 0; i < engine->opts.unit_count; i++) {
        if (engine->gather->units[i].state == LH_GATHER_STATE_OFFERED)
            (void)lh_team_offer_withdraw(engine->opts.team, i);
    }
    pthread_mutex_lock(&queue->mutex);
    queue->is_ended = true;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->mutex);
}

void lh_gather_destroy(struct lh_engine *engine)
{
    if (!engine->gather)
        return;
    struct lh_gather_queue *queue = engine->gather->queue;
    if (queue) {
        pthread_cond_destroy(&queue->changed);
        pthread_mutex_destroy(&queue->mutex);
        lh_free(engine->alloc, queue->units);
    }
    lh_free(engine->alloc, queue);
    lh_free(engine->alloc, engine->gather->units);
}

const struct lh_feature lh_gather_feature = {
    .name = "gather",
    .message = message,
    .use_begun = use_begun,
    .copy_may_be_whole = copy_may_be_whole,
    .copy_may_precede_update = copy_may_precede_update,
    .is_idle = is_idle,
    .is_under_way = is_under_way,
    .pump_before = gather_pump,
};
