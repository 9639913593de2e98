/* Test that the faulty backend fails the requests it is told to fail, once, and no others. */
#include "io_fixture.h"

#include "io_faulty.h"

#define REQUEST_COUNT 6
#define PART_BYTES (UINT64_C(64) << 10)

static void wrap(struct fixture *fixture, const char *name)
{
    fixture_init(fixture, true, 2 * REQUEST_COUNT * PART_BYTES, REQUEST_COUNT);
    LH_CHECK(fixture_create(fixture, name, NULL) == 0);
    struct lh_io_faulty_opts opts = {
        .inner = fixture->io, .waker = &fixture->waker, .clock = &fixture->clock};
    LH_CHECK(lh_io_faulty_create(&opts, &fixture->alloc, &fixture->io, NULL) == 0);
}

/* Run all parts in one batch; *code_out is the sum of the results of those that failed. */
static uint32_t batch_run(struct fixture *fixture, enum lh_io_kind kind, uint8_t *buffer,
                          int64_t *code_out)
{
    struct lh_io_request requests[REQUEST_COUNT];
    uint32_t failed_count = 0;
    *code_out = 0;
    for (uint64_t i = 0; i < REQUEST_COUNT; i++) {
        requests[i] = (struct lh_io_request){
            .kind = kind,
            .buffer = buffer + i * PART_BYTES,
            .bytes = PART_BYTES,
            .offset = i * PART_BYTES,
        };
        LH_CHECK(fixture->io->ops->submit(fixture->io, &requests[i]) == 0);
    }
    fixture->io->ops->flush(fixture->io);
    /* One request at a time: what a poll does not return must not be missed by a sleep. */
    for (uint32_t i = 0; i < REQUEST_COUNT; i++) {
        struct lh_io_request *done = NULL;
        LH_CHECK(fixture_wait(fixture, &done, 1) == 1);
        uint64_t index = (uint64_t)(done - requests);
        LH_CHECK(index < REQUEST_COUNT && done->bytes == PART_BYTES);
        LH_CHECK(done->offset == index * PART_BYTES);
        LH_CHECK(done->buffer == buffer + index * PART_BYTES);
        failed_count += done->result != 0;
        *code_out += done->result;
    }
    LH_CHECK(fixture->io->in_flight_count == 0);
    return failed_count;
}

static void test_error(const char *name)
{
    struct fixture fixture;
    int64_t code = 0;
    lh_test_name("%s: the N-th request fails as told, and the last N is beyond them all", name);
    wrap(&fixture, name);
    for (uint64_t after = 0; after <= REQUEST_COUNT; after++) {
        lh_io_faulty_arm(
            fixture.io,
            (struct lh_io_fault){.kind = LH_IO_FAULT_KIND_ERROR, .after = after, .code = -ENOSPC});
        uint32_t failed_count = batch_run(&fixture, LH_IO_KIND_WRITE, fixture.buffer.base, &code);
        bool has_fired = lh_io_faulty_has_fired(fixture.io);
        LH_CHECK(has_fired == (after < REQUEST_COUNT));
        LH_CHECK(failed_count == (has_fired ? 1 : 0) && code == (has_fired ? -ENOSPC : 0));
    }
    lh_test_name("%s: a fault on syncs lets writes pass", name);
    lh_io_faulty_arm(fixture.io,
                     (struct lh_io_fault){.kind = LH_IO_FAULT_KIND_ERROR,
                                          .request_kinds = LH_IO_FAULT_ON(LH_IO_KIND_SYNC),
                                          .code = -EIO});
    LH_CHECK(batch_run(&fixture, LH_IO_KIND_WRITE, fixture.buffer.base, &code) == 0);
    struct lh_io_request sync = {.kind = LH_IO_KIND_SYNC};
    LH_CHECK(fixture_run(&fixture, sync) == -EIO);
    LH_CHECK(fixture_run(&fixture, sync) == 0);
    fixture_deinit(&fixture);
}

static void test_short(const char *name)
{
    struct fixture fixture;
    int64_t code = 0;
    lh_test_name("%s: a transfer that was cut short is whole in the end", name);
    wrap(&fixture, name);
    uint64_t half_bytes = fixture.buffer.bytes / 2;
    uint8_t *written = fixture.buffer.base;
    for (uint64_t after = 0; after <= 2 * REQUEST_COUNT; after++) {
        struct lh_io_fault fault = {
            .kind = LH_IO_FAULT_KIND_SHORT, .after = after, .bytes = 3 * LH_BLOCK_BYTES};
        uint64_t seed = after;
        fixture_fill(written, half_bytes, &seed);
        memset(written + half_bytes, 0, half_bytes);
        lh_io_faulty_arm(fixture.io, fault);
        LH_CHECK(batch_run(&fixture, LH_IO_KIND_WRITE, written, &code) == 0);
        LH_CHECK(batch_run(&fixture, LH_IO_KIND_READ, written + half_bytes, &code) == 0);
        LH_CHECK(memcmp(written, written + half_bytes, half_bytes) == 0);
        LH_CHECK(lh_io_faulty_has_fired(fixture.io) == (after < 2 * REQUEST_COUNT));
    }
    fixture_deinit(&fixture);
}

static void test_short_at_the_end(const char *name)
{
    struct fixture fixture;
    lh_test_name("%s: a read that was cut short ends where its file does", name);
    wrap(&fixture, name);
    uint8_t *memory = fixture.buffer.base;
    uint64_t seed = 9;
    fixture_fill(memory, 65536, &seed);
    struct lh_io_request write = {.kind = LH_IO_KIND_WRITE, .buffer = memory, .bytes = 65536};
    LH_CHECK(fixture_run(&fixture, write) == 0);
    LH_CHECK(ftruncate(fixture.file.fd, 61440 + 100) == 0);
    uint8_t *got = memory + fixture.buffer.bytes / 2;
    struct lh_io_request read = {.buffer = got, .bytes = 65536, .least_bytes = 61440 + 100};
    for (uint64_t bytes = LH_BLOCK_BYTES; bytes < 65536; bytes += LH_BLOCK_BYTES) {
        lh_io_faulty_arm(fixture.io,
                         (struct lh_io_fault){.kind = LH_IO_FAULT_KIND_SHORT, .bytes = bytes});
        memset(got, 0xA5, 65536);
        LH_CHECK(fixture_run(&fixture, read) == 0);
        LH_CHECK(lh_io_faulty_has_fired(fixture.io));
        LH_CHECK(memcmp(memory, got, 61440 + 100) == 0);
    }
    fixture_deinit(&fixture);
}

static void test_flip(const char *name)
{
    struct fixture fixture;
    int64_t code = 0;
    uint64_t seed = 11;
    lh_test_name("%s: the N-th read has one wrong bit, and the file is right", name);
    wrap(&fixture, name);
    uint64_t half_bytes = fixture.buffer.bytes / 2;
    uint8_t *written = fixture.buffer.base;
    uint8_t *got = written + half_bytes;
    fixture_fill(written, half_bytes, &seed);
    LH_CHECK(batch_run(&fixture, LH_IO_KIND_WRITE, written, &code) == 0);
    for (uint64_t after = 0; after < REQUEST_COUNT; after++) {
        uint64_t bit = 77777 + after;
        lh_io_faulty_arm(
            fixture.io,
            (struct lh_io_fault){.kind = LH_IO_FAULT_KIND_FLIP, .after = after, .bit = bit});
        LH_CHECK(batch_run(&fixture, LH_IO_KIND_READ, got, &code) == 0);
        LH_CHECK(lh_io_faulty_has_fired(fixture.io));
        LH_CHECK(memcmp(written, got, half_bytes) != 0);
        got[after * PART_BYTES + bit / 8] ^= (uint8_t)(1U << bit % 8);
        LH_CHECK(memcmp(written, got, half_bytes) == 0);
        LH_CHECK(batch_run(&fixture, LH_IO_KIND_READ, got, &code) == 0);
        LH_CHECK(memcmp(written, got, half_bytes) == 0);
    }
    fixture_deinit(&fixture);
}

static void test_hold(const char *name)
{
    struct fixture fixture;
    struct lh_io_request requests[REQUEST_COUNT];
    struct lh_io_request *done[REQUEST_COUNT];
    lh_test_name("%s: writes from the N-th on wait for their release, and reads pass", name);
    wrap(&fixture, name);
    uint8_t *written = fixture.buffer.base;
    uint8_t *got = written + fixture.buffer.bytes / 2;
    uint64_t seed = 13;
    fixture_fill(written, REQUEST_COUNT * PART_BYTES, &seed);
    lh_io_faulty_arm(fixture.io,
                     (struct lh_io_fault){.kind = LH_IO_FAULT_KIND_HOLD,
                                          .request_kinds = LH_IO_FAULT_ON(LH_IO_KIND_WRITE),
                                          .after = 1});
    for (uint64_t i = 0; i < REQUEST_COUNT - 1; i++) {
        LH_CHECK(!lh_io_faulty_has_fired(fixture.io) == (i < 2));
        requests[i] = (struct lh_io_request){.kind = LH_IO_KIND_WRITE,
                                             .buffer = written + i * PART_BYTES,
                                             .bytes = PART_BYTES,
                                             .offset = i * PART_BYTES};
        LH_CHECK(fixture.io->ops->submit(fixture.io, &requests[i]) == 0);
    }
    fixture.io->ops->flush(fixture.io);
    LH_CHECK(fixture_wait(&fixture, done, 1) == 1 && done[0] == &requests[0]);
    struct lh_io_request read = {.buffer = got, .bytes = PART_BYTES};
    LH_CHECK(fixture_run(&fixture, read) == 0);
    LH_CHECK(memcmp(written, got, PART_BYTES) == 0);
    LH_CHECK(fixture.io->in_flight_count == REQUEST_COUNT - 2);

    lh_io_faulty_release(fixture.io);
    LH_CHECK(fixture.io->ops->poll(fixture.io, done, REQUEST_COUNT) == 0);
    for (uint32_t count = 0; count < REQUEST_COUNT - 2;)
        count += fixture_wait(&fixture, done, REQUEST_COUNT);
    LH_CHECK(fixture.io->in_flight_count == 0);
    for (uint64_t i = 1; i < REQUEST_COUNT - 1; i++) {
        read.offset = i * PART_BYTES;
        LH_CHECK(requests[i].result == 0 && fixture_run(&fixture, read) == 0);
        LH_CHECK(memcmp(written + i * PART_BYTES, got, PART_BYTES) == 0);
    }
    struct lh_io_request write = {.kind = LH_IO_KIND_WRITE, .buffer = got, .bytes = PART_BYTES};
    LH_CHECK(fixture_run(&fixture, write) == 0); /* the fault has passed */
    fixture_deinit(&fixture);
}

static void test_no_memory(void)
{
    struct fixture fixture;
    struct lh_io *io = NULL;
    lh_test_name("without memory for the wrapper the inner backend stays the caller's");
    fixture_init(&fixture, true, LH_MIB, 4);
    LH_CHECK(fixture_create(&fixture, "threads", NULL) == 0);
    struct lh_io_faulty_opts opts = {.inner = fixture.io, .clock = &fixture.clock};
    fixture.alloc.fail_after = 0;
    LH_CHECK(lh_io_faulty_create(&opts, &fixture.alloc, &io, NULL) == -ENOMEM && !io);
    fixture_deinit(&fixture);
}

int main(void)
{
    for (const char *const *name = lh_io_names(); *name; name++) {
        struct lh_alloc alloc = LH_ALLOC_INIT;
        /* this skips the test if the file system does not support direct I/O */
        close(fixture_file(true));
        if (lh_io_probe(*name, fixture_directory(), true, &alloc, NULL) < 0)
            continue;
        test_error(*name);
        test_short(*name);
        test_short_at_the_end(*name);
        test_flip(*name);
        test_hold(*name);
    }
    test_no_memory();
    return 0;
}
