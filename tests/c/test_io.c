/* Test that every backend fulfills the contract of csrc/io/io.h. */
#include "io_fixture.h"

#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#define LANE_COUNT 16
#define LANE_BYTES (UINT64_C(256) << 10)
#define DATA_BYTES (LANE_COUNT * LANE_BYTES)

/* A lane is a part of the file and of the buffer with one request in flight at a time. */
struct lane {
    struct lh_io_request request;
    bool has_written;
};

static void lane_start(struct fixture *fixture, struct lane *lanes, uint8_t *shadow, uint64_t index,
                       uint64_t *seed)
{
    struct lane *lane = &lanes[index];
    uint64_t unit = fixture->file.direct ? LH_BLOCK_BYTES : 1;
    uint64_t begin = lh_test_random(seed) % (LANE_BYTES / unit) * unit;
    uint64_t bytes = (lh_test_random(seed) % ((LANE_BYTES - begin) / unit) + 1) * unit;
    bool is_write = !lane->has_written || lh_test_random(seed) % 2 == 0;
    if (!lane->has_written) {
        begin = 0;
        bytes = LANE_BYTES;
    }
    /* Return unrelated addresses in the file and in memory, both in the lane. */
    uint64_t place = lh_test_random(seed) % ((LANE_BYTES - bytes) / unit + 1) * unit;
    uint8_t *buffer = (uint8_t *)fixture->buffer.base + index * LANE_BYTES + place;
    if (is_write) {
        fixture_fill(buffer, bytes, seed);
        memcpy(shadow + index * LANE_BYTES + begin, buffer, bytes);
        lane->has_written = true;
    } else {
        memset(buffer, 0xA5, bytes);
    }
    lane->request = (struct lh_io_request){
        .kind = is_write ? LH_IO_KIND_WRITE : LH_IO_KIND_READ,
        .buffer = buffer,
        .bytes = bytes,
        .offset = index * LANE_BYTES + begin,
        .owner = lane,
    };
    LH_CHECK(fixture->io->ops->submit(fixture->io, &lane->request) == 0);
}

static void read_after_write(struct fixture *fixture, uint64_t request_count, uint64_t seed)
{
    static struct lane lanes[LANE_COUNT];
    static uint8_t shadow[DATA_BYTES];
    struct lh_io_request *done[LANE_COUNT];
    uint64_t started = LANE_COUNT;
    memset(lanes, 0, sizeof(lanes));
    for (uint64_t i = 0; i < LANE_COUNT; i++)
        lane_start(fixture, lanes, shadow, i, &seed);
    while (fixture->io->in_flight_count > 0) {
        if (fixture->io->ops->flush)
            fixture->io->ops->flush(fixture->io);
        uint32_t count = fixture_wait(fixture, done, LANE_COUNT);
        for (uint32_t i = 0; i < count; i++) {
            struct lane *lane = done[i]->owner;
            LH_CHECK(done[i] == &lane->request && done[i]->result == 0);
            if (done[i]->kind == LH_IO_KIND_READ)
                LH_CHECK(memcmp(done[i]->buffer, shadow + done[i]->offset, done[i]->bytes) == 0);
            if (started++ < request_count)
                lane_start(fixture, lanes, shadow, (uint64_t)(lane - lanes), &seed);
        }
    }
    LH_CHECK(fixture_run(fixture, (struct lh_io_request){.kind = LH_IO_KIND_SYNC}) == 0);
    /* Read the file through another file descriptor. */
    static uint8_t page_cache[DATA_BYTES];
    char path[64];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fixture->file.fd);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    LH_CHECK(fd >= 0 && pread(fd, page_cache, DATA_BYTES, 0) == (ssize_t)DATA_BYTES);
    LH_CHECK(memcmp(page_cache, shadow, DATA_BYTES) == 0);
    close(fd);
}

static void test_read_after_write(const char *name)
{
    uint64_t count = lh_test_is_fast() ? 300 : 2000;
    for (int variant = 0; variant < 4; variant++) {
        struct fixture fixture;
        bool direct = variant % 2 == 0;
        bool is_cut = variant >= 2;
        lh_test_name("%s: %s reads return what was written%s", name, direct ? "direct" : "buffered",
                     is_cut ? ", through short transfers" : "");
        fixture_init(&fixture, direct, DATA_BYTES, LANE_COUNT);
        LH_CHECK(fixture_create(&fixture, name, NULL) == 0);
        if (is_cut)
            ((struct lh_io_base *)fixture.io)->piece_bytes_max = direct ? 12288 : 10007;
        read_after_write(&fixture, is_cut ? count / 4 : count, 42 + (uint64_t)variant);
        fixture_deinit(&fixture);
    }
}

static void test_end_of_file(const char *name)
{
    for (int direct = 0; direct < 2; direct++) {
        struct fixture fixture;
        lh_test_name("%s: a %s read that meets the end of the file is ENODATA", name,
                     direct ? "direct" : "buffered");
        fixture_init(&fixture, direct, LH_MIB, 4);
        LH_CHECK(fixture_create(&fixture, name, NULL) == 0);
        struct lh_io_request read = {.buffer = fixture.buffer.base, .bytes = 65536};
        LH_CHECK(fixture_run(&fixture, read) == -ENODATA); /* the file is empty */
        LH_CHECK(ftruncate(fixture.file.fd, 65536) == 0);
        LH_CHECK(fixture_run(&fixture, read) == 0);
        read.offset = 4096; /* the file lacks its last block */
        LH_CHECK(fixture_run(&fixture, read) == -ENODATA);
        read.offset = 65536;
        LH_CHECK(fixture_run(&fixture, read) == -ENODATA);
        LH_CHECK(ftruncate(fixture.file.fd, 65536 + 100) == 0);
        read.offset = 4096; /* the file ends inside a block */
        LH_CHECK(fixture_run(&fixture, read) == -ENODATA);
        read.offset = 65536;
        read.bytes = 4096;
        LH_CHECK(fixture_run(&fixture, read) == -ENODATA);
        fixture_deinit(&fixture);
    }
}

static void test_least_bytes(const char *name)
{
    for (int direct = 0; direct < 2; direct++) {
        struct fixture fixture;
        lh_test_name("%s: a %s read is whole once its least bytes are here", name,
                     direct ? "direct" : "buffered");
        fixture_init(&fixture, direct, LH_MIB, 4);
        LH_CHECK(fixture_create(&fixture, name, NULL) == 0);
        uint64_t seed = 3;
        uint8_t *memory = fixture.buffer.base;
        fixture_fill(memory, 65536, &seed);
        struct lh_io_request write = {
            .kind = LH_IO_KIND_WRITE, .buffer = memory, .bytes = 65536, .offset = 0};
        LH_CHECK(fixture_run(&fixture, write) == 0);
        LH_CHECK(ftruncate(fixture.file.fd, 61440 + 100) == 0);
        uint8_t *got = memory + 65536;
        struct lh_io_request read = {
            .buffer = got, .bytes = 65536 - 4096, .offset = 4096, .least_bytes = 57344 + 100};
        for (uint64_t piece_bytes = LH_GIB; piece_bytes >= 8192; piece_bytes /= 512) {
            ((struct lh_io_base *)fixture.io)->piece_bytes_max = piece_bytes;
            memset(got, 0xA5, 65536);
            LH_CHECK(fixture_run(&fixture, read) == 0);
            LH_CHECK(memcmp(got, memory + 4096, 57344 + 100) == 0);
        }
        read.least_bytes++; /* one byte more than the file has */
        LH_CHECK(fixture_run(&fixture, read) == -ENODATA);
        fixture_deinit(&fixture);
    }
}

static void test_bad_files(const char *name)
{
    static const enum lh_io_kind kinds[] = {LH_IO_KIND_READ, LH_IO_KIND_WRITE, LH_IO_KIND_SYNC};
    struct fixture fixture;
    lh_test_name("%s: a file that is not open, or not for writing, is EBADF", name);
    fixture_init(&fixture, true, LH_MIB, 8);
    struct lh_io_file files[] = {fixture.file, {.fd = -1}, {.fd = open("/dev/zero", O_RDONLY)}};
    fixture.opts.files = files;
    fixture.opts.file_count = 3;
    LH_CHECK(fixture_create(&fixture, name, NULL) == 0);
    struct lh_io_request request = {.buffer = fixture.buffer.base, .bytes = 4096};
    for (size_t i = 0; i < LH_COUNT_OF(kinds); i++) {
        request.kind = kinds[i];
        request.file_index = 1;
        LH_CHECK(fixture_run(&fixture, request) == -EBADF);
    }
    request.kind = LH_IO_KIND_WRITE;
    request.file_index = 2;
    LH_CHECK(fixture_run(&fixture, request) == -EBADF);

    lh_test_name("%s: a bad request in a batch does not touch its neighbors", name);
    struct lh_io_request batch[8];
    struct lh_io_request *done[8];
    for (uint32_t i = 0; i < 8; i++) {
        batch[i] = request;
        batch[i].file_index = i % 2;
        batch[i].offset = i * LH_BLOCK_BYTES;
        LH_CHECK(fixture.io->ops->submit(fixture.io, &batch[i]) == 0);
    }
    if (fixture.io->ops->flush)
        fixture.io->ops->flush(fixture.io);
    for (uint32_t count = 0; count < 8;)
        count += fixture_wait(&fixture, done, 1);
    for (uint32_t i = 0; i < 8; i++)
        LH_CHECK(batch[i].result == (i % 2 == 0 ? 0 : -EBADF));
    close(files[2].fd);
    fixture_deinit(&fixture);
}

static void test_queue_full(const char *name)
{
    struct fixture fixture;
    struct lh_io_request requests[5];
    struct lh_io_request *done[5];
    lh_test_name("%s: one request too many is EAGAIN, and is not taken", name);
    fixture_init(&fixture, true, LH_MIB, 4);
    LH_CHECK(fixture_create(&fixture, name, NULL) == 0);
    for (uint64_t i = 0; i < 5; i++)
        requests[i] = (struct lh_io_request){
            .kind = i == 3 ? LH_IO_KIND_SYNC : LH_IO_KIND_WRITE,
            .buffer = fixture.buffer.base,
            .bytes = 65536,
            .offset = i * 65536,
        };
    for (int i = 0; i < 4; i++)
        LH_CHECK(fixture.io->ops->submit(fixture.io, &requests[i]) == 0);
    LH_CHECK(fixture.io->ops->submit(fixture.io, &requests[4]) == -EAGAIN);
    LH_CHECK(fixture.io->in_flight_count == 4);
    if (fixture.io->ops->flush)
        fixture.io->ops->flush(fixture.io);
    LH_CHECK(fixture_wait(&fixture, done, 1) == 1);
    LH_CHECK(fixture.io->in_flight_count == 3);
    LH_CHECK(fixture_submit(&fixture, &requests[4]) == 0);
    for (uint32_t count = 0; count < 4;)
        count += fixture_wait(&fixture, done, 5);
    for (int i = 0; i < 5; i++)
        LH_CHECK(requests[i].result == 0);
    LH_CHECK(fixture.io->in_flight_count == 0);
    LH_CHECK(fixture.io->ops->poll(fixture.io, done, 5) == 0);
    fixture_deinit(&fixture);
}

/* Run thousands of small requests, and sleep until each has completed. */
static void *wakeups_run(void *context)
{
    struct fixture *fixture = context;
    uint64_t count = lh_test_is_fast() ? 1000 : 5000;
    uint64_t seed = 7;
    for (uint64_t i = 0; i < count; i++) {
        struct lh_io_request request = {
            .kind = i % 50 == 49 ? LH_IO_KIND_SYNC : (enum lh_io_kind)(i % 2),
            .buffer = fixture->buffer.base,
            .bytes = LH_BLOCK_BYTES,
            .offset = lh_test_random(&seed) % 64 * LH_BLOCK_BYTES,
        };
        LH_CHECK(fixture_run(fixture, request) == 0);
    }
    return NULL;
}

static void test_wakeups(const char *name)
{
    for (int variant = 0; variant < 3; variant++) {
        struct fixture fixture;
        bool elsewhere = variant == 2;
        lh_test_name("%s: a sleeping owner sees each completion (%s%s)", name,
                     variant == 1 ? "buffered" : "direct", elsewhere ? ", on another thread" : "");
        fixture_init(&fixture, variant != 1, LH_MIB, 4);
        LH_CHECK(ftruncate(fixture.file.fd, LH_MIB) == 0);
        LH_CHECK(fixture_create(&fixture, name, NULL) == 0);
        if (elsewhere) {
            pthread_t thread;
            LH_CHECK(pthread_create(&thread, NULL, wakeups_run, &fixture) == 0);
            LH_CHECK(pthread_join(thread, NULL) == 0);
        } else {
            wakeups_run(&fixture);
        }
        fixture_deinit(&fixture);
    }
}

static void test_without_waker(const char *name)
{
    struct fixture fixture;
    struct lh_io_request *done = NULL;
    lh_test_name("%s: an owner that never sleeps needs no waker", name);
    fixture_init(&fixture, true, LH_MIB, 4);
    fixture.opts.waker = NULL;
    LH_CHECK(fixture_create(&fixture, name, NULL) == 0);
    struct lh_io_request write = {
        .kind = LH_IO_KIND_WRITE, .buffer = fixture.buffer.base, .bytes = LH_MIB};
    LH_CHECK(fixture_submit(&fixture, &write) == 0);
    while (fixture.io->ops->poll(fixture.io, &done, 1) == 0)
        continue;
    LH_CHECK(done == &write && write.result == 0);
    fixture_deinit(&fixture);
}

/* The kernel itself writes short: up to the limit, and an error for the rest. */
static void test_short_write(const char *name)
{
    struct fixture fixture;
    struct rlimit before;
    lh_test_name("%s: what follows a short write is not lost", name);
    fixture_init(&fixture, true, LH_MIB, 4);
    LH_CHECK(fixture_create(&fixture, name, NULL) == 0);
    signal(SIGXFSZ, SIG_IGN);
    LH_CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
    struct rlimit low = {.rlim_cur = 65536, .rlim_max = before.rlim_max};
    LH_CHECK(setrlimit(RLIMIT_FSIZE, &low) == 0);
    struct lh_io_request *done = NULL;
    struct lh_io_request write = {
        .kind = LH_IO_KIND_WRITE, .buffer = fixture.buffer.base, .bytes = 131072};
    LH_CHECK(fixture_submit(&fixture, &write) == 0);
    LH_CHECK(fixture_wait(&fixture, &done, 1) == 1);
    LH_CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    LH_CHECK(write.done_bytes == 65536 && write.result == -EFBIG);
    LH_CHECK(fixture_run(&fixture, write) == 0);
    fixture_deinit(&fixture);
}

static void submit_misaligned(void *context)
{
    struct fixture *fixture = context;
    struct lh_io_request request = {
        .kind = LH_IO_KIND_WRITE, .buffer = fixture->buffer.base, .bytes = 4096, .offset = 512};
    (void)fixture_submit(fixture, &request);
}

static void destroy_busy(void *context)
{
    struct fixture *fixture = context;
    struct lh_io_request request = {.kind = LH_IO_KIND_SYNC};
    (void)fixture_submit(fixture, &request);
    fixture->io->ops->destroy(fixture->io);
}

static void test_assertions(const char *name)
{
    struct fixture fixture;
    lh_test_name("%s: a misaligned direct request and a busy destroy are programmer's errors",
                 name);
    fixture_init(&fixture, true, LH_MIB, 4);
    LH_CHECK(fixture_create(&fixture, name, NULL) == 0);
    LH_CHECK(lh_test_aborts(submit_misaligned, &fixture));
    fixture_deinit(&fixture);
    fixture_init(&fixture, true, LH_MIB, 4);
    LH_CHECK(fixture_create(&fixture, name, NULL) == 0);
    LH_CHECK(lh_test_aborts(destroy_busy, &fixture));
    fixture_deinit(&fixture);
}

/* A region exceeds the 1 GiB of one registration; requests are beside the seam and across it. */
static void test_large_buffers(const char *name)
{
    struct fixture fixture;
    uint64_t seed = 5;
    lh_test_name("%s: a transfer across two registered pieces or regions is whole", name);
    fixture_init(&fixture, true, LH_GIB + 4 * LH_MIB, 4);
    uint8_t *base = fixture.buffer.base;
    madvise(base, fixture.buffer.bytes, MADV_HUGEPAGE);
    struct lh_io_buffer regions[] = {
        {.base = base, .bytes = LH_GIB + 2 * LH_MIB},
        /* the 1 MiB after it is not registered */
        {.base = base + LH_GIB + 2 * LH_MIB, .bytes = LH_MIB},
    };
    fixture.opts.buffers = regions;
    fixture.opts.buffer_count = 2;
    LH_CHECK(fixture_create(&fixture, name, NULL) == 0);
    if (fixture.io->note[0])
        printf("  %s\n", fixture.io->note);
    static const uint64_t places[] = {0,
                                      LH_GIB - LH_MIB,
                                      LH_GIB - LH_MIB / 2,
                                      LH_GIB,
                                      LH_GIB + 3 * LH_MIB / 2,
                                      LH_GIB + 2 * LH_MIB,
                                      LH_GIB + 5 * LH_MIB / 2,
                                      LH_GIB + 3 * LH_MIB};
    static uint8_t written[LH_MIB];
    for (size_t i = 0; i < LH_COUNT_OF(places); i++) {
        struct lh_io_request request = {
            .kind = LH_IO_KIND_WRITE, .buffer = base + places[i], .bytes = LH_MIB};
        fixture_fill(written, LH_MIB, &seed);
        memcpy(request.buffer, written, LH_MIB);
        LH_CHECK(fixture_run(&fixture, request) == 0);
        memset(request.buffer, 0, LH_MIB);
        request.kind = LH_IO_KIND_READ;
        LH_CHECK(fixture_run(&fixture, request) == 0);
        LH_CHECK(memcmp(request.buffer, written, LH_MIB) == 0);
    }
    fixture_deinit(&fixture);
}

static void test_no_space(const char *name)
{
    struct fixture fixture;
    lh_test_name("%s: a write that finds no space says so", name);
    fixture_init(&fixture, false, LH_MIB, 4);
    LH_CHECK(close(fixture.file.fd) == 0);
    fixture.file.fd = open("/dev/full", O_RDWR | O_CLOEXEC);
    LH_CHECK(fixture.file.fd >= 0 && fixture_create(&fixture, name, NULL) == 0);
    LH_CHECK(fixture_run(&fixture, (struct lh_io_request){.kind = LH_IO_KIND_WRITE,
                                                          .buffer = fixture.buffer.base,
                                                          .bytes = 65536}) == -ENOSPC);
    fixture_deinit(&fixture);
}

static void test_sync_is_final(void)
{
    static const int codes[] = {-EINTR, -EAGAIN, -EIO, -ENOSPC};
    struct fixture fixture;
    lh_test_name("a sync that was interrupted is not tried again; one that never began is");
    fixture_init(&fixture, false, LH_MIB, 4);
    LH_CHECK(fixture_create(&fixture, "threads", NULL) == 0);
    const struct lh_io_base *base = (const struct lh_io_base *)fixture.io;
    for (size_t i = 0; i < LH_COUNT_OF(codes); i++) {
        struct lh_io_request sync = {.kind = LH_IO_KIND_SYNC};
        LH_CHECK(lh_io_request_advance(base, &sync, codes[i]) && sync.result == codes[i]);
        struct lh_io_request write = {.kind = LH_IO_KIND_WRITE, .bytes = 1};
        bool is_final = codes[i] == -EIO || codes[i] == -ENOSPC;
        LH_CHECK(lh_io_request_advance(base, &write, codes[i]) == is_final);
        LH_CHECK(!is_final || write.result == codes[i]);
        sync = (struct lh_io_request){.kind = LH_IO_KIND_SYNC};
        LH_CHECK(lh_io_request_refuse(base, &sync, codes[i]) == is_final);
    }
    fixture_deinit(&fixture);
}

int main(void)
{
    const char *names[8] = {NULL};
    uint32_t name_count = 0;
    for (const char *const *name = lh_io_names(); *name; name++) {
        struct lh_alloc alloc = LH_ALLOC_INIT;
        struct lh_error err = {0};
        /* this skips the test if the file system does not support direct I/O */
        close(fixture_file(true));
        int rc = lh_io_probe(*name, fixture_directory(), true, &alloc, &err);
        /* Only what the machine forbids is left out: a container's filter, a sysctl. */
        LH_CHECK(rc == 0 || rc == -EPERM || rc == -ENOSYS || rc == -EACCES);
        if (rc == 0)
            names[name_count++] = *name;
        else
            printf("%s is not tested: %s\n", *name, err.message);
        if (rc == 0 && strcmp(*name, "libaio") == 0)
            names[name_count++] = "libaio+helper";
    }
    test_sync_is_final();
    for (uint32_t i = 0; i < name_count; i++) {
        test_read_after_write(names[i]);
        test_end_of_file(names[i]);
        test_least_bytes(names[i]);
        test_bad_files(names[i]);
        test_queue_full(names[i]);
        test_wakeups(names[i]);
        test_without_waker(names[i]);
        test_short_write(names[i]);
        test_assertions(names[i]);
        if (strncmp(names[i], "libaio", 6) != 0) /* libaio supports no character device */
            test_no_space(names[i]);
        if (strcmp(names[i], "io_uring") == 0 && !lh_test_is_fast())
            test_large_buffers(names[i]);
    }
    return 0;
}
