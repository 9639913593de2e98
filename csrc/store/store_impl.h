/*
 * The internals of struct lh_store, shared only by the files of csrc/store.
 *
 *      fs.c       the kernel's file calls
 *      file.c     directories, files, their space     lock.c     locks, owners, O_DIRECT
 *      create.c   create a store                      open.c     open and close a store
 *      choose.c   the step to open at                 repair.c   repairs when opening for writing
 *      store.c    description, slots, checksums       commit.c   commit and rollback
 *      sync.c     blocking reads, writes, commit      measure.c  bandwidth of a directory
 */
#ifndef LH_STORE_STORE_IMPL_H
#define LH_STORE_STORE_IMPL_H

#include "store/format.h"

#define LH_STORE_NOTE_BYTES 1024
/* The size of a blocking transfer: the bytes that one checksum covers. */
#define LH_STORE_BOUNCE_BYTES LH_CHECKSUM_BYTES

/* Memory whose base is aligned to LH_BLOCK_BYTES, as O_DIRECT requires. */
struct lh_store_buffer {
    void *raw; /* the allocated memory */
    uint8_t *base;
};

struct lh_store_file {
    char path[LH_STORE_PATH_BYTES_MAX];
    uint32_t directory_chars; /* the length of path without the file's name */
    uint32_t made_chars;      /* path length of the first directory that create made; 0: none */
    bool is_made;             /* create made the file, and it is still linked */
    bool is_locked;
    bool is_owned; /* the owner's block names this process */
    uint64_t device, inode;
    /* The errors of the header's copies; 0: valid. Only control.copy_count of them are used. */
    int header_codes[LH_STORE_COPY_COUNT_MAX];
};

/* A damaged copy in file 0, and the bytes that belong there. */
struct lh_store_repair {
    uint64_t offset;
    const struct lh_store_buffer *buffer;
    uint64_t bytes;
};
/* At most one copy each of the table, meta and two manifests is repaired, from its other copy. */
#define LH_STORE_REPAIR_COUNT_MAX 4

/* One superblock place, for even or for odd sequence numbers, and its two copies. */
struct lh_store_superblocks {
    struct lh_store_superblock found[LH_STORE_COPY_COUNT_MAX];
    struct lh_error errors[LH_STORE_COPY_COUNT_MAX]; /* code 0: found is valid */
    int best; /* the valid copy with the higher sequence number; -1: neither copy is valid */
};

/* Flags of a group. */
#define LH_STORE_GROUP_STATE_SLOT 1u      /* the committed slot */
#define LH_STORE_GROUP_STATE_WRITTEN 2u   /* the group was ever committed */
#define LH_STORE_GROUP_STATE_STAGED 4u    /* the write slot has newer bytes */
#define LH_STORE_GROUP_STATE_IN_COMMIT 8u /* the group is staged and in the running commit */

/*
 * Flags of an extent, for each slot. ZERO: the slot reads as zeros. DIRTY: the file may hold
 * nonzero bytes in the slot. Both can be set: after the rollback of a one-slot group, and after
 * every open, because bytes may have been written before a crash.
 */
#define LH_STORE_EXTENT_STATE_ZERO(slot) (1u << (slot))
#define LH_STORE_EXTENT_STATE_DIRTY(slot) (4u << (slot))

enum lh_store_phase {
    LH_STORE_PHASE_IDLE,
    LH_STORE_PHASE_BEGUN,
    LH_STORE_PHASE_WITNESS,
    LH_STORE_PHASE_SYNC_DATA,
    LH_STORE_PHASE_MANIFEST,
    LH_STORE_PHASE_SYNC_MANIFEST,
    LH_STORE_PHASE_SUPERBLOCK, /* copy 0 */
    LH_STORE_PHASE_SYNC_SUPERBLOCK,
    LH_STORE_PHASE_SUPERBLOCK_COPY, /* copy 1 */
    LH_STORE_PHASE_SYNC_SUPERBLOCK_COPY,
};

struct lh_store {
    struct lh_alloc *alloc;        /* borrowed until close */
    const struct lh_store_fs *fs;  /* borrowed until close */
    struct lh_store_header header; /* of all files; file_index and file_bytes are not used */
    struct lh_store_control control;
    struct lh_store_layout layout;
    bool is_read_only;
    bool has_names;      /* files that have no name any more are an error */
    bool is_held;        /* another store object of this process holds the lock */
    bool is_fallback;    /* the newest step is damaged, and this is the step before it */
    uint64_t older_step; /* at open: the other step that may be intact; none: the opened one */
    char uuid[2 * LH_STORE_UUID_BYTES + 5];
    char note[LH_STORE_NOTE_BYTES];

    struct lh_store_file files[LH_STORE_DIRECTORY_COUNT_MAX];
    struct lh_io_file io_files[LH_STORE_DIRECTORY_COUNT_MAX]; /* fd -1: not open */
    uint32_t file_count;

    /* The description: arrays of header.extent_count or header.group_count elements. */
    struct lh_store_extent_desc *extents;
    uint8_t *slot_counts;
    uint8_t *tail_files;      /* LH_STORE_SLOT_COUNT_MAX per extent */
    uint64_t *checksum_first; /* per extent: the index of its first checksum */
    uint8_t cycle[LH_STORE_CYCLE_STRIPES_MAX];
    struct lh_store_buffer table; /* the bytes on disk */
    struct lh_store_buffer meta;  /* the bytes on disk */

    /* The state after the last commit and the writes since then. */
    uint8_t *group_states;
    uint8_t *extent_states;
    uint32_t *checksums[LH_STORE_SLOT_COUNT_MAX]; /* header.checksum_count each */
    struct lh_store_superblock superblock;        /* the newest durable superblock */
    uint64_t witness_sequence;                    /* the highest witness at open; 0: none */
    uint64_t scalar_bytes;                        /* size of the last commit's scalars */
    struct lh_store_buffer manifests[2];          /* what each area holds or will hold */
    bool is_changed; /* something was written or staged after the last commit */
    struct lh_store_repair repairs[LH_STORE_REPAIR_COUNT_MAX];
    uint32_t repair_count;

    /* The running commit. */
    enum lh_store_phase phase;
    struct lh_store_superblock next;
    uint64_t next_scalar_bytes;
    struct lh_store_buffer superblock_block;
    struct lh_store_buffer witness_block;
    struct lh_io_request *requests; /* the requests of the phase in flight; owned by the caller */
    uint32_t request_count;
    struct lh_error failure; /* the first, permanent failure; code 0: none */

    struct lh_store_buffer bounce; /* LH_STORE_BOUNCE_BYTES, for blocking transfers */
};

/* store.c */

/* Allocate zeroed memory. If that fails, return NULL and set err to -ENOMEM. */
void *lh_store_allocate(struct lh_store *store, uint64_t count, uint64_t bytes,
                        struct lh_error *err) LH_MUST_CHECK;
int lh_store_buffer_init(struct lh_store *store, struct lh_store_buffer *buffer, uint64_t bytes,
                         struct lh_error *err) LH_MUST_CHECK;
/* Create an empty store: block buffers, no open file. Errors: -ENOMEM; *store_out is then NULL. */
int lh_store_new(struct lh_alloc *alloc, uint32_t file_count, struct lh_store **store_out,
                 struct lh_error *err) LH_MUST_CHECK;
/* Allocate arrays and buffers of the sizes in the header. The caller then fills them in. */
int lh_store_description_init(struct lh_store *store, struct lh_error *err) LH_MUST_CHECK;
/* Set up layout, states, checksums and manifests from the description. */
int lh_store_state_init(struct lh_store *store, struct lh_error *err) LH_MUST_CHECK;
/* Free the memory. All files must be closed (asserted). */
void lh_store_delete(struct lh_store *store);
void lh_store_note_add(struct lh_store *store, const char *format, ...) LH_PRINTF(2, 3);
struct lh_store_shape lh_store_shape(const struct lh_store *store);
uint32_t lh_store_committed_slot(const struct lh_store *store, uint32_t group);
/* Make the extent's slot read as zeros, with the checksums of zeros. */
void lh_store_set_zero(struct lh_store *store, uint32_t extent, uint32_t slot);

/* file.c */

/* Set all paths. Errors: -EINVAL (a directory is empty or given twice), -ENAMETOOLONG. */
int lh_store_file_paths_set(struct lh_store *store, const char *const *directories,
                            struct lh_error *err) LH_MUST_CHECK;
/* Create the directory and an empty file in it; open and lock the file. */
int lh_store_file_create(struct lh_store *store, uint32_t file_index, bool allow_tmpfs,
                         struct lh_error *err) LH_MUST_CHECK;
/* Check that the file systems have enough space, then reserve the space of every file. */
int lh_store_files_reserve(struct lh_store *store, struct lh_error *err) LH_MUST_CHECK;
/* Open and lock the file. Errors: as lh_store_open(). */
int lh_store_file_open(struct lh_store *store, uint32_t file_index, struct lh_error *err)
    LH_MUST_CHECK;
int lh_store_file_info(const struct lh_store *store, uint32_t file_index,
                       struct lh_store_fs_info *info_out, struct lh_error *err) LH_MUST_CHECK;
/* Sync directories: the entries of the file, and of directories that create made, are durable. */
int lh_store_file_sync_directories(const struct lh_store *store, uint32_t file_index,
                                   struct lh_error *err) LH_MUST_CHECK;
/* Unlink the files and remove the directories that create made; open files stay open. */
void lh_store_files_unmake(struct lh_store *store);
/* Unlock and close all open files. */
void lh_store_files_close(struct lh_store *store);

/*
 * Transfer all bytes, blocking. offset and bytes are multiples of LH_BLOCK_BYTES. Errors: -errno,
 * -ENODATA (a read past the end of the file); the message names path and offset.
 */
int lh_store_file_read(const struct lh_store *store, uint32_t file_index, uint64_t offset,
                       void *buffer, uint64_t bytes, struct lh_error *err) LH_MUST_CHECK;
int lh_store_file_write(const struct lh_store *store, uint32_t file_index, uint64_t offset,
                        const void *buffer, uint64_t bytes, struct lh_error *err) LH_MUST_CHECK;
int lh_store_file_sync(const struct lh_store *store, uint32_t file_index, struct lh_error *err)
    LH_MUST_CHECK;
/* Write a copy of a file's header, through the bounce buffer, without a sync. */
int lh_store_header_write(struct lh_store *store, uint32_t file_index, uint32_t copy,
                          struct lh_error *err) LH_MUST_CHECK;

/* lock.c */

/* Lock the file. Errors: -EBUSY (the message names the process if it is known), -errno. */
int lh_store_file_lock(struct lh_store *store, uint32_t file_index, struct lh_error *err)
    LH_MUST_CHECK;
void lh_store_file_unlock(struct lh_store *store, uint32_t file_index);
/* Read the owner's block, after writing it if possible, to find out whether O_DIRECT works. */
int lh_store_file_probe(struct lh_store *store, uint32_t file_index, bool allow_buffered,
                        struct lh_error *err) LH_MUST_CHECK;

/* commit.c */

/* Whether lh_store_stage() may currently be called for group. */
bool lh_store_may_stage(const struct lh_store *store, uint32_t group);
/*
 * Encode the manifest of the next commit into the buffer of the unused area, and prepare the
 * superblock that will name it.
 */
void lh_store_manifest_prepare(struct lh_store *store, uint64_t step, const void *scalars,
                               uint64_t scalar_bytes);
/* Encode the next witness into witness_block; returns its offset in the files other than file 0. */
uint64_t lh_store_witness_prepare(struct lh_store *store);
/* Encode the next superblock into superblock_block; returns the offset of this copy in file 0. */
uint64_t lh_store_superblock_prepare(struct lh_store *store, uint32_t copy);
/* Return the failure of a FAILED store, for an operation that the store must refuse. */
int lh_store_fail(const struct lh_store *store, struct lh_error *err);

/* sync.c */

/*
 * Durably write a superblock that differs from the newest one only in sequence and is_clean.
 */
int lh_store_mark_sync(struct lh_store *store, bool is_clean, struct lh_error *err) LH_MUST_CHECK;
/* Write the copies of the next superblock; the first one is durable before the other is written. */
int lh_store_superblock_write(struct lh_store *store, uint32_t first_copy, struct lh_error *err)
    LH_MUST_CHECK;

/* choose.c */

/*
 * Read a structure of file 0 that has one copy at each of offsets and must have expected_crc. If
 * one copy is intact and the other one is damaged, the latter is noted and listed for repair.
 *
 * Errors: if no copy is intact: -errno of reading if a copy cannot be read, else -EILSEQ.
 */
int lh_store_copies_read(struct lh_store *store, const char *name, const uint64_t *offsets,
                         struct lh_store_buffer *buffer, uint64_t bytes, uint32_t expected_crc,
                         struct lh_error *err) LH_MUST_CHECK;
/* Find the step to open at, load its state, and make it durable unless the store is read-only. */
int lh_store_choose(struct lh_store *store, const uint64_t *open_at, struct lh_error *err)
    LH_MUST_CHECK;

/* repair.c */

/*
 * Make durable everything that opening for writing has read, before the store relies on it.
 * places: the superblock places as they were read. chosen: the place whose superblock was chosen.
 * rejected_sequence: the sequence number of the newer superblock that is to be replaced; 0: the
 * chosen superblock is the newest.
 */
int lh_store_settle(struct lh_store *store, const struct lh_store_superblocks *places,
                    uint32_t chosen, uint64_t rejected_sequence, struct lh_error *err)
    LH_MUST_CHECK;

#endif
