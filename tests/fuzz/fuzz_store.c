/*
 * Open a store whose files were changed by an attacker, a broken drive or a lost write.
 *
 * lh_store_create() makes the stores in memory, so that inputs are as small as their changes: a
 * kind of store, flags, and a list of changes. Afterwards checksums are corrected as the flags say.
 * A store that opens must be consistent: everything that it describes can be queried, read,
 * written, committed and opened again.
 *
 * The files of version 1 are made from those of version 2. Inputs cannot reach a lack of memory,
 * nor file calls that csrc/store makes before it has read anything.
 *
 *      input:  kind, flags, { verb, file, region, offset (2 bytes), count, bytes... }...
 */
#include <stdio.h>

#include "fuzz.h"
#include "fuzz_files.h"
#include "sched/engine.h"
#include "store/store.h"

#define KIND_COUNT 6

#define FLAG_SEAL_HEADERS 1u
#define FLAG_SEAL_REGIONS 2u /* fix the checksums of table and meta in the headers */
#define FLAG_SEAL_SUPERBLOCKS 4u
#define FLAG_SEAL_MANIFESTS 8u
#define FLAG_READ_ONLY 16u
#define FLAG_REVERSED 32u /* the directories are given in reversed order */
#define FLAG_EDIT 64u     /* write and commit after opening */
#define FLAG_ONE_LESS 128u

struct image {
    uint8_t *bytes[FILE_COUNT_MAX];
    uint64_t size[FILE_COUNT_MAX];
    uint32_t file_count;
    struct lh_store_header header; /* the header of file 0 */
    struct lh_store_control control;
};

static struct image images[KIND_COUNT];
/* The files of each kind, and the blocks that differ from the kind's image. */
static uint8_t *works[KIND_COUNT][FILE_COUNT_MAX];
static bool is_changed[KIND_COUNT][FILE_COUNT_MAX][FILE_BYTES_MAX / LH_BLOCK_BYTES];
static uint32_t kind_now;
static bool has_copied; /* a block was replaced by another valid one */
static void changed(int file, uint64_t offset, uint64_t bytes)
{
    for (uint64_t block = offset / LH_BLOCK_BYTES; block * LH_BLOCK_BYTES < offset + bytes; block++)
        is_changed[kind_now][file][block] = true;
}

static const char *const names[FILE_COUNT_MAX] = {"/0", "/1"};
static struct lh_alloc alloc = LH_ALLOC_INIT;

static void step_write(struct lh_store *store, uint64_t step)
{
    uint8_t bytes[LH_BLOCK_BYTES];
    memset(bytes, (int)step, sizeof(bytes));
    for (uint32_t extent = 0; extent < 2; extent++)
        LH_ASSERT(lh_store_write_sync(store, extent, 0, bytes, sizeof(bytes), NULL) == 0);
}

static const struct kind {
    uint32_t directory_count;
    uint32_t step_count;
    uint32_t version;
    bool single_slot;
    bool is_large; /* one extent has a tail after a whole stripe */
} kinds[KIND_COUNT] = {
    {.directory_count = 1, .step_count = 0, .version = 2},
    {.directory_count = 2, .step_count = 1, .version = 2},
    {.directory_count = 1, .step_count = 2, .version = 2, .single_slot = true},
    {.directory_count = 2, .step_count = 3, .version = 2, .is_large = true},
    {.directory_count = 2, .step_count = 2, .version = 1},
    {.directory_count = 1, .step_count = 0, .version = 1},
};

/* Make the files those of version 1: one copy of everything, and no witnesses. */
static void image_downgrade(struct image *image)
{
    struct lh_store_header header = image->header;
    struct lh_store_control control;
    uint8_t *source = files[0].bytes;
    uint8_t *target = fuzz_zeroed(FILE_BYTES_MAX);
    header.version = 1;
    lh_store_control_plan(&header, &control);
    uint64_t data = control.data_offset[0];
    LH_ASSERT(data == image->control.data_offset[0]);
    memcpy(target + LH_STORE_OWNER_OFFSET, source + LH_STORE_OWNER_OFFSET, LH_BLOCK_BYTES);
    memcpy(target + control.table_offset[0], source + image->control.table_offset[0],
           control.table_bytes);
    memcpy(target + control.meta_offset[0], source + image->control.meta_offset[0],
           header.meta_bytes);
    memcpy(target + data, source + data, files[0].size - data);
    for (uint32_t number = 0; number < 2; number++) {
        struct lh_store_superblock superblock;
        uint64_t offset = LH_STORE_SUPERBLOCK_OFFSET(number, 0);
        int rc = lh_store_superblock_decode(source + offset, &image->header, &superblock, NULL);
        LH_ASSERT(rc == 0);
        uint32_t area = superblock.manifest_area;
        uint8_t *manifest = target + control.manifest_offset[area][0];
        memcpy(manifest, source + image->control.manifest_offset[area][0], control.manifest_bytes);
        ((struct lh_store_manifest_disk *)(void *)manifest)->version = header.version;
        superblock.manifest_crc = lh_crc32c(0, manifest, control.manifest_bytes);
        superblock.witness = 0;
        lh_store_superblock_encode(&superblock, &header, target + offset);
    }
    memcpy(source, target, FILE_BYTES_MAX);
    free(target);
    for (uint32_t file = 0; file < image->file_count; file++) {
        header.file_index = file;
        header.file_bytes = files[file].size;
        /* Nothing else is there in front of the data. */
        if (file > 0)
            memset(files[file].bytes + LH_STORE_WITNESS_OFFSET(0), 0,
                   control.data_offset[file] - LH_STORE_WITNESS_OFFSET(0));
        lh_store_header_encode(&header, files[file].bytes);
    }
    image->header = header;
    image->header.file_index = 0;
    image->header.file_bytes = files[0].size;
    image->control = control;
}

static void image_make(struct image *image, const struct kind *kind)
{
    const struct lh_store_extent_desc extents[] = {
        {.bytes = 12 * LH_KIB, .group = 0},
        {.bytes = (kind->is_large ? LH_MIB : 0) + 4 * LH_KIB, .group = 1},
        {.bytes = 4 * LH_KIB, .group = 1}};
    static const struct lh_store_group_desc groups[] = {{2}, {2}};
    uint8_t scalars[64];
    struct lh_store *store = NULL;
    struct lh_store_opts opts = {
        .directories = names,
        .directory_count = kind->directory_count,
        .extents = extents,
        .extent_count = LH_COUNT_OF(extents),
        .groups = groups,
        .group_count = LH_COUNT_OF(groups),
        .meta = "{\"lohan\": 1}",
        .meta_bytes = 12,
        .scalar_bytes_max = sizeof(scalars),
        .single_slot = kind->single_slot,
        .fs = &memory_fs,
    };
    memset(files, 0, sizeof(files));
    for (uint32_t file = 0; file < FILE_COUNT_MAX; file++)
        files[file].bytes = fuzz_zeroed(FILE_BYTES_MAX);
    LH_ASSERT(lh_store_create(&opts, &alloc, &store, NULL) == 0);
    lh_scalars_make((const uint64_t[]){3}, 1, "{}", 2, scalars);
    for (uint64_t step = 1; step <= kind->step_count; step++) {
        step_write(store, step);
        uint64_t bytes = lh_scalars_overhead_bytes(1) + 2;
        LH_ASSERT(lh_store_commit_sync(store, step, scalars, bytes, NULL) == 0);
    }
    lh_store_close(store);
    image->file_count = opts.directory_count;
    LH_ASSERT(lh_store_header_decode(files[0].bytes, &image->header, NULL) == 0);
    lh_store_control_plan(&image->header, &image->control);
    if (kind->version == 1)
        image_downgrade(image);
    for (uint32_t file = 0; file < FILE_COUNT_MAX; file++) {
        image->bytes[file] = files[file].bytes;
        image->size[file] = files[file].size;
    }
}

static void images_make(void)
{
    for (uint32_t kind = 0; kind < KIND_COUNT; kind++) {
        image_make(&images[kind], &kinds[kind]);
        for (uint32_t file = 0; file < FILE_COUNT_MAX; file++) {
            works[kind][file] = fuzz_zeroed(FILE_BYTES_MAX);
            memcpy(works[kind][file], images[kind].bytes[file], FILE_BYTES_MAX);
        }
    }
    memset(is_changed, 0, sizeof(is_changed));
}

static void image_load(uint32_t kind)
{
    const struct image *image = &images[kind];
    kind_now = kind;
    for (uint32_t file = 0; file < FILE_COUNT_MAX; file++) {
        LH_ASSERT(!files[file].is_open);
        files[file].bytes = works[kind][file];
        files[file].size = image->size[file];
        files[file].is_there = file < image->file_count;
        bool *changes = is_changed[kind][file];
        for (uint64_t block = 0; block < FILE_BYTES_MAX / LH_BLOCK_BYTES; block++) {
            uint64_t offset = block * LH_BLOCK_BYTES;
            if (changes[block])
                memcpy(files[file].bytes + offset, image->bytes[file] + offset, LH_BLOCK_BYTES);
        }
        memset(changes, 0, sizeof(is_changed[kind][file]));
    }
}

static uint64_t region_offset(const struct image *image, uint8_t region)
{
    const struct lh_store_control *control = &image->control;
    const uint64_t offsets[] = {
        LH_STORE_HEADER_OFFSET(0),
        LH_STORE_OWNER_OFFSET,
        LH_STORE_SUPERBLOCK_OFFSET(0, 0),
        LH_STORE_SUPERBLOCK_OFFSET(1, 0),
        control->table_offset[0],
        control->meta_offset[0],
        control->manifest_offset[0][0],
        control->manifest_offset[1][0],
        control->data_offset[0],
        control->manifest_offset[0][0] + control->manifest_sum_offset / 4096 * 4096,
        LH_STORE_HEADER_OFFSET(1),
        LH_STORE_SUPERBLOCK_OFFSET(0, 1),
        LH_STORE_SUPERBLOCK_OFFSET(1, 1),
        control->table_offset[1],
        control->meta_offset[1],
        control->manifest_offset[0][1],
        control->manifest_offset[1][1],
    };
    return offsets[region % LH_COUNT_OF(offsets)];
}

/* Apply one change that the input describes. */
static void change_apply(const struct image *image, struct fuzz_input *input)
{
    uint8_t verb = fuzz_byte(input) % 10;
    uint32_t file = fuzz_byte(input) % image->file_count;
    uint64_t base = region_offset(image, fuzz_byte(input));
    uint64_t offset = base + fuzz_byte(input) + 256 * (uint64_t)fuzz_byte(input);
    uint8_t last = fuzz_byte(input);
    uint64_t count = 1 + last % 16;
    uint64_t size = files[file].size;
    uint8_t *bytes = files[file].bytes;
    if (verb == 0 || verb == 1) {
        uint8_t given[16];
        fuzz_take(input, given, count);
        offset = lh_min_u64(offset, FILE_BYTES_MAX - sizeof(given));
        for (uint64_t i = 0; i < count; i++)
            bytes[offset + i] = verb == 0 ? given[i] : bytes[offset + i] ^ given[i];
        changed((int)file, offset, count);
    } else if (verb == 2) {
        memset(bytes + base, 0, LH_BLOCK_BYTES);
        changed((int)file, base, LH_BLOCK_BYTES);
    } else if (verb == 3) {
        const uint8_t *source = files[last / 32 % image->file_count].bytes;
        has_copied = true;
        memmove(bytes + base, source + region_offset(image, last % 32), LH_BLOCK_BYTES);
        changed((int)file, base, LH_BLOCK_BYTES);
    } else if (verb == 4) {
        files[file].size =
            lh_min_u64(count % 2 == 0 ? offset : size - lh_min_u64(size, offset), size);
    } else if (verb == 5) {
        faults.read = (uint32_t)count;
    } else if (verb == 6) {
        faults.has_step = true;
        faults.step = count - 1;
    } else if (verb == 7) {
        faults.write = (uint32_t)count;
    } else if (verb == 8) {
        faults.sync = (uint32_t)count;
    } else {
        faults.bad_file = (int)file;
        faults.bad_offset = base;
    }
}

/* A superblock, or in another file a witness, has the checksum that its bytes give. */
static void superblock_seal(const struct image *image, uint32_t file, uint64_t offset,
                            unsigned flags)
{
    struct lh_store_superblock_disk *disk = (void *)(files[file].bytes + offset);
    uint32_t area = disk->manifest_area;
    bool is_superblock = memcmp(disk->magic, "LOHANSUP", sizeof(disk->magic)) == 0;
    if (!is_superblock && memcmp(disk->magic, "LOHANWIT", sizeof(disk->magic)) != 0)
        return;
    if ((flags & FLAG_SEAL_MANIFESTS) != 0 && is_superblock && area < 2)
        disk->manifest_crc = lh_crc32c(0, files[0].bytes + image->control.manifest_offset[area][0],
                                       image->control.manifest_bytes);
    fuzz_block_seal((void *)disk);
    changed((int)file, offset, LH_BLOCK_BYTES);
}

static void header_seal(const struct image *image, uint32_t file, uint64_t offset, unsigned flags)
{
    struct lh_store_header_disk *header = (void *)(files[file].bytes + offset);
    if (memcmp(header->magic, "LOHANDAT", sizeof(header->magic)) != 0)
        return;
    if ((flags & FLAG_SEAL_REGIONS) != 0) {
        header->table_crc = lh_crc32c(0, files[0].bytes + image->control.table_offset[0],
                                      image->control.table_bytes);
        header->meta_crc =
            lh_crc32c(0, files[0].bytes + image->control.meta_offset[0], image->header.meta_bytes);
    }
    if ((flags & (FLAG_SEAL_HEADERS | FLAG_SEAL_REGIONS)) != 0)
        fuzz_block_seal((void *)header);
    changed((int)file, offset, LH_BLOCK_BYTES);
}

static void seal(const struct image *image, unsigned flags)
{
    for (uint32_t file = 0; file < image->file_count; file++) {
        for (uint32_t copy = 0; copy < image->control.copy_count; copy++) {
            header_seal(image, file, LH_STORE_HEADER_OFFSET(copy), flags);
            for (uint32_t number = 0; number < 2 && (flags & FLAG_SEAL_SUPERBLOCKS) != 0; number++)
                superblock_seal(image, file, LH_STORE_SUPERBLOCK_OFFSET(number, copy), flags);
        }
    }
}

static int open_again(const struct image *image, unsigned flags, struct lh_store **store_out,
                      struct lh_error *err)
{
    const char *directories[FILE_COUNT_MAX] = {names[0], names[1]};
    bool is_reversed = (flags & FLAG_REVERSED) != 0 && image->file_count == 2;
    if (is_reversed) {
        directories[0] = names[1];
        directories[1] = names[0];
    }
    struct lh_store_open_opts opts = {
        .directories = directories,
        .directory_count = image->file_count,
        .read_only = (flags & FLAG_READ_ONLY) != 0,
        .open_at = faults.has_step ? &faults.step : NULL,
        .fs = &memory_fs,
    };
    if ((flags & FLAG_ONE_LESS) != 0 && image->file_count == 2)
        opts.directory_count = 1;
    return lh_store_open(&opts, &alloc, store_out, err);
}

static void read_all(struct lh_store *store)
{
    static _Alignas(4096) uint8_t buffer[LH_MIB];
    for (uint32_t extent = 0; extent < lh_store_extent_count(store); extent++) {
        uint64_t bytes = lh_store_extent(store, extent).bytes;
        LH_ASSERT(bytes <= FILE_BYTES_MAX);
        for (uint64_t at = 0; at < bytes; at += sizeof(buffer)) {
            struct lh_error err = {0};
            uint64_t part = lh_min_u64(bytes - at, sizeof(buffer));
            int rc = lh_store_read_sync(store, extent, at, buffer, part, &err);
            LH_ASSERT(rc == 0 || (rc == err.code && err.message[0] != '\0'));
        }
    }
}

static void describe_all(const struct lh_store *store)
{
    uint64_t bytes = 0;
    uint64_t caller_bytes = 0;
    const uint8_t *meta = lh_store_meta(store, &bytes);
    LH_ASSERT(lh_crc32c(0, meta, bytes) != 1 || bytes > 0);
    const void *scalars = lh_store_scalars(store, &bytes);
    LH_ASSERT(bytes <= lh_store_scalar_bytes_max(store));
    const uint8_t *found = lh_scalars_find(scalars, bytes, &caller_bytes);
    LH_ASSERT(found == NULL || found + caller_bytes == (const uint8_t *)scalars + bytes);
    LH_ASSERT(strlen(lh_store_uuid(store)) == 36 && strlen(lh_store_note(store)) < 2048);
    for (uint32_t group = 0; group < lh_store_group_count(store); group++)
        LH_ASSERT(lh_store_read_slot(store, group) < lh_store_slot_count(store, group));
}

/* What the note of an opening allows a later one to find. */
struct doubt {
    bool is_restored; /* a witness could not be read: the directory may be found to be older */
    /* A copy could neither be read nor be repaired. It may be found to be valid, but different. */
    bool is_contradicted;
};

static struct doubt doubt_of(const struct lh_store *store, unsigned flags)
{
    const unsigned sealed = FLAG_SEAL_HEADERS | FLAG_SEAL_REGIONS | FLAG_SEAL_SUPERBLOCKS;
    bool has_valid = has_copied || (flags & sealed) != 0;
    const char *note = lh_store_note(store);
    return (struct doubt){
        .is_restored = strstr(note, "it is unknown whether this directory is as recent"),
        .is_contradicted = has_valid && strstr(note, "cannot be repaired"),
    };
}

/* Open again, and find the step; NULL if the note of the opening before it allows an error. */
static struct lh_store *open_later(const struct image *image, unsigned flags, uint64_t step,
                                   struct doubt doubt)
{
    struct lh_error err = {0};
    struct lh_store *store = NULL;
    int rc = open_again(image, flags, &store, &err);
    if ((rc == -ESTALE && doubt.is_restored) || (rc < 0 && doubt.is_contradicted))
        return NULL;
    if (rc < 0 || lh_store_step(store) != step)
        fprintf(stderr, "step %llu: %s\n", (unsigned long long)step, err.message);
    LH_ASSERT(rc == 0 && lh_store_step(store) == step);
    return store;
}

/* Write and commit as a session does; a later opening must find the commit. */
static void edit(const struct image *image, struct lh_store *store, unsigned flags)
{
    static uint8_t block[LH_BLOCK_BYTES];
    struct lh_error err = {0};
    uint64_t step = lh_store_step(store) + 1;
    struct doubt doubt = doubt_of(store, flags);
    for (uint32_t extent = 0; extent < lh_store_extent_count(store); extent++) {
        int rc = lh_store_write_sync(store, extent, 0, block, sizeof(block), &err);
        LH_ASSERT(rc == 0 || err.message[0] != '\0');
    }
    int rc = lh_store_commit_sync(store, step, NULL, 0, &err);
    lh_store_close(store);
    if (rc < 0)
        return;
    store = open_later(image, flags, step, doubt);
    if (!store)
        return;
    read_all(store);
    lh_store_close(store);
}

/* A later opening must find what opening for writing returned. */
static void close_and_compare(const struct image *image, struct lh_store *store, unsigned flags)
{
    uint64_t step = lh_store_step(store);
    struct doubt doubt = doubt_of(store, flags);
    lh_store_close(store);
    store = open_later(image, flags, step, doubt);
    if (store)
        lh_store_close(store);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool is_ready;
    struct fuzz_input input = {.data = data, .size = size};
    struct lh_store *store = NULL;
    struct lh_error err = {0};
    if (!is_ready)
        images_make();
    is_ready = true;
    uint32_t kind = fuzz_byte(&input) % KIND_COUNT;
    const struct image *image = &images[kind];
    unsigned flags = fuzz_byte(&input);
    image_load(kind);
    faults = (struct faults){.bad_file = -1};
    has_copied = false;
    for (uint32_t i = 0; i < 16 && input.size > 0; i++)
        change_apply(image, &input);
    seal(image, flags);
    int rc = open_again(image, flags, &store, &err);
    LH_ASSERT((rc == 0) == (store != NULL));
    LH_ASSERT(rc == 0 || (rc == err.code && err.message[0] != '\0'));
    faults = (struct faults){.bad_file = -1};
    if (rc == 0) {
        describe_all(store);
        read_all(store);
        if ((flags & (FLAG_EDIT | FLAG_READ_ONLY)) == FLAG_EDIT)
            edit(image, store, flags);
        else if ((flags & FLAG_READ_ONLY) == 0)
            close_and_compare(image, store, flags);
        else
            lh_store_close(store);
    }
    LH_ASSERT(alloc.live_count == 0);
    return 0;
}
