/*
 * A network between simulated processes: messages over links, one link for each machine to all
 * others, and one for the processes on it among themselves.
 *
 *      lh_sim_net_send() -> the sender's link, and the faults drawn for the message -> delivered
 *
 * Messages may arrive in another order than they were sent in, and late. Their payload carries a
 * checksum. With a fault, one bit of a payload is wrong when it arrives, except in messages by
 * which processes agree: in production these have no checksum of their own.
 *
 * Thread: one.
 */
#ifndef LH_TEST_SIM_NET_H
#define LH_TEST_SIM_NET_H

#include "lives/random.h"
#include "sim/link.h"

#define LH_SIM_NET_MACHINE_COUNT_MAX 4

enum lh_sim_message_kind {
    LH_SIM_MESSAGE_GRADIENT = 0, /* a process's gradient of a parameter */
    LH_SIM_MESSAGE_ENDED,        /* a backward has ended: the parameters that had gradients */
    LH_SIM_MESSAGE_AGREED,       /* a process calls step() */
    LH_SIM_MESSAGE_SUMMED,       /* the parameters that have sums in a process */
    LH_SIM_MESSAGE_VALUES,       /* new values of a parameter */
};

struct lh_sim_message {
    struct lh_sim_message *next;
    enum lh_sim_message_kind kind;
    uint32_t from; /* ranks */
    uint32_t to;
    uint64_t step; /* the step that they are about to close, or have just closed */
    uint32_t param;
    uint64_t bytes;
    uint32_t crc;
    /* Private to the network. */
    struct lh_sim_net *net;
    struct lh_sim_message *in_flight_next;
    struct lh_sim_transfer transfer;
    _Alignas(8) uint8_t payload[];
};

struct lh_sim_net_opts {
    uint64_t seed;
    uint32_t machine_count;
    struct lh_sim_link_opts link;       /* between machines; WRITE: from the machine */
    struct lh_sim_link_opts local_link; /* between processes of one machine */
    uint32_t spike_ppm;                 /* faults, per message */
    uint64_t spike_ns;
    uint32_t reorder_ppm;
    uint64_t reorder_ns;
    uint32_t flip_ppm;
    /* A message has arrived, which the function then owns: lh_sim_net_free(). */
    void (*deliver)(void *context, struct lh_sim_message *message);
    void *context;
};

struct lh_sim_net {
    struct lh_sim_net_opts opts;
    struct lh_alloc *alloc;
    struct lh_sim_world world; /* in which all messages are events */
    struct lh_sim_random random;
    struct lh_sim_link links[LH_SIM_NET_MACHINE_COUNT_MAX];
    struct lh_sim_link local_links[LH_SIM_NET_MACHINE_COUNT_MAX];
    struct lh_sim_message *in_flight;
    uint64_t message_count;
    uint64_t flip_count;
};

/* What a message says; payload is copied. from_machine and to_machine: where both ends are. */
struct lh_sim_net_letter {
    enum lh_sim_message_kind kind;
    uint32_t from;
    uint32_t to;
    uint32_t from_machine;
    uint32_t to_machine;
    uint64_t step;
    uint32_t param;
    const void *payload;
    uint64_t bytes;
};

/*
 * Initialize a network without messages.
 *
 * Owns:   *net owns its messages; release with lh_sim_net_deinit(). alloc is borrowed until then.
 * Errors: -ENOMEM; nothing is owned then.
 */
int lh_sim_net_init(struct lh_sim_net *net, const struct lh_sim_net_opts *opts,
                    struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_net_deinit(struct lh_sim_net *net);
void lh_sim_net_send(struct lh_sim_net *net, const struct lh_sim_net_letter *letter);
/* Whether the payload is the one that was sent. */
bool lh_sim_net_is_intact(const struct lh_sim_message *message);
void lh_sim_net_free(struct lh_sim_net *net, struct lh_sim_message *message);
/* All processes have ended: discard what is in flight. */
void lh_sim_net_forget(struct lh_sim_net *net);
/* Call this whenever time is about to advance. */
void lh_sim_net_check(struct lh_sim_net *net);

#endif
