/* Units that are read in place: the engine's side (in_place.c). Private to csrc/sched. */
#ifndef LH_SCHED_IN_PLACE_PRIVATE_H
#define LH_SCHED_IN_PLACE_PRIVATE_H

#include <stdatomic.h>

#include "sched/in_place.h"
#include "sched/transfer.h"

struct lh_engine;
struct lh_unit;

/* The decoding of a range of a packed unit. */
struct lh_packed_job {
    struct lh_job job;
    struct lh_unit *unit;
    uint64_t first; /* offsets in the unit, of decoded bytes */
    uint64_t end;
};

/* What in_place.c, packed.c and kept.c keep for each unit. */
struct lh_in_place_part {
    /* the unit's description; NULL: the unit is in the store */
    const struct lh_in_place_unit *made;
    bool moves;
    uint64_t seam_first;
    uint64_t first;      /* where in the unit a load begins: 0 unless it is packed */
    uint8_t *kept;       /* the packed bytes, if they stay in main memory; or NULL */
    uint32_t load_count; /* while kept bytes are chosen */
    /* of a packed unit that is being decoded: [Note: Rounds] in packed.c */
    struct lh_packed_job *jobs; /* LH_IN_PLACE_JOB_COUNT */
    uint32_t job_count;         /* those in flight */
    uint64_t decoded;           /* where the round of these jobs ends */
};

/* [Note: Kept bytes] in in_place.h. */
struct lh_kept {
    uint64_t total_bytes;         /* the packed bytes of all units */
    uint64_t seen_bytes;          /* of those loaded twice */
    _Atomic uint64_t taken_bytes; /* any thread may read it */
};

struct lh_in_place {
    struct lh_source source;
    struct lh_source packed_source;
    struct lh_source kept_source;
    struct lh_kept kept;
    struct lh_packed_job *jobs;
    uint8_t *seams; /* [Note: Seams] in in_place.c */
};

/* Validate opts.in_place, and make its units load from their files. */
int lh_in_place_create(struct lh_engine *engine, struct lh_error *err);
void lh_in_place_destroy(struct lh_engine *engine);

/* packed.c: see [Note: Packed units] in in_place.h. */

/*
 * Whether the packs of a unit of unit_bytes can be decoded without overwriting bytes that are still
 * needed. The unit's runs must be valid.
 */
bool lh_packed_is_good(const struct lh_in_place_unit *made, uint64_t unit_bytes);
/* Where in the unit the packed bytes begin; its end if they stay in main memory. */
uint64_t lh_packed_load_first(const struct lh_unit *unit);
/* All of a LOADING unit was read, or its packed bytes are kept: decode it on workers. */
void lh_packed_decode(struct lh_engine *engine, struct lh_unit *unit);

/* kept.c: see [Note: Kept bytes] in in_place.h. */

extern const struct lh_source_ops lh_kept_source_ops;
/* A packed unit may be kept. */
void lh_kept_add(struct lh_engine *engine, struct lh_unit *unit);

#endif
