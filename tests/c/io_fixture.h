/*
 * Shared by the tests of csrc/io: a file on a real disk, a buffer, a waker, and the owner's loop.
 */
#ifndef IO_FIXTURE_H
#define IO_FIXTURE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "io/io.h"
#include "io/io_private.h"
#include "lh_test.h"

#define FIXTURE_TIMEOUT_NS UINT64_C(20000000000)

struct fixture {
    struct lh_alloc alloc;
    struct lh_clock clock;
    struct lh_waker waker;
    struct lh_io_file file;
    struct lh_io_buffer buffer;
    /* the options of the backend; a test may change them before it creates one */
    struct lh_io_opts opts;
    struct lh_io *io;
};

__attribute__((unused)) static const char *fixture_directory(void)
{
    const char *directory = getenv("TMPDIR");
    return directory ? directory : ".";
}

/* Create an unnamed file. Ends the program as skipped if O_DIRECT is not supported. */
__attribute__((unused)) static int fixture_file(bool direct)
{
    char path[4096];
    snprintf(path, sizeof(path), "%s/lohan-test-io-%ld", fixture_directory(), (long)getpid());
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC | (direct ? O_DIRECT : 0), 0600);
    int code = fd < 0 ? errno : 0;
    unlink(path);
    if (code == EINVAL && direct)
        LH_TEST_SKIP("%s refuses O_DIRECT", fixture_directory());
    LH_CHECK(fd >= 0);
    return fd;
}

__attribute__((unused)) static void *fixture_memory(uint64_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    LH_CHECK(memory != MAP_FAILED);
    return memory;
}

__attribute__((unused)) static void fixture_init(struct fixture *fixture, bool direct,
                                                 uint64_t buffer_bytes, uint32_t queue_depth_max)
{
    *fixture = (struct fixture){
        .alloc = LH_ALLOC_INIT,
        .clock = lh_clock_real(),
        .file = {.fd = fixture_file(direct), .direct = direct},
        .buffer = {.base = fixture_memory(buffer_bytes), .bytes = buffer_bytes},
    };
    fixture->opts = (struct lh_io_opts){
        .files = &fixture->file,
        .file_count = 1,
        .buffers = &fixture->buffer,
        .buffer_count = 1,
        .queue_depth_max = queue_depth_max,
        .waker = &fixture->waker,
        .clock = &fixture->clock,
    };
    LH_CHECK(lh_waker_init(&fixture->waker, NULL) == 0);
}

__attribute__((unused)) static void fixture_deinit(struct fixture *fixture)
{
    if (fixture->io)
        fixture->io->ops->destroy(fixture->io);
    LH_CHECK(fixture->alloc.live_count == 0);
    lh_waker_deinit(&fixture->waker);
    if (fixture->file.fd >= 0)
        LH_CHECK(close(fixture->file.fd) == 0);
    LH_CHECK(munmap(fixture->buffer.base, fixture->buffer.bytes) == 0);
}

/* "libaio+helper" is libaio as on kernels where it does not support syncs. */
__attribute__((unused)) static int fixture_create(struct fixture *fixture, const char *name,
                                                  struct lh_error *err)
{
#if defined(LH_HAVE_LIBAIO)
    if (strcmp(name, "libaio+helper") == 0)
        return lh_io_aio_create_sync(&fixture->opts, true, &fixture->alloc, &fixture->io, err);
#endif
    return lh_io_create(name, &fixture->opts, &fixture->alloc, &fixture->io, err);
}

/*
 * Poll, sleeping on the waker, until at least one request has completed; return the count. Nothing
 * else wakes the owner, so a lost wake-up ends the test.
 */
__attribute__((unused)) static uint32_t fixture_wait(struct fixture *fixture,
                                                     struct lh_io_request **done, uint32_t done_max)
{
    uint64_t begin_ns = lh_clock_now_ns(&fixture->clock);
    for (;;) {
        lh_waker_prepare(&fixture->waker);
        uint32_t count = fixture->io->ops->poll(fixture->io, done, done_max);
        if (count > 0) {
            lh_waker_cancel(&fixture->waker);
            return count;
        }
        lh_waker_wait(&fixture->waker, (int)(FIXTURE_TIMEOUT_NS / 1000000));
        LH_CHECK(lh_clock_now_ns(&fixture->clock) - begin_ns < FIXTURE_TIMEOUT_NS);
    }
}

__attribute__((unused)) static int fixture_submit(struct fixture *fixture,
                                                  struct lh_io_request *request)
{
    int rc = fixture->io->ops->submit(fixture->io, request);
    if (rc == 0 && fixture->io->ops->flush)
        fixture->io->ops->flush(fixture->io);
    return rc;
}

/* Run one request, and return its result. */
__attribute__((unused)) static int64_t fixture_run(struct fixture *fixture,
                                                   struct lh_io_request request)
{
    struct lh_io_request *done = NULL;
    LH_CHECK(fixture_submit(fixture, &request) == 0);
    LH_CHECK(fixture_wait(fixture, &done, 1) == 1 && done == &request);
    LH_CHECK(request.completed_ns >= request.submitted_ns && request.submitted_ns > 0);
    return request.result;
}

__attribute__((unused)) static void fixture_fill(void *memory, uint64_t bytes, uint64_t *seed)
{
    for (uint64_t i = 0; i < bytes; i += 8) {
        uint64_t word = lh_test_random(seed);
        memcpy((uint8_t *)memory + i, &word, lh_min_u64(8, bytes - i));
    }
}

/* Run action in a child; whether it returned true there (a failed LH_CHECK ends it as well). */
__attribute__((unused)) static bool fixture_in_child(bool (*action)(void))
{
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        bool passed = action();
        fflush(NULL);
        _exit(passed ? 0 : 1);
    }
    LH_CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

#endif
