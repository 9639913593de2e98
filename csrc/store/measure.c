/* Measures the sequential bandwidth of a directory, for the weights of a new store. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* O_DIRECT */
#endif
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "store/store.h"

#define TRANSFER_BYTES (8 * LH_MIB)

/* Create a file in directory, unlink it, and switch it to O_DIRECT. */
static int probe_open(const char *directory, int *fd_out, struct lh_error *err)
{
    char path[LH_STORE_PATH_BYTES_MAX];
    *fd_out = -1;
    int chars = snprintf(path, sizeof(path), "%s/lohan.probe.XXXXXX", directory);
    if (chars < 0 || (uint64_t)chars >= sizeof(path))
        return lh_error_set(err, -ENAMETOOLONG, "the name of directory %s is too long", directory);
    int fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0)
        return lh_error_set(err, -errno, "cannot create a probe file in %s: %s", directory,
                            strerror(errno));
    unlink(path);
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_DIRECT) != 0) {
        int code = errno == EINVAL ? -EOPNOTSUPP : -errno;
        close(fd);
        return lh_error_set(err, code, "%s cannot be measured: its file system refuses O_DIRECT",
                            directory);
    }
    *fd_out = fd;
    return 0;
}

static uint64_t bytes_per_s(uint64_t bytes, uint64_t begin_ns, uint64_t end_ns)
{
    double seconds = (double)lh_max_u64(end_ns - begin_ns, 1) / 1e9;
    return lh_max_u64((uint64_t)((double)bytes / seconds), 1);
}

/* Transfer bytes. Writes end with a sync, so that the drive's cache alone is not measured. */
static int transfer_all(int fd, bool is_write, uint8_t *buffer, uint64_t bytes,
                        const struct lh_clock *clock, uint64_t *bytes_per_s_out)
{
    LH_ASSERT(bytes > 0 && lh_is_aligned(bytes, LH_BLOCK_BYTES));
    uint64_t begin_ns = lh_clock_now_ns(clock);
    for (uint64_t done = 0; done < bytes;) {
        uint64_t length = lh_min_u64(TRANSFER_BYTES, bytes - done);
        ssize_t rc = is_write ? pwrite(fd, buffer, length, (off_t)done)
                              : pread(fd, buffer, length, (off_t)done);
        if (rc < 0 && errno == EINTR)
            continue;
        if (rc <= 0)
            return rc == 0 ? -EIO : -errno;
        done += (uint64_t)rc;
    }
    if (is_write && fdatasync(fd) != 0)
        return -errno;
    *bytes_per_s_out = bytes_per_s(bytes, begin_ns, lh_clock_now_ns(clock));
    return 0;
}

/* Fill buffer with random words, so that drives that compress or skip zeros do not look faster. */
static void fill(uint8_t *buffer)
{
    uint64_t state = UINT64_C(0x9E3779B97F4A7C15);
    for (uint64_t offset = 0; offset < TRANSFER_BYTES; offset += sizeof(state)) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        memcpy(buffer + offset, &state, sizeof(state));
    }
}

int lh_store_measure(const char *directory, uint64_t probe_bytes, uint64_t *write_bytes_per_s_out,
                     uint64_t *read_bytes_per_s_out, struct lh_error *err)
{
    *write_bytes_per_s_out = 0;
    *read_bytes_per_s_out = 0;
    if (probe_bytes == 0 || !lh_is_aligned(probe_bytes, LH_BLOCK_BYTES))
        return lh_error_set(err, -EINVAL, "probe_bytes %" PRIu64 " is not a multiple of %" PRIu64,
                            probe_bytes, LH_BLOCK_BYTES);
    int fd = -1;
    LH_TRY(probe_open(directory, &fd, err));
    struct lh_clock clock = lh_clock_real();
    /* Map the buffer: pages are aligned, and this function has no allocator. */
    uint8_t *buffer =
        mmap(NULL, TRANSFER_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int rc = 0;
    if (buffer == MAP_FAILED) {
        rc = lh_error_set(err, -ENOMEM, "no memory for a transfer of %" PRIu64 " bytes",
                          TRANSFER_BYTES);
        goto out_close;
    }
    fill(buffer);
    /* Reserve space first, so that the write measures the drive. A file system that cannot
     * reserve space is measured without a reservation. */
    if (fallocate(fd, 0, 0, (off_t)probe_bytes) != 0 && errno != EOPNOTSUPP) {
        rc = lh_error_set(err, -errno, "no space for %" PRIu64 " bytes in %s: %s", probe_bytes,
                          directory, strerror(errno));
        goto out_unmap;
    }
    uint64_t rate = 0;
    rc = transfer_all(fd, true, buffer, probe_bytes, &clock, write_bytes_per_s_out);
    if (rc == 0)
        rc = transfer_all(fd, false, buffer, probe_bytes, &clock, &rate);
    if (rc < 0) {
        *write_bytes_per_s_out = 0;
        lh_error_set(err, rc, "cannot measure %s: %s", directory, strerror(-rc));
        goto out_unmap;
    }
    *read_bytes_per_s_out = rate;
out_unmap:
    munmap(buffer, TRANSFER_BYTES);
out_close:
    close(fd);
    return rc;
}
