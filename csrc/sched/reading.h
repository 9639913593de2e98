/*
 * Reads of a unit's bytes in main memory while an accelerator computes (reading.c). Private to
 * csrc/sched.
 */
#ifndef LH_SCHED_READING_H
#define LH_SCHED_READING_H

#include <stdatomic.h>

#include "base/base.h"
#include "sched/feature.h"

struct lh_engine;
struct lh_unit;

struct lh_reading {
    uint64_t begun_count;         /* the training thread's: the number of its last read */
    _Atomic uint64_t lent_number; /* the last read whose unit has been lent */
    /* The engine's. */
    const struct lh_unit *unit; /* the unit that is being read; NULL: none */
    uint64_t number;            /* of this read */
    bool is_lent;               /* the training thread may read the unit's bytes */
    bool is_planned;            /* the plan has been told to load the unit */
};

extern const struct lh_feature lh_reading_feature;

#endif
