/*
 * I/O, workers and an accelerator that run on the test's own thread, for an engine that the test
 * polls itself (rig_opts.manual). Everything is executed when it is polled, one piece at a time, in
 * the order of submission, and can be held back. Therefore every run is the same, and a test can
 * examine the engine in any of its states.
 */
#ifndef LH_TEST_RIG_INLINE_H
#define LH_TEST_RIG_INLINE_H

#include "dev/dev.h"
#include "engine_fixture.h"

/* Create the backends; they borrow rig->holds and rig->clock until destroyed. */
struct lh_io *rig_inline_io(struct rig *rig, const struct lh_io_opts *opts);
struct lh_exec *rig_inline_exec(struct rig *rig);
struct lh_dev *rig_inline_dev(struct rig *rig);

#endif
