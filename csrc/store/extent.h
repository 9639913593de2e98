/*
 * Maps extents to the files of a store. These are pure functions; they access no files.
 *
 * Every slot of every extent (a "place") is divided into stripes. The full stripes of all places
 * form one sequence, and a repeating cycle assigns each stripe of that sequence to a file, so that
 * every file gets its share of any part of the sequence. The remainder of a place, less than a
 * stripe, is its tail. A tail goes to the file that is furthest below its share of the tails, so
 * that many small extents are balanced, too.
 *
 *      place             0                 1          2
 *      stripes           0   1   2   tail  3   tail   tail     cycle: 0 1 0 (weights 2 : 1)
 *      file 0           [0]     [2]  [t]  [3]
 *      file 1               [1]                [t]   [t]
 *
 * The bytes of a place that are on one file are contiguous: first the stripes, then the tail if it
 * is on that file.
 *
 *      offset of stripe s on file f = data_offset[f] + stripes_before(s, f) * stripe_bytes
 *                                   + the tails on f of earlier places
 *
 * The cycle and the files of the tails are stored on disk (docs/store-format.md), so the rules that
 * choose them can change without a new format.
 *
 * Invariants:
 *  1. Every byte of every place is at exactly one position of one file, and no two bytes share it.
 *  2. After any number of stripes each file has its share of them to within one stripe, and its
 *     tails never exceed its share of the tails by more than one stripe.
 *  3. stripe_bytes is a multiple of LH_CHECKSUM_BYTES: the bytes of a checksum are in one file.
 *
 * Thread: any; a layout does not change after init.
 */
#ifndef LH_STORE_EXTENT_H
#define LH_STORE_EXTENT_H

#include "store/store.h"

/* This is large enough for a drive's full speed, and lets one chunk span several drives. */
#define LH_STORE_STRIPE_BYTES (2 * LH_MIB)
/* The maximum length of a cycle. Weights that do not fit are rounded to one part in this many. */
#define LH_STORE_CYCLE_STRIPES_MAX 1024
#define LH_STORE_SLOT_COUNT_MAX 2
/* The sum of larger weights could overflow. */
#define LH_STORE_WEIGHT_MAX (UINT64_C(1) << 56)

_Static_assert(LH_STORE_STRIPE_BYTES % LH_CHECKSUM_BYTES == 0, "a checksum lies in one file");
_Static_assert(LH_STORE_CYCLE_STRIPES_MAX >= LH_STORE_DIRECTORY_COUNT_MAX, "a share for each");

/* Everything that determines the layout; all of it is on disk. The arrays are borrowed. */
struct lh_store_shape {
    uint32_t file_count;
    uint32_t extent_count;
    uint32_t group_count;
    uint64_t stripe_bytes;
    uint32_t cycle_stripes;                     /* how many of cycle[] are used */
    uint8_t cycle[LH_STORE_CYCLE_STRIPES_MAX];  /* the file of each stripe of a cycle */
    const struct lh_store_extent_desc *extents; /* extent_count */
    const uint8_t *slot_counts;                 /* group_count */
    const uint8_t *tail_files;                  /* LH_STORE_SLOT_COUNT_MAX * extent_count */
};

struct lh_store_place {
    uint64_t first_stripe;
    uint64_t stripe_count; /* full stripes */
    uint64_t tail_bytes;   /* 0: no tail */
    uint32_t tail_file;
};

struct lh_store_layout {
    uint32_t file_count;
    uint32_t place_count;
    uint64_t stripe_bytes;
    uint32_t cycle_stripes;
    uint8_t cycle[LH_STORE_CYCLE_STRIPES_MAX];
    uint32_t shares[LH_STORE_DIRECTORY_COUNT_MAX]; /* stripes of a cycle on each file */
    /* before[n][file]: how many of the first n stripes of a cycle are on file */
    uint16_t before[LH_STORE_CYCLE_STRIPES_MAX][LH_STORE_DIRECTORY_COUNT_MAX];
    uint64_t data_offset[LH_STORE_DIRECTORY_COUNT_MAX];
    uint64_t file_bytes[LH_STORE_DIRECTORY_COUNT_MAX]; /* the end of the data of each file */
    struct lh_store_place *places;
    uint64_t *tails_before; /* file_count per place: bytes of earlier tails on each file */
};

static inline uint32_t lh_store_place_index(uint32_t extent, uint32_t slot)
{
    return extent * LH_STORE_SLOT_COUNT_MAX + slot;
}

/*
 * Plan the cycle for weights (NULL: equal). The shares are the weights in lowest terms if their sum
 * fits in a cycle. Otherwise they are rounded to parts of LH_STORE_CYCLE_STRIPES_MAX, at least one
 * part each. Returns the length of the cycle. Weights are 1 to LH_STORE_WEIGHT_MAX (asserted).
 */
uint32_t lh_store_cycle_plan(const uint64_t *weights, uint32_t file_count,
                             uint8_t cycle_out[LH_STORE_CYCLE_STRIPES_MAX]);

/* Choose the file of every place's tail. The other members of shape must be set. */
void lh_store_tails_plan(const struct lh_store_shape *shape, uint8_t *tail_files_out);

/*
 * Compute the layout. shape must be valid (asserted); its arrays are borrowed for the call.
 *
 * Owns:   layout owns two arrays; release with lh_store_layout_deinit().
 * Errors: -ENOMEM; layout is then empty.
 */
int lh_store_layout_init(struct lh_store_layout *layout, const struct lh_store_shape *shape,
                         const uint64_t *data_offset, struct lh_alloc *alloc, struct lh_error *err)
    LH_MUST_CHECK;
void lh_store_layout_deinit(struct lh_store_layout *layout, struct lh_alloc *alloc);

/* Map a range of a place to pieces of files, with the results of lh_store_map(). */
int lh_store_layout_map(const struct lh_store_layout *layout, uint32_t place, uint64_t offset,
                        uint64_t bytes, struct lh_store_piece *pieces, uint32_t piece_max);

#endif
