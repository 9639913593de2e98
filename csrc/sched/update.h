/*
 * Updates: which units of the open or closed step are updated, and in which order. Private to
 * csrc/sched.
 *
 * A unit's update is queued when the unit is not in use and either all of its gradients have
 * arrived and no handle is left, or the step is closed; a feature may delay this. update_pump.c
 * processes the queue.
 */
#ifndef LH_SCHED_UPDATE_H
#define LH_SCHED_UPDATE_H

#include "base/base.h"
#include "base/error.h"
#include "sched/idle.h"

struct lh_engine;

/* Of units whose updates need all of their chunks in slabs at once; all others have ANY. */
enum lh_update_turn {
    LH_UPDATE_TURN_ANY = 0,
    LH_UPDATE_TURN_COLLECTS, /* its LOADED chunks wait until all of its chunks are LOADED */
    LH_UPDATE_TURN_WAITS,    /* another such unit has precedence: slabs may be taken */
};

/* The progress of a unit's update in the open or closed step. */
struct lh_update_unit {
    uint32_t gradient_count;
    uint64_t gradient_bytes;
    bool is_queued;
    enum lh_update_turn turn;
    bool is_counted;       /* the unit's gradients are counted as held by an update */
    bool is_done;          /* all chunks of the unit are written */
    bool is_predicted;     /* the previous step updated the unit */
    bool is_param_dirty;   /* P in the region is newer than on SSD: a commit writes P */
    bool is_flushing;      /* dirty P is being written: no update of the unit may begin */
    uint64_t planned_step; /* the last step whose plan counts the unit's update */
    uint32_t chunks_computed;
    uint32_t chunks_written;
    uint32_t chunks_loaded;  /* chunks that are LOADED and not computed in this step */
    uint32_t chunks_to_pass; /* the number of these chunks that do not keep their slabs */
    uint32_t chunk_next;     /* all chunks before this one are computed */
    struct lh_idle_unit idle;
};

struct lh_updates {
    uint32_t *queue; /* units of this step, in the order in which they became updatable */
    uint32_t first;  /* all units before this index are computed */
    uint32_t count;
    uint32_t done_count;          /* the number of units whose updates are written */
    uint32_t gradient_unit_count; /* the number of units that have a gradient in this step */
    uint32_t *predicted;          /* the units that the previous step updated, in order */
    uint32_t predicted_count;
    bool has_announced;   /* units whose uses are announced are trained: nothing is read ahead */
    uint32_t ahead_first; /* index in predicted: units before it need no reading ahead */
    /* chunks COMPUTING, COMPUTED or WRITING, and units whose dirty P is written */
    uint32_t chunks_busy;
};

/* Create the queue, and predict that the first step updates every trainable unit. */
int lh_update_create(struct lh_engine *engine, struct lh_error *err);
void lh_update_destroy(struct lh_engine *engine);
/* Queue a unit's update if it may begin now. */
void lh_update_consider(struct lh_engine *engine, uint32_t unit);

#endif
