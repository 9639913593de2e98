/*
 * Where a store is copied to while it is trained: drives of their own, and the copy, as
 * python/lohan/store/_snapshot.py makes it with the calls of csrc/store.
 *
 *      commits are held -> open the source for reading, beside the one that trains
 *      -> create the target -> a piece now and then: read, write -> commit -> close: it is whole
 *
 * A copy that fails is removed. What an interrupted one leaves is either a whole store or none that
 * anybody takes for one, and the next copy takes its place.
 *
 * Thread: one.
 */
#ifndef LH_SIM_TARGET_H
#define LH_SIM_TARGET_H

#include "sim/fs.h"
#include "sim/reference.h"

#define LH_SIM_TARGET_PIECE_BYTES (64 * LH_KIB)

struct lh_sim_target {
    struct lh_sim_world *world;               /* NULL: there is none */
    const struct lh_sim_reference *reference; /* this and the next: borrowed until deinit */
    const struct lh_sim_fs *source_fs;
    struct lh_sim_disk disk;
    struct lh_sim_fs fs;
    struct lh_sim_random random;
    struct lh_store *source; /* this and the next: NULL unless a copy is under way */
    struct lh_store *store;
    uint32_t extent; /* the next piece */
    uint64_t offset;
    uint8_t *piece;
    uint8_t *expected; /* the state that is copied, and its scalars */
    uint8_t *scalars;
    uint64_t scalar_bytes;
    bool is_begun;        /* a copy, in this life */
    bool is_over;         /* the last one that began */
    bool is_whole;        /* somebody was told that it is */
    uint64_t whole_count; /* copies that were made */
    uint64_t left_count;  /* what is left of copies that were not */
};

/*
 * Empty drives.
 *
 * Owns:   *target owns its tables; release with lh_sim_target_deinit().
 * Errors: -ENOMEM; lh_sim_target_deinit() is due then as well.
 */
int lh_sim_target_init(struct lh_sim_target *target, struct lh_sim_world *world,
                       const struct lh_sim_reference *reference, const struct lh_sim_fs *source_fs,
                       uint64_t seed, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_target_deinit(struct lh_sim_target *target);
/*
 * A new process. Is what the one before it left whole, or nobody's store? -EPROTO: neither. Then
 * the drives have these faults, and the process ends after so many calls of a copy (UINT64_MAX: it
 * does not).
 */
int lh_sim_target_restart(struct lh_sim_target *target, const struct lh_sim_faults *faults,
                          uint64_t dies_after, struct lh_error *err) LH_MUST_CHECK;
/* Commits are held at step. */
void lh_sim_target_copy(struct lh_sim_target *target, uint64_t step);
/* The copy is given up, if one is under way. */
void lh_sim_target_cancel(struct lh_sim_target *target);
/* The process has ended, and power fails if loses_power. */
void lh_sim_target_stop(struct lh_sim_target *target, bool loses_power, bool tears,
                        struct lh_sim_random *random);

#endif
