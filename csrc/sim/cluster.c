#include "sim/cluster.h"

#include <inttypes.h>

#include "base/assert.h"

#define ROUND_MAX 10000 /* of polling all members at one time */
/* If nothing but the ends of naps happens for this long, nothing will happen any more. */
#define HANG_NS UINT64_C(3000000000)
/* The largest message that links can time (lh_sim_transfer_ns()). */
#define MESSAGE_BYTES_MAX (UINT64_C(1) << 34)

static int check(const struct lh_sim_cluster_opts *opts, const struct lh_sim_run_opts *run,
                 struct lh_error *err)
{
    if (opts->node_count < 1 || opts->node_count > LH_SIM_NODE_COUNT_MAX || opts->gpu_count < 1 ||
        opts->gpu_count > LH_SIM_GPU_COUNT_MAX || opts->micro_steps < 1)
        return lh_error_set(err, -EINVAL,
                            "%" PRIu32 " nodes of %" PRIu32 " accelerators with %" PRIu32
                            " micro-batches cannot be simulated: at most %d nodes of %d",
                            opts->node_count, opts->gpu_count, opts->micro_steps,
                            LH_SIM_NODE_COUNT_MAX, LH_SIM_GPU_COUNT_MAX);
    bool defers =
        run->schedule == LH_ENGINE_SCHEDULE_SERIAL || run->schedule == LH_ENGINE_SCHEDULE_DEFERRED;
    bool is_divided = opts->division == LH_SIM_DIVISION_SHARDS && opts->node_count > 1;
    if (!defers || (is_divided && run->schedule != LH_ENGINE_SCHEDULE_SERIAL))
        return lh_error_set(err, -EINVAL,
                            "a cluster has schedule serial, or deferred if each node has all"
                            " states; this is schedule %d",
                            (int)run->schedule);
    if (run->saved.ssd_bytes > 0 && opts->gpu_count > 1)
        return lh_error_set(err, -EINVAL,
                            "%" PRIu32 " accelerators of a node offload activations to SSD, which"
                            " cannot be simulated: they have to fit in main memory",
                            opts->gpu_count);
    for (uint32_t i = 0; i < run->model->unit_count; i++) {
        if (run->model->units[i].bytes > MESSAGE_BYTES_MAX)
            return lh_error_set(err, -EINVAL, "unit %" PRIu32 " is larger than a message can be",
                                i);
    }
    return 0;
}

struct lh_sim_member *lh_sim_cluster_member(const struct lh_sim_cluster *cluster, uint32_t node,
                                            uint32_t number)
{
    LH_ASSERT(node < cluster->mail.made_count && number < cluster->opts.gpu_count);
    return &cluster->members[node * cluster->opts.gpu_count + number];
}

static int members_init(struct lh_sim_cluster *cluster, const struct lh_sim_run_opts *run,
                        struct lh_error *err)
{
    const struct lh_sim_cluster_opts *opts = &cluster->opts;
    struct lh_sim_member_opts member_opts = {
        .run = *run,
        .mail = &cluster->mail,
        .gpu_count = opts->gpu_count,
        .micro_steps = opts->micro_steps,
        .is_divided = opts->division == LH_SIM_DIVISION_SHARDS && opts->node_count > 1,
    };
    member_opts.run.model = &cluster->model;
    for (uint32_t i = 0; i < cluster->member_count; i++) {
        member_opts.node = i / opts->gpu_count;
        member_opts.number = i % opts->gpu_count;
        member_opts.owner = lh_sim_cluster_member(cluster, member_opts.node, 0);
        if (member_opts.number > 0)
            member_opts.run.trace_count = 0;
        LH_TRY(lh_sim_member_init(&cluster->members[i], &member_opts, cluster->alloc, err));
        member_opts.run.trace_count = run->trace_count;
    }
    for (uint32_t i = 0; i < cluster->member_count; i++) {
        for (uint32_t j = 0; j < cluster->member_count; j++) {
            if (i != j && cluster->members[i].opts.owner == cluster->members[j].opts.owner)
                lh_sim_member_meet(&cluster->members[i], &cluster->members[j]);
        }
    }
    return 0;
}

int lh_sim_cluster_init(struct lh_sim_cluster *cluster, const struct lh_sim_cluster_opts *opts,
                        const struct lh_sim_run_opts *run, struct lh_alloc *alloc,
                        struct lh_error *err)
{
    *cluster = (struct lh_sim_cluster){.opts = *opts, .alloc = alloc};
    LH_TRY(check(opts, run, err));
    bool is_divided = opts->division == LH_SIM_DIVISION_SHARDS;
    LH_TRY(lh_sim_shards_make(run->model, is_divided ? opts->node_count : 1, alloc, &cluster->model,
                              err));
    LH_TRY(lh_sim_run_device_check(&run->machine, &cluster->model, err));
    struct lh_sim_mail_opts mail_opts = {
        .node_count = opts->node_count,
        .unit_count = cluster->model.unit_count,
        .card = opts->card,
        .is_mirror = opts->is_mirror,
    };
    LH_TRY(lh_sim_mail_init(&cluster->mail, &mail_opts, alloc, err));
    cluster->member_count = cluster->mail.made_count * opts->gpu_count;
    cluster->members = lh_alloc_zeroed(alloc, cluster->member_count, sizeof(*cluster->members));
    if (!cluster->members)
        return lh_error_set(err, -ENOMEM, "no memory for %" PRIu32 " simulated processes",
                            cluster->member_count);
    return members_init(cluster, run, err);
}

void lh_sim_cluster_deinit(struct lh_sim_cluster *cluster)
{
    for (uint32_t i = cluster->member_count; cluster->members && i-- > 0;)
        lh_sim_member_deinit(&cluster->members[i]);
    if (cluster->alloc)
        lh_free(cluster->alloc, cluster->members);
    lh_sim_mail_deinit(&cluster->mail);
    if (cluster->model.alloc)
        lh_sim_model_deinit(&cluster->model);
    *cluster = (struct lh_sim_cluster){0};
}

/* --- Driving ----------------------------------------------------------------------------- */

static const struct lh_error *failure(const struct lh_sim_cluster *cluster)
{
    if (lh_sim_world_has_failed(&cluster->mail.world))
        return &cluster->mail.world.failure;
    for (uint32_t i = 0; i < cluster->member_count; i++) {
        if (lh_sim_world_has_failed(&cluster->members[i].run.world))
            return &cluster->members[i].run.world.failure;
    }
    return NULL;
}

/* Poll until nothing moves at the current time, and no engine has news. */
static void settle(struct lh_sim_cluster *cluster)
{
    bool is_over = false;
    for (uint32_t round = 0; !is_over; round++) {
        bool moved = false;
        if (round == ROUND_MAX) {
            lh_sim_world_fail(&cluster->mail.world, "polled %d times, and something still moves",
                              ROUND_MAX);
            return;
        }
        for (uint32_t i = 0; i < cluster->member_count; i++)
            moved |= lh_sim_member_poll(&cluster->members[i]);
        is_over = !moved;
        for (uint32_t i = 0; !moved && i < cluster->member_count; i++) {
            is_over &= !cluster->members[i].is_awake;
            (void)lh_sim_member_sleep(&cluster->members[i]);
        }
    }
}

/* Run the checkers of the members that have changed. Returns whether all are done. */
static bool quiet_check(struct lh_sim_cluster *cluster)
{
    bool is_all_done = true;
    for (uint32_t i = 0; i < cluster->member_count; i++) {
        struct lh_sim_member *member = &cluster->members[i];
        is_all_done &= member->run.train.state == LH_SIM_TRAIN_STATE_DONE;
        if (member->has_changed)
            lh_sim_run_quiet_check(&member->run);
        member->has_changed = false;
    }
    lh_sim_mail_check(&cluster->mail);
    for (uint32_t i = 0; is_all_done && i < cluster->member_count; i++)
        lh_sim_check_totals(&cluster->members[i].run.check);
    return is_all_done;
}

/* Whether a member has failed, as a user would see it. */
static bool has_failed(struct lh_sim_cluster *cluster, struct lh_error *err)
{
    if (cluster->mail.err.code < 0) {
        *err = cluster->mail.err;
        return true;
    }
    for (uint32_t i = 0; i < cluster->member_count; i++) {
        struct lh_sim_member *member = &cluster->members[i];
        if (member->err.code < 0) {
            *err = member->err;
            return true;
        }
        if (lh_engine_error(member->run.engine, err) < 0)
            return true;
        if (member->run.train.state != LH_SIM_TRAIN_STATE_FAILED)
            continue;
        (void)lh_error_set(err, member->run.train.rc,
                           "process %" PRIu32 " cannot be simulated in step %" PRIu64
                           ": its saved tensors have no place (error %d)",
                           i, member->run.train.step + 1, -member->run.train.rc);
        return true;
    }
    return false;
}

static void hang_report(struct lh_sim_cluster *cluster)
{
    const struct lh_sim_member *member = &cluster->members[0];
    uint32_t number = 0;
    for (uint32_t i = cluster->member_count; i-- > 0;) {
        if (cluster->members[i].run.train.state == LH_SIM_TRAIN_STATE_DONE)
            continue;
        member = &cluster->members[i];
        number = i;
    }
    lh_sim_world_fail(&cluster->mail.world,
                      "hang: no event is pending: process %" PRIu32 " is in state %d, stage %d,"
                      " phase %d, block %" PRIu32 ", step %" PRIu64,
                      number, (int)member->run.train.state, (int)member->stage,
                      (int)member->run.train.phase, member->run.train.block,
                      member->run.train.step);
}

/* Let the earliest events of a member happen. Returns false if only naps are left. */
static bool advance(struct lh_sim_cluster *cluster)
{
    struct lh_sim_member *first = NULL;
    uint64_t mail_ns = lh_sim_world_next_ns(&cluster->mail.world);
    uint64_t at_ns = UINT64_MAX;
    bool is_any = mail_ns != UINT64_MAX;
    for (uint32_t i = 0; i < cluster->member_count; i++) {
        const struct lh_sim_world *world = &cluster->members[i].run.world;
        is_any |= world->event_count > cluster->members[i].has_nap;
        if (lh_sim_world_next_ns(world) < at_ns) {
            at_ns = lh_sim_world_next_ns(world);
            first = &cluster->members[i];
        }
    }
    if (mail_ns < at_ns) {
        at_ns = mail_ns;
        first = NULL;
    }
    cluster->quiet_ns = is_any ? at_ns : cluster->quiet_ns;
    if (at_ns == UINT64_MAX || at_ns > cluster->quiet_ns + HANG_NS)
        return false;
    cluster->mail.world.now_ns = at_ns;
    for (uint32_t i = 0; i < cluster->member_count; i++)
        cluster->members[i].run.world.now_ns = at_ns;
    if (first) {
        while (lh_sim_world_next_ns(&first->run.world) == at_ns)
            (void)lh_sim_world_advance(&first->run.world);
        first->is_awake = true;
    } else {
        lh_sim_mail_advance(&cluster->mail);
    }
    cluster->fired_count++;
    return true;
}

enum lh_sim_end lh_sim_cluster_drive(struct lh_sim_cluster *cluster, struct lh_error *err)
{
    uint64_t limit = cluster->opts.event_count_max;
    uint64_t end = limit > 0 ? cluster->fired_count + limit : UINT64_MAX;
    for (;;) {
        settle(cluster);
        bool is_all_done = !failure(cluster) && quiet_check(cluster);
        if (failure(cluster))
            break;
        if (is_all_done)
            return LH_SIM_END_DONE;
        if (has_failed(cluster, err))
            return LH_SIM_END_FAILED;
        if (cluster->fired_count >= end)
            return LH_SIM_END_STOPPED;
        if (!advance(cluster))
            hang_report(cluster);
    }
    *err = *failure(cluster);
    return LH_SIM_END_BROKEN;
}
