/* The exchange of a step between its backward and its close; see lives/peer.h. */
#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "compute/sum.h"
#include "lives/peer.h"

#define NO_PARAM UINT32_MAX
#define NOT_THERE 0xff /* as a float or bf16: NaN */

static uint64_t step_of(const struct lh_sim_peer *peer)
{
    return peer->lives.run.train.step + 1;
}

static const struct lh_sim_model *model_of(const struct lh_sim_peer *peer)
{
    return peer->lives.opts.run.model;
}

static uint64_t bits_bytes(const struct lh_sim_peer *peer)
{
    return model_of(peer)->param_count / 8 + 1;
}

/* Whether a process adds the gradients of a parameter. */
static bool adds(const struct lh_sim_peer *peer, uint32_t rank, uint32_t param)
{
    const struct lh_sim_crew *crew = peer->opts.crew;
    uint32_t unit = model_of(peer)->params[param].unit;
    return crew->owners[rank] == rank && (!crew->is_divided || crew->parts[unit] == rank);
}

void lh_sim_peer_send(struct lh_sim_peer *peer, uint32_t to, struct lh_sim_net_letter letter)
{
    const struct lh_sim_crew *crew = peer->opts.crew;
    letter.from = peer->opts.rank;
    letter.to = to;
    letter.from_machine = crew->machines[letter.from];
    letter.to_machine = crew->machines[to];
    lh_sim_net_send(peer->opts.net, &letter);
}

void lh_sim_peer_gradient_send(struct lh_sim_peer *peer, uint32_t param)
{
    const struct lh_engine_param *desc = &model_of(peer)->params[param];
    struct lh_sim_net_letter letter = {
        .kind = LH_SIM_MESSAGE_GRADIENT,
        .step = step_of(peer),
        .param = param,
        .payload = peer->params[param].own,
        .bytes = desc->count * lh_dtype_bytes(model_of(peer)->units[desc->unit].dtype),
    };
    peer->params[param].is_sent = true;
    for (uint32_t rank = 0; rank < peer->opts.crew->count; rank++) {
        if (rank != peer->opts.rank && adds(peer, rank, param))
            lh_sim_peer_send(peer, rank, letter);
    }
}

static struct lh_sim_message **find(struct lh_sim_peer *peer, enum lh_sim_message_kind kind,
                                    uint64_t step, uint32_t from, uint32_t param)
{
    struct lh_sim_message **at = &peer->inbox;
    while (*at && ((*at)->kind != kind || (*at)->step != step || (*at)->from != from ||
                   (*at)->param != param))
        at = &(*at)->next;
    return at;
}

struct lh_sim_message *lh_sim_peer_take(struct lh_sim_peer *peer, enum lh_sim_message_kind kind,
                                        uint64_t step, uint32_t from, uint32_t param)
{
    struct lh_sim_message **at = find(peer, kind, step, from, param);
    struct lh_sim_message *message = *at;
    if (message)
        *at = message->next;
    return message;
}

enum lh_sim_look lh_sim_peer_refuse(struct lh_sim_peer *peer, const struct lh_sim_message *message)
{
    (void)lh_error_set(&peer->err, -EBADMSG,
                       "message %d from process %" PRIu32 " has a wrong checksum in step %" PRIu64,
                       (int)message->kind, message->from, message->step);
    return lh_sim_train_failed(&peer->lives.run.train, -EBADMSG);
}

void lh_sim_peer_stage_set(struct lh_sim_peer *peer, enum lh_sim_peer_stage stage)
{
    peer->stage = stage;
    peer->is_said = false;
    peer->has_news = true;
    peer->lives.run.train.is_asked = false;
    lh_sim_world_trace(&peer->lives.run.world, LH_SIM_TRACE_TRAIN, (uint64_t)stage << 32,
                       step_of(peer), peer->opts.rank);
}

static enum lh_sim_look stage_next(struct lh_sim_peer *peer, enum lh_sim_peer_stage stage)
{
    lh_sim_peer_stage_set(peer, stage);
    return LH_SIM_LOOK_MOVED;
}

/* --- Gradients --------------------------------------------------------------------------- */

static bool has_bit(const uint8_t *bits, uint32_t index)
{
    return (bits[index / 8] >> index % 8 & 1) != 0;
}

/* Say which gradients of this process there are: to the processes that add them. */
static void ended_send(struct lh_sim_peer *peer)
{
    memset(peer->bits, 0, bits_bytes(peer));
    for (uint32_t i = 0; i < model_of(peer)->param_count; i++)
        peer->bits[i / 8] |= (uint8_t)(peer->params[i].is_sent << i % 8);
    struct lh_sim_net_letter letter = {
        .kind = LH_SIM_MESSAGE_ENDED,
        .step = step_of(peer),
        .param = NO_PARAM,
        .payload = peer->bits,
        .bytes = bits_bytes(peer),
    };
    for (uint32_t rank = 0; rank < peer->opts.crew->count; rank++) {
        if (rank != peer->opts.rank && peer->opts.crew->owners[rank] == rank)
            lh_sim_peer_send(peer, rank, letter);
    }
}

/* Whether all gradients of another process that this one adds are there. */
static bool are_there(struct lh_sim_peer *peer, uint32_t from)
{
    const struct lh_sim_message *ended =
        *find(peer, LH_SIM_MESSAGE_ENDED, step_of(peer), from, NO_PARAM);
    if (ended && !lh_sim_net_is_intact(ended))
        return true; /* this process is about to refuse it */
    for (uint32_t i = 0; ended && i < model_of(peer)->param_count; i++) {
        if (has_bit(ended->payload, i) && adds(peer, peer->opts.rank, i) &&
            !*find(peer, LH_SIM_MESSAGE_GRADIENT, step_of(peer), from, i))
            return false;
    }
    return ended != NULL;
}

static void sum_add(struct lh_sim_peer *peer, uint32_t index, const void *gradient)
{
    struct lh_sim_peer_param *param = &peer->params[index];
    const struct lh_engine_param *desc = &model_of(peer)->params[index];
    enum lh_dtype dtype = model_of(peer)->units[desc->unit].dtype;
    if (param->has_sum)
        lh_sum_add(param->place, gradient, dtype, desc->count);
    else
        lh_sum_start(param->place, gradient, dtype, desc->count);
    param->has_sum = true;
}

/* Add the gradients of a parameter, by rank. Returns the first message that is wrong, or NULL. */
static struct lh_sim_message *sum_make(struct lh_sim_peer *peer, uint32_t param)
{
    for (uint32_t rank = 0; rank < peer->opts.crew->count; rank++) {
        if (rank == peer->opts.rank && peer->params[param].is_sent)
            sum_add(peer, param, peer->params[param].own);
        if (rank == peer->opts.rank)
            continue;
        struct lh_sim_message *message =
            lh_sim_peer_take(peer, LH_SIM_MESSAGE_GRADIENT, step_of(peer), rank, param);
        if (message && !lh_sim_net_is_intact(message))
            return message;
        if (message)
            sum_add(peer, param, message->payload);
        lh_sim_net_free(peer->opts.net, message);
    }
    return NULL;
}

static enum lh_sim_look sums(struct lh_sim_peer *peer)
{
    const struct lh_sim_script *script = &peer->lives.script;
    struct lh_sim_message *wrong = NULL;
    if (script->use_ended_count < script->use_count)
        return LH_SIM_LOOK_WAIT; /* an accelerator still computes gradients */
    if (!peer->is_said)
        ended_send(peer);
    peer->is_said = true;
    if (lh_sim_peer_is_mate(peer))
        return stage_next(peer, LH_SIM_PEER_STAGE_AGREED);
    if (!peer->has_news)
        return LH_SIM_LOOK_WAIT;
    peer->has_news = false;
    for (uint32_t rank = 0; rank < peer->opts.crew->count; rank++) {
        if (rank != peer->opts.rank && !are_there(peer, rank))
            return LH_SIM_LOOK_WAIT;
    }
    for (uint32_t rank = 0; !wrong && rank < peer->opts.crew->count; rank++) {
        struct lh_sim_message *ended =
            lh_sim_peer_take(peer, LH_SIM_MESSAGE_ENDED, step_of(peer), rank, NO_PARAM);
        if (ended && !lh_sim_net_is_intact(ended))
            wrong = ended;
        else
            lh_sim_net_free(peer->opts.net, ended);
    }
    for (uint32_t i = 0; !wrong && i < model_of(peer)->param_count; i++) {
        if (adds(peer, peer->opts.rank, i))
            wrong = sum_make(peer, i);
    }
    if (!wrong)
        return stage_next(peer, LH_SIM_PEER_STAGE_AGREED);
    enum lh_sim_look look = lh_sim_peer_refuse(peer, wrong);
    lh_sim_net_free(peer->opts.net, wrong);
    return look;
}

/* --- Agreement --------------------------------------------------------------------------- */

/* Send the same to all others, once. */
static void tell(struct lh_sim_peer *peer, enum lh_sim_message_kind kind, const void *payload,
                 uint64_t bytes)
{
    struct lh_sim_net_letter letter = {
        .kind = kind, .step = step_of(peer), .param = NO_PARAM, .payload = payload, .bytes = bytes};
    for (uint32_t rank = 0; !peer->is_said && rank < peer->opts.crew->count; rank++) {
        if (rank != peer->opts.rank)
            lh_sim_peer_send(peer, rank, letter);
    }
    peer->is_said = true;
}

/* Whether all others have told this process the same kind of thing. */
static bool is_told(struct lh_sim_peer *peer, enum lh_sim_message_kind kind)
{
    bool is_all = peer->has_news;
    peer->has_news = false;
    for (uint32_t rank = 0; is_all && rank < peer->opts.crew->count; rank++)
        is_all = rank == peer->opts.rank || *find(peer, kind, step_of(peer), rank, NO_PARAM);
    return is_all;
}

static enum lh_sim_look agreed(struct lh_sim_peer *peer)
{
    uint64_t said = lh_sim_mix(step_of(peer), peer->lives.opts.reference->seed);
    tell(peer, LH_SIM_MESSAGE_AGREED, &said, sizeof(said));
    if (!is_told(peer, LH_SIM_MESSAGE_AGREED))
        return LH_SIM_LOOK_WAIT;
    for (uint32_t rank = 0; rank < peer->opts.crew->count; rank++)
        lh_sim_net_free(peer->opts.net, lh_sim_peer_take(peer, LH_SIM_MESSAGE_AGREED, step_of(peer),
                                                         rank, NO_PARAM));
    if (peer->opts.crew->is_divided)
        return stage_next(peer, LH_SIM_PEER_STAGE_SUMMED);
    return stage_next(peer, lh_sim_peer_is_mate(peer) ? LH_SIM_PEER_STAGE_GIVE_BACK
                                                      : LH_SIM_PEER_STAGE_PASS);
}

/* Learn which parameters have gradients in the step: those that add them say so. */
static enum lh_sim_look summed(struct lh_sim_peer *peer)
{
    uint32_t count = model_of(peer)->param_count;
    memset(peer->bits, 0, bits_bytes(peer));
    for (uint32_t i = 0; i < count; i++)
        peer->bits[i / 8] |= (uint8_t)(peer->params[i].has_sum << i % 8);
    tell(peer, LH_SIM_MESSAGE_SUMMED, peer->bits, bits_bytes(peer));
    if (!is_told(peer, LH_SIM_MESSAGE_SUMMED))
        return LH_SIM_LOOK_WAIT;
    for (uint32_t i = 0; i < count; i++)
        peer->params[i].is_present = peer->params[i].has_sum;
    for (uint32_t rank = 0; rank < peer->opts.crew->count; rank++) {
        struct lh_sim_message *message =
            lh_sim_peer_take(peer, LH_SIM_MESSAGE_SUMMED, step_of(peer), rank, NO_PARAM);
        for (uint32_t i = 0; message && i < count; i++)
            peer->params[i].is_present |= has_bit(message->payload, i);
        lh_sim_net_free(peer->opts.net, message);
    }
    return stage_next(peer, LH_SIM_PEER_STAGE_PASS);
}

/* --- The close --------------------------------------------------------------------------- */

/* Hand to the engine every sum, and the place of all values that others will give. */
static enum lh_sim_look pass(struct lh_sim_peer *peer)
{
    const struct lh_sim_model *model = model_of(peer);
    struct lh_sim_train *train = &peer->lives.run.train;
    for (uint32_t i = 0; i < model->param_count; i++) {
        struct lh_sim_peer_param *param = &peer->params[i];
        bool is_given = lh_sim_model_is_given(model, model->params[i].unit);
        if (!(is_given ? param->is_present : param->has_sum))
            continue;
        enum lh_dtype dtype = lh_sim_model_gradient_dtype(model, i);
        int rc = lh_engine_gradient(train->opts.engine, i, param->place, dtype);
        if (rc < 0)
            return lh_sim_train_failed(train, rc);
        param->is_held = !is_given;
        if (is_given) /* the values come later */
            memset(param->place, NOT_THERE, model->params[i].count * lh_dtype_bytes(dtype));
    }
    return lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_CLOSE);
}

static enum lh_sim_look give_back(struct lh_sim_peer *peer)
{
    struct lh_sim_train *train = &peer->lives.run.train;
    if (!lh_sim_train_is_worth_asking(train, lh_sim_train_steps_are_over(train->opts.engine)))
        return LH_SIM_LOOK_WAIT;
    int rc = lh_engine_flush(train->opts.engine, false, 0);
    if (rc < 0)
        return lh_sim_train_failed(train, rc);
    return rc == 0 ? LH_SIM_LOOK_WAIT : stage_next(peer, LH_SIM_PEER_STAGE_PAUSE);
}

static enum lh_sim_look pause_here(struct lh_sim_peer *peer)
{
    struct lh_sim_train *train = &peer->lives.run.train;
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
    peer->is_awake = true;
    return stage_next(peer, LH_SIM_PEER_STAGE_OWNER);
}

/* Wait until the owner has closed the step. */
static enum lh_sim_look owner(struct lh_sim_peer *peer)
{
    if (lh_team_step(&peer->team) < step_of(peer))
        return LH_SIM_LOOK_WAIT;
    return lh_sim_train_state_set(&peer->lives.run.train, LH_SIM_TRAIN_STATE_CLOSE);
}

enum lh_sim_look lh_sim_peer_stage_poll(struct lh_sim_peer *peer)
{
    switch (peer->stage) {
    case LH_SIM_PEER_STAGE_SUMS:
        return sums(peer);
    case LH_SIM_PEER_STAGE_AGREED:
        return agreed(peer);
    case LH_SIM_PEER_STAGE_SUMMED:
        return summed(peer);
    case LH_SIM_PEER_STAGE_GIVE_BACK:
        return give_back(peer);
    case LH_SIM_PEER_STAGE_PAUSE:
        return pause_here(peer);
    case LH_SIM_PEER_STAGE_OWNER:
        return owner(peer);
    case LH_SIM_PEER_STAGE_PASS:
        return pass(peer);
    case LH_SIM_PEER_STAGE_VALUES:
        return lh_sim_peer_values_poll(peer);
    }
    return LH_SIM_LOOK_WAIT;
}
