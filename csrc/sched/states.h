/* What the engine's objects can be in. Whoever changes one is named in engine_private.h. */
#ifndef LH_SCHED_STATES_H
#define LH_SCHED_STATES_H

enum lh_unit_state {
    LH_UNIT_STATE_ABSENT = 0,
    LH_UNIT_STATE_LOADING,
    LH_UNIT_STATE_READY,
    LH_UNIT_STATE_UPDATING,
};

/* Of a unit's copy on the accelerator (device.c). */
enum lh_copy_state {
    LH_COPY_STATE_ABSENT = 0,
    LH_COPY_STATE_COPYING,
    LH_COPY_STATE_READY,
    LH_COPY_STATE_LEAVING, /* evicted; its bytes are on their way to main memory */
};

enum lh_spill_state {
    LH_SPILL_STATE_NONE = 0,
    LH_SPILL_STATE_RUNNING,
    LH_SPILL_STATE_DONE, /* this step's gradients are on SSD */
};

enum lh_norm_state {
    LH_NORM_STATE_NONE = 0,
    LH_NORM_STATE_RUNNING,
    LH_NORM_STATE_DONE,
};

enum lh_chunk_state {
    LH_CHUNK_STATE_IDLE = 0,
    LH_CHUNK_STATE_READING,
    LH_CHUNK_STATE_LOADED,
    LH_CHUNK_STATE_COMPUTING,
    LH_CHUNK_STATE_COMPUTED, /* naive: others of its unit are COMPUTING */
    LH_CHUNK_STATE_WRITING,
};

/* See [Note: Held commits] in step.c. */
enum lh_hold {
    LH_HOLD_NONE = 0,
    LH_HOLD_ASKED,
    LH_HOLD_GRANTED,
};

enum lh_step_state {
    LH_STEP_STATE_OPEN = 0,
    LH_STEP_STATE_CLOSED,
    LH_STEP_STATE_COMMITTING,
    LH_STEP_STATE_ABORTING,
};

#endif
