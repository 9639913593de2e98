/* What in_place.c does for a load (transfer.c, unit.c). Private to csrc/sched. */
#ifndef LH_SCHED_IN_PLACE_PRIVATE_H
#define LH_SCHED_IN_PLACE_PRIVATE_H

#include "sched/in_place.h"
#include "store/store.h"

struct lh_engine;
struct lh_unit;

int lh_in_place_create(struct lh_engine *engine, struct lh_error *err);
/* What one request can read from offset in the unit on; file_index is of the files in place. */
struct lh_store_piece lh_in_place_map(const struct lh_engine *engine,
                                      const struct lh_in_place_unit *unit, uint64_t offset);
/* How much of it there is where the file ends in it; else 0. */
uint64_t lh_in_place_least_bytes(const struct lh_engine *engine,
                                 const struct lh_store_piece *piece);
/* Of what a request for offset in the unit reads. */
const uint32_t *lh_in_place_checksums(const struct lh_in_place_unit *unit, uint64_t offset);
/*
 * On a worker: move what a range of a request has to where it belongs; the request begins at that
 * offset in the unit, and its ranges come in order. See [Note: Seams] in in_place.c.
 */
void lh_in_place_move(const struct lh_unit *unit, uint64_t request, uint64_t first, uint64_t bytes);
/* All requests of the unit are done. */
void lh_in_place_loaded(struct lh_engine *engine, struct lh_unit *unit);

#endif
