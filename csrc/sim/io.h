/*
 * The simulator's I/O backend: struct lh_io over a disk in memory, one link per file, in virtual
 * time. With a disk it moves bytes; without one (timing only), nothing is stored, read or written,
 * so that models of any size can be timed.
 *
 * Each request draws the faults of a request (sim/fault.h) by seed. SPIKE, REORDER and SHORT do not
 * change results. After ERROR, DROP, DEAD and SPACE, the engine has to return their code. After
 * FLIP and STALE, it must not use the bytes. LIE, LOST and MISDIRECT show when the place is read.
 * After HANG, the engine must not report anything that depends on the request as done.
 *
 * Always checked:
 *  1. At most io_depth transfers are in flight, not counting commit requests.
 *  2. No two requests in flight overlap, except that two reads may overlap in a file, and two
 *     writes in memory.
 *  3. The bytes of a write in flight do not change; memory that is being read into holds garbage
 *     until the read completes.
 *  4. Bytes that a fault has flipped in a read are never part of a write.
 *
 * Thread: one.
 */
#ifndef LH_SIM_IO_H
#define LH_SIM_IO_H

#include "io/io.h"
#include "sim/disk.h"
#include "sim/link.h"

#define LH_SIM_FLIP_COUNT_MAX 16

struct lh_sim_io_opts {
    struct lh_sim_world *world;           /* borrowed until destroy */
    struct lh_sim_disk *disk;             /* borrowed until destroy; NULL: timing only */
    const struct lh_sim_link_opts *links; /* borrowed for the call */
    uint32_t link_count;
    uint32_t file_count;      /* file n is on link n % link_count; with a disk: link_count */
    uint64_t cap_bytes_per_s; /* for all links together; 0: none */
    uint64_t sync_ns;         /* in addition to a link's latency */
    uint32_t queue_depth_max;
    uint32_t io_depth; /* the limit that the engine must not exceed */
    struct lh_sim_faults faults;
    uint64_t seed; /* of the faults */
};

struct lh_sim_io_stats {
    uint64_t bytes[LH_SIM_DIRECTION_COUNT]; /* of requests that succeeded */
    uint64_t sync_count;
    uint64_t write_count; /* submitted */
    uint32_t hang_count;  /* requests in flight that never complete */
    uint32_t in_flight_max;
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
/*
 * End the process: any blocks of writes in flight may have been written; nothing completes. Call
 * this before the memory of their buffers is unmapped.
 */
void lh_sim_io_crash(struct lh_io *io, struct lh_sim_random *random);
/* Call this whenever time is about to advance. */
void lh_sim_io_check(struct lh_io *io);
const struct lh_sim_io_stats *lh_sim_io_stats(const struct lh_io *io);
/* Whether any block in memory has a flipped bit that has not been overwritten. */
bool lh_sim_io_has_flips(const struct lh_io *io);
/* The number of blocks in [base, base + bytes) that still have a flipped bit. */
uint32_t lh_sim_io_flip_count(const struct lh_io *io, const uint8_t *base, uint64_t bytes);
/* Forget flipped bits in [base, base + bytes), which has been overwritten. */
void lh_sim_io_flips_forget(struct lh_io *io, const uint8_t *base, uint64_t bytes);

#endif
