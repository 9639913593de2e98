#include "lives/group.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"

/* If only naps end for this long, nothing will happen any more. */
#define HANG_NS UINT64_C(3000000000)
/* No step has as many events: something repeats forever. */
#define STEP_EVENT_MAX 20000
#define ROUND_MAX 10000 /* of polling all processes at one time */

static struct lh_sim_lives *lives_of(struct lh_sim_group *group, uint32_t rank)
{
    return &group->peers[rank].lives;
}

static bool is_owner(const struct lh_sim_group *group, uint32_t rank)
{
    return group->crew->owners[rank] == rank;
}

static void deliver(void *context, struct lh_sim_message *message)
{
    struct lh_sim_group *group = context;
    lh_sim_peer_deliver(&group->peers[message->to], message);
}

int lh_sim_group_init(struct lh_sim_group *group, const struct lh_sim_group_opts *opts,
                      struct lh_alloc *alloc, struct lh_error *err)
{
    struct lh_sim_net_opts net_opts = opts->net;
    *group = (struct lh_sim_group){.crew = opts->crew};
    net_opts.deliver = deliver;
    net_opts.context = group;
    LH_TRY(lh_sim_net_init(&group->net, &net_opts, alloc, err));
    for (uint32_t i = 0; i < opts->crew->count; i++) {
        struct lh_sim_peer_opts peer_opts = {
            .lives = opts->lives[i],
            .crew = opts->crew,
            .net = &group->net,
            .owner = &group->peers[opts->crew->owners[i]],
            .rank = i,
        };
        LH_TRY(lh_sim_peer_init(&group->peers[i], &peer_opts, alloc, err));
    }
    return 0;
}

void lh_sim_group_deinit(struct lh_sim_group *group)
{
    for (uint32_t i = group->crew->count; i-- > 0;) {
        if (group->peers[i].lives.run.alloc)
            lh_sim_peer_deinit(&group->peers[i]);
    }
    lh_sim_net_deinit(&group->net);
}

/* --- The step that all have -------------------------------------------------------------- */

/*
 * The newest step that all stores have. A process that is left when another one has ended commits
 * the last step that it has closed, also between two commits: not all may have that one.
 */
static int common_find(struct lh_sim_group *group, const uint64_t (*steps)[2], struct lh_error *err)
{
    bool is_found = false;
    for (uint32_t k = 0; k < 2; k++) {
        uint64_t step = steps[0][k]; /* process 0 is an owner */
        bool is_common = true;
        for (uint32_t i = 0; i < group->crew->count; i++)
            is_common &= !is_owner(group, i) || steps[i][0] == step || steps[i][1] == step;
        if (!is_common || (is_found && step < group->resumed_step))
            continue;
        group->resumed_step = step;
        is_found = true;
    }
    return is_found ? 0 : lh_error_set(err, -EPROTO, "the stores have no step in common");
}

static int look_at_all(struct lh_sim_group *group, uint64_t (*steps)[2], struct lh_error *err)
{
    uint64_t floor = UINT64_MAX;
    uint64_t least = UINT64_MAX;
    uint64_t most = 0;
    for (uint32_t i = 0; i < group->crew->count; i++) {
        const struct lh_sim_lives *lives = lives_of(group, i);
        if (!is_owner(group, i))
            continue;
        LH_TRY(lh_sim_lives_look(lives_of(group, i), &steps[i][0], &steps[i][1], err));
        uint64_t newest = steps[i][0];
        if (newest < lives->committed_step || newest > lives->opts.reference->step)
            return lh_error_set(err, -EPROTO,
                                "process %" PRIu32 " has step %" PRIu64 ", but had committed step"
                                " %" PRIu64 " and closed step %" PRIu64,
                                i, newest, lives->committed_step, lives->opts.reference->step);
        floor = lh_min_u64(floor, lives->committed_step);
        least = lh_min_u64(least, newest);
        most = lh_max_u64(most, newest);
    }
    LH_TRY(common_find(group, steps, err));
    uint64_t commit_every = lives_of(group, 0)->opts.run.commit_every;
    if (most - least > commit_every || group->resumed_step < floor - floor % commit_every)
        return lh_error_set(err, -EPROTO,
                            "the newest steps of the stores are %" PRIu64 " to %" PRIu64
                            ", with a commit every %" PRIu64 " steps; all had committed %" PRIu64,
                            least, most, commit_every, floor);
    return 0;
}

static int step_agree(struct lh_sim_group *group, struct lh_error *err)
{
    uint64_t steps[LH_SIM_PEER_COUNT_MAX][2] = {0};
    if (lives_of(group, 0)->made != LH_SIM_MADE_FILLED)
        return 0; /* the first lives */
    LH_TRY(look_at_all(group, steps, err));
    for (uint32_t i = 0; i < group->crew->count; i++) {
        struct lh_sim_lives_opts *opts = &lives_of(group, i)->opts;
        if (!is_owner(group, i))
            continue;
        opts->is_asked_older = steps[i][0] != group->resumed_step;
        opts->open_at = group->resumed_step;
        group->older_count += opts->is_asked_older;
    }
    return 0;
}

/* Set one time in all worlds. */
static void time_set(struct lh_sim_group *group, uint64_t now_ns)
{
    group->net.world.now_ns = now_ns;
    for (uint32_t i = 0; i < group->crew->count; i++)
        lives_of(group, i)->run.world.now_ns = now_ns;
}

static int peers_open(struct lh_sim_group *group, struct lh_error *err)
{
    for (uint32_t mates = 0; mates < 2; mates++) {
        for (uint32_t i = 0; i < group->crew->count; i++) {
            if (is_owner(group, i) == mates)
                continue;
            enum lh_sim_open open = lh_sim_peer_open(&group->peers[i], err);
            uint64_t step = open == LH_SIM_OPEN_DONE ? lh_store_step(lives_of(group, i)->run.store)
                                                     : UINT64_MAX;
            if (step == group->resumed_step)
                continue;
            lh_error_prefix(err, "process %" PRIu32 ", opened (%d) at step %" PRId64, i, (int)open,
                            (int64_t)step);
            return -EPROTO;
        }
    }
    return 0;
}

int lh_sim_group_open(struct lh_sim_group *group, struct lh_error *err)
{
    const struct lh_sim_crew *crew = group->crew;
    time_set(group, group->net.world.now_ns);
    group->step_from = group->fired_count;
    group->progress_ns = group->net.world.now_ns;
    LH_TRY(step_agree(group, err));
    LH_TRY(peers_open(group, err));
    for (uint32_t i = 0; i < crew->count; i++) {
        for (uint32_t j = 0; j < crew->count; j++) {
            if (i != j && crew->owners[i] == crew->owners[j])
                lh_sim_peer_meet(&group->peers[i], &group->peers[j]);
        }
    }
    return 0;
}

/* --- Driving ----------------------------------------------------------------------------- */

static struct lh_sim_world *broken_world(struct lh_sim_group *group)
{
    if (lh_sim_world_has_failed(&group->net.world))
        return &group->net.world;
    for (uint32_t i = 0; i < group->crew->count; i++) {
        if (lh_sim_world_has_failed(&lives_of(group, i)->run.world))
            return &lives_of(group, i)->run.world;
    }
    return NULL;
}

/* Poll until nothing moves at the current time, and no engine has news. */
static void settle(struct lh_sim_group *group)
{
    bool is_over = false;
    for (uint32_t round = 0; !is_over && !broken_world(group); round++) {
        bool moved = false;
        if (round == ROUND_MAX)
            lh_sim_world_fail(&group->net.world, "polled %d times, and something still moves",
                              ROUND_MAX);
        for (uint32_t i = 0; i < group->crew->count; i++)
            moved |= group->peers[i].is_alive && lh_sim_peer_poll(&group->peers[i]);
        is_over = !moved;
        for (uint32_t i = 0; !moved && i < group->crew->count; i++) {
            struct lh_sim_peer *peer = &group->peers[i];
            is_over &= !(peer->is_alive && peer->is_awake);
            if (peer->is_alive)
                (void)lh_sim_peer_sleep(peer);
        }
    }
}

static void steps_check(struct lh_sim_group *group)
{
    uint64_t least = UINT64_MAX;
    uint64_t most = 0;
    for (uint32_t i = 0; i < group->crew->count; i++) {
        least = lh_min_u64(least, lives_of(group, i)->run.train.step);
        most = lh_max_u64(most, lives_of(group, i)->run.train.step);
    }
    group->step_from = least == group->step ? group->step_from : group->fired_count;
    group->step = least;
    if (group->fired_count > group->step_from + STEP_EVENT_MAX)
        lh_sim_world_fail(&group->net.world, "step %" PRIu64 " does not end after %d events",
                          least + 1, STEP_EVENT_MAX);
    if (most > least + 1)
        lh_sim_world_fail(&group->net.world,
                          "one process has closed step %" PRIu64 ", another one only %" PRIu64,
                          most, least);
}

static bool is_done(const struct lh_sim_peer *peer)
{
    return peer->lives.run.train.state == LH_SIM_TRAIN_STATE_DONE;
}

/* Run all checkers. Returns whether all processes are done. */
static bool quiet_check(struct lh_sim_group *group)
{
    bool is_all_done = !group->is_ending;
    for (uint32_t i = 0; i < group->crew->count; i++) {
        if (!group->peers[i].is_alive)
            continue;
        lh_sim_run_quiet_check(&lives_of(group, i)->run);
        is_all_done &= is_done(&group->peers[i]);
    }
    lh_sim_net_check(&group->net);
    steps_check(group);
    for (uint32_t i = 0; is_all_done && i < group->crew->count; i++) {
        if (lh_sim_lives_hooks.trained(&group->peers[i]))
            lh_sim_check_totals(&lives_of(group, i)->run.check);
    }
    return is_all_done;
}

/* Whether a process has failed: its engine, or its script because of a message. */
static bool has_failed(struct lh_sim_group *group, uint32_t *rank_out, struct lh_error *err)
{
    for (uint32_t i = 0; i < group->crew->count; i++) {
        struct lh_sim_peer *peer = &group->peers[i];
        if (!peer->is_alive)
            continue;
        *rank_out = i;
        if (peer->err.code < 0) {
            *err = peer->err;
            return true;
        }
        if (lh_engine_error(peer->lives.run.engine, err) < 0)
            return true;
        if (peer->lives.run.train.state == LH_SIM_TRAIN_STATE_FAILED) {
            (void)lh_error_set(err, peer->lives.run.train.rc, "the script failed: %s",
                               peer->lives.script.err.message);
            lh_engine_refusal(peer->lives.run.engine, err);
            return true;
        }
    }
    return false;
}

static void hang_report(struct lh_sim_group *group)
{
    char text[LH_SIM_PEER_COUNT_MAX * 512] = "";
    for (uint32_t i = 0; i < group->crew->count; i++) {
        uint64_t used = strlen(text);
        lh_sim_peer_describe(&group->peers[i], text + used, sizeof(text) - used);
    }
    fprintf(stderr, "hang:%s\n", text);
    lh_sim_world_fail(&group->net.world,
                      "hang: nothing moves and no event is pending (stderr has the processes)");
}

/* Let the earliest event happen. Returns false if only naps, which never end, are left. */
static bool advance(struct lh_sim_group *group)
{
    struct lh_sim_world *first = &group->net.world;
    struct lh_sim_peer *peer = NULL;
    uint64_t at_ns = lh_sim_world_next_ns(first);
    for (uint32_t i = group->crew->count; i-- > 0;) {
        struct lh_sim_world *world = &lives_of(group, i)->run.world;
        if (!group->peers[i].is_alive || lh_sim_world_next_ns(world) > at_ns ||
            lh_sim_world_next_ns(world) == UINT64_MAX)
            continue;
        at_ns = lh_sim_world_next_ns(world);
        first = world;
        peer = &group->peers[i];
    }
    if (at_ns == UINT64_MAX || at_ns > group->progress_ns + HANG_NS)
        return false;
    uint64_t naps = peer ? peer->nap_count : 0;
    time_set(group, at_ns);
    (void)lh_sim_world_advance(first);
    group->fired_count++;
    if (peer)
        peer->is_awake = true;
    if (!peer || peer->nap_count == naps)
        group->progress_ns = at_ns;
    return true;
}

/* End one process, or all of a machine. */
static void crash_begin(struct lh_sim_group *group)
{
    const struct lh_sim_crew *crew = group->crew;
    for (uint32_t i = 0; i < crew->count; i++) {
        bool is_there = crew->machines[i] == crew->machines[group->crash.rank];
        if (i == group->crash.rank || (group->crash.is_power && is_there))
            group->peers[i].is_alive = false;
    }
    group->is_ending = true;
    group->ends_at = group->fired_count + group->crash.later;
}

/* The processes that are left learn that another one has ended. Those that may commit stay. */
static int leave_all(struct lh_sim_group *group, uint32_t *rank_out, struct lh_error *err)
{
    group->is_leaving = true;
    for (uint32_t i = 0; i < group->crew->count; i++) {
        struct lh_sim_peer *peer = &group->peers[i];
        struct lh_error reason = {0};
        if (!peer->is_alive)
            continue;
        if (!lh_sim_peer_leave(peer, &reason)) {
            *rank_out = i;
            return lh_error_set(err, -EPROTO, "values that do not come lead to error %d: %s",
                                reason.code, reason.message);
        }
        peer->is_alive = group->crash.is_well && lh_sim_peer_finish(peer);
    }
    return 0;
}

/* Whether the time of the crash has come. Called once after each event. */
static bool crash_is_due(struct lh_sim_group *group)
{
    const struct lh_sim_lives *lives = lives_of(group, group->crew->owners[group->crash.rank]);
    bool is_committing = lh_store_is_committing(lives->run.store);
    group->commit_count += is_committing && !group->was_committing;
    group->was_committing = is_committing;
    if (group->crash_from == UINT64_MAX && group->commit_count == group->crash.commit)
        group->crash_from = group->fired_count;
    return group->crash_from != UINT64_MAX &&
           group->fired_count - group->crash_from >= group->crash.after;
}

static bool is_any_left(const struct lh_sim_group *group)
{
    for (uint32_t i = 0; i < group->crew->count; i++) {
        if (group->peers[i].is_alive && !is_done(&group->peers[i]))
            return true;
    }
    return false;
}

static void crash_plan(struct lh_sim_group *group, const struct lh_sim_group_crash *crash)
{
    group->crash = *crash;
    group->crash_from = crash->commit == 0 ? group->fired_count : UINT64_MAX;
    group->commit_count = 0;
    group->was_committing = false;
    group->is_ending = false;
    group->is_leaving = false;
}

enum lh_sim_end lh_sim_group_drive(struct lh_sim_group *group,
                                   const struct lh_sim_group_crash *crash, uint32_t *rank_out,
                                   struct lh_error *err)
{
    crash_plan(group, crash);
    for (;;) {
        settle(group);
        bool is_all_done = !broken_world(group) && quiet_check(group);
        if (broken_world(group))
            break;
        if (is_all_done)
            return LH_SIM_END_DONE;
        if (has_failed(group, rank_out, err))
            return LH_SIM_END_FAILED;
        if (!group->is_ending && crash_is_due(group))
            crash_begin(group);
        if (group->is_leaving && !is_any_left(group))
            return LH_SIM_END_STOPPED;
        bool is_late = group->is_ending && group->fired_count >= group->ends_at;
        if ((group->is_leaving || !is_late) && advance(group))
            continue;
        if (!group->is_ending || group->is_leaving)
            hang_report(group);
        else if (leave_all(group, rank_out, err) < 0)
            return LH_SIM_END_BROKEN;
    }
    for (uint32_t i = 0; i < group->crew->count; i++)
        *rank_out = broken_world(group) == &lives_of(group, i)->run.world ? i : *rank_out;
    *err = broken_world(group)->failure;
    return LH_SIM_END_BROKEN;
}

void lh_sim_group_stop(struct lh_sim_group *group, enum lh_sim_end end)
{
    const struct lh_sim_crew *crew = group->crew;
    bool is_done_well = end == LH_SIM_END_DONE;
    for (uint32_t mates = 2; mates-- > 0;) {
        for (uint32_t i = 0; i < crew->count; i++) {
            bool is_there = crew->machines[i] == crew->machines[group->crash.rank];
            bool power = is_done_well || (group->is_ending && group->crash.is_power && is_there);
            if (is_owner(group, i) != mates)
                lh_sim_peer_stop(&group->peers[i],
                                 group->peers[i].is_alive && is_done(&group->peers[i])
                                     ? LH_SIM_END_DONE
                                     : LH_SIM_END_STOPPED,
                                 power);
        }
    }
    lh_sim_net_forget(&group->net);
}
