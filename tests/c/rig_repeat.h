/*
 * Steps of a rig that may be repeated (rig_opts.repeats): the store for gradients apart, and the
 * training thread's part of clipping.
 */
#ifndef LH_TEST_RIG_REPEAT_H
#define LH_TEST_RIG_REPEAT_H

#include "engine_fixture.h"
#include "io/io.h"

/* NULL: the rig has no steps that may be repeated. */
struct rig_repeat *rig_repeat_open(struct rig *rig);
void rig_repeat_files(struct rig *rig, struct lh_io_opts *opts);
void rig_repeat_opts(struct rig *rig, struct lh_engine_opts *opts);
void rig_repeat_close(struct rig *rig);

/* Ask for the norm and wait for it. Returns 0, or the engine's error. */
int rig_norm(struct rig *rig, double *square_sum_out);
/* Undo the open step's updates, and close it with a factor. Returns 0, or the engine's error. */
int rig_close_again(struct rig *rig, unsigned gradients, double factor);

#endif
