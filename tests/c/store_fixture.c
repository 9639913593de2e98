#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* for nftw */
#endif
#include "store_fixture.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>

#include "lh_test.h"

const struct lh_store_extent_desc fixture_extents[FIXTURE_EXTENT_COUNT] = {
    {.bytes = 5 * LH_MIB + 8 * LH_KIB, .group = 0},
    {.bytes = 64 * LH_KIB, .group = 0},
    {.bytes = 9 * LH_MIB, .group = 1},
    {.bytes = LH_MIB + 4 * LH_KIB, .group = 1},
    {.bytes = 3 * LH_MIB + 4 * LH_KIB, .group = 2},
    {.bytes = 4 * LH_KIB, .group = 2},
};
static const struct lh_store_extent_desc small_extents[FIXTURE_EXTENT_COUNT] = {
    {.bytes = 16 * LH_KIB, .group = 0}, {.bytes = 4 * LH_KIB, .group = 0},
    {.bytes = 12 * LH_KIB, .group = 1}, {.bytes = 4 * LH_KIB, .group = 1},
    {.bytes = 8 * LH_KIB, .group = 2},  {.bytes = 4 * LH_KIB, .group = 2},
};
static const struct lh_store_group_desc groups[FIXTURE_GROUP_COUNT] = {{2}, {2}, {1}};

struct lh_alloc fixture_alloc = LH_ALLOC_INIT;
const struct lh_store_fs *fixture_fs;

static char root[4096];

static int remove_entry(const char *path, const struct stat *info, int kind, struct FTW *where)
{
    (void)info;
    (void)kind;
    (void)where;
    return remove(path);
}

void fixture_remove(const char *path)
{
    nftw(path, remove_entry, 8, FTW_DEPTH | FTW_PHYS);
}

/*
 * A process of its own removes a folder once this one has ended, however it ended. It waits for the
 * end of a pipe that only this process, and whom it forks, has open.
 */
void fixture_guard(const char *path)
{
    int ends[2];
    LH_CHECK(pipe2(ends, O_CLOEXEC) == 0);
    pid_t child = fork();
    LH_CHECK(child >= 0);
    if (child > 0) {
        close(ends[0]); /* the other end stays open until the process ends */
        return;
    }
    char byte;
    setsid(); /* so that a Ctrl-C does not reach it */
    int nothing = open("/dev/null", O_RDWR);
    for (int fd = 0; fd < 3; fd++)
        dup2(nothing, fd); /* so that readers of the test's output do not wait for this process */
    close(ends[1]);
    while (read(ends[0], &byte, 1) < 0 && errno == EINTR) {
    }
    fixture_remove(path);
    _exit(0);
}

const char *fixture_memory_root(void)
{
    static char memory_root[64];
    if (memory_root[0] == '\0') {
        snprintf(memory_root, sizeof(memory_root), "/dev/shm/lohan-test-XXXXXX");
        LH_CHECK(mkdtemp(memory_root) != NULL);
        fixture_guard(memory_root);
    }
    return memory_root;
}

static pid_t root_owner;

static void root_remove(void)
{
    if (getpid() == root_owner)
        fixture_remove(root);
}

const char *fixture_root(void)
{
    if (root[0] != '\0')
        return root;
    const char *parent = getenv("TMPDIR");
    snprintf(root, sizeof(root), "%s/lohan-test-XXXXXX", parent != NULL ? parent : "/tmp");
    LH_CHECK(mkdtemp(root) != NULL);
    root_owner = getpid();
    fixture_guard(root);
    atexit(root_remove);
    return root;
}

const char *fixture_path(const char *name)
{
    static char paths[16][8192];
    static unsigned next;
    char *path = paths[next++ % 16];
    snprintf(path, sizeof(paths[0]), "%s/%s", fixture_root(), name);
    return path;
}

int fixture_create(const char *name, const struct fixture_opts *opts, struct lh_store **store_out,
                   struct lh_error *err)
{
    static char paths[LH_STORE_DIRECTORY_COUNT_MAX][8192];
    const char *directories[LH_STORE_DIRECTORY_COUNT_MAX];
    uint32_t count = opts->directory_count != 0 ? opts->directory_count : 1;
    for (uint32_t index = 0; index < count; index++) {
        snprintf(paths[index], sizeof(paths[0]), "%s/%s%u",
                 opts->root != NULL ? opts->root : fixture_root(), name, index);
        directories[index] = paths[index];
    }
    struct lh_store_opts store_opts = {
        .directories = directories,
        .directory_count = count,
        .weights = opts->weights,
        .extents = opts->small ? small_extents : fixture_extents,
        .extent_count = FIXTURE_EXTENT_COUNT,
        .groups = groups,
        .group_count = FIXTURE_GROUP_COUNT,
        .meta = FIXTURE_META,
        .meta_bytes = sizeof(FIXTURE_META),
        .scalar_bytes_max = 100,
        .single_slot = opts->single_slot,
        .temporary = opts->temporary,
        .allow_buffered = !opts->refuse_buffered,
        .allow_tmpfs = opts->allow_tmpfs,
        .fs = fixture_fs,
    };
    return lh_store_create(&store_opts, &fixture_alloc, store_out, err);
}

static int open_at(const char *name, uint32_t directory_count, bool reversed,
                   struct lh_store_open_opts *opts, struct lh_store **store_out,
                   struct lh_error *err)
{
    static char paths[LH_STORE_DIRECTORY_COUNT_MAX][8192];
    const char *directories[LH_STORE_DIRECTORY_COUNT_MAX];
    for (uint32_t index = 0; index < directory_count; index++) {
        uint32_t number = reversed ? directory_count - 1 - index : index;
        snprintf(paths[index], sizeof(paths[0]), "%s/%s%u", fixture_root(), name, number);
        directories[index] = paths[index];
    }
    opts->directories = directories;
    opts->directory_count = directory_count;
    opts->allow_buffered = true;
    opts->fs = fixture_fs;
    return lh_store_open(opts, &fixture_alloc, store_out, err);
}

int fixture_open(const char *name, uint32_t directory_count, bool reversed, bool read_only,
                 struct lh_store **store_out, struct lh_error *err)
{
    struct lh_store_open_opts opts = {.read_only = read_only};
    return open_at(name, directory_count, reversed, &opts, store_out, err);
}

int fixture_open_at(const char *name, uint32_t directory_count, bool read_only,
                    const uint64_t *step, struct lh_store **store_out, struct lh_error *err)
{
    struct lh_store_open_opts opts = {.read_only = read_only, .open_at = step};
    return open_at(name, directory_count, false, &opts, store_out, err);
}

void fixture_fill(uint8_t *buffer, uint32_t extent, uint64_t step, uint64_t offset, uint64_t bytes)
{
    for (uint64_t index = 0; index < bytes; index++) {
        uint64_t position = offset + index;
        buffer[index] =
            (uint8_t)((position >> 3) * 37 + (position >> 12) * 11 + extent * 101 + step * 59 + 1);
    }
}

/* Fill buffer with an extent's bytes at step: zeros, or those of the step that wrote them. */
static void expected_fill(const struct lh_store *store, uint8_t *buffer, uint32_t extent,
                          uint64_t step, uint64_t bytes)
{
    bool is_frozen = lh_store_extent(store, extent).group == FIXTURE_FROZEN_GROUP;
    if (step == 0 || extent == FIXTURE_ZERO_EXTENT)
        memset(buffer, 0, bytes);
    else
        fixture_fill(buffer, extent, is_frozen ? 1 : step, 0, bytes);
}

static uint8_t *extent_buffer(const struct lh_store *store, uint32_t extent)
{
    void *buffer = NULL;
    LH_CHECK(posix_memalign(&buffer, LH_BLOCK_BYTES, lh_store_extent(store, extent).bytes) == 0);
    return buffer;
}

void fixture_write_step(struct lh_store *store, uint64_t step)
{
    struct lh_error err = {0};
    for (uint32_t extent = 0; extent < FIXTURE_EXTENT_COUNT; extent++) {
        struct lh_store_extent_desc desc = lh_store_extent(store, extent);
        if (extent == FIXTURE_ZERO_EXTENT || (desc.group == FIXTURE_FROZEN_GROUP && step > 1))
            continue;
        uint8_t *buffer = extent_buffer(store, extent);
        fixture_fill(buffer, extent, step, 0, desc.bytes);
        int rc = lh_store_write_sync(store, extent, 0, buffer, desc.bytes, &err);
        if (rc < 0)
            fprintf(stderr, "%s\n", err.message);
        LH_CHECK(rc == 0);
        free(buffer);
    }
}

void fixture_commit(struct lh_store *store, uint64_t step)
{
    struct lh_error err = {0};
    char scalars[64];
    snprintf(scalars, sizeof(scalars), "scalars of step %d", (int)step);
    LH_CHECK(lh_store_commit_sync(store, step, scalars, strlen(scalars) + 1, &err) == 0);
}

bool fixture_holds_step(struct lh_store *store, uint64_t step)
{
    for (uint32_t extent = 0; extent < FIXTURE_EXTENT_COUNT; extent++) {
        struct lh_error err = {0};
        uint64_t bytes = lh_store_extent(store, extent).bytes;
        uint8_t *found = extent_buffer(store, extent);
        uint8_t *expected = extent_buffer(store, extent);
        expected_fill(store, expected, extent, step, bytes);
        int rc = lh_store_read_sync(store, extent, 0, found, bytes, &err);
        bool is_same = rc == 0 && memcmp(found, expected, bytes) == 0;
        if (!is_same)
            printf("  extent %u is not step %d's: %s\n", extent, (int)step, err.message);
        free(found);
        free(expected);
        if (!is_same)
            return false;
    }
    return true;
}

void fixture_flip(const char *path, uint64_t offset, unsigned bit)
{
    uint8_t byte = 0;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    LH_CHECK(fd >= 0);
    LH_CHECK(pread(fd, &byte, 1, (off_t)offset) == 1);
    byte ^= (uint8_t)(1u << bit);
    LH_CHECK(pwrite(fd, &byte, 1, (off_t)offset) == 1);
    close(fd);
}
