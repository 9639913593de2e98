/*
 * File calls of a process, counted, recorded, interrupted or refused.
 *
 * calls.c redefines the C library's file calls. It is linked into a program or preloaded into
 * another (LD_PRELOAD), and looks only at files below one folder, the root. Everything else passes
 * straight through.
 *
 *  - At the N-th call the process is sent a signal, before the call, after it, or in the middle of
 *    a write; or the call fails with an errno.
 *  - With a log, everything that changes the folder is recorded, with its bytes. Calls that change
 *    it take turns, so that the order of the log is the order in which they happened.
 *
 * Thread: calls_set() while the process has one thread; everything else from any.
 */
#ifndef LH_CAMPAIGN_CALLS_H
#define LH_CAMPAIGN_CALLS_H

#include <stdatomic.h>
#include <stdint.h>

enum calls_how {
    CALLS_HOW_BEFORE = 0, /* the call is not made */
    CALLS_HOW_AFTER = 1,
    CALLS_HOW_HALF = 2, /* only the first blocks of a write are written; other calls as BEFORE */
    CALLS_HOW_FAIL = 3, /* the call is not made and fails with `code`; the process continues */
    /* only for a sync: it fails with `code` after its data may have been dropped */
    CALLS_HOW_LOSE = 4,
};

/* The kinds of calls that are counted. */
#define CALLS_COUNT_CHANGES 1u /* write, sync, create, rename, unlink, ... */
#define CALLS_COUNT_READS 2u   /* read, open of an existing file, close */
#define CALLS_COUNT_CONTROL 4u /* writes of at most one block, which decide which step counts */

struct calls_record {
    uint32_t kind; /* enum calls_kind */
    uint32_t path_bytes;
    uint64_t file; /* inode number */
    uint64_t offset;
    uint64_t bytes;
    uint64_t data_bytes; /* the bytes of data after the path */
};

enum calls_kind {
    CALLS_KIND_CREATE = 1, /* path, file; data: nothing */
    CALLS_KIND_MKDIR,      /* path, file */
    CALLS_KIND_WRITE,      /* file, offset, data */
    CALLS_KIND_TRUNCATE,   /* file, bytes */
    CALLS_KIND_ALLOCATE,   /* file, offset, bytes */
    CALLS_KIND_SYNC,       /* file */
    CALLS_KIND_RENAME,     /* path; data: the new path */
    CALLS_KIND_LINK,       /* path; data: the new path */
    CALLS_KIND_UNLINK,     /* path */
    CALLS_KIND_MARK,       /* path: any text */
};

/* Watch files below root (absolute, no symbolic link in it); log_path NULL: nothing is recorded. */
int calls_set(const char *root, const char *log_path);
/*
 * From now on count calls of kinds (CALLS_COUNT_*), and at the at-th, counted from 1, do what how
 * says; at 0: only count. signal is sent to the process; code is an errno.
 */
void calls_arm(uint64_t at, unsigned kinds, enum calls_how how, int signal, int code);
uint64_t calls_count(void);
/* Put a text into the log, at its place among the calls. */
void calls_mark(const char *text);

#endif
