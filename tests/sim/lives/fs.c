#include "lives/fs.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "store/format.h"

#define ROOT "/sim"
#define FD_FIRST 1000
/* More than any store needs, so that only a fault makes a drive full. */
#define AVAILABLE_BYTES (UINT64_C(1) << 40)

enum place {
    PLACE_NONE,
    PLACE_ROOT,
    PLACE_DIRECTORY,
    PLACE_FILE,
};

static struct lh_sim_fs *of(const struct lh_store_fs *fs)
{
    return (struct lh_sim_fs *)(uintptr_t)fs; /* const for callers, but the state changes here */
}

static enum place place_find(const struct lh_sim_fs *sim, const char *path, uint32_t *file_out)
{
    if (strcmp(path, ROOT) == 0)
        return PLACE_ROOT;
    for (uint32_t i = 0; i < sim->disk->file_count; i++) {
        size_t chars = strlen(sim->paths[i]);
        if (strncmp(path, sim->paths[i], chars) != 0)
            continue;
        *file_out = i;
        if (path[chars] == '\0')
            return PLACE_DIRECTORY;
        if (strcmp(path + chars, "/" LH_STORE_FILE_NAME) == 0)
            return PLACE_FILE;
    }
    return PLACE_NONE;
}

static struct lh_sim_fs_open *open_of(struct lh_sim_fs *sim, int fd)
{
    LH_ASSERT(fd >= FD_FIRST && fd < FD_FIRST + LH_SIM_FS_OPEN_COUNT_MAX);
    LH_ASSERT(sim->opens[fd - FD_FIRST].is_open);
    return &sim->opens[fd - FD_FIRST];
}

static struct lh_sim_disk_file *file_at(struct lh_sim_fs *sim, uint32_t file)
{
    LH_ASSERT(file < sim->disk->file_count);
    return &sim->disk->files[file];
}

/*
 * Count a call. Returns 0 if it happens, -EIO if the process has ended or the drive is dead.
 * *is_last_out: the process ends inside this very call.
 */
static int call_begin(struct lh_sim_fs *sim, uint32_t file, bool *is_last_out)
{
    *is_last_out = false;
    if (sim->is_dead)
        return -EIO;
    if (sim->call_count++ >= sim->dies_after) {
        sim->is_dead = true;
        *is_last_out = true;
        return -EIO;
    }
    return file != UINT32_MAX && file_at(sim, file)->is_dead ? -EIO : 0;
}

static bool is_hit(struct lh_sim_fs *sim, enum lh_sim_fault fault, uint32_t file, uint64_t offset)
{
    if (!lh_sim_random_chance(&sim->random, sim->faults.ppm[fault]))
        return false;
    lh_sim_fault_add(sim->disk->faults, fault, file, offset, 0);
    return true;
}

/* Draw the errors that any call to a drive can have. */
static int error_draw(struct lh_sim_fs *sim, uint32_t file, uint64_t offset)
{
    if (is_hit(sim, LH_SIM_FAULT_DEAD, file, offset)) {
        file_at(sim, file)->is_dead = true;
        return -EIO;
    }
    return is_hit(sim, LH_SIM_FAULT_ERROR, file, offset) ? -EIO : 0;
}

static int fs_open(const struct lh_store_fs *fs, const char *path, enum lh_store_fs_access access,
                   int *fd_out)
{
    struct lh_sim_fs *sim = of(fs);
    uint32_t file = 0;
    bool is_last = false;
    *fd_out = -1;
    if (place_find(sim, path, &file) != PLACE_FILE)
        return -ENOENT;
    int rc = call_begin(sim, file, &is_last);
    struct lh_sim_disk_file *target = file_at(sim, file);
    if (rc < 0 && !(is_last && access == LH_STORE_FS_CREATE))
        return rc;
    if (access == LH_STORE_FS_CREATE) {
        if (!target->directory.is_there)
            return -ENOENT;
        if (target->name.is_there)
            return -EEXIST;
        lh_sim_disk_name_set(sim->disk, &target->name, true);
        if (is_last)
            return -EIO;
    }
    if (!target->name.is_there)
        return -ENOENT;
    for (int i = 0; i < LH_SIM_FS_OPEN_COUNT_MAX; i++) {
        if (sim->opens[i].is_open)
            continue;
        sim->opens[i] = (struct lh_sim_fs_open){.is_open = true, .file = file};
        *fd_out = FD_FIRST + i;
        return 0;
    }
    return -EMFILE;
}

static void fs_close(const struct lh_store_fs *fs, int fd)
{
    struct lh_sim_fs *sim = of(fs);
    *open_of(sim, fd) = (struct lh_sim_fs_open){0};
}

/* Shorten a transfer to whole blocks, at least one, as O_DIRECT may. */
static uint64_t shorten(struct lh_sim_fs *sim, uint32_t file, uint64_t offset, uint64_t bytes)
{
    uint64_t blocks = bytes / LH_BLOCK_BYTES;
    if (blocks < 2 || !is_hit(sim, LH_SIM_FAULT_SHORT, file, offset))
        return bytes;
    return LH_BLOCK_BYTES * (1 + lh_sim_random_below(&sim->random, blocks - 1));
}

static int64_t fs_read(const struct lh_store_fs *fs, int fd, void *buffer, uint64_t bytes,
                       uint64_t offset)
{
    struct lh_sim_fs *sim = of(fs);
    uint32_t file = open_of(sim, fd)->file;
    uint64_t end = file_at(sim, file)->bytes;
    bool is_last = false;
    LH_TRY(call_begin(sim, file, &is_last));
    LH_TRY(error_draw(sim, file, offset));
    if (offset >= end)
        return 0;
    bytes = shorten(sim, file, offset, lh_min_u64(bytes, end - offset));
    lh_sim_disk_read(sim->disk, file, offset, buffer, bytes);
    if (lh_sim_random_chance(&sim->random, sim->faults.ppm[LH_SIM_FAULT_STALE]) &&
        lh_sim_disk_read_stale(sim->disk, file, offset, buffer, bytes))
        lh_sim_fault_add(sim->disk->faults, LH_SIM_FAULT_STALE, file, offset, 0);
    if (is_hit(sim, LH_SIM_FAULT_FLIP, file, offset)) {
        uint64_t bit = lh_sim_random_below(&sim->random, bytes * 8);
        ((uint8_t *)buffer)[bit / 8] ^= (uint8_t)(1U << bit % 8);
    }
    return (int64_t)bytes;
}

static int64_t fs_write(const struct lh_store_fs *fs, int fd, const void *buffer, uint64_t bytes,
                        uint64_t offset)
{
    struct lh_sim_fs *sim = of(fs);
    uint32_t file = open_of(sim, fd)->file;
    bool is_last = false;
    LH_ASSERT(offset + bytes <= file_at(sim, file)->bytes); /* a store writes only reserved space */
    int rc = call_begin(sim, file, &is_last);
    if (rc == 0)
        rc = error_draw(sim, file, offset);
    if (rc < 0) {
        if (!file_at(sim, file)->is_dead && (is_last || !sim->is_dead))
            lh_sim_disk_write_some(sim->disk, file, offset, buffer, bytes, &sim->random);
        return rc;
    }
    if (is_hit(sim, LH_SIM_FAULT_SPACE, file, offset))
        return -ENOSPC;
    bytes = shorten(sim, file, offset, bytes);
    if (is_hit(sim, LH_SIM_FAULT_LOST, file, offset))
        return (int64_t)bytes;
    if (is_hit(sim, LH_SIM_FAULT_MISDIRECT, file, offset)) {
        uint64_t room = file_at(sim, file)->bytes - bytes;
        offset = LH_BLOCK_BYTES * lh_sim_random_below(&sim->random, room / LH_BLOCK_BYTES + 1);
    }
    lh_sim_disk_write(sim->disk, file, offset, buffer, bytes);
    return (int64_t)bytes;
}

static int fs_sync(const struct lh_store_fs *fs, int fd)
{
    struct lh_sim_fs *sim = of(fs);
    uint32_t file = open_of(sim, fd)->file;
    uint64_t mark = lh_sim_disk_mark(sim->disk);
    bool is_last = false;
    LH_TRY(call_begin(sim, file, &is_last));
    LH_TRY(error_draw(sim, file, 0));
    if (is_hit(sim, LH_SIM_FAULT_DROP, file, 0)) {
        lh_sim_disk_sync_drop(sim->disk, file, mark, &sim->random);
        return -EIO;
    }
    if (!is_hit(sim, LH_SIM_FAULT_LIE, file, 0))
        lh_sim_disk_sync(sim->disk, file, mark);
    return 0;
}

static int fs_size_set(struct lh_sim_fs *sim, int fd, uint64_t bytes)
{
    uint32_t file = open_of(sim, fd)->file;
    bool is_last = false;
    LH_TRY(call_begin(sim, file, &is_last));
    LH_TRY(error_draw(sim, file, 0));
    if (is_hit(sim, LH_SIM_FAULT_SPACE, file, 0))
        return -ENOSPC;
    lh_sim_disk_resize(sim->disk, file, bytes);
    return 0;
}

static int fs_reserve(const struct lh_store_fs *fs, int fd, uint64_t bytes)
{
    return fs_size_set(of(fs), fd, bytes);
}

static int fs_truncate(const struct lh_store_fs *fs, int fd, uint64_t bytes)
{
    return fs_size_set(of(fs), fd, bytes);
}

static int fs_info(const struct lh_store_fs *fs, int fd, struct lh_store_fs_info *info_out)
{
    struct lh_sim_fs *sim = of(fs);
    uint32_t file = open_of(sim, fd)->file;
    bool is_last = false;
    LH_TRY(call_begin(sim, file, &is_last));
    *info_out = (struct lh_store_fs_info){
        .device = file,
        .inode = file + 1,
        .bytes = file_at(sim, file)->bytes,
        .is_regular = true,
        .available_bytes = AVAILABLE_BYTES,
    };
    return 0;
}

static int fs_lock(const struct lh_store_fs *fs, int fd, enum lh_store_fs_lock lock)
{
    struct lh_sim_fs *sim = of(fs);
    struct lh_sim_fs_open *mine = open_of(sim, fd);
    bool is_last = false;
    LH_TRY(call_begin(sim, mine->file, &is_last));
    for (uint32_t i = 0; i < LH_SIM_FS_OPEN_COUNT_MAX; i++) {
        const struct lh_sim_fs_open *other = &sim->opens[i];
        bool both_share = lock == LH_STORE_FS_SHARED && other->lock == LH_STORE_FS_SHARED;
        if (other != mine && other->is_open && other->file == mine->file &&
            lock != LH_STORE_FS_UNLOCKED && other->lock != LH_STORE_FS_UNLOCKED && !both_share)
            return -EWOULDBLOCK;
    }
    mine->lock = lock;
    return 0;
}

static int fs_set_direct(const struct lh_store_fs *fs, int fd, bool direct)
{
    struct lh_sim_fs *sim = of(fs);
    bool is_last = false;
    (void)direct;
    return call_begin(sim, open_of(sim, fd)->file, &is_last);
}

static int fs_path_info(const struct lh_store_fs *fs, const char *path,
                        struct lh_store_fs_info *info_out)
{
    struct lh_sim_fs *sim = of(fs);
    uint32_t file = UINT32_MAX;
    bool is_last = false;
    enum place place = place_find(sim, path, &file);
    if (place == PLACE_NONE)
        return -ENOENT;
    LH_TRY(call_begin(sim, file, &is_last));
    bool is_there =
        place == PLACE_ROOT || (place == PLACE_DIRECTORY ? file_at(sim, file)->directory.is_there
                                                         : file_at(sim, file)->name.is_there);
    if (!is_there)
        return -ENOENT;
    *info_out = (struct lh_store_fs_info){
        .device = file,
        .inode = place == PLACE_FILE ? file + 1 : LH_SIM_DISK_FILE_COUNT_MAX + 1 + file,
        .bytes = place == PLACE_FILE ? file_at(sim, file)->bytes : 0,
        .is_regular = place == PLACE_FILE,
        .is_directory = place != PLACE_FILE,
        .available_bytes = AVAILABLE_BYTES,
    };
    return 0;
}

static int fs_make_directory(const struct lh_store_fs *fs, const char *path)
{
    struct lh_sim_fs *sim = of(fs);
    uint32_t file = 0;
    bool is_last = false;
    if (place_find(sim, path, &file) != PLACE_DIRECTORY)
        return -ENOENT;
    int rc = call_begin(sim, file, &is_last);
    struct lh_sim_disk_name *name = &file_at(sim, file)->directory;
    if (rc < 0 && !is_last)
        return rc;
    if (name->is_there)
        return -EEXIST;
    lh_sim_disk_name_set(sim->disk, name, true);
    return rc;
}

static int fs_sync_directory(const struct lh_store_fs *fs, const char *path)
{
    struct lh_sim_fs *sim = of(fs);
    uint32_t file = UINT32_MAX;
    bool is_last = false;
    enum place place = place_find(sim, path, &file);
    if (place != PLACE_ROOT && place != PLACE_DIRECTORY)
        return -ENOENT;
    LH_TRY(call_begin(sim, file, &is_last));
    if (place == PLACE_DIRECTORY) {
        LH_TRY(error_draw(sim, file, 0));
        lh_sim_disk_name_sync(&file_at(sim, file)->name);
        return 0;
    }
    for (uint32_t i = 0; i < sim->disk->file_count; i++)
        lh_sim_disk_name_sync(&file_at(sim, i)->directory);
    return 0;
}

static int fs_remove(const struct lh_store_fs *fs, const char *path)
{
    struct lh_sim_fs *sim = of(fs);
    uint32_t file = 0;
    bool is_last = false;
    enum place place = place_find(sim, path, &file);
    if (place != PLACE_DIRECTORY && place != PLACE_FILE)
        return -ENOENT;
    int rc = call_begin(sim, file, &is_last);
    struct lh_sim_disk_file *target = file_at(sim, file);
    struct lh_sim_disk_name *name = place == PLACE_FILE ? &target->name : &target->directory;
    if (rc < 0 && !is_last)
        return rc;
    if (!name->is_there)
        return -ENOENT;
    if (place == PLACE_DIRECTORY && target->name.is_there)
        return -ENOTEMPTY;
    lh_sim_disk_name_set(sim->disk, name, false);
    return rc;
}

static int fs_random(const struct lh_store_fs *fs, void *buffer, uint64_t bytes)
{
    struct lh_sim_fs *sim = of(fs);
    for (uint64_t i = 0; i < bytes; i++)
        ((uint8_t *)buffer)[i] = (uint8_t)lh_sim_random_next(&sim->random);
    return 0;
}

void lh_sim_fs_init(struct lh_sim_fs *fs, struct lh_sim_disk *disk, uint64_t seed)
{
    static const struct lh_store_fs_ops ops = {
        .open = fs_open,
        .close = fs_close,
        .read = fs_read,
        .write = fs_write,
        .sync = fs_sync,
        .reserve = fs_reserve,
        .truncate = fs_truncate,
        .info = fs_info,
        .lock = fs_lock,
        .set_direct = fs_set_direct,
        .path_info = fs_path_info,
        .make_directory = fs_make_directory,
        .sync_directory = fs_sync_directory,
        .remove = fs_remove,
        .random = fs_random,
    };
    *fs = (struct lh_sim_fs){.fs = {.ops = &ops}, .disk = disk, .dies_after = UINT64_MAX};
    lh_sim_random_init(&fs->random, seed, LH_SIM_STREAM_FILES);
    for (uint32_t i = 0; i < disk->file_count; i++) {
        snprintf(fs->paths[i], sizeof(fs->paths[i]), ROOT "/%u", i);
        fs->directories[i] = fs->paths[i];
    }
}

void lh_sim_fs_restart(struct lh_sim_fs *fs, const struct lh_sim_faults *faults)
{
    memset(fs->opens, 0, sizeof(fs->opens));
    fs->faults = faults ? *faults : (struct lh_sim_faults){0};
    fs->is_dead = false;
    fs->call_count = 0;
    fs->dies_after = UINT64_MAX;
}

void lh_sim_fs_kill(struct lh_sim_fs *fs)
{
    fs->is_dead = true;
}

void lh_sim_fs_kill_after(struct lh_sim_fs *fs, uint64_t call_count)
{
    fs->dies_after = fs->call_count + call_count;
}
