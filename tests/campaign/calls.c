#include "calls.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define BLOCK_BYTES 4096
#define PUBLIC __attribute__((visibility("default")))

static char root[PATH_MAX];
static size_t root_bytes;
static int log_fd = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint64_t count;
static uint64_t armed_at;
static unsigned armed_kinds;
static enum calls_how armed_how;
static int armed_signal;
static int armed_code;

/* --- What is watched -------------------------------------------------------------------------- */

static bool is_below_root(const char *path)
{
    return root_bytes > 0 && strncmp(path, root, root_bytes) == 0 &&
           (path[root_bytes] == '/' || path[root_bytes] == '\0');
}

/* The path of an open file, if it is below the root. */
static bool fd_path(int fd, char *path)
{
    char link[64];
    if (root_bytes == 0 || fd < 0 || fd == log_fd)
        return false;
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    ssize_t bytes = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
    if (bytes <= 0)
        return false;
    path[bytes] = '\0';
    return is_below_root(path);
}

static bool is_watched(int fd)
{
    char path[PATH_MAX];
    return fd_path(fd, path);
}

/* The absolute path of (directory, path), if it is below the root. Links are not followed. */
static bool full_path(int directory, const char *path, char *full)
{
    char base[PATH_MAX] = "";
    if (root_bytes == 0 || path == NULL)
        return false;
    if (path[0] != '/') {
        char link[64] = "/proc/self/cwd";
        if (directory != AT_FDCWD)
            snprintf(link, sizeof(link), "/proc/self/fd/%d", directory);
        ssize_t bytes = syscall(SYS_readlinkat, AT_FDCWD, link, base, sizeof(base) - 2);
        if (bytes <= 0)
            return false;
        base[bytes] = '/';
        base[bytes + 1] = '\0';
    }
    if (snprintf(full, PATH_MAX, "%s%s", base, path) >= PATH_MAX)
        return false;
    size_t bytes = strlen(full);
    while (bytes > 1 && full[bytes - 1] == '/')
        full[--bytes] = '\0';
    return is_below_root(full);
}

static uint64_t file_of(int fd)
{
    struct stat info;
    return fstat(fd, &info) == 0 ? (uint64_t)info.st_ino : 0;
}

/* --- The log ---------------------------------------------------------------------------------- */

static void log_put(const struct iovec *parts, int part_count)
{
    for (int i = 0; i < part_count; i++) {
        const char *at = parts[i].iov_base;
        size_t left = parts[i].iov_len;
        while (left > 0) {
            ssize_t done = syscall(SYS_write, log_fd, at, left);
            if (done <= 0)
                abort(); /* a log with a hole would blame correct code */
            at += done;
            left -= (size_t)done;
        }
    }
}

static void record(enum calls_kind kind, const char *path, uint64_t file, uint64_t offset,
                   uint64_t bytes, const void *data, uint64_t data_bytes)
{
    if (log_fd < 0)
        return;
    struct calls_record head = {.kind = kind,
                                .path_bytes = (uint32_t)strlen(path),
                                .file = file,
                                .offset = offset,
                                .bytes = bytes,
                                .data_bytes = data_bytes};
    struct iovec parts[] = {{&head, sizeof(head)},
                            {(void *)(uintptr_t)path, head.path_bytes},
                            {(void *)(uintptr_t)data, data_bytes}};
    log_put(parts, 3);
}

/* --- The N-th call ---------------------------------------------------------------------------- */

static void end_here(void)
{
    /* A fatal signal ends the call; another one is delivered before this returns to Python. */
    syscall(SYS_tgkill, getpid(), armed_signal == SIGKILL ? gettid() : getpid(), armed_signal);
}

/* Count a call. Returns true if it is the N-th, and the planned failure has not happened yet. */
static bool is_hit(unsigned kind)
{
    if (armed_at == 0 && armed_kinds == 0)
        return false;
    if (!(armed_kinds & kind))
        return false;
    return atomic_fetch_add(&count, 1) + 1 == armed_at;
}

/* Apply the planned failure to a call. Returns true if the call must not be made. */
static bool begin(bool hit)
{
    if (!hit)
        return false;
    if (armed_how == CALLS_HOW_FAIL) {
        errno = armed_code;
        return true;
    }
    if (armed_how == CALLS_HOW_BEFORE || armed_how == CALLS_HOW_HALF)
        end_here();
    return false;
}

static void end(bool hit)
{
    int kept = errno;
    if (hit && armed_how == CALLS_HOW_AFTER)
        end_here();
    errno = kept;
}

PUBLIC int calls_set(const char *path, const char *log_path)
{
    if (strlen(path) >= sizeof(root))
        return -ENAMETOOLONG;
    if (log_fd >= 0)
        syscall(SYS_close, log_fd);
    log_fd = -1;
    if (log_path != NULL) {
        int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC;
        log_fd = (int)syscall(SYS_openat, AT_FDCWD, log_path, flags, 0600);
        if (log_fd < 0)
            return -errno;
    }
    snprintf(root, sizeof(root), "%s", path);
    root_bytes = strlen(root);
    return 0;
}

PUBLIC void calls_arm(uint64_t at, unsigned kinds, enum calls_how how, int signal_number, int code)
{
    armed_kinds = 0;
    armed_at = at;
    armed_how = how;
    armed_signal = signal_number;
    armed_code = code;
    atomic_store(&count, 0);
    armed_kinds = kinds;
}

PUBLIC uint64_t calls_count(void)
{
    return atomic_load(&count);
}

PUBLIC void calls_mark(const char *text)
{
    pthread_mutex_lock(&lock);
    record(CALLS_KIND_MARK, text, 0, 0, 0, NULL, 0);
    pthread_mutex_unlock(&lock);
}

/* The process starts with a root if its environment names one. */
__attribute__((constructor)) static void calls_begin(void)
{
    const char *path = getenv("LOHAN_CALLS_ROOT");
    if (path != NULL && calls_set(path, getenv("LOHAN_CALLS_LOG")) < 0)
        abort();
}

/* --- Writes ----------------------------------------------------------------------------------- */

static ssize_t write_at(int fd, const void *data, size_t bytes, off_t offset)
{
    bool is_control = bytes <= BLOCK_BYTES;
    bool hit = is_hit(CALLS_COUNT_CHANGES | (is_control ? CALLS_COUNT_CONTROL : 0));
    if (hit && armed_how == CALLS_HOW_HALF && bytes > BLOCK_BYTES) {
        size_t some = bytes / 2 / BLOCK_BYTES * BLOCK_BYTES;
        syscall(SYS_pwrite64, fd, data, some > 0 ? some : BLOCK_BYTES, offset);
    }
    if (begin(hit))
        return -1;
    pthread_mutex_lock(&lock);
    ssize_t done = syscall(SYS_pwrite64, fd, data, bytes, offset);
    if (done > 0)
        record(CALLS_KIND_WRITE, "", file_of(fd), (uint64_t)offset, (uint64_t)done, data,
               (uint64_t)done);
    end(hit);
    pthread_mutex_unlock(&lock);
    return done;
}

static ssize_t write_next(int fd, const void *data, size_t bytes)
{
    bool hit = is_hit(CALLS_COUNT_CHANGES);
    if (begin(hit))
        return -1;
    pthread_mutex_lock(&lock);
    ssize_t done = syscall(SYS_write, fd, data, bytes);
    off_t behind = syscall(SYS_lseek, fd, 0, SEEK_CUR);
    if (done > 0 && behind >= done)
        record(CALLS_KIND_WRITE, "", file_of(fd), (uint64_t)(behind - done), (uint64_t)done, data,
               (uint64_t)done);
    end(hit);
    pthread_mutex_unlock(&lock);
    return done;
}

PUBLIC ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset)
{
    return is_watched(fd) ? write_at(fd, data, bytes, offset)
                          : syscall(SYS_pwrite64, fd, data, bytes, offset);
}

PUBLIC ssize_t pwrite64(int fd, const void *data, size_t bytes, off_t offset)
    __attribute__((alias("pwrite")));

PUBLIC ssize_t write(int fd, const void *data, size_t bytes)
{
    return is_watched(fd) ? write_next(fd, data, bytes) : syscall(SYS_write, fd, data, bytes);
}

PUBLIC ssize_t writev(int fd, const struct iovec *parts, int part_count)
{
    if (!is_watched(fd))
        return syscall(SYS_writev, fd, parts, part_count);
    ssize_t done = 0;
    for (int i = 0; i < part_count; i++) {
        ssize_t rc = write_next(fd, parts[i].iov_base, parts[i].iov_len);
        if (rc < 0)
            return done > 0 ? done : rc;
        done += rc;
        if ((size_t)rc < parts[i].iov_len)
            break;
    }
    return done;
}

PUBLIC ssize_t sendfile(int to, int from, off_t *offset, size_t bytes)
{
    if (!is_watched(to))
        return syscall(SYS_sendfile, to, from, offset, bytes);
    char piece[1 << 16];
    size_t asked = bytes < sizeof(piece) ? bytes : sizeof(piece);
    ssize_t found = offset != NULL ? syscall(SYS_pread64, from, piece, asked, *offset)
                                   : syscall(SYS_read, from, piece, asked);
    if (found <= 0)
        return found;
    ssize_t done = write_next(to, piece, (size_t)found);
    if (done > 0 && offset != NULL)
        *offset += done;
    return done;
}

PUBLIC ssize_t sendfile64(int to, int from, off_t *offset, size_t bytes)
    __attribute__((alias("sendfile")));

PUBLIC ssize_t copy_file_range(int from, off_t *from_offset, int to, off_t *to_offset, size_t bytes,
                               unsigned flags)
{
    if (is_watched(to)) {
        errno = ENOSYS; /* its callers then use another call, which is recorded */
        return -1;
    }
    return syscall(SYS_copy_file_range, from, from_offset, to, to_offset, bytes, flags);
}

/* --- Sizes and syncs -------------------------------------------------------------------------- */

PUBLIC int ftruncate(int fd, off_t bytes)
{
    if (!is_watched(fd))
        return (int)syscall(SYS_ftruncate, fd, bytes);
    bool hit = is_hit(CALLS_COUNT_CHANGES);
    if (begin(hit))
        return -1;
    pthread_mutex_lock(&lock);
    int rc = (int)syscall(SYS_ftruncate, fd, bytes);
    if (rc == 0)
        record(CALLS_KIND_TRUNCATE, "", file_of(fd), 0, (uint64_t)bytes, NULL, 0);
    end(hit);
    pthread_mutex_unlock(&lock);
    return rc;
}

PUBLIC int ftruncate64(int fd, off_t bytes) __attribute__((alias("ftruncate")));

PUBLIC int fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    if (!is_watched(fd))
        return (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
    bool hit = is_hit(CALLS_COUNT_CHANGES);
    if (begin(hit))
        return -1;
    pthread_mutex_lock(&lock);
    int rc = (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
    if (rc == 0 && mode == 0)
        record(CALLS_KIND_ALLOCATE, "", file_of(fd), (uint64_t)offset, (uint64_t)bytes, NULL, 0);
    end(hit);
    pthread_mutex_unlock(&lock);
    return rc;
}

PUBLIC int fallocate64(int fd, int mode, off_t offset, off_t bytes)
    __attribute__((alias("fallocate")));

PUBLIC int posix_fallocate(int fd, off_t offset, off_t bytes)
{
    int kept = errno;
    int rc = fallocate(fd, 0, offset, bytes) == 0 ? 0 : errno;
    errno = kept;
    return rc;
}

PUBLIC int posix_fallocate64(int fd, off_t offset, off_t bytes)
    __attribute__((alias("posix_fallocate")));

static int sync_one(int fd, long number)
{
    if (!is_watched(fd))
        return (int)syscall(number, fd);
    bool hit = is_hit(CALLS_COUNT_CHANGES);
    if (begin(hit))
        return -1;
    pthread_mutex_lock(&lock);
    int rc = (int)syscall(number, fd);
    if (hit && armed_how == CALLS_HOW_LOSE) {
        rc = -1;
        errno = armed_code;
    }
    if (rc == 0)
        record(CALLS_KIND_SYNC, "", file_of(fd), 0, 0, NULL, 0);
    end(hit);
    pthread_mutex_unlock(&lock);
    return rc;
}

PUBLIC int fsync(int fd)
{
    return sync_one(fd, SYS_fsync);
}

PUBLIC int fdatasync(int fd)
{
    return sync_one(fd, SYS_fdatasync);
}

/* --- Names ------------------------------------------------------------------------------------ */

static int open_at(int directory, const char *path, int flags, mode_t mode)
{
    char full[PATH_MAX];
    struct stat info;
    if (!full_path(directory, path, full))
        return (int)syscall(SYS_openat, directory, path, flags, mode);
    bool is_change = (flags & (O_CREAT | O_TRUNC)) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
    bool hit = is_hit(is_change ? CALLS_COUNT_CHANGES : CALLS_COUNT_READS);
    if (begin(hit))
        return -1;
    pthread_mutex_lock(&lock);
    bool was_there = (flags & O_CREAT) && fstatat(directory, path, &info, 0) == 0;
    int fd = (int)syscall(SYS_openat, directory, path, flags, mode);
    if (fd >= 0 && (flags & O_CREAT) && !was_there)
        record(CALLS_KIND_CREATE, full, file_of(fd), 0, 0, NULL, 0);
    else if (fd >= 0 && (flags & O_TMPFILE) == O_TMPFILE)
        record(CALLS_KIND_CREATE, "", file_of(fd), 0, 0, NULL, 0);
    else if (fd >= 0 && (flags & O_TRUNC))
        record(CALLS_KIND_TRUNCATE, "", file_of(fd), 0, 0, NULL, 0);
    end(hit);
    pthread_mutex_unlock(&lock);
    return fd;
}

#define MODE_OF(flags, mode)                                                                       \
    do {                                                                                           \
        if (((flags) & O_CREAT) || ((flags) & O_TMPFILE) == O_TMPFILE) {                           \
            va_list arguments;                                                                     \
            va_start(arguments, flags);                                                            \
            (mode) = va_arg(arguments, mode_t);                                                    \
            va_end(arguments);                                                                     \
        }                                                                                          \
    } while (0)

PUBLIC int open(const char *path, int flags, ...)
{
    mode_t mode = 0;
    MODE_OF(flags, mode);
    return open_at(AT_FDCWD, path, flags, mode);
}

PUBLIC int open64(const char *path, int flags, ...) __attribute__((alias("open")));

PUBLIC int openat(int directory, const char *path, int flags, ...)
{
    mode_t mode = 0;
    MODE_OF(flags, mode);
    return open_at(directory, path, flags, mode);
}

PUBLIC int openat64(int directory, const char *path, int flags, ...)
    __attribute__((alias("openat")));

PUBLIC FILE *fopen(const char *path, const char *mode)
{
    char full[PATH_MAX];
    bool is_made = strpbrk(mode, "wa") != NULL && full_path(AT_FDCWD, path, full);
    if (is_made) {
        /* Made here, so that it is recorded; what is written comes by write() and writev(). */
        int made = open(path, O_WRONLY | O_CREAT | (mode[0] == 'w' ? O_TRUNC : 0), 0666);
        if (made < 0)
            return NULL;
        close(made);
    }
    FILE *(*plain)(const char *, const char *) = NULL;
    *(void **)&plain = dlsym(RTLD_NEXT, "fopen");
    return plain(path, mode);
}

PUBLIC FILE *fopen64(const char *path, const char *mode) __attribute__((alias("fopen")));

PUBLIC int mkdirat(int directory, const char *path, mode_t mode)
{
    char full[PATH_MAX];
    struct stat info;
    if (!full_path(directory, path, full))
        return (int)syscall(SYS_mkdirat, directory, path, mode);
    bool hit = is_hit(CALLS_COUNT_CHANGES);
    if (begin(hit))
        return -1;
    pthread_mutex_lock(&lock);
    int rc = (int)syscall(SYS_mkdirat, directory, path, mode);
    if (rc == 0 && fstatat(directory, path, &info, 0) == 0)
        record(CALLS_KIND_MKDIR, full, (uint64_t)info.st_ino, 0, 0, NULL, 0);
    end(hit);
    pthread_mutex_unlock(&lock);
    return rc;
}

PUBLIC int mkdir(const char *path, mode_t mode)
{
    return mkdirat(AT_FDCWD, path, mode);
}

PUBLIC int renameat2(int from_directory, const char *from, int to_directory, const char *to,
                     unsigned flags)
{
    char full[PATH_MAX];
    char target[PATH_MAX];
    if (!full_path(from_directory, from, full) || !full_path(to_directory, to, target))
        return (int)syscall(SYS_renameat2, from_directory, from, to_directory, to, flags);
    bool hit = is_hit(CALLS_COUNT_CHANGES);
    if (begin(hit))
        return -1;
    pthread_mutex_lock(&lock);
    int rc = (int)syscall(SYS_renameat2, from_directory, from, to_directory, to, flags);
    if (rc == 0)
        record(CALLS_KIND_RENAME, full, 0, 0, 0, target, strlen(target));
    end(hit);
    pthread_mutex_unlock(&lock);
    return rc;
}

PUBLIC int renameat(int from_directory, const char *from, int to_directory, const char *to)
{
    return renameat2(from_directory, from, to_directory, to, 0);
}

PUBLIC int rename(const char *from, const char *to)
{
    return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0);
}

PUBLIC int linkat(int from_directory, const char *from, int to_directory, const char *to, int flags)
{
    char target[PATH_MAX];
    struct stat info;
    if (!full_path(to_directory, to, target))
        return (int)syscall(SYS_linkat, from_directory, from, to_directory, to, flags);
    bool hit = is_hit(CALLS_COUNT_CHANGES);
    if (begin(hit))
        return -1;
    pthread_mutex_lock(&lock);
    int rc = (int)syscall(SYS_linkat, from_directory, from, to_directory, to, flags);
    if (rc == 0 && fstatat(to_directory, to, &info, AT_SYMLINK_NOFOLLOW) == 0)
        record(CALLS_KIND_LINK, "", (uint64_t)info.st_ino, 0, 0, target, strlen(target));
    end(hit);
    pthread_mutex_unlock(&lock);
    return rc;
}

PUBLIC int link(const char *from, const char *to)
{
    return linkat(AT_FDCWD, from, AT_FDCWD, to, 0);
}

PUBLIC int unlinkat(int directory, const char *path, int flags)
{
    char full[PATH_MAX];
    if (!full_path(directory, path, full))
        return (int)syscall(SYS_unlinkat, directory, path, flags);
    bool hit = is_hit(CALLS_COUNT_CHANGES);
    if (begin(hit))
        return -1;
    pthread_mutex_lock(&lock);
    int rc = (int)syscall(SYS_unlinkat, directory, path, flags);
    if (rc == 0)
        record(CALLS_KIND_UNLINK, full, 0, 0, 0, NULL, 0);
    end(hit);
    pthread_mutex_unlock(&lock);
    return rc;
}

PUBLIC int unlink(const char *path)
{
    return unlinkat(AT_FDCWD, path, 0);
}

PUBLIC int rmdir(const char *path)
{
    return unlinkat(AT_FDCWD, path, AT_REMOVEDIR);
}

PUBLIC int remove(const char *path)
{
    struct stat info;
    bool is_folder = lstat(path, &info) == 0 && S_ISDIR(info.st_mode);
    return unlinkat(AT_FDCWD, path, is_folder ? AT_REMOVEDIR : 0);
}

/* --- Reads ------------------------------------------------------------------------------------ */

PUBLIC ssize_t pread(int fd, void *buffer, size_t bytes, off_t offset)
{
    bool hit = armed_kinds & CALLS_COUNT_READS && is_watched(fd) && is_hit(CALLS_COUNT_READS);
    if (begin(hit))
        return -1;
    ssize_t done = syscall(SYS_pread64, fd, buffer, bytes, offset);
    end(hit);
    return done;
}

PUBLIC ssize_t pread64(int fd, void *buffer, size_t bytes, off_t offset)
    __attribute__((alias("pread")));

PUBLIC int close(int fd)
{
    bool hit = armed_kinds & CALLS_COUNT_READS && is_watched(fd) && is_hit(CALLS_COUNT_READS);
    if (hit && armed_how != CALLS_HOW_FAIL)
        begin(hit);
    int rc = (int)syscall(SYS_close, fd);
    end(hit);
    return rc;
}
