#define _GNU_SOURCE
#include "measure.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/assert.h"
#include "base/base.h"
#include "base/clock.h"

struct worker {
    void (*work)(void *context, int index);
    void *context;
    int index;
};

void *measure_pages(uint64_t bytes)
{
    uint64_t rounded = lh_align_up(bytes, LH_HUGE_PAGE_BYTES) + LH_HUGE_PAGE_BYTES;
    char *memory = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    memory = (char *)lh_align_up((uint64_t)(uintptr_t)memory, LH_HUGE_PAGE_BYTES);
    madvise(memory, rounded - LH_HUGE_PAGE_BYTES, MADV_HUGEPAGE);
    return memory;
}

static void *worker_run(void *context)
{
    const struct worker *worker = context;
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(worker->index, &cpus);
    sched_setaffinity(0, sizeof(cpus), &cpus);
    worker->work(worker->context, worker->index);
    return NULL;
}

double measure_threads(int count, void (*work)(void *context, int index), void *context)
{
    struct worker workers[MEASURE_THREAD_COUNT_MAX];
    pthread_t threads[MEASURE_THREAD_COUNT_MAX];
    struct lh_clock clock = lh_clock_real();
    LH_ASSERT(count > 0 && count <= MEASURE_THREAD_COUNT_MAX);
    uint64_t begin_ns = lh_clock_now_ns(&clock);
    for (int t = 0; t < count; t++) {
        workers[t] = (struct worker){work, context, t};
        if (pthread_create(&threads[t], NULL, worker_run, &workers[t]) != 0) {
            fprintf(stderr, "a thread could not be started\n");
            exit(1);
        }
    }
    for (int t = 0; t < count; t++)
        pthread_join(threads[t], NULL);
    return (double)(lh_clock_now_ns(&clock) - begin_ns) * 1e-9;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double measure_sort(double *values, int count)
{
    LH_ASSERT(count > 0);
    qsort(values, (size_t)count, sizeof(*values), compare);
    return values[count / 2];
}
