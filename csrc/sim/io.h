/*
 * The I/O backend of the simulator: struct lh_io over a disk in memory, one link a file, in virtual
 * time. With a disk it moves bytes; without one (timing only) nothing is kept, read or written, so
 * that models of any size can be timed.
 *
 * Each request draws the faults of a request (sim/fault.h) by seed. SPIKE, REORDER and SHORT change
 * no result. After ERROR, DROP, DEAD and SPACE the engine has to answer their code. After FLIP and
 * STALE it may not use what it was given. LIE, LOST and MISDIRECT show when somebody reads the
 * place. After HANG nothing that waits for the request may be claimed.
 *
 * Checked always:
 *  1. Not more transfers are in flight than io_depth, commit requests not counted.
 *  2. No two requests in flight overlap in a file, or in memory, but for two reads or two writes
 *     respectively that only look.
 *  3. The bytes of a write in flight do not change; memory that is being read into holds garbage
 *     until the read comes back.
 *  4. Bytes of a read that a fault has flipped are never part of a write.
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
    uint32_t file_count;      /* file n is on link n % link_count; with a disk as many as links */
    uint64_t cap_bytes_per_s; /* of all links together; 0: none */
    uint64_t sync_ns;         /* on top of a link's latency */
    uint32_t queue_depth_max;
    uint32_t io_depth; /* of the engine: what it promises not to exceed */
    struct lh_sim_faults faults;
    uint64_t seed; /* of the faults */
};

struct lh_sim_io_stats {
    uint64_t bytes[LH_SIM_DIRECTION_COUNT]; /* of requests that came back well */
    uint64_t sync_count;
    uint64_t write_count; /* submitted */
    uint32_t hang_count;  /* requests in flight that never come back */
    uint32_t in_flight_max;
};

/*
 * Owns:   *io_out owns its tables; release with (*io_out)->ops->destroy().
 * Errors: -ENOMEM; *io_out is NULL then.
 */
int lh_sim_io_create(const struct lh_sim_io_opts *opts, struct lh_alloc *alloc,
                     struct lh_io **io_out, struct lh_error *err) LH_MUST_CHECK;
/* The requests whose owner this is are a commit's. */
void lh_sim_io_commit_owner_set(struct lh_io *io, const void *owner);
/*
 * The process ends: of writes in flight any blocks may be there; nothing comes back any more. To be
 * called before the memory of their buffers goes.
 */
void lh_sim_io_crash(struct lh_io *io, struct lh_sim_random *random);
/* To be called whenever time is about to go on. */
void lh_sim_io_check(struct lh_io *io);
const struct lh_sim_io_stats *lh_sim_io_stats(const struct lh_io *io);
/* Whether any block holds a flipped bit that nobody has written yet. */
bool lh_sim_io_has_flips(const struct lh_io *io);
/* Blocks with a flipped bit that lie in [base, base + bytes) still, written by nobody yet. */
uint32_t lh_sim_io_flip_count(const struct lh_io *io, const uint8_t *base, uint64_t bytes);
/* What is in [base, base + bytes) is no longer what was read there. */
void lh_sim_io_flips_forget(struct lh_io *io, const uint8_t *base, uint64_t bytes);

#endif
