/*
 * One mapping of main memory that holds every buffer of an engine. It has a fixed size, uses huge
 * pages and one NUMA node if possible, and is touched before use, so that the whole budget is
 * really allocated from the start, except for a first part that the caller may want to grow with
 * what is put there.
 *
 * Why huge pages: an O_DIRECT transfer from scattered 4 KiB pages is split at the disk queue's
 * segment limit; the same disk moved 2.3 to 3.5 times the bytes per second from 2 MiB pages (fio
 * and lohan's own reads, 2026-11).
 *
 * The arena uses reserved huge pages (MAP_HUGETLB) if enough are free, else transparent ones
 * (madvise, aligned), else small pages, with the reason in note.
 *
 * A forked child (such as a data loader's worker) does not inherit the mapping. The child would
 * otherwise share the mapping copy-on-write, and each page that the parent writes afterwards would
 * exist twice, beyond the budget.
 *
 * Thread: any, one at a time.
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
    /* At most bytes: pages that lie in these first bytes only are allocated when they are used. */
    uint64_t later_bytes;
    bool lock;     /* mlock; a failure is recorded in note, with RLIMIT_MEMLOCK, and no error */
    int numa_node; /* the preferred node; -1: no preference */
};

struct lh_arena {
    uint8_t *base;
    uint64_t bytes;
    enum lh_arena_pages pages;
    bool locked;
    char note[256]; /* what is unavailable, and why; empty if nothing is unavailable */
};

/*
 * Map opts->bytes and touch every page, except for those of opts->later_bytes.
 *
 * Owns:   *arena_out owns the mapping; release with lh_arena_destroy().
 * Errors: -EINVAL (0 bytes, no such NUMA node), -ENOMEM (the message has the requested bytes and,
 *         if the kernel knows them, the available ones), -errno of mapping or touching the memory.
 *         On error *arena_out is NULL.
 */
int lh_arena_create(const struct lh_arena_opts *opts, struct lh_alloc *alloc,
                    struct lh_arena **arena_out, struct lh_error *err) LH_MUST_CHECK;
void lh_arena_destroy(struct lh_arena *arena, struct lh_alloc *alloc);

/*
 * The memory that can be used without triggering the OOM killer: MemAvailable, or less if a control
 * group of this process has a limit. UINT64_MAX if unknown.
 */
uint64_t lh_mem_available_bytes(void);
/*
 * Check that this number of bytes is available. Linux overcommits memory and kills processes later,
 * so whoever reserves much calls this first.
 *
 * Errors: -ENOMEM; the message has both numbers.
 */
int lh_mem_available_check(uint64_t bytes, struct lh_error *err) LH_MUST_CHECK;
/* Parse the decimal number at the start of text, after optional spaces; false if there is none. */
bool lh_mem_number_parse(const char *text, uint64_t *value_out);
/* Read the number in the line of name of a /proc or cgroup file, in the file's unit; or -errno. */
int lh_mem_field_read(const char *path, const char *name, uint64_t *value_out) LH_MUST_CHECK;

/* The number of NUMA nodes, from libnuma (loaded by dlopen); 1 without it. */
int lh_numa_node_count(void);
/* The node of the calling thread's CPU. */
int lh_numa_node_here(void);
/* Prefer node for pages that are not touched yet. Returns 0, -ENOSYS (no libnuma) or -errno. */
int lh_numa_prefer(void *base, uint64_t bytes, int node) LH_MUST_CHECK;

#endif
