/*
 * The store alone: edits of whole extents and of parts of them, commits, and copies into another
 * store, with two slots and with one, in one to three directories.
 */
#include "kill_worker.h"
#include "lh_test.h"
#include "store_fixture.h"

#define STEP_MAX 40
#define STEPS_OF_LIFE_MAX 4
#define COPY_PIECE_BYTES (64 * LH_KIB)

static struct lh_error err;

static void store_prepare(void)
{
}

static uint64_t number_of(const char *name)
{
    return strtoull(name + 1, NULL, 10);
}

static uint32_t directories_of(const char *name)
{
    return 1 + (uint32_t)(number_of(name) % 3);
}

static bool is_single(const char *name)
{
    return number_of(name) % 4 == 3;
}

static int store_open(const char *name, uint32_t directory_count, bool read_only,
                      struct lh_store **store_out)
{
    static char paths[LH_STORE_DIRECTORY_COUNT_MAX][8192];
    const char *directories[LH_STORE_DIRECTORY_COUNT_MAX];
    struct lh_store_open_opts opts = {.directories = directories,
                                      .directory_count = directory_count,
                                      .read_only = read_only,
                                      .allow_buffered = true};
    for (uint32_t i = 0; i < directory_count; i++) {
        snprintf(paths[i], sizeof(paths[0]), "%s/%s%u", fixture_root(), name, i);
        directories[i] = paths[i];
    }
    return lh_store_open(&opts, &fixture_alloc, store_out, &err);
}

/* The step's bytes, each extent in two writes, of which the first is small and in its middle. */
static void edit(struct lh_store *store, uint64_t step)
{
    for (uint32_t extent = 0; extent < FIXTURE_EXTENT_COUNT; extent++) {
        struct lh_store_extent_desc desc = lh_store_extent(store, extent);
        if (extent == FIXTURE_ZERO_EXTENT || (desc.group == FIXTURE_FROZEN_GROUP && step > 1))
            continue;
        uint8_t *bytes = malloc(desc.bytes);
        LH_CHECK(bytes);
        fixture_fill(bytes, extent, step, 0, desc.bytes);
        uint64_t at = desc.bytes / 2 + 100;
        LH_CHECK(lh_store_write_sync(store, extent, at, bytes + at, 200, &err) == 0);
        LH_CHECK(lh_store_write_sync(store, extent, 0, bytes, desc.bytes, &err) == 0);
        free(bytes);
    }
}

/* Everything that is committed, into a store of one directory, which becomes one by its commit. */
static void copy(struct lh_store *store, const char *name)
{
    char target[80];
    struct lh_store *made = NULL;
    uint8_t piece[COPY_PIECE_BYTES];
    snprintf(target, sizeof(target), "%scopy", name);
    struct fixture_opts opts = {.directory_count = 1, .small = true};
    LH_CHECK(fixture_create(target, &opts, &made, &err) == 0);
    for (uint32_t extent = 0; extent < FIXTURE_EXTENT_COUNT; extent++) {
        uint64_t bytes = lh_store_extent(store, extent).bytes;
        LH_CHECK(bytes <= COPY_PIECE_BYTES);
        if (extent == FIXTURE_ZERO_EXTENT)
            continue;
        LH_CHECK(lh_store_read_sync(store, extent, 0, piece, bytes, &err) == 0);
        LH_CHECK(lh_store_write_sync(made, extent, 0, piece, bytes, &err) == 0);
    }
    fixture_commit(made, lh_store_step(store));
    lh_store_close(made);
}

static void copy_remove(const char *name)
{
    char target[80];
    snprintf(target, sizeof(target), "%scopy0", name);
    fixture_remove(fixture_path(target));
}

static void store_life(const char *name, uint64_t seed, struct shared *shared, bool is_there,
                       void (*arm)(void))
{
    struct lh_store *store = NULL;
    bool single = is_single(name);
    shared->phase = is_there ? PHASE_OPEN : PHASE_CREATE;
    copy_remove(name);
    arm();
    struct fixture_opts opts = {
        .directory_count = directories_of(name), .small = true, .single_slot = single};
    int rc = is_there ? store_open(name, directories_of(name), false, &store)
                      : fixture_create(name, &opts, &store, &err);
    if (rc < 0)
        fprintf(stderr, "%s\n", err.message);
    LH_CHECK(rc == 0 && lh_store_step(store) == shared->least);
    shared->is_made = 1;
    uint64_t step_count = 1 + lh_test_random(&seed) % STEPS_OF_LIFE_MAX;
    for (uint64_t i = 0; i < step_count; i++) {
        uint64_t step = lh_store_step(store) + 1;
        shared->phase = PHASE_EDIT;
        shared->is_dirty = 1;
        edit(store, step);
        shared->phase = PHASE_COMMIT;
        shared->most = step;
        fixture_commit(store, step);
        shared->least = step;
    }
    shared->phase = PHASE_COPY;
    if (!single && lh_test_random(&seed) % 2 == 0)
        copy(store, name);
    shared->phase = PHASE_CLOSE;
    lh_store_close(store);
}

/* A copy is whole, at a step that was committed, or refused. */
static int copy_check(const char *name, const struct shared *shared)
{
    struct lh_store *store = NULL;
    char target[80];
    snprintf(target, sizeof(target), "%scopy", name);
    int rc = store_open(target, 1, true, &store);
    if (rc < 0 && shared->phase == PHASE_CLOSE)
        return access(fixture_path(target), F_OK) == 0 ? 1 : 0;
    if (rc < 0)
        return 0;
    uint64_t step = lh_store_step(store);
    bool is_well = step == shared->least || (step == 0 && shared->phase == PHASE_COPY);
    is_well = is_well && fixture_holds_step(store, step);
    lh_store_close(store);
    return is_well ? 0 : 1;
}

static int store_check(const char *name, uint64_t seed, struct shared *shared, bool was_there)
{
    struct lh_store *store = NULL;
    (void)seed;
    int rc = store_open(name, directories_of(name), true, &store);
    bool is_made = was_there || shared->is_made;
    if (rc < 0 && !is_made)
        return CHECK_REFUSED;
    if (rc == -EUCLEAN && is_single(name))
        return CHECK_REFUSED; /* as expected of a store with one slot whose writer died */
    if (rc < 0) {
        fprintf(stderr, "%s\n", err.message);
        return 1;
    }
    uint64_t step = lh_store_step(store);
    shared->found = step;
    bool is_legal = step >= shared->least && step <= shared->most;
    bool is_said = lh_store_note(store)[0] != '\0';
    if (!is_legal || is_said)
        fprintf(stderr, "step %" PRIu64 " of %" PRIu64 " to %" PRIu64 ": %s\n", step,
                (uint64_t)shared->least, (uint64_t)shared->most, lh_store_note(store));
    bool is_whole = fixture_holds_step(store, step);
    lh_store_close(store);
    return is_legal && is_whole && !is_said && copy_check(name, shared) == 0 ? CHECK_HELD : 1;
}

const struct world world_store = {
    .name = "store",
    .step_max = STEP_MAX,
    .prepare = store_prepare,
    .life = store_life,
    .check = store_check,
};
