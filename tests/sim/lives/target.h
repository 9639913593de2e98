/*
 * The target to which a store is copied while it is trained: separate drives, and the copy, which
 * is made as in python/lohan/store/_snapshot.py, with the calls of csrc/store.
 *
 *      commits are held -> open the source for reading, beside the one that trains
 *      -> create the target -> read and write piece by piece -> commit -> close: complete
 *
 * A copy that fails is removed. An interrupted copy leaves either a complete store or remains that
 * are not mistaken for a store, and that the next copy replaces.
 *
 * Thread: one.
 */
#ifndef LH_TEST_SIM_TARGET_H
#define LH_TEST_SIM_TARGET_H

#include "lives/fs.h"
#include "lives/reference.h"

#define LH_SIM_TARGET_PIECE_BYTES (64 * LH_KIB)

struct lh_sim_target {
    struct lh_sim_world *world;      /* NULL: no target */
    struct lh_sim_fault_log *faults; /* borrowed until deinit, like the next two */
    const struct lh_sim_reference *reference;
    const struct lh_sim_fs *source_fs;
    struct lh_sim_disk disk;
    struct lh_sim_fs fs;
    struct lh_sim_random random;
    struct lh_store *source; /* like store, NULL unless a copy is in progress */
    struct lh_store *store;
    uint32_t extent; /* the extent of the next piece */
    uint64_t offset;
    uint8_t *piece;
    uint8_t *expected; /* the state that is copied, without its scalars */
    uint8_t *scalars;
    uint64_t scalar_bytes;
    bool is_begun;        /* a copy has begun in this life */
    bool is_over;         /* the last copy that began has ended */
    bool is_whole;        /* the last copy was reported as complete */
    uint64_t whole_count; /* the number of completed copies */
    uint64_t left_count;  /* the number of incomplete copies that were found */
};

/*
 * Initialize a target with empty drives.
 *
 * Owns:   *target owns its tables; release with lh_sim_target_deinit().
 * Errors: -ENOMEM; the caller has to call lh_sim_target_deinit() then, too.
 */
int lh_sim_target_init(struct lh_sim_target *target, struct lh_sim_fault_log *faults,
                       const struct lh_sim_reference *reference, const struct lh_sim_fs *source_fs,
                       uint64_t seed, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_target_deinit(struct lh_sim_target *target);
/*
 * Start a new process, after checking that the previous one left either a complete copy or nothing
 * that could be mistaken for a store (-EPROTO: neither). From then on the drives have these faults,
 * and the process ends after dies_after calls of a copy (UINT64_MAX: it does not end).
 */
int lh_sim_target_restart(struct lh_sim_target *target, const struct lh_sim_faults *faults,
                          uint64_t dies_after, struct lh_error *err) LH_MUST_CHECK;
/* Begin a copy; commits are held at step. */
void lh_sim_target_copy(struct lh_sim_target *target, uint64_t step);
/* Cancel the copy, if one is in progress. */
void lh_sim_target_cancel(struct lh_sim_target *target);
/* End the process, and cut the power if loses_power. */
void lh_sim_target_stop(struct lh_sim_target *target, bool loses_power, bool tears,
                        struct lh_sim_random *random);

#endif
