/* Files from which the rig's frozen unit is read in place (sched/in_place.h). */
#ifndef LH_TEST_RIG_IN_PLACE_H
#define LH_TEST_RIG_IN_PLACE_H

#include "engine_fixture.h"

struct rig_in_place;

/*
 * Open the files; returns NULL unless rig->opts.in_place. Call it before the store is created,
 * because it sets the state.
 */
struct rig_in_place *rig_in_place_open(struct rig *rig, uint8_t *state);
/* With rig->opts.packed: the size of the unit. */
uint64_t rig_in_place_packed_bytes(const struct rig *rig);
/* How many of a unit's bytes its parameters have: with rig->opts.kept, what follows them is not
 * read. */
uint64_t rig_in_place_param_bytes(const struct rig *rig, uint32_t unit);
/* Pass the store's files and these to the rig's I/O. */
void rig_in_place_files(struct rig *rig, struct lh_io_opts *opts);
void rig_in_place_opts(struct rig *rig, struct lh_engine_opts *opts);
/* NULL is allowed. */
void rig_in_place_close(struct rig *rig);
/* Change one bit of the unit's bytes in the second file. */
void rig_in_place_spoil(struct rig *rig);
/* Make all checksums unknown; is_changed: the files count as written to since they were opened. */
void rig_in_place_forget(struct rig *rig, bool is_changed);
/* The number of checksums that are known again, and as they were before. */
uint32_t rig_in_place_known(const struct rig *rig);
/* Truncate the second file to before the unit's end. */
void rig_in_place_cut(struct rig *rig);
/* Make options with one error, a different one for each turn; returns false after the last. */
bool rig_in_place_bad(struct rig *rig, uint32_t turn, struct lh_engine_opts *opts);

#endif
