/*
 * Units that are read where somebody else keeps them: frozen parameters in files that are not the
 * store's (safetensors of a folder of Hugging Face's). They are never copied, and never written.
 *
 * [Note: Read in place] Tensors begin anywhere in such a file, direct reads at whole blocks. So a
 * unit is laid out as runs of whole blocks, each read straight to where its parameters will lie;
 * what else is in its first and last block fills the padding. Then each parameter moves back to
 * where torch's allocator would have aligned it, by less than LH_IN_PLACE_ALIGN bytes: kernels may
 * sum in another order where memory begins elsewhere, and placement must not change the numbers.
 *
 *      file    ....|..wwwww|wwbbbbb|....      w, b: tensors; |: blocks
 *      read        |..wwwww|wwbbbbb|          one run
 *      moved       |.wwwww.w|wbbbbb.|         both by the same distance: their order stays
 *
 * The last block of a file comes short; what is missing is zeros. Each LH_CHECKSUM_BYTES of a run,
 * as read, has a CRC-32C, made when the store was: a file that changed since is found as a disk
 * that reads wrong is.
 *
 * Everything here is borrowed until the engine is stopped.
 */
#ifndef LH_SCHED_IN_PLACE_H
#define LH_SCHED_IN_PLACE_H

#include "base/base.h"

#define LH_IN_PLACE_ALIGN 64

struct lh_in_place_file {
    const char *path; /* for messages */
    uint64_t bytes;
};

/* Whole blocks of a file; the runs of a unit are its bytes, in order and without a gap. */
struct lh_in_place_run {
    uint32_t file;
    uint64_t file_offset;
    uint64_t offset; /* in the unit */
    uint64_t bytes;
    uint32_t checksum_first; /* of the unit's */
};

/* Inside of one run. */
struct lh_in_place_move {
    uint64_t from; /* in the unit, as read; behind the move before, as `to` */
    uint64_t to;   /* aligned; at or below `from`, by less than LH_IN_PLACE_ALIGN */
    uint64_t bytes;
};

struct lh_in_place_unit {
    uint32_t unit; /* its param_extent is LH_ENGINE_EXTENT_NONE */
    const struct lh_in_place_run *runs;
    uint32_t run_count;
    const struct lh_in_place_move *moves; /* in order */
    uint32_t move_count;
    const uint32_t *checksums;
    uint32_t checksum_count;
};

struct lh_in_place_opts {
    const struct lh_in_place_file *files;
    uint32_t file_count;
    uint32_t file_first; /* where they begin among io's */
    const struct lh_in_place_unit *units;
    uint32_t unit_count;
};

#endif
