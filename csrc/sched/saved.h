/*
 * Saved tensors (activations) that leave the accelerator, or the training thread's memory, until
 * backward needs them: in main memory, or on SSD.
 *
 *      put(bytes) -> is_taken: the tensor is free -> fetch(target) -> wait: they are back -> drop
 *
 * The main memory for saved tensors is fixed. A tensor of LH_SAVED_TIER_MEMORY stays there as long
 * as the transit bytes are left for the others; otherwise it goes to SSD as they do: it is written
 * as soon as it is in main memory, and its room is then given to the next one. fetch() announces
 * that backward will need the tensor soon: it is read (if it left) and copied to target. Where
 * computation is in main memory there is no target: it is read in place until it is dropped.
 *
 * Puts are served in order, and so are fetches, except that a tensor that a thread waits for comes
 * first and evicts prefetched ones. This always makes progress if the largest tensor fits three
 * times. Every byte read from SSD is checked against the CRC-32C of what was written.
 *
 * Saved tensors belong to no commit: they lie in an unnamed store of their own.
 *
 * Thread: put, fetch and wait: one thread at a time for one item; drop: any thread, once.
 * Source: LoHan IV-C, IV-D (activations to main memory and SSD), Fuyou 4.4 (pipelined swapping).
 */
#ifndef LH_SCHED_SAVED_H
#define LH_SCHED_SAVED_H

#include "base/alloc.h"
#include "base/error.h"

struct lh_engine;
struct lh_store;

#define LH_SAVED_NONE UINT32_MAX
/* On SSD items begin at multiples of this, as checksums do. */
#define LH_SAVED_SSD_GRANULE LH_CHECKSUM_BYTES

enum lh_saved_tier {
    LH_SAVED_TIER_MEMORY = 0,
    LH_SAVED_TIER_SSD = 1,
};

struct lh_saved_opts {
    uint8_t *memory;       /* LH_BLOCK_BYTES-aligned, known to io and dev; borrowed until destroy */
    uint64_t memory_bytes; /* 0: nothing can be put */
    uint64_t transit_bytes; /* the part of them that tensors that stay must not use */
    struct lh_store *store; /* one extent; borrowed until destroy. NULL: all stay in memory */
    uint32_t file_first;    /* where the store's files begin among io's */
    uint32_t item_max;      /* the most tensors at a time */
};

/*
 * Save `bytes` bytes at pointer, which must not change until lh_saved_is_taken(). With an
 * accelerator pointer is in its memory, and the copy waits for what its stream was given so far.
 *
 * Errors: -E2BIG (does not fit main memory three times: keep it), -EAGAIN (item_max are held: keep
 *         it), the engine's error. Does not wait.
 */
int lh_saved_put(struct lh_engine *engine, const void *pointer, uint64_t bytes,
                 enum lh_saved_tier tier, uint32_t *item_out) LH_MUST_CHECK;
bool lh_saved_is_taken(const struct lh_engine *engine, uint32_t item);
/*
 * Wait until at most bytes_max are put and not yet taken. Returns 1, 0 after timeout_ms, or
 * -errno.
 */
int lh_saved_room_wait(struct lh_engine *engine, uint64_t bytes_max, int timeout_ms) LH_MUST_CHECK;

/*
 * Bring an item back, to target in the accelerator's memory (NULL where computation is in main
 * memory). At most once per item. The copy waits for what the stream was given so far.
 */
void lh_saved_fetch(struct lh_engine *engine, uint32_t item, void *target);
/*
 * Wait for a fetched item. 1: what the stream is given from now on finds the bytes at target, or
 * they are at lh_saved_address(); 0: timeout_ms passed; -errno.
 */
int lh_saved_wait(struct lh_engine *engine, uint32_t item, int timeout_ms) LH_MUST_CHECK;
/* The item's bytes in main memory, valid from a successful wait until drop. */
const uint8_t *lh_saved_address(const struct lh_engine *engine, uint32_t item);

/*
 * Free an item. Asserted: it is taken. If it was fetched to a target it must have been waited for
 * (even if that failed), so that nothing copies to or from the caller's memory any more.
 */
void lh_saved_drop(struct lh_engine *engine, uint32_t item);

#endif
