/*
 * Test rare results of the kernel for io_uring and libaio: each request still completes exactly
 * once.
 *
 * A filter passes the system calls of a backend to a signal handler, which makes the call itself
 * and changes its arguments or results. Everything else is done by the real kernel.
 */
#include "io_fixture.h"

#include <linux/aio_abi.h>
#include <linux/filter.h>
#include <linux/io_uring.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>

/* the sixth argument, which no call of a backend has, marks the handler's own calls */
#define OWN_CALL UINT32_C(0x4C48494F)
#define REQUEST_COUNT 8
#define PART_BYTES (UINT64_C(256) << 10)
#define SHORT_BYTES (UINT32_C(3) * LH_BLOCK_BYTES)
#define QUIET_MS 50

enum change {
    CHANGE_NONE,
    CHANGE_SHORT,  /* the transfer of one request is cut to SHORT_BYTES */
    CHANGE_ANSWER, /* one request is not transferred, and completes with answer */
    CHANGE_HOLD,   /* one request completes, with one byte moved, once the pipe can be read */
};

static struct {
    int code;       /* the result of a call that submits, or 0 */
    uint32_t after; /* the number of calls that submit before that */
    uint32_t count; /* the number of calls with this result */
    uint32_t most;  /* the number of requests that one call takes; 0: all */
    enum change change;
    uint32_t change_at; /* the number of the request to change, in the order of submission */
    int answer;
    int pipe[2];
    uint32_t refused_count;
    uint32_t taken_count;
    uint64_t victim; /* the changed request */
    struct io_uring_params params;
} kernel;

#if defined(__x86_64__)
#define REGISTERS(context) ((context)->uc_mcontext.gregs)
static const int argument_registers[] = {REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8, REG_R9};
#define RESULT_REGISTER REG_RAX
#elif defined(__aarch64__)
#define REGISTERS(context) ((context)->uc_mcontext.regs)
static const int argument_registers[] = {0, 1, 2, 3, 4, 5};
#define RESULT_REGISTER 0
#endif

/* Make the call itself, and return the kernel's result, -errno included. */
static long call(long number, const uint64_t *arguments)
{
    long rc = syscall(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
                      (unsigned long)OWN_CALL);
    return rc < 0 ? -errno : rc;
}

/* Return whether this call submits nothing and returns kernel.code. */
static bool is_refused(void)
{
    if (kernel.count == 0)
        return false;
    if (kernel.after > 0) {
        kernel.after--;
        return false;
    }
    kernel.count--;
    kernel.refused_count++;
    return true;
}

/* Return the victim's place among the requests that are taken now, or taken if it is elsewhere. */
static uint32_t victim_of(uint32_t taken)
{
    bool is_here = kernel.change != CHANGE_NONE && kernel.change_at >= kernel.taken_count &&
                   kernel.change_at - kernel.taken_count < taken;
    return is_here ? kernel.change_at - kernel.taken_count : taken;
}

static void sqe_change(struct io_uring_sqe *sqe)
{
    uint64_t data = sqe->user_data;
    kernel.victim = data;
    if (kernel.change == CHANGE_SHORT) {
        sqe->len = SHORT_BYTES;
        return;
    }
    *sqe = (struct io_uring_sqe){.opcode = IORING_OP_NOP, .user_data = data};
    if (kernel.change == CHANGE_HOLD) {
        sqe->opcode = IORING_OP_POLL_ADD;
        sqe->fd = kernel.pipe[0];
        sqe->poll32_events = POLLIN;
    }
}

static uint32_t ring_u32(const uint8_t *ring, uint32_t offset)
{
    return __atomic_load_n((const uint32_t *)(ring + offset), __ATOMIC_ACQUIRE);
}

/* The rings of an io_uring, which its owner has mapped as well. */
static uint8_t *ring_map(int fd, uint64_t bytes, off_t offset)
{
    void *ring = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);
    LH_CHECK(ring != MAP_FAILED);
    return ring;
}

static long uring_enter(const uint64_t *given)
{
    uint64_t arguments[5] = {given[0], given[1], given[2], given[3], given[4]};
    if (given[1] == 0)
        return call(SYS_io_uring_enter, arguments);
    if (is_refused())
        return kernel.code;
    if (kernel.most > 0)
        arguments[1] = lh_min_u64(kernel.most, given[1]);
    uint32_t taken = (uint32_t)arguments[1];
    uint32_t at = victim_of(taken);
    const struct io_sqring_offsets *sq = &kernel.params.sq_off;
    const struct io_cqring_offsets *cq = &kernel.params.cq_off;
    uint64_t ring_bytes =
        lh_max_u64(sq->array + kernel.params.sq_entries * sizeof(uint32_t),
                   cq->cqes + kernel.params.cq_entries * sizeof(struct io_uring_cqe));
    uint64_t sqe_bytes = kernel.params.sq_entries * sizeof(struct io_uring_sqe);
    uint8_t *ring = ring_map((int)given[0], ring_bytes, IORING_OFF_SQ_RING);
    uint8_t *sqes = ring_map((int)given[0], sqe_bytes, IORING_OFF_SQES);
    if (at < taken) {
        uint32_t entry = (ring_u32(ring, sq->head) + at) & ring_u32(ring, sq->ring_mask);
        uint32_t index = ring_u32(ring, sq->array + entry * (uint32_t)sizeof(uint32_t));
        sqe_change((struct io_uring_sqe *)sqes + index);
    }
    long rc = call(SYS_io_uring_enter, arguments);
    LH_CHECK(rc == (long)taken);
    kernel.taken_count += taken;
    struct io_uring_cqe *cqes = (struct io_uring_cqe *)(ring + cq->cqes);
    for (uint32_t i = ring_u32(ring, cq->head); i != ring_u32(ring, cq->tail); i++) {
        struct io_uring_cqe *cqe = &cqes[i & ring_u32(ring, cq->ring_mask)];
        if (at < taken && kernel.change == CHANGE_ANSWER && cqe->user_data == kernel.victim)
            cqe->res = kernel.answer;
    }
    munmap(ring, ring_bytes);
    munmap(sqes, sqe_bytes);
    return rc;
}

static long uring_setup(const uint64_t *given)
{
    long rc = call(SYS_io_uring_setup, given);
    if (rc >= 0)
        kernel.params = *(const struct io_uring_params *)(uintptr_t)given[1];
    return rc;
}

static long aio_submit(const uint64_t *given)
{
    uint64_t arguments[5] = {given[0], given[1], given[2], given[3], given[4]};
    struct iocb **controls = (struct iocb **)(uintptr_t)given[2];
    if (is_refused())
        return kernel.code;
    if (kernel.most > 0)
        arguments[1] = lh_min_u64(kernel.most, given[1]);
    uint32_t taken = (uint32_t)arguments[1];
    uint32_t at = victim_of(taken);
    if (at < taken) {
        struct iocb *control = controls[at];
        kernel.victim = control->aio_data;
        if (kernel.change == CHANGE_SHORT)
            control->aio_nbytes = SHORT_BYTES;
        if (kernel.change == CHANGE_HOLD) {
            control->aio_lio_opcode = IOCB_CMD_POLL;
            control->aio_fildes = (uint32_t)kernel.pipe[0];
            control->aio_buf = POLLIN;
            control->aio_nbytes = 0;
            control->aio_offset = 0;
        }
    }
    long rc = call(SYS_io_submit, arguments);
    LH_CHECK(rc == (long)taken);
    kernel.taken_count += taken;
    return rc;
}

static long aio_getevents(const uint64_t *given)
{
    long rc = call(SYS_io_getevents, given);
    struct io_event *events = (struct io_event *)(uintptr_t)given[3];
    for (long i = 0; i < rc; i++) {
        if (kernel.change != CHANGE_ANSWER || events[i].data != kernel.victim)
            continue;
        events[i].res = kernel.answer;
        kernel.victim = 0; /* a retry gets its own result */
    }
    return rc;
}

static void on_call(int number, siginfo_t *info, void *context)
{
    (void)number;
    int code = errno;
    uint64_t arguments[6];
    for (uint32_t i = 0; i < LH_COUNT_OF(arguments); i++)
        arguments[i] = (uint64_t)REGISTERS((ucontext_t *)context)[argument_registers[i]];
    long rc = -ENOSYS;
    switch (info->si_syscall) {
    case SYS_io_uring_setup:
        rc = uring_setup(arguments);
        break;
    case SYS_io_uring_enter:
        rc = uring_enter(arguments);
        break;
    case SYS_io_submit:
        rc = aio_submit(arguments);
        break;
    case SYS_io_getevents:
        rc = aio_getevents(arguments);
        break;
    default:
        break;
    }
    REGISTERS((ucontext_t *)context)[RESULT_REGISTER] = rc;
    errno = code;
}

/* From here on, the calls of io_uring and libaio are passed to on_call(). */
static void kernel_watch(void)
{
    static const uint32_t numbers[] = {SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_submit,
                                       SYS_io_getevents};
    uint32_t sixth = offsetof(struct seccomp_data, args) + 5 * sizeof(uint64_t);
    struct sigaction action = {.sa_sigaction = on_call, .sa_flags = SA_SIGINFO};
    LH_CHECK(sigaction(SIGSYS, &action, NULL) == 0);
    LH_CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    for (uint32_t i = 0; i < LH_COUNT_OF(numbers); i++) {
        struct sock_filter filter[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, numbers[i], 0, 3),
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, sixth),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, OWN_CALL, 1, 0),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = {.len = LH_COUNT_OF(filter), .filter = filter};
        LH_CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
    }
}

static const char *backend; /* the backend that this child process tests */

struct batch {
    struct fixture fixture;
    struct lh_io_request requests[REQUEST_COUNT];
    uint8_t *written;
    uint8_t *read;
};

/* Create a backend with a file in which all parts are written. */
static void batch_init(struct batch *batch)
{
    uint64_t bytes = REQUEST_COUNT * PART_BYTES;
    uint64_t seed = 5;
    fixture_init(&batch->fixture, true, 2 * bytes, REQUEST_COUNT);
    LH_CHECK(fixture_create(&batch->fixture, backend, NULL) == 0);
    batch->written = batch->fixture.buffer.base;
    batch->read = batch->written + bytes;
    fixture_fill(batch->written, bytes, &seed);
    struct lh_io_request all = {.kind = LH_IO_KIND_WRITE, .buffer = batch->written, .bytes = bytes};
    LH_CHECK(fixture_run(&batch->fixture, all) == 0);
    kernel.taken_count = 0;
}

/* Submit all parts; at_once: in one call where the backend can. */
static void batch_submit(struct batch *batch, enum lh_io_kind kind, bool at_once)
{
    struct lh_io *io = batch->fixture.io;
    memset(batch->read, 0, REQUEST_COUNT * PART_BYTES);
    for (uint64_t i = 0; i < REQUEST_COUNT; i++) {
        uint64_t offset = i * PART_BYTES;
        batch->requests[i] = (struct lh_io_request){
            .kind = kind,
            .buffer = (kind == LH_IO_KIND_READ ? batch->read : batch->written) + offset,
            .bytes = PART_BYTES,
            .offset = offset,
        };
        LH_CHECK(io->ops->submit(io, &batch->requests[i]) == 0);
        if (!at_once)
            io->ops->flush(io);
    }
    io->ops->flush(io);
}

/* Wait for count of the requests, each of which comes once; bad_out: those without result 0. */
static void batch_wait(struct batch *batch, uint32_t count, uint32_t *bad_out)
{
    bool is_back[REQUEST_COUNT] = {false};
    *bad_out = 0;
    for (uint32_t back = 0; back < count; back++) {
        struct lh_io_request *done = NULL;
        LH_CHECK(fixture_wait(&batch->fixture, &done, 1) == 1);
        uint64_t index = (uint64_t)(done - batch->requests);
        LH_CHECK(index < REQUEST_COUNT && !is_back[index]);
        is_back[index] = true;
        *bad_out += done->result != 0;
    }
    LH_CHECK(batch->fixture.io->in_flight_count == REQUEST_COUNT - count);
}

/* Check that all parts were transferred completely and correctly. */
static void batch_run(struct batch *batch, enum lh_io_kind kind, bool at_once)
{
    uint32_t bad = 0;
    batch_submit(batch, kind, at_once);
    batch_wait(batch, REQUEST_COUNT, &bad);
    LH_CHECK(bad == 0);
    if (kind == LH_IO_KIND_READ)
        LH_CHECK(memcmp(batch->written, batch->read, REQUEST_COUNT * PART_BYTES) == 0);
}

static bool submit_refused_for_now(void)
{
    static const int uring_codes[] = {-EAGAIN, -EBUSY, -ENOMEM, -EINTR};
    static const int aio_codes[] = {-EAGAIN, -EINTR};
    bool is_uring = strcmp(backend, "io_uring") == 0;
    uint32_t code_count = is_uring ? LH_COUNT_OF(uring_codes) : LH_COUNT_OF(aio_codes);
    struct batch batch;
    kernel_watch();
    batch_init(&batch);
    for (uint32_t i = 0; i < code_count; i++) {
        for (uint32_t after = 0; after < REQUEST_COUNT; after++) {
            for (uint32_t count = 1; count <= 25; count += 12) {
                kernel.code = is_uring ? uring_codes[i] : aio_codes[i];
                kernel.after = after;
                kernel.count = count;
                kernel.refused_count = 0;
                batch_run(&batch, LH_IO_KIND_READ, false);
                LH_CHECK(kernel.refused_count > 0);
                kernel.count = 0;
            }
        }
    }
    fixture_deinit(&batch.fixture);
    return true;
}

static bool submit_takes_a_part(void)
{
    struct batch batch;
    kernel_watch();
    batch_init(&batch);
    for (kernel.most = 1; kernel.most < REQUEST_COUNT; kernel.most++)
        batch_run(&batch, LH_IO_KIND_READ, true);
    /* Some calls take no request at all. */
    kernel.most = 2;
    kernel.code = -EAGAIN;
    for (uint32_t after = 0; after < REQUEST_COUNT / 2; after++) {
        kernel.after = after;
        kernel.count = 3;
        batch_run(&batch, LH_IO_KIND_READ, true);
    }
    fixture_deinit(&batch.fixture);
    return true;
}

/* How often an owner is woken in QUIET_MS if no request completes. */
static uint32_t wakeups_when_quiet(struct fixture *fixture)
{
    struct lh_io_request *done = NULL;
    uint32_t count = 0;
    uint64_t end_ns = lh_clock_now_ns(&fixture->clock) + QUIET_MS * UINT64_C(1000000);
    for (; lh_clock_now_ns(&fixture->clock) < end_ns; count++) {
        lh_waker_prepare(&fixture->waker);
        LH_CHECK(fixture->io->ops->poll(fixture->io, &done, 1) == 0);
        lh_waker_wait(&fixture->waker, QUIET_MS);
    }
    return count;
}

/* While one request does not complete, the others are neither taken nor given up. */
static bool submit_refused_while_full(void)
{
    struct batch batch;
    uint32_t bad = 0;
    uint8_t byte = 1;
    LH_CHECK(pipe(kernel.pipe) == 0);
    kernel_watch();
    batch_init(&batch);
    kernel.change = CHANGE_HOLD;
    kernel.change_at = 0;
    kernel.code = -EAGAIN;
    kernel.after = 1;
    kernel.count = LH_IO_RETRY_COUNT_MAX + 1;
    batch_submit(&batch, LH_IO_KIND_WRITE, false);
    LH_CHECK(wakeups_when_quiet(&batch.fixture) <= REQUEST_COUNT && kernel.taken_count == 1);
    LH_CHECK(write(kernel.pipe[1], &byte, 1) == 1);
    batch_wait(&batch, REQUEST_COUNT, &bad);
    LH_CHECK(bad == 0);
    fixture_deinit(&batch.fixture);
    return true;
}

static bool completes_short(void)
{
    struct batch batch;
    kernel_watch();
    batch_init(&batch);
    kernel.change = CHANGE_SHORT;
    for (uint32_t at = 0; at < REQUEST_COUNT; at++) {
        for (uint32_t kind = LH_IO_KIND_READ; kind <= LH_IO_KIND_WRITE; kind++) {
            kernel.taken_count = 0;
            kernel.change_at = at;
            kernel.victim = 0;
            batch_run(&batch, (enum lh_io_kind)kind, true);
            LH_CHECK(kernel.victim != 0);
            LH_CHECK(kernel.taken_count == REQUEST_COUNT + 1); /* one more request has the rest */
        }
    }
    fixture_deinit(&batch.fixture);
    return true;
}

static bool completes_with_an_error(void)
{
    static const int answers[] = {-ECANCELED, -EIO, -ENOMEM, -ENOSPC};
    struct batch batch;
    uint32_t bad = 0;
    kernel_watch();
    batch_init(&batch);
    for (uint32_t i = 0; i < LH_COUNT_OF(answers); i++) {
        for (uint32_t at = 0; at < REQUEST_COUNT; at++) {
            kernel.change = CHANGE_ANSWER;
            kernel.answer = answers[i];
            kernel.taken_count = 0;
            kernel.change_at = at;
            batch_submit(&batch, LH_IO_KIND_WRITE, true);
            batch_wait(&batch, REQUEST_COUNT, &bad);
            LH_CHECK(bad == 1 && batch.requests[at].result == answers[i]);
            kernel.change = CHANGE_NONE;
            batch_run(&batch, LH_IO_KIND_READ, true);
        }
    }
    fixture_deinit(&batch.fixture);
    return true;
}

static bool completes_without_having_begun(void)
{
    static const int answers[] = {-EAGAIN, -EINTR};
    struct batch batch;
    kernel_watch();
    batch_init(&batch);
    kernel.change = CHANGE_ANSWER;
    for (uint32_t i = 0; i < LH_COUNT_OF(answers); i++) {
        for (uint32_t at = 0; at < REQUEST_COUNT; at++) {
            kernel.answer = answers[i];
            kernel.taken_count = 0;
            kernel.change_at = at;
            batch_run(&batch, LH_IO_KIND_READ, true);
            LH_CHECK(kernel.taken_count == REQUEST_COUNT + 1);
            LH_CHECK(batch.requests[at].retry_count == 1);
        }
    }
    fixture_deinit(&batch.fixture);
    return true;
}

static bool completes_late(void)
{
    struct batch batch;
    uint32_t bad = 0;
    LH_CHECK(pipe(kernel.pipe) == 0);
    kernel_watch();
    batch_init(&batch);
    kernel.change = CHANGE_HOLD;
    for (uint32_t at = 0; at < REQUEST_COUNT; at += 3) {
        struct lh_io_request *done = NULL;
        uint8_t byte = 1;
        kernel.taken_count = 0;
        kernel.change_at = at;
        batch_submit(&batch, LH_IO_KIND_WRITE, true);
        batch_wait(&batch, REQUEST_COUNT - 1, &bad);
        LH_CHECK(bad == 0 && batch.requests[at].result == -EINPROGRESS);
        LH_CHECK(wakeups_when_quiet(&batch.fixture) <= REQUEST_COUNT);
        LH_CHECK(fixture_run(&batch.fixture, (struct lh_io_request){.kind = LH_IO_KIND_READ,
                                                                    .buffer = batch.read,
                                                                    .bytes = PART_BYTES}) == 0);
        LH_CHECK(batch.fixture.io->in_flight_count == 1);
        LH_CHECK(write(kernel.pipe[1], &byte, 1) == 1);
        LH_CHECK(fixture_wait(&batch.fixture, &done, 1) == 1);
        LH_CHECK(done == &batch.requests[at] && done->result == 0);
        LH_CHECK(read(kernel.pipe[0], &byte, 1) == 1);
    }
    fixture_deinit(&batch.fixture);
    return true;
}

static bool works(const char *name)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    for (const char *const *have = lh_io_names(); *have; have++)
        if (strcmp(*have, name) == 0)
            return lh_io_probe(name, fixture_directory(), true, &alloc, NULL) == 0;
    return false;
}

int main(void)
{
    static const char *const names[] = {"io_uring", "libaio"};
    uint32_t tested_count = 0;
    /* this skips the test if the file system does not support direct I/O */
    close(fixture_file(true));
    for (uint32_t i = 0; i < LH_COUNT_OF(names) && !LH_TEST_IS_EMULATED; i++) {
        backend = names[i];
        if (!works(backend))
            continue;
        tested_count++;
        lh_test_name("%s: submitting that is refused for now is tried again", backend);
        LH_CHECK(fixture_in_child(submit_refused_for_now));
        lh_test_name("%s: a kernel that is full is asked again after a completion", backend);
        LH_CHECK(fixture_in_child(submit_refused_while_full));
        lh_test_name("%s: what the kernel takes only a part of is submitted in parts", backend);
        LH_CHECK(fixture_in_child(submit_takes_a_part));
        lh_test_name("%s: a short completion is continued", backend);
        LH_CHECK(fixture_in_child(completes_short));
        lh_test_name("%s: a completion with an error is that request's result alone", backend);
        LH_CHECK(fixture_in_child(completes_with_an_error));
        lh_test_name("%s: a completion with EAGAIN or EINTR is tried again", backend);
        LH_CHECK(fixture_in_child(completes_without_having_begun));
        lh_test_name("%s: a completion that does not come holds up nobody else", backend);
        LH_CHECK(fixture_in_child(completes_late));
    }
    if (tested_count == 0)
        LH_TEST_SKIP("neither io_uring nor libaio works here");
    return 0;
}
