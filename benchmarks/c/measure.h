/*
 * What the benchmarks in C share: memory on huge pages, threads that work on a core each, and
 * sorting for medians. A failure ends the program with a message.
 */
#ifndef LH_BENCHMARKS_MEASURE_H
#define LH_BENCHMARKS_MEASURE_H

#include <stdint.h>

#define MEASURE_THREAD_COUNT_MAX 64

/* Return zeroed memory that begins at a huge page, on huge pages if the system has them. */
void *measure_pages(uint64_t bytes);
/* Call work(context, index) for each index below count, on a core each; return the seconds. */
double measure_threads(int count, void (*work)(void *context, int index), void *context);
/* Sort in ascending order, so that values[count / 2] is the median; return it. */
double measure_sort(double *values, int count);

#endif
