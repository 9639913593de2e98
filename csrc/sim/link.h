/*
 * Links, over which bytes move, and the time that takes.
 *
 * A link is a queue of a given depth in front of one server (simplex) or two (duplex: one per
 * direction), with a latency that requests in the queue spend concurrently:
 *
 *      submit -> waiting -> [at most queue_depth: latency -> ready -> server: bytes / rate] -> done
 *
 * Links may share a cap (twelve SSDs on one switch): the bytes of a transfer in service also pass
 * the cap, at its rate and in the order in which services begin, and the transfer occupies its
 * server until both are done. A transfer of 0 bytes takes only the latency.
 *
 * An SSD is a simplex link. Source: LoHan IV-D (an SSD is simplex, PCIe is duplex). Copies to and
 * from a device are transfers on separate links, which may be duplex (sim/dev.h).
 *
 * Always checked, independently of the code that computes the times:
 *  1. No server, and no cap, moves more in a busy period than its rate allows.
 *  2. No server is idle while a transfer is ready, and no transfer waits while the queue has room.
 *
 * Thread: one.
 */
#ifndef LH_SIM_LINK_H
#define LH_SIM_LINK_H

#include "sim/world.h"

/* The maximum number of SSDs of a machine, each of which is a link. */
#define LH_SIM_SSD_COUNT_MAX 16

enum lh_sim_direction {
    LH_SIM_DIRECTION_READ = 0,
    LH_SIM_DIRECTION_WRITE = 1,
};
#define LH_SIM_DIRECTION_COUNT 2

struct lh_sim_cap {
    uint64_t bytes_per_s;
    uint64_t free_ns; /* when everything in service has passed the cap */
    /* The current busy period, for the check: */
    uint32_t active_count;
    uint64_t since_ns;
    uint64_t bytes;
};

struct lh_sim_link_opts {
    uint64_t bytes_per_s[LH_SIM_DIRECTION_COUNT];
    uint64_t latency_ns;
    uint32_t queue_depth;
    bool duplex;
};

struct lh_sim_link;

struct lh_sim_transfer {
    enum lh_sim_direction direction;
    uint64_t bytes;
    uint64_t extra_ns; /* additional latency */
    void (*done)(struct lh_sim_transfer *transfer);
    void *owner;
    /* Private to the link. */
    struct lh_sim_link *link;
    struct lh_sim_transfer *next;
};

struct lh_sim_transfer_queue {
    struct lh_sim_transfer *head;
    struct lh_sim_transfer *tail;
};

/* A server, and the bytes it moved since it was last idle. */
struct lh_sim_server {
    struct lh_sim_transfer_queue ready;
    struct lh_sim_transfer *active;
    uint64_t since_ns;
    uint64_t until_ns;
    uint64_t bytes[LH_SIM_DIRECTION_COUNT];
};

struct lh_sim_link {
    struct lh_sim_world *world;
    struct lh_sim_link_opts opts;
    struct lh_sim_cap *cap; /* may be NULL; borrowed */
    struct lh_sim_transfer_queue waiting;
    struct lh_sim_server servers[LH_SIM_DIRECTION_COUNT]; /* simplex: the first serves both */
    uint32_t admitted_count;
    uint64_t bytes[LH_SIM_DIRECTION_COUNT]; /* the bytes moved so far */
    uint64_t busy_ns[LH_SIM_DIRECTION_COUNT];
};

/* Initialize a cap with nothing in service. */
void lh_sim_cap_init(struct lh_sim_cap *cap, uint64_t bytes_per_s);
/* Initialize a link, which borrows world and cap for as long as it is used. */
void lh_sim_link_init(struct lh_sim_link *link, struct lh_sim_world *world,
                      const struct lh_sim_link_opts *opts, struct lh_sim_cap *cap);
/* Submit a transfer, which is borrowed until transfer->done() is called. */
void lh_sim_link_submit(struct lh_sim_link *link, struct lh_sim_transfer *transfer);
/* Discard everything in flight; the caller discards the world's events, too. */
void lh_sim_link_drop(struct lh_sim_link *link);
/* Check invariant 2. Call it whenever time is about to advance. */
void lh_sim_link_check(struct lh_sim_link *link);

#endif
