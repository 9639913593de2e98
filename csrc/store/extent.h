/*
 * Where extents lie on the files of a store: pure functions, no file is touched here.
 *
 * Every slot of every extent ("place") is cut into stripes. Its full stripes continue one sequence
 * that runs through all places; a repeating cycle says which file the next stripe of that sequence
 * goes to, so that every file gets its share of any stretch of it. What is left of a place, less
 * than a stripe, is its tail; tails go to the file that is owed most, so that many small extents
 * balance as well.
 *
 *      place             0                 1          2
 *      stripes           0   1   2   tail  3   tail   tail     cycle: 0 1 0 (weights 2 : 1)
 *      file 0           [0]     [2]  [t]  [3]
 *      file 1               [1]                [t]   [t]
 *
 * The part of a place on one file is contiguous there: its stripes, then its tail if it is here.
 *
 *      offset of stripe s on file f = data_offset[f] + stripes_before(s, f) * stripe_bytes
 *                                   + the tails on f of earlier places
 *
 * The cycle and the tails' files are kept on disk (docs/store-format.md), so the rules that choose
 * them may change without a new format.
 *
 * Invariants:
 *  1. Every byte of every place is at exactly one place of one file, and shares it with none.
 *  2. After any number of stripes each file has its share of them to within one stripe, and never
 *     more than one stripe of tails above its share of those.
 *  3. stripe_bytes is a multiple of LH_CHECKSUM_BYTES: what a checksum covers is in one file.
 *
 * Thread: any; a layout does not change after init.
 */
#ifndef LH_STORE_EXTENT_H
#define LH_STORE_EXTENT_H

#include "store/store.h"

/* Long enough for a drive to run at full speed on one stripe, short enough to spread one chunk. */
#define LH_STORE_STRIPE_BYTES (2 * LH_MIB)
/* Weights are kept to one part in this many. */
#define LH_STORE_CYCLE_STRIPES_MAX 1024
#define LH_STORE_SLOT_COUNT_MAX 2
/* Larger weights could overflow their sum. */
#define LH_STORE_WEIGHT_MAX (UINT64_C(1) << 56)

_Static_assert(LH_STORE_STRIPE_BYTES % LH_CHECKSUM_BYTES == 0, "a checksum lies in one file");
_Static_assert(LH_STORE_CYCLE_STRIPES_MAX >= LH_STORE_DIRECTORY_COUNT_MAX, "a share for each");

/* What decides where everything lies; all of it is on disk. Borrows its arrays. */
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
    uint64_t stripe_count; /* full ones */
    uint64_t tail_bytes;   /* 0: none */
    uint32_t tail_file;
};

struct lh_store_layout {
    uint32_t file_count;
    uint32_t place_count;
    uint64_t stripe_bytes;
    uint32_t cycle_stripes;
    uint8_t cycle[LH_STORE_CYCLE_STRIPES_MAX];
    uint32_t shares[LH_STORE_DIRECTORY_COUNT_MAX]; /* stripes of a cycle on each file */
    /* of the cycle's first stripes, how many are on each file */
    uint16_t before[LH_STORE_CYCLE_STRIPES_MAX][LH_STORE_DIRECTORY_COUNT_MAX];
    uint64_t data_offset[LH_STORE_DIRECTORY_COUNT_MAX];
    uint64_t file_bytes[LH_STORE_DIRECTORY_COUNT_MAX]; /* where the data of each file end */
    struct lh_store_place *places;
    uint64_t *tails_before; /* file_count a place: bytes of earlier tails on each file */
};

static inline uint32_t lh_store_place_index(uint32_t extent, uint32_t slot)
{
    return extent * LH_STORE_SLOT_COUNT_MAX + slot;
}

/*
 * The cycle for weights (NULL: equal): shares are the weights in lowest terms where their sum fits
 * a cycle, else rounded to one part in LH_STORE_CYCLE_STRIPES_MAX, at least one each. Returns its
 * length. Weights are 1 to LH_STORE_WEIGHT_MAX: asserted.
 */
uint32_t lh_store_cycle_plan(const uint64_t *weights, uint32_t file_count,
                             uint8_t cycle_out[LH_STORE_CYCLE_STRIPES_MAX]);

/* The file of every place's tail; shape's other members are set. */
void lh_store_tails_plan(const struct lh_store_shape *shape, uint8_t *tail_files_out);

/*
 * Place everything. shape is valid (asserted), its arrays are borrowed for the call.
 *
 * Owns:   layout owns two arrays; release with lh_store_layout_deinit().
 * Errors: -ENOMEM; layout is empty then.
 */
int lh_store_layout_init(struct lh_store_layout *layout, const struct lh_store_shape *shape,
                         const uint64_t *data_offset, struct lh_alloc *alloc, struct lh_error *err)
    LH_MUST_CHECK;
void lh_store_layout_deinit(struct lh_store_layout *layout, struct lh_alloc *alloc);

/* As lh_store_map(), for a place. */
int lh_store_layout_map(const struct lh_store_layout *layout, uint32_t place, uint64_t offset,
                        uint64_t bytes, struct lh_store_piece *pieces, uint32_t piece_max);

#endif
