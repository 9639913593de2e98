/* The exchange of a step: from the gradients of its backwards to new values; see sim/member.h. */
#include <inttypes.h>

#include "base/assert.h"
#include "sim/member_private.h"
#include "sim/train_private.h"

/* What a node sends when it has added its gradients. */
#define AGREED_BYTES 64

/* A gradient on its way from an accelerator to main memory. */
struct lh_sim_departure {
    struct lh_sim_transfer transfer;
    struct lh_sim_departure *made_next; /* of all departures */
    struct lh_sim_departure *free_next;
    uint32_t param;
};

bool lh_sim_member_is_mate(const struct lh_sim_member *member)
{
    return member->opts.owner != member;
}

static const struct lh_sim_model *model_of(const struct lh_sim_member *member)
{
    return member->opts.run.model;
}

static struct lh_sim_node *node_of(const struct lh_sim_member *member)
{
    return &member->opts.mail->nodes[member->opts.node];
}

static uint64_t node_count(const struct lh_sim_member *member)
{
    return member->opts.mail->opts.node_count;
}

static uint64_t step_of(const struct lh_sim_member *member)
{
    return member->run.train.step + 1;
}

void lh_sim_member_stage_set(struct lh_sim_member *member, enum lh_sim_member_stage stage)
{
    member->stage = stage;
    member->is_told = false;
    member->run.train.is_asked = false;
}

static enum lh_sim_look stage_next(struct lh_sim_member *member, enum lh_sim_member_stage stage)
{
    lh_sim_member_stage_set(member, stage);
    return LH_SIM_LOOK_MOVED;
}

/* --- Gradients --------------------------------------------------------------------------- */

/* A gradient is in main memory: the node adds its own shard, or all, and sends the others theirs.
 */
static void gradient_out(struct lh_sim_member *member, uint32_t param)
{
    const struct lh_sim_model *model = model_of(member);
    uint32_t unit = model->params[param].unit;
    bool is_given = lh_sim_model_is_given(model, unit);
    uint64_t others = node_count(member) - 1;
    if (!is_given)
        node_of(member)->counts[LH_SIM_MAIL_GRADIENT]++;
    if (others == 0 || (member->opts.is_divided && !is_given))
        return;
    struct lh_sim_letter letter = {.kind = LH_SIM_MAIL_GRADIENT,
                                   .bytes = model->units[unit].bytes /
                                            (member->opts.is_divided ? others : 1)};
    lh_sim_mail_send(member->opts.mail, member->opts.node, &letter);
}

static void departed(struct lh_sim_transfer *transfer)
{
    struct lh_sim_member *member = transfer->owner;
    struct lh_sim_departure *departure = (struct lh_sim_departure *)transfer;
    departure->free_next = member->departure_free;
    member->departure_free = departure;
    gradient_out(member, departure->param);
}

static struct lh_sim_departure *departure_make(struct lh_sim_member *member)
{
    struct lh_sim_departure *departure = member->departure_free;
    if (departure) {
        member->departure_free = departure->free_next;
        return departure;
    }
    departure = lh_alloc_zeroed(member->run.alloc, 1, sizeof(*departure));
    if (!departure) {
        (void)lh_error_set(&member->err, -ENOMEM, "no memory for a gradient on its way");
        return NULL;
    }
    departure->made_next = member->departures;
    member->departures = departure;
    return departure;
}

void lh_sim_member_gradient_send(struct lh_sim_member *member, uint32_t param)
{
    if (member->opts.run.machine.accelerator.copy_count == 0) {
        gradient_out(member, param);
        return;
    }
    struct lh_sim_departure *departure = departure_make(member);
    if (!departure)
        return;
    departure->param = param;
    departure->transfer = (struct lh_sim_transfer){
        .direction = LH_SIM_DIRECTION_WRITE,
        .bytes = model_of(member)->units[model_of(member)->params[param].unit].bytes,
        .done = departed,
        .owner = member,
    };
    lh_sim_link_submit(&member->way_out, &departure->transfer);
}

void lh_sim_member_departures_free(struct lh_sim_member *member)
{
    while (member->departures) {
        struct lh_sim_departure *departure = member->departures;
        member->departures = departure->made_next;
        lh_free(member->run.alloc, departure);
    }
}

static enum lh_sim_look sums(struct lh_sim_member *member)
{
    uint64_t expected = step_of(member) * member->sum_count * node_count(member) *
                        member->opts.gpu_count * member->opts.micro_steps;
    if (node_of(member)->counts[LH_SIM_MAIL_GRADIENT] < expected)
        return LH_SIM_LOOK_WAIT;
    return stage_next(member, LH_SIM_MEMBER_STAGE_AGREED);
}

/* --- Agreement and close ----------------------------------------------------------------- */

static enum lh_sim_look agreed(struct lh_sim_member *member)
{
    if (lh_sim_member_is_mate(member))
        return member->opts.owner->agreed_step < step_of(member)
                   ? LH_SIM_LOOK_WAIT
                   : stage_next(member, LH_SIM_MEMBER_STAGE_GIVE_BACK);
    struct lh_sim_letter letter = {.kind = LH_SIM_MAIL_AGREED, .bytes = AGREED_BYTES};
    if (!member->is_told)
        lh_sim_mail_send(member->opts.mail, member->opts.node, &letter);
    member->is_told = true;
    if (node_of(member)->counts[LH_SIM_MAIL_AGREED] < step_of(member) * (node_count(member) - 1))
        return LH_SIM_LOOK_WAIT;
    member->agreed_step = step_of(member);
    return stage_next(member, LH_SIM_MEMBER_STAGE_PASS);
}

/* Hand to the engine every sum, and the place of all values that others will give. */
static enum lh_sim_look pass(struct lh_sim_member *member)
{
    const struct lh_sim_model *model = model_of(member);
    struct lh_sim_train *train = &member->run.train;
    for (uint32_t i = 0; i < model->param_count; i++) {
        if (!train->has_gradient[i])
            continue;
        int rc = lh_engine_gradient(train->opts.engine, i, train->opts.nowhere,
                                    lh_sim_model_gradient_dtype(model, i));
        if (rc < 0)
            return lh_sim_train_failed(train, rc);
    }
    return lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_CLOSE);
}

static enum lh_sim_look give_back(struct lh_sim_member *member)
{
    struct lh_sim_train *train = &member->run.train;
    if (!lh_sim_train_is_worth_asking(train, lh_sim_train_steps_are_over(train->opts.engine)))
        return LH_SIM_LOOK_WAIT;
    int rc = lh_engine_flush(train->opts.engine, false, 0);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    return rc == 0 ? LH_SIM_LOOK_WAIT : stage_next(member, LH_SIM_MEMBER_STAGE_PAUSE);
}

static enum lh_sim_look pause_here(struct lh_sim_member *member)
{
    struct lh_sim_train *train = &member->run.train;
    struct lh_engine *engine = train->opts.engine;
    int rc = train->is_asked ? 0 : lh_engine_pause(engine, 0);
    train->is_asked = true;
    if (rc == 0)
        rc = lh_engine_error(engine, NULL);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    if (!lh_step_is_quiet(engine))
        return LH_SIM_LOOK_WAIT;
    engine->shared.is_paused = true;
    lh_borrow_give_back(engine);
    lh_engine_resume(engine);
    engine->shared.is_paused = false;
    member->is_awake = true;
    return stage_next(member, LH_SIM_MEMBER_STAGE_OWNER);
}

static enum lh_sim_look owner(struct lh_sim_member *member)
{
    if (lh_team_step(&member->team) < step_of(member))
        return LH_SIM_LOOK_WAIT;
    return lh_sim_train_state_set(&member->run.train, LH_SIM_TRAIN_STATE_CLOSE);
}

/* --- New values -------------------------------------------------------------------------- */

/* Whether a unit of the model is one of a kind: with states here (given: elsewhere). */
static bool is_trained(const struct lh_sim_member *member, uint32_t unit, bool given)
{
    const struct lh_sim_model *model = model_of(member);
    return model->units[unit].elements > 0 && lh_sim_model_is_given(model, unit) == given;
}

/* Send the next unit of this node, once it is updated. Returns 1, 0 or -errno. */
static int send_next(struct lh_sim_member *member)
{
    struct lh_engine *engine = member->run.engine;
    while (member->value_unit < model_of(member)->unit_count &&
           !is_trained(member, member->value_unit, false))
        member->value_unit++;
    uint32_t unit = member->value_unit;
    if (unit == model_of(member)->unit_count)
        return 0;
    bool is_first = !member->is_asked;
    member->is_asked = true;
    bool is_granted = atomic_load(&engine->units[unit].shared.grants) > 0;
    if (!is_first && !is_granted && lh_engine_error(engine, NULL) == 0)
        return 0;
    int rc = is_first ? lh_engine_acquire(engine, unit) : lh_engine_acquire_wait(engine, unit, 0);
    if (rc <= 0)
        return rc;
    /* The other nodes receive it as the values of their given unit, which is the next one. */
    struct lh_sim_letter letter = {
        .kind = LH_SIM_MAIL_VALUES, .unit = unit + 1, .bytes = model_of(member)->units[unit].bytes};
    lh_sim_mail_send(member->opts.mail, member->opts.node, &letter);
    lh_engine_unpin(engine, unit);
    member->is_asked = false;
    member->value_unit++;
    return 1;
}

/* Give the engine the units whose values are complete, in the same order in every step. */
static bool units_give(struct lh_sim_member *member)
{
    const struct lh_sim_node *node = node_of(member);
    uint64_t expected = member->run.train.step * (node_count(member) - 1);
    uint32_t before = member->given;
    for (; member->given < model_of(member)->unit_count; member->given++) {
        if (!is_trained(member, member->given, true))
            continue;
        if (node->value_counts[member->given] < expected)
            break;
        lh_given_arrived(member->run.engine, member->given);
    }
    return member->given > before;
}

static enum lh_sim_look values(struct lh_sim_member *member)
{
    struct lh_sim_train *train = &member->run.train;
    uint32_t unit_count = model_of(member)->unit_count;
    bool moved = units_give(member);
    int rc = send_next(member);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    if (moved || rc > 0)
        return LH_SIM_LOOK_MOVED;
    if (member->given < unit_count || member->value_unit < unit_count)
        return LH_SIM_LOOK_WAIT;
    bool is_last = train->step >= train->opts.step_last;
    return lh_sim_train_state_set(train,
                                  is_last ? LH_SIM_TRAIN_STATE_FLUSH : LH_SIM_TRAIN_STATE_OVER);
}

/* --- All stages -------------------------------------------------------------------------- */

static enum lh_sim_look look(struct lh_sim_member *member)
{
    switch (member->stage) {
    case LH_SIM_MEMBER_STAGE_SUMS:
        return sums(member);
    case LH_SIM_MEMBER_STAGE_AGREED:
        return agreed(member);
    case LH_SIM_MEMBER_STAGE_GIVE_BACK:
        return give_back(member);
    case LH_SIM_MEMBER_STAGE_PAUSE:
        return pause_here(member);
    case LH_SIM_MEMBER_STAGE_OWNER:
        return owner(member);
    case LH_SIM_MEMBER_STAGE_PASS:
        return pass(member);
    case LH_SIM_MEMBER_STAGE_VALUES:
        return values(member);
    }
    return LH_SIM_LOOK_WAIT;
}

bool lh_sim_member_stage_poll(struct lh_sim_member *member)
{
    return look(member) == LH_SIM_LOOK_MOVED;
}

bool lh_sim_member_waits(const struct lh_sim_member *member)
{
    const struct lh_sim_train *train = &member->run.train;
    switch (train->state) {
    case LH_SIM_TRAIN_STATE_ACQUIRE:
    case LH_SIM_TRAIN_STATE_GRADIENT:
    case LH_SIM_TRAIN_STATE_CLOSE:
    case LH_SIM_TRAIN_STATE_OVER:
    case LH_SIM_TRAIN_STATE_FLUSH:
        return train->is_asked;
    case LH_SIM_TRAIN_STATE_PEERS:
        return member->stage == LH_SIM_MEMBER_STAGE_GIVE_BACK ||
               member->stage == LH_SIM_MEMBER_STAGE_PAUSE ||
               (member->stage == LH_SIM_MEMBER_STAGE_VALUES && member->is_asked);
    default:
        return false;
    }
}
