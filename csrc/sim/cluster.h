/*
 * A cluster in virtual time: N nodes of G accelerators each, with an engine for each accelerator
 * (sim/member.h) and a network between the nodes (sim/mail.h). All nodes have the same machine and
 * do the same work.
 *
 *      all members are polled, until none moves; engines without news go to sleep; checkers run;
 *      then the earliest events happen: all of one member at one time; of several members with
 *      events at that time, those of the first member; messages between nodes come last
 *
 * A mirror simulates node 0 only, and every other node is its image ([Note: The image] in
 * sim/mail.h). Its times are those of the whole cluster, to the nanosecond, and a cluster of any
 * number of nodes is one node's work.
 *
 * There are two ways to divide the optimizer's states:
 *
 *      WHOLE   each node has all of them, and receives all gradients (replicas="all")
 *      SHARDS  each node has an equal part of every unit (sim/shards.h), as replicas="parameters"
 *              divides them if every block can be divided equally
 *
 * What lohan.wrap(replicas="parameters") does with blocks that it deals out as a whole has no
 * mirror: nodes have different blocks then, and none is the image of another.
 *
 * Thread: one.
 */
#ifndef LH_SIM_CLUSTER_H
#define LH_SIM_CLUSTER_H

#include "sim/member.h"
#include "sim/shards.h"

#define LH_SIM_NODE_COUNT_MAX 1024
#define LH_SIM_GPU_COUNT_MAX 64

enum lh_sim_division {
    LH_SIM_DIVISION_WHOLE = 0,
    LH_SIM_DIVISION_SHARDS,
};
#define LH_SIM_DIVISION_COUNT 2

struct lh_sim_cluster_opts {
    uint32_t node_count;
    uint32_t gpu_count;   /* of a node */
    uint32_t micro_steps; /* the micro-batches of an accelerator in a step */
    enum lh_sim_division division;
    struct lh_sim_link_opts card; /* of a node; WRITE: what it sends, and receives, per second */
    uint64_t event_count_max;     /* the most events of one drive; 0: no limit */
    bool is_mirror;
};

struct lh_sim_cluster {
    struct lh_sim_cluster_opts opts;
    struct lh_alloc *alloc;
    struct lh_sim_model model; /* of each node */
    struct lh_sim_mail mail;
    struct lh_sim_member *members; /* by node, then by number */
    uint32_t member_count;
    uint64_t fired_count;
    uint64_t quiet_ns; /* the last time at which more than naps was pending */
};

/*
 * Initialize a cluster.
 *
 * run: what each process runs; machine is that of a node, of which each process has an accelerator,
 * and only the owner uses the SSDs; host_bytes are the node's; the saved tensors are each process's
 * own. run->model is the whole model.
 *
 * Owns:   *cluster owns everything; release with lh_sim_cluster_deinit(), after an error as well.
 *         *cluster must not move. alloc is borrowed until then.
 * Errors: -EINVAL: a configuration that cannot be simulated (the message names it), and those of
 *         a member.
 */
int lh_sim_cluster_init(struct lh_sim_cluster *cluster, const struct lh_sim_cluster_opts *opts,
                        const struct lh_sim_run_opts *run, struct lh_alloc *alloc,
                        struct lh_error *err) LH_MUST_CHECK;
void lh_sim_cluster_deinit(struct lh_sim_cluster *cluster);
/* Run until one of the ends of sim/run.h. */
enum lh_sim_end lh_sim_cluster_drive(struct lh_sim_cluster *cluster, struct lh_error *err);
/* The member of a node that is simulated. */
struct lh_sim_member *lh_sim_cluster_member(const struct lh_sim_cluster *cluster, uint32_t node,
                                            uint32_t number);

#endif
