/*
 * The simulator's file system: the store's file calls (store/fs.h), on the drives of a lh_sim_disk.
 * Directory number n is "/sim/n"; the only file in it is the store's.
 *
 * Calls take no virtual time. Each call draws the faults of a request (lives/fault.h) except SPIKE,
 * REORDER and HANG, which concern time. The process can end inside any call, which then has a
 * partial effect or none. This call and all later calls fail with -EIO, and the later calls do
 * nothing, until lh_sim_fs_restart(). So the store's code unwinds as after an error, and can no
 * longer access the drives.
 *
 * Thread: one.
 */
#ifndef LH_TEST_SIM_FS_H
#define LH_TEST_SIM_FS_H

#include "lives/disk.h"
#include "store/fs.h"

#define LH_SIM_FS_OPEN_COUNT_MAX 64
#define LH_SIM_FS_PATH_BYTES 16

struct lh_sim_fs_open {
    bool is_open;
    uint32_t file;
    enum lh_store_fs_lock lock;
};

struct lh_sim_fs {
    struct lh_store_fs fs; /* the first member, because the store's pointer points to it */
    struct lh_sim_disk *disk;
    struct lh_sim_random random;
    struct lh_sim_faults faults;
    bool is_dead;
    uint64_t call_count;
    uint64_t dies_after; /* the call count at which the process ends; UINT64_MAX: never */
    struct lh_sim_fs_open opens[LH_SIM_FS_OPEN_COUNT_MAX];
    char paths[LH_SIM_DISK_FILE_COUNT_MAX][LH_SIM_FS_PATH_BYTES];
    const char *directories[LH_SIM_DISK_FILE_COUNT_MAX];
};

/* disk is borrowed for as long as fs is used. There are no faults until lh_sim_fs_restart(). */
void lh_sim_fs_init(struct lh_sim_fs *fs, struct lh_sim_disk *disk, uint64_t seed);
/* Start a new process, with these faults (NULL: none): no file is open or locked. */
void lh_sim_fs_restart(struct lh_sim_fs *fs, const struct lh_sim_faults *faults);
/* End the process: no call has an effect from now on. */
void lh_sim_fs_kill(struct lh_sim_fs *fs);
/* End the process after this many further calls. */
void lh_sim_fs_kill_after(struct lh_sim_fs *fs, uint64_t call_count);

#endif
