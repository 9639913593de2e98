/* The new values of a step whose states are divided among processes; see lives/peer.h. */
#include <string.h>

#include "base/assert.h"
#include "lives/peer.h"

static const struct lh_sim_model *model_of(const struct lh_sim_peer *peer)
{
    return peer->lives.opts.run.model;
}

static uint32_t unit_of(const struct lh_sim_peer *peer, uint32_t param)
{
    return model_of(peer)->params[param].unit;
}

static uint64_t value_bytes(const struct lh_sim_peer *peer, uint32_t param)
{
    return model_of(peer)->params[param].count *
           lh_dtype_bytes(model_of(peer)->units[unit_of(peer, param)].dtype);
}

static bool is_given(const struct lh_sim_peer *peer, uint32_t param)
{
    return lh_sim_model_is_given(model_of(peer), unit_of(peer, param));
}

void lh_sim_peer_values_begin(struct lh_sim_peer *peer)
{
    struct lh_sim_peer_values *values = &peer->values;
    uint32_t *missing = values->missing;
    memset(missing, 0, model_of(peer)->unit_count * sizeof(*missing));
    *values = (struct lh_sim_peer_values){.missing = missing};
    for (uint32_t i = 0; i < model_of(peer)->param_count; i++) {
        if (!peer->params[i].is_present || !is_given(peer, i))
            continue;
        missing[unit_of(peer, i)]++;
        values->left_count++;
    }
    lh_sim_peer_stage_set(peer, LH_SIM_PEER_STAGE_VALUES);
}

static void value_read(void *context)
{
    struct lh_sim_peer *peer = context;
    struct lh_sim_peer_values *values = &peer->values;
    const struct lh_sim_train *train = &peer->lives.run.train;
    uint32_t unit = unit_of(peer, values->param);
    const struct lh_engine_param *param = &model_of(peer)->params[values->param];
    const uint8_t *bytes = lh_engine_address(train->opts.engine, unit) +
                           param->first * lh_dtype_bytes(model_of(peer)->units[unit].dtype);
    struct lh_sim_net_letter letter = {
        .kind = LH_SIM_MESSAGE_VALUES,
        .step = train->step,
        .param = values->param,
        .payload = bytes,
        .bytes = value_bytes(peer, values->param),
    };
    for (uint32_t rank = 0; rank < peer->opts.crew->count; rank++) {
        if (rank != peer->opts.rank)
            lh_sim_peer_send(peer, rank, letter);
    }
    lh_engine_unpin(train->opts.engine, unit);
    values->is_reading = false;
    values->is_asked = false;
    values->param++;
}

/* Send the next parameter of this process, once it is updated. Returns 1, 0 or -errno. */
static int send_next(struct lh_sim_peer *peer)
{
    struct lh_sim_peer_values *values = &peer->values;
    const struct lh_sim_train *train = &peer->lives.run.train;
    struct lh_engine *engine = train->opts.engine;
    while (values->param < model_of(peer)->param_count &&
           (!peer->params[values->param].is_present || is_given(peer, values->param)))
        values->param++;
    if (values->param == model_of(peer)->param_count || values->is_reading)
        return 0;
    uint32_t unit = unit_of(peer, values->param);
    bool is_first = !values->is_asked;
    values->is_asked = true;
    bool is_granted = atomic_load(&engine->units[unit].shared.grants) > 0;
    if (!is_first && !is_granted && lh_engine_error(engine, NULL) == 0)
        return 0;
    int rc = is_first ? lh_engine_acquire(engine, unit) : lh_engine_acquire_wait(engine, unit, 0);
    if (rc <= 0)
        return rc;
    values->is_reading = true;
    if (train->opts.dev && train->opts.dev->ops->is_ordered)
        lh_sim_dev_compute(train->opts.dev, 0, NULL, value_read, peer);
    else
        value_read(peer);
    return 1;
}

/* Put a value that has arrived into its place. Returns false if none has arrived. */
static bool value_take(struct lh_sim_peer *peer, uint32_t param, bool *is_wrong_out)
{
    struct lh_sim_peer_values *values = &peer->values;
    uint32_t unit = unit_of(peer, param);
    struct lh_sim_message *message =
        lh_sim_peer_take(peer, LH_SIM_MESSAGE_VALUES, peer->lives.run.train.step,
                         peer->opts.crew->parts[unit], param);
    if (!message)
        return false;
    *is_wrong_out = !lh_sim_net_is_intact(message);
    if (*is_wrong_out) {
        (void)lh_sim_peer_refuse(peer, message);
    } else {
        LH_ASSERT(message->bytes == value_bytes(peer, param) && values->missing[unit] > 0);
        memcpy(peer->params[param].place, message->payload, message->bytes);
        peer->params[param].is_held = true;
        values->missing[unit]--;
        values->left_count--;
    }
    lh_sim_net_free(peer->opts.net, message);
    return true;
}

/* Whether the step gives the unit new values. */
static bool is_expected(const struct lh_sim_peer *peer, uint32_t index)
{
    const struct lh_engine_unit *unit = &model_of(peer)->units[index];
    bool is_any = false;
    for (uint32_t i = 0; i < unit->param_count; i++)
        is_any |= peer->params[unit->param_first + i].is_present;
    return is_any && lh_sim_model_is_given(model_of(peer), index);
}

/* Give the engine the units that are complete, in the same order in every step. */
static bool units_give(struct lh_sim_peer *peer)
{
    struct lh_sim_peer_values *values = &peer->values;
    bool moved = false;
    while (values->given < model_of(peer)->unit_count && values->missing[values->given] == 0) {
        if (is_expected(peer, values->given)) {
            lh_given_arrived(peer->lives.run.engine, values->given);
            moved = true;
        }
        values->given++;
    }
    return moved;
}

enum lh_sim_look lh_sim_peer_values_poll(struct lh_sim_peer *peer)
{
    struct lh_sim_peer_values *values = &peer->values;
    struct lh_sim_train *train = &peer->lives.run.train;
    bool moved = false;
    bool is_wrong = false;
    for (uint32_t i = 0; peer->has_news && i < model_of(peer)->param_count; i++) {
        if (is_given(peer, i) && peer->params[i].is_present)
            moved |= value_take(peer, i, &is_wrong);
        if (is_wrong)
            return LH_SIM_LOOK_MOVED;
    }
    peer->has_news = false;
    moved |= units_give(peer);
    int rc = send_next(peer);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    if (moved || rc > 0)
        return LH_SIM_LOOK_MOVED;
    if (values->left_count > 0 || values->param < model_of(peer)->param_count)
        return LH_SIM_LOOK_WAIT;
    bool is_last = train->step >= train->opts.step_last;
    return lh_sim_train_state_set(train,
                                  is_last ? LH_SIM_TRAIN_STATE_FLUSH : LH_SIM_TRAIN_STATE_OVER);
}
