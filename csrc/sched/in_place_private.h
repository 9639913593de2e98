/* Units that are read in place: the engine's side (in_place.c). Private to csrc/sched. */
#ifndef LH_SCHED_IN_PLACE_PRIVATE_H
#define LH_SCHED_IN_PLACE_PRIVATE_H

#include "sched/in_place.h"
#include "sched/transfer.h"

struct lh_engine;

/* A unit's part. */
struct lh_in_place_part {
    const struct lh_in_place_unit *made; /* its description; NULL: the unit is in the store */
    bool moves;
    uint64_t seam_first;
};

struct lh_in_place {
    struct lh_source source;
    uint8_t *seams; /* [Note: Seams] in in_place.c */
};

/* Validate opts.in_place, and redirect the loads of its units. */
int lh_in_place_create(struct lh_engine *engine, struct lh_error *err);

#endif
