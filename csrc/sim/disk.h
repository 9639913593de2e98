/*
 * Drives in main memory: what was written is not what is durable.
 *
 *      write --> written image (what a read gives), and a list of writes that no sync covers
 *      sync  --> the writes that had completed when it was submitted go to the durable image
 *      kill  --> nothing changes: the next process reads the written image
 *      crash --> of every write on the list some blocks go to the durable image, chosen by seed;
 *                then the written image is the durable one
 *
 * What a crash keeps, and of a block of 4 KiB whether all of its sectors of 512 bytes, is drawn.
 *
 * A sync that fails and drops puts the writes it would have covered aside (limbo): reads may still
 * give them, no later sync covers them, and a crash keeps some of them or none. A newer write to
 * the same place that becomes durable ends that.
 *
 * Each drive has one directory with at most one file. Names are not durable either until the
 * directory above them is synced; nor is a file's size until the file is.
 *
 * A page nobody wrote is zeros and takes no memory. Memory that runs out is asserted: only small
 * models are simulated with their bytes.
 *
 * Thread: one.
 */
#ifndef LH_SIM_DISK_H
#define LH_SIM_DISK_H

#include "sim/world.h"

#define LH_SIM_DISK_PAGE_BYTES (16 * LH_KIB)
#define LH_SIM_DISK_SECTOR_BYTES UINT64_C(512)
#define LH_SIM_DISK_FILE_COUNT_MAX 16

/* Both the same pointer where nothing but the durable bytes was written. */
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
    bool is_durable; /* it is there after a crash for certain */
};

/* A drive: its directory, and the file in it. */
struct lh_sim_disk_file {
    struct lh_sim_disk_name directory;
    struct lh_sim_disk_name name;
    bool is_dead; /* all it answers is -EIO */
    uint64_t bytes;
    uint64_t durable_bytes;
    uint64_t page_count;
    struct lh_sim_disk_page *pages;
};

/* What a file was once. */
struct lh_sim_disk_copy {
    uint32_t file;
    uint64_t bytes;
    uint64_t page_count;
    uint8_t **pages; /* NULL: there is no copy */
};

struct lh_sim_disk {
    struct lh_sim_world *world;
    struct lh_sim_disk_file files[LH_SIM_DISK_FILE_COUNT_MAX];
    uint32_t file_count;
    struct lh_sim_disk_write *head; /* in the order of their completion */
    struct lh_sim_disk_write *tail;
    struct lh_sim_disk_write *limbo; /* newest first */
    uint64_t next_sequence;
};

/*
 * Empty drives: their directories do not exist.
 *
 * Owns:   *disk owns its pages; release with lh_sim_disk_deinit(). world is borrowed until then.
 */
void lh_sim_disk_init(struct lh_sim_disk *disk, struct lh_sim_world *world, uint32_t file_count);
void lh_sim_disk_deinit(struct lh_sim_disk *disk);

/* A name appears (is_there) or goes; durable once lh_sim_disk_name_sync() was called. */
void lh_sim_disk_name_set(struct lh_sim_disk *disk, struct lh_sim_disk_name *name, bool is_there);
void lh_sim_disk_name_sync(struct lh_sim_disk_name *name);
/* The file's size from here on; what is beyond it is forgotten. */
void lh_sim_disk_resize(struct lh_sim_disk *disk, uint32_t file, uint64_t bytes);

/* All within the file: asserted. */
void lh_sim_disk_read(const struct lh_sim_disk *disk, uint32_t file, uint64_t offset, void *buffer,
                      uint64_t bytes);
/* What is durable there. Returns false where that is what lh_sim_disk_read() gives. */
bool lh_sim_disk_read_stale(const struct lh_sim_disk *disk, uint32_t file, uint64_t offset,
                            void *buffer, uint64_t bytes);
void lh_sim_disk_write(struct lh_sim_disk *disk, uint32_t file, uint64_t offset, const void *buffer,
                       uint64_t bytes);
/* A write that ends in the middle: any of its blocks. */
void lh_sim_disk_write_some(struct lh_sim_disk *disk, uint32_t file, uint64_t offset,
                            const void *buffer, uint64_t bytes, struct lh_sim_random *random);
/* What a sync submitted now will cover. */
uint64_t lh_sim_disk_mark(const struct lh_sim_disk *disk);
/* The sync of file is through: its size and its writes before mark are durable. */
void lh_sim_disk_sync(struct lh_sim_disk *disk, uint32_t file, uint64_t mark);
/* It failed: its writes before mark are in limbo. */
void lh_sim_disk_sync_drop(struct lh_sim_disk *disk, uint32_t file, uint64_t mark,
                           struct lh_sim_random *random);
/* The power fails. Blocks may be torn where tears. */
void lh_sim_disk_crash(struct lh_sim_disk *disk, bool tears, struct lh_sim_random *random);

/* disk_damage.c: what happens to a drive while no process uses it */

/* One of LH_SIM_FAULTS_DAMAGE (copy: for OLD). Returns false where it would change nothing. */
bool lh_sim_disk_damage(struct lh_sim_disk *disk, enum lh_sim_fault fault, uint32_t file,
                        const struct lh_sim_disk_copy *copy, struct lh_sim_random *random);
/* What is durable of a file. Release with lh_sim_disk_copy_free(). */
void lh_sim_disk_copy_make(const struct lh_sim_disk *disk, uint32_t file,
                           struct lh_sim_disk_copy *copy_out);
void lh_sim_disk_copy_free(const struct lh_sim_disk *disk, struct lh_sim_disk_copy *copy);

#endif
