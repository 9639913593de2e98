/* Units that are read in place: the engine's side (in_place.c). Private to csrc/sched. */
#ifndef LH_SCHED_IN_PLACE_PRIVATE_H
#define LH_SCHED_IN_PLACE_PRIVATE_H

#include "sched/in_place.h"
#include "sched/transfer.h"

struct lh_engine;

/* The part of struct lh_unit that belongs to in_place.c. */
struct lh_in_place_part {
    /* the unit's description; NULL: the unit is in the store */
    const struct lh_in_place_unit *made;
    bool moves;
    uint64_t seam_first;
};

struct lh_in_place {
    struct lh_source source;
    uint8_t *seams; /* [Note: Seams] in in_place.c */
};

/* Validate opts.in_place, and make its units load from their files. */
int lh_in_place_create(struct lh_engine *engine, struct lh_error *err);

#endif
