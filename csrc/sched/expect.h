/*
 * Uses that are predicted without a recording (expect.c): those of a first cycle, and those that
 * the caller announces; and what is left of a prediction after a use that it did not contain.
 *
 * [Note: Uses that were not predicted] Such a use of a recorded cycle either follows uses that do
 * not happen this time, or happens in addition. If the prediction contains it within a few events,
 * those before it are considered omitted. If it is farther ahead, it is considered an additional
 * one, since the plan of most of a cycle is at stake: a forward in the middle of a step, or a use
 * that was recorded as a part of the one before it because its end was handled late. If the next
 * use is not the predicted one either, the events before its place are omitted after all.
 *
 * [Note: Uses that are announced] The experts of a mixture that a batch uses are known only when
 * its router has computed, and differ from step to step, so the last step's order predicts nothing
 * about them. Their units are marked (lh_engine_unit.is_announced): their uses are not recorded,
 * and no plan contains them, until the caller announces the next ones, in order. They are then
 * planned as if the recorded order had contained them at this place, so that they are prefetched,
 * and no other expert is. An announced unit that is not used is skipped like any other use that did
 * not happen, and a use that was not announced is loaded when it begins. If autograd has saved the
 * unit, its update is planned after the use, so that it stays until then.
 *
 * Chunks are not read ahead if such units are trained: the next update is rarely that of the last
 * step, and would take the slabs of the chunks that were read for it.
 *
 * Thread: the engine's.
 */
#ifndef LH_SCHED_EXPECT_H
#define LH_SCHED_EXPECT_H

#include <stdbool.h>
#include <stdint.h>

struct lh_engine;
struct lh_event_list;
struct lh_region;
struct lh_residency_event;

/* Insert a use into the prediction, the first of an announcement or after those before it. */
void lh_expect_insert(struct lh_engine *engine, uint32_t unit, bool is_first);
/* Whether the next use in the prediction was announced. */
bool lh_expect_is_next(const struct lh_engine *engine);
/* The position of the next use or update in the prediction. */
uint64_t lh_expect_next(const struct lh_region *region);
/*
 * The index from which the prediction may still come true after an event that was not predicted:
 * see [Note: Uses that were not predicted]. Skipped events of a guess, and announced uses that an
 * update precedes, are assumed to happen later, because only the order was wrong; but a unit that
 * is being updated has no more uses before its update.
 */
uint64_t lh_expect_tail(const struct lh_engine *engine, const struct lh_residency_event *event);

/* Predict a first cycle: forward in the order of units, backward in the reverse order. */
void lh_expect_first(struct lh_engine *engine, struct lh_event_list *list);

#endif
