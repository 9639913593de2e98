/*
 * Units that are read in place: frozen parameters in files that are not the store's (the
 * safetensors of a Hugging Face folder). Such units are never copied into the store, and never
 * written.
 *
 * [Note: Read in place] Tensors begin anywhere in such a file, but direct reads cover whole blocks.
 * So a unit is laid out as runs of whole blocks, each read directly to where its parameters will
 * lie; other bytes of its first and last block fill the padding. Then each parameter is moved by
 * less than LH_IN_PLACE_ALIGN bytes, to a lower address that is aligned as torch's allocator would
 * align it: kernels may sum in a different order if the alignment differs, and placement must not
 * change the numbers.
 *
 *      file    ....|..wwwww|wwbbbbb|....      w, b: tensors; |: blocks
 *      read        |..wwwww|wwbbbbb|          one run
 *      moved       |.wwwww.w|wbbbbb.|         both by the same distance: their order stays
 *
 * The last block of a file may be short; the missing bytes are zeros. Each LH_CHECKSUM_BYTES of a
 * run, as read, has a CRC-32C: a file that has changed since is detected in the same way as a disk
 * that returns wrong bytes.
 *
 * [Note: First reads] A checksum of 0 is unknown: the worker that verifies the bytes records theirs
 * instead, if the file has not been written to since it was opened. So a file is not read only to
 * compute its checksums. Whoever declares the unit keeps them, and writes them where the next run
 * finds them before anything that depends on the bytes is committed. (Bytes whose CRC really is 0,
 * one piece in four billion, are never verified.)
 *
 * [Note: Packed units] If files hold quantized forms of a unit's parameters, the unit is read as
 * packed bytes and decoded in place on arrival: there is no second buffer. The runs lie at the end
 * of the unit's memory, those with parameters first, in order, then those with scales and tables.
 * Workers (packed.c) decode the parameters from front to back, to the unit's beginning.
 *
 *      memory      |.............|ppp.ppppp.|ss.s|     p: packed parameters; s: scales
 *      decoded     |PPPPPP.PPPPPPPPPP...ppp.|ss.s|     P: parameters as they are lent
 *
 * A parameter's decoded bytes begin at or before its packed bytes, end at or before their end, and
 * before all scales, so nothing is overwritten that is still needed (lh_unpack_fits() has the exact
 * condition). Parameters that are not quantized are moved in the same way. Reads, checksums and
 * plans count the runs' bytes; the unit's place in memory, and its copy on an accelerator, have all
 * of the unit's bytes.
 *
 * [Note: Kept bytes] Main memory can keep the packed bytes of packed units, in a place of their own
 * (kept.c): several times as many units fit there as decoded ones. A unit is kept from its second
 * load on, which reads to that place, so that memory is not spent on units that stay in memory or
 * on the accelerator anyway. If not all fit, those that are kept are distributed evenly over the
 * order of loads, so that the reads of others are hidden by computation; what is left after a few
 * loads of each is for whichever is loaded next. A unit stays kept. From then on its loads read no
 * files: workers decode it from there to its place, and plans count no bytes for them.
 *
 * The engine borrows everything declared here until it is stopped.
 */
#ifndef LH_SCHED_IN_PLACE_H
#define LH_SCHED_IN_PLACE_H

#include "base/base.h"
#include "compute/unpack.h"

#define LH_IN_PLACE_ALIGN 64
/* The maximum number of jobs that decode a packed unit at the same time. */
#define LH_IN_PLACE_JOB_COUNT 8

struct lh_engine;

struct lh_in_place_file {
    const char *path; /* the file's path, for messages */
    uint64_t bytes;
};

/*
 * Consecutive whole blocks of a file. A unit's runs cover its bytes, in order and without gaps; the
 * runs of a packed unit cover its last bytes.
 */
struct lh_in_place_run {
    uint32_t file;
    uint64_t file_offset;
    uint64_t offset; /* offset in the unit */
    uint64_t bytes;
    uint32_t checksum_first; /* index of the run's first checksum among the unit's checksums */
};

/* The move of a parameter to its aligned place, within one run. */
struct lh_in_place_move {
    uint64_t from; /* offset in the unit, as read; both offsets ascend from move to move */
    uint64_t to;   /* aligned; at or below `from`, by less than LH_IN_PLACE_ALIGN */
    uint64_t bytes;
};

/* A parameter of a packed unit; all places are offsets in the unit. */
struct lh_in_place_pack {
    struct lh_unpack unpack;
    uint64_t from; /* the packed bytes, as read; both offsets ascend from pack to pack */
    uint64_t to;   /* the decoded bytes; aligned to LH_IN_PLACE_ALIGN */
    uint64_t scales;
    uint64_t table;
    uint64_t nested;
    uint64_t nested_table;
    uint64_t zeros;
    uint64_t index;
};

struct lh_in_place_unit {
    uint32_t unit; /* index of the unit; its param_extent is LH_ENGINE_EXTENT_NONE */
    const struct lh_in_place_run *runs;
    uint32_t run_count;
    const struct lh_in_place_move *moves; /* the unit's moves, in order */
    uint32_t move_count;
    const struct lh_in_place_pack *packs; /* in order; without moves */
    uint32_t pack_count;                  /* above 0: the unit is packed */
    uint32_t *checksums;                  /* [Note: First reads]; others may read them meanwhile */
    uint32_t checksum_count;
};

struct lh_in_place_opts {
    const struct lh_in_place_file *files;
    uint32_t file_count;
    uint32_t file_first; /* the index of files[0] among io's files */
    const struct lh_in_place_unit *units;
    uint32_t unit_count;
    uint8_t *kept_memory; /* for packed bytes that are kept; aligned to LH_BLOCK_BYTES */
    uint64_t kept_bytes;  /* 0: none are kept */
    /*
     * Whether the file of an index is as it was when it was opened. Thread: workers. NULL: files do
     * not change, and every checksum is known or may be recorded.
     */
    bool (*is_unchanged)(const void *context, uint32_t file);
    const void *context;
};

/* The packed bytes that are kept ([Note: Kept bytes]). Thread: any. */
uint64_t lh_kept_taken_bytes(const struct lh_engine *engine);

#endif
