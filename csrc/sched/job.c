#include "sched/job.h"

#include "sched/engine_private.h"

void lh_job_submit(struct lh_engine *engine, struct lh_job *job)
{
    LH_ASSERT(job->exec.run && job->done);
    int rc = engine->exec->ops->submit(engine->exec, &job->exec);
    LH_ASSERT(rc == 0); /* the team's queue holds a job for every slab, request and unit */
    engine->jobs_in_flight++;
}

bool lh_job_poll(struct lh_engine *engine)
{
    struct lh_exec_job *done[32];
    uint32_t count = engine->exec->ops->poll(engine->exec, done, LH_COUNT_OF(done));
    LH_ASSERT(count <= engine->jobs_in_flight);
    for (uint32_t i = 0; i < count; i++) {
        struct lh_job *job = (struct lh_job *)(void *)done[i];
        LH_ASSERT(engine->jobs_in_flight > 0 && job->done);
        engine->jobs_in_flight--;
        job->done(engine, job);
    }
    return count > 0;
}

bool lh_job_drain(struct lh_engine *engine)
{
    struct lh_exec_job *done[32];
    uint32_t count = engine->exec->ops->poll(engine->exec, done, LH_COUNT_OF(done));
    LH_ASSERT(count <= engine->jobs_in_flight);
    engine->jobs_in_flight -= count;
    return count > 0;
}
