#include "store_disk.h"

#include <errno.h>

#include "lh_test.h"

#define FD_FIRST 1000

static struct disk *disk_of(const struct lh_store_fs *fs)
{
    return (struct disk *)(uintptr_t)fs;
}

static int file_find(const struct disk *disk, const char *path)
{
    for (int file = 0; file < DISK_FILE_COUNT_MAX; file++) {
        if (disk->files[file].is_there && strcmp(disk->files[file].path, path) == 0)
            return file;
    }
    return -1;
}

static struct disk_event *event_add(struct disk *disk, enum disk_kind kind, uint32_t file)
{
    LH_CHECK(disk->event_count < DISK_EVENT_COUNT_MAX);
    struct disk_event *event = &disk->events[disk->event_count++];
    *event = (struct disk_event){.kind = kind, .file = file};
    return event;
}

static void file_resize(struct disk_file *file, uint64_t size)
{
    if (size <= file->size)
        return;
    file->bytes = realloc(file->bytes, size);
    LH_CHECK(file->bytes != NULL);
    memset(file->bytes + file->size, 0, size - file->size);
    file->size = size;
}

static void file_copy(const struct disk_file *source, struct disk_file *target)
{
    uint8_t *bytes = target->bytes;
    if (target->size < source->size || bytes == NULL)
        bytes = realloc(bytes, source->size + 1);
    LH_CHECK(bytes != NULL);
    *target = *source;
    target->bytes = bytes;
    if (source->size > 0)
        memcpy(bytes, source->bytes, source->size);
}

static int fs_open(const struct lh_store_fs *fs, const char *path, enum lh_store_fs_access access,
                   int *fd_out)
{
    struct disk *disk = disk_of(fs);
    int file = file_find(disk, path);
    *fd_out = -1;
    if (access == LH_STORE_FS_CREATE) {
        if (file >= 0)
            return -EEXIST;
        for (file = 0; disk->files[file].path[0] != '\0'; file++)
            LH_CHECK(file + 1 < DISK_FILE_COUNT_MAX);
        snprintf(disk->files[file].path, sizeof(disk->files[file].path), "%s", path);
        disk->files[file].is_there = true;
        event_add(disk, DISK_CREATE, (uint32_t)file);
    }
    if (file < 0)
        return -ENOENT;
    *fd_out = FD_FIRST + file;
    return 0;
}

static void fs_close(const struct lh_store_fs *fs, int fd)
{
    (void)fs;
    (void)fd;
}

static int64_t fs_read(const struct lh_store_fs *fs, int fd, void *buffer, uint64_t bytes,
                       uint64_t offset)
{
    const struct disk *disk = disk_of(fs);
    const struct disk_file *file = &disk->files[fd - FD_FIRST];
    if (disk->bad_file == fd - FD_FIRST && offset < disk->bad_offset + LH_BLOCK_BYTES &&
        disk->bad_offset < offset + bytes)
        return -EIO;
    if (offset >= file->size)
        return 0;
    bytes = lh_min_u64(bytes, file->size - offset);
    memcpy(buffer, file->bytes + offset, bytes);
    return (int64_t)bytes;
}

static int64_t fs_write(const struct lh_store_fs *fs, int fd, const void *buffer, uint64_t bytes,
                        uint64_t offset)
{
    struct disk *disk = disk_of(fs);
    struct disk_file *file = &disk->files[fd - FD_FIRST];
    LH_CHECK(offset + bytes <= file->size);
    struct disk_event *event = event_add(disk, DISK_WRITE, (uint32_t)(fd - FD_FIRST));
    event->offset = offset;
    event->bytes = bytes;
    event->data = malloc(bytes);
    LH_CHECK(event->data != NULL);
    memcpy(event->data, buffer, bytes);
    memcpy(file->bytes + offset, buffer, bytes);
    return (int64_t)bytes;
}

static int fs_sync(const struct lh_store_fs *fs, int fd)
{
    struct disk *disk = disk_of(fs);
    uint32_t file = (uint32_t)(fd - FD_FIRST);
    disk->sync_count++;
    if (disk->fail_sync < 0 || disk->fail_sync-- > 0) {
        event_add(disk, DISK_SYNC, file);
        return 0;
    }
    for (uint32_t index = disk->event_count; index-- > 0;) {
        struct disk_event *event = &disk->events[index];
        if (event->file == file && event->kind == DISK_SYNC)
            break;
        if (event->file == file && event->kind == DISK_WRITE)
            event->is_dropped = true;
    }
    return -EIO;
}

static int fs_resize(const struct lh_store_fs *fs, int fd, uint64_t bytes)
{
    struct disk *disk = disk_of(fs);
    event_add(disk, DISK_SIZE, (uint32_t)(fd - FD_FIRST))->bytes = bytes;
    file_resize(&disk->files[fd - FD_FIRST], bytes);
    return 0;
}

static int fs_info(const struct lh_store_fs *fs, int fd, struct lh_store_fs_info *info_out)
{
    const struct disk *disk = disk_of(fs);
    *info_out = (struct lh_store_fs_info){
        .device = 1,
        .inode = (uint64_t)fd,
        .bytes = disk->files[fd - FD_FIRST].size,
        .is_regular = true,
        .available_bytes = UINT64_MAX,
    };
    return 0;
}

static int fs_lock(const struct lh_store_fs *fs, int fd, enum lh_store_fs_lock lock)
{
    (void)fs;
    (void)fd;
    (void)lock;
    return 0;
}

static int fs_set_direct(const struct lh_store_fs *fs, int fd, bool direct)
{
    (void)fs;
    (void)fd;
    (void)direct;
    return 0;
}

static int fs_path_info(const struct lh_store_fs *fs, const char *path,
                        struct lh_store_fs_info *info_out)
{
    (void)fs;
    *info_out = (struct lh_store_fs_info){.device = 1, .is_directory = true};
    for (; *path != '\0'; path++)
        info_out->inode = info_out->inode * 31 + (uint8_t)*path;
    return 0;
}

static int fs_path(const struct lh_store_fs *fs, const char *path)
{
    (void)fs;
    (void)path;
    return 0;
}

static int fs_sync_directory(const struct lh_store_fs *fs, const char *path)
{
    struct disk *disk = disk_of(fs);
    for (uint32_t file = 0; file < DISK_FILE_COUNT_MAX; file++) {
        if (strncmp(disk->files[file].path, path, strlen(path)) == 0)
            event_add(disk, DISK_SYNC_DIRECTORY, file);
    }
    return 0;
}

static int fs_random(const struct lh_store_fs *fs, void *buffer, uint64_t bytes)
{
    static uint8_t next = 1;
    (void)fs;
    memset(buffer, next++, bytes);
    return 0;
}

struct disk *disk_new(void)
{
    static const struct lh_store_fs_ops ops = {
        .open = fs_open,
        .close = fs_close,
        .read = fs_read,
        .write = fs_write,
        .sync = fs_sync,
        .reserve = fs_resize,
        .truncate = fs_resize,
        .info = fs_info,
        .lock = fs_lock,
        .set_direct = fs_set_direct,
        .path_info = fs_path_info,
        .make_directory = fs_path,
        .sync_directory = fs_sync_directory,
        .remove = fs_path,
        .random = fs_random,
    };
    struct disk *disk = calloc(1, sizeof(*disk));
    LH_CHECK(disk != NULL);
    disk->fs.ops = &ops;
    disk->fail_sync = -1;
    disk->bad_file = -1;
    return disk;
}

static void events_drop(struct disk *disk, uint32_t first)
{
    while (disk->event_count > first)
        free(disk->events[--disk->event_count].data);
}

void disk_delete(struct disk *disk)
{
    events_drop(disk, 0);
    for (uint32_t file = 0; file < DISK_FILE_COUNT_MAX; file++) {
        free(disk->files[file].bytes);
        free(disk->base[file].bytes);
    }
    free(disk);
}

void disk_settle(struct disk *disk)
{
    events_drop(disk, 0);
    disk->sync_count = 0;
    for (uint32_t file = 0; file < DISK_FILE_COUNT_MAX; file++)
        file_copy(&disk->files[file], &disk->base[file]);
}

void disk_copy(const struct disk *source, struct disk *target)
{
    for (uint32_t file = 0; file < DISK_FILE_COUNT_MAX; file++)
        file_copy(&source->files[file], &target->files[file]);
    disk_settle(target);
}

uint8_t *disk_bytes(struct disk *disk, uint32_t file, uint64_t offset)
{
    LH_CHECK(disk->files[file].is_there && offset < disk->files[file].size);
    return disk->files[file].bytes + offset;
}

static bool is_durable(const struct disk *disk, uint32_t index, uint32_t cut)
{
    const struct disk_event *event = &disk->events[index];
    enum disk_kind kind = event->kind == DISK_CREATE ? DISK_SYNC_DIRECTORY : DISK_SYNC;
    for (uint32_t later = index + 1; later < cut && !event->is_dropped; later++) {
        if (disk->events[later].kind == kind && disk->events[later].file == event->file)
            return true;
    }
    return false;
}

/* Variant 0: all writes survive. 1: none does. Others: some are whole, some torn, some missing. */
static void event_apply(const struct disk_event *event, bool survives, int variant, uint64_t *seed,
                        struct disk_file *file)
{
    uint64_t dice = lh_test_random(seed);
    bool is_whole = survives || variant == 0 || (variant > 1 && dice % 3 == 0);
    if (event->kind == DISK_CREATE && is_whole)
        file->is_there = true;
    if (event->kind == DISK_SIZE && is_whole)
        file_resize(file, event->bytes);
    if (event->kind != DISK_WRITE || file->size < event->offset + event->bytes)
        return;
    for (uint64_t at = 0; at < event->bytes; at += DISK_SECTOR_BYTES) {
        if (is_whole || (variant > 1 && dice % 3 == 1 && lh_test_random(seed) % 2))
            memcpy(file->bytes + event->offset + at, event->data + at,
                   lh_min_u64(DISK_SECTOR_BYTES, event->bytes - at));
    }
}

void disk_cut(const struct disk *disk, uint32_t cut, int variant, uint64_t *seed,
              struct disk *target)
{
    for (uint32_t file = 0; file < DISK_FILE_COUNT_MAX; file++) {
        file_copy(&disk->base[file], &target->files[file]);
        memcpy(target->files[file].path, disk->files[file].path, sizeof(target->files[file].path));
    }
    for (uint32_t index = 0; index < cut; index++) {
        const struct disk_event *event = &disk->events[index];
        event_apply(event, is_durable(disk, index, cut), variant, seed,
                    &target->files[event->file]);
    }
    target->bad_file = -1;
    target->fail_sync = -1;
    disk_settle(target);
}

void disk_kill(struct disk *disk, uint32_t cut)
{
    uint64_t seed = 0;
    LH_CHECK(cut <= disk->event_count);
    events_drop(disk, cut);
    for (uint32_t file = 0; file < DISK_FILE_COUNT_MAX; file++)
        file_copy(&disk->base[file], &disk->files[file]);
    for (uint32_t index = 0; index < cut; index++)
        event_apply(&disk->events[index], true, 0, &seed, &disk->files[disk->events[index].file]);
}
