/*
 * The stream on which the training thread computes: fences on it, and how long it has nothing to
 * execute. Private to csrc/sched.
 *
 * [Note: Gaps] A device with a stream of its own may be busy while a thread waits, and may have
 * nothing to execute while no thread waits. So how long computation waited is measured on the
 * stream: from when it has executed what it was given, until what was waited for has arrived. For
 * such a device these gaps are the step's param_wait_ns and gradient_wait_ns.
 *
 * Thread: any, but lh_stream_stats_correct() the engine's.
 */
#ifndef LH_SCHED_STREAM_H
#define LH_SCHED_STREAM_H

#include "sched/engine.h"

struct lh_dev_fence;
struct lh_dev_gap;
struct lh_engine;

/* Record fence on the stream: the fence passes when everything submitted so far is done. */
void lh_stream_record(struct lh_engine *engine, struct lh_dev_fence *fence);
/*
 * Make the stream wait for fence before any work that it is given from now on, if the device has a
 * stream. unit: whose parameters the fence belongs to, or LH_UNIT_NONE. what names the fence in an
 * error, with which the engine then fails. Returns 0 or -errno. The calling thread waits only if it
 * is itself the stream (in the simulator).
 */
int lh_stream_wait(struct lh_engine *engine, struct lh_dev_fence *fence, uint32_t unit,
                   const char *what);
/*
 * Wait until the accelerator has executed everything, if it reads units in main memory. Thread: the
 * engine's, or the one that has paused the engine.
 */
void lh_stream_synchronize(struct lh_engine *engine);
/* Around a thread's own wait. *gap_out may be NULL. */
void lh_stream_gap_begin(struct lh_engine *engine, struct lh_dev_gap **gap_out);
void lh_stream_gap_end(struct lh_engine *engine, struct lh_dev_gap *gap, bool is_param);
/* Replace the waits of threads by the gaps of the stream, if the device has measured them. */
void lh_stream_stats_correct(struct lh_engine *engine, struct lh_engine_step_stats *stats);

#endif
