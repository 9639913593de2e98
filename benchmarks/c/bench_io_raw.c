/*
 * Compare the I/O backends with the disk: sequential direct writes and reads of 4 MiB, 8 in flight,
 * on one file, from registered huge pages. The owner sleeps until completions, as the engine does.
 * Backends take turns, so that a drift of the disk affects all of them.
 *
 *      bench_io_raw [directory = .] [repetitions = 5] [file_mib = 1024]
 *
 * Each result is a JSON line; value, min, median and max are GB/s (10^9 bytes). Compare with:
 *
 *      fio --name=x --filename=F --size=1g --rw=read --ioengine=io_uring --direct=1 --bs=4m
 *          --iodepth=8 --mem=shmhuge
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "io/io.h"
#include "measure.h"

#define DEPTH 8
#define REQUEST_BYTES (4 * LH_MIB)
#define REPETITION_COUNT_MAX 101
#define BACKEND_COUNT_MAX 4

struct bench {
    struct lh_alloc alloc;
    struct lh_clock clock;
    struct lh_waker waker;
    struct lh_io_file file;
    struct lh_io_buffer buffer;
    uint64_t file_bytes;
    int repetition_count;
};

static _Noreturn void fail(const char *what, const char *why)
{
    fprintf(stderr, "bench_io_raw: %s: %s\n", what, why);
    exit(1);
}

static void bench_init(struct bench *bench, const char *directory)
{
    char path[4096];
    uint64_t bytes = DEPTH * REQUEST_BYTES;

    snprintf(path, sizeof(path), "%s/bench-io-raw-%ld", directory, (long)getpid());
    bench->file.fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_DIRECT, 0600);
    bench->file.direct = true;
    if (bench->file.fd < 0)
        fail(path, strerror(errno));
    unlink(path);
    if (posix_fallocate(bench->file.fd, 0, (off_t)bench->file_bytes) != 0)
        fail(path, "no space");
    uint8_t *memory = mmap(NULL, bytes + LH_HUGE_PAGE_BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        fail("mmap", strerror(errno));
    bench->buffer.base = (uint8_t *)lh_align_up((uintptr_t)memory, LH_HUGE_PAGE_BYTES);
    bench->buffer.bytes = bytes;
    madvise(bench->buffer.base, bytes, MADV_HUGEPAGE);
    memset(bench->buffer.base, 0x5A, bytes);
    bench->clock = lh_clock_real();
    if (lh_waker_init(&bench->waker, NULL) != 0)
        fail("eventfd", strerror(errno));
}

static struct lh_io *backend_create(struct bench *bench, const char *name)
{
    struct lh_error err = {0};
    struct lh_io *io = NULL;
    struct lh_io_opts opts = {
        .files = &bench->file,
        .file_count = 1,
        .buffers = &bench->buffer,
        .buffer_count = 1,
        .queue_depth_max = DEPTH,
        .waker = &bench->waker,
        .clock = &bench->clock,
    };

    if (lh_io_create(name, &opts, &bench->alloc, &io, &err) < 0)
        fprintf(stderr, "%s is left out: %s\n", name, err.message);
    else if (io->note[0])
        fprintf(stderr, "%s: %s\n", name, io->note);
    return io;
}

/* The whole file once; GB/s. */
static double pass(struct bench *bench, struct lh_io *io, enum lh_io_kind kind)
{
    struct lh_io_request requests[DEPTH];
    struct lh_io_request *done[DEPTH];
    uint64_t begin_ns = lh_clock_now_ns(&bench->clock);
    uint64_t issued_bytes = 0, done_bytes = 0;
    uint32_t done_count = 0;

    for (uint32_t i = 0; i < DEPTH; i++) {
        requests[i] = (struct lh_io_request){
            .kind = kind,
            .buffer = (uint8_t *)bench->buffer.base + i * REQUEST_BYTES,
            .bytes = REQUEST_BYTES,
        };
        done[done_count++] = &requests[i];
    }
    while (done_bytes < bench->file_bytes) {
        for (uint32_t i = 0; i < done_count && issued_bytes < bench->file_bytes; i++) {
            done[i]->offset = issued_bytes;
            issued_bytes += REQUEST_BYTES;
            if (io->ops->submit(io, done[i]) != 0)
                fail(io->ops->name, "a queue of this depth is full");
        }
        if (io->ops->flush)
            io->ops->flush(io);
        lh_waker_prepare(&bench->waker);
        done_count = io->ops->poll(io, done, DEPTH);
        if (done_count == 0)
            lh_waker_wait(&bench->waker, -1);
        else
            lh_waker_cancel(&bench->waker);
        for (uint32_t i = 0; i < done_count; i++) {
            if (done[i]->result != 0)
                fail(io->ops->name, strerror((int)-done[i]->result));
            done_bytes += REQUEST_BYTES;
        }
    }
    return (double)bench->file_bytes / (double)(lh_clock_now_ns(&bench->clock) - begin_ns);
}

static void report(const char *name, enum lh_io_kind kind, double *speeds, int count)
{
    measure_sort(speeds, count);
    printf("{\"name\": \"io_raw/%s/%s\", \"value\": %.4g, \"unit\": \"GB/s\", \"peer\": null, "
           "\"peer_value\": null, \"ratio\": null, \"n\": %d, \"min\": %.4g, \"median\": %.4g, "
           "\"max\": %.4g}\n",
           name, kind == LH_IO_KIND_READ ? "read" : "write", speeds[count / 2], count, speeds[0],
           speeds[count / 2], speeds[count - 1]);
}

int main(int argc, char **argv)
{
    static double speeds[BACKEND_COUNT_MAX][2][REPETITION_COUNT_MAX];
    struct lh_io *backends[BACKEND_COUNT_MAX] = {NULL};
    struct bench bench = {
        .alloc = LH_ALLOC_INIT,
        .repetition_count = argc > 2 ? atoi(argv[2]) : 5,
        .file_bytes = (argc > 3 ? strtoull(argv[3], NULL, 10) : 1024) * LH_MIB,
    };
    int count = 0;

    if (bench.file_bytes == 0 || bench.file_bytes % REQUEST_BYTES != 0 ||
        bench.repetition_count < 1 || bench.repetition_count > REPETITION_COUNT_MAX) {
        fprintf(stderr, "bench_io_raw [directory] [repetitions, 1 to %d] [file_mib, times 4]\n",
                REPETITION_COUNT_MAX);
        return 1;
    }
    bench_init(&bench, argc > 1 ? argv[1] : ".");
    for (const char *const *name = lh_io_names(); *name && count < BACKEND_COUNT_MAX; name++) {
        backends[count] = backend_create(&bench, *name);
        count += backends[count] != NULL;
    }
    pass(&bench, backends[0], LH_IO_KIND_WRITE); /* allocated blocks become written ones */
    for (int r = 0; r < bench.repetition_count; r++)
        for (int kind = 0; kind < 2; kind++)
            for (int b = 0; b < count; b++)
                speeds[b][kind][r] = pass(&bench, backends[b], (enum lh_io_kind)kind);
    for (int b = 0; b < count; b++) {
        report(backends[b]->ops->name, LH_IO_KIND_READ, speeds[b][0], bench.repetition_count);
        report(backends[b]->ops->name, LH_IO_KIND_WRITE, speeds[b][1], bench.repetition_count);
        backends[b]->ops->destroy(backends[b]);
    }
    close(bench.file.fd);
    lh_waker_deinit(&bench.waker);
    return 0;
}
