/*
 * One mapping of main memory from which every buffer of an engine is cut: fixed at the start, on
 * huge pages, on one NUMA node, touched before use so that the budget is real from the first
 * moment.
 *
 * Why huge pages: an O_DIRECT transfer from scattered 4 KiB pages is split at the disk queue's
 * segment limit; the same disk moved 2.3 to 3.5 times the bytes a second from 2 MiB pages (fio and
 * lohan's own reads, 2026-11).
 *
 * Reserved huge pages (MAP_HUGETLB) when enough are free, else transparent ones (madvise, aligned),
 * else plain pages with a said reason in note.
 *
 * A forked child (a data loader's worker) does not inherit the mapping: it would otherwise share it
 * copy-on-write, and each page that the parent writes next would be held twice, beyond the budget.
 *
 * Thread: any one at a time.
 */
#ifndef LH_MEM_ARENA_H
#define LH_MEM_ARENA_H

#include "base/alloc.h"
#include "base/error.h"

enum lh_arena_pages {
    LH_ARENA_PAGES_SMALL = 0,
    LH_ARENA_PAGES_TRANSPARENT = 1,
    LH_ARENA_PAGES_RESERVED = 2,
};

struct lh_arena_opts {
    uint64_t bytes; /* rounded up to LH_HUGE_PAGE_BYTES */
    bool lock;      /* mlock: a refusal is noted, not an error (RLIMIT_MEMLOCK is named in note) */
    int numa_node;  /* -1: wherever the caller runs */
};

struct lh_arena {
    uint8_t *base;
    uint64_t bytes;
    enum lh_arena_pages pages;
    bool locked;
    char note[256]; /* what could not be had, and why; empty when nothing */
};

/*
 * Map and touch opts->bytes.
 *
 * Owns:   *arena_out owns the mapping; release with lh_arena_destroy().
 * Errors: -EINVAL (0 bytes, no such NUMA node), -ENOMEM (names what is available and what was
 *         asked). *arena_out is NULL then.
 */
int lh_arena_create(const struct lh_arena_opts *opts, struct lh_alloc *alloc,
                    struct lh_arena **arena_out, struct lh_error *err) LH_MUST_CHECK;
void lh_arena_destroy(struct lh_arena *arena, struct lh_alloc *alloc);

/*
 * What can be touched without anybody being killed for it: MemAvailable, or less where a control
 * group of this process has a limit. UINT64_MAX where the system does not say.
 */
uint64_t lh_mem_available_bytes(void);
/* The decimal number that text begins with, spaces before it allowed; false if there is none. */
bool lh_mem_number_parse(const char *text, uint64_t *value_out);
/* The number in `name: number` lines of a /proc or cgroup file, in its own unit; -ENOENT. */
int lh_mem_field_read(const char *path, const char *name, uint64_t *value_out) LH_MUST_CHECK;

/* NUMA through libnuma by dlopen; without it there is one node, 0. */
int lh_numa_node_count(void);
/* The node of the calling thread's CPU. */
int lh_numa_node_here(void);
/* Prefer node for the pages not yet touched. -ENOSYS without libnuma, else -errno. */
int lh_numa_prefer(void *base, uint64_t bytes, int node) LH_MUST_CHECK;

#endif
