/*
 * Staging, commit and rollback.
 *
 * [Note: Why a crash cannot tear a commit]
 *
 * File 0 has two superblocks and two manifest areas, with two copies of each. The newest superblock
 * S names area A, and both were durable before this commit began. The commit writes only to the
 * other superblock and the other area, S' and A':
 *
 *      begin ---> WITNESS ---> SYNC_DATA ---> MANIFEST ---> SYNC_MANIFEST
 *                 other files  all files      A', twice     file 0
 *            ---> SUPERBLOCK ---> SYNC_SUPERBLOCK ---> SUPERBLOCK_COPY ---> SYNC_SUPERBLOCK_COPY
 *                 S', copy 0      file 0               S', copy 1           file 0
 *
 *      SYNC_DATA        The bytes of the staged slots, and the witnesses in every other file, are
 *                       durable before anything that names them can be.
 *      SYNC_MANIFEST    A drive may write in any order: without this sync S' could become durable
 *                       before A'. With it, an invalid manifest is always damage.
 *      SYNC_SUPERBLOCK  Copy 1 of S' still has the superblock before S. It may be overwritten only
 *                       when copy 0 is durable: a crash then tears at most one of the copies, and
 *                       the other shows what happened. See [Note: Crash or damage] in choose.c.
 *      SYNC_SUPERBLOCK_COPY  After this sync the new step is committed whatever happens, and damage
 *                       to one block cannot undo that. Only now may the slots of the old step be
 *                       overwritten, and A and S by the next commit.
 *
 * After a crash before S' reaches the drive, S is the newest valid superblock. A and the slots it
 * names were not touched, since staged bytes go to the other slots and A' is not A. The old step is
 * intact.
 * After a crash while a copy of S' is written, that copy is valid, or it fails its checksum and the
 * other copy is used. Each copy is a block of its own, at least 64 KiB from every other. The result
 * is the old or the new step, and both are intact.
 * After a later crash, S' has the higher sequence number, and all it names was durable before. The
 * result is the new step.
 *
 * The previous content of S' (the superblock before S) names A', which this commit overwrites. This
 * is the only time when a superblock lacks its manifest, and S is durable throughout.
 *
 * A store with one slot overwrites committed data and gives no such guarantee: it is marked unclean
 * on disk before its first write or commit and until it is closed with nothing unfinished.
 *
 * A store of version 1 has one copy of each structure and no witnesses. The phases for second
 * copies and witnesses are skipped.
 *
 * [Note: A failed sync is final]
 * After a failed sync the kernel may have dropped the pages and cleared the error, so a retry could
 * succeed although the bytes are not durable. Therefore the first failure of a commit, whatever it
 * is, is permanent. Once a copy of S' was submitted, it is unknown whether that copy is durable:
 * the next open decides, and until then neither the slots of the old step nor those of the new one
 * may be written to.
 *
 *      IDLE -> BEGUN              [lh_store_commit_begin]
 *      BEGUN -> WITNESS -> ...    [lh_store_commit_next, when a phase's requests are complete]
 *      last phase -> IDLE         [lh_store_commit_next: the commit is durable]
 *      any -> IDLE, failed        [lh_store_commit_next: a request failed]
 */
#include <endian.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "store/store_impl.h"

#define STAGED LH_STORE_GROUP_STATE_STAGED
#define IN_COMMIT LH_STORE_GROUP_STATE_IN_COMMIT
#define WRITTEN LH_STORE_GROUP_STATE_WRITTEN

int lh_store_fail(const struct lh_store *store, struct lh_error *err)
{
    LH_ASSERT(store->failure.code < 0);
    if (err != NULL)
        *err = store->failure;
    return store->failure.code;
}

bool lh_store_may_stage(const struct lh_store *store, uint32_t group)
{
    LH_ASSERT(group < store->header.group_count);
    /* A committed group with one slot in a two-slot store: a reopened store reads this slot. */
    bool is_fixed = store->slot_counts[group] == 1 && !store->header.is_single_slot &&
                    (store->group_states[group] & WRITTEN) != 0;
    return !store->is_read_only && !is_fixed && (store->group_states[group] & IN_COMMIT) == 0;
}

void lh_store_stage(struct lh_store *store, uint32_t group)
{
    LH_ASSERT(lh_store_may_stage(store, group));
    store->group_states[group] |= STAGED;
    store->is_changed = true;
}

void lh_store_rollback(struct lh_store *store)
{
    bool is_lost = false;
    for (uint32_t extent = 0; extent < store->header.extent_count; extent++) {
        uint32_t group = store->extents[extent].group;
        unsigned state = store->group_states[group];
        LH_ASSERT((state & IN_COMMIT) == 0 || (state & STAGED) != 0);
        LH_ASSERT((state & IN_COMMIT) == 0 || store->phase != LH_STORE_PHASE_IDLE);
        if ((state & STAGED) == 0 || (state & IN_COMMIT) != 0 || store->slot_counts[group] != 1)
            continue;
        /* The only slot was overwritten: it reads as zeros again, or its committed step is lost. */
        if ((state & WRITTEN) == 0)
            lh_store_set_zero(store, extent, 0);
        else
            is_lost = true;
    }
    for (uint32_t group = 0; group < store->header.group_count; group++) {
        if ((store->group_states[group] & IN_COMMIT) == 0)
            store->group_states[group] &= (uint8_t)~STAGED;
    }
    if (is_lost && store->failure.code == 0)
        lh_error_set(&store->failure, -EUCLEAN,
                     "a step was rolled back after it began to overwrite the store, which keeps "
                     "one copy of each value: step %" PRIu64
                     " cannot be recovered; start from a checkpoint",
                     store->superblock.step);
}

/* Fill in the groups, extents and checksums of the slots that the commit makes current. */
static void manifest_fill(const struct lh_store *store, uint8_t *manifest)
{
    const struct lh_store_control *control = &store->control;
    uint8_t *groups = manifest + sizeof(struct lh_store_manifest_disk);
    uint8_t *extents = manifest + control->manifest_extent_offset;
    uint8_t *sums = manifest + control->manifest_sum_offset;
    for (uint32_t group = 0; group < store->header.group_count; group++) {
        unsigned written = store->group_states[group] & (WRITTEN | STAGED);
        groups[group] = (uint8_t)(lh_store_read_slot(store, group) |
                                  (written != 0 ? LH_STORE_GROUP_WRITTEN : 0));
    }
    for (uint32_t extent = 0; extent < store->header.extent_count; extent++) {
        uint32_t slot = lh_store_read_slot(store, store->extents[extent].group);
        extents[extent] = lh_store_is_zero(store, extent, slot) ? LH_STORE_EXTENT_ZERO : 0;
        uint64_t first = store->checksum_first[extent];
        uint64_t count = lh_store_checksum_count(store->extents[extent].bytes);
        LH_ASSERT(first + count <= store->header.checksum_count);
        for (uint64_t index = first; index < first + count; index++) {
            uint32_t value = htole32(store->checksums[slot][index]);
            memcpy(sums + index * sizeof(value), &value, sizeof(value));
        }
    }
}

void lh_store_manifest_prepare(struct lh_store *store, uint64_t step, const void *scalars,
                               uint64_t scalar_bytes)
{
    const struct lh_store_control *control = &store->control;
    LH_ASSERT(store->superblock.manifest_area < LH_COUNT_OF(store->manifests));
    LH_ASSERT(store->superblock.sequence < LH_STORE_SEQUENCE_MAX);
    LH_ASSERT(scalars != NULL || scalar_bytes == 0);
    LH_ASSERT(control->manifest_scalar_offset + scalar_bytes <= control->manifest_bytes);
    uint32_t area = 1 - store->superblock.manifest_area;
    uint8_t *manifest = store->manifests[area].base;
    memset(manifest, 0, control->manifest_bytes);
    lh_store_manifest_encode(&store->header, step, scalar_bytes, manifest);
    manifest_fill(store, manifest);
    if (scalar_bytes > 0)
        memcpy(manifest + control->manifest_scalar_offset, scalars, scalar_bytes);
    store->next = (struct lh_store_superblock){
        .is_clean = !store->header.is_single_slot,
        .sequence = store->superblock.sequence + 1,
        .step = step,
        .manifest_area = area,
        .manifest_crc = lh_crc32c(0, manifest, control->manifest_bytes),
        .witness = control->has_witnesses ? store->superblock.sequence + 1 : 0,
    };
    store->next_scalar_bytes = scalar_bytes;
}

uint64_t lh_store_witness_prepare(struct lh_store *store)
{
    struct lh_store_witness witness = {
        .sequence = store->next.sequence,
        .step = store->next.step,
    };
    lh_store_witness_encode(&witness, &store->header, store->witness_block.base);
    return LH_STORE_WITNESS_OFFSET(witness.sequence % 2);
}

uint64_t lh_store_superblock_prepare(struct lh_store *store, uint32_t copy)
{
    LH_ASSERT(copy < store->control.copy_count);
    LH_ASSERT(store->next.sequence >= store->superblock.sequence);
    lh_store_superblock_encode(&store->next, &store->header, store->superblock_block.base);
    return LH_STORE_SUPERBLOCK_OFFSET(store->next.sequence % 2, copy);
}

int lh_store_write_begin(struct lh_store *store, struct lh_error *err)
{
    LH_ASSERT(!store->is_read_only);
    store->is_changed = true;
    if (!store->header.is_single_slot || !store->superblock.is_clean)
        return 0;
    if (store->failure.code != 0)
        return lh_store_fail(store, err);
    struct lh_error failure = {.code = 0};
    if (lh_store_mark_sync(store, false, &failure) == 0)
        return 0;
    store->failure = failure;
    return lh_store_fail(store, err);
}

int lh_store_names_check(struct lh_store *store, struct lh_error *err)
{
    store->has_names = true;
    for (uint32_t index = 0; store->failure.code == 0 && index < store->file_count; index++) {
        const struct lh_store_file *file = &store->files[index];
        struct lh_store_fs_info info;
        int fd = store->io_files[index].fd;
        if (store->fs->ops->info(store->fs, fd, &info) != 0 || !info.is_deleted)
            continue; /* a file that does not answer fails in its next request */
        lh_error_set(&store->failure, -EIDRM,
                     "%s was deleted while it was open: the store ends with this process, at step "
                     "%" PRIu64 ", and commits nothing more. Until the process ends, "
                     "/proc/%ld/fd/%d has the file's contents, for a copy",
                     file->path, store->superblock.step, (long)getpid(), fd);
    }
    return store->failure.code == -EIDRM ? lh_store_fail(store, err) : 0;
}

int lh_store_commit_begin(struct lh_store *store, uint64_t step, const void *scalars,
                          uint64_t scalar_bytes, struct lh_error *err)
{
    LH_ASSERT(store->phase == LH_STORE_PHASE_IDLE);
    if (store->failure.code != 0)
        return lh_store_fail(store, err);
    if (store->is_read_only)
        return lh_error_set(err, -EROFS, "the store was opened for reading only");
    if (store->has_names)
        LH_TRY(lh_store_names_check(store, err));
    if (scalar_bytes > store->header.scalar_bytes_max)
        return lh_error_set(err, -EINVAL,
                            "a commit has %" PRIu64 " bytes of scalars, but the store was created "
                            "for at most %" PRIu64,
                            scalar_bytes, store->header.scalar_bytes_max);
    /* A write may begin during this commit, which is too late to mark the store unclean. */
    if (store->header.is_single_slot)
        LH_TRY(lh_store_write_begin(store, err));
    lh_store_manifest_prepare(store, step, scalars, scalar_bytes);
    for (uint32_t group = 0; group < store->header.group_count; group++) {
        if (store->group_states[group] & STAGED)
            store->group_states[group] |= IN_COMMIT;
    }
    store->is_changed = false;
    store->requests = NULL;
    store->request_count = 0;
    store->phase = LH_STORE_PHASE_BEGUN;
    return 0;
}

/* Switch to the slots of the commit, which is durable. */
static void commit_finish(struct lh_store *store)
{
    LH_ASSERT(store->phase == LH_STORE_PHASE_SYNC_SUPERBLOCK_COPY);
    LH_ASSERT(store->next.sequence == store->superblock.sequence + 1);
    for (uint32_t group = 0; group < store->header.group_count; group++) {
        unsigned state = store->group_states[group];
        if ((state & IN_COMMIT) == 0)
            continue;
        LH_ASSERT((state & STAGED) != 0);
        uint32_t slot = lh_store_write_slot(store, group);
        store->group_states[group] = (uint8_t)(slot | WRITTEN);
    }
    store->superblock = store->next;
    store->scalar_bytes = store->next_scalar_bytes;
    store->phase = LH_STORE_PHASE_IDLE;
}

/* Make the store FAILED if a request of the current phase failed. */
static int results_check(struct lh_store *store, struct lh_error *err)
{
    static const char *const verbs[] = {
        [LH_IO_KIND_READ] = "read", [LH_IO_KIND_WRITE] = "write", [LH_IO_KIND_SYNC] = "sync"};
    for (uint32_t index = 0; index < store->request_count; index++) {
        const struct lh_io_request *request = &store->requests[index];
        /* Results are read from the requests themselves: the caller must not submit copies. */
        LH_ASSERT(request->result != -EINPROGRESS);
        LH_ASSERT(request->file_index < store->file_count);
        LH_ASSERT(request->kind == LH_IO_KIND_WRITE || request->kind == LH_IO_KIND_SYNC);
        if (request->result >= 0)
            continue;
        int code = (int)request->result;
        bool is_unknown = store->phase >= LH_STORE_PHASE_SUPERBLOCK;
        char range[64] = "";
        if (request->kind != LH_IO_KIND_SYNC)
            snprintf(range, sizeof(range), " (offset %" PRIu64 ", %" PRIu64 " bytes)",
                     request->offset, request->bytes);
        lh_error_set(&store->failure, code,
                     "commit of step %" PRIu64 ": cannot %s %s%s: %s; %s step %" PRIu64,
                     store->next.step, verbs[request->kind], store->files[request->file_index].path,
                     range, strerror(-code),
                     is_unknown ? "whether it is durable is unknown until the store is opened "
                                  "again, which shows either it or"
                                : "the store is still at",
                     store->superblock.step);
        for (uint32_t group = 0; group < store->header.group_count; group++)
            store->group_states[group] &= (uint8_t)~IN_COMMIT;
        store->phase = LH_STORE_PHASE_IDLE;
        return lh_store_fail(store, err);
    }
    return 0;
}

static struct lh_io_request sync_request(uint32_t file_index)
{
    return (struct lh_io_request){
        .kind = LH_IO_KIND_SYNC, .file_index = file_index, .result = -EINPROGRESS};
}

static struct lh_io_request write_request(uint32_t file_index, void *buffer, uint64_t offset,
                                          uint64_t bytes)
{
    return (struct lh_io_request){.kind = LH_IO_KIND_WRITE,
                                  .file_index = file_index,
                                  .buffer = buffer,
                                  .bytes = bytes,
                                  .offset = offset,
                                  .result = -EINPROGRESS};
}

static uint32_t witness_count(const struct lh_store *store)
{
    return store->control.has_witnesses ? store->file_count - 1 : 0;
}

static uint32_t manifest_requests(struct lh_store *store, struct lh_io_request *requests)
{
    uint32_t area = store->next.manifest_area;
    LH_ASSERT(area == 1 - store->superblock.manifest_area);
    for (uint32_t copy = 0; copy < store->control.copy_count; copy++)
        requests[copy] = write_request(0, store->manifests[area].base,
                                       store->control.manifest_offset[area][copy],
                                       store->control.manifest_bytes);
    return store->control.copy_count;
}

/* Fill in the requests of the current phase. Returns their number; 0: the store skips the phase. */
static uint32_t phase_requests(struct lh_store *store, struct lh_io_request *requests)
{
    uint32_t count = 0;
    uint64_t offset = 0;
    switch (store->phase) {
    case LH_STORE_PHASE_WITNESS:
        offset = lh_store_witness_prepare(store);
        for (count = 0; count < witness_count(store); count++)
            requests[count] =
                write_request(count + 1, store->witness_block.base, offset, LH_BLOCK_BYTES);
        return count;
    case LH_STORE_PHASE_SYNC_DATA:
        for (count = 0; count < store->file_count; count++)
            requests[count] = sync_request(count);
        return count;
    case LH_STORE_PHASE_MANIFEST:
        return manifest_requests(store, requests);
    case LH_STORE_PHASE_SUPERBLOCK:
        offset = lh_store_superblock_prepare(store, 0);
        requests[0] = write_request(0, store->superblock_block.base, offset, LH_BLOCK_BYTES);
        return 1;
    case LH_STORE_PHASE_SUPERBLOCK_COPY:
        if (store->control.copy_count == 1)
            return 0;
        offset = lh_store_superblock_prepare(store, 1);
        requests[0] = write_request(0, store->superblock_block.base, offset, LH_BLOCK_BYTES);
        return 1;
    case LH_STORE_PHASE_SYNC_SUPERBLOCK_COPY:
        if (store->control.copy_count == 1)
            return 0;
        break;
    default:
        LH_ASSERT(store->phase == LH_STORE_PHASE_SYNC_MANIFEST ||
                  store->phase == LH_STORE_PHASE_SYNC_SUPERBLOCK);
        break;
    }
    requests[0] = sync_request(0);
    return 1;
}

int lh_store_commit_next(struct lh_store *store, struct lh_io_request *requests,
                         uint32_t request_max, struct lh_error *err)
{
    LH_ASSERT(store->phase != LH_STORE_PHASE_IDLE);
    LH_ASSERT(request_max >= LH_STORE_COMMIT_REQUEST_COUNT_MAX);
    LH_TRY(results_check(store, err));
    uint32_t count = 0;
    while (count == 0) {
        if (store->phase == LH_STORE_PHASE_SYNC_SUPERBLOCK_COPY) {
            commit_finish(store);
            return 0;
        }
        store->phase++;
        count = phase_requests(store, requests);
    }
    LH_ASSERT(count <= LH_STORE_COMMIT_REQUEST_COUNT_MAX);
    store->requests = requests;
    store->request_count = count;
    return (int)count;
}

bool lh_store_is_committing(const struct lh_store *store)
{
    return store->phase != LH_STORE_PHASE_IDLE;
}

uint64_t lh_store_commit_bytes(const struct lh_store *store)
{
    return store->control.copy_count * (store->control.manifest_bytes + LH_BLOCK_BYTES) +
           witness_count(store) * LH_BLOCK_BYTES;
}
