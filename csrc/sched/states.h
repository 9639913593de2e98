/*
 * The states of the engine's objects, and the transitions between them.
 *
 * Each machine has a table of its transitions. The one function that changes a state asserts that
 * the transition is in the table, and tests/py/test_tidy.py checks that the table agrees with the
 * diagram in the machine's header.
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

/* Whether a machine has a transition between the two states. */
bool lh_states_unit_may(enum lh_unit_state from, enum lh_unit_state to);
bool lh_states_chunk_may(enum lh_chunk_state from, enum lh_chunk_state to);
bool lh_states_step_may(enum lh_step_state from, enum lh_step_state to);
bool lh_states_copy_may(enum lh_copy_state from, enum lh_copy_state to);
bool lh_states_spill_may(enum lh_spill_state from, enum lh_spill_state to);
bool lh_states_norm_may(enum lh_norm_state from, enum lh_norm_state to);
bool lh_states_saved_may(enum lh_saved_state from, enum lh_saved_state to);

#endif
