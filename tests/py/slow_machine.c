/*
 * Preloaded into a process, this makes its SSDs and lohan's workers slow: slow_set() says by how
 * much each read or write of a file at an offset, and each job of a worker, takes longer.
 *
 * A worker is known by its name. It reads the clock before and after a job, so a job becomes longer
 * if the first of these two calls returns late.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* RTLD_NEXT */
#endif
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>

#define PUBLIC __attribute__((visibility("default")))
#define NS_PER_S UINT64_C(1000000000)

static _Atomic uint64_t request_ns;
static _Atomic uint64_t job_ns;
static _Thread_local bool is_worker;
static _Thread_local bool is_in_job;

PUBLIC void slow_set(uint64_t new_request_ns, uint64_t new_job_ns);
PUBLIC ssize_t pread(int file, void *bytes, size_t count, off_t offset);
PUBLIC ssize_t pwrite(int file, const void *bytes, size_t count, off_t offset);

void slow_set(uint64_t new_request_ns, uint64_t new_job_ns)
{
    atomic_store(&request_ns, new_request_ns);
    atomic_store(&job_ns, new_job_ns);
}

static void pass(uint64_t ns)
{
    struct timespec time = {.tv_sec = (time_t)(ns / NS_PER_S), .tv_nsec = (long)(ns % NS_PER_S)};
    if (ns > 0)
        nanosleep(&time, NULL);
}

ssize_t pread(int file, void *bytes, size_t count, off_t offset)
{
    ssize_t (*real)(int, void *, size_t, off_t) = NULL;
    *(void **)&real = dlsym(RTLD_NEXT, "pread");
    pass(atomic_load(&request_ns));
    return real(file, bytes, count, offset);
}

ssize_t pwrite(int file, const void *bytes, size_t count, off_t offset)
{
    ssize_t (*real)(int, const void *, size_t, off_t) = NULL;
    *(void **)&real = dlsym(RTLD_NEXT, "pwrite");
    pass(atomic_load(&request_ns));
    return real(file, bytes, count, offset);
}

PUBLIC int pthread_setname_np(pthread_t thread, const char *name)
{
    int (*real)(pthread_t, const char *) = NULL;
    *(void **)&real = dlsym(RTLD_NEXT, "pthread_setname_np");
    is_worker = strncmp(name, "lohan-w", 7) == 0;
    return real(thread, name);
}

PUBLIC int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*_Atomic real)(clockid_t, struct timespec *);
    int (*found)(clockid_t, struct timespec *) = atomic_load(&real);
    if (!found) {
        *(void **)&found = dlsym(RTLD_NEXT, "clock_gettime");
        atomic_store(&real, found);
    }
    int rc = found(clock, now);
    if (is_worker) {
        is_in_job = !is_in_job;
        pass(is_in_job ? atomic_load(&job_ns) : 0);
    }
    return rc;
}
