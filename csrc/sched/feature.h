/*
 * Features: optional parts of the engine. Private to csrc/sched.
 *
 * A session has the features that its options require, in one table made when the engine is
 * created. The update pipeline calls the table's functions at the points below and refers to no
 * feature by name. With computation in main memory, schedule OPTIMIZED, no norms and no saved
 * tensors the table is empty.
 *
 *      feature   present when                                       file
 *      settle    units are parts of tensors (families)              settle.c
 *      split     schedule AUTO                                      split.c
 *      defer     schedule SERIAL, DEFERRED or AUTO                  defer.c
 *      spill     SERIAL, DEFERRED or repeat, and gradients spill    spill.c
 *      device    an accelerator computes on copies of units         device.c
 *      unified   an accelerator computes on units in main memory    unified.c
 *      landing   ... and gradients are in the accelerator's memory  landing.c
 *      sum       ... and they are summed over several backwards     sum.c
 *      tail      ... and the model's buffers are there              tail.c
 *      norm      SERIAL, DEFERRED or repeat, or the rule has sums   norm.c
 *      repeat    a step whose updates do not wait may be repeated   repeat.c
 *      orthogonal  an update rule has matrices                      orthogonal.c
 *      saved     there is memory for saved tensors                  saved.c
 *      naive     schedule NAIVE                                     naive.c
 *      mates     other processes read this engine's units           mates.c
 *      borrow    the engine's units are another process's           borrow.c
 *      reading   an accelerator computes on copies of units         reading.c
 *      given     another process has the states of some units       given.c
 *      gather    the accelerators of a team gather units            gather.c
 *
 * Features are called in this order. A condition is true if all features return true; the first
 * false ends the evaluation. Pumps return whether something moved.
 *
 * Thread: the engine's, except where a function names another one.
 */
#ifndef LH_SCHED_FEATURE_H
#define LH_SCHED_FEATURE_H

#include "base/error.h"
#include "base/ring.h"

struct lh_chunk;
struct lh_dev_gap;
struct lh_engine;
struct lh_engine_step_stats;
struct lh_exec_job;
struct lh_unit;
struct lh_update_pump;

#define LH_FEATURE_COUNT_MAX 14

/* Any of the functions may be NULL. */
struct lh_feature {
    const char *name;

    /* The engine has the step and the step counts of the store's last commit. */
    int (*resumed)(struct lh_engine *engine, struct lh_error *err);
    /*
     * Handle a message that the engine itself does not know. Returns whether the message was for
     * this feature.
     */
    bool (*message)(struct lh_engine *engine, const struct lh_ring_message *message);
    /* The step is reopened: whether a message must wait for its end. */
    bool (*message_is_held)(struct lh_engine *engine, const struct lh_ring_message *message);
    /* A thread is about to wait for the unit, or to read it in main memory. */
    void (*unit_asked)(struct lh_engine *engine, struct lh_unit *unit);
    /* Whether the unit's bytes lack updates of earlier steps: no thread gets a pin of it. */
    bool (*unit_is_owing)(const struct lh_engine *engine, const struct lh_unit *unit);
    /* A use of a unit is about to begin. */
    void (*use_begun)(struct lh_engine *engine, uint32_t unit);

    /* Returns false if a gradient of the unit must not arrive now; the engine has then failed. */
    bool (*gradient_accepts)(struct lh_engine *engine, struct lh_unit *unit);
    void (*gradient_taken)(struct lh_engine *engine, uint32_t param);
    /* Called for a unit that has gradients and whose update is not queued. */
    void (*update_considered)(struct lh_engine *engine, struct lh_unit *unit);
    bool (*update_may_queue)(struct lh_engine *engine, struct lh_unit *unit);
    /* Whether the unit's update waits for the close. */
    bool (*update_is_deferred)(const struct lh_engine *engine, const struct lh_unit *unit);
    bool (*update_may_start)(const struct lh_engine *engine, const struct lh_unit *unit);
    /* Whether the unit's update has changed its bytes, or does now, though no chunk is computed. */
    bool (*update_has_begun)(const struct lh_engine *engine, const struct lh_unit *unit);
    /* The unit is now UPDATING. */
    void (*update_started)(struct lh_engine *engine, struct lh_unit *unit);

    /* Reads of a chunk's states into its slab have begun. */
    void (*chunk_read)(struct lh_engine *engine, struct lh_chunk *chunk);
    /*
     * Returns false if the chunk's update needs bytes that the slab lacks; they are now being read.
     */
    bool (*chunk_is_whole)(struct lh_engine *engine, struct lh_chunk *chunk);
    bool (*chunk_may_compute)(const struct lh_engine *engine, const struct lh_chunk *chunk);
    /* The job that computes the chunk is about to be submitted; a feature may replace it. */
    void (*chunk_job)(struct lh_engine *engine, const struct lh_chunk *chunk,
                      struct lh_exec_job *job);
    /*
     * Whether the unit's gradients stay once all of its chunks are computed; the feature then calls
     * chunk_consumed() and releases them.
     */
    bool (*gradients_stay)(const struct lh_engine *engine, const struct lh_unit *unit);
    /* Whether the failure of an update that is refused waits: the feature then decides on it. */
    bool (*refusal_waits)(struct lh_engine *engine, const struct lh_error *err);
    /* The chunk's gradients are no longer needed. */
    void (*chunk_consumed)(struct lh_engine *engine, struct lh_chunk *chunk);
    /* All chunks of the unit are computed, and it is about to be READY. */
    void (*unit_computed)(struct lh_engine *engine, struct lh_unit *unit);
    /* Returns false if the feature itself writes what was computed. */
    bool (*chunk_may_write)(struct lh_engine *engine, struct lh_chunk *chunk);

    /*
     * Count the bytes of a unit's update in a step's plan, and correct that count at the step's
     * close.
     */
    void (*planned)(struct lh_engine *engine, struct lh_unit *unit, uint64_t step);
    void (*plan_corrected)(struct lh_engine *engine, struct lh_unit *unit);

    /* The unit is READY in main memory. */
    void (*unit_ready)(struct lh_engine *engine, struct lh_unit *unit);
    /*
     * Whether the engine may take a READY unit's bytes in main memory away from their readers; it
     * does so now, unless the unit is ready again (unit_ready) because of another reader.
     */
    bool (*unit_may_claim)(struct lh_engine *engine, struct lh_unit *unit);
    /*
     * Whether nothing reads the unit's bytes in main memory any more. No thread can pin the unit
     * during this call, and none has pinned it. If it is false, the unit is ready again.
     */
    bool (*unit_is_unread)(struct lh_engine *engine, struct lh_unit *unit);
    /* Whether the unit, which is not in main memory, must come there for the feature's sake. */
    bool (*unit_is_wanted)(const struct lh_engine *engine, const struct lh_unit *unit);
    /*
     * Whether a thread of this process, which computes elsewhere, is to read the unit's bytes in
     * main memory, and whether it may be reading them now. Until then, and while it does, they stay
     * there.
     */
    bool (*unit_is_awaited)(const struct lh_engine *engine, const struct lh_unit *unit);
    bool (*unit_is_read)(const struct lh_engine *engine, const struct lh_unit *unit);
    /* Whether the unit's bytes in main memory have readers that the engine does not know. */
    bool (*unit_is_lent)(const struct lh_engine *engine, const struct lh_unit *unit);

    /*
     * The copy of a READY unit onto the accelerator begins, and counts for the step. Returns false
     * if the feature itself brings the unit there and then calls lh_device_arrived().
     */
    bool (*copy_may_be_whole)(struct lh_engine *engine, struct lh_unit *unit, uint64_t step);
    /* Whether the copy of a unit may begin before all of it is updated. */
    bool (*copy_may_precede_update)(const struct lh_engine *engine, const struct lh_unit *unit);

    /*
     * A thread begins and ends a wait, for parameters or for room. Thread: the one that waits.
     */
    void (*wait_begun)(struct lh_engine *engine, struct lh_dev_gap **gap_out);
    void (*wait_ended)(struct lh_engine *engine, struct lh_dev_gap *gap, bool is_param);

    /* The scalars of a close are larger than a commit's. Thread: training. */
    void (*close_refused)(struct lh_engine *engine);
    /* The open step was closed. */
    void (*step_closed)(struct lh_engine *engine);
    /* Whether the closed step can end, with its commit if one is due. */
    bool (*step_may_end)(const struct lh_engine *engine);
    /* Whether a closed step can end without a commit. Thread: any. */
    bool (*step_may_skip_commit)(const struct lh_engine *engine);
    /* Parameters with gradients count one more update; the scalars are about to be committed. */
    void (*steps_advanced)(struct lh_engine *engine);
    /* The step is over: correct its counters. */
    void (*stats_correct)(struct lh_engine *engine, struct lh_engine_step_stats *stats);
    void (*step_over)(struct lh_engine *engine, const struct lh_engine_step_stats *stats);
    /* The step's updates were undone, and are made again after the close: its gradients stay. */
    void (*step_undone)(struct lh_engine *engine);
    /* The step is over or was rolled back: forget everything about it. */
    void (*step_forgotten)(struct lh_engine *engine);
    /*
     * The unit's bytes in main memory are no longer valid: its extents changed or were rolled back.
     */
    void (*unit_forgotten)(struct lh_engine *engine, struct lh_unit *unit);

    bool (*ahead_may_read)(const struct lh_engine *engine);
    /* Whether the feature has nothing in flight. */
    bool (*is_idle)(const struct lh_engine *engine);
    /* Nothing else is in flight: whether what a thread waits for is under way. */
    bool (*is_under_way)(const struct lh_engine *engine);
    /* Whether another process will end the waits of threads. */
    bool (*is_busy)(const struct lh_engine *engine);
    /* Called in each poll before the updates, at their start, and after them. */
    bool (*pump_before)(struct lh_engine *engine);
    bool (*pump_gradients)(struct lh_engine *engine);
    bool (*pump_after)(struct lh_engine *engine);
    /*
     * Returns true and sets *err if a thread waits for the feature and nothing can end that wait.
     */
    bool (*is_stuck)(const struct lh_engine *engine, struct lh_error *err);
};

struct lh_features {
    const struct lh_feature *all[LH_FEATURE_COUNT_MAX];
    uint32_t count;
};

/* Call a function of every feature that implements it. */
#define LH_FEATURE_CALL(engine, function, ...)                                                     \
    do {                                                                                           \
        for (uint32_t at_ = 0; at_ < (engine)->features.count; at_++) {                            \
            if ((engine)->features.all[at_]->function)                                             \
                (engine)->features.all[at_]->function((engine), ##__VA_ARGS__);                    \
        }                                                                                          \
    } while (0)

/* Whether the function returns true for all features. Stops at the first false. */
#define LH_FEATURE_ALL(engine, function, ...)                                                      \
    ({                                                                                             \
        bool all_ = true;                                                                          \
        for (uint32_t at_ = 0; all_ && at_ < (engine)->features.count; at_++) {                    \
            if ((engine)->features.all[at_]->function)                                             \
                all_ = (engine)->features.all[at_]->function((engine), ##__VA_ARGS__);             \
        }                                                                                          \
        all_;                                                                                      \
    })

/* Whether the function returns true for any feature. Stops at the first true. */
#define LH_FEATURE_ANY(engine, function, ...)                                                      \
    ({                                                                                             \
        bool any_ = false;                                                                         \
        for (uint32_t at_ = 0; !any_ && at_ < (engine)->features.count; at_++) {                   \
            if ((engine)->features.all[at_]->function)                                             \
                any_ = (engine)->features.all[at_]->function((engine), ##__VA_ARGS__);             \
        }                                                                                          \
        any_;                                                                                      \
    })

/*
 * Call a pump of every feature that implements it. The value is whether one of them moved
 * something.
 */
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
