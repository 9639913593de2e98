/*
 * Tensors on one to 16 directories, with a commit that power loss cannot tear.
 *
 * A store holds extents: byte ranges of fixed size, each striped over all directories in proportion
 * to their weights (bandwidth). Extents belong to groups; a group has two slots, A and B. The
 * committed slot of a group is what a reopened store shows; new bytes go to the other one, so a
 * committed step stays whole until the next is committed. Frozen groups, and every group of a store
 * made with single_slot, have one slot.
 *
 *                    lh_store_stage(group)                 commit finished
 *      CLEAN(slot s) ---------------------> STAGED(slot 1-s) -------------> CLEAN(slot 1-s)
 *            ^                                   |
 *            +------- lh_store_rollback ---------+
 *
 * The store moves no tensor bytes itself: it says where they are (lh_store_map), keeps their
 * checksums (lh_store_checksums), and turns a commit into I/O requests that the engine issues
 * (commit_begin / commit_next). So the whole of it runs unchanged in virtual time, with crashes at
 * any request.
 *
 * Commit, in phases, each waiting for the one before:
 *      1 write the witness of the commit to every file other than file 0
 *      2 sync every data file
 *      3 write the manifest to both copies of the area not in use   4 sync file 0
 *      5 write copy 0 of the superblock not in use (sequence + 1)   6 sync file 0
 *      7 write copy 1 of that superblock                            8 sync file 0
 *
 * Invariants:
 *  1. The newest valid superblock names a manifest that is whole, and every byte that manifest
 *     speaks of is durable. Damage to one block of what describes the store changes nothing.
 *  2. Nothing a committed manifest speaks of is overwritten before a newer superblock is durable
 *     (single_slot excepted: such a store is unclean on disk from before its first write until
 *     lh_store_close() finds nothing unfinished, and refused when opened unclean).
 *  3. A failed sync is final: the store goes to FAILED and every later commit answers the first
 *     error. Whether the step is durable is then known only to the next open.
 *  4. What opening for writing has read is durable before it returns.
 *  5. After create and open nothing is allocated: all of it works under a sealed allocator.
 *
 * The bytes on disk are specified in docs/store-format.md.
 *
 * Thread: one owner; lh_store_create/open/close may be another one, not at the same time.
 */
#ifndef LH_STORE_STORE_H
#define LH_STORE_STORE_H

#include "base/alloc.h"
#include "base/error.h"
#include "io/io.h"
#include "store/fs.h"

/* What a new store has; a build also reads and writes stores of every earlier version. */
#define LH_STORE_FORMAT_VERSION 2
#define LH_STORE_DIRECTORY_COUNT_MAX 16
#define LH_STORE_PIECE_COUNT_MAX 64
/* Of one phase: a sync a file. */
#define LH_STORE_COMMIT_REQUEST_COUNT_MAX LH_STORE_DIRECTORY_COUNT_MAX
#define LH_STORE_PATH_BYTES_MAX 4096

struct lh_store_extent_desc {
    uint64_t bytes; /* multiple of LH_BLOCK_BYTES, > 0 */
    uint32_t group;
};

struct lh_store_group_desc {
    uint32_t slot_count; /* 1 or 2 */
};

struct lh_store_opts {
    const char *const *directories; /* borrowed for the call; made (0700) where missing */
    uint32_t directory_count;
    const uint64_t *weights; /* one a directory, any unit, > 0; NULL: equal */
    const struct lh_store_extent_desc *extents;
    uint32_t extent_count;
    const struct lh_store_group_desc *groups;
    uint32_t group_count;
    const void *meta; /* kept verbatim: the description of the model (JSON), with its own CRC */
    uint64_t meta_bytes;
    uint64_t scalar_bytes_max; /* largest blob a commit carries */
    bool single_slot;          /* "never" */
    bool temporary;            /* files are unlinked as soon as they are open */
    bool allow_buffered;       /* fall back to buffered I/O where O_DIRECT is refused (noted) */
    /* a store in main memory defeats its purpose: refused unless asked for */
    bool allow_tmpfs;
    const struct lh_store_fs *fs; /* its file calls, borrowed until close; NULL: the kernel's */
};

struct lh_store_piece {
    uint32_t file_index;
    uint64_t file_offset;
    uint64_t buffer_offset; /* from the start of the range asked for */
    uint64_t bytes;
};

struct lh_store;

/*
 * Make a new store: files, lock, space for everything (fallocate), headers; durable when this
 * returns. Extents read as zeros (their `zero` flag is set) until first written and committed.
 *
 * Owns:   *store_out owns files and lock; release with lh_store_close(). opts is borrowed for the
 *         call.
 * Errors: -EEXIST (a store is there: resume, or another place), -ENOSPC (per directory: needed,
 *         available, missing), -EACCES, -ENOTDIR, -EROFS, -EBUSY (locked: by which pid),
 *         -EMEDIUMTYPE (tmpfs), -EOPNOTSUPP (O_DIRECT is refused and allow_buffered not set),
 *         -EINVAL, -ENAMETOOLONG, -ENOMEM. Nothing that was made is left behind on error.
 *         *store_out is NULL then.
 */
int lh_store_create(const struct lh_store_opts *opts, struct lh_alloc *alloc,
                    struct lh_store **store_out, struct lh_error *err) LH_MUST_CHECK;

struct lh_store_open_opts {
    const char *const *directories; /* the same set, in any order */
    uint32_t directory_count;
    bool read_only; /* nothing is written, and the lock is shared with other readers: inspect */
    /*
     * with read_only: the lock is another store's of this process, whose commits are held as long
     * as this one is open ([Note: Held commits] in sched/step.c); none is taken
     */
    bool is_held;
    bool allow_buffered;
    /*
     * A step to open at, borrowed for the call; NULL: the newest. Two steps exist: the newest, and
     * the one that was committed before it if what it needs was not overwritten. Opening the older
     * one for writing makes it the newest: the later step is gone.
     */
    const uint64_t *open_at;
    const struct lh_store_fs *fs; /* its file calls, borrowed until close; NULL: the kernel's */
};

/*
 * Open at the last committed step.
 *
 * Where damage keeps that step from being read, opening for reading shows the one before it
 * (lh_store_is_fallback(), and the note says why); opening for writing is refused, because it would
 * overwrite what may be mended, unless open_at names that step. A crash never leads there.
 *
 * Errors: -ENOENT (no store there), -EBUSY (locked), -EPROTO (newer format: both versions named),
 *         -EUCLEAN (single slot and not closed cleanly), -EINPROGRESS (a creation that was
 *         interrupted),
 *         -EILSEQ (a header, superblock, manifest or meta is damaged in both copies: which, where),
 *         -ESTALE (a directory was restored from an older copy: which), -ENODATA (truncated
 *         file: expected and actual bytes), -ELOOP (a file is a symbolic link), -EINVAL (a file is
 *         not a regular file), -EXDEV (directories of different stores, or one
 *         missing: which), -EOPNOTSUPP as lh_store_create, -EINVAL (also: the same directory twice,
 *         or open_at is a step that is not there), -ENOMEM, -errno of what cannot be read.
 *         *store_out is NULL then.
 */
int lh_store_open(const struct lh_store_open_opts *opts, struct lh_alloc *alloc,
                  struct lh_store **store_out, struct lh_error *err) LH_MUST_CHECK;

/*
 * Close files and release the lock; what was staged and not committed is lost. Marks a single-slot
 * store clean if nothing was staged after the last commit and none failed. store may be NULL.
 */
void lh_store_close(struct lh_store *store);

/*
 * To be called before each write to a slot is submitted. A store with one slot is marked unclean
 * by its first one: blocks then, until that is durable, and returns at once else.
 *
 * Errors: -errno of the mark; the store has failed then, and nothing may be written.
 */
int lh_store_write_begin(struct lh_store *store, struct lh_error *err) LH_MUST_CHECK;

/* Description. Pointers are borrowed until close. */
const void *lh_store_meta(const struct lh_store *store, uint64_t *bytes_out);
/* of the last commit; 0 bytes before */
const void *lh_store_scalars(const struct lh_store *store, uint64_t *bytes_out);
uint64_t lh_store_step(const struct lh_store *store); /* given with the last commit; 0 before */
uint64_t lh_store_scalar_bytes_max(const struct lh_store *store); /* given at creation */
uint32_t lh_store_file_count(const struct lh_store *store);
const struct lh_io_file *lh_store_files(const struct lh_store *store);
const char *lh_store_file_path(const struct lh_store *store, uint32_t file_index);
uint32_t lh_store_extent_count(const struct lh_store *store);
struct lh_store_extent_desc lh_store_extent(const struct lh_store *store, uint32_t extent);
uint32_t lh_store_group_count(const struct lh_store *store);
uint32_t lh_store_slot_count(const struct lh_store *store, uint32_t group);
bool lh_store_is_single_slot(const struct lh_store *store);
uint64_t lh_store_file_bytes(const struct lh_store *store, uint32_t file_index); /* reserved */
const char *lh_store_note(const struct lh_store *store); /* O_DIRECT refused, ...: and why */
/* The newest step is damaged, and this is the one before it, for reading. */
bool lh_store_is_fallback(const struct lh_store *store);
const char *lh_store_uuid(const struct lh_store *store);

/*
 * The slot to read a group from (staged if staged, else committed), and the one to write (never the
 * committed one, unless the group has one slot).
 */
uint32_t lh_store_read_slot(const struct lh_store *store, uint32_t group);
uint32_t lh_store_write_slot(const struct lh_store *store, uint32_t group);
bool lh_store_is_staged(const struct lh_store *store, uint32_t group);
/*
 * The write slot now holds, or is about to hold, the group's newest bytes: all of them, since the
 * commit makes it the committed one. Asserted: the group is not part of a running commit, the store
 * is not read only, and a one-slot group of a store with two slots was not committed yet (frozen
 * groups are written once).
 */
void lh_store_stage(struct lh_store *store, uint32_t group);
/*
 * Forget all staged groups, except those of a running commit: back to the committed step. No write
 * to them may be in flight. A one-slot group that was never committed reads as zeros again; one
 * that was cannot be brought back, and the store goes to FAILED (-EUCLEAN).
 */
void lh_store_rollback(struct lh_store *store);

/*
 * True while extent's slot was never written: it reads as zeros, without I/O. Whoever writes to it
 * clears the flag; its checksums are those of zeros until then.
 */
bool lh_store_is_zero(const struct lh_store *store, uint32_t extent, uint32_t slot);
void lh_store_clear_zero(struct lh_store *store, uint32_t extent, uint32_t slot);
/*
 * The file may hold bytes other than zeros in extent's slot from here on, although the slot still
 * reads as zeros. To be called before the first write to a slot is submitted, if the zero flag is
 * cleared only when all writes are complete: should they never complete, whoever writes to a part
 * of the slot afterwards knows that the rest of it has to be filled with zeros first.
 */
void lh_store_mark_dirty(struct lh_store *store, uint32_t extent, uint32_t slot);

/*
 * One CRC-32C per LH_CHECKSUM_BYTES of the extent, in memory; commit writes those of the slots it
 * commits.
 */
uint32_t *lh_store_checksums(struct lh_store *store, uint32_t extent, uint32_t slot,
                             uint32_t *count_out);

/*
 * Where [offset, offset + bytes) of an extent's slot lies. offset and bytes are multiples of
 * LH_BLOCK_BYTES. Returns the number of pieces (at most piece_max; -E2BIG if more would be needed:
 * ask for a smaller range).
 */
int lh_store_map(const struct lh_store *store, uint32_t extent, uint32_t slot, uint64_t offset,
                 uint64_t bytes, struct lh_store_piece *pieces, uint32_t piece_max);

/*
 * Begin a commit of every staged group, as step, with scalars (copied). The store must have no
 * commit running. Writes of staged groups must have completed.
 */
int lh_store_commit_begin(struct lh_store *store, uint64_t step, const void *scalars,
                          uint64_t scalar_bytes, struct lh_error *err) LH_MUST_CHECK;
/*
 * The requests of the next phase; request_max is LH_STORE_COMMIT_REQUEST_COUNT_MAX or more. Call
 * again when all of them came back: the store reads their results where it put the requests, so it
 * is these structs that have to be submitted (asserted), in place, and left alone until then. owner
 * is the caller's to set. Returns their count; 0: the commit is durable and staged groups are
 * clean; -errno: failed, for good. Buffers of the requests belong to the store.
 */
int lh_store_commit_next(struct lh_store *store, struct lh_io_request *requests,
                         uint32_t request_max, struct lh_error *err) LH_MUST_CHECK;
bool lh_store_is_committing(const struct lh_store *store);
/* Bytes that every commit writes (manifest, superblock, witnesses): for the byte accounting. */
uint64_t lh_store_commit_bytes(const struct lh_store *store);

/*
 * Blocking helpers for create, load, inspect and verify; not for the engine. They check and make
 * checksums, honour the zero flag, and name extent, file and offset in errors (-EILSEQ: both
 * checksums). Any offset, length and address will do; 1 MiB at multiples of 1 MiB from aligned
 * memory is fastest.
 *
 * A write stages its group. The rest of the group keeps its committed bytes: they are copied to the
 * write slot first where there are any.
 *
 * Errors: -EINVAL (outside of the extent), -EILSEQ, -EROFS (read only), -EPERM (a frozen group that
 *         was committed, or a group of a running commit), -errno of the transfer.
 */
int lh_store_read_sync(struct lh_store *store, uint32_t extent, uint64_t offset, void *buffer,
                       uint64_t bytes, struct lh_error *err) LH_MUST_CHECK;
int lh_store_write_sync(struct lh_store *store, uint32_t extent, uint64_t offset,
                        const void *buffer, uint64_t bytes, struct lh_error *err) LH_MUST_CHECK;
int lh_store_commit_sync(struct lh_store *store, uint64_t step, const void *scalars,
                         uint64_t scalar_bytes, struct lh_error *err) LH_MUST_CHECK;

/*
 * Sequential bandwidth of directory, bytes/s, with O_DIRECT and 8 MiB transfers over probe_bytes,
 * for stripe weights. The probe file has no name; nothing is left behind.
 *
 * Errors: -EINVAL, -ENOSPC, -EOPNOTSUPP (O_DIRECT is refused: use equal weights), -errno of the
 *         directory or of a transfer. Both numbers are 0 then.
 */
int lh_store_measure(const char *directory, uint64_t probe_bytes, uint64_t *write_bytes_per_s_out,
                     uint64_t *read_bytes_per_s_out, struct lh_error *err) LH_MUST_CHECK;

#endif
