/*
 * One of several processes that train together: lives (lives/lives.h) whose script exchanges
 * gradients, agreement and new values with other processes, in the order of python/lohan/replicas.
 *
 *      backward: each gradient is sent to the processes that add it, which hold it
 *      SUMS      until the gradients of all processes are there; they are added by rank, in fp32
 *      AGREED    until all processes call step()
 *      SUMMED    divided states: until it is known which parameters have gradients anywhere
 *      PASS      the sums go to the engine -> close
 *      VALUES    divided states, after the close: until this process's units are updated and sent,
 *                and the other units' new values have come
 *
 * A mate has no sums. After AGREED it gives all units back (GIVE_BACK), waits until its owner
 * has closed the step (OWNER), and closes a step without gradients.
 *
 * [Note: An engine that sleeps] The thread of an engine sleeps until it has news: a message of its
 * process, a completed request, job or copy, or a bell of its team. So here an engine is polled
 * only after such news, and a wake-up that is missing is a hang. Before it sleeps, it does what the
 * thread does then (lh_engine_quiet()), and it naps if the thread would.
 *
 * Thread: one.
 */
#ifndef LH_TEST_SIM_PEER_H
#define LH_TEST_SIM_PEER_H

#include "lives/lives.h"
#include "lives/net.h"
#include "sched/engine_private.h"

#define LH_SIM_PEER_COUNT_MAX 8

/* Who takes part, and what each process has: the same for all of them. */
struct lh_sim_crew {
    uint32_t count;
    uint32_t machine_count;
    uint32_t machines[LH_SIM_PEER_COUNT_MAX]; /* by rank */
    uint32_t owners[LH_SIM_PEER_COUNT_MAX];   /* by rank: who has the parameters; itself: no mate */
    uint32_t numbers[LH_SIM_PEER_COUNT_MAX];  /* by rank: its number in its team */
    uint32_t mate_counts[LH_SIM_PEER_COUNT_MAX]; /* by rank, of owners */
    bool is_divided;
    uint32_t *parts;    /* divided: by unit, the rank that has its states */
    uint32_t order_ppm; /* per step and process: the blocks are used in another order */
};

enum lh_sim_peer_stage {
    LH_SIM_PEER_STAGE_SUMS = 0,
    LH_SIM_PEER_STAGE_AGREED,
    LH_SIM_PEER_STAGE_SUMMED,
    LH_SIM_PEER_STAGE_GIVE_BACK,
    LH_SIM_PEER_STAGE_PAUSE,
    LH_SIM_PEER_STAGE_OWNER,
    LH_SIM_PEER_STAGE_PASS,
    LH_SIM_PEER_STAGE_VALUES,
};

/* What a process has of a parameter. */
struct lh_sim_peer_param {
    void *own;    /* its own gradient */
    void *place;  /* the sum, or new values */
    bool is_sent; /* in the open step */
    bool has_sum;
    bool is_present; /* some process has a sum */
    bool is_held;    /* the engine reads the place */
};

/* The new values of the closed step. */
struct lh_sim_peer_values {
    uint32_t param;      /* the next one to read and send */
    bool is_asked;       /* its unit was requested */
    bool is_reading;     /* on an ordered accelerator */
    uint32_t *missing;   /* by unit: the parameters whose values have not come */
    uint32_t given;      /* units below this index have been given */
    uint32_t left_count; /* parameters whose values have not come */
};

struct lh_sim_peer_opts {
    struct lh_sim_lives_opts lives;
    const struct lh_sim_crew *crew; /* borrowed until deinit, like the rest */
    struct lh_sim_net *net;
    struct lh_sim_peer *owner; /* of the team; itself: no mate */
    uint32_t rank;
};

struct lh_sim_peer {
    struct lh_sim_lives lives; /* the first member, because hooks get a pointer to it */
    struct lh_sim_peer_opts opts;
    struct lh_sim_random random;
    bool is_alive;
    struct lh_team team;
    bool has_team;
    int bell; /* wakes the engine of a team */
    /* [Note: An engine that sleeps] */
    bool is_awake;
    bool has_nap;
    uint64_t nap_count;
    uint64_t post_count; /* the messages of this process that the engine has been polled after */
    struct lh_quiet quiet;
    enum lh_sim_peer_stage stage;
    bool is_said;  /* this process has sent what belongs to its stage */
    bool has_news; /* a message has come since the stage was last polled */
    struct lh_sim_message *inbox;
    struct lh_sim_peer_param *params;
    uint8_t *bits; /* scratch space: a bit for each parameter */
    struct lh_sim_peer_values values;
    struct lh_error err; /* a message was not what it should be */
};

/*
 * Initialize a process that does not run yet.
 *
 * Owns:   *peer owns everything; release with lh_sim_peer_deinit(), after an error as well. *peer
 *         must not move.
 * Errors: those of lives.
 */
int lh_sim_peer_init(struct lh_sim_peer *peer, const struct lh_sim_peer_opts *opts,
                     struct lh_alloc *alloc, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_peer_deinit(struct lh_sim_peer *peer);
bool lh_sim_peer_is_mate(const struct lh_sim_peer *peer);
/*
 * Begin a life. An owner begins before its mates, which begin at its step; then call
 * lh_sim_peer_meet() for each process of the team.
 */
enum lh_sim_open lh_sim_peer_open(struct lh_sim_peer *peer, struct lh_error *err) LH_MUST_CHECK;
/* Make known what wakes another process of the team. */
void lh_sim_peer_meet(struct lh_sim_peer *peer, const struct lh_sim_peer *other);
/* End the life (LH_SIM_END_DONE, or STOPPED); power: its machine ends, too. Mates end first. */
void lh_sim_peer_stop(struct lh_sim_peer *peer, enum lh_sim_end end, bool power);

/* Take a message, which the process owns from now on. */
void lh_sim_peer_deliver(struct lh_sim_peer *peer, struct lh_sim_message *message);
/* Poll the engine, if it has news, and the training thread. Returns true if anything happened. */
bool lh_sim_peer_poll(struct lh_sim_peer *peer);
/* Nothing moves in any process: the engine goes to sleep. Returns true if it does something. */
bool lh_sim_peer_sleep(struct lh_sim_peer *peer);
/*
 * The process learns that another one is gone, and that values of its closed step will not come.
 * Returns false if its engine does not have that error, or another one: err.
 */
bool lh_sim_peer_leave(struct lh_sim_peer *peer, struct lh_error *err);
/*
 * The process ends because another one has: if it waits for that one, it first commits what it has
 * closed. Returns whether it does; its script is then about to be DONE.
 */
bool lh_sim_peer_finish(struct lh_sim_peer *peer);
/* Write what the process waits for. */
void lh_sim_peer_describe(const struct lh_sim_peer *peer, char *text, uint64_t bytes);

/* peer_step.c, for peer.c: the state PEERS of the script */
enum lh_sim_look lh_sim_peer_stage_poll(struct lh_sim_peer *peer);
void lh_sim_peer_stage_set(struct lh_sim_peer *peer, enum lh_sim_peer_stage stage);
/* Send this process's gradient of a parameter to those that add it. */
void lh_sim_peer_gradient_send(struct lh_sim_peer *peer, uint32_t param);
/* Send to one process; the step is the one that this process is about to close. */
void lh_sim_peer_send(struct lh_sim_peer *peer, uint32_t to, struct lh_sim_net_letter letter);
/* Remove a message of the current step from the inbox, or return NULL. */
struct lh_sim_message *lh_sim_peer_take(struct lh_sim_peer *peer, enum lh_sim_message_kind kind,
                                        uint64_t step, uint32_t from, uint32_t param);
/* End the process's training with an error that names a message. */
enum lh_sim_look lh_sim_peer_refuse(struct lh_sim_peer *peer, const struct lh_sim_message *message);

/* peer_values.c */
void lh_sim_peer_values_begin(struct lh_sim_peer *peer);
enum lh_sim_look lh_sim_peer_values_poll(struct lh_sim_peer *peer);

#endif
