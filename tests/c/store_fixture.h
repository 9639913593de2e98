/*
 * Shared by the store's tests: a folder that is removed at the end, a small store with two-slot and
 * frozen groups, and bytes that encode their extent, step and offset.
 */
#ifndef LH_TEST_STORE_FIXTURE_H
#define LH_TEST_STORE_FIXTURE_H

#include "store/store.h"

#define FIXTURE_EXTENT_COUNT 6
#define FIXTURE_GROUP_COUNT 3
#define FIXTURE_FROZEN_GROUP 2
/* This extent is never written in any test, so it always reads as zeros. */
#define FIXTURE_ZERO_EXTENT 3
#define FIXTURE_META "{\"model\": \"of the tests\"}"

extern const struct lh_store_extent_desc fixture_extents[FIXTURE_EXTENT_COUNT];
extern struct lh_alloc fixture_alloc;
/* The file calls that the stores use; NULL: the kernel's. */
extern const struct lh_store_fs *fixture_fs;

/* The folder of this program; created by the first call, removed at exit. */
const char *fixture_root(void);
/* "<root>/<name>", valid for the next fifteen calls. */
const char *fixture_path(const char *name);
/* Remove a folder and its contents, if it exists. */
void fixture_remove(const char *path);

/* Remove a folder when this process ends, even by SIGKILL. */
void fixture_guard(const char *path);
/* Return a folder in /dev/shm that is removed when this process ends. */
const char *fixture_memory_root(void);

struct fixture_opts {
    uint32_t directory_count; /* 0 means 1; they are named "<name>0", "<name>1", ... */
    const uint64_t *weights;
    bool single_slot;
    bool temporary;
    bool allow_tmpfs;
    bool refuse_buffered;
    bool small;       /* each extent has a few blocks, all of them together 64 KiB */
    const char *root; /* the parent folder; NULL: fixture_root() */
};

int fixture_create(const char *name, const struct fixture_opts *opts, struct lh_store **store_out,
                   struct lh_error *err);
/* Open a store; reversed: give the directories in the opposite order. */
int fixture_open(const char *name, uint32_t directory_count, bool reversed, bool read_only,
                 struct lh_store **store_out, struct lh_error *err);
/* step: NULL for the newest. */
int fixture_open_at(const char *name, uint32_t directory_count, bool read_only,
                    const uint64_t *step, struct lh_store **store_out, struct lh_error *err);

void fixture_fill(uint8_t *buffer, uint32_t extent, uint64_t step, uint64_t offset, uint64_t bytes);
/* Write every extent but the zero one, and frozen ones only in step 1. */
void fixture_write_step(struct lh_store *store, uint64_t step);
void fixture_commit(struct lh_store *store, uint64_t step);
/*
 * Return whether every extent has the bytes of step (frozen ones those of step 1; step 0: zeros).
 */
bool fixture_holds_step(struct lh_store *store, uint64_t step);

/* Change one bit of a file. */
void fixture_flip(const char *path, uint64_t offset, unsigned bit);

#endif
