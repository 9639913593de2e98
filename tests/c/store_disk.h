/*
 * A disk in memory for the store's tests, which implements the store's file calls. A power failure
 * can leave it in every state in which it may leave a real disk.
 *
 * Every write, sync and change of a directory is an event. disk_cut() makes the disk that remains
 * if power fails before an event: what a sync has covered, and any part of the rest, in sectors of
 * 512 bytes. A sync can be made to fail, which drops the pages: they can still be read, but no
 * later sync makes them durable.
 */
#ifndef LH_TEST_STORE_DISK_H
#define LH_TEST_STORE_DISK_H

#include "store/fs.h"

#define DISK_FILE_COUNT_MAX 4
#define DISK_EVENT_COUNT_MAX 1024
#define DISK_SECTOR_BYTES 512

enum disk_kind { DISK_CREATE, DISK_SIZE, DISK_WRITE, DISK_SYNC, DISK_SYNC_DIRECTORY };

struct disk_event {
    enum disk_kind kind;
    bool is_dropped; /* a sync failed and dropped it */
    uint32_t file;
    uint64_t offset;
    uint64_t bytes;
    uint8_t *data;
};

struct disk_file {
    char path[512];
    bool is_there;
    uint8_t *bytes;
    uint64_t size;
};

struct disk {
    struct lh_store_fs fs;
    struct disk_file files[DISK_FILE_COUNT_MAX];
    struct disk_file base[DISK_FILE_COUNT_MAX]; /* what was durable before the first event */
    struct disk_event events[DISK_EVENT_COUNT_MAX];
    uint32_t event_count;
    uint32_t sync_count;
    int fail_sync; /* the number of syncs until one fails; below 0: none fails */
    /* A read of this block of this file fails with -EIO; bad_file below 0: none fails. */
    int bad_file;
    uint64_t bad_offset;
};

struct disk *disk_new(void);
void disk_delete(struct disk *disk);
/* Make everything durable, and forget all events. */
void disk_settle(struct disk *disk);
/* Set target's files to those of disk after a power failure before event number cut. */
void disk_cut(const struct disk *disk, uint32_t cut, int variant, uint64_t *seed,
              struct disk *target);
/* Forget the events from number cut on: the process dies there, without a power failure. */
void disk_kill(struct disk *disk, uint32_t cut);
void disk_copy(const struct disk *source, struct disk *target);
uint8_t *disk_bytes(struct disk *disk, uint32_t file, uint64_t offset);

#endif
