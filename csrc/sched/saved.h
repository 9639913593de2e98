/*
 * Saved tensors (activations) that leave the accelerator, or the training thread's memory, until
 * backward needs them: in main memory, or on SSD.
 *
 *      put(bytes) -> is_taken: the tensor may be freed -> fetch(target) -> wait: bytes back -> drop
 *
 * The main memory for saved tensors is fixed. A tensor of LH_SAVED_TIER_MEMORY stays there if there
 * is room beside the transit bytes. Other tensors go to SSD through the transit bytes: each is
 * written as soon as it is in main memory, and its room is then given to the next tensor. fetch()
 * announces that backward will need the tensor soon: the tensor is read (if it is on SSD) and
 * copied to target. If computation is in main memory there is no target: backward reads the tensor
 * where it lies, until it is dropped.
 *
 * Puts are served in order, and so are fetches, except that a tensor for which a thread waits comes
 * first and evicts prefetched tensors. Puts and fetches always make progress if the largest tensor
 * fits three times. Every byte read from SSD is checked against the CRC-32C of what was written.
 *
 * Saved tensors belong to no commit: on SSD they are in an unnamed store of their own.
 *
 * Thread: put, fetch and wait may be called by one thread at a time for an item; drop by any
 *         thread, once.
 * Source: LoHan IV-C, IV-D (activations to main memory and SSD), Fuyou 4.4 (pipelined swapping).
 */
#ifndef LH_SCHED_SAVED_H
#define LH_SCHED_SAVED_H

#include "base/alloc.h"
#include "base/error.h"

struct lh_engine;
struct lh_store;

#define LH_SAVED_NONE UINT32_MAX
/* On SSD, items begin at multiples of this, like the blocks that have a checksum. */
#define LH_SAVED_SSD_GRANULE LH_CHECKSUM_BYTES

enum lh_saved_tier {
    LH_SAVED_TIER_MEMORY = 0,
    LH_SAVED_TIER_SSD = 1,
};

struct lh_saved_opts {
    uint8_t *memory;       /* LH_BLOCK_BYTES-aligned, known to io and dev; borrowed until destroy */
    uint64_t memory_bytes; /* 0: nothing can be put */
    uint64_t transit_bytes; /* the part of memory_bytes that tensors that stay must not use */
    struct lh_store *store; /* has one extent; borrowed until destroy. NULL: all stay in memory */
    uint32_t file_first;    /* index of the store's first file among io's files */
    uint32_t item_max;      /* the maximum number of tensors at a time */
};

/*
 * Save `bytes` bytes at pointer, which must not change until lh_saved_is_taken(). With an
 * accelerator, pointer is in the accelerator's memory, and the copy waits for what the current
 * stream was given so far.
 *
 * Errors: -E2BIG (larger than the transit bytes, or without a store than the memory), -EAGAIN
 *         (item_max tensors are held); the caller then keeps the tensor. The engine's error. Does
 *         not wait.
 */
int lh_saved_put(struct lh_engine *engine, const void *pointer, uint64_t bytes,
                 enum lh_saved_tier tier, uint32_t *item_out) LH_MUST_CHECK;
bool lh_saved_is_taken(const struct lh_engine *engine, uint32_t item);
/*
 * Wait until tensors that are put and not yet taken have at most bytes_max bytes. Returns 1, 0
 * after timeout_ms, or -errno.
 */
int lh_saved_room_wait(struct lh_engine *engine, uint64_t bytes_max, int timeout_ms) LH_MUST_CHECK;

/*
 * Bring an item back, to target in the accelerator's memory (NULL if computation is in main
 * memory). Call this at most once per item. The copy waits for what the current stream was given so
 * far.
 */
void lh_saved_fetch(struct lh_engine *engine, uint32_t item, void *target);
/*
 * Wait for a fetched item. Returns 1 (work that the current stream is given from now on finds the
 * bytes at target, or without an accelerator they are at lh_saved_address()), 0 after timeout_ms,
 * or -errno.
 */
int lh_saved_wait(struct lh_engine *engine, uint32_t item, int timeout_ms) LH_MUST_CHECK;
/* The item's bytes in main memory, valid from a successful wait until drop. */
const uint8_t *lh_saved_address(const struct lh_engine *engine, uint32_t item);

/*
 * Free an item, which must be taken (asserted). If the item was fetched to a target, a thread must
 * have waited for it (even if the wait failed), so that no copy still uses the caller's memory.
 */
void lh_saved_drop(struct lh_engine *engine, uint32_t item);

#endif
