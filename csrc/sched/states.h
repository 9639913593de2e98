/*
 * The states of the engine's objects, and the transitions between them.
 *
 * Each machine has a table of its transitions. The one function that changes a state asserts that
 * the transition is in the table, and tests/py/test_engine_states.py checks that the table agrees
 * with the diagram in the machine's header.
 */
#ifndef LH_SCHED_STATES_H
#define LH_SCHED_STATES_H

#include <stdbool.h>

/* A unit's place in main memory (unit.h). */
enum lh_unit_state {
    LH_UNIT_STATE_ABSENT = 0,
    LH_UNIT_STATE_LOADING,
    LH_UNIT_STATE_READY,
    LH_UNIT_STATE_UPDATING,
};

/* A chunk's states in a slab (chunk.h). */
enum lh_chunk_state {
    LH_CHUNK_STATE_IDLE = 0,
    LH_CHUNK_STATE_READING,
    LH_CHUNK_STATE_LOADED,
    LH_CHUNK_STATE_COMPUTING,
    LH_CHUNK_STATE_COMPUTED,
    LH_CHUNK_STATE_WRITING,
};

/* A step (step.h). */
enum lh_step_state {
    LH_STEP_STATE_OPEN = 0,
    LH_STEP_STATE_CLOSED,
    LH_STEP_STATE_COMMITTING,
    LH_STEP_STATE_ABORTING,
};

/* A unit's copy on the accelerator (device.h). */
enum lh_copy_state {
    LH_COPY_STATE_ABSENT = 0,
    LH_COPY_STATE_COPYING,
    LH_COPY_STATE_READY,
    LH_COPY_STATE_LEAVING, /* evicted; its bytes are being copied to main memory */
};

/* The writing of a unit's gradients to SSD, where they wait (spill.h). */
enum lh_spill_state {
    LH_SPILL_STATE_NONE = 0,
    LH_SPILL_STATE_RUNNING,
    LH_SPILL_STATE_DONE, /* this step's gradients are on SSD */
};

/* A unit's part of the norm (norm.h). */
enum lh_norm_state {
    LH_NORM_STATE_NONE = 0,
    LH_NORM_STATE_RUNNING,
    LH_NORM_STATE_DONE,
};

/* A unit's matrices (orthogonal.h). */
enum lh_orthogonal_state {
    LH_ORTHOGONAL_STATE_NONE = 0,
    LH_ORTHOGONAL_STATE_RUNNING,
    LH_ORTHOGONAL_STATE_DONE,
};

/* A saved tensor (saved_private.h). */
enum lh_saved_state {
    LH_SAVED_STATE_FREE = 0,
    LH_SAVED_STATE_QUEUED,
    LH_SAVED_STATE_COPYING,
    LH_SAVED_STATE_SUMMING,
    LH_SAVED_STATE_HELD,
    LH_SAVED_STATE_WRITING,
    LH_SAVED_STATE_AWAY,
    LH_SAVED_STATE_READING,
};

/* A unit that processes gather on their accelerators (gather.h). */
enum lh_gather_state {
    LH_GATHER_STATE_NONE = 0,
    LH_GATHER_STATE_COPYING,
    LH_GATHER_STATE_OFFERED,
    LH_GATHER_STATE_RUNNING,
    LH_GATHER_STATE_RETURNED, /* the other processes do not give the rest: it is copied */
};

struct lh_transition {
    int from;
    int to;
};

/* The machines' transitions; a row from a state to itself ends each table. */
extern const struct lh_transition lh_states_unit[];
extern const struct lh_transition lh_states_chunk[];
extern const struct lh_transition lh_states_step[];
extern const struct lh_transition lh_states_copy[];
extern const struct lh_transition lh_states_spill[];
extern const struct lh_transition lh_states_norm[];
extern const struct lh_transition lh_states_orthogonal[];
extern const struct lh_transition lh_states_saved[];
extern const struct lh_transition lh_states_gather[];

/* Whether a machine has a transition between the two states. */
static inline bool lh_states_may(const struct lh_transition *row, int from, int to)
{
    while (row->from != row->to && (row->from != from || row->to != to))
        row++;
    return row->from != row->to;
}

#endif
