/*
 * A store of tensors in 1 to 16 directories, with commits that stay atomic across power loss.
 *
 * A store holds extents: byte ranges of fixed size, each striped over all directories in proportion
 * to their weights (bandwidth). Extents belong to groups; a group has two slots, A and B. The
 * committed slot of a group is what a reopened store shows; new bytes go to the other slot, so a
 * committed step stays intact until the next one is committed. Frozen groups, and all groups of a
 * store created with single_slot, have one slot.
 *
 *                    lh_store_stage(group)                 commit finished
 *      CLEAN(slot s) ---------------------> STAGED(slot 1-s) -------------> CLEAN(slot 1-s)
 *            ^                                   |
 *            +------- lh_store_rollback ---------+
 *
 * Except in its blocking helpers, the store does not move tensor bytes: it says where they are
 * (lh_store_map), keeps their checksums (lh_store_checksums), and turns a commit into I/O requests
 * that the engine issues (commit_begin / commit_next). The same code therefore runs in the
 * simulator, which has virtual time and can crash at any request.
 *
 * A commit has the following phases. Each one waits for the previous one:
 *      1 write the witness of the commit to every file other than file 0
 *      2 sync every data file
 *      3 write the manifest to both copies of the area not in use   4 sync file 0
 *      5 write copy 0 of the superblock not in use (sequence + 1)   6 sync file 0
 *      7 write copy 1 of that superblock                            8 sync file 0
 *
 * Invariants:
 *  1. The newest valid superblock names an intact manifest, and every byte which that manifest
 *     describes is durable. Damage to one block of the metadata loses nothing (from version 2 on).
 *  2. Nothing that a committed manifest describes is overwritten before a newer superblock is
 *     durable. The exception is single_slot: such a store is marked unclean on disk before its
 *     first write and until lh_store_close() finds nothing unfinished; an unclean store cannot be
 *     opened.
 *  3. A failed sync is final: the store becomes FAILED, and every later commit returns the first
 *     error. Only the next open finds out whether the step is durable.
 *  4. Opening for writing makes everything that it has read durable before it returns.
 *  5. After create and open nothing is allocated: the store works with a sealed allocator.
 *
 * The bytes on disk are specified in docs/store-format.md.
 *
 * Thread: one owner. lh_store_create/open/close may run on another thread, but not concurrently.
 */
#ifndef LH_STORE_STORE_H
#define LH_STORE_STORE_H

#include "base/alloc.h"
#include "base/error.h"
#include "io/io.h"
#include "store/fs.h"

/* The version of a new store. Stores of every earlier version can be read and written, too. */
#define LH_STORE_FORMAT_VERSION 2
#define LH_STORE_DIRECTORY_COUNT_MAX 16
#define LH_STORE_PIECE_COUNT_MAX 64
/* A phase has at most one request per file, or two requests for file 0 (the manifest's copies). */
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
    const char *const *directories; /* borrowed for the call; created (0700) if missing */
    uint32_t directory_count;
    const uint64_t *weights; /* one per directory, in any unit, > 0; NULL: equal weights */
    const struct lh_store_extent_desc *extents;
    uint32_t extent_count;
    const struct lh_store_group_desc *groups;
    uint32_t group_count;
    const void *meta; /* the description of the model (JSON), stored verbatim with a CRC */
    uint64_t meta_bytes;
    uint64_t scalar_bytes_max; /* the largest size of the scalars of a commit */
    bool single_slot;          /* commit_every="never" */
    bool temporary;            /* unlink the files as soon as they are open */
    bool allow_buffered;       /* fall back to buffered I/O, with a note, if O_DIRECT is refused */
    /* Allow a store in main memory. It defeats the store's purpose, so it is an error otherwise. */
    bool allow_tmpfs;
    const struct lh_store_fs *fs; /* file calls; borrowed until close; NULL: the kernel's calls */
};

struct lh_store_piece {
    uint32_t file_index;
    uint64_t file_offset;
    uint64_t buffer_offset; /* offset from the start of the requested range */
    uint64_t bytes;
};

struct lh_store;

/*
 * Create a store: files, locks, space for all data (fallocate), and headers. All of it is durable
 * when this returns. An extent reads as zeros (its `zero` flag is set) until it is first written.
 *
 * Owns:   *store_out owns files and lock; release with lh_store_close(). opts is borrowed for the
 *         call.
 * Errors: -EEXIST (the directory holds a store already), -ENOSPC (the message gives the bytes
 *         needed, available and missing in a directory), -EACCES, -ENOTDIR, -EROFS, -EBUSY (locked;
 *         the message names the process), -EMEDIUMTYPE (tmpfs), -EOPNOTSUPP (O_DIRECT is refused
 *         and allow_buffered is not set), -EINVAL, -ENAMETOOLONG, -ENOMEM. On error everything that
 *         was created is removed if possible, and *store_out is NULL.
 */
int lh_store_create(const struct lh_store_opts *opts, struct lh_alloc *alloc,
                    struct lh_store **store_out, struct lh_error *err) LH_MUST_CHECK;

struct lh_store_open_opts {
    const char *const *directories; /* the same set, in any order */
    uint32_t directory_count;
    bool read_only; /* write nothing, and share the lock with other readers */
    /*
     * Only with read_only: take no lock, because another store object of this process has the lock
     * and delays its commits while this one is open ([Note: Held commits] in sched/step.c).
     */
    bool is_held;
    bool allow_buffered;
    /*
     * The step to open at, borrowed for the call; NULL: the newest. Two steps exist: the newest
     * one, and the one committed before it if nothing that it needs was overwritten. Opening the
     * older one for writing makes it the newest and discards the later step.
     */
    const uint64_t *open_at;
    const struct lh_store_fs *fs; /* file calls; borrowed until close; NULL: the kernel's calls */
};

/*
 * Open a store at its last committed step.
 *
 * If damage makes that step unreadable, opening for reading falls back to the step before it
 * (lh_store_is_fallback(); the note says why). Opening for writing fails, because it would
 * overwrite data that might still be repaired, unless open_at names the older step. A crash alone
 * never causes this.
 *
 * Errors: -ENOENT (no store), -EBUSY (locked), -EPROTO (newer format; the message has both
 *         versions), -EUCLEAN (single slot and not closed cleanly), -EINPROGRESS (the creation was
 *         interrupted), -EILSEQ (both copies of a header, superblock, manifest, table or meta are
 *         damaged; the message names the item), -ESTALE (a directory was restored from an older
 *         copy), -ENODATA (a truncated file; the message has expected and actual bytes), -ELOOP (a
 *         file is a symbolic link), -EXDEV (directories of different stores, or a missing one),
 *         -EOPNOTSUPP as in lh_store_create, -EINVAL (a file is not a regular file, a directory is
 *         given twice, or open_at is not one of the steps), -ENOMEM, -errno of a failed read.
 *         On error *store_out is NULL.
 */
int lh_store_open(const struct lh_store_open_opts *opts, struct lh_alloc *alloc,
                  struct lh_store **store_out, struct lh_error *err) LH_MUST_CHECK;

/*
 * Close the files and release the locks. Staged groups that were not committed are lost. A
 * single-slot store is marked clean if nothing was written or staged after the last commit and
 * nothing failed. store may be NULL.
 */
void lh_store_close(struct lh_store *store);

/*
 * Call this before submitting a write to a slot. The first call on a clean single-slot store marks
 * it unclean and blocks until the mark is durable; all other calls return at once.
 *
 * Errors: -errno of writing the mark. The store is then FAILED, and nothing may be written to it.
 */
int lh_store_write_begin(struct lh_store *store, struct lh_error *err) LH_MUST_CHECK;

/* The description of the store. Returned pointers are borrowed until close. */
const void *lh_store_meta(const struct lh_store *store, uint64_t *bytes_out);
/* The scalars of the last commit; 0 bytes before the first commit. */
const void *lh_store_scalars(const struct lh_store *store, uint64_t *bytes_out);
uint64_t lh_store_step(const struct lh_store *store); /* the last committed step; 0: no commit */
uint64_t lh_store_scalar_bytes_max(const struct lh_store *store); /* the limit set at creation */
uint32_t lh_store_file_count(const struct lh_store *store);
const struct lh_io_file *lh_store_files(const struct lh_store *store);
const char *lh_store_file_path(const struct lh_store *store, uint32_t file_index);
uint32_t lh_store_extent_count(const struct lh_store *store);
struct lh_store_extent_desc lh_store_extent(const struct lh_store *store, uint32_t extent);
uint32_t lh_store_group_count(const struct lh_store *store);
uint32_t lh_store_slot_count(const struct lh_store *store, uint32_t group);
bool lh_store_is_single_slot(const struct lh_store *store);
uint64_t lh_store_file_bytes(const struct lh_store *store, uint32_t file_index); /* reserved */
/* Warnings of create and open, with reasons, one per line (refused O_DIRECT, damaged copies). */
const char *lh_store_note(const struct lh_store *store);
/* Whether the newest step is damaged and the step before it was opened for reading instead. */
bool lh_store_is_fallback(const struct lh_store *store);
/*
 * The step besides the newest one that the store had when it was opened, if its superblock was
 * intact; otherwise lh_store_step() of that time. Only opening it tells whether it can be read.
 */
uint64_t lh_store_older_step(const struct lh_store *store);
const char *lh_store_uuid(const struct lh_store *store);

/*
 * The slot to read a group from (the write slot if the group is staged, else the committed slot),
 * and the slot to write to (never the committed one, unless the group has only one slot).
 */
uint32_t lh_store_read_slot(const struct lh_store *store, uint32_t group);
uint32_t lh_store_write_slot(const struct lh_store *store, uint32_t group);
bool lh_store_is_staged(const struct lh_store *store, uint32_t group);
/*
 * Stage a group: its write slot now holds, or is about to hold, all of the group's newest bytes,
 * and the next commit makes it the committed slot. This asserts that the group is not in a running
 * commit, that the store is not read-only, and that a one-slot group of a store with two slots has
 * not been committed yet (frozen groups are written once).
 */
void lh_store_stage(struct lh_store *store, uint32_t group);
/*
 * Return all staged groups to the committed step, except those of a running commit. No write to the
 * returned groups may be in flight. A one-slot group that was never committed reads as zeros again.
 * A one-slot group that was committed cannot be restored, so the store becomes FAILED (-EUCLEAN).
 */
void lh_store_rollback(struct lh_store *store);

/*
 * Whether extent's slot reads as zeros, without I/O, because it holds no valid bytes. Its checksums
 * are then those of zeros. The writer of the slot clears the flag.
 */
bool lh_store_is_zero(const struct lh_store *store, uint32_t extent, uint32_t slot);
void lh_store_clear_zero(struct lh_store *store, uint32_t extent, uint32_t slot);
/*
 * Record that the file may hold nonzero bytes in extent's slot although the slot still reads as
 * zeros. Call this before submitting the first write to a slot if the zero flag is cleared only
 * when all writes are complete. If the writes never complete, a later writer of a part of the slot
 * then knows that it must first fill the rest with zeros.
 */
void lh_store_mark_dirty(struct lh_store *store, uint32_t extent, uint32_t slot);

/*
 * The checksums of a slot, kept in memory: one CRC-32C per LH_CHECKSUM_BYTES of the extent. A
 * commit writes the checksums of the committed slots of all groups.
 */
uint32_t *lh_store_checksums(struct lh_store *store, uint32_t extent, uint32_t slot,
                             uint32_t *count_out);

/*
 * Find the pieces of files that hold [offset, offset + bytes) of an extent's slot. offset and bytes
 * are multiples of LH_BLOCK_BYTES. Returns the number of pieces, or -E2BIG if there are more than
 * piece_max: request a smaller range.
 */
int lh_store_map(const struct lh_store *store, uint32_t extent, uint32_t slot, uint64_t offset,
                 uint64_t bytes, struct lh_store_piece *pieces, uint32_t piece_max);

/*
 * Begin a commit of all staged groups as step, with scalars (copied). No commit may be running, and
 * all writes of staged groups must have completed.
 */
int lh_store_commit_begin(struct lh_store *store, uint64_t step, const void *scalars,
                          uint64_t scalar_bytes, struct lh_error *err) LH_MUST_CHECK;
/*
 * Fill in the requests of the next phase; request_max is at least
 * LH_STORE_COMMIT_REQUEST_COUNT_MAX. Call this again when all of them have completed. The store
 * reads the results from these very structs, so submit them in place (asserted) and do not change
 * them before the next call, except for owner, which the caller may set. The requests' buffers
 * belong to the store. Returns the number of requests; 0: the commit is durable and its groups are
 * clean; -errno: the commit has failed permanently.
 */
int lh_store_commit_next(struct lh_store *store, struct lh_io_request *requests,
                         uint32_t request_max, struct lh_error *err) LH_MUST_CHECK;
bool lh_store_is_committing(const struct lh_store *store);
/*
 * Make the store FAILED if a file of it was deleted while it was open: what it commits would be
 * gone when it is closed. After the first call every commit begins with this; a temporary store,
 * whose files have no names, does not call it.
 * Errors: -EIDRM.
 */
int lh_store_names_check(struct lh_store *store, struct lh_error *err) LH_MUST_CHECK;
/* The bytes that every commit writes (manifest, superblock, witnesses), for byte accounting. */
uint64_t lh_store_commit_bytes(const struct lh_store *store);

/*
 * Blocking helpers for create, load, inspect and verify; not for the engine. They verify and
 * compute checksums, honor the zero flag, and name file and offset in errors (-EILSEQ: also the
 * extent and both checksums). Offset, length and address are arbitrary; whole MiB at multiples of
 * 1 MiB of aligned memory are fastest, and written up to 8 at a time.
 *
 * A write stages its group. The rest of the group keeps its committed bytes: if the group has two
 * slots, these bytes are first copied to the write slot.
 *
 * Errors: -EINVAL (outside the extent), -EILSEQ, -EROFS (read-only), -EPERM (a frozen group that
 *         was committed, or a group of a running commit), -errno of the transfer, or the failure of
 *         a FAILED store.
 */
int lh_store_read_sync(struct lh_store *store, uint32_t extent, uint64_t offset, void *buffer,
                       uint64_t bytes, struct lh_error *err) LH_MUST_CHECK;
int lh_store_write_sync(struct lh_store *store, uint32_t extent, uint64_t offset,
                        const void *buffer, uint64_t bytes, struct lh_error *err) LH_MUST_CHECK;
int lh_store_commit_sync(struct lh_store *store, uint64_t step, const void *scalars,
                         uint64_t scalar_bytes, struct lh_error *err) LH_MUST_CHECK;

/*
 * Measure the sequential bandwidth of directory in bytes per second, with O_DIRECT and 8 MiB
 * transfers over probe_bytes, to choose stripe weights. The probe file is unlinked as soon as it is
 * open.
 *
 * Errors: -EINVAL, -ENOSPC, -EOPNOTSUPP (O_DIRECT is refused: use equal weights), -errno of the
 *         directory or of a transfer. On error both results are 0.
 */
int lh_store_measure(const char *directory, uint64_t probe_bytes, uint64_t *write_bytes_per_s_out,
                     uint64_t *read_bytes_per_s_out, struct lh_error *err) LH_MUST_CHECK;

#endif
