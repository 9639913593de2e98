/*
 * The network between the nodes of a cluster: messages without contents, and what each node has
 * received.
 *
 * A node has a card, which sends one message after the other (sim/link.h). Messages to several
 * nodes go to the next node first, then to the one after it, and so on, around the ring of all
 * nodes: node n of N sends to n + 1, n + 2, ... modulo N. A node counts what arrives; all counts
 * are of the whole run, because a message may arrive before the step that it belongs to is reached.
 *
 * [Note: The image] If all nodes are equal, all of them do the same at the same time. When node n
 * sends to node n + k, node n - k sends the same message to node n, and the two messages arrive
 * together. So a mirror has one node, to which each message that it sends is delivered: it then
 * stands for the one of node n - k. Nothing else crosses between nodes, and no message takes less
 * than a nanosecond, so that nodes cannot influence one another at one instant, where the order of
 * events would count. With several nodes simulated, this is not assumed, but checked:
 *
 *  1. Nodes that send in this order never send to one node at the same time. So a card that
 *     receives is as busy as one that sends, and needs no queue. It is a failure if it receives
 *     more than its rate allows.
 *
 * Thread: one.
 */
#ifndef LH_SIM_MAIL_H
#define LH_SIM_MAIL_H

#include "sim/link.h"

enum lh_sim_mail_kind {
    LH_SIM_MAIL_GRADIENT = 0, /* a process's gradient of a parameter, or of a shard of it */
    LH_SIM_MAIL_AGREED,       /* the node has added all gradients of its shards */
    LH_SIM_MAIL_VALUES,       /* the new values of a shard; by unit: that of the shard's node */
};
#define LH_SIM_MAIL_KIND_COUNT 3

struct lh_sim_node {
    struct lh_sim_link card; /* WRITE: from the node */
    uint64_t received_ns;    /* when the last message had arrived */
    uint64_t counts[LH_SIM_MAIL_KIND_COUNT];
    uint64_t *value_counts; /* by unit */
    uint64_t sent_bytes;
};

struct lh_sim_mail_opts {
    uint32_t node_count;
    uint32_t unit_count;
    struct lh_sim_link_opts card;
    bool is_mirror; /* only node 0 is simulated: see [Note: The image] */
};

/* What a node sends to all others, each of which gets as many bytes. */
struct lh_sim_letter {
    enum lh_sim_mail_kind kind;
    uint32_t unit; /* of VALUES */
    uint64_t bytes;
};

struct lh_sim_message;

struct lh_sim_mail {
    struct lh_sim_mail_opts opts;
    struct lh_alloc *alloc;
    struct lh_sim_world world; /* in which all messages are events */
    struct lh_sim_node *nodes;
    uint32_t made_count;             /* the nodes that are simulated */
    struct lh_sim_message *messages; /* in flight */
    struct lh_sim_message *free;
    struct lh_error err;
};

/*
 * Initialize a network without messages.
 *
 * Owns:   *mail owns everything; release with lh_sim_mail_deinit(), after an error as well. *mail
 *         must not move. alloc is borrowed until then.
 * Errors: -ENOMEM; -EINVAL: several nodes, and a card without a rate.
 */
int lh_sim_mail_init(struct lh_sim_mail *mail, const struct lh_sim_mail_opts *opts,
                     struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_mail_deinit(struct lh_sim_mail *mail);
/* Send to all other nodes. If memory runs out, mail->err is set, and messages are missing. */
void lh_sim_mail_send(struct lh_sim_mail *mail, uint32_t from, const struct lh_sim_letter *letter);
/* Let everything happen that happens at the next instant. */
void lh_sim_mail_advance(struct lh_sim_mail *mail);
/* Call this whenever time is about to advance. */
void lh_sim_mail_check(struct lh_sim_mail *mail);

#endif
