#include "rig_saved.h"

#include "lh_test.h"
#include "store_fixture.h"

struct rig_saved {
    struct lh_store *store;
    struct lh_io_file files[LH_IO_FILE_COUNT_MAX];
    uint32_t file_first;
    uint8_t *memory;
};

struct lh_store *rig_saved_store(struct rig *rig, const char *name, uint64_t bytes)
{
    char path[8192];
    const char *directory = path;
    struct lh_store *store = NULL;
    struct lh_error err = {0};
    snprintf(path, sizeof(path), "%s/%s-%s", fixture_root(), rig->name, name);
    const struct lh_store_extent_desc extent = {.bytes = bytes};
    const struct lh_store_group_desc group = {.slot_count = 1};
    const struct lh_store_opts opts = {
        .directories = &directory,
        .directory_count = 1,
        .extents = &extent,
        .extent_count = 1,
        .groups = &group,
        .group_count = 1,
        .meta = "{}",
        .meta_bytes = 2,
        .scalar_bytes_max = 64,
        .single_slot = true,
        .temporary = true,
        .allow_buffered = true,
    };
    int rc = lh_store_create(&opts, &rig->alloc, &store, &err);
    if (rc < 0)
        fprintf(stderr, "%s\n", err.message);
    LH_CHECK(rc == 0);
    return store;
}

struct rig_saved *rig_saved_open(struct rig *rig)
{
    if (rig->opts.saved_bytes == 0)
        return NULL;
    struct rig_saved *saved = calloc(1, sizeof(*saved));
    LH_CHECK(saved);
    saved->memory = aligned_alloc(LH_BLOCK_BYTES, rig->opts.saved_bytes);
    LH_CHECK(saved->memory);
    if (rig->opts.saved_ssd_bytes > 0)
        saved->store = rig_saved_store(rig, "saved", rig->opts.saved_ssd_bytes);
    return saved;
}

void rig_saved_files(struct rig *rig, struct lh_io_opts *opts)
{
    struct rig_saved *saved = rig->saved;
    if (!saved || !saved->store)
        return;
    saved->file_first = opts->file_count;
    memcpy(saved->files, opts->files, opts->file_count * sizeof(*opts->files));
    memcpy(saved->files + opts->file_count, lh_store_files(saved->store),
           lh_store_file_count(saved->store) * sizeof(*opts->files));
    opts->file_count += lh_store_file_count(saved->store);
    opts->files = saved->files;
}

void rig_saved_opts(struct rig *rig, struct lh_engine_opts *opts)
{
    if (!rig->saved)
        return;
    opts->saved = (struct lh_saved_opts){
        .memory = rig->saved->memory,
        .memory_bytes = rig->opts.saved_bytes,
        .transit_bytes = rig->opts.saved_transit_bytes,
        .store = rig->saved->store,
        .file_first = rig->saved->file_first,
        .item_max = rig->opts.saved_item_max,
    };
}

void rig_saved_close(struct rig *rig)
{
    if (!rig->saved)
        return;
    lh_store_close(rig->saved->store);
    free(rig->saved->memory);
    free(rig->saved);
    rig->saved = NULL;
}

void rig_saved_spoil(struct rig *rig)
{
    struct lh_store *store = rig->saved->store;
    for (uint32_t i = 0; i < lh_store_file_count(store); i++) {
        uint64_t bytes = lh_store_file_bytes(store, i);
        uint8_t *block = aligned_alloc(LH_BLOCK_BYTES, LH_BLOCK_BYTES);
        LH_CHECK(block);
        int fd = lh_store_files(store)[i].fd;
        for (uint64_t at = 0; at + LH_BLOCK_BYTES <= bytes; at += LH_BLOCK_BYTES) {
            LH_CHECK(pread(fd, block, LH_BLOCK_BYTES, (off_t)at) == LH_BLOCK_BYTES);
            block[at / LH_BLOCK_BYTES % LH_BLOCK_BYTES] ^= 4;
            LH_CHECK(pwrite(fd, block, LH_BLOCK_BYTES, (off_t)at) == LH_BLOCK_BYTES);
        }
        free(block);
    }
}
