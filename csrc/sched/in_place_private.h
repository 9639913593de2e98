/* What in_place.c does for a load (transfer.c, unit.c). Private to csrc/sched. */
#ifndef LH_SCHED_IN_PLACE_PRIVATE_H
#define LH_SCHED_IN_PLACE_PRIVATE_H

#include "exec/exec.h"
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
void lh_in_place_run(struct lh_exec_job *job);
/* All of the unit is in memory, as it is in its files. */
void lh_in_place_loaded(struct lh_engine *engine, struct lh_unit *unit);

#endif
