/*
 * Chunks: parts of a trainable unit, each read, updated and written as one. Private to csrc/sched.
 *
 * A chunk's states R, M, V in a slab:
 *
 *      IDLE -> READING         lh_chunk_read        a slab is its own
 *      READING -> LOADED       read_done            all reads are done
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
    bool is_kept; /* the chunk has a slab of its own, kept_slab */
    uint32_t kept_slab;
    bool is_dirty;       /* R, M, V in the slab are newer than on SSD: a commit writes them */
    bool is_flushing;    /* its dirty R, M and V are being written for a commit or a flush */
    uint64_t read_step;  /* the last step that read the chunk; 0: no step */
    uint64_t read_bytes; /* the bytes read for the chunk in read_step */
    /*
     * The steps whose plans count the chunk, and the bytes that they plan to read for it. Indexed
     * by the step's parity, because a step is planned while the previous one is not over.
     */
    uint64_t planned_steps[2];
    uint64_t planned_bytes[2];
    uint64_t computed_step; /* the last step that computed the chunk */
    struct lh_landing_chunk landing;
    struct lh_spill_chunk spill;
};

/* Divide the trainable units into the budget's chunks, and choose the chunks that keep a slab. */
int lh_chunk_create(struct lh_engine *engine, struct lh_error *err);
/* Change a chunk's state; only this function changes it. */
void lh_chunk_state_set(struct lh_engine *engine, struct lh_chunk *chunk,
                        enum lh_chunk_state state);
/* Recount the LOADED chunks, at the start of a step and when computed chunks are discarded. */
void lh_chunk_recount(struct lh_engine *engine);
/* The checksums of a unit's extent from offset on, in the slot to which the step writes. */
uint32_t *lh_chunk_checksums(struct lh_engine *engine, const struct lh_unit *unit, uint32_t extent,
                             uint64_t offset);
/*
 * Read R, M and V of a chunk into a free slab. Arrays that were never written are not read: they
 * are zeros.
 */
void lh_chunk_read(struct lh_engine *engine, struct lh_chunk *chunk, uint32_t slab);
/* Start one more read into the slab of a chunk that is LOADED or READING. */
void lh_chunk_reads_more(struct lh_engine *engine, struct lh_chunk *chunk,
                         const struct lh_transfer *transfer);
/* Runs on a worker: fill a slab's arrays that were never written with zeros. */
void lh_chunk_zeros_fill(struct lh_slab *slab);
/*
 * Fill segments with the parts of parameters that lie in the chunk and have gradients, and return
 * their number.
 */
uint32_t lh_chunk_segments_fill(struct lh_engine *engine, const struct lh_chunk *chunk,
                                struct lh_adam_segment *segments);
void lh_chunk_compute(struct lh_engine *engine, struct lh_chunk *chunk);

#endif
