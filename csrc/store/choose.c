/*
 * Chooses the step that a store opens at.
 *
 * [Note: Crash or damage]
 *
 * Each of the two superblock places holds two copies. A commit with sequence number s writes copy
 * 0, syncs, writes copy 1, and syncs (see [Note: Why a crash cannot tear a commit] in commit.c).
 * Before that, both copies had s - 2 (or lower, after a repair or after returning to an older
 * step), and both copies of the other place had s - 1. So when power fails,
 *
 *      copy 0           copy 1           means
 *      s - 2            s - 2            nothing of s was written: s - 1 is the newest
 *      invalid          s - 2            copy 0 was being written: s - 1 is the newest
 *      s                s - 2            s is durable: it is the newest
 *      s                invalid          copy 1 was being written: s is the newest
 *      s                s                s is the newest
 *
 * and each place has a valid copy in all of these cases. This also holds after damage to a single
 * block, and because s counts as committed only with both copies, such damage cannot make s - 1
 * look like the newest. If a place has no valid copy, two blocks are damaged, and the place may
 * have held the newest step. If both copies of the newest superblock's manifest are invalid, they
 * are damaged, too, because the manifest was durable before the superblock was written. Blank
 * blocks count as damage, since creation fills both places.
 *
 * If the newest step is damaged, readers get the step before it. Writers are rejected unless they
 * name that step, because they would overwrite data that might still be repaired. If neither copy
 * is valid and one cannot be read at all, open returns the error: the next attempt may succeed.
 *
 * Version 1 has one copy, which a crash may tear. A place whose only copy has a wrong checksum may
 * be the result of a crash or of damage; it is treated as a crash, with a note. Creation filled
 * only one place.
 *
 * A witness shows whether a file other than file 0 is as recent as file 0 says: each commit writes
 * one to the place of its sequence number before it writes its superblock. An older witness in that
 * place means that the directory was restored from an older copy. A witness newer than any commit
 * that can have been under way means that file 0 was restored from an older copy. (If file 0's
 * newest superblock is lost, its sequence number is unknown, and this is not checked.) Restoring
 * file 0 to exactly the previous step looks like a crash during the last commit, and the store
 * opens at that step, which is intact. No two commits, interrupted or not, share a sequence number
 * (lh_store_settle()); otherwise a copy made during an interrupted commit would have the witness of
 * the commit that replaced it.
 *
 * A witness has one copy. If it is invalid or cannot be read, nothing shows whether its directory
 * was restored, and a note says so: one bad block must not make an intact store unusable. Bytes of
 * a directory that was restored then fail the checksums of the manifest.
 */
#include <endian.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "store/store_impl.h"

/* A step that might be opened: the newest one, or the one before it. */
struct candidate {
    uint32_t place;
    bool has_superblock;
    struct lh_store_superblock superblock;
    struct lh_error reason; /* why the step cannot be opened; code 0: it can */
};

/* Whether code means that a block was read and its contents are wrong. */
static bool is_damage(int code)
{
    return code == -EILSEQ || code == -ENODATA;
}

static int copy_read(struct lh_store *store, const char *name, uint64_t offset,
                     struct lh_store_buffer *buffer, uint64_t bytes, uint32_t expected_crc,
                     struct lh_error *err)
{
    uint64_t padded_bytes = lh_align_up(bytes, LH_BLOCK_BYTES);
    LH_TRY(lh_store_file_read(store, 0, offset, buffer->base, padded_bytes, err));
    uint32_t crc = lh_crc32c(0, buffer->base, bytes);
    if (crc == expected_crc)
        return 0;
    return lh_error_set(err, -EILSEQ,
                        "%s of %s (offset %" PRIu64 ", %" PRIu64 " bytes) has checksum %08" PRIx32
                        ", expected %08" PRIx32,
                        name, store->files[0].path, offset, bytes, crc, expected_crc);
}

int lh_store_copies_read(struct lh_store *store, const char *name, const uint64_t *offsets,
                         struct lh_store_buffer *buffer, uint64_t bytes, uint32_t expected_crc,
                         struct lh_error *err)
{
    uint32_t copy_count = store->control.copy_count;
    LH_ASSERT(copy_count >= 1 && copy_count <= LH_STORE_COPY_COUNT_MAX);
    LH_ASSERT(buffer->base != NULL);
    struct lh_error errors[LH_STORE_COPY_COUNT_MAX] = {{.code = 0}};
    uint32_t good = copy_count;
    /* Copy 0 is read last, and stays in the buffer if it is good. */
    for (uint32_t copy = copy_count; copy-- > 0;) {
        if (copy_read(store, name, offsets[copy], buffer, bytes, expected_crc, &errors[copy]) == 0)
            good = copy;
    }
    if (good == copy_count) {
        /* Prefer a read error to damage: that copy may be good, and readable the next time. */
        uint32_t told = copy_count > 1 && is_damage(errors[0].code) && !is_damage(errors[1].code);
        return lh_error_set(err, errors[told].code, "%s", errors[told].message);
    }
    for (uint32_t copy = 0; copy < copy_count; copy++) {
        if (errors[copy].code == 0)
            continue;
        lh_store_note_add(store, "%s; the other copy is intact and was used", errors[copy].message);
        LH_ASSERT(store->repair_count < LH_STORE_REPAIR_COUNT_MAX);
        store->repairs[store->repair_count++] = (struct lh_store_repair){
            .offset = offsets[copy], .buffer = buffer, .bytes = lh_align_up(bytes, LH_BLOCK_BYTES)};
    }
    /* The damaged copy 0 was read into the buffer after the good one. */
    if (good > 0)
        LH_TRY(copy_read(store, name, offsets[good], buffer, bytes, expected_crc, err));
    return 0;
}

static void place_read(struct lh_store *store, uint32_t number, struct lh_store_superblocks *place)
{
    LH_ASSERT(number < 2);
    *place = (struct lh_store_superblocks){.best = -1};
    for (uint32_t copy = 0; copy < store->control.copy_count; copy++) {
        struct lh_store_superblock *found = &place->found[copy];
        struct lh_error *error = &place->errors[copy];
        int rc = lh_store_file_read(store, 0, LH_STORE_SUPERBLOCK_OFFSET(number, copy),
                                    store->bounce.base, LH_BLOCK_BYTES, error);
        if (rc == 0)
            rc = lh_store_superblock_decode(store->bounce.base, &store->header, found, error);
        if (rc == 0 && found->sequence % 2 != number)
            rc = lh_error_set(error, -EILSEQ,
                              "its sequence number %" PRIu64 " belongs to the other superblock",
                              found->sequence);
        if (rc == 0 && (place->best < 0 || found->sequence > place->found[place->best].sequence))
            place->best = (int)copy;
    }
}

/* Whether a place without a valid copy may have held the newest step. */
static bool place_is_lost(const struct lh_store *store, const struct lh_store_superblocks *place,
                          const struct lh_store_superblocks *other)
{
    LH_ASSERT(place->best < 0);
    if (store->control.copy_count > 1)
        return true;
    if (place->errors[0].code == -ENODATA)
        return other->best >= 0 && other->found[other->best].sequence > 1;
    return place->errors[0].code != -EILSEQ;
}

/* Describe why a place has no valid copy. A read error takes precedence over damage. */
static void place_reason(const struct lh_store *store, uint32_t number,
                         const struct lh_store_superblocks *place, struct lh_error *reason)
{
    const struct lh_error *errors = place->errors;
    LH_ASSERT(place->best < 0 && errors[0].code < 0);
    uint32_t told = is_damage(errors[0].code) && errors[1].code != 0 && !is_damage(errors[1].code);
    int code = place->errors[told].code;
    lh_error_set(reason, is_damage(code) ? -EILSEQ : code,
                 "superblock %" PRIu32 " (offset %" PRIu64 "%s) is damaged: %s", number,
                 LH_STORE_SUPERBLOCK_OFFSET(number, told),
                 store->control.copy_count > 1 ? ", and its other copy as well" : "",
                 place->errors[told].message);
}

/* List the steps that the places hold, or may have held, newest first. Returns their number. */
static uint32_t candidates_find(struct lh_store *store, const struct lh_store_superblocks *places,
                                struct candidate *candidates)
{
    uint32_t count = 0;
    for (uint32_t number = 0; number < 2; number++) {
        struct candidate candidate = {.place = number};
        const struct lh_store_superblocks *place = &places[number];
        if (place->best >= 0) {
            candidate.has_superblock = true;
            candidate.superblock = place->found[place->best];
        } else if (place_is_lost(store, place, &places[1 - number])) {
            place_reason(store, number, place, &candidate.reason);
        } else {
            if (place->errors[0].code == -EILSEQ)
                lh_store_note_add(store,
                                  "%s: superblock %" PRIu32 " at offset %" PRIu64 " is invalid: %s",
                                  store->files[0].path, number,
                                  LH_STORE_SUPERBLOCK_OFFSET(number, 0), place->errors[0].message);
            continue;
        }
        LH_ASSERT(candidate.has_superblock == (candidate.reason.code == 0));
        bool is_first =
            count == 1 && (!candidate.has_superblock ||
                           (candidates[0].has_superblock &&
                            candidate.superblock.sequence > candidates[0].superblock.sequence));
        if (is_first)
            candidates[1] = candidates[0];
        candidates[is_first ? 0 : count] = candidate;
        count++;
    }
    /* The sequence numbers differ, because the two places have numbers of different parity. */
    LH_ASSERT(count < 2 || !candidates[0].has_superblock || !candidates[1].has_superblock ||
              candidates[0].superblock.sequence > candidates[1].superblock.sequence);
    return count;
}

/* Read the manifest that superblock names into the buffer of its area. */
static int manifest_read(struct lh_store *store, const struct lh_store_superblock *superblock,
                         uint64_t *scalar_bytes_out, struct lh_error *err)
{
    uint32_t area = superblock->manifest_area;
    LH_ASSERT(area < LH_COUNT_OF(store->manifests));
    struct lh_store_buffer *manifest = &store->manifests[area];
    LH_TRY(lh_store_copies_read(store, "the manifest", store->control.manifest_offset[area],
                                manifest, store->control.manifest_bytes, superblock->manifest_crc,
                                err));
    int rc = lh_store_manifest_decode(manifest->base, &store->header, &store->control, superblock,
                                      store->slot_counts, scalar_bytes_out, err);
    if (rc < 0)
        (void)lh_error_prefix(err, "the manifest of step %" PRIu64 " at offset %" PRIu64,
                              superblock->step, store->control.manifest_offset[area][0]);
    return rc;
}

/* Load the state from the manifest of the chosen superblock. */
static void state_load(struct lh_store *store)
{
    const struct lh_store_control *control = &store->control;
    LH_ASSERT(store->superblock.manifest_area < LH_COUNT_OF(store->manifests));
    const uint8_t *manifest = store->manifests[store->superblock.manifest_area].base;
    const uint8_t *groups = manifest + sizeof(struct lh_store_manifest_disk);
    const uint8_t *extents = manifest + control->manifest_extent_offset;
    const uint8_t *sums = manifest + control->manifest_sum_offset;
    for (uint32_t group = 0; group < store->header.group_count; group++)
        store->group_states[group] =
            groups[group] & (LH_STORE_GROUP_STATE_SLOT | LH_STORE_GROUP_STATE_WRITTEN);
    for (uint32_t extent = 0; extent < store->header.extent_count; extent++) {
        uint32_t slot = lh_store_committed_slot(store, store->extents[extent].group);
        unsigned state = LH_STORE_EXTENT_STATE_DIRTY(0) | LH_STORE_EXTENT_STATE_DIRTY(1);
        if (extents[extent] & LH_STORE_EXTENT_ZERO)
            state |= LH_STORE_EXTENT_STATE_ZERO(slot);
        store->extent_states[extent] = (uint8_t)state;
        uint32_t count = 0;
        uint32_t *checksums = lh_store_checksums(store, extent, slot, &count);
        for (uint32_t index = 0; index < count; index++) {
            uint32_t value = 0;
            memcpy(&value, sums + (store->checksum_first[extent] + index) * sizeof(value),
                   sizeof(value));
            checksums[index] = le32toh(value);
        }
    }
}

/* "step 7", or a general name for a step whose superblock is lost. */
static const char *candidate_name(const struct candidate *candidate, char *name, uint64_t bytes)
{
    if (candidate->has_superblock)
        snprintf(name, bytes, "step %" PRIu64, candidate->superblock.step);
    else
        snprintf(name, bytes, "the newest step");
    return name;
}

/* Find the requested step, or explain why it cannot be opened. */
static int asked_find(const struct lh_store *store, const struct candidate *candidates,
                      uint32_t count, uint64_t step, uint32_t *chosen_out, struct lh_error *err)
{
    char steps[128] = "none";
    uint64_t used = 0;
    for (uint32_t index = 0; index < count; index++) {
        const struct candidate *candidate = &candidates[index];
        if (candidate->reason.code != 0)
            continue;
        LH_ASSERT(candidate->has_superblock);
        if (candidate->superblock.step == step) {
            *chosen_out = index;
            return 0;
        }
        used += (uint64_t)snprintf(steps + used, sizeof(steps) - used, "%s%" PRIu64,
                                   used > 0 ? " and " : "", candidate->superblock.step);
        LH_ASSERT(used < sizeof(steps));
    }
    LH_ASSERT(count >= 1);
    const struct lh_error *reason =
        candidates[0].reason.code != 0 ? &candidates[0].reason : &candidates[count - 1].reason;
    return lh_error_set(
        err, -EINVAL, "%s cannot be opened at step %" PRIu64 "; its intact steps are: %s%s%s",
        store->files[0].path, step, steps, reason->code != 0 ? "; " : "", reason->message);
}

/* Choose the step to open if none was requested. */
static int newest_find(struct lh_store *store, const struct candidate *candidates, uint32_t count,
                       uint32_t *chosen_out, struct lh_error *err)
{
    char name[64];
    *chosen_out = 0;
    const struct candidate *newest = &candidates[0];
    if (newest->reason.code == 0)
        return 0;
    const struct candidate *older = &candidates[1];
    candidate_name(newest, name, sizeof(name));
    if (count < 2 || older->reason.code != 0)
        return lh_error_set(err, newest->reason.code,
                            "%s: no committed step is intact: %s%s%s; restore the store from a "
                            "backup",
                            store->files[0].path, newest->reason.message, count < 2 ? "" : "; ",
                            count < 2 ? "" : older->reason.message);
    if (store->header.is_single_slot)
        return lh_error_set(err, newest->reason.code,
                            "%s of %s cannot be read, and a store that keeps one copy of each "
                            "value has no earlier step: %s; start from a checkpoint",
                            name, store->files[0].path, newest->reason.message);
    if (!store->is_read_only || !is_damage(newest->reason.code))
        return lh_error_set(err, newest->reason.code,
                            "%s of %s cannot be read: %s; the step before it, %" PRIu64
                            ", is intact: resume=%" PRIu64
                            " goes back to it permanently, and the training since "
                            "then is lost. Restoring the whole store from a backup loses only what "
                            "the backup lacks",
                            name, store->files[0].path, newest->reason.message,
                            older->superblock.step, older->superblock.step);
    LH_ASSERT(older->has_superblock);
    *chosen_out = 1;
    store->is_fallback = true;
    lh_store_note_add(store, "%s: %s cannot be read (%s); using the step before it, %" PRIu64,
                      store->files[0].path, name, newest->reason.message, older->superblock.step);
    return 0;
}

/*
 * Whether a crash can have torn this copy while the other one is intact. A crash can tear copy 1 of
 * the newest place and copy 0 of the other place. It can also tear copy 0 of the newest place if
 * open wrote copy 1 of that superblock first (see repair.c). No commit wrote the superblock then,
 * so its witness is lower than its sequence number.
 */
static bool may_be_torn(const struct lh_store_superblocks *place, uint32_t copy, bool is_newest)
{
    LH_ASSERT(place->best >= 0);
    const struct lh_store_superblock *best = &place->found[place->best];
    return is_newest == (copy == 1) || (is_newest && best->witness != best->sequence);
}

/* Note invalid copies beside an intact one, except where a crash can have caused them. */
static void places_note(struct lh_store *store, const struct lh_store_superblocks *places,
                        uint32_t newest)
{
    for (uint32_t number = 0; number < 2; number++) {
        const struct lh_store_superblocks *place = &places[number];
        if (place->best < 0)
            continue;
        for (uint32_t copy = 0; copy < store->control.copy_count; copy++) {
            int code = place->errors[copy].code;
            bool is_crash = code == -EILSEQ && may_be_torn(place, copy, number == newest);
            if (code != 0 && !is_crash)
                lh_store_note_add(store,
                                  "%s: copy %" PRIu32 " of superblock %" PRIu32
                                  " at offset %" PRIu64 " is invalid; the other one was used: %s",
                                  store->files[0].path, copy, number,
                                  LH_STORE_SUPERBLOCK_OFFSET(number, copy),
                                  place->errors[copy].message);
        }
    }
    for (uint32_t file = 0; file < store->file_count; file++) {
        for (uint32_t copy = 0; copy < store->control.copy_count; copy++) {
            int code = store->files[file].header_codes[copy];
            /* A crash at the very end of creation leaves an intact store with this copy torn. */
            bool is_crash =
                is_damage(code) && file == 0 && copy == 1 &&
                store->superblock.sequence <= LH_STORE_SEQUENCE_CREATED(store->header.version);
            if (code != 0 && !is_crash)
                lh_store_note_add(store,
                                  "%s: copy %" PRIu32 " of the header at offset %" PRIu64
                                  " is invalid (%s); the other one was used",
                                  store->files[file].path, copy, LH_STORE_HEADER_OFFSET(copy),
                                  is_damage(code) ? "wrong contents" : strerror(-code));
        }
    }
}

/*
 * The highest sequence number that the newest superblock, if it has no valid copy, can have had. A
 * commit writes its witness first, and lh_store_settle() may have exceeded the witness of an
 * interrupted commit by one. The two places have numbers of different parity.
 */
static uint64_t lost_sequence(const struct lh_store *store)
{
    uint64_t next = store->superblock.sequence + 1;
    uint64_t witness = store->witness_sequence;
    LH_ASSERT(witness < UINT64_MAX);
    return witness <= next ? next : witness + (witness - next) % 2;
}

/*
 * Reject a directory that does not match the chosen step. newest_sequence: the highest sequence
 * number that file 0 has, or may have had.
 */
static int witness_check(struct lh_store *store, uint32_t file_index, uint64_t newest_sequence,
                         struct lh_error *err)
{
    const struct lh_store_file *file = &store->files[file_index];
    const struct lh_store_superblock *chosen = &store->superblock;
    LH_ASSERT(file_index >= 1 && file_index < store->file_count);
    LH_ASSERT(chosen->sequence <= newest_sequence);
    struct lh_store_witness newest = {.sequence = 0};
    uint64_t expected_sequence = UINT64_MAX; /* of the commit that was chosen; MAX: it is invalid */
    for (uint32_t number = 0; number < 2; number++) {
        struct lh_store_witness found = {.sequence = 0};
        struct lh_error reason = {.code = 0};
        uint64_t offset = LH_STORE_WITNESS_OFFSET(number);
        bool is_expected = chosen->witness % 2 == number;
        int rc = lh_store_file_read(store, file_index, offset, store->bounce.base, LH_BLOCK_BYTES,
                                    &reason);
        if (rc == 0)
            rc = lh_store_witness_decode(store->bounce.base, &store->header, &found, &reason);
        if (rc < 0) {
            /* The next commit may have been writing its witness here, which a crash can tear. */
            bool is_crash = rc == -EILSEQ && (chosen->sequence + 1) % 2 == number;
            if (!is_crash)
                lh_store_note_add(store,
                                  "%s: %s at offset %" PRIu64
                                  " is invalid, so it is unknown whether this directory is as "
                                  "recent as the others: %s",
                                  file->path,
                                  is_expected ? "the witness of the last commit"
                                              : "the witness of an earlier or later commit",
                                  offset, reason.message);
            continue;
        }
        if (is_expected)
            expected_sequence = found.sequence;
        if (found.sequence >= newest.sequence)
            newest = found;
    }
    store->witness_sequence = lh_max_u64(store->witness_sequence, newest.sequence);
    if (expected_sequence < chosen->witness)
        return lh_error_set(
            err, -ESTALE,
            "directory %.*s was restored from an older copy: its newest commit is step "
            "%" PRIu64 " (sequence number %" PRIu64 "), but the store is at step %" PRIu64
            " (%" PRIu64 "); restore its newest copy, or restore every directory from the "
            "same backup",
            (int)file->directory_chars, file->path, newest.step, newest.sequence, chosen->step,
            chosen->witness);
    if (newest.sequence > newest_sequence + 1)
        return lh_error_set(
            err, -ESTALE,
            "directory %.*s was restored from an older copy: its newest commit is step "
            "%" PRIu64 " (sequence number %" PRIu64 "), but %s is already at step %" PRIu64
            " (%" PRIu64 "); restore its newest copy, or restore every directory from the "
            "same backup",
            (int)store->files[0].directory_chars, store->files[0].path, chosen->step,
            chosen->sequence, file->path, newest.step, newest.sequence);
    return 0;
}

int lh_store_choose(struct lh_store *store, const uint64_t *open_at, struct lh_error *err)
{
    struct lh_store_superblocks places[2];
    struct candidate candidates[2];
    uint64_t scalar_bytes[2] = {0, 0};
    for (uint32_t number = 0; number < 2; number++)
        place_read(store, number, &places[number]);
    uint32_t count = candidates_find(store, places, candidates);
    if (count == 0)
        return lh_error_set(err, -EILSEQ,
                            "no committed step is intact: %s; restore the store from a backup",
                            store->note);
    bool is_found = false;
    for (uint32_t index = 0; index < count && !is_found; index++) {
        struct candidate *candidate = &candidates[index];
        if (candidate->has_superblock)
            (void)!manifest_read(store, &candidate->superblock, &scalar_bytes[index],
                                 &candidate->reason);
        is_found = candidate->reason.code == 0 &&
                   (open_at == NULL || *open_at == candidate->superblock.step);
    }
    uint32_t chosen = 0;
    if (open_at != NULL)
        LH_TRY(asked_find(store, candidates, count, *open_at, &chosen, err));
    else
        LH_TRY(newest_find(store, candidates, count, &chosen, err));
    if (chosen > 0 && store->header.is_single_slot)
        return lh_error_set(err, -EINVAL,
                            "%s keeps one copy of each value, so it can be opened only at its "
                            "newest step",
                            store->files[0].path);
    LH_ASSERT(chosen < count && candidates[chosen].has_superblock);
    LH_ASSERT(candidates[chosen].reason.code == 0);
    store->superblock = candidates[chosen].superblock;
    store->scalar_bytes = scalar_bytes[chosen];
    store->older_step = store->superblock.step;
    if (chosen == 0 && count > 1 && candidates[1].has_superblock && !store->header.is_single_slot)
        store->older_step = candidates[1].superblock.step;
    state_load(store);
    places_note(store, places, candidates[0].place);
    uint64_t newest_sequence = UINT64_MAX - 1; /* unknown: no witness is too new */
    if (candidates[0].has_superblock)
        newest_sequence = candidates[0].superblock.sequence;
    for (uint32_t file = 1; file < store->file_count && store->control.has_witnesses; file++)
        LH_TRY(witness_check(store, file, newest_sequence, err));
    if (!candidates[0].has_superblock)
        newest_sequence = lost_sequence(store);
    if (store->header.is_single_slot && !store->superblock.is_clean)
        return lh_error_set(err, -EUCLEAN,
                            "%s keeps one copy of each value and was not closed cleanly after "
                            "step %" PRIu64 ": its contents are a mixture of steps; start from a "
                            "checkpoint",
                            store->files[0].path, store->superblock.step);
    if (store->is_read_only)
        return 0;
    /* Commits cannot reach such a number, and open might soon reject numbers that follow it. */
    if (newest_sequence > LH_STORE_SEQUENCE_MAX / 2)
        return lh_error_set(err, -EILSEQ,
                            "%s has the sequence number %" PRIu64
                            ", which is too high to continue from: it can be opened for reading "
                            "only; export it and create a new store",
                            store->files[0].path, newest_sequence);
    return lh_store_settle(store, places, candidates[chosen].place,
                           chosen > 0 ? newest_sequence : 0, err);
}
