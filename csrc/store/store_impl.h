/*
 * The inside of struct lh_store, shared by the files of csrc/store only.
 *
 *      fs.c       the kernel's file calls
 *      file.c     directories, files, their space     lock.c     locks, owners, O_DIRECT
 *      create.c   make a store                        open.c     open and close one
 *      choose.c   the step to open at                 mend.c     what opening makes durable
 *      store.c    description, slots, checksums       commit.c   commit and rollback
 *      sync.c     blocking reads, writes, commit      measure.c  bandwidth of a directory
 */
#ifndef LH_STORE_STORE_IMPL_H
#define LH_STORE_STORE_IMPL_H

#include "store/format.h"

#define LH_STORE_NOTE_BYTES 1024
/* What one blocking transfer moves: one checksum's worth. */
#define LH_STORE_BOUNCE_BYTES LH_CHECKSUM_BYTES

/* Memory whose base is a multiple of LH_BLOCK_BYTES, so that O_DIRECT takes it. */
struct lh_store_buffer {
    void *raw; /* what the allocator gave */
    uint8_t *base;
};

struct lh_store_file {
    char path[LH_STORE_PATH_BYTES_MAX];
    uint32_t directory_chars; /* of path: without the name of the file */
    uint32_t made_chars;      /* of path: the first directory that create made; 0: none */
    bool is_made;             /* create made the file, and it is still linked */
    bool is_locked;
    bool is_owned; /* the owner's block names this process */
    uint64_t device, inode;
    /* What was wrong with the header's copies; 0: nothing, or the version has no such copy. */
    int header_codes[LH_STORE_COPY_COUNT_MAX];
};

/* A copy of something in file 0 that is damaged, and what belongs there. */
struct lh_store_mend {
    uint64_t offset;
    const struct lh_store_buffer *buffer;
    uint64_t bytes;
};
/* The table, meta and two manifests have one good copy each if they can be used. */
#define LH_STORE_MEND_COUNT_MAX 4

/* The two copies of the superblocks with even, or odd, sequence numbers. */
struct lh_store_superblocks {
    struct lh_store_superblock found[LH_STORE_COPY_COUNT_MAX];
    struct lh_error errors[LH_STORE_COPY_COUNT_MAX]; /* code 0: found is valid */
    int best; /* the copy with the higher sequence number; -1: none is valid */
};

/* Flags of a group. */
#define LH_STORE_GROUP_STATE_SLOT 1u      /* the committed slot */
#define LH_STORE_GROUP_STATE_WRITTEN 2u   /* was ever committed */
#define LH_STORE_GROUP_STATE_STAGED 4u    /* the write slot has newer bytes */
#define LH_STORE_GROUP_STATE_IN_COMMIT 8u /* the running commit covers it; staged as well */

/*
 * Flags of an extent, one of each a slot. ZERO is what the store says (it reads as zeros); DIRTY is
 * what the file may hold: bytes that are not zeros. Both are set after a one-slot group was written
 * and rolled back, or written and never committed before a crash.
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
    struct lh_store_header header; /* of file 0, but for file_index and file_bytes */
    struct lh_store_control control;
    struct lh_store_layout layout;
    bool is_read_only;
    bool is_held;     /* another store of this process has the lock */
    bool is_fallback; /* the newest step is damaged, and this is the one before it */
    char uuid[2 * LH_STORE_UUID_BYTES + 5];
    char note[LH_STORE_NOTE_BYTES];

    struct lh_store_file files[LH_STORE_DIRECTORY_COUNT_MAX];
    struct lh_io_file io_files[LH_STORE_DIRECTORY_COUNT_MAX]; /* fd -1: not open */
    uint32_t file_count;

    /* The description: header.extent_count and header.group_count of each. */
    struct lh_store_extent_desc *extents;
    uint8_t *slot_counts;
    uint8_t *tail_files;      /* LH_STORE_SLOT_COUNT_MAX an extent */
    uint64_t *checksum_first; /* of each extent, in the list of one slot's checksums */
    uint8_t cycle[LH_STORE_CYCLE_STRIPES_MAX];
    struct lh_store_buffer table; /* as on disk */
    struct lh_store_buffer meta;  /* as on disk */

    /* The state: what the last commit and the writes since then made of it. */
    uint8_t *group_states;
    uint8_t *extent_states;
    uint32_t *checksums[LH_STORE_SLOT_COUNT_MAX]; /* header.checksum_count each */
    struct lh_store_superblock superblock;        /* the newest durable one */
    uint64_t witness_sequence;                    /* the highest that open found; 0: none */
    uint64_t scalar_bytes;                        /* of the last commit */
    struct lh_store_buffer manifests[2];          /* what each area holds, or is about to */
    bool is_changed; /* something was written or staged since the last commit */
    struct lh_store_mend mends[LH_STORE_MEND_COUNT_MAX];
    uint32_t mend_count;

    /* The running commit. */
    enum lh_store_phase phase;
    struct lh_store_superblock next;
    uint64_t next_scalar_bytes;
    struct lh_store_buffer superblock_block;
    struct lh_store_buffer witness_block;
    struct lh_io_request *requests; /* of the phase in flight: the caller's */
    uint32_t request_count;
    struct lh_error failure; /* the first failure of a commit, for good; code 0: none */

    struct lh_store_buffer bounce; /* LH_STORE_BOUNCE_BYTES, for blocking transfers */
};

/* store.c */

/* Errors: -ENOMEM (in err as well); NULL then. */
void *lh_store_allocate(struct lh_store *store, uint64_t count, uint64_t bytes,
                        struct lh_error *err) LH_MUST_CHECK;
int lh_store_buffer_init(struct lh_store *store, struct lh_store_buffer *buffer, uint64_t bytes,
                         struct lh_error *err) LH_MUST_CHECK;
/* An empty store with every fd -1 and the bounce buffer. Errors: -ENOMEM; *store_out is NULL. */
int lh_store_new(struct lh_alloc *alloc, uint32_t file_count, struct lh_store **store_out,
                 struct lh_error *err) LH_MUST_CHECK;
/* Arrays and buffers of the header's counts; extents, slots and tails come after this. */
int lh_store_description_init(struct lh_store *store, struct lh_error *err) LH_MUST_CHECK;
/* Layout, states, checksums and manifests of the description. */
int lh_store_state_init(struct lh_store *store, struct lh_error *err) LH_MUST_CHECK;
/* Memory only; files are closed. */
void lh_store_delete(struct lh_store *store);
void lh_store_note_add(struct lh_store *store, const char *format, ...) LH_PRINTF(2, 3);
struct lh_store_shape lh_store_shape(const struct lh_store *store);
uint32_t lh_store_committed_slot(const struct lh_store *store, uint32_t group);
/* The extent's slot reads as zeros from here on, and its checksums say so. */
void lh_store_set_zero(struct lh_store *store, uint32_t extent, uint32_t slot);

/* file.c */

/* The paths of all files. Errors: -EINVAL (empty, twice the same), -ENAMETOOLONG. */
int lh_store_file_paths_set(struct lh_store *store, const char *const *directories,
                            struct lh_error *err) LH_MUST_CHECK;
/* Directory, then file, open and locked, still empty. */
int lh_store_file_create(struct lh_store *store, uint32_t file_index, bool allow_tmpfs,
                         struct lh_error *err) LH_MUST_CHECK;
/* Give every file its bytes: checked against the file systems first. */
int lh_store_files_reserve(struct lh_store *store, struct lh_error *err) LH_MUST_CHECK;
/* The file, open and locked. Errors: as lh_store_open(). */
int lh_store_file_open(struct lh_store *store, uint32_t file_index, struct lh_error *err)
    LH_MUST_CHECK;
int lh_store_file_info(const struct lh_store *store, uint32_t file_index,
                       struct lh_store_fs_info *info_out, struct lh_error *err) LH_MUST_CHECK;
/* Make the entries of what create made durable. */
int lh_store_file_sync_directories(const struct lh_store *store, uint32_t file_index,
                                   struct lh_error *err) LH_MUST_CHECK;
/* Unlink the files and remove the directories that create made; open files stay open. */
void lh_store_files_unmake(struct lh_store *store);
/* Also unlocks them. */
void lh_store_files_close(struct lh_store *store);

/*
 * All bytes of a transfer, blocking. Errors: -errno, -ENODATA at the end of the file; the message
 * names path and offset.
 */
int lh_store_file_read(const struct lh_store *store, uint32_t file_index, uint64_t offset,
                       void *buffer, uint64_t bytes, struct lh_error *err) LH_MUST_CHECK;
int lh_store_file_write(const struct lh_store *store, uint32_t file_index, uint64_t offset,
                        const void *buffer, uint64_t bytes, struct lh_error *err) LH_MUST_CHECK;
int lh_store_file_sync(const struct lh_store *store, uint32_t file_index, struct lh_error *err)
    LH_MUST_CHECK;
/* A copy of a file's header, through the bounce buffer; not synced. */
int lh_store_header_write(struct lh_store *store, uint32_t file_index, uint32_t copy,
                          struct lh_error *err) LH_MUST_CHECK;

/* lock.c */

/* Errors: -EBUSY (the message says by whom), -errno. */
int lh_store_file_lock(struct lh_store *store, uint32_t file_index, struct lh_error *err)
    LH_MUST_CHECK;
void lh_store_file_unlock(struct lh_store *store, uint32_t file_index);
/* Write the owner's block and read it back: finds out whether O_DIRECT works. */
int lh_store_file_probe(struct lh_store *store, uint32_t file_index, bool allow_buffered,
                        struct lh_error *err) LH_MUST_CHECK;

/* commit.c */

/* Whether lh_store_stage() may be called for group now. */
bool lh_store_may_stage(const struct lh_store *store, uint32_t group);
/*
 * Encode the manifest of the next commit into the area not in use, and prepare the superblock that
 * will name it.
 */
void lh_store_manifest_prepare(struct lh_store *store, uint64_t step, const void *scalars,
                               uint64_t scalar_bytes);
/* The witness of the next superblock, into witness_block; returns where it goes in other files. */
uint64_t lh_store_witness_prepare(struct lh_store *store);
/* The next superblock, into superblock_block; returns where copy goes in file 0. */
uint64_t lh_store_superblock_prepare(struct lh_store *store, uint32_t copy);
/* The answer of everything that would change a store which has failed. */
int lh_store_fail(const struct lh_store *store, struct lh_error *err);

/* sync.c */

/*
 * Write a superblock that differs from the newest only in its sequence and in is_clean, durably.
 */
int lh_store_mark_sync(struct lh_store *store, bool is_clean, struct lh_error *err) LH_MUST_CHECK;
/* Write the next superblock, one copy after the other, each durable before the other is touched. */
int lh_store_superblock_write(struct lh_store *store, uint32_t first_copy, struct lh_error *err)
    LH_MUST_CHECK;

/* choose.c */

/*
 * Read size bytes that file 0 has at an offset for each copy, and that have this CRC. A damaged
 * copy is noted, and put on the list of what to mend, if another one is whole.
 *
 * Errors: -EILSEQ, -errno of reading if any copy cannot be read.
 */
int lh_store_copies_read(struct lh_store *store, const char *name, const uint64_t *offsets,
                         struct lh_store_buffer *buffer, uint64_t bytes, uint32_t expected_crc,
                         struct lh_error *err) LH_MUST_CHECK;
/* Find the step to open at, load its state, and make it durable unless the store is read only. */
int lh_store_choose(struct lh_store *store, const uint64_t *open_at, struct lh_error *err)
    LH_MUST_CHECK;

/* mend.c */

/*
 * Make durable what opening for writing read, before anything is built on it. places: as they were
 * read. chosen: the one whose superblock was chosen. rejected_sequence: of the newer superblock,
 * which is replaced; 0: the chosen one is the newest.
 */
int lh_store_settle(struct lh_store *store, const struct lh_store_superblocks *places,
                    uint32_t chosen, uint64_t rejected_sequence, struct lh_error *err)
    LH_MUST_CHECK;

#endif
