/*
 * Functions of the engine's tests that wait for an engine with its own thread or poll one without
 * (rig_opts.manual), and that check the end of a step or of a test.
 */
#ifndef LH_TEST_RIG_WAIT_H
#define LH_TEST_RIG_WAIT_H

#include "engine_fixture.h"

/* Begin a wait that is polled with rig_waits(). */
void rig_wait_begin(struct rig *rig);
/* Return whether a wait that returned rc continues; the test ends if it would never end. */
bool rig_waits(struct rig *rig, int rc);
/* The timeout of each call in such a wait. */
int rig_slice_ms(const struct rig *rig);
/* One round of a manual engine, followed by rig->watch if there is one. */
bool rig_poll(struct rig *rig);
/* Poll a manual engine until nothing moves. */
void rig_settle(struct rig *rig);
/* End a manual engine as its thread would: collect what is in flight, and finish nothing. */
void rig_stop(struct rig *rig);

/* Wait until the closed step is over; return its statistics. */
struct lh_engine_step_stats rig_over(struct rig *rig);
/* The same, and check that the bytes of every link are those of the plan. */
struct lh_engine_step_stats rig_over_as_planned(struct rig *rig);
/* Hand the store to the test, until lh_engine_resume(). */
void rig_pause(struct rig *rig);
/* Flush, commit, reopen: the store has the last step. Then unmake. */
void rig_finish(struct rig *rig);
/* Pass on the hyper-parameters of a step whose gradients the test itself gives. */
void rig_hypers_set(struct rig *rig);
/* Drop handles that a forward has left, as autograd does when its graph dies. */
void rig_handles_drop(struct rig *rig);

#endif
