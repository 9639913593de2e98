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

/*
 * The packed unit: FP8 with blocks of 20 x 48, 64 plain bytes, and 4-bit values with quantized
 * scales. The last decoded bytes overlap the first packed ones.
 */
#define PACK_COUNT 3
#define PACK_COLUMNS 64
#define PACK_BYTES_FROM 43 /* after the end of FP8 */
#define PACK_NIBBLES_FROM 100
#define PACK_NIBBLES 2176
/* offsets in the run of scales: of FP8, and of the 4-bit values */
#define PACK_SCALES 20
#define PACK_SCALES_BYTES (2 * LH_BLOCK_BYTES * 6)
#define PACK_ABSMAX 10
#define PACK_TABLES 101

struct rig_in_place {
    struct lh_io_file io_files[LH_IO_FILE_COUNT_MAX];
    struct lh_in_place_file files[2];
    struct lh_in_place_run runs[2];
    struct lh_in_place_move moves[MOVE_COUNT_MAX];
    struct lh_in_place_pack packs[PACK_COUNT];
    uint32_t checksums[CHECKSUM_COUNT_MAX];
    uint32_t forgotten[CHECKSUM_COUNT_MAX];
    bool is_changed;
    struct lh_in_place_unit unit;
    struct lh_engine_unit units[RIG_UNIT_COUNT];
    char paths[2][8192];
    int fds[2];
    uint32_t file_first;
    uint8_t *kept_memory;
    uint64_t kept_bytes;
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

struct packed_sizes {
    uint64_t rows;
    uint64_t out_bytes;    /* of all decoded parameters */
    uint64_t first;        /* where the runs begin */
    uint64_t packed_bytes; /* of the first run */
    uint64_t scale_bytes;  /* of the second one */
};

static struct packed_sizes packed_sizes_of(const struct rig *rig)
{
    struct packed_sizes sizes = {.rows = rig->opts.in_place_large ? 36000 : 30};
    uint64_t count = sizes.rows * PACK_COLUMNS;
    uint64_t nibbles_end = SHIFT + count + PACK_BYTES_FROM + PACK_NIBBLES_FROM + PACK_NIBBLES / 2;
    sizes.out_bytes = 2 * count + 64 + 2 * PACK_NIBBLES;
    sizes.first = lh_align_up(
        lh_max_u64(2 * count - (SHIFT + count), sizes.out_bytes - nibbles_end), LH_BLOCK_BYTES);
    sizes.packed_bytes = lh_align_up(nibbles_end, LH_BLOCK_BYTES);
    sizes.scale_bytes = PACK_SCALES_BYTES;
    return sizes;
}

uint64_t rig_in_place_packed_bytes(const struct rig *rig)
{
    struct packed_sizes sizes = packed_sizes_of(rig);
    return sizes.first + sizes.packed_bytes + sizes.scale_bytes;
}

uint64_t rig_in_place_param_bytes(const struct rig *rig, uint32_t unit)
{
    return rig->opts.kept && unit == UNIT ? packed_sizes_of(rig).out_bytes : rig->units[unit].bytes;
}

static void packs_make(struct rig_in_place *made, const struct packed_sizes *sizes)
{
    uint64_t count = sizes->rows * PACK_COLUMNS;
    uint64_t from = sizes->first + SHIFT;
    uint64_t tables = sizes->first + sizes->packed_bytes + PACK_SCALES + 16384 + PACK_ABSMAX;
    made->packs[0] =
        (struct lh_in_place_pack){.unpack = {.format = LH_UNPACK_FORMAT_F8_E4M3,
                                             .dtype = LH_DTYPE_BF16,
                                             .rows = sizes->rows,
                                             .columns = PACK_COLUMNS,
                                             .block_rows = 20,
                                             .block_columns = 48},
                                  .from = from,
                                  .scales = sizes->first + sizes->packed_bytes + PACK_SCALES};
    made->packs[1] = (struct lh_in_place_pack){.unpack = {.rows = 1, .columns = 64},
                                               .from = from + count + PACK_BYTES_FROM,
                                               .to = 2 * count};
    made->packs[2] =
        (struct lh_in_place_pack){.unpack = {.format = LH_UNPACK_FORMAT_NIBBLES,
                                             .dtype = LH_DTYPE_F16,
                                             .rows = 1,
                                             .columns = PACK_NIBBLES,
                                             .block_rows = 1,
                                             .block_columns = 64,
                                             .scale_type = LH_UNPACK_SCALE_NESTED,
                                             .nested_block = 16,
                                             .nested_offset = 0.25f},
                                  .from = from + count + PACK_BYTES_FROM + PACK_NIBBLES_FROM,
                                  .to = 2 * count + 64,
                                  .scales = tables,
                                  .table = tables + PACK_TABLES,
                                  .nested = tables + PACK_TABLES + 64,
                                  .nested_table = tables + PACK_TABLES + 128};
}

/* What memory contains after the unit was read and decoded. */
static void packed_expect(const struct rig_in_place *made, const struct packed_sizes *sizes,
                          uint8_t *state)
{
    uint8_t *out = calloc(1, sizes->out_bytes);
    LH_CHECK(out);
    for (uint32_t i = 0; i < PACK_COUNT; i++) {
        const struct lh_in_place_pack *pack = &made->packs[i];
        const struct lh_unpack_source source = {state + pack->from,
                                                state + pack->scales,
                                                state + pack->table,
                                                state + pack->nested,
                                                state + pack->nested_table,
                                                NULL,
                                                NULL};
        lh_unpack_ref(&pack->unpack, &source, 0, lh_unpack_count(&pack->unpack), out + pack->to);
    }
    memcpy(state, out, sizes->out_bytes);
    free(out);
}

/* Make a packed unit of one with two runs: the first is in the second file. */
static void packed_make(struct rig_in_place *made, const struct rig *rig, uint8_t *state)
{
    struct packed_sizes sizes = packed_sizes_of(rig);
    made->fds[0] = file_make(made->paths[0], state + sizes.first + sizes.packed_bytes,
                             sizes.scale_bytes, FIRST_OFFSET);
    made->fds[1] =
        file_make(made->paths[1], state + sizes.first, sizes.packed_bytes - 5, SECOND_OFFSET);
    memset(state + sizes.first + sizes.packed_bytes - 5, 0, 5);
    made->files[0] = (struct lh_in_place_file){made->paths[0], FIRST_OFFSET + sizes.scale_bytes};
    made->files[1] =
        (struct lh_in_place_file){made->paths[1], SECOND_OFFSET + sizes.packed_bytes - 5};
    made->runs[0] = (struct lh_in_place_run){.file = 1,
                                             .file_offset = SECOND_OFFSET,
                                             .offset = sizes.first,
                                             .bytes = sizes.packed_bytes};
    made->runs[1] = (struct lh_in_place_run){.file = 0,
                                             .file_offset = FIRST_OFFSET,
                                             .offset = sizes.first + sizes.packed_bytes,
                                             .bytes = sizes.scale_bytes};
    uint32_t count = 0;
    for (uint32_t i = 0; i < 2; i++) {
        const struct lh_in_place_run *run = &made->runs[i];
        made->runs[i].checksum_first = count;
        for (uint64_t at = 0; at < run->bytes; at += LH_CHECKSUM_BYTES) {
            LH_CHECK(count < CHECKSUM_COUNT_MAX);
            made->checksums[count++] = lh_crc32c(0, state + run->offset + at,
                                                 lh_min_u64(LH_CHECKSUM_BYTES, run->bytes - at));
        }
    }
    packs_make(made, &sizes);
    packed_expect(made, &sizes, state);
    made->unit = (struct lh_in_place_unit){.unit = UNIT,
                                           .runs = made->runs,
                                           .run_count = 2,
                                           .packs = made->packs,
                                           .pack_count = PACK_COUNT,
                                           .checksums = made->checksums,
                                           .checksum_count = count};
    made->kept_bytes = rig->opts.kept ? sizes.packed_bytes + sizes.scale_bytes : 0;
    if (rig->opts.kept)
        LH_CHECK(posix_memalign((void **)&made->kept_memory, LH_BLOCK_BYTES, made->kept_bytes) ==
                 0);
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
    for (uint32_t i = 0; i < 2; i++)
        snprintf(made->paths[i], sizeof(made->paths[i]), "%s/%s-in-place-%u", fixture_root(),
                 rig->name, i);
    if (rig->opts.packed) {
        packed_make(made, rig, state);
        return made;
    }
    memset(state + FIRST_BYTES + second_end, 0, second_bytes - second_end);
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

void rig_in_place_forget(struct rig *rig, bool is_changed)
{
    struct rig_in_place *made = rig->in_place;
    memcpy(made->forgotten, made->checksums, sizeof(made->checksums));
    memset(made->checksums, 0, sizeof(made->checksums));
    made->is_changed = is_changed;
}

uint32_t rig_in_place_known(const struct rig *rig)
{
    const struct rig_in_place *made = rig->in_place;
    uint32_t count = 0;
    for (uint32_t i = 0; i < made->unit.checksum_count; i++)
        count += made->checksums[i] != 0 && made->checksums[i] == made->forgotten[i];
    return count;
}

static bool is_unchanged(const void *context, uint32_t file)
{
    const struct rig_in_place *made = context;
    LH_CHECK(file < 2);
    return !made->is_changed;
}

void rig_in_place_opts(struct rig *rig, struct lh_engine_opts *opts)
{
    struct rig_in_place *made = rig->in_place;
    if (!made)
        return;
    memcpy(made->units, rig->units, sizeof(made->units));
    made->units[UNIT].param_extent = LH_ENGINE_EXTENT_NONE;
    opts->units = made->units;
    opts->in_place = (struct lh_in_place_opts){
        .files = made->files,
        .file_count = 2,
        .file_first = made->file_first,
        .units = &made->unit,
        .unit_count = 1,
        .kept_memory = made->kept_memory,
        .kept_bytes = made->kept_bytes - (rig->opts.kept_short ? LH_BLOCK_BYTES : 0),
        .is_unchanged = is_unchanged,
        .context = made};
}

void rig_in_place_close(struct rig *rig)
{
    if (!rig->in_place)
        return;
    for (uint32_t i = 0; i < 2; i++)
        LH_CHECK(close(rig->in_place->fds[i]) == 0 && unlink(rig->in_place->paths[i]) == 0);
    free(rig->in_place->kept_memory);
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

static bool packed_bad(struct rig *rig, uint32_t turn, struct lh_engine_opts *opts)
{
    struct rig_in_place *made = rig->in_place;
    static struct lh_in_place_run runs[2];
    static struct lh_in_place_pack packs[PACK_COUNT];
    static struct lh_in_place_unit unit;
    static const struct lh_in_place_move move = {0};
    memcpy(runs, made->runs, sizeof(runs));
    memcpy(packs, made->packs, sizeof(packs));
    unit = made->unit;
    unit.runs = runs;
    unit.packs = packs;
    opts->in_place.units = &unit;
    switch (turn) {
    case 0:
        packs[0].to += 8; /* the target is not aligned */
        return true;
    case 1:
        packs[1].to -= 64; /* a parameter overwrites the one before */
        return true;
    case 2:
        packs[2].from = packs[1].from; /* the packed bytes do not ascend */
        return true;
    case 3: /* it ends just after its packed bytes, and before the scales */
        packs[2].to = lh_align_up(packs[2].from + PACK_NIBBLES / 2 - 2 * PACK_NIBBLES, 64);
        return true;
    case 4:
        packs[0].scales = packs[0].from; /* the scales are overwritten */
        return true;
    case 5:
        packs[2].table = 0;
        return true;
    case 6:
        packs[2].nested = rig->units[UNIT].bytes - 4; /* they end after the unit */
        return true;
    case 7:
        packs[2].nested_table = UINT64_MAX - 8;
        return true;
    case 8:
        packs[2].from = runs[1].offset - 100; /* from one run into the next */
        return true;
    case 9:
        packs[0].unpack.block_rows = 0;
        return true;
    case 10:
        packs[1].scales = 64; /* plain bytes have no scales */
        return true;
    case 11:
        runs[1].offset -= LH_BLOCK_BYTES;
        return true;
    case 12:
        unit.pack_count = 0; /* the runs do not begin at 0 */
        return true;
    case 13:
        packs[0].unpack.rows = UINT64_MAX / PACK_COLUMNS;
        return true;
    case 14:
        runs[0].offset += 512;
        return true;
    case 15:
        unit.run_count = 0;
        return true;
    case 16:
        unit.move_count = 1;
        unit.moves = &move;
        return true;
    default:
        return false;
    }
}

bool rig_in_place_bad(struct rig *rig, uint32_t turn, struct lh_engine_opts *opts)
{
    if (rig->opts.packed) {
        rig_in_place_opts(rig, opts);
        return packed_bad(rig, turn, opts);
    }
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
