/*
 * The simulator's I/O backend: struct lh_io over one link per SSD, in virtual time. Without hooks
 * (sim/hooks.h), the backend moves no bytes, so that models of any size can be timed, and every
 * request succeeds.
 *
 * Always checked:
 *  1. At most io_depth transfers are in flight, not counting commit requests.
 *  2. No two requests in flight overlap, except that two reads may overlap in a file, and two
 *     writes in memory.
 *
 * Thread: one.
 */
#ifndef LH_SIM_IO_H
#define LH_SIM_IO_H

#include "io/io.h"
#include "sim/link.h"

struct lh_sim_io_opts {
    struct lh_sim_world *world;           /* borrowed until destroy */
    const struct lh_sim_link_opts *links; /* borrowed for the call */
    uint32_t link_count;
    uint32_t file_count;      /* file n is on link n % link_count */
    uint64_t cap_bytes_per_s; /* the limit for all links together; 0: none */
    uint64_t sync_ns;         /* the time of a sync, in addition to a link's latency */
    uint32_t queue_depth_max;
    uint32_t io_depth; /* the limit that the engine must not exceed */
};

struct lh_sim_io_stats {
    uint64_t bytes[LH_SIM_DIRECTION_COUNT]; /* the bytes of requests that succeeded */
};

/*
 * Create a simulated backend.
 *
 * Owns:   *io_out owns its tables; release with (*io_out)->ops->destroy().
 * Errors: -ENOMEM; *io_out is NULL then.
 */
int lh_sim_io_create(const struct lh_sim_io_opts *opts, struct lh_alloc *alloc,
                     struct lh_io **io_out, struct lh_error *err) LH_MUST_CHECK;
/* Set the owner of commit requests, by which they are recognized. */
void lh_sim_io_commit_owner_set(struct lh_io *io, const void *owner);
/* Simulate the end of the process: nothing in flight completes. */
void lh_sim_io_drop(struct lh_io *io);
/* Call this whenever time is about to advance. */
void lh_sim_io_check(struct lh_io *io);
const struct lh_sim_io_stats *lh_sim_io_stats(const struct lh_io *io);

#endif
