/*
 * Chunks: parts of a trainable unit, each read, updated and written as one. Private to csrc/sched.
 *
 * A chunk's states R, M, V in a slab:
 *
 *      IDLE -> READING         lh_chunk_read        a slab is its own
 *      READING -> LOADED       loaded               all reads are done
 *      LOADED -> READING       lh_chunk_reads_more  a feature reads more beside the states
 *      LOADED -> COMPUTING     lh_chunk_compute     its unit is UPDATING
 *      COMPUTING -> COMPUTED   computed             the job is done
 *      COMPUTED -> WRITING     lh_write_back_chunk  (naive: when no other chunk is COMPUTING)
 *      LOADED -> WRITING       states_write_dirty   it is dirty, and a commit or a flush is due
 *      WRITING -> LOADED       slab_keep            it keeps its slab
 *      WRITING -> IDLE         lh_slab_clear        it does not
 *      LOADED -> IDLE          lh_slab_clear        another chunk needs the slab, or the step ended
 *      COMPUTED -> IDLE        lh_slab_clear        the step was rolled back
 */
#ifndef LH_SCHED_CHUNK_H
#define LH_SCHED_CHUNK_H

#include "sched/landing.h"
#include "sched/spill.h"
#include "sched/states.h"
#include "sched/transfer.h"

struct lh_engine;
struct lh_slab;
struct lh_unit;

#define LH_CHUNK_NONE UINT32_MAX

struct lh_chunk {
    uint32_t unit;
    uint32_t slab;  /* LH_CHUNK_NONE while IDLE */
    uint64_t first; /* element in the unit */
    uint64_t count;
    enum lh_chunk_state state;
    bool is_kept; /* its slab stays its own: */
    uint32_t kept_slab;
    bool is_dirty;       /* and has newer R, M, V than any slot: a commit writes them */
    bool is_flushing;    /* they are being written, and nothing else is */
    uint64_t read_step;  /* the step that read it last; 0: never */
    uint64_t read_bytes; /* in that step */
    /*
     * The steps whose plans count it, and the bytes they read for it; by parity, as a step is
     * planned while the one before is not over.
     */
    uint64_t planned_steps[2];
    uint64_t planned_bytes[2];
    uint64_t computed_step; /* the step that computed it last */
    struct lh_landing_chunk landing;
    struct lh_spill_chunk spill;
};

/* Cut the trainable units into the budget's chunks, and choose those that keep a slab. */
int lh_chunk_create(struct lh_engine *engine, struct lh_error *err);
/* Every change of a chunk's state goes through it. */
void lh_chunk_state_set(struct lh_engine *engine, struct lh_chunk *chunk,
                        enum lh_chunk_state state);
/* The next step begins, or the open one's chunks are no longer computed. */
void lh_chunk_recount(struct lh_engine *engine);
/* The extents of R, M and V, in a slab's order, and the bytes of one element (0: no such array). */
uint32_t lh_chunk_extent(const struct lh_unit *unit, uint32_t array);
uint64_t lh_chunk_element_bytes(const struct lh_unit *unit, uint32_t array);
/* Checksums of a unit's extent from offset on, in the slot that the step writes. */
uint32_t *lh_chunk_checksums(struct lh_engine *engine, const struct lh_unit *unit, uint32_t extent,
                             uint64_t offset);
/* Read R, M and V of a chunk into a free slab; what was never written is zeros and is not read. */
void lh_chunk_read(struct lh_engine *engine, struct lh_chunk *chunk, uint32_t slab);
/* One more transfer into the slab of a chunk that is LOADED or READING, at the given place. */
void lh_chunk_reads_more(struct lh_engine *engine, struct lh_chunk *chunk,
                         const struct lh_transfer *transfer);
void lh_chunk_compute(struct lh_engine *engine, struct lh_chunk *chunk);

#endif
