/* Plans of which units each region holds, and when (region.c). Private to csrc/sched. */
#ifndef LH_SCHED_REGION_H
#define LH_SCHED_REGION_H

#include "base/error.h"
#include "plan/residency.h"
#include "sched/engine.h"

struct lh_engine;

struct lh_event_list {
    struct lh_residency_event *events;
    uint64_t count;
    bool overflowed;
};

/* The plan of one region's contents, from the expected order of uses (region.c). */
struct lh_region {
    struct lh_residency plan;   /* the state after all ops */
    struct lh_residency before; /* scratch */
    struct lh_residency_unit *units;
    struct lh_residency_op *ops;
    uint64_t *op_steps; /* the step that counts an op's bytes */
    uint64_t op_max;
    uint64_t op_first;
    uint64_t op_count; /* the end of the list; ops [op_first, op_count) wait */
    struct lh_event_list predicted;
    struct lh_residency_event *moved; /* scratch */
    bool is_guess;                    /* predicted before anything was recorded */
    uint64_t position;                /* index of the next expected event */
    uint64_t planned_until;           /* events before this have their ops in the list */
    struct lh_error error;            /* why the plan ends there */
    enum lh_engine_link link;         /* the link of its loads */
};

/* Create both plans, empty. Errors: -ENOMEM, -EINVAL (a unit does not fit its region). */
int lh_region_create_all(struct lh_engine *engine, struct lh_error *err);
void lh_region_destroy_all(struct lh_engine *engine);
/* A forward begins: plan the cycle from what the last one of this mode did. */
void lh_region_begin(struct lh_engine *engine, enum lh_engine_mode mode);
/* End the recorded cycle: it predicts the next one if it was complete. */
void lh_region_cycle_end(struct lh_engine *engine);
/* A use or an update begins, or a use ends: record it, and replan if it was not expected. */
void lh_region_event(struct lh_engine *engine, uint32_t unit, enum lh_residency_event_kind kind);
/* A step was aborted: discard the recording and the ops that wait. */
void lh_region_forget(struct lh_engine *engine);
/* The step that closed last is over: ops that still wait count for the next one. */
void lh_region_step_end(struct lh_engine *engine);
/* Replan around the units that are in use. */
void lh_region_plan_around(struct lh_engine *engine);
/* Plan what could not be planned before. Returns whether that was possible. */
bool lh_region_catch_up(struct lh_engine *engine);

#endif
