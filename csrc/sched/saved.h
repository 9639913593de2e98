/*
 * Saved tensors (activations) that leave the accelerator, or the training thread's memory, until
 * backward needs them: in main memory, or on SSD.
 *
 *      put(bytes) -> is_taken: the tensor is free -> fetch(target) -> wait: they are back -> drop
 *
 * Main memory for them is fixed. What is to stay there (LH_SAVED_TIER_MEMORY) does while transit
 * bytes are left for the others, and else goes to SSD as those do: written as soon as it is in main
 * memory, which is then given to the next one. fetch() says that backward will need it soon: it is
 * read (if it left), and copied to target. Where computation is in main memory there is no target:
 * it is read in place until it is dropped.
 *
 * Puts are served in their order, and so are fetches, but that one somebody waits for comes first
 * and takes back the room of those fetched ahead. So all ends while the largest one fits thrice.
 * Every byte read from SSD is checked against the CRC-32C of what was written.
 *
 * What is put belongs to nobody's commit: it lies in a store of its own, that has no name.
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
/* Items begin at multiples of it on SSD, as checksums do. */
#define LH_SAVED_SSD_GRANULE LH_CHECKSUM_BYTES

enum lh_saved_tier {
    LH_SAVED_TIER_MEMORY = 0,
    LH_SAVED_TIER_SSD = 1,
};

struct lh_saved_opts {
    uint8_t *memory;       /* LH_BLOCK_BYTES-aligned, known to io and dev; borrowed until destroy */
    uint64_t memory_bytes; /* 0: nothing can be put */
    uint64_t transit_bytes; /* of these, kept free of what stays */
    struct lh_store *store; /* one extent; borrowed until destroy. NULL: nothing leaves memory */
    uint32_t file_first;    /* where the store's files begin among io's */
    uint32_t item_max;      /* at once */
};

/*
 * Take bytes at pointer, which stay as they are until lh_saved_is_taken(). With an accelerator
 * pointer is in its memory, and the copy comes behind what its stream has computed so far.
 *
 * Errors: -E2BIG (does not fit main memory thrice: keep it), -EAGAIN (item_max are held: keep it),
 *         the engine's error. Does not wait.
 */
int lh_saved_put(struct lh_engine *engine, const void *pointer, uint64_t bytes,
                 enum lh_saved_tier tier, uint32_t *item_out) LH_MUST_CHECK;
bool lh_saved_is_taken(const struct lh_engine *engine, uint32_t item);
/* Waits until what was put and not taken is at most bytes_max. 1, 0 (timeout), -errno. */
int lh_saved_room_wait(struct lh_engine *engine, uint64_t bytes_max, int timeout_ms) LH_MUST_CHECK;

/*
 * Bring it back, to target in the accelerator's memory (NULL where computation is in main memory);
 * once. Behind what the stream has computed so far.
 */
void lh_saved_fetch(struct lh_engine *engine, uint32_t item, void *target);
/*
 * After fetch: 1: what the stream is given from here on finds the bytes at target, or they are at
 * lh_saved_address(); 0: timeout_ms passed; -errno.
 */
int lh_saved_wait(struct lh_engine *engine, uint32_t item, int timeout_ms) LH_MUST_CHECK;
/* In main memory, valid from a successful wait until drop. */
const uint8_t *lh_saved_address(const struct lh_engine *engine, uint32_t item);

/*
 * It is of no use any more. Asserted: it is taken, and if it was fetched to a target, waited for
 * (with an error at worst): nobody copies to or from the caller's memory.
 */
void lh_saved_drop(struct lh_engine *engine, uint32_t item);

#endif
