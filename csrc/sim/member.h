/*
 * A member of a cluster: a process of a node, with an engine and a training thread, that exchanges
 * gradients, agreement and new values with the others. The calls and their order are those of
 * python/lohan/replicas, with share="on": the first process of a node is its owner, which has
 * the store, the parameters and the states of the node; the others are its mates (csrc/team).
 *
 *      backward: each gradient leaves the accelerator, and is sent to the nodes that add it; the
 *                next micro-batch begins, or
 *      SUMS      owner: until all gradients of all processes that this node adds are there
 *      AGREED    owner: until all nodes have come as far; mates: until their owner has
 *      PASS      owner: the sums go to the engine -> close
 *      VALUES    owner, divided states, after the close: until this node's shards are updated and
 *                sent, and the new values of the others have come
 *      GIVE_BACK, PAUSE, OWNER   mates give all units back, wait until the owner has closed the
 *                step, and close a step without gradients
 *
 * Additions take no time, and neither do gradients and agreement within a node.
 *
 * [Note: An engine that sleeps, simulated] The thread of an engine sleeps until it has news: a
 * message of its process, a completed request, job or copy, or a bell of its team. So an engine is
 * polled only after such news. Before it sleeps, it does what the thread does then
 * (lh_engine_quiet()).
 *
 * Thread: one.
 */
#ifndef LH_SIM_MEMBER_H
#define LH_SIM_MEMBER_H

#include "sched/engine_private.h"
#include "sim/mail.h"
#include "sim/run.h"

enum lh_sim_member_stage {
    LH_SIM_MEMBER_STAGE_SUMS = 0,
    LH_SIM_MEMBER_STAGE_AGREED,
    LH_SIM_MEMBER_STAGE_GIVE_BACK,
    LH_SIM_MEMBER_STAGE_PAUSE,
    LH_SIM_MEMBER_STAGE_OWNER,
    LH_SIM_MEMBER_STAGE_PASS,
    LH_SIM_MEMBER_STAGE_VALUES,
};

struct lh_sim_member;

struct lh_sim_member_opts {
    struct lh_sim_run_opts run;  /* its model is divided (sim/shards.h), if states are */
    struct lh_sim_mail *mail;    /* borrowed until deinit, like the owner */
    struct lh_sim_member *owner; /* of the node; itself: no mate */
    uint32_t node;
    uint32_t number; /* in the node; the owner's is 0 */
    uint32_t gpu_count;
    uint32_t micro_steps;
    bool is_divided; /* each node has the states of its shards; otherwise, all states */
};

struct lh_sim_member {
    struct lh_sim_run run;
    struct lh_sim_member_opts opts;
    struct lh_team team;
    bool has_team;
    int bell; /* wakes the engine of a team */
    struct lh_error err;
    /* [Note: An engine that sleeps, simulated] */
    bool is_awake;
    bool has_nap;
    bool has_changed; /* since the checkers ran */
    uint64_t post_count;
    struct lh_quiet quiet;
    enum lh_sim_member_stage stage;
    bool is_told; /* this node's agreement was sent */
    uint32_t micro_step;
    uint32_t sum_count; /* the parameters whose gradients this node adds */
    uint64_t agreed_step;
    /* Gradients leave the accelerator over a queue of their own: in backward, its link is free. */
    struct lh_sim_link way_out;
    struct lh_sim_departure *departures;
    struct lh_sim_departure *departure_free;
    /* The new values of the closed step. */
    uint32_t value_unit; /* the next unit of this node to send */
    bool is_asked;       /* it was requested */
    uint32_t given;      /* units below this index were given */
};

/*
 * Initialize a member, as the owner of a node or, after that, as one of its mates.
 *
 * Owns:   *member owns everything; release with lh_sim_member_deinit(), after an error as well,
 *         mates before their owner. *member must not move.
 * Errors: those of a run and of a team.
 */
int lh_sim_member_init(struct lh_sim_member *member, const struct lh_sim_member_opts *opts,
                       struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_member_deinit(struct lh_sim_member *member);
/* Make known what wakes another member of the node. */
void lh_sim_member_meet(struct lh_sim_member *member, const struct lh_sim_member *other);
/* Poll the engine, if it has news, and the training thread. Returns true if anything happened. */
bool lh_sim_member_poll(struct lh_sim_member *member);
/* Nothing moves in any member: the engine goes to sleep. Returns true if it does something. */
bool lh_sim_member_sleep(struct lh_sim_member *member);

#endif
