#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "mem/arena.h"

#define PATH_BYTES 4096

/* The two versions of control groups have the same values under different names. */
struct cgroup_names {
    const char *line; /* the text after the first colon of the line in /proc/self/cgroup */
    const char *root;
    const char *limit;
    const char *used;
    const char *active;
    const char *inactive;
};

static const struct cgroup_names cgroup_versions[] = {
    {":/", "/sys/fs/cgroup", "memory.max", "memory.current", "active_file", "inactive_file"},
    {"memory:/", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
     "total_active_file", "total_inactive_file"},
};

bool lh_mem_number_parse(const char *text, uint64_t *value_out)
{
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (end == text || errno != 0)
        return false;
    *value_out = value;
    return true;
}

int lh_mem_field_read(const char *path, const char *name, uint64_t *value_out)
{
    *value_out = 0;
    FILE *file = fopen(path, "re");
    if (!file)
        return -errno;
    char line[256];
    size_t name_length = strlen(name);
    int rc = -ENOENT;
    LH_ASSERT(name_length > 0 && name_length < sizeof(line));
    while (rc != 0 && fgets(line, sizeof(line), file)) {
        /* "MemAvailable:   123 kB" in /proc, "inactive_file 123" in a control group. */
        const char *rest = line + name_length;
        if (strncmp(line, name, name_length) == 0 && (*rest == ':' || *rest == ' ') &&
            lh_mem_number_parse(rest + 1, value_out))
            rc = 0;
    }
    fclose(file);
    return rc;
}

/* Read the number in directory/name. Returns false if it has none ("max") or does not exist. */
static bool cgroup_number(const char *directory, const char *name, uint64_t *value_out)
{
    char path[PATH_BYTES];
    if (snprintf(path, sizeof(path), "%s/%s", directory, name) >= (int)sizeof(path))
        return false;
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    char line[64];
    bool found = fgets(line, sizeof(line), file) && lh_mem_number_parse(line, value_out);
    fclose(file);
    return found;
}

/* The memory that a control group still allows: limit - used, not counting page cache as used. */
static uint64_t cgroup_available_bytes(const struct cgroup_names *names, const char *directory)
{
    uint64_t limit_bytes = 0;
    uint64_t used_bytes = 0;
    if (!cgroup_number(directory, names->limit, &limit_bytes) ||
        !cgroup_number(directory, names->used, &used_bytes))
        return UINT64_MAX;
    char path[PATH_BYTES];
    uint64_t active_bytes = 0;
    uint64_t inactive_bytes = 0;
    if (snprintf(path, sizeof(path), "%s/memory.stat", directory) < (int)sizeof(path) &&
        lh_mem_field_read(path, names->active, &active_bytes) == 0 &&
        lh_mem_field_read(path, names->inactive, &inactive_bytes) == 0)
        used_bytes -= lh_min_u64(used_bytes, active_bytes + inactive_bytes);
    return limit_bytes - lh_min_u64(limit_bytes, used_bytes);
}

/* The minimum of the memory that this process's control group and all its ancestors allow. */
static uint64_t cgroups_available_bytes(const struct cgroup_names *names)
{
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (!file)
        return UINT64_MAX;
    char line[PATH_BYTES / 2];
    char directory[PATH_BYTES] = "";
    while (fgets(line, sizeof(line), file)) {
        const char *rest = strchr(line, ':');
        if (!rest || strncmp(rest + 1, names->line, strlen(names->line)) != 0)
            continue;
        char *end = strchr(line, '\n');
        if (end)
            *end = '\0';
        snprintf(directory, sizeof(directory), "%s%s", names->root, rest + strlen(names->line));
    }
    fclose(file);
    uint64_t available_bytes = UINT64_MAX;
    while (strlen(directory) >= strlen(names->root)) {
        available_bytes = lh_min_u64(available_bytes, cgroup_available_bytes(names, directory));
        char *end = strrchr(directory, '/');
        LH_ASSERT(end); /* root begins with a slash */
        *end = '\0';
    }
    return available_bytes;
}

uint64_t lh_mem_available_bytes(void)
{
    uint64_t available_kib = 0;
    uint64_t available_bytes = UINT64_MAX;
    if (lh_mem_field_read("/proc/meminfo", "MemAvailable", &available_kib) == 0)
        available_bytes = available_kib * LH_KIB;
    for (size_t i = 0; i < LH_COUNT_OF(cgroup_versions); i++)
        available_bytes = lh_min_u64(available_bytes, cgroups_available_bytes(&cgroup_versions[i]));
    return available_bytes;
}

int lh_mem_available_check(uint64_t bytes, struct lh_error *err)
{
    uint64_t available_bytes = lh_mem_available_bytes();
    if (bytes <= available_bytes)
        return 0;
    return lh_error_set(err, -ENOMEM,
                        "%" PRIu64 " bytes of main memory are requested, but only %" PRIu64
                        " are available (MemAvailable, control group limits): lower host_bytes",
                        bytes, available_bytes);
}
