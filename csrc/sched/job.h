/*
 * Jobs of the engine on its team of workers. Private to csrc/sched.
 *
 * A job is a member of what it works for, and says itself who is told of its end.
 */
#ifndef LH_SCHED_JOB_H
#define LH_SCHED_JOB_H

#include "exec/exec.h"

struct lh_engine;

struct lh_job {
    struct lh_exec_job exec; /* first: the team knows the job by it */
    /* Called by the engine's thread when the job has run. */
    void (*done)(struct lh_engine *engine, struct lh_job *job);
};

/* Give a job to the team; its `run` and `done` are set. */
void lh_job_submit(struct lh_engine *engine, struct lh_job *job);
/* Take back what has run. True: something had. */
bool lh_job_poll(struct lh_engine *engine);
/* The same for an engine that has failed: nobody is told. */
bool lh_job_drain(struct lh_engine *engine);

#endif
