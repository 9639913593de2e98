#include "mem/arena.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/thread.h"

/* Linux has this advice since version 5.14; older C libraries do not define it. */
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MAP_HUGE_SHIFT
#define MAP_HUGE_SHIFT 26
#endif
/* 21 is log2 of LH_HUGE_PAGE_BYTES; a machine may have reserved pages of several sizes. */
#define MAP_RESERVED (MAP_HUGETLB | (21 << MAP_HUGE_SHIFT))
#define SMALL_PAGE_BYTES 4096
/* One thread zeroes less memory per second than a machine can; more than a few gain nothing. */
#define POPULATE_THREAD_COUNT_MAX 8
#define POPULATE_BYTES_MIN (UINT64_C(256) << 20) /* for a further thread */
#define RESERVED_FREE "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"
#define RESERVED_PROMISED "/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages"
#define TRANSPARENT_MODE "/sys/kernel/mm/transparent_hugepage/enabled"

_Static_assert(LH_HUGE_PAGE_BYTES == UINT64_C(1) << 21, "MAP_RESERVED names this size");

LH_PRINTF(2, 3) static void note(struct lh_arena *arena, const char *format, ...)
{
    size_t used = strlen(arena->note);
    LH_ASSERT(used < sizeof(arena->note));
    if (used > 0 && used + 2 < sizeof(arena->note)) {
        memcpy(arena->note + used, "; ", 3);
        used += 2;
    }
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(arena->note + used, sizeof(arena->note) - used, format, arguments);
    va_end(arguments);
}

/* Read up to size - 1 characters of a file's first line; text is empty if that is impossible. */
static void text_read(const char *path, char *text, int size)
{
    text[0] = '\0';
    FILE *file = fopen(path, "re");
    if (!file)
        return;
    if (!fgets(text, size, file))
        text[0] = '\0';
    fclose(file);
}

static uint64_t number_read(const char *path)
{
    char text[32];
    uint64_t value = 0;
    text_read(path, text, sizeof(text));
    return lh_mem_number_parse(text, &value) ? value : 0;
}

/* The bytes of this process that are on transparent huge pages. */
static uint64_t transparent_bytes(void)
{
    uint64_t kib = 0;
    if (lh_mem_field_read("/proc/self/smaps_rollup", "AnonHugePages", &kib) != 0)
        return 0;
    return kib * LH_KIB;
}

static bool map_reserved(struct lh_arena *arena)
{
    uint64_t wanted = arena->bytes / LH_HUGE_PAGE_BYTES;
    LH_ASSERT(wanted > 0);
    LH_ASSERT(lh_is_aligned(arena->bytes, LH_HUGE_PAGE_BYTES));
    uint64_t promised = number_read(RESERVED_PROMISED);
    uint64_t unused = number_read(RESERVED_FREE);
    unused -= lh_min_u64(unused, promised);
    if (unused == 0)
        return false;
    if (unused < wanted) {
        note(arena, "only %" PRIu64 " of the %" PRIu64 " reserved huge pages needed are free",
             unused, wanted);
        return false;
    }
    void *base = mmap(NULL, arena->bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_RESERVED, -1, 0);
    if (base == MAP_FAILED) {
        note(arena, "reserved huge pages could not be mapped: %s", strerror(errno));
        return false;
    }
    arena->base = base;
    arena->pages = LH_ARENA_PAGES_RESERVED;
    return true;
}

/* Map memory aligned to huge pages, and request transparent ones if the system has them. */
static int map_aligned(struct lh_arena *arena, struct lh_error *err)
{
    uint64_t mapped_bytes = arena->bytes + LH_HUGE_PAGE_BYTES;
    uint8_t *mapped =
        mmap(NULL, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
        int code = -errno;
        return lh_error_set(err, code, "cannot map %" PRIu64 " bytes: %s (see ulimit -v)",
                            mapped_bytes, strerror(-code));
    }
    uint64_t before_bytes =
        lh_align_up((uintptr_t)mapped, LH_HUGE_PAGE_BYTES) - (uint64_t)(uintptr_t)mapped;
    LH_ASSERT(before_bytes < LH_HUGE_PAGE_BYTES);
    uint64_t behind_bytes = LH_HUGE_PAGE_BYTES - before_bytes;
    arena->base = mapped + before_bytes;
    /* Shrinking a mapping at its ends cannot fail, because it does not split the mapping. */
    if (before_bytes > 0) {
        int rc = munmap(mapped, before_bytes);
        LH_ASSERT(rc == 0);
    }
    if (behind_bytes > 0) {
        int rc = munmap(arena->base + arena->bytes, behind_bytes);
        LH_ASSERT(rc == 0);
    }

    char mode[64];
    text_read(TRANSPARENT_MODE, mode, sizeof(mode));
    arena->pages = LH_ARENA_PAGES_SMALL;
    if (mode[0] == '\0' || strstr(mode, "[never]"))
        note(arena, "small pages: transparent huge pages are off (write madvise to %s)",
             TRANSPARENT_MODE);
    else if (madvise(arena->base, arena->bytes, MADV_HUGEPAGE) != 0)
        note(arena, "small pages: MADV_HUGEPAGE failed: %s", strerror(errno));
    else
        arena->pages = LH_ARENA_PAGES_TRANSPARENT;
    return 0;
}

/* A part of an arena that one thread allocates. */
struct part {
    uint8_t *base;
    uint64_t bytes;
    int code; /* 0 or -errno */
    pthread_t thread;
    bool has_thread;
};

static void *part_populate(void *context)
{
    struct part *part = context;
    LH_ASSERT(lh_is_aligned((uintptr_t)part->base, SMALL_PAGE_BYTES) && part->bytes > 0);
    if (madvise(part->base, part->bytes, MADV_POPULATE_WRITE) == 0)
        return NULL;
    if (errno != EINVAL) {
        part->code = -errno;
        return NULL;
    }
    /* Kernels before 5.14 lack this advice. Touch each small page, since any of them may not be
     * part of a huge page. */
    for (uint64_t offset = 0; offset < part->bytes; offset += SMALL_PAGE_BYTES)
        ((volatile uint8_t *)part->base)[offset] = 0;
    return NULL;
}

/*
 * The number of threads that allocate pages: one, unless there are many pages, and all of them will
 * be on the same NUMA node whichever thread touches them.
 */
static uint64_t populate_thread_count(uint64_t bytes, bool is_bound)
{
    uint64_t most = is_bound || lh_numa_node_count() == 1 ? POPULATE_THREAD_COUNT_MAX : 1;
    uint64_t processors = lh_max_u64((uint64_t)sysconf(_SC_NPROCESSORS_ONLN), 1);
    return lh_min_u64(lh_min_u64(processors, most), 1 + bytes / POPULATE_BYTES_MIN);
}

/* Allocate all pages, with several threads if there are many. Returns 0 or -errno. */
static int parts_populate(uint8_t *base, uint64_t bytes, bool is_bound)
{
    struct part parts[POPULATE_THREAD_COUNT_MAX] = {0};
    uint64_t count = populate_thread_count(bytes, is_bound);
    uint64_t each = lh_align_up(bytes / count, LH_HUGE_PAGE_BYTES);
    int code = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t first = lh_min_u64(i * each, bytes);
        parts[i].base = base + first;
        parts[i].bytes = lh_min_u64(each, bytes - first);
        if (parts[i].bytes == 0)
            continue;
        /* The last part, and any for which there is no thread, is this thread's. */
        parts[i].has_thread =
            i + 1 < count && lh_thread_start(&parts[i].thread, NULL, part_populate, &parts[i]) == 0;
        if (!parts[i].has_thread)
            part_populate(&parts[i]);
    }
    for (uint64_t i = 0; i < count; i++) {
        if (parts[i].has_thread) {
            int rc = pthread_join(parts[i].thread, NULL);
            LH_ASSERT(rc == 0);
        }
        code = code ? code : parts[i].code;
    }
    return code;
}

/* Allocate all pages but the first later_bytes, a multiple of LH_HUGE_PAGE_BYTES. */
static int populate(struct lh_arena *arena, uint64_t later_bytes, bool is_bound,
                    struct lh_error *err)
{
    uint64_t bytes = arena->bytes - later_bytes;
    LH_ASSERT(later_bytes <= arena->bytes && lh_is_aligned(later_bytes, LH_HUGE_PAGE_BYTES));
    if (bytes == 0)
        return 0;
    uint64_t huge_before_bytes = transparent_bytes();
    int code = parts_populate(arena->base + later_bytes, bytes, is_bound);
    if (code < 0)
        return lh_error_set(err, code, "cannot allocate %" PRIu64 " bytes of memory: %s", bytes,
                            strerror(-code));
    if (arena->pages != LH_ARENA_PAGES_TRANSPARENT)
        return 0;
    uint64_t huge_bytes = transparent_bytes();
    huge_bytes -= lh_min_u64(huge_bytes, huge_before_bytes);
    if (huge_bytes < bytes)
        note(arena, "only %" PRIu64 " of %" PRIu64 " bytes are on huge pages (fragmented memory?)",
             huge_bytes, bytes);
    if (huge_bytes == 0)
        arena->pages = LH_ARENA_PAGES_SMALL;
    return 0;
}

static void lock_pages(struct lh_arena *arena)
{
    if (mlock(arena->base, arena->bytes) == 0) {
        arena->locked = true;
        return;
    }
    int code = errno;
    struct rlimit limit = {0};
    if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0)
        limit.rlim_cur = 0;
    note(arena, "not locked: %s; RLIMIT_MEMLOCK is %" PRIu64 " bytes, %" PRIu64 " are needed",
         strerror(code), (uint64_t)limit.rlim_cur, arena->bytes);
}

static int opts_check(const struct lh_arena_opts *opts, struct lh_error *err)
{
    if (opts->bytes == 0)
        return lh_error_set(err, -EINVAL, "an arena cannot have 0 bytes");
    if (opts->numa_node >= lh_numa_node_count())
        return lh_error_set(err, -EINVAL, "numa_node %d does not exist: this machine has %d nodes",
                            opts->numa_node, lh_numa_node_count());
    /* A larger size could overflow when rounded up to pages, and no machine has as much memory. */
    if (opts->bytes > UINT64_C(1) << 60)
        return lh_error_set(err, -ENOMEM,
                            "%" PRIu64 " bytes are requested, more than any machine has",
                            opts->bytes);
    return 0;
}

/* Map, bind, populate and lock the memory. On failure nothing remains mapped. */
static int arena_map(struct lh_arena *arena, const struct lh_arena_opts *opts, struct lh_error *err)
{
    int rc = 0;
    if (!map_reserved(arena)) {
        LH_TRY(lh_mem_available_check(arena->bytes, err));
        LH_TRY(map_aligned(arena, err));
    }
    if (opts->numa_node >= 0) {
        rc = lh_numa_prefer(arena->base, arena->bytes, opts->numa_node);
        if (rc < 0 && lh_numa_node_count() > 1)
            note(arena, "not bound to NUMA node %d: %s", opts->numa_node, strerror(-rc));
    }
    LH_ASSERT(opts->later_bytes <= opts->bytes);
    uint64_t later_bytes = opts->later_bytes / LH_HUGE_PAGE_BYTES * LH_HUGE_PAGE_BYTES;
    rc = populate(arena, later_bytes, opts->numa_node >= 0 && rc == 0, err);
    if (rc == 0 && madvise(arena->base, arena->bytes, MADV_DONTFORK) != 0)
        note(arena, "forked children share the arena: %s", strerror(errno));
    if (rc < 0) {
        munmap(arena->base, arena->bytes);
        return rc;
    }
    if (opts->lock)
        lock_pages(arena);
    return 0;
}

int lh_arena_create(const struct lh_arena_opts *opts, struct lh_alloc *alloc,
                    struct lh_arena **arena_out, struct lh_error *err)
{
    *arena_out = NULL;
    LH_TRY(opts_check(opts, err));
    struct lh_arena *arena = lh_alloc_zeroed(alloc, 1, sizeof(*arena));
    if (!arena)
        return lh_error_set(err, -ENOMEM, "no memory for the record of an arena");
    arena->bytes = lh_align_up(opts->bytes, LH_HUGE_PAGE_BYTES);
    int rc = arena_map(arena, opts, err);
    if (rc < 0) {
        lh_free(alloc, arena);
        return rc;
    }
    LH_ASSERT(lh_is_aligned((uintptr_t)arena->base, LH_HUGE_PAGE_BYTES));
    *arena_out = arena;
    return 0;
}

void lh_arena_destroy(struct lh_arena *arena, struct lh_alloc *alloc)
{
    if (!arena)
        return;
    LH_ASSERT(arena->base && arena->bytes > 0);
    int rc = munmap(arena->base, arena->bytes);
    LH_ASSERT(rc == 0);
    lh_free(alloc, arena);
}
