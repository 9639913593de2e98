/* Test striping: every byte has one place, files are balanced, pieces are few. */
#include "lh_test.h"
#include "store/extent.h"

#define EXTENT_MAX 60
#define GROUP_COUNT 2

struct shape_fixture {
    struct lh_store_shape shape;
    struct lh_store_layout layout;
    struct lh_store_extent_desc extents[EXTENT_MAX];
    uint8_t slot_counts[GROUP_COUNT];
    uint8_t tail_files[EXTENT_MAX * LH_STORE_SLOT_COUNT_MAX];
    uint64_t data_offset[LH_STORE_DIRECTORY_COUNT_MAX];
    struct lh_alloc alloc;
};

static void shape_make(struct shape_fixture *fixture, const uint64_t *weights, uint32_t file_count,
                       uint32_t extent_count, uint64_t *seed)
{
    memset(fixture, 0, sizeof(*fixture));
    fixture->alloc = (struct lh_alloc)LH_ALLOC_INIT;
    fixture->slot_counts[0] = 2;
    fixture->slot_counts[1] = 1;
    for (uint32_t extent = 0; extent < extent_count; extent++) {
        /* Make many small extents, some with several stripes, some that end on a stripe. */
        uint64_t kind = lh_test_random(seed) % 3;
        uint64_t block_max = kind == 0 ? 8 : kind == 1 ? 600 : 6000;
        uint64_t bytes = (1 + lh_test_random(seed) % block_max) * LH_BLOCK_BYTES;
        if (lh_test_random(seed) % 5 == 0)
            bytes = (1 + lh_test_random(seed) % 4) * LH_STORE_STRIPE_BYTES;
        fixture->extents[extent].bytes = bytes;
        fixture->extents[extent].group = lh_test_random(seed) % 3 == 0;
    }
    fixture->shape = (struct lh_store_shape){
        .file_count = file_count,
        .extent_count = extent_count,
        .group_count = GROUP_COUNT,
        .stripe_bytes = LH_STORE_STRIPE_BYTES,
        .extents = fixture->extents,
        .slot_counts = fixture->slot_counts,
        .tail_files = fixture->tail_files,
    };
    fixture->shape.cycle_stripes = lh_store_cycle_plan(weights, file_count, fixture->shape.cycle);
    lh_store_tails_plan(&fixture->shape, fixture->tail_files);
    for (uint32_t file = 0; file < file_count; file++)
        fixture->data_offset[file] = (1 + file) * LH_MIB;
    LH_CHECK(lh_store_layout_init(&fixture->layout, &fixture->shape, fixture->data_offset,
                                  &fixture->alloc, NULL) == 0);
}

static void shape_drop(struct shape_fixture *fixture)
{
    lh_store_layout_deinit(&fixture->layout, &fixture->alloc);
    LH_CHECK(fixture->alloc.live_count == 0);
}

static void weights_make(uint64_t *weights, uint32_t file_count, uint64_t *seed)
{
    uint64_t kind = lh_test_random(seed) % 3;
    for (uint32_t file = 0; file < file_count; file++)
        weights[file] = kind == 0   ? 1 + lh_test_random(seed) % 4
                        : kind == 1 ? 1 + lh_test_random(seed) % 8000000000
                                    : 1 + lh_test_random(seed) % LH_STORE_WEIGHT_MAX;
}

static void test_cycle(void)
{
    lh_test_name("every prefix of a cycle gives each file its share, rounded down or up");
    uint64_t seed = 1;
    for (int round = 0; round < 400; round++) {
        uint64_t weights[LH_STORE_DIRECTORY_COUNT_MAX];
        uint8_t cycle[LH_STORE_CYCLE_STRIPES_MAX];
        uint32_t file_count = 1 + lh_test_random(&seed) % LH_STORE_DIRECTORY_COUNT_MAX;
        weights_make(weights, file_count, &seed);
        uint32_t length = lh_store_cycle_plan(weights, file_count, cycle);
        LH_CHECK(length >= file_count && length <= LH_STORE_CYCLE_STRIPES_MAX);
        uint64_t shares[LH_STORE_DIRECTORY_COUNT_MAX] = {0};
        uint64_t held[LH_STORE_DIRECTORY_COUNT_MAX] = {0};
        double sum = 0;
        for (uint32_t stripe = 0; stripe < length; stripe++)
            shares[cycle[stripe]]++;
        for (uint32_t file = 0; file < file_count; file++)
            sum += (double)weights[file];
        for (uint32_t file = 0; file < file_count; file++) {
            double due = (double)weights[file] / sum * length;
            LH_CHECK(shares[file] >= 1);
            /* One more than rounding: weights too small for a share were given one. */
            LH_CHECK((double)shares[file] > due - file_count && (double)shares[file] < due + 1.01);
        }
        for (uint32_t stripe = 0; stripe < length; stripe++) {
            held[cycle[stripe]]++;
            for (uint32_t file = 0; file < file_count; file++) {
                uint64_t due_floor = (stripe + 1) * shares[file] / length;
                LH_CHECK(held[file] >= due_floor);
                LH_CHECK(held[file] <= lh_div_ceil((stripe + 1) * shares[file], length));
            }
        }
    }
}

static void test_cycle_known(void)
{
    lh_test_name("equal weights take turns, and 2 : 1 is exact");
    uint8_t cycle[LH_STORE_CYCLE_STRIPES_MAX];
    LH_CHECK(lh_store_cycle_plan(NULL, 3, cycle) == 3);
    LH_CHECK(cycle[0] != cycle[1] && cycle[1] != cycle[2] && cycle[0] != cycle[2]);
    const uint64_t weights[2] = {7000000000, 3500000000};
    LH_CHECK(lh_store_cycle_plan(weights, 2, cycle) == 3);
    LH_CHECK(cycle[0] + cycle[1] + cycle[2] == 1);
    const uint64_t extreme[2] = {LH_STORE_WEIGHT_MAX, 1};
    LH_CHECK(lh_store_cycle_plan(extreme, 2, cycle) == LH_STORE_CYCLE_STRIPES_MAX);

    lh_test_name("a file whose weight is next to nothing still gets a stripe, and no more");
    uint64_t tiny[LH_STORE_DIRECTORY_COUNT_MAX];
    uint32_t shares[LH_STORE_DIRECTORY_COUNT_MAX] = {0};
    for (uint32_t file = 0; file < LH_STORE_DIRECTORY_COUNT_MAX; file++)
        tiny[file] = file == 3 ? LH_STORE_WEIGHT_MAX : 1;
    LH_CHECK(lh_store_cycle_plan(tiny, LH_STORE_DIRECTORY_COUNT_MAX, cycle) == 1024);
    for (uint32_t stripe = 0; stripe < 1024; stripe++)
        shares[cycle[stripe]]++;
    for (uint32_t file = 0; file < LH_STORE_DIRECTORY_COUNT_MAX; file++)
        LH_CHECK(shares[file] == (file == 3 ? 1024 - 15 : 1));
}

struct block_owner {
    uint32_t place; /* the owner's place + 1; 0: no owner */
    uint64_t block;
};

/* Map every block separately, and note which extent owns it. */
static void place_claim(const struct shape_fixture *fixture, uint32_t place, uint64_t bytes,
                        struct block_owner *const *owners)
{
    for (uint64_t offset = 0; offset < bytes; offset += LH_BLOCK_BYTES) {
        struct lh_store_piece piece;
        LH_CHECK(lh_store_layout_map(&fixture->layout, place, offset, LH_BLOCK_BYTES, &piece, 1) ==
                 1);
        uint32_t file = piece.file_index;
        LH_CHECK(piece.bytes == LH_BLOCK_BYTES && piece.buffer_offset == 0);
        LH_CHECK(file < fixture->layout.file_count);
        LH_CHECK(piece.file_offset >= fixture->data_offset[file]);
        LH_CHECK(piece.file_offset + piece.bytes <= fixture->layout.file_bytes[file]);
        LH_CHECK(lh_is_aligned(piece.file_offset, LH_BLOCK_BYTES));
        struct block_owner *owner = &owners[file][piece.file_offset / LH_BLOCK_BYTES];
        LH_CHECK(owner->place == 0);
        *owner = (struct block_owner){.place = place + 1, .block = offset / LH_BLOCK_BYTES};
    }
}

/* Any range gives exactly the blocks that were claimed one by one, in pieces that cannot join. */
static void range_check(const struct shape_fixture *fixture, uint32_t place, uint64_t offset,
                        uint64_t bytes, struct block_owner *const *owners)
{
    struct lh_store_piece pieces[LH_STORE_PIECE_COUNT_MAX];
    int count = lh_store_layout_map(&fixture->layout, place, offset, bytes, pieces,
                                    LH_STORE_PIECE_COUNT_MAX);
    LH_CHECK(count >= 0 && (bytes == 0) == (count == 0));
    LH_CHECK((uint64_t)count <= 2 + bytes / LH_STORE_STRIPE_BYTES);
    uint64_t done = 0;
    for (int index = 0; index < count; index++) {
        const struct lh_store_piece *piece = &pieces[index];
        LH_CHECK(piece->buffer_offset == done);
        for (uint64_t inside = 0; inside < piece->bytes; inside += LH_BLOCK_BYTES) {
            const struct block_owner *owner =
                &owners[piece->file_index][(piece->file_offset + inside) / LH_BLOCK_BYTES];
            LH_CHECK(owner->place == place + 1);
            LH_CHECK(owner->block == (offset + done + inside) / LH_BLOCK_BYTES);
        }
        LH_CHECK(index == 0 || piece->file_index != piece[-1].file_index ||
                 piece->file_offset != piece[-1].file_offset + piece[-1].bytes);
        done += piece->bytes;
    }
    LH_CHECK(done == bytes);
    if (count > 1)
        LH_CHECK(lh_store_layout_map(&fixture->layout, place, offset, bytes, pieces,
                                     (uint32_t)count - 1) == -E2BIG);
}

static void test_every_byte_once(void)
{
    lh_test_name("every byte of every slot has one place, and shares it with none");
    uint64_t seed = 2;
    static struct shape_fixture fixture;
    for (int round = 0; round < 60; round++) {
        uint64_t weights[LH_STORE_DIRECTORY_COUNT_MAX];
        uint32_t file_count = 1 + lh_test_random(&seed) % 5;
        uint32_t extent_count = 1 + lh_test_random(&seed) % 12;
        weights_make(weights, file_count, &seed);
        shape_make(&fixture, weights, file_count, extent_count, &seed);
        struct block_owner *owners[LH_STORE_DIRECTORY_COUNT_MAX] = {NULL};
        uint64_t claimed_bytes = 0;
        uint64_t file_bytes = 0;
        for (uint32_t file = 0; file < file_count; file++) {
            uint64_t block_count = fixture.layout.file_bytes[file] / LH_BLOCK_BYTES;
            owners[file] = calloc(block_count, sizeof(struct block_owner));
            LH_CHECK(owners[file] != NULL);
            file_bytes += fixture.layout.file_bytes[file] - fixture.data_offset[file];
        }
        for (uint32_t place = 0; place < 2 * extent_count; place++) {
            const struct lh_store_extent_desc *desc = &fixture.extents[place / 2];
            if (place % 2 >= fixture.slot_counts[desc->group])
                continue;
            place_claim(&fixture, place, desc->bytes, owners);
            claimed_bytes += desc->bytes;
            range_check(&fixture, place, 0, desc->bytes, owners);
            for (int range = 0; range < 20; range++) {
                uint64_t block_count = desc->bytes / LH_BLOCK_BYTES;
                uint64_t first = lh_test_random(&seed) % (block_count + 1);
                uint64_t count = lh_test_random(&seed) % (block_count - first + 1);
                range_check(&fixture, place, first * LH_BLOCK_BYTES, count * LH_BLOCK_BYTES,
                            owners);
            }
        }
        /* With the checked bounds, no space is wasted either. */
        LH_CHECK(claimed_bytes == file_bytes);
        for (uint32_t file = 0; file < file_count; file++)
            free(owners[file]);
        shape_drop(&fixture);
    }
}

static void test_checksum_blocks(void)
{
    lh_test_name("what one checksum covers lies in one piece of one file");
    uint64_t seed = 3;
    static struct shape_fixture fixture;
    shape_make(&fixture, NULL, 3, EXTENT_MAX, &seed);
    for (uint32_t extent = 0; extent < EXTENT_MAX; extent++) {
        uint64_t bytes = fixture.extents[extent].bytes;
        for (uint64_t offset = 0; offset < bytes; offset += LH_CHECKSUM_BYTES) {
            struct lh_store_piece piece;
            LH_CHECK(lh_store_layout_map(&fixture.layout, lh_store_place_index(extent, 0), offset,
                                         lh_min_u64(LH_CHECKSUM_BYTES, bytes - offset), &piece,
                                         1) == 1);
        }
    }
    shape_drop(&fixture);
}

static void test_balance(void)
{
    lh_test_name("a file holds at most two stripes above its share of any store");
    uint64_t seed = 4;
    static struct shape_fixture fixture;
    for (int round = 0; round < 200; round++) {
        uint64_t weights[LH_STORE_DIRECTORY_COUNT_MAX];
        uint32_t file_count = 2 + lh_test_random(&seed) % 15;
        weights_make(weights, file_count, &seed);
        shape_make(&fixture, weights, file_count, EXTENT_MAX, &seed);
        uint64_t total_bytes = 0;
        for (uint32_t file = 0; file < file_count; file++)
            total_bytes += fixture.layout.file_bytes[file] - fixture.data_offset[file];
        for (uint32_t file = 0; file < file_count; file++) {
            double due_bytes =
                (double)total_bytes * fixture.layout.shares[file] / fixture.shape.cycle_stripes;
            double held_bytes =
                (double)(fixture.layout.file_bytes[file] - fixture.data_offset[file]);
            LH_CHECK(held_bytes <= due_bytes + 2.0 * (double)LH_STORE_STRIPE_BYTES);
        }
        shape_drop(&fixture);
    }
}

static void test_small_extents_rotate(void)
{
    lh_test_name("small extents that alternate in size do not all fall on the same files");
    static struct shape_fixture fixture;
    uint64_t seed = 5;
    shape_make(&fixture, NULL, 2, EXTENT_MAX, &seed);
    lh_store_layout_deinit(&fixture.layout, &fixture.alloc);
    for (uint32_t extent = 0; extent < EXTENT_MAX; extent++) {
        fixture.extents[extent].bytes = extent % 2 ? LH_BLOCK_BYTES : 256 * LH_BLOCK_BYTES;
        fixture.extents[extent].group = 1;
    }
    lh_store_tails_plan(&fixture.shape, fixture.tail_files);
    LH_CHECK(lh_store_layout_init(&fixture.layout, &fixture.shape, fixture.data_offset,
                                  &fixture.alloc, NULL) == 0);
    uint64_t first = fixture.layout.file_bytes[0] - fixture.data_offset[0];
    uint64_t second = fixture.layout.file_bytes[1] - fixture.data_offset[1];
    LH_CHECK(lh_max_u64(first, second) - lh_min_u64(first, second) <= LH_MIB);
    shape_drop(&fixture);
}

static void test_no_memory(void)
{
    lh_test_name("a layout without memory leaves nothing behind");
    static struct shape_fixture fixture;
    uint64_t seed = 6;
    shape_make(&fixture, NULL, 2, 5, &seed);
    shape_drop(&fixture);
    for (int64_t after = 0; after < 2; after++) {
        fixture.alloc.fail_after = after;
        LH_CHECK(lh_store_layout_init(&fixture.layout, &fixture.shape, fixture.data_offset,
                                      &fixture.alloc, NULL) == -ENOMEM);
        LH_CHECK(fixture.alloc.live_count == 0 && fixture.layout.places == NULL);
    }
}

int main(void)
{
    test_cycle();
    test_cycle_known();
    test_every_byte_once();
    test_checksum_blocks();
    test_balance();
    test_small_extents_rotate();
    test_no_memory();
    return 0;
}
