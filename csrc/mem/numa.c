/*
 * libnuma is loaded at run time: a machine without libnuma is treated as having one node.
 *
 * mbind() is libnuma's wrapper of the system call. It returns errors, whereas numa_tonode_memory()
 * would print them.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* sched_getcpu */
#endif
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#include "base/assert.h"
#include "mem/arena.h"

#define MBIND_PREFERRED 1 /* MPOL_PREFERRED of <linux/mempolicy.h>: a full node is no error */
#define NUMA_NODE_COUNT_MAX 1024
#define NODE_MASK_BITS (8 * sizeof(unsigned long))

static struct {
    int (*max_node)(void);
    int (*node_of_cpu)(int cpu);
    long (*mbind)(void *base, unsigned long bytes, int mode, const unsigned long *nodes,
                  unsigned long node_max, unsigned flags);
    int node_count; /* 0: no libnuma, or a kernel without NUMA */
} numa;

static pthread_once_t numa_once = PTHREAD_ONCE_INIT;

static void numa_load(void)
{
    void *library = dlopen("libnuma.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return;
    int (*available)(void) = NULL;
    *(void **)&available = dlsym(library, "numa_available");
    *(void **)&numa.max_node = dlsym(library, "numa_max_node");
    *(void **)&numa.node_of_cpu = dlsym(library, "numa_node_of_cpu");
    *(void **)&numa.mbind = dlsym(library, "mbind");
    bool whole = available && numa.max_node && numa.node_of_cpu && numa.mbind;
    if (whole && available() >= 0) {
        int node_count = numa.max_node() + 1;
        numa.node_count = node_count < NUMA_NODE_COUNT_MAX ? node_count : NUMA_NODE_COUNT_MAX;
    } else {
        dlclose(library);
    }
}

static bool numa_is_here(void)
{
    int rc = pthread_once(&numa_once, numa_load);
    LH_ASSERT(rc == 0);
    return numa.node_count > 0;
}

int lh_numa_node_count(void)
{
    return numa_is_here() ? numa.node_count : 1;
}

int lh_numa_node_here(void)
{
    if (!numa_is_here())
        return 0;
    int cpu = sched_getcpu();
    int node = cpu < 0 ? 0 : numa.node_of_cpu(cpu);
    return node < 0 ? 0 : node;
}

int lh_numa_prefer(void *base, uint64_t bytes, int node)
{
    LH_ASSERT(node >= 0 && node < lh_numa_node_count());
    LH_ASSERT(node < NUMA_NODE_COUNT_MAX);
    if (!numa_is_here())
        return -ENOSYS;
    unsigned long nodes[NUMA_NODE_COUNT_MAX / NODE_MASK_BITS + 1] = {0};
    nodes[(size_t)node / NODE_MASK_BITS] = 1UL << ((size_t)node % NODE_MASK_BITS);
    if (numa.mbind(base, bytes, MBIND_PREFERRED, nodes, NUMA_NODE_COUNT_MAX, 0) != 0)
        return -errno;
    return 0;
}
