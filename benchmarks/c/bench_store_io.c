/*
 * Time the I/O of a store as the engine does it: an extent's slots are moved through lh_store_map()
 * in requests of at most -t KiB, with -q of them in flight, between the files and an arena on huge
 * pages. The owner sleeps until completions. There are no checksums and no commits: only the path
 * from lh_store_map() to the disk is measured.
 *
 *      read    the newest slot           write   the other one
 *      mixed   half of the bytes each, a read and a write in turn
 *
 *      bench_store_io [-m read|write|mixed|all] [-b MiB] [-r repetitions] [-q depth] [-t KiB]
 *                     [-a MiB] [-i backend] [-k] [-s] [directory]
 *
 *      -a  the size of the arena, through which requests move as in training; without it each
 *          request keeps its buffer, and buffers that fit a processor's cache are faster than any
 *          training can be
 *
 *      -k  keep the store, or use the one that an earlier run kept: another program can then move
 *          the same bytes of the same file
 *      -s  serve: print where the bytes are, then run a pass for each line of stdin (read, write,
 *          mixed) and print its seconds, so that a driver can let contestants take turns
 *
 * Without -k the directory has to exist. Each result is a JSON line; value, min, median and max are
 * GB/s (10^9 bytes).
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "io/io.h"
#include "measure.h"
#include "mem/arena.h"
#include "store/store.h"

#define DEPTH_MAX 64
#define REPETITION_COUNT_MAX 101
/* An extent is half again as long as what a pass moves: a pass need not meet its end. */
#define EXTENT_BYTES(pass_bytes) ((pass_bytes) + (pass_bytes) / 2)

enum mode { MODE_READ, MODE_WRITE, MODE_MIXED, MODE_COUNT };

static const char *const mode_names[MODE_COUNT] = {"read", "write", "mixed"};

struct options {
    const char *directory;
    const char *mode;
    const char *backend; /* NULL: the best */
    uint64_t pass_bytes;
    uint64_t request_bytes;
    uint64_t arena_bytes; /* at least a buffer for each request */
    uint32_t depth;
    int repetition_count;
    bool keep;
    bool serve;
};

struct bench {
    struct options options;
    struct lh_alloc alloc;
    struct lh_clock clock;
    struct lh_waker waker;
    struct lh_store *store;
    struct lh_arena *arena;
    struct lh_io *io;
    struct lh_io_request requests[DEPTH_MAX];
};

/* A range that is still to be moved. */
struct cursor {
    enum lh_io_kind kind;
    uint32_t slot;
    uint64_t offset;
    uint64_t end;
};

static _Noreturn void fail(const char *what, const char *why)
{
    fprintf(stderr, "bench_store_io: %s: %s\n", what, why);
    exit(1);
}

static void store_create(struct bench *bench)
{
    struct lh_error err = {0};
    struct lh_store_extent_desc extent = {
        .bytes = lh_align_up(EXTENT_BYTES(bench->options.pass_bytes), LH_MIB),
    };
    struct lh_store_group_desc group = {.slot_count = 2};
    struct lh_store_opts opts = {
        .directories = &bench->options.directory,
        .directory_count = 1,
        .extents = &extent,
        .extent_count = 1,
        .groups = &group,
        .group_count = 1,
        .temporary = !bench->options.keep,
    };

    if (lh_store_create(&opts, &bench->alloc, &bench->store, &err) < 0)
        fail("create", err.message);
}

/* Whether there was one. */
static bool store_open(struct bench *bench)
{
    struct lh_error err = {0};
    struct lh_store_open_opts opts = {
        .directories = &bench->options.directory,
        .directory_count = 1,
    };
    int rc = lh_store_open(&opts, &bench->alloc, &bench->store, &err);

    if (rc == -ENOENT)
        return false;
    if (rc < 0)
        fail("open", err.message);
    if (lh_store_extent(bench->store, 0).bytes < bench->options.pass_bytes)
        fail(bench->options.directory, "the store that is there is smaller than -b");
    return true;
}

static void arena_create(struct bench *bench)
{
    struct lh_error err = {0};
    struct lh_arena_opts opts = {
        .bytes = bench->options.arena_bytes,
        .numa_node = -1,
    };
    uint64_t word = 1;

    if (lh_arena_create(&opts, &bench->alloc, &bench->arena, &err) < 0)
        fail("arena", err.message);
    if (bench->arena->note[0])
        fprintf(stderr, "bench_store_io: %s\n", bench->arena->note);
    /* A disk may compress, and a virtual one may keep no zeros: Marsaglia's xorshift. */
    for (uint64_t i = 0; i < bench->arena->bytes / sizeof(word); i++) {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        ((uint64_t *)(void *)bench->arena->base)[i] = word;
    }
}

static void io_create(struct bench *bench)
{
    struct lh_error err = {0};
    char reason[LH_ERROR_MESSAGE_BYTES] = "";
    const char *backend = bench->options.backend;
    struct lh_io_buffer buffer = {.base = bench->arena->base, .bytes = bench->arena->bytes};
    struct lh_io_opts opts = {
        .files = lh_store_files(bench->store),
        .file_count = lh_store_file_count(bench->store),
        .buffers = &buffer,
        .buffer_count = 1,
        .queue_depth_max = bench->options.depth,
        .waker = &bench->waker,
        .clock = &bench->clock,
    };
    int rc = backend ? lh_io_create(backend, &opts, &bench->alloc, &bench->io, &err)
                     : lh_io_create_best(bench->options.directory, &opts, &bench->alloc, &bench->io,
                                         reason, sizeof(reason), &err);

    if (rc < 0)
        fail("io", err.message);
    if (reason[0] || bench->io->note[0])
        fprintf(stderr, "bench_store_io: %s%s\n", reason, bench->io->note);
}

/* A request's next buffer: every depth-th one is its own, whatever order requests end in. */
static void buffer_advance(const struct bench *bench, struct lh_io_request *request)
{
    const struct options *options = &bench->options;
    char *next = (char *)request->buffer + options->depth * options->request_bytes;
    uint64_t index = (uint64_t)(request - bench->requests);

    if (next + options->request_bytes > bench->arena->base + options->arena_bytes)
        next = bench->arena->base + index * options->request_bytes;
    request->buffer = next;
}

/* The first piece of what is left, as one request. */
static void issue(struct bench *bench, struct cursor *cursor, struct lh_io_request *request)
{
    struct lh_store_piece pieces[LH_STORE_PIECE_COUNT_MAX];
    uint64_t bytes = lh_min_u64(cursor->end - cursor->offset, bench->options.request_bytes);
    int count = lh_store_map(bench->store, 0, cursor->slot, cursor->offset, bytes, pieces,
                             LH_STORE_PIECE_COUNT_MAX);

    if (count < 1)
        fail("map", "one request has too many pieces");
    request->kind = cursor->kind;
    request->file_index = pieces[0].file_index;
    request->offset = pieces[0].file_offset;
    request->bytes = pieces[0].bytes;
    buffer_advance(bench, request);
    cursor->offset += pieces[0].bytes;
    if (bench->io->ops->submit(bench->io, request) != 0)
        fail(bench->io->ops->name, "a queue of this depth is full");
}

/* Move all that cursors hold, taking turns; seconds. */
static double move(struct bench *bench, struct cursor *cursors, uint32_t cursor_count)
{
    struct lh_io_request *done[DEPTH_MAX];
    uint32_t done_count = 0, turn = 0;
    uint64_t begin_ns = lh_clock_now_ns(&bench->clock);
    uint64_t left_bytes = 0;

    for (uint32_t i = 0; i < cursor_count; i++)
        left_bytes += cursors[i].end - cursors[i].offset;
    for (uint32_t i = 0; i < bench->options.depth; i++) {
        bench->requests[i].buffer = bench->arena->base + i * bench->options.request_bytes;
        done[done_count++] = &bench->requests[i];
    }
    while (left_bytes > 0) {
        for (uint32_t i = 0; i < done_count; i++) {
            for (uint32_t k = 0; k < cursor_count; k++) {
                struct cursor *cursor = &cursors[turn++ % cursor_count];
                if (cursor->offset == cursor->end)
                    continue;
                issue(bench, cursor, done[i]);
                break;
            }
        }
        if (bench->io->ops->flush)
            bench->io->ops->flush(bench->io);
        lh_waker_prepare(&bench->waker);
        done_count = bench->io->ops->poll(bench->io, done, DEPTH_MAX);
        if (done_count == 0)
            lh_waker_wait(&bench->waker, -1);
        else
            lh_waker_cancel(&bench->waker);
        for (uint32_t i = 0; i < done_count; i++) {
            if (done[i]->result != 0)
                fail(bench->io->ops->name, strerror((int)-done[i]->result));
            left_bytes -= done[i]->bytes;
        }
    }
    return (double)(lh_clock_now_ns(&bench->clock) - begin_ns) * 1e-9;
}

static double pass(struct bench *bench, enum mode mode)
{
    uint64_t bytes = bench->options.pass_bytes;
    uint64_t half_bytes = lh_align_up(bytes / 2, LH_BLOCK_BYTES);
    uint32_t read_slot = lh_store_read_slot(bench->store, 0);
    struct cursor reads = {LH_IO_KIND_READ, read_slot, 0, bytes};
    struct cursor writes = {LH_IO_KIND_WRITE, 1 - read_slot, 0, bytes};

    if (mode == MODE_READ)
        return move(bench, &reads, 1);
    if (mode == MODE_WRITE)
        return move(bench, &writes, 1);
    reads.end = half_bytes;
    writes.end = bytes - half_bytes;
    struct cursor both[] = {reads, writes};
    return move(bench, both, 2);
}

/* Space that was only promised reads as zeros without a disk: every block becomes a written one. */
static void fill(struct bench *bench)
{
    for (uint32_t slot = 0; slot < 2; slot++) {
        struct cursor all = {LH_IO_KIND_WRITE, slot, 0, lh_store_extent(bench->store, 0).bytes};
        move(bench, &all, 1);
    }
}

static void bench_init(struct bench *bench)
{
    bench->clock = lh_clock_real();
    if (lh_waker_init(&bench->waker, NULL) != 0)
        fail("eventfd", strerror(errno));
    bool is_new = !bench->options.keep || !store_open(bench);
    if (is_new)
        store_create(bench);
    arena_create(bench);
    io_create(bench);
    if (is_new)
        fill(bench);
}

static void bench_deinit(struct bench *bench)
{
    bench->io->ops->destroy(bench->io);
    lh_arena_destroy(bench->arena, &bench->alloc);
    lh_store_close(bench->store);
    lh_waker_deinit(&bench->waker);
}

static uint64_t slot_offset(struct bench *bench, uint32_t slot)
{
    struct lh_store_piece piece;

    if (lh_store_map(bench->store, 0, slot, 0, LH_BLOCK_BYTES, &piece, 1) != 1)
        fail("map", "a block has several pieces");
    return piece.file_offset;
}

static void serve(struct bench *bench)
{
    static const char *const pages[] = {"small", "transparent", "reserved"};
    uint32_t read_slot = lh_store_read_slot(bench->store, 0);
    char line[64];

    printf("{\"file\": \"%s\", \"read_offset\": %" PRIu64 ", \"write_offset\": %" PRIu64
           ", \"bytes\": %" PRIu64 ", \"backend\": \"%s\", \"pages\": \"%s\"}\n",
           lh_store_file_path(bench->store, 0), slot_offset(bench, read_slot),
           slot_offset(bench, 1 - read_slot), bench->options.pass_bytes, bench->io->ops->name,
           pages[bench->arena->pages]);
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin)) {
        line[strcspn(line, "\n")] = '\0';
        for (int mode = 0; mode < MODE_COUNT; mode++)
            if (strcmp(line, mode_names[mode]) == 0)
                printf("%.9f\n", pass(bench, (enum mode)mode));
        fflush(stdout);
    }
}

/* Modes take turns, so that a drift of the disk meets all of them. */
static void run(struct bench *bench)
{
    static double speeds[MODE_COUNT][REPETITION_COUNT_MAX];
    const struct options *options = &bench->options;
    int count = options->repetition_count;

    for (int r = 0; r < count; r++)
        for (int mode = 0; mode < MODE_COUNT; mode++)
            if (!options->mode || strcmp(options->mode, mode_names[mode]) == 0)
                speeds[mode][r] = (double)options->pass_bytes * 1e-9 / pass(bench, (enum mode)mode);
    for (int mode = 0; mode < MODE_COUNT; mode++) {
        double *sorted = speeds[mode];
        if (sorted[0] == 0)
            continue;
        measure_sort(sorted, count);
        printf("{\"name\": \"store_io/%s/%s\", \"value\": %.4g, \"unit\": \"GB/s\", \"peer\": "
               "null, \"peer_value\": null, \"ratio\": null, \"n\": %d, \"min\": %.4g, "
               "\"median\": %.4g, \"max\": %.4g}\n",
               bench->io->ops->name, mode_names[mode], sorted[count / 2], count, sorted[0],
               sorted[count / 2], sorted[count - 1]);
    }
}

static _Noreturn void usage(void)
{
    fprintf(stderr,
            "bench_store_io [-m read|write|mixed|all] [-b MiB] [-r repetitions, 1 to %d]\n"
            "               [-q depth, 1 to %d] [-t KiB, times 4] [-a MiB] [-i backend] "
            "[-k] [-s] [directory]\n",
            REPETITION_COUNT_MAX, DEPTH_MAX);
    exit(1);
}

static bool is_mode(const char *word)
{
    for (int mode = 0; mode < MODE_COUNT; mode++)
        if (strcmp(word, mode_names[mode]) == 0)
            return true;
    return false;
}

static void options_read(struct options *options, int argc, char **argv)
{
    int letter = 0;

    while ((letter = getopt(argc, argv, "m:b:r:q:t:a:i:ks")) >= 0) {
        if (letter == 'm')
            options->mode = strcmp(optarg, "all") == 0 ? NULL : optarg;
        else if (letter == 'b')
            options->pass_bytes = strtoull(optarg, NULL, 10) * LH_MIB;
        else if (letter == 'r')
            options->repetition_count = (int)strtol(optarg, NULL, 10);
        else if (letter == 'q')
            options->depth = (uint32_t)strtoul(optarg, NULL, 10);
        else if (letter == 't')
            options->request_bytes = strtoull(optarg, NULL, 10) * LH_KIB;
        else if (letter == 'a')
            options->arena_bytes = strtoull(optarg, NULL, 10) * LH_MIB;
        else if (letter == 'i')
            options->backend = optarg;
        else if (letter == 'k')
            options->keep = true;
        else if (letter == 's')
            options->serve = true;
        else
            usage();
    }
    if (optind < argc)
        options->directory = argv[optind];
    if (options->pass_bytes == 0 || options->request_bytes == 0 ||
        options->request_bytes % LH_BLOCK_BYTES != 0 || options->depth < 1 ||
        options->depth > DEPTH_MAX || options->repetition_count < 1 ||
        options->repetition_count > REPETITION_COUNT_MAX ||
        (options->mode && !is_mode(options->mode)))
        usage();
    options->arena_bytes =
        lh_max_u64(options->arena_bytes, options->depth * options->request_bytes);
}

int main(int argc, char **argv)
{
    static struct bench bench = {
        .alloc = LH_ALLOC_INIT,
        .options = {.directory = ".",
                    .pass_bytes = LH_GIB,
                    .request_bytes = 4 * LH_MIB,
                    .depth = 16,
                    .repetition_count = 5},
    };

    options_read(&bench.options, argc, argv);
    bench_init(&bench);
    if (bench.options.serve)
        serve(&bench);
    else
        run(&bench);
    bench_deinit(&bench);
    return 0;
}
