#include "lives/net.h"

#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"

#define EVENT_MAX 16384

int lh_sim_net_init(struct lh_sim_net *net, const struct lh_sim_net_opts *opts,
                    struct lh_alloc *alloc, struct lh_error *err)
{
    *net = (struct lh_sim_net){.opts = *opts, .alloc = alloc};
    LH_ASSERT(opts->machine_count <= LH_SIM_NET_MACHINE_COUNT_MAX);
    LH_TRY(lh_sim_world_init(&net->world, alloc, EVENT_MAX, err));
    lh_sim_random_init(&net->random, opts->seed, LH_SIM_STREAM_NETWORK);
    for (uint32_t i = 0; i < opts->machine_count; i++) {
        lh_sim_link_init(&net->links[i], &net->world, &opts->link, NULL);
        lh_sim_link_init(&net->local_links[i], &net->world, &opts->local_link, NULL);
    }
    return 0;
}

void lh_sim_net_deinit(struct lh_sim_net *net)
{
    if (!net->alloc)
        return;
    lh_sim_net_forget(net);
    lh_sim_world_deinit(&net->world);
    *net = (struct lh_sim_net){0};
}

static uint32_t crc_of(const struct lh_sim_message *message)
{
    const uint64_t head[] = {message->kind, message->from, message->step, message->param};
    return lh_crc32c(lh_crc32c(0, head, sizeof(head)), message->payload, message->bytes);
}

static void unlink_from(struct lh_sim_net *net, const struct lh_sim_message *message)
{
    struct lh_sim_message **at = &net->in_flight;
    while (*at != message)
        at = &(*at)->in_flight_next;
    *at = message->in_flight_next;
}

static void arrived(struct lh_sim_transfer *transfer)
{
    struct lh_sim_message *message = transfer->owner;
    struct lh_sim_net *net = message->net;
    unlink_from(net, message);
    lh_sim_world_trace(&net->world, LH_SIM_TRACE_DONE,
                       (uint64_t)message->kind << 32 | message->param,
                       (uint64_t)message->from << 32 | message->to, message->step);
    net->opts.deliver(net->opts.context, message);
}

static void faults_draw(struct lh_sim_net *net, struct lh_sim_message *message)
{
    struct lh_sim_random *random = &net->random;
    bool is_flipped = lh_sim_random_chance(random, net->opts.flip_ppm);
    if (lh_sim_random_chance(random, net->opts.spike_ppm))
        message->transfer.extra_ns += net->opts.spike_ns;
    if (lh_sim_random_chance(random, net->opts.reorder_ppm))
        message->transfer.extra_ns += lh_sim_random_below(random, net->opts.reorder_ns + 1);
    bool is_control =
        message->kind == LH_SIM_MESSAGE_AGREED || message->kind == LH_SIM_MESSAGE_SUMMED;
    if (!is_flipped || message->bytes == 0 || is_control)
        return;
    uint64_t bit = lh_sim_random_below(random, 8 * message->bytes);
    message->payload[bit / 8] ^= (uint8_t)(1U << bit % 8);
    net->flip_count++;
}

void lh_sim_net_send(struct lh_sim_net *net, const struct lh_sim_net_letter *letter)
{
    struct lh_sim_message *message =
        lh_alloc_zeroed(net->alloc, 1, sizeof(*message) + letter->bytes);
    LH_ASSERT(message && letter->from != letter->to);
    message->kind = letter->kind;
    message->from = letter->from;
    message->to = letter->to;
    message->step = letter->step;
    message->param = letter->param;
    message->bytes = letter->bytes;
    message->net = net;
    if (letter->bytes > 0)
        memcpy(message->payload, letter->payload, letter->bytes);
    message->crc = crc_of(message);
    message->transfer = (struct lh_sim_transfer){
        .direction = LH_SIM_DIRECTION_WRITE,
        .bytes = letter->bytes,
        .done = arrived,
        .owner = message,
    };
    faults_draw(net, message);
    message->in_flight_next = net->in_flight;
    net->in_flight = message;
    net->message_count++;
    bool is_local = letter->from_machine == letter->to_machine;
    struct lh_sim_link *links = is_local ? net->local_links : net->links;
    lh_sim_link_submit(&links[letter->from_machine], &message->transfer);
}

bool lh_sim_net_is_intact(const struct lh_sim_message *message)
{
    return crc_of(message) == message->crc;
}

void lh_sim_net_free(struct lh_sim_net *net, struct lh_sim_message *message)
{
    lh_free(net->alloc, message);
}

void lh_sim_net_forget(struct lh_sim_net *net)
{
    lh_sim_world_forget(&net->world);
    for (uint32_t i = 0; i < net->opts.machine_count; i++) {
        lh_sim_link_drop(&net->links[i]);
        lh_sim_link_drop(&net->local_links[i]);
    }
    while (net->in_flight) {
        struct lh_sim_message *message = net->in_flight;
        net->in_flight = message->in_flight_next;
        lh_free(net->alloc, message);
    }
}

void lh_sim_net_check(struct lh_sim_net *net)
{
    for (uint32_t i = 0; i < net->opts.machine_count; i++) {
        lh_sim_link_check(&net->links[i]);
        lh_sim_link_check(&net->local_links[i]);
    }
}
