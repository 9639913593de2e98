/*
 * The hooks of requests: they move the bytes of the engine's requests to and from a lh_sim_disk,
 * and draw the faults of each request (lives/fault.h) by seed.
 *
 * SPIKE, REORDER and SHORT do not change results. After ERROR, DROP, DEAD and SPACE, the engine has
 * to return the fault's error code. After FLIP and STALE, it must not use the bytes. LIE, LOST and
 * MISDIRECT become visible when the affected place is read. After HANG, the engine must not report
 * anything that depends on the request as done.
 *
 * Always checked:
 *  1. The bytes of a write in flight do not change; memory that is being read into holds garbage
 *     until the read completes.
 *  2. Bytes that a fault has flipped in a read are never part of a write.
 *
 * Thread: one.
 */
#ifndef LH_TEST_SIM_DRIVES_H
#define LH_TEST_SIM_DRIVES_H

#include "io/io.h"
#include "lives/disk.h"

struct lh_engine;

#define LH_SIM_FLIP_COUNT_MAX 16

/* A request in flight, and the faults drawn for it. */
struct lh_sim_drives_slot {
    struct lh_io_request *request;
    uint64_t moved_bytes;
    int result;
    uint64_t mark;   /* SYNC: the writes before this mark are covered */
    uint32_t crc;    /* WRITE: the checksum of the buffer at submit */
    uint64_t offset; /* the actual target, if a write is misdirected */
    uint64_t flip_bit;
    bool is_flipped;
    bool is_stale;   /* READ: returns the durable bytes */
    bool is_lost;    /* WRITE: succeeds without effect; SYNC: covers nothing */
    bool is_dropped; /* SYNC: the writes it would have covered go to limbo */
    bool hangs;
};

struct lh_sim_flip {
    const uint8_t *base;
    uint64_t bytes;
};

struct lh_sim_drives {
    struct lh_sim_disk *disk; /* borrowed */
    struct lh_sim_faults faults;
    struct lh_sim_random random;
    bool has_faults;
    struct lh_sim_drives_slot *slots;
    struct lh_sim_flip flips[LH_SIM_FLIP_COUNT_MAX];
    uint32_t flip_count;
    uint64_t write_count; /* submitted in this life */
    uint32_t hang_count;  /* requests in flight that never complete */
};

/* Owns: *drives owns its slots; release with lh_sim_drives_deinit(). */
void lh_sim_drives_init(struct lh_sim_drives *drives, struct lh_sim_disk *disk, uint32_t slot_count,
                        struct lh_alloc *alloc);
void lh_sim_drives_deinit(struct lh_sim_drives *drives, struct lh_alloc *alloc);
/* Begin a life with these faults (NULL: none). */
void lh_sim_drives_restart(struct lh_sim_drives *drives, const struct lh_sim_faults *faults,
                           uint64_t seed);
/*
 * Forget flipped bits that were overwritten before anything used them: a slab into which gradients
 * are gathered may have held a chunk that was read ahead, and states that were never written are
 * set to zero by the job that updates their chunk.
 */
void lh_sim_drives_overwritten_forget(struct lh_sim_drives *drives, const struct lh_engine *engine);
/* The number of blocks in [base, base + bytes) that still have a flipped bit. */
uint32_t lh_sim_drives_flip_count(const struct lh_sim_drives *drives, const uint8_t *base,
                                  uint64_t bytes);

/* The hooks; context is a struct lh_sim_lives. */
bool lh_sim_drives_request_begun(void *context, uint32_t slot, struct lh_io_request *request,
                                 struct lh_sim_transfer *transfer);
bool lh_sim_drives_request_continued(void *context, uint32_t slot,
                                     struct lh_sim_transfer *transfer);
int lh_sim_drives_request_done(void *context, uint32_t slot, uint64_t *offset);
void lh_sim_drives_request_dropped(void *context, uint32_t slot);

#endif
