#include "sim/member.h"

#include <inttypes.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/assert.h"
#include "sim/member_private.h"
#include "sim/train_private.h"

#define NAP_NS (UINT64_C(1000000) * LH_QUIET_NAP_MS + 1)

static struct lh_sim_member *of(void *context)
{
    return context;
}

/* --- Hooks ------------------------------------------------------------------------------- */

static int team_open(struct lh_sim_member *member)
{
    if (lh_sim_member_is_mate(member))
        return lh_team_join(dup(member->opts.owner->team.fd), member->opts.number, &member->team,
                            &member->err);
    struct lh_team_opts opts = {
        .unit_count = member->opts.run.model->unit_count,
        .mate_count = member->opts.gpu_count - 1,
        .region_bytes = member->run.budget.region_bytes,
        .is_untouched = true,
    };
    return lh_team_create(&opts, &member->team, &member->err);
}

static void engine_described(void *context, struct lh_engine_opts *opts)
{
    struct lh_sim_member *member = of(context);
    if (member->opts.gpu_count == 1 || team_open(member) < 0)
        return;
    member->has_team = true;
    opts->team = &member->team;
}

static void forward_begun(void *context, bool *has_gradient)
{
    (void)has_gradient;
    of(context)->micro_step = 0;
}

static bool gradient_kept(void *context, uint32_t param)
{
    lh_sim_member_gradient_send(of(context), param);
    return true;
}

static bool close_replaced(void *context)
{
    struct lh_sim_member *member = of(context);
    struct lh_sim_train *train = &member->run.train;
    if (++member->micro_step < member->opts.micro_steps) {
        (void)lh_sim_train_forward_repeat(train);
        return true;
    }
    lh_sim_member_stage_set(member, lh_sim_member_is_mate(member) ? LH_SIM_MEMBER_STAGE_AGREED
                                                                  : LH_SIM_MEMBER_STAGE_SUMS);
    (void)lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_PEERS);
    return true;
}

static bool closed(void *context)
{
    struct lh_sim_member *member = of(context);
    if (lh_sim_member_is_mate(member) || !member->opts.is_divided)
        return false;
    member->value_unit = 0;
    member->is_asked = false;
    member->given = 0;
    lh_sim_member_stage_set(member, LH_SIM_MEMBER_STAGE_VALUES);
    (void)lh_sim_train_state_set(&member->run.train, LH_SIM_TRAIN_STATE_PEERS);
    return false;
}

static bool state_polled(void *context)
{
    struct lh_sim_member *member = of(context);
    return member->run.train.state == LH_SIM_TRAIN_STATE_PEERS && lh_sim_member_stage_poll(member);
}

static const struct lh_sim_hooks member_hooks = {
    .engine_described = engine_described,
    .forward_begun = forward_begun,
    .gradient_kept = gradient_kept,
    .close_replaced = close_replaced,
    .closed = closed,
    .state_polled = state_polled,
};

/* --- A life ------------------------------------------------------------------------------ */

static void way_out_init(struct lh_sim_member *member)
{
    const struct lh_sim_link_opts *link = &member->opts.run.machine.accelerator.link;
    struct lh_sim_link_opts opts = *link;
    opts.duplex = false;
    opts.queue_depth = 1;
    if (member->opts.run.machine.accelerator.copy_count > 0)
        lh_sim_link_init(&member->way_out, &member->run.world, &opts, NULL);
}

static uint32_t sum_count(const struct lh_sim_model *model)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < model->param_count; i++) {
        uint32_t unit = model->params[i].unit;
        count += model->units[unit].elements > 0 && !lh_sim_model_is_given(model, unit);
    }
    return count;
}

int lh_sim_member_init(struct lh_sim_member *member, const struct lh_sim_member_opts *opts,
                       struct lh_alloc *alloc, struct lh_error *err)
{
    *member = (struct lh_sim_member){.opts = *opts, .bell = -1, .is_awake = true};
    struct lh_sim_run_opts *run = &member->opts.run;
    run->hooks = &member_hooks;
    run->hooks_context = member;
    run->machine.accelerator.gradients_in_memory = true; /* the sums are */
    LH_ASSERT(!run->machine.accelerator.is_ordered && run->model->has_sums);
    if (lh_sim_member_is_mate(member)) {
        run->commit_every = LH_ENGINE_COMMIT_NEVER;
        run->never_commits = true;
    }
    member->bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (member->bell < 0)
        return lh_error_set(err, -errno, "no descriptor for a simulated process");
    int rc = lh_sim_run_init(&member->run, run, alloc, err);
    if (member->err.code < 0) { /* of the team, without which the engine may have been made */
        *err = member->err;
        return member->err.code;
    }
    if (rc < 0)
        return rc;
    member->sum_count = sum_count(run->model);
    way_out_init(member);
    return 0;
}

void lh_sim_member_deinit(struct lh_sim_member *member)
{
    if (!member->opts.mail)
        return;
    lh_sim_run_deinit(&member->run);
    lh_sim_member_departures_free(member);
    if (member->has_team)
        lh_team_leave(&member->team);
    if (member->bell >= 0)
        close(member->bell);
    *member = (struct lh_sim_member){.bell = -1};
}

void lh_sim_member_meet(struct lh_sim_member *member, const struct lh_sim_member *other)
{
    LH_ASSERT(member->has_team && other->has_team && member->opts.node == other->opts.node);
    member->team.bells[other->team.mate] = other->bell;
}

/* --- Driving ----------------------------------------------------------------------------- */

static bool is_rung(struct lh_sim_member *member)
{
    uint64_t count = 0;
    return member->has_team && read(member->bell, &count, sizeof(count)) > 0;
}

bool lh_sim_member_poll(struct lh_sim_member *member)
{
    struct lh_engine *engine = member->run.engine;
    uint64_t post_count = atomic_load(&engine->post_count);
    bool moved = false;
    member->is_awake |= is_rung(member) || post_count != member->post_count;
    if (member->is_awake) {
        member->post_count = post_count;
        moved = lh_engine_poll(engine) && lh_engine_error(engine, NULL) == 0;
        if (moved)
            member->quiet = (struct lh_quiet){0};
    }
    moved |= lh_sim_train_poll(&member->run.train);
    moved |= atomic_load(&engine->post_count) != member->post_count;
    member->has_changed |= moved;
    return moved;
}

static void nap_ended(void *context)
{
    of(context)->has_nap = false;
}

bool lh_sim_member_sleep(struct lh_sim_member *member)
{
    struct lh_sim_world *world = &member->run.world;
    struct lh_engine *engine = member->run.engine;
    if (!member->is_awake)
        return false;
    bool is_waiting = lh_sim_member_waits(member);
    atomic_fetch_add(&engine->waiting, is_waiting);
    int ms = lh_engine_quiet(engine, &member->quiet);
    atomic_fetch_sub(&engine->waiting, is_waiting);
    member->is_awake = ms == 0;
    member->has_changed = true;
    if (ms > 0 && !member->has_nap) {
        member->has_nap = true;
        lh_sim_world_at(world, world->now_ns + NAP_NS, nap_ended, member);
    }
    return ms == 0;
}
