/* Test what a machine refuses: a fallback is used if one exists, and errors name a solution. */
#include "io_fixture.h"

#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#define NOBODY 65534
#define REGISTERED_BYTES (16 * LH_MIB)

static bool has_backend(const char *name)
{
    for (const char *const *have = lh_io_names(); *have; have++)
        if (strcmp(*have, name) == 0)
            return true;
    return false;
}

static bool works(const char *name)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    return has_backend(name) && lh_io_probe(name, fixture_directory(), true, &alloc, NULL) == 0;
}

/* From here on, the system call with this number returns code in this process. */
static void forbid(uint32_t number, uint32_t code)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | code),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = LH_COUNT_OF(filter), .filter = filter};
    LH_CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    LH_CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

/* Give up root, whom limits do not bind. */
static void become_nobody(void)
{
    if (geteuid() != 0)
        return;
    LH_CHECK(setgroups(0, NULL) == 0);
    LH_CHECK(setgid(NOBODY) == 0 && setuid(NOBODY) == 0);
}

static uint32_t line_count(const char *text)
{
    uint32_t count = text[0] ? 1 : 0;
    for (; *text; text++)
        count += *text == '\n';
    return count;
}

/* create_best() must choose name in this process, after passed_count others failed. */
static bool best_is(const char *name, uint32_t passed_count, const char *reason)
{
    struct fixture fixture;
    char reasons[1024] = "what was here before";
    fixture_init(&fixture, true, LH_MIB, 4);
    LH_CHECK(lh_io_create_best(fixture_directory(), &fixture.opts, &fixture.alloc, &fixture.io,
                               reasons, sizeof(reasons), NULL) == 0);
    LH_CHECK(strcmp(fixture.io->ops->name, name) == 0);
    LH_CHECK(line_count(reasons) == passed_count && strstr(reasons, reason) != NULL);
    LH_CHECK(fixture_run(&fixture, (struct lh_io_request){.kind = LH_IO_KIND_WRITE,
                                                          .buffer = fixture.buffer.base,
                                                          .bytes = LH_MIB}) == 0);
    fixture_deinit(&fixture);
    return true;
}

static bool uring_forbidden(void)
{
    struct lh_error err = {0};
    struct lh_alloc alloc = LH_ALLOC_INIT;
    forbid(SYS_io_uring_setup, EPERM);
    if (has_backend("io_uring")) {
        LH_CHECK(lh_io_probe("io_uring", fixture_directory(), true, &alloc, &err) == -EPERM);
        LH_CHECK(strstr(err.message, "seccomp") && strstr(err.message, "--security-opt"));
        LH_CHECK(alloc.live_count == 0);
    }
    bool aio_works = works("libaio");
    return best_is(aio_works ? "libaio" : "threads", aio_works ? 1 : 2, "io_uring: ");
}

static bool uring_hidden(void)
{
    struct lh_error err = {0};
    struct lh_alloc alloc = LH_ALLOC_INIT;
    forbid(SYS_io_uring_setup, ENOSYS);
    LH_CHECK(lh_io_probe("io_uring", fixture_directory(), true, &alloc, &err) == -ENOSYS);
    LH_CHECK(strstr(err.message, "5.1"));
    return true;
}

static bool uring_enter_forbidden(void)
{
    /* A filter rejects one of the three calls; the probe's first transfer detects it. */
    forbid(SYS_io_uring_register, EPERM);
    return best_is(works("libaio") ? "libaio" : "threads", works("libaio") ? 1 : 2, "io_uring: ");
}

/* Forbid the calls that use a backend; those that create it are allowed. */
static bool use_forbidden(const uint32_t *numbers, uint32_t count, uint32_t code, const char *name)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_error err = {0};
    for (uint32_t i = 0; i < count; i++)
        forbid(numbers[i], code);
    LH_CHECK(lh_io_probe(name, fixture_directory(), true, &alloc, &err) == -(int)code);
    LH_CHECK(strstr(err.message, "seccomp") && alloc.live_count == 0);
    return true;
}

static const uint32_t uring_calls[] = {SYS_io_uring_enter};
static const uint32_t aio_wait_calls[] = {
    SYS_io_getevents,
#if defined(SYS_io_pgetevents)
    SYS_io_pgetevents,
#endif
};
static const uint32_t aio_submit_calls[] = {SYS_io_submit};

static bool uring_use_forbidden(void)
{
    bool aio_works = works("libaio");
    return use_forbidden(uring_calls, 1, EPERM, "io_uring") &&
           best_is(aio_works ? "libaio" : "threads", aio_works ? 1 : 2, "seccomp");
}

static bool uring_use_hidden(void)
{
    return use_forbidden(uring_calls, 1, ENOSYS, "io_uring");
}

static bool both_uses_forbidden(void)
{
    return use_forbidden(uring_calls, 1, EPERM, "io_uring") &&
           use_forbidden(aio_wait_calls, LH_COUNT_OF(aio_wait_calls), ENOSYS, "libaio") &&
           best_is("threads", 2, "\nlibaio: ");
}

#define LATER_COUNT 16

/*
 * With half of the requests in the kernel, forbid the calls. Every request comes back, with its own
 * result or with the refusal, and so do those submitted afterwards. code 0: the calls claim to have
 * succeeded and do nothing.
 */
static bool use_forbidden_later(const char *name, const uint32_t *numbers, uint32_t count,
                                uint32_t code)
{
    const int64_t refusal = code == 0 ? -EIO : -(int64_t)code;
    alarm(20); /* a limit for this child process */
    struct fixture fixture;
    struct lh_io_request requests[LATER_COUNT];
    struct lh_io_request *done[LATER_COUNT];
    uint32_t refused_count = 0;
    fixture_init(&fixture, true, LATER_COUNT * LH_MIB, LATER_COUNT);
    LH_CHECK(fixture_create(&fixture, name, NULL) == 0);
    for (uint32_t i = 0; i < LATER_COUNT; i++) {
        requests[i] = (struct lh_io_request){
            .kind = i % 4 == 3 ? LH_IO_KIND_SYNC : LH_IO_KIND_WRITE,
            .buffer = (uint8_t *)fixture.buffer.base + i * LH_MIB,
            .bytes = LH_MIB,
            .offset = i * LH_MIB,
        };
        if (i == LATER_COUNT / 2) {
            for (uint32_t j = 0; j < count; j++)
                forbid(numbers[j], code);
        }
        LH_CHECK(fixture_submit(&fixture, &requests[i]) == 0);
    }
    for (uint32_t back = 0; back < LATER_COUNT;) {
        uint32_t got = fixture_wait(&fixture, done, LATER_COUNT);
        for (uint32_t i = 0; i < got; i++) {
            LH_CHECK(done[i]->result == 0 || done[i]->result == refusal);
            refused_count += done[i]->result == refusal;
        }
        back += got;
    }
    LH_CHECK(refused_count >= LATER_COUNT / 2 && fixture.io->in_flight_count == 0);
    for (uint32_t i = 0; i < 3; i++)
        LH_CHECK(fixture_run(&fixture, (struct lh_io_request){.kind = LH_IO_KIND_WRITE,
                                                              .buffer = fixture.buffer.base,
                                                              .bytes = LH_MIB}) == refusal);
    fixture_deinit(&fixture);
    return true;
}

static bool uring_forbidden_later(void)
{
    return use_forbidden_later("io_uring", uring_calls, 1, EPERM);
}

static bool uring_ignored_later(void)
{
    return use_forbidden_later("io_uring", uring_calls, 1, 0);
}

static bool aio_wait_forbidden_later(void)
{
    return use_forbidden_later("libaio", aio_wait_calls, LH_COUNT_OF(aio_wait_calls), EPERM);
}

static bool aio_submit_forbidden_later(void)
{
    return use_forbidden_later("libaio", aio_submit_calls, 1, EPERM);
}

static bool aio_submit_ignored_later(void)
{
    return use_forbidden_later("libaio", aio_submit_calls, 1, 0);
}

static bool both_forbidden(void)
{
    forbid(SYS_io_uring_setup, EPERM);
    forbid(SYS_io_setup, EPERM);
    return best_is("threads", 2, "\nlibaio: ");
}

static bool memlock_low(void)
{
    struct fixture fixture;
    struct rlimit limit = {.rlim_cur = 65536, .rlim_max = 65536};
    fixture_init(&fixture, true, REGISTERED_BYTES, 4);
    LH_CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    become_nobody();
    LH_CHECK(fixture_create(&fixture, "io_uring", NULL) == 0);
    printf("  %s\n", fixture.io->note);
    LH_CHECK(strstr(fixture.io->note, "RLIMIT_MEMLOCK is 65536 bytes, 16777216 would be needed"));
    struct lh_io_request request = {
        .kind = LH_IO_KIND_WRITE, .buffer = fixture.buffer.base, .bytes = REGISTERED_BYTES / 2};
    uint64_t seed = 3;
    fixture_fill(request.buffer, request.bytes, &seed);
    LH_CHECK(fixture_run(&fixture, request) == 0);
    request.kind = LH_IO_KIND_READ;
    request.buffer = (uint8_t *)fixture.buffer.base + request.bytes;
    LH_CHECK(fixture_run(&fixture, request) == 0);
    LH_CHECK(memcmp(fixture.buffer.base, request.buffer, request.bytes) == 0);
    fixture_deinit(&fixture);
    return true;
}

static bool no_threads(void)
{
    struct fixture fixture;
    struct lh_error err = {0};
    struct rlimit limit = {.rlim_cur = 1, .rlim_max = 1};
    fixture_init(&fixture, true, LH_MIB, 4);
    LH_CHECK(setrlimit(RLIMIT_NPROC, &limit) == 0);
    become_nobody();
    LH_CHECK(fixture_create(&fixture, "threads", &err) == -EAGAIN);
    LH_CHECK(!fixture.io && strstr(err.message, "only 0 of 4") && strstr(err.message, "ulimit"));
    fixture_deinit(&fixture);
    return true;
}

static void test_opts(void)
{
    struct fixture fixture;
    struct lh_error err = {0};
    fixture_init(&fixture, true, LH_MIB, 4);
    const struct lh_io_opts good = fixture.opts;
    const struct lh_io_file files[] = {fixture.file, {.fd = 987654}};
    lh_test_name("opts out of range are refused with their values");
    LH_CHECK(lh_io_create("tape", &good, &fixture.alloc, &fixture.io, &err) == -EINVAL);
    LH_CHECK(!fixture.io && strstr(err.message, "tape"));
    for (int i = 0; i < 6; i++) {
        fixture.opts = good;
        switch (i) {
        case 0:
            fixture.opts.queue_depth_max = 0;
            break;
        case 1:
            fixture.opts.queue_depth_max = LH_IO_QUEUE_DEPTH_MAX + 1;
            break;
        case 2:
            fixture.opts.file_count = LH_IO_FILE_COUNT_MAX + 1;
            break;
        case 3:
            fixture.opts.buffer_count = LH_IO_BUFFER_COUNT_MAX + 1;
            break;
        case 4:
            fixture.opts.thread_count = LH_IO_THREAD_COUNT_MAX + 1;
            break;
        default:
            fixture.opts.files = files;
            fixture.opts.file_count = 2;
            break;
        }
        fixture.io = (struct lh_io *)&fixture;
        LH_CHECK(fixture_create(&fixture, "threads", &err) == (i < 5 ? -EINVAL : -EBADF));
        LH_CHECK(!fixture.io);
        LH_CHECK(i < 5 || strstr(err.message, "987654"));
    }
    fixture_deinit(&fixture);
}

static void test_countdown(const char *name)
{
    struct fixture fixture;
    struct lh_error err = {0};
    lh_test_name("%s: when the N-th allocation fails, create fails and leaves nothing", name);
    fixture_init(&fixture, true, LH_MIB, 4);
    int rc = -ENOMEM;
    int64_t passes = 0;
    for (; rc < 0; passes++) {
        fixture.alloc.fail_after = passes;
        rc = fixture_create(&fixture, name, &err);
        LH_CHECK(rc == 0 || (rc == -ENOMEM && !fixture.io && fixture.alloc.live_count == 0));
    }
    LH_CHECK(passes > 1);
    fixture_deinit(&fixture);
}

static void test_probe_countdown(const char *name)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_error err = {0};
    lh_test_name("%s: when the N-th allocation fails, a probe fails and leaves nothing", name);
    int rc = -ENOMEM;
    int64_t passes = 0;
    for (; rc < 0; passes++) {
        alloc.fail_after = passes;
        rc = lh_io_probe(name, fixture_directory(), false, &alloc, &err);
        LH_CHECK((rc == 0 || rc == -ENOMEM) && alloc.live_count == 0);
    }
    LH_CHECK(passes > 2);
}

static void test_files_are_given_back(const char *name)
{
    struct fixture fixture;
    char path[64];
    lh_test_name("%s: after destroy nothing holds the files or their locks", name);
    for (int round = 0; round < 50; round++) {
        fixture_init(&fixture, true, LH_MIB, 4);
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fixture.file.fd);
        int other = open(path, O_RDWR | O_CLOEXEC);
        LH_CHECK(other >= 0 && flock(fixture.file.fd, LOCK_EX | LOCK_NB) == 0);
        LH_CHECK(flock(other, LOCK_EX | LOCK_NB) < 0);
        LH_CHECK(fixture_create(&fixture, name, NULL) == 0);
        LH_CHECK(fixture_run(&fixture, (struct lh_io_request){.kind = LH_IO_KIND_SYNC}) == 0);
        fixture_deinit(&fixture);
        LH_CHECK(flock(other, LOCK_EX | LOCK_NB) == 0);
        close(other);
    }
}

static void test_no_directory(void)
{
    struct fixture fixture;
    struct lh_error err = {0};
    char reasons[40] = "";
    lh_test_name("where no backend works, the error tells what each one met");
    fixture_init(&fixture, true, LH_MIB, 4);
    LH_CHECK(lh_io_create_best("/nowhere/at/all", &fixture.opts, &fixture.alloc, &fixture.io,
                               reasons, sizeof(reasons), &err) == -ENOENT);
    LH_CHECK(!fixture.io && strstr(err.message, "/nowhere/at/all"));
    LH_CHECK(strstr(err.message, "io_uring: ") && strstr(err.message, "threads: "));
    LH_CHECK(strlen(reasons) == sizeof(reasons) - 1); /* the text is truncated and terminated */
    fixture_deinit(&fixture);
}

int main(void)
{
    /* this skips the test if the file system does not support direct I/O */
    close(fixture_file(true));
    test_opts();
    test_no_directory();
    lh_test_name("the best backend that works is taken, silently where it is the first");
    for (const char *const *name = lh_io_names(); *name; name++) {
        if (!works(*name))
            continue;
        bool is_first = strcmp(*name, "io_uring") == 0;
        LH_CHECK(!is_first || best_is("io_uring", 0, ""));
        break;
    }
    if (!LH_TEST_IS_EMULATED) {
        lh_test_name("where io_uring is forbidden the next one is taken, and why is told");
        LH_CHECK(fixture_in_child(uring_forbidden));
        LH_CHECK(fixture_in_child(both_forbidden));
    }
    lh_test_name("threads that the system refuses are an error with numbers");
    LH_CHECK(fixture_in_child(no_threads));
    if (works("io_uring")) {
        lh_test_name("a kernel without io_uring, and half a filter, are told as well");
        LH_CHECK(fixture_in_child(uring_hidden));
        LH_CHECK(fixture_in_child(uring_enter_forbidden));
        lh_test_name("a filter that allows io_uring to be made and not to be used is passed over");
        LH_CHECK(fixture_in_child(uring_use_forbidden));
        LH_CHECK(fixture_in_child(uring_use_hidden));
        LH_CHECK(!works("libaio") || fixture_in_child(both_uses_forbidden));
        lh_test_name("io_uring: forbidden while it is used, every request comes back with that");
        LH_CHECK(fixture_in_child(uring_forbidden_later));
        lh_test_name("io_uring: a call that claims to succeed and takes nothing is an error");
        LH_CHECK(fixture_in_child(uring_ignored_later));
        lh_test_name("buffers above RLIMIT_MEMLOCK are used unregistered, and noted");
        LH_CHECK(fixture_in_child(memlock_low));
    }
    if (works("libaio") && !LH_TEST_IS_EMULATED) {
        lh_test_name("libaio: forbidden while it is used, every request comes back with that");
        LH_CHECK(fixture_in_child(aio_wait_forbidden_later));
        LH_CHECK(fixture_in_child(aio_submit_forbidden_later));
        lh_test_name("libaio: a call that claims to succeed and takes nothing is an error");
        LH_CHECK(fixture_in_child(aio_submit_ignored_later));
    }
    for (const char *const *name = lh_io_names(); *name; name++) {
        if (!works(*name))
            continue;
        test_countdown(*name);
        test_probe_countdown(*name);
        test_files_are_given_back(*name);
    }
    if (works("libaio"))
        test_countdown("libaio+helper");
    return 0;
}
