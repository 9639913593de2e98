/*
 * Drives in main memory, with separate images of what was written and what is durable.
 *
 *      write --> written image (what a read returns), and a list of writes that no sync covers
 *      sync  --> the writes that had completed when it was submitted go to the durable image
 *      kill  --> nothing changes: the next process reads the written image
 *      crash --> some blocks of every write on the list go to the durable image, chosen by seed;
 *                then the written image becomes a copy of the durable one
 *
 * A crash decides at random what to keep, and whether a kept block of 4 KiB has all of its sectors
 * of 512 bytes.
 *
 * A sync that fails and drops moves the writes it would have covered to limbo: reads may still
 * return them, no later sync covers them, and a crash keeps some or none of them. A newer write to
 * the same place that becomes durable ends this state.
 *
 * Each drive has one directory with at most one file. A name is durable only after its parent
 * directory is synced; a file's size, only after the file is.
 *
 * A page that was never written reads as zeros and takes no memory. Running out of memory is an
 * assertion failure: only small models are simulated with their bytes.
 *
 * Thread: one.
 */
#ifndef LH_TEST_SIM_DISK_H
#define LH_TEST_SIM_DISK_H

#include "lives/fault.h"
#include "sim/link.h"

#define LH_SIM_DISK_PAGE_BYTES (16 * LH_KIB)
#define LH_SIM_DISK_SECTOR_BYTES UINT64_C(512)
#define LH_SIM_DISK_FILE_COUNT_MAX LH_SIM_SSD_COUNT_MAX

/* A page of both images. After a crash the pointers are equal, until one image is written. */
struct lh_sim_disk_page {
    uint8_t *written;
    uint8_t *durable;
};

/* A write that no sync has covered, or a block in limbo. */
struct lh_sim_disk_write {
    struct lh_sim_disk_write *next;
    uint32_t file;
    uint64_t offset;
    uint64_t bytes;
    uint64_t sequence;
    uint8_t *copy;
};

/* An entry of a directory. */
struct lh_sim_disk_name {
    bool is_there;
    bool is_durable; /* whether is_there is certain to survive a crash */
};

/* A drive: its directory, and the file in it. */
struct lh_sim_disk_file {
    struct lh_sim_disk_name directory;
    struct lh_sim_disk_name name;
    bool is_dead; /* every request fails with -EIO */
    uint64_t bytes;
    uint64_t durable_bytes;
    uint64_t page_count;
    struct lh_sim_disk_page *pages;
};

/* A copy of a file at an earlier time. */
struct lh_sim_disk_copy {
    uint32_t file;
    uint64_t bytes;
    uint64_t page_count;
    uint8_t **pages; /* NULL: no copy */
};

struct lh_sim_disk {
    struct lh_sim_world *world;
    struct lh_sim_fault_log *faults;
    struct lh_sim_disk_file files[LH_SIM_DISK_FILE_COUNT_MAX];
    uint32_t file_count;
    struct lh_sim_disk_write *head; /* in order of completion */
    struct lh_sim_disk_write *tail;
    struct lh_sim_disk_write *limbo; /* newest first */
    uint64_t next_sequence;
};

/*
 * Initialize empty drives, whose directories do not exist.
 *
 * Owns:   *disk owns its pages; release with lh_sim_disk_deinit(). faults is borrowed until then.
 */
void lh_sim_disk_init(struct lh_sim_disk *disk, struct lh_sim_fault_log *faults,
                      uint32_t file_count);
void lh_sim_disk_deinit(struct lh_sim_disk *disk);

/* Create (is_there) or remove a name. lh_sim_disk_name_sync() makes the change durable. */
void lh_sim_disk_name_set(struct lh_sim_disk *disk, struct lh_sim_disk_name *name, bool is_there);
void lh_sim_disk_name_sync(struct lh_sim_disk_name *name);
/* Set the size of a file; bytes beyond it are discarded. */
void lh_sim_disk_resize(struct lh_sim_disk *disk, uint32_t file, uint64_t bytes);

/* Read the written bytes. Asserts that the range is within the file, as the functions below do. */
void lh_sim_disk_read(const struct lh_sim_disk *disk, uint32_t file, uint64_t offset, void *buffer,
                      uint64_t bytes);
/* Read the durable bytes. Returns false if lh_sim_disk_read() would return the same bytes. */
bool lh_sim_disk_read_stale(const struct lh_sim_disk *disk, uint32_t file, uint64_t offset,
                            void *buffer, uint64_t bytes);
void lh_sim_disk_write(struct lh_sim_disk *disk, uint32_t file, uint64_t offset, const void *buffer,
                       uint64_t bytes);
/* Simulate an interrupted write: write all or a random selection of its blocks. */
void lh_sim_disk_write_some(struct lh_sim_disk *disk, uint32_t file, uint64_t offset,
                            const void *buffer, uint64_t bytes, struct lh_sim_random *random);
/* A mark: a sync that is submitted now covers the writes before it. */
uint64_t lh_sim_disk_mark(const struct lh_sim_disk *disk);
/* Complete a sync: the file's size and its writes before mark become durable. */
void lh_sim_disk_sync(struct lh_sim_disk *disk, uint32_t file, uint64_t mark);
/* Fail a sync: the file's writes before mark go to limbo, or are lost at once. */
void lh_sim_disk_sync_drop(struct lh_sim_disk *disk, uint32_t file, uint64_t mark,
                           struct lh_sim_random *random);
/* Simulate a power failure. tears: blocks may be torn. */
void lh_sim_disk_crash(struct lh_sim_disk *disk, bool tears, struct lh_sim_random *random);

/* disk_damage.c: damage to a drive while no process uses it */

/* Apply one of LH_SIM_FAULTS_DAMAGE (copy: for OLD). Returns false if that changes nothing. */
bool lh_sim_disk_damage(struct lh_sim_disk *disk, enum lh_sim_fault fault, uint32_t file,
                        const struct lh_sim_disk_copy *copy, struct lh_sim_random *random);
/* Copy the durable image of a file. Release with lh_sim_disk_copy_free(). */
void lh_sim_disk_copy_make(const struct lh_sim_disk *disk, uint32_t file,
                           struct lh_sim_disk_copy *copy_out);
void lh_sim_disk_copy_free(const struct lh_sim_disk *disk, struct lh_sim_disk_copy *copy);

#endif
