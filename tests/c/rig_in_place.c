#include "rig_in_place.h"

#include <fcntl.h>

#include "base/crc32c.h"
#include "lh_test.h"
#include "store_fixture.h"

/* The frozen unit: a first part in one file, and a second whose file ends inside a block. */
#define UNIT 2u
#define FIRST_BYTES LH_BLOCK_BYTES
#define FIRST_OFFSET (3 * LH_BLOCK_BYTES)
#define SECOND_OFFSET (5 * LH_BLOCK_BYTES)
#define SHIFT 19
#define MOVE_COUNT_MAX 4
#define CHECKSUM_COUNT_MAX 8

struct rig_in_place {
    struct lh_io_file io_files[LH_IO_FILE_COUNT_MAX];
    struct lh_in_place_file files[2];
    struct lh_in_place_run runs[2];
    struct lh_in_place_move moves[MOVE_COUNT_MAX];
    uint32_t checksums[CHECKSUM_COUNT_MAX];
    struct lh_in_place_unit unit;
    struct lh_engine_unit units[RIG_UNIT_COUNT];
    char paths[2][8192];
    int fds[2];
    uint32_t file_first;
};

/* Write bytes of content at offset, in a file that ends after them. */
static int file_make(const char *path, const uint8_t *content, uint64_t bytes, uint64_t offset)
{
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    LH_CHECK(fd >= 0 && pwrite(fd, content, bytes, (off_t)offset) == (ssize_t)bytes);
    LH_CHECK(fsync(fd) == 0 && close(fd) == 0);
    fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (fd < 0 && errno == EINVAL)
        LH_TEST_SKIP("%s refuses O_DIRECT", path);
    LH_CHECK(fd >= 0);
    return fd;
}

/* Two, and where the unit is large two more: a short one over the end of a request, a long one. */
static uint32_t moves_make(struct rig_in_place *made, uint64_t unit_bytes)
{
    made->moves[0] = (struct lh_in_place_move){64 + SHIFT, 64, 2000};
    if (unit_bytes < FIRST_BYTES + 2 * LH_MIB) {
        made->moves[1] =
            (struct lh_in_place_move){FIRST_BYTES + 64 + SHIFT, FIRST_BYTES + 64, 3000};
        return 2;
    }
    uint64_t end = FIRST_BYTES + LH_MIB; /* the end of the second run's first request */
    made->moves[1] =
        (struct lh_in_place_move){FIRST_BYTES + 64 + SHIFT, FIRST_BYTES + 64, LH_MIB - 64 - 128};
    made->moves[2] = (struct lh_in_place_move){end - 1, end - 64, 30};
    made->moves[3] = (struct lh_in_place_move){end + 37, end, LH_MIB + 1000};
    return 4;
}

struct rig_in_place *rig_in_place_open(struct rig *rig, uint8_t *state)
{
    uint64_t seed = 5;
    uint64_t unit_bytes = rig->units[UNIT].bytes;
    uint64_t second_bytes = unit_bytes - FIRST_BYTES;
    uint64_t second_end = second_bytes - 100;
    if (!rig->opts.in_place)
        return NULL;
    struct rig_in_place *made = calloc(1, sizeof(*made));
    LH_CHECK(made);
    for (uint64_t i = 0; i < unit_bytes; i++)
        state[i] = (uint8_t)lh_test_random(&seed);
    memset(state + FIRST_BYTES + second_end, 0, second_bytes - second_end);
    for (uint32_t i = 0; i < 2; i++)
        snprintf(made->paths[i], sizeof(made->paths[i]), "%s/%s-in-place-%u", fixture_root(),
                 rig->name, i);
    made->fds[0] = file_make(made->paths[0], state, FIRST_BYTES, FIRST_OFFSET);
    made->fds[1] = file_make(made->paths[1], state + FIRST_BYTES, second_end, SECOND_OFFSET);
    made->files[0] = (struct lh_in_place_file){made->paths[0], FIRST_OFFSET + FIRST_BYTES};
    made->files[1] = (struct lh_in_place_file){made->paths[1], SECOND_OFFSET + second_end};
    made->runs[0] = (struct lh_in_place_run){
        .file = 0, .file_offset = FIRST_OFFSET, .offset = 0, .bytes = FIRST_BYTES};
    made->runs[1] = (struct lh_in_place_run){.file = 1,
                                             .file_offset = SECOND_OFFSET,
                                             .offset = FIRST_BYTES,
                                             .bytes = second_bytes,
                                             .checksum_first = 1};
    made->checksums[0] = lh_crc32c(0, state, FIRST_BYTES);
    uint32_t checksum_count = 1;
    for (uint64_t at = FIRST_BYTES; at < unit_bytes; at += LH_CHECKSUM_BYTES) {
        LH_CHECK(checksum_count < CHECKSUM_COUNT_MAX);
        made->checksums[checksum_count++] =
            lh_crc32c(0, state + at, lh_min_u64(LH_CHECKSUM_BYTES, unit_bytes - at));
    }
    uint32_t move_count = moves_make(made, unit_bytes);
    /* What memory contains after the unit was read. */
    for (uint32_t i = 0; i < move_count; i++)
        memmove(state + made->moves[i].to, state + made->moves[i].from, made->moves[i].bytes);
    made->unit = (struct lh_in_place_unit){.unit = UNIT,
                                           .runs = made->runs,
                                           .run_count = 2,
                                           .moves = made->moves,
                                           .move_count = move_count,
                                           .checksums = made->checksums,
                                           .checksum_count = checksum_count};
    return made;
}

void rig_in_place_files(struct rig *rig, struct lh_io_opts *opts)
{
    struct rig_in_place *made = rig->in_place;
    if (!made)
        return;
    made->file_first = opts->file_count;
    memcpy(made->io_files, opts->files, opts->file_count * sizeof(*opts->files));
    for (uint32_t i = 0; i < 2; i++)
        made->io_files[opts->file_count++] =
            (struct lh_io_file){.fd = made->fds[i], .direct = true};
    opts->files = made->io_files;
}

void rig_in_place_opts(struct rig *rig, struct lh_engine_opts *opts)
{
    struct rig_in_place *made = rig->in_place;
    if (!made)
        return;
    memcpy(made->units, rig->units, sizeof(made->units));
    made->units[UNIT].param_extent = LH_ENGINE_EXTENT_NONE;
    opts->units = made->units;
    opts->in_place = (struct lh_in_place_opts){.files = made->files,
                                               .file_count = 2,
                                               .file_first = made->file_first,
                                               .units = &made->unit,
                                               .unit_count = 1};
}

void rig_in_place_close(struct rig *rig)
{
    if (!rig->in_place)
        return;
    for (uint32_t i = 0; i < 2; i++)
        LH_CHECK(close(rig->in_place->fds[i]) == 0 && unlink(rig->in_place->paths[i]) == 0);
    free(rig->in_place);
    rig->in_place = NULL;
}

void rig_in_place_spoil(struct rig *rig)
{
    uint8_t byte = 0;
    int fd = open(rig->in_place->paths[1], O_RDWR | O_CLOEXEC);
    LH_CHECK(fd >= 0 && pread(fd, &byte, 1, SECOND_OFFSET + 700) == 1);
    byte ^= 1;
    LH_CHECK(pwrite(fd, &byte, 1, SECOND_OFFSET + 700) == 1 && fsync(fd) == 0 && close(fd) == 0);
}

void rig_in_place_cut(struct rig *rig)
{
    LH_CHECK(truncate(rig->in_place->paths[1], SECOND_OFFSET + 700) == 0);
}

bool rig_in_place_bad(struct rig *rig, uint32_t turn, struct lh_engine_opts *opts)
{
    struct rig_in_place *made = rig->in_place;
    static struct lh_in_place_run runs[2];
    static struct lh_in_place_move moves[MOVE_COUNT_MAX];
    static struct lh_in_place_unit unit;
    rig_in_place_opts(rig, opts);
    memcpy(runs, made->runs, sizeof(runs));
    memcpy(moves, made->moves, sizeof(moves));
    unit = made->unit;
    unit.runs = runs;
    unit.moves = moves;
    opts->in_place.units = &unit;
    switch (turn) {
    case 0:
        runs[1].offset += LH_BLOCK_BYTES; /* there is a gap */
        return true;
    case 1:
        runs[0].file_offset += 512; /* the offset is not aligned to a block */
        return true;
    case 2:
        runs[1].file_offset += LH_BLOCK_BYTES; /* the run begins after the file's end */
        return true;
    case 3:
        moves[1].to = moves[0].to; /* the move overwrites the one before */
        return true;
    case 4:
        moves[0].from = moves[0].to - 1; /* the move goes forward */
        return true;
    case 5:
        unit.checksum_count = 1;
        return true;
    case 6:
        unit.unit = RIG_UNIT_COUNT;
        return true;
    case 7:
        unit.unit = 0; /* the unit is trainable */
        return true;
    case 8:
        opts->in_place.unit_count = 0; /* no unit has this run */
        return true;
    case 9:
        moves[0].to += 8; /* the target is not aligned */
        return true;
    case 10:
        moves[0].to = 0; /* the move goes too far */
        return true;
    case 11:
        moves[0].bytes = FIRST_BYTES; /* the move reaches into the next run */
        return true;
    default:
        return false;
    }
}
