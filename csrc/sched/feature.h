/*
 * Features: optional parts of the engine. Private to csrc/sched.
 *
 * A session has the features that its options require, in one table made when the engine is
 * created. The update pipeline calls the table's functions at the points below and refers to no
 * feature by name. With computation in main memory, schedule OPTIMIZED, no norms and no saved
 * tensors the table is empty.
 *
 *      feature   present when                                       file
 *      split     schedule AUTO                                      split.c
 *      defer     schedule SERIAL, DEFERRED or AUTO                  defer.c
 *      spill     SERIAL or DEFERRED, and a unit's gradients spill   spill.c
 *      device    an accelerator computes                            device.c
 *      landing   and gradients are in its memory                    landing.c
 *      norm      schedule SERIAL or DEFERRED                        norm.c
 *      saved     memory for saved tensors                           saved.c
 *      naive     schedule NAIVE                                     naive.c
 *
 * Features are called in this order. Conditions are evaluated until one answers false; pumps return
 * whether something moved.
 *
 * Thread: the engine's.
 */
#ifndef LH_SCHED_FEATURE_H
#define LH_SCHED_FEATURE_H

#include "base/error.h"
#include "base/ring.h"

struct lh_chunk;
struct lh_engine;
struct lh_engine_step_stats;
struct lh_unit;
struct lh_update_pump;

#define LH_FEATURE_COUNT_MAX 8

/* Any of the functions may be NULL. */
struct lh_feature {
    const char *name;

    /* Handle a message unknown to the engine itself. Returns whether it was for this feature. */
    bool (*message)(struct lh_engine *engine, const struct lh_ring_message *message);
    /* A use of a unit is about to begin. */
    void (*use_begun)(struct lh_engine *engine, uint32_t unit);

    /* Returns false if the gradient must not arrive now; the engine has then failed. */
    bool (*gradient_accepts)(struct lh_engine *engine, struct lh_unit *unit);
    void (*gradient_taken)(struct lh_engine *engine, uint32_t param);
    /* A unit has gradients, and its update is not queued. */
    void (*update_considered)(struct lh_engine *engine, struct lh_unit *unit);
    bool (*update_may_queue)(struct lh_engine *engine, struct lh_unit *unit);
    bool (*update_may_start)(const struct lh_engine *engine, const struct lh_unit *unit);

    /* A chunk's states are being read into its slab. */
    void (*chunk_read)(struct lh_engine *engine, struct lh_chunk *chunk);
    /* Returns false if the chunk needs more than its slab holds; the rest is now being read. */
    bool (*chunk_is_whole)(struct lh_engine *engine, struct lh_chunk *chunk);
    bool (*chunk_may_compute)(const struct lh_engine *engine, const struct lh_chunk *chunk);
    /* The chunk's gradients are no longer needed. */
    void (*chunk_consumed)(struct lh_engine *engine, struct lh_chunk *chunk);
    /* Returns false if the feature itself writes what was computed. */
    bool (*chunk_may_write)(struct lh_engine *engine, struct lh_chunk *chunk);

    /* Count the bytes of a unit's update in a step's plan; correct them at the step's close. */
    void (*planned)(struct lh_engine *engine, struct lh_unit *unit, uint64_t step);
    void (*plan_corrected)(struct lh_engine *engine, struct lh_unit *unit);

    /* The open step was closed. */
    void (*step_closed)(struct lh_engine *engine);
    /* Whether the closed step can end without a commit. */
    bool (*step_may_skip_commit)(const struct lh_engine *engine);
    void (*step_over)(struct lh_engine *engine, const struct lh_engine_step_stats *stats);
    /* The step is over or was rolled back: forget everything about it. */
    void (*step_forgotten)(struct lh_engine *engine);
    /* The unit's bytes in main memory are no longer those of its extents. */
    void (*unit_forgotten)(struct lh_engine *engine, struct lh_unit *unit);

    bool (*ahead_may_read)(const struct lh_engine *engine);
    /* Before, as part of, and after the updates of one poll. */
    bool (*pump_before)(struct lh_engine *engine);
    bool (*pump_gradients)(struct lh_engine *engine);
    bool (*pump_after)(struct lh_engine *engine);
    /* True, with an error: a thread waits for the feature, and nothing in flight can end that. */
    bool (*is_stuck)(const struct lh_engine *engine, struct lh_error *err);
};

struct lh_features {
    const struct lh_feature *all[LH_FEATURE_COUNT_MAX];
    uint32_t count;
};

/* Call a function of every feature that has it. */
#define LH_FEATURE_CALL(engine, function, ...)                                                     \
    do {                                                                                           \
        for (uint32_t at_ = 0; at_ < (engine)->features.count; at_++) {                            \
            if ((engine)->features.all[at_]->function)                                             \
                (engine)->features.all[at_]->function((engine), ##__VA_ARGS__);                    \
        }                                                                                          \
    } while (0)

/* Whether all features answer true. Stops at the first one that does not. */
#define LH_FEATURE_ALL(engine, function, ...)                                                      \
    ({                                                                                             \
        bool all_ = true;                                                                          \
        for (uint32_t at_ = 0; all_ && at_ < (engine)->features.count; at_++) {                    \
            if ((engine)->features.all[at_]->function)                                             \
                all_ = (engine)->features.all[at_]->function((engine), ##__VA_ARGS__);             \
        }                                                                                          \
        all_;                                                                                      \
    })

/* Whether any feature answers true. Stops at the first one that does. */
#define LH_FEATURE_ANY(engine, function, ...)                                                      \
    ({                                                                                             \
        bool any_ = false;                                                                         \
        for (uint32_t at_ = 0; !any_ && at_ < (engine)->features.count; at_++) {                   \
            if ((engine)->features.all[at_]->function)                                             \
                any_ = (engine)->features.all[at_]->function((engine), ##__VA_ARGS__);             \
        }                                                                                          \
        any_;                                                                                      \
    })

/* Call a pump of every feature that has it. Whether one of them moved something. */
#define LH_FEATURE_PUMP(engine, function)                                                          \
    ({                                                                                             \
        bool moved_ = false;                                                                       \
        for (uint32_t at_ = 0; at_ < (engine)->features.count; at_++) {                            \
            if ((engine)->features.all[at_]->function)                                             \
                moved_ |= (engine)->features.all[at_]->function((engine));                         \
        }                                                                                          \
        moved_;                                                                                    \
    })

#endif
