/*
 * Files in main memory that a power failure cuts: what was written is not what is durable.
 *
 *      write --> written image (what a read gives), and a list of writes that no sync covers
 *      sync  --> the writes that had completed when it was submitted go to the durable image
 *      crash --> of every other write any subset of its 4 KiB blocks does, chosen by seed; then
 *                the written image is the durable one
 *
 * A block of 4 KiB is whole or not there: that is what the store's format asks of a drive
 * (docs/store-format.md). Files are sparse: a page nobody wrote is zeros and takes no memory.
 *
 * Real files come in and go out by lh_sim_disk_load() and _store(): a store is made and opened by
 * the code that does so in earnest, on real files, and lives here in between.
 *
 * Thread: one.
 */
#ifndef LH_SIM_DISK_H
#define LH_SIM_DISK_H

#include "sim/world.h"

#define LH_SIM_DISK_PAGE_BYTES (64 * LH_KIB)
#define LH_SIM_DISK_FILE_COUNT_MAX 16

struct lh_sim_disk_page {
    uint8_t *written;
    uint8_t *durable;
};

/* A write that no sync has covered. */
struct lh_sim_disk_write {
    struct lh_sim_disk_write *next;
    uint32_t file;
    uint64_t offset;
    uint64_t bytes;
    uint64_t sequence;
    uint8_t *copy;
};

struct lh_sim_disk_file {
    uint64_t bytes;
    uint64_t page_count;
    struct lh_sim_disk_page *pages;
};

struct lh_sim_disk {
    struct lh_sim_world *world;
    struct lh_sim_disk_file files[LH_SIM_DISK_FILE_COUNT_MAX];
    uint32_t file_count;
    struct lh_sim_disk_write *head; /* in the order of their completion */
    struct lh_sim_disk_write *tail;
    uint64_t next_sequence;
};

/*
 * Empty files of these sizes. Memory that runs out later is asserted.
 *
 * Owns:   *disk owns its pages; release with lh_sim_disk_deinit(). world is borrowed until then.
 * Errors: -ENOMEM; nothing is owned then.
 */
int lh_sim_disk_init(struct lh_sim_disk *disk, struct lh_sim_world *world, const uint64_t *bytes,
                     uint32_t file_count, struct lh_error *err) LH_MUST_CHECK;
void lh_sim_disk_deinit(struct lh_sim_disk *disk);

/* A real file's bytes, all durable. Errors: -errno of reading. */
int lh_sim_disk_load(struct lh_sim_disk *disk, uint32_t file, const char *path,
                     struct lh_error *err) LH_MUST_CHECK;
/* The durable bytes into the real file. Errors: -errno of writing. */
int lh_sim_disk_store(const struct lh_sim_disk *disk, uint32_t file, const char *path,
                      struct lh_error *err) LH_MUST_CHECK;

/* All within the file: asserted. */
void lh_sim_disk_read(const struct lh_sim_disk *disk, uint32_t file, uint64_t offset, void *buffer,
                      uint64_t bytes);
void lh_sim_disk_write(struct lh_sim_disk *disk, uint32_t file, uint64_t offset, const void *buffer,
                       uint64_t bytes);
/* What a sync submitted now will cover. */
uint64_t lh_sim_disk_mark(const struct lh_sim_disk *disk);
/* The sync of file is through: its writes before mark are durable. */
void lh_sim_disk_sync(struct lh_sim_disk *disk, uint32_t file, uint64_t mark);
/* The power fails. */
void lh_sim_disk_crash(struct lh_sim_disk *disk, struct lh_sim_random *random);

#endif
