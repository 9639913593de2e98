/* Memory and a store for saved tensors, in addition to the rig's own. */
#ifndef LH_TEST_RIG_SAVED_H
#define LH_TEST_RIG_SAVED_H

#include "engine_fixture.h"

struct rig_saved;

/* None where rig->opts.saved_bytes is 0: NULL. */
struct rig_saved *rig_saved_open(struct rig *rig);
/* The files of both stores, for the rig's I/O. */
void rig_saved_files(struct rig *rig, struct lh_io_opts *opts);
void rig_saved_opts(struct rig *rig, struct lh_engine_opts *opts);
/* The engine and its I/O are gone. NULL is allowed. */
void rig_saved_close(struct rig *rig);
/* Change a byte of every megabyte on SSD. */
void rig_saved_spoil(struct rig *rig);

#endif
