/* Memory and a store for saved tensors, in addition to the rig's own. */
#ifndef LH_TEST_RIG_SAVED_H
#define LH_TEST_RIG_SAVED_H

#include "engine_fixture.h"

struct rig_saved;

/* Open memory and store; returns NULL if rig->opts.saved_bytes is 0. */
/* A temporary store with one extent, as saved tensors and gradients apart have it. */
struct lh_store *rig_saved_store(struct rig *rig, const char *name, uint64_t bytes);
struct rig_saved *rig_saved_open(struct rig *rig);
/* Pass the files of both stores to the rig's I/O. */
void rig_saved_files(struct rig *rig, struct lh_io_opts *opts);
void rig_saved_opts(struct rig *rig, struct lh_engine_opts *opts);
/* Close after the engine and its I/O were destroyed. NULL is allowed. */
void rig_saved_close(struct rig *rig);
/* Change a byte of every megabyte on SSD. */
void rig_saved_spoil(struct rig *rig);

#endif
