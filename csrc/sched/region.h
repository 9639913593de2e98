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
    uint64_t *op_steps; /* the step that counts the bytes of each op */
    uint64_t op_max;
    uint64_t op_first;
    uint64_t op_count; /* the end of the list; ops [op_first, op_count) are not yet executed */
    struct lh_event_list predicted;
    struct lh_residency_event *moved; /* scratch */
    bool is_guess;                    /* `predicted` is a default: no complete cycle was recorded */
    bool has_extra;                   /* see lh_expect_tail() */
    uint64_t position;                /* index of the next expected event */
    /* index of the first event for which no ops are planned yet */
    uint64_t planned_until;
    struct lh_error error;    /* why the plan ends at planned_until */
    enum lh_engine_link link; /* the link that counts the region's loads */
};

/* Create both plans; they are empty. Errors: -ENOMEM, -EINVAL (a unit does not fit its region). */
int lh_region_create_all(struct lh_engine *engine, struct lh_error *err);
void lh_region_destroy_all(struct lh_engine *engine);
/* A forward begins: plan the cycle as the last recorded cycle of this mode. */
void lh_region_begin(struct lh_engine *engine, enum lh_engine_mode mode);
/* End the recording of a cycle: if the cycle was complete, the recording predicts the next one. */
void lh_region_cycle_end(struct lh_engine *engine);
/*
 * A use or an update begins, or a use ends: record this event, and replan if it was not expected.
 */
void lh_region_event(struct lh_engine *engine, uint32_t unit, enum lh_residency_event_kind kind);
/* Discard the recording, and the ops that are not yet executed. */
void lh_region_forget(struct lh_engine *engine);
/* Discard the plan, but not what was recorded of this cycle. */
void lh_region_discard(struct lh_engine *engine);
/* The last closed step is over: ops that are not yet executed count for the next step. */
void lh_region_step_end(struct lh_engine *engine);
/* From now on, loads of the unit into main memory read nothing; no bytes are planned for them. */
void lh_region_unread(struct lh_engine *engine, uint32_t unit);
/*
 * A use was announced ([Note: Uses that are announced] in expect.h), at a place in its
 * announcement. The last one replans.
 */
void lh_region_announced(struct lh_engine *engine, uint32_t unit, uint64_t place, bool is_last);
/* Replan around the units that are in use. */
void lh_region_plan_around(struct lh_engine *engine);
/* With an accelerator: replan main memory for what is owed there. The other plan stays. */
void lh_region_plan_host(struct lh_engine *engine);
/*
 * Plan what units in use have prevented from being planned. Returns whether more could be planned.
 */
bool lh_region_catch_up(struct lh_engine *engine);

#endif
