#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "exec/exec.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>

#include "lh_test.h"

#define JOB_COUNT 4000
#define DEPTH 32

struct sum_job {
    struct lh_exec_job job;
    uint64_t number;
    uint64_t square;
    uint64_t done_count;
};

struct look_job {
    struct lh_exec_job job;
    char name[16];
    int nice;
    int cpu_count;
    int cpu;
    bool int_blocked;
    bool segv_blocked;
};

struct gate_job {
    struct lh_exec_job job;
    _Atomic int running;
    _Atomic int open;
    _Atomic int ended;
};

static struct lh_clock real_clock;

static void run_square(struct lh_exec_job *job)
{
    struct sum_job *sum = (struct sum_job *)job;
    sum->square = sum->number * sum->number;
}

static void run_look(struct lh_exec_job *job)
{
    struct look_job *look = (struct look_job *)job;
    cpu_set_t cpus;
    sigset_t mask;
    LH_CHECK(pthread_getname_np(pthread_self(), look->name, sizeof(look->name)) == 0);
    look->nice = getpriority(PRIO_PROCESS, 0);
    LH_CHECK(sched_getaffinity(0, sizeof(cpus), &cpus) == 0);
    look->cpu_count = CPU_COUNT(&cpus);
    look->cpu = sched_getcpu();
    LH_CHECK(pthread_sigmask(SIG_BLOCK, NULL, &mask) == 0);
    look->int_blocked = sigismember(&mask, SIGINT) == 1 && sigismember(&mask, SIGTERM) == 1;
    look->segv_blocked = sigismember(&mask, SIGSEGV) == 1;
}

static void run_gate(struct lh_exec_job *job)
{
    struct gate_job *gate = (struct gate_job *)job;
    atomic_store(&gate->running, 1);
    while (!atomic_load(&gate->open))
        sched_yield();
    atomic_store(&gate->ended, 1);
}

static struct lh_exec *create(struct lh_alloc *alloc, struct lh_exec_threads_opts opts)
{
    struct lh_exec *exec = NULL;
    struct lh_error err = {0};
    opts.clock = &real_clock;
    if (lh_exec_threads_create(&opts, alloc, &exec, &err) != 0)
        fprintf(stderr, "%s\n", err.message);
    LH_CHECK(exec && exec->ops->version == LH_EXEC_OPS_VERSION);
    LH_CHECK(exec->thread_count == opts.thread_count);
    return exec;
}

/* The engine's loop: poll, prepare to sleep, poll again, sleep. */
static uint32_t poll_or_sleep(struct lh_exec *exec, struct lh_waker *waker,
                              struct lh_exec_job **done, uint32_t done_max)
{
    for (;;) {
        uint32_t count = exec->ops->poll(exec, done, done_max);
        if (count > 0)
            return count;
        lh_waker_prepare(waker);
        count = exec->ops->poll(exec, done, done_max);
        if (count > 0) {
            lh_waker_cancel(waker);
            return count;
        }
        lh_waker_wait(waker, -1);
    }
}

static void test_all_come_back(struct lh_alloc *alloc, uint32_t thread_count)
{
    lh_test_name("%u workers: each of %d jobs runs once and comes back, sleeping in between",
                 thread_count, JOB_COUNT);
    static struct sum_job jobs[JOB_COUNT];
    struct lh_waker waker;
    LH_CHECK(lh_waker_init(&waker, NULL) == 0);
    struct lh_exec *exec =
        create(alloc, (struct lh_exec_threads_opts){
                          .thread_count = thread_count, .queue_depth_max = DEPTH, .waker = &waker});
    uint64_t begin_ns = lh_clock_now_ns(&real_clock);
    uint32_t submitted = 0;
    uint32_t done_count = 0;
    memset(jobs, 0, sizeof(jobs));
    while (done_count < JOB_COUNT) {
        while (submitted < JOB_COUNT) {
            jobs[submitted].job.run = run_square;
            jobs[submitted].number = submitted;
            if (exec->ops->submit(exec, &jobs[submitted].job) == -EAGAIN) {
                LH_CHECK(submitted - done_count == DEPTH);
                break;
            }
            submitted++;
        }
        struct lh_exec_job *done[7];
        uint32_t count = poll_or_sleep(exec, &waker, done, 7);
        for (uint32_t i = 0; i < count; i++) {
            struct sum_job *sum = (struct sum_job *)done[i];
            LH_CHECK(sum->square == sum->number * sum->number && sum->done_count++ == 0);
            LH_CHECK(sum->job.worker_index < thread_count);
            LH_CHECK(sum->job.started_ns >= begin_ns && sum->job.ended_ns >= sum->job.started_ns);
        }
        done_count += count;
    }
    struct lh_exec_job *none[1];
    LH_CHECK(exec->ops->poll(exec, none, 1) == 0);
    exec->ops->destroy(exec);
    lh_waker_deinit(&waker);
}

static void test_what_a_worker_is(struct lh_alloc *alloc)
{
    lh_test_name("workers have names, niceness and their cpu, and take no signals");
    cpu_set_t allowed;
    LH_CHECK(sched_getaffinity(0, sizeof(allowed), &allowed) == 0);
    int cpu = 0;
    while (!CPU_ISSET((size_t)cpu, &allowed))
        cpu++;
    int nice_here = getpriority(PRIO_PROCESS, 0);
    struct lh_exec *exec =
        create(alloc, (struct lh_exec_threads_opts){
                          .thread_count = 1, .queue_depth_max = 1, .nice = 3, .cpus = &cpu});
    struct look_job look = {.job = {.run = run_look}};
    struct lh_exec_job *done[1];
    LH_CHECK(exec->ops->submit(exec, &look.job) == 0);
    while (exec->ops->poll(exec, done, 1) == 0)
        sched_yield();
    LH_CHECK(strcmp(look.name, "lohan-w0") == 0);
    LH_CHECK(look.nice == (nice_here + 3 > 19 ? 19 : nice_here + 3));
    LH_CHECK(look.cpu_count == 1 && look.cpu == cpu);
    LH_CHECK(look.int_blocked && !look.segv_blocked);
    LH_CHECK(getpriority(PRIO_PROCESS, 0) == nice_here);
    sigset_t mask;
    LH_CHECK(pthread_sigmask(SIG_BLOCK, NULL, &mask) == 0 && sigismember(&mask, SIGINT) == 0);
    exec->ops->destroy(exec);
}

static void *open_later(void *context)
{
    struct gate_job *gate = context;
    usleep(20000);
    atomic_store(&gate->open, 1);
    return NULL;
}

static void test_destroy(struct lh_alloc *alloc)
{
    lh_test_name("destroy waits for the running job and drops those not started");
    struct lh_exec *exec =
        create(alloc, (struct lh_exec_threads_opts){.thread_count = 1, .queue_depth_max = 2});
    static struct gate_job gate;
    gate.job.run = run_gate;
    struct sum_job never = {.job = {.run = run_square}, .number = 3};
    LH_CHECK(exec->ops->submit(exec, &gate.job) == 0);
    LH_CHECK(exec->ops->submit(exec, &never.job) == 0);
    LH_CHECK(exec->ops->submit(exec, &never.job) == -EAGAIN);
    while (!atomic_load(&gate.running))
        sched_yield();
    pthread_t opener;
    LH_CHECK(pthread_create(&opener, NULL, open_later, &gate) == 0);
    exec->ops->destroy(exec);
    LH_CHECK(atomic_load(&gate.ended) == 1 && never.square == 0);
    LH_CHECK(pthread_join(opener, NULL) == 0);
}

static void test_refusals(struct lh_alloc *alloc)
{
    struct lh_error err = {0};
    struct lh_exec *exec = (struct lh_exec *)&err;
    int cpus[2] = {0, -1};
    lh_test_name("options out of range are refused with the numbers");
    struct lh_exec_threads_opts good = {
        .thread_count = 2, .queue_depth_max = 4, .clock = &real_clock};
    struct lh_exec_threads_opts opts = good;
    opts.thread_count = LH_EXEC_THREAD_COUNT_MAX + 1;
    LH_CHECK(lh_exec_threads_create(&opts, alloc, &exec, &err) == -EINVAL && !exec);
    LH_CHECK(strstr(err.message, "257"));
    opts = good;
    opts.queue_depth_max = 0;
    LH_CHECK(lh_exec_threads_create(&opts, alloc, &exec, &err) == -EINVAL && !exec);
    opts = good;
    opts.nice = 20;
    LH_CHECK(lh_exec_threads_create(&opts, alloc, &exec, &err) == -EINVAL && !exec);
    opts = good;
    opts.cpus = cpus;
    LH_CHECK(lh_exec_threads_create(&opts, alloc, &exec, &err) == -EINVAL && !exec);

    lh_test_name("a cpu that does not exist is refused by name, after the first thread started");
    cpus[1] = 1000;
    LH_CHECK(lh_exec_threads_create(&opts, alloc, &exec, &err) == -EINVAL && !exec);
    LH_CHECK(strstr(err.message, "cpu 1000 for worker 1"));

    lh_test_name("no memory at the N-th allocation leaves nothing behind");
    alloc->fail_after = 0;
    int64_t tries = 0;
    while (lh_exec_threads_create(&good, alloc, &exec, &err) != 0) {
        LH_CHECK(err.code == -ENOMEM && !exec && alloc->live_count == 0);
        alloc->fail_after = ++tries;
    }
    alloc->fail_after = -1;
    LH_CHECK(tries == 4);
    exec->ops->destroy(exec);

    if (!LH_TEST_IS_SLOW) { /* sanitizers need the address space that is limited here */
        lh_test_name("threads that the system refuses are counted, and the others are stopped");
        struct rlimit before;
        LH_CHECK(getrlimit(RLIMIT_AS, &before) == 0);
        struct rlimit tight = {.rlim_cur = 400 * LH_MIB, .rlim_max = before.rlim_max};
        LH_CHECK(setrlimit(RLIMIT_AS, &tight) == 0);
        opts = good;
        opts.thread_count = 200;
        LH_CHECK(lh_exec_threads_create(&opts, alloc, &exec, &err) == -EAGAIN && !exec);
        LH_CHECK(setrlimit(RLIMIT_AS, &before) == 0);
        LH_CHECK(strstr(err.message, "of 200 threads"));
    }
    LH_CHECK(alloc->live_count == 0);
}

int main(void)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    real_clock = lh_clock_real();
    test_refusals(&alloc);
    test_all_come_back(&alloc, 1);
    test_all_come_back(&alloc, 3);
    test_what_a_worker_is(&alloc);
    test_destroy(&alloc);
    LH_CHECK(alloc.live_count == 0);
    return 0;
}
