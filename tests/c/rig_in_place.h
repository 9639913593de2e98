/* Files from which the rig's frozen unit is read in place (sched/in_place.h). */
#ifndef LH_TEST_RIG_IN_PLACE_H
#define LH_TEST_RIG_IN_PLACE_H

#include "engine_fixture.h"

struct rig_in_place;

/* None where rig->opts.in_place is not set: NULL. Before the store is made: it sets the state. */
struct rig_in_place *rig_in_place_open(struct rig *rig, uint8_t *state);
/* The files of the store and these, for the rig's I/O. */
void rig_in_place_files(struct rig *rig, struct lh_io_opts *opts);
void rig_in_place_opts(struct rig *rig, struct lh_engine_opts *opts);
/* NULL is allowed. */
void rig_in_place_close(struct rig *rig);
/* Change one bit of what the unit has in the second file. */
void rig_in_place_spoil(struct rig *rig);
/* Let the second file end before the unit does. */
void rig_in_place_cut(struct rig *rig);
/* The options are good but for one thing, in turn; false: there is no such turn. */
bool rig_in_place_bad(struct rig *rig, uint32_t turn, struct lh_engine_opts *opts);

#endif
