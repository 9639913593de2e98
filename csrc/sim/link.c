#include "sim/link.h"

#include <inttypes.h>

#include "base/assert.h"

static void queue_push(struct lh_sim_transfer_queue *queue, struct lh_sim_transfer *transfer)
{
    transfer->next = NULL;
    if (queue->tail)
        queue->tail->next = transfer;
    else
        queue->head = transfer;
    queue->tail = transfer;
}

static struct lh_sim_transfer *queue_pop(struct lh_sim_transfer_queue *queue)
{
    struct lh_sim_transfer *transfer = queue->head;
    queue->head = transfer->next;
    if (!queue->head)
        queue->tail = NULL;
    return transfer;
}

void lh_sim_cap_init(struct lh_sim_cap *cap, uint64_t bytes_per_s)
{
    *cap = (struct lh_sim_cap){.bytes_per_s = bytes_per_s};
}

void lh_sim_link_init(struct lh_sim_link *link, struct lh_sim_world *world,
                      const struct lh_sim_link_opts *opts, struct lh_sim_cap *cap)
{
    LH_ASSERT(opts->queue_depth > 0);
    *link = (struct lh_sim_link){.world = world, .opts = *opts, .cap = cap};
}

static struct lh_sim_server *server_of(struct lh_sim_link *link, enum lh_sim_direction direction)
{
    return &link->servers[link->opts.duplex ? direction : 0];
}

static void service_done(void *context);

static void service_begin(struct lh_sim_link *link, struct lh_sim_server *server)
{
    struct lh_sim_world *world = link->world;
    if (server->active || !server->ready.head)
        return;
    struct lh_sim_transfer *transfer = queue_pop(&server->ready);
    uint64_t rate = link->opts.bytes_per_s[transfer->direction];
    uint64_t end_ns = world->now_ns + lh_sim_transfer_ns(transfer->bytes, rate);
    if (link->cap) {
        struct lh_sim_cap *cap = link->cap;
        uint64_t begin_ns = lh_max_u64(world->now_ns, cap->free_ns);
        cap->free_ns = begin_ns + lh_sim_transfer_ns(transfer->bytes, cap->bytes_per_s);
        end_ns = lh_max_u64(end_ns, cap->free_ns);
        if (cap->active_count++ == 0) {
            cap->since_ns = world->now_ns;
            cap->bytes = 0;
        }
    }
    if (server->until_ns != world->now_ns) {
        server->since_ns = world->now_ns;
        server->bytes[0] = 0;
        server->bytes[1] = 0;
    }
    link->busy_ns[transfer->direction] += end_ns - world->now_ns;
    server->active = transfer;
    server->until_ns = end_ns;
    lh_sim_world_at(world, end_ns, service_done, transfer);
}

/* Check that no more bytes moved since the server (the cap) was idle than its rate allows. */
static void rate_check(struct lh_sim_link *link, const struct lh_sim_server *server,
                       const struct lh_sim_transfer *transfer)
{
    typedef unsigned __int128 wide;
    const uint64_t *rates = link->opts.bytes_per_s;
    uint64_t now = link->world->now_ns;
    wide needed = (wide)server->bytes[0] * LH_SIM_NS_PER_S * rates[1] +
                  (wide)server->bytes[1] * LH_SIM_NS_PER_S * rates[0];
    if (needed > (wide)(now - server->since_ns) * rates[0] * rates[1])
        lh_sim_world_fail(link->world,
                          "a link of %" PRIu64 " and %" PRIu64 " bytes/s read %" PRIu64
                          " and wrote %" PRIu64 " bytes in %" PRIu64 " ns",
                          rates[0], rates[1], server->bytes[0], server->bytes[1],
                          now - server->since_ns);
    struct lh_sim_cap *cap = link->cap;
    if (!cap)
        return;
    cap->bytes += transfer->bytes;
    LH_ASSERT(cap->active_count > 0);
    cap->active_count--;
    if ((wide)cap->bytes * LH_SIM_NS_PER_S > (wide)(now - cap->since_ns) * cap->bytes_per_s)
        lh_sim_world_fail(link->world,
                          "a cap of %" PRIu64 " bytes/s let %" PRIu64 " bytes through in %" PRIu64
                          " ns",
                          cap->bytes_per_s, cap->bytes, now - cap->since_ns);
}

static void latency_done(void *context)
{
    struct lh_sim_transfer *transfer = context;
    struct lh_sim_link *link = transfer->link;
    if (transfer->bytes > 0) {
        struct lh_sim_server *server = server_of(link, transfer->direction);
        queue_push(&server->ready, transfer);
        service_begin(link, server);
        return;
    }
    service_done(transfer);
}

static void admit(struct lh_sim_link *link)
{
    while (link->waiting.head && link->admitted_count < link->opts.queue_depth) {
        struct lh_sim_transfer *transfer = queue_pop(&link->waiting);
        link->admitted_count++;
        uint64_t ready_ns = link->world->now_ns + link->opts.latency_ns + transfer->extra_ns;
        lh_sim_world_at(link->world, ready_ns, latency_done, transfer);
    }
}

static void service_done(void *context)
{
    struct lh_sim_transfer *transfer = context;
    struct lh_sim_link *link = transfer->link;
    LH_ASSERT(link->admitted_count > 0);
    link->admitted_count--;
    if (transfer->bytes > 0) {
        struct lh_sim_server *server = server_of(link, transfer->direction);
        LH_ASSERT(server->active == transfer);
        server->active = NULL;
        server->bytes[transfer->direction] += transfer->bytes;
        link->bytes[transfer->direction] += transfer->bytes;
        rate_check(link, server, transfer);
        service_begin(link, server);
    }
    admit(link);
    transfer->done(transfer);
}

void lh_sim_link_submit(struct lh_sim_link *link, struct lh_sim_transfer *transfer)
{
    transfer->link = link;
    queue_push(&link->waiting, transfer);
    admit(link);
}

void lh_sim_link_drop(struct lh_sim_link *link)
{
    link->waiting = (struct lh_sim_transfer_queue){0};
    link->admitted_count = 0;
    for (uint32_t i = 0; i < LH_SIM_DIRECTION_COUNT; i++) {
        link->servers[i].ready = (struct lh_sim_transfer_queue){0};
        link->servers[i].active = NULL;
    }
    if (link->cap) {
        link->cap->active_count = 0;
        link->cap->free_ns = 0;
    }
}

void lh_sim_link_check(struct lh_sim_link *link)
{
    for (uint32_t i = 0; i < LH_SIM_DIRECTION_COUNT; i++) {
        if (link->servers[i].ready.head && !link->servers[i].active)
            lh_sim_world_fail(link->world, "a link is idle while a transfer is ready");
    }
    if (link->waiting.head && link->admitted_count < link->opts.queue_depth)
        lh_sim_world_fail(link->world,
                          "a transfer waits for a queue that has only %" PRIu32 " of %" PRIu32
                          " requests",
                          link->admitted_count, link->opts.queue_depth);
}
