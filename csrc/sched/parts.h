/*
 * What features keep for each unit. A unit refers to it by a pointer, so that unit.h includes no
 * feature; each part is written only in the feature's own file. Private to csrc/sched.
 *
 * Thread: the engine's.
 */
#ifndef LH_SCHED_PARTS_H
#define LH_SCHED_PARTS_H

#include "sched/defer.h"
#include "sched/given.h"
#include "sched/in_place_private.h"
#include "sched/landing.h"
#include "sched/mates.h"
#include "sched/norm.h"
#include "sched/orthogonal.h"
#include "sched/repeat.h"
#include "sched/spill.h"

struct lh_unit_parts {
    struct lh_in_place_part in_place;
    struct lh_landing_unit landing;
    struct lh_defer_unit defer;
    struct lh_spill_unit spill;
    struct lh_norm_unit norm;
    struct lh_orthogonal_unit orthogonal;
    struct lh_repeat_unit repeat;
    struct lh_mates_unit mates;
    struct lh_given_unit given;
};

#endif
