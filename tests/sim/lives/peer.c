#include "lives/peer.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/assert.h"
#include "store/store_impl.h"

#define GARBAGE 0xa5
#define SPOILED 0xff /* as a float or bf16: NaN */
#define NAP_NS (UINT64_C(1000000) * LH_QUIET_NAP_MS + 1)

static struct lh_sim_peer *of(void *context)
{
    return context;
}

bool lh_sim_peer_is_mate(const struct lh_sim_peer *peer)
{
    return peer->opts.owner != peer;
}

/* --- Hooks ------------------------------------------------------------------------------- */

static void team_open(struct lh_sim_peer *peer)
{
    const struct lh_sim_crew *crew = peer->opts.crew;
    struct lh_error err = {0};
    int rc = 0;
    if (lh_sim_peer_is_mate(peer)) {
        int fd = dup(peer->opts.owner->team.fd);
        rc = lh_team_join(fd, crew->numbers[peer->opts.rank], &peer->team, &err);
    } else {
        struct lh_team_opts opts = {
            .unit_count = peer->lives.opts.run.model->unit_count,
            .mate_count = crew->mate_counts[peer->opts.rank],
            .region_bytes = peer->lives.run.budget.region_bytes,
        };
        rc = lh_team_create(&opts, &peer->team, &err);
        if (rc == 0)
            memset(peer->team.region, GARBAGE, peer->team.region_bytes);
    }
    LH_ASSERT(rc == 0);
    peer->has_team = true;
}

static void engine_described(void *context, struct lh_engine_opts *opts)
{
    struct lh_sim_peer *peer = of(context);
    lh_sim_lives_hooks.engine_described(context, opts);
    if (!lh_sim_peer_is_mate(peer) && peer->opts.crew->mate_counts[peer->opts.rank] == 0)
        return;
    team_open(peer);
    opts->team = &peer->team;
}

/* Leave out the blocks that this process does not use in the step, and exchange some others. */
static void order_draw(struct lh_sim_peer *peer)
{
    const struct lh_sim_reference *reference = peer->lives.opts.reference;
    struct lh_sim_train *train = &peer->lives.run.train;
    uint32_t count = 0;
    for (uint32_t i = 0; i < train->order_count; i++) {
        if (lh_sim_reference_uses(reference, train->step + 1, peer->opts.rank, i))
            train->order[count++] = i;
    }
    train->order_count = count;
    if (!lh_sim_random_chance(&peer->random, peer->opts.crew->order_ppm))
        return;
    for (uint32_t i = count; i > 1; i--) {
        uint32_t j = (uint32_t)lh_sim_random_below(&peer->random, i);
        uint32_t moved = train->order[i - 1];
        train->order[i - 1] = train->order[j];
        train->order[j] = moved;
    }
}

static void forward_begun(void *context, bool *has_gradient)
{
    struct lh_sim_peer *peer = of(context);
    const struct lh_sim_reference *reference = peer->lives.opts.reference;
    uint64_t step = peer->lives.run.train.step + 1;
    lh_sim_script_forward_begun(context, has_gradient);
    for (uint32_t i = 0; i < reference->model->param_count; i++) {
        has_gradient[i] = lh_sim_reference_contributes(reference, step, peer->opts.rank, i);
        peer->params[i].is_sent = false;
        peer->params[i].has_sum = false;
        peer->params[i].is_present = false;
    }
    order_draw(peer);
}

static const void *gradient_made(void *context, uint32_t param)
{
    struct lh_sim_peer *peer = of(context);
    (void)lh_sim_script_gradient_made(context, param);
    peer->lives.script.is_held[param] = false; /* the engine does not get it */
    return peer->params[param].own;
}

static bool gradient_kept(void *context, uint32_t param)
{
    (void)context;
    (void)param;
    return true;
}

static void use_ended(void *context)
{
    struct lh_sim_peer *peer = of(context);
    struct lh_sim_script *script = &peer->lives.script;
    LH_ASSERT(script->use_ended_count < script->use_count);
    const struct lh_sim_use *use = &script->uses[script->use_ended_count % script->use_max];
    if (use->param == UINT32_MAX) {
        lh_sim_script_use_ended(context);
        return;
    }
    script->use_ended_count++;
    lh_sim_reference_contribution(script->opts.reference, use->step + 1, peer->opts.rank,
                                  use->param, peer->params[use->param].own);
    lh_sim_peer_gradient_send(peer, use->param);
}

static bool close_replaced(void *context)
{
    struct lh_sim_peer *peer = of(context);
    lh_sim_peer_stage_set(peer, LH_SIM_PEER_STAGE_SUMS);
    (void)lh_sim_train_state_set(&peer->lives.run.train, LH_SIM_TRAIN_STATE_PEERS);
    return true;
}

static void closing(void *context)
{
    struct lh_sim_peer *peer = of(context);
    struct lh_sim_train *train = &peer->lives.run.train;
    const struct lh_sim_reference *reference = peer->lives.opts.reference;
    for (uint32_t i = 0; i < reference->model->param_count; i++)
        train->has_gradient[i] = lh_sim_reference_has_gradient(reference, train->step + 1, i);
    lh_sim_script_closing(context);
}

static bool closed(void *context)
{
    struct lh_sim_peer *peer = of(context);
    bool flushes = lh_sim_script_closed(context);
    if (!peer->opts.crew->is_divided)
        return flushes;
    lh_sim_peer_values_begin(peer);
    (void)lh_sim_train_state_set(&peer->lives.run.train, LH_SIM_TRAIN_STATE_PEERS);
    return false;
}

static bool state_polled(void *context)
{
    struct lh_sim_peer *peer = of(context);
    if (peer->lives.run.train.state != LH_SIM_TRAIN_STATE_PEERS)
        return lh_sim_script_state_polled(context);
    return lh_sim_peer_stage_poll(peer) == LH_SIM_LOOK_MOVED;
}

static uint64_t place_bytes(const struct lh_sim_peer *peer, uint32_t param)
{
    const struct lh_sim_model *model = peer->lives.opts.run.model;
    return model->params[param].count * lh_dtype_bytes(lh_sim_model_gradient_dtype(model, param));
}

/* Overwrite what the engine has consumed, so that a later read is detected. */
static bool train_polled(void *context)
{
    struct lh_sim_peer *peer = of(context);
    for (uint32_t i = 0; i < peer->lives.opts.run.model->param_count; i++) {
        struct lh_sim_peer_param *param = &peer->params[i];
        if (!param->is_held || !lh_engine_gradient_is_consumed(peer->lives.run.engine, i))
            continue;
        memset(param->place, SPOILED, place_bytes(peer, i));
        param->is_held = false;
    }
    return lh_sim_script_train_polled(context);
}

/* --- A life ------------------------------------------------------------------------------ */

static const struct lh_sim_hooks *peer_hooks(void)
{
    static struct lh_sim_hooks hooks;
    hooks = lh_sim_lives_hooks;
    hooks.engine_described = engine_described;
    hooks.forward_begun = forward_begun;
    hooks.gradient_made = gradient_made;
    hooks.gradient_kept = gradient_kept;
    hooks.use_ended = use_ended;
    hooks.close_replaced = close_replaced;
    hooks.closing = closing;
    hooks.closed = closed;
    hooks.state_polled = state_polled;
    hooks.train_polled = train_polled;
    return &hooks;
}

static int params_create(struct lh_sim_peer *peer, struct lh_alloc *alloc, struct lh_error *err)
{
    const struct lh_sim_model *model = peer->lives.opts.run.model;
    peer->params = lh_alloc_zeroed(alloc, model->param_count, sizeof(*peer->params));
    peer->bits = lh_alloc_zeroed(alloc, 1, model->param_count / 8 + 1);
    peer->values.missing = lh_alloc_zeroed(alloc, model->unit_count, sizeof(uint32_t));
    bool failed = !peer->params || !peer->bits || !peer->values.missing;
    for (uint32_t i = 0; !failed && i < model->param_count; i++) {
        uint64_t count = model->params[i].count;
        peer->params[i].own = lh_alloc_zeroed(alloc, count, sizeof(float));
        peer->params[i].place = lh_alloc_zeroed(alloc, count, sizeof(float));
        failed = !peer->params[i].own || !peer->params[i].place;
    }
    return failed ? lh_error_set(err, -ENOMEM, "no memory for the gradients of a process") : 0;
}

int lh_sim_peer_init(struct lh_sim_peer *peer, const struct lh_sim_peer_opts *opts,
                     struct lh_alloc *alloc, struct lh_error *err)
{
    struct lh_sim_lives_opts lives_opts = opts->lives;
    *peer = (struct lh_sim_peer){.opts = *opts, .bell = -1};
    lives_opts.hooks = peer_hooks();
    LH_TRY(lh_sim_lives_init(&peer->lives, &lives_opts, alloc, err));
    lh_sim_random_init(&peer->random, lives_opts.seed, LH_SIM_STREAM_ORDERS);
    peer->bell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (peer->bell < 0)
        return lh_error_set(err, -errno, "no descriptor for a process");
    return params_create(peer, alloc, err);
}

static void inbox_clear(struct lh_sim_peer *peer)
{
    while (peer->inbox) {
        struct lh_sim_message *message = peer->inbox;
        peer->inbox = message->next;
        lh_sim_net_free(peer->opts.net, message);
    }
}

void lh_sim_peer_deinit(struct lh_sim_peer *peer)
{
    struct lh_alloc *alloc = peer->lives.run.alloc;
    const struct lh_sim_model *model = peer->lives.opts.run.model;
    lh_sim_lives_deinit(&peer->lives);
    inbox_clear(peer);
    for (uint32_t i = 0; peer->params && i < model->param_count; i++) {
        lh_free(alloc, peer->params[i].own);
        lh_free(alloc, peer->params[i].place);
    }
    lh_free(alloc, peer->params);
    lh_free(alloc, peer->bits);
    lh_free(alloc, peer->values.missing);
    if (peer->has_team)
        lh_team_leave(&peer->team);
    if (peer->bell >= 0)
        close(peer->bell);
    *peer = (struct lh_sim_peer){.bell = -1};
}

/* The reference at a step that the owner has committed; the mate itself may not have closed it. */
static void reference_move(struct lh_sim_peer *peer, uint64_t step)
{
    struct lh_sim_reference *reference = peer->lives.opts.reference;
    bool *has_gradient = peer->lives.run.train.has_gradient;
    while (reference->step < step) {
        for (uint32_t i = 0; i < reference->model->param_count; i++)
            has_gradient[i] = lh_sim_reference_has_gradient(reference, reference->step + 1, i);
        lh_sim_reference_advance(reference, has_gradient);
    }
    lh_sim_reference_return(reference, step);
}

static enum lh_sim_open mate_open(struct lh_sim_peer *peer, struct lh_error *err)
{
    struct lh_sim_run *run = &peer->lives.run;
    uint64_t step = lh_store_step(peer->opts.owner->lives.run.store);
    int rc = lh_sim_store_create(run->opts.model, run->opts.machine.ssd_count, run->alloc,
                                 &run->store, err);
    if (rc == 0)
        run->store->superblock.step = step;
    if (rc == 0)
        rc = lh_sim_lives_parts_create(&peer->lives, false, err);
    if (rc < 0)
        return LH_SIM_OPEN_BROKEN;
    reference_move(peer, step);
    return LH_SIM_OPEN_DONE;
}

enum lh_sim_open lh_sim_peer_open(struct lh_sim_peer *peer, struct lh_error *err)
{
    uint64_t count = 0;
    while (read(peer->bell, &count, sizeof(count)) > 0)
        continue;
    enum lh_sim_open open = lh_sim_peer_is_mate(peer) ? mate_open(peer, err)
                                                      : lh_sim_lives_open(&peer->lives, false, err);
    peer->is_alive = open == LH_SIM_OPEN_DONE;
    peer->is_awake = true;
    peer->has_nap = false;
    peer->post_count = 0;
    peer->quiet = (struct lh_quiet){0};
    peer->err = (struct lh_error){0};
    return open;
}

void lh_sim_peer_meet(struct lh_sim_peer *peer, const struct lh_sim_peer *other)
{
    LH_ASSERT(peer->has_team && other->has_team && peer->opts.owner == other->opts.owner);
    peer->team.bells[other->team.mate] = other->bell;
}

void lh_sim_peer_stop(struct lh_sim_peer *peer, enum lh_sim_end end, bool power)
{
    struct lh_sim_lives *lives = &peer->lives;
    lh_sim_lives_ended(lives, end);
    bool tears = lh_sim_random_below(&peer->random, 2) == 0;
    lives->opts.crash = (struct lh_sim_crash){.is_kill = !power, .tears = tears};
    lh_sim_lives_stop(lives);
    inbox_clear(peer);
    for (uint32_t i = 0; i < lives->opts.run.model->param_count; i++)
        peer->params[i].is_held = false;
    if (peer->has_team)
        lh_team_leave(&peer->team);
    peer->has_team = false;
    peer->is_alive = false;
}

/* --- Driving ----------------------------------------------------------------------------- */

void lh_sim_peer_deliver(struct lh_sim_peer *peer, struct lh_sim_message *message)
{
    if (!peer->is_alive) {
        lh_sim_net_free(peer->opts.net, message);
        return;
    }
    struct lh_sim_message **at = &peer->inbox;
    while (*at)
        at = &(*at)->next;
    message->next = NULL;
    *at = message;
    peer->has_news = true;
}

static bool is_rung(struct lh_sim_peer *peer)
{
    uint64_t count = 0;
    return peer->has_team && read(peer->bell, &count, sizeof(count)) > 0;
}

bool lh_sim_peer_poll(struct lh_sim_peer *peer)
{
    struct lh_engine *engine = peer->lives.run.engine;
    uint64_t post_count = atomic_load(&engine->post_count);
    bool moved = false;
    peer->is_awake |= is_rung(peer) || post_count != peer->post_count;
    if (peer->is_awake) {
        peer->post_count = post_count;
        moved = lh_engine_poll(engine) && lh_engine_error(engine, NULL) == 0;
        if (moved)
            peer->quiet = (struct lh_quiet){0};
    }
    moved |= lh_sim_train_poll(&peer->lives.run.train);
    return moved || atomic_load(&engine->post_count) != peer->post_count;
}

/* Whether the training thread is in a wait function of the engine. */
static bool waits(const struct lh_sim_peer *peer)
{
    const struct lh_sim_train *train = &peer->lives.run.train;
    switch (train->state) {
    case LH_SIM_TRAIN_STATE_ACQUIRE:
    case LH_SIM_TRAIN_STATE_GRADIENT:
    case LH_SIM_TRAIN_STATE_CLOSE:
    case LH_SIM_TRAIN_STATE_OVER:
    case LH_SIM_TRAIN_STATE_FLUSH:
        return train->is_asked;
    case LH_SIM_TRAIN_STATE_PEERS:
        return peer->stage == LH_SIM_PEER_STAGE_GIVE_BACK ||
               peer->stage == LH_SIM_PEER_STAGE_PAUSE ||
               (peer->stage == LH_SIM_PEER_STAGE_VALUES && peer->values.is_asked);
    default:
        return false;
    }
}

static void nap_ended(void *context)
{
    struct lh_sim_peer *peer = context;
    peer->has_nap = false;
    peer->nap_count++;
}

bool lh_sim_peer_sleep(struct lh_sim_peer *peer)
{
    struct lh_sim_world *world = &peer->lives.run.world;
    struct lh_engine *engine = peer->lives.run.engine;
    if (!peer->is_awake)
        return false;
    bool is_waiting = waits(peer);
    atomic_fetch_add(&engine->waiting, is_waiting);
    int ms = lh_engine_quiet(engine, &peer->quiet);
    atomic_fetch_sub(&engine->waiting, is_waiting);
    peer->is_awake = ms == 0;
    if (ms > 0 && !peer->has_nap) {
        peer->has_nap = true;
        lh_sim_world_at(world, world->now_ns + NAP_NS, nap_ended, peer);
    }
    return ms == 0;
}

bool lh_sim_peer_leave(struct lh_sim_peer *peer, struct lh_error *err)
{
    struct lh_engine *engine = peer->lives.run.engine;
    bool is_late = peer->lives.run.train.state == LH_SIM_TRAIN_STATE_PEERS &&
                   peer->stage == LH_SIM_PEER_STAGE_VALUES;
    if (!is_late || lh_engine_error(engine, NULL) < 0)
        return true;
    uint32_t given = peer->values.given;
    while (given < engine->opts.unit_count && peer->values.missing[given] == 0)
        given++;
    bool is_any = given < engine->opts.unit_count;
    lh_given_never(engine);
    while (lh_engine_poll(engine) && lh_engine_error(engine, NULL) == 0)
        continue;
    int rc = lh_engine_error(engine, err);
    return rc == (is_any ? -ECONNABORTED : 0);
}

bool lh_sim_peer_finish(struct lh_sim_peer *peer)
{
    struct lh_sim_train *train = &peer->lives.run.train;
    bool is_waiting =
        train->state == LH_SIM_TRAIN_STATE_PEERS &&
        (peer->stage == LH_SIM_PEER_STAGE_SUMS || peer->stage == LH_SIM_PEER_STAGE_AGREED ||
         peer->stage == LH_SIM_PEER_STAGE_SUMMED);
    if (!is_waiting || lh_sim_peer_is_mate(peer) ||
        lh_engine_error(peer->lives.run.engine, NULL) < 0)
        return false;
    train->opts.step_last = train->step;
    (void)lh_sim_train_state_set(train, LH_SIM_TRAIN_STATE_FLUSH);
    return true;
}

void lh_sim_peer_describe(const struct lh_sim_peer *peer, char *text, uint64_t bytes)
{
    const struct lh_sim_train *train = &peer->lives.run.train;
    const struct lh_engine *engine = peer->lives.run.engine;
    uint64_t used = (uint64_t)snprintf(
        text, bytes,
        " process %" PRIu32 "%s: state %d, stage %d, phase %d, block %" PRIu32 ", step %" PRIu64
        ", engine in state %d, units",
        peer->opts.rank, peer->is_alive ? "" : " (ended)", (int)train->state, (int)peer->stage,
        (int)train->phase, train->block, train->step, engine ? (int)engine->step_state : -1);
    for (uint32_t i = 0; engine && i < engine->opts.unit_count && used + 24 < bytes; i++) {
        const struct lh_unit *unit = &engine->units[i];
        used += (uint64_t)snprintf(
            text + used, bytes - used, " %" PRIu32 ":%d+%d/%" PRIu32 "%s%s%s", i, (int)unit->state,
            (int)unit->copy.state, lh_unit_pins(unit), unit->waiter_count > 0 ? "w" : "",
            unit->parts->mates.is_wanted ? "m" : "", unit->update.is_queued ? "u" : "");
    }
}
