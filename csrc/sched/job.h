/*
 * The jobs that the engine gives to its team of worker threads. Private to csrc/sched.
 *
 * A job is embedded in the object for which it works, and contains the function to call at its end.
 */
#ifndef LH_SCHED_JOB_H
#define LH_SCHED_JOB_H

#include "exec/exec.h"

struct lh_engine;

struct lh_job {
    struct lh_exec_job exec; /* must be first: the team returns a pointer to it */
    /* Called on the engine's thread when the job has run. */
    void (*done)(struct lh_engine *engine, struct lh_job *job);
};

/* Give a job, whose `run` and `done` are set, to the team. */
void lh_job_submit(struct lh_engine *engine, struct lh_job *job);
/* Collect finished jobs, and call done() for each. Returns whether any job had finished. */
bool lh_job_poll(struct lh_engine *engine);
/* Collect the finished jobs of an engine that has failed, without calling done(). */
bool lh_job_drain(struct lh_engine *engine);

#endif
