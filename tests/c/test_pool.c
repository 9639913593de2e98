#include "mem/pool.h"

#include "lh_test.h"

#define SLAB_BYTES (2 * LH_BLOCK_BYTES)
#define SLAB_COUNT 3

#ifdef __SANITIZE_ADDRESS__
#define IS_POISONED 1
#else
#define IS_POISONED 0
#endif

static _Alignas(4096) uint8_t memory[SLAB_COUNT * SLAB_BYTES];

struct misuse {
    struct lh_pool *pool;
    void *pointer;
};

static void release(void *context)
{
    struct misuse *misuse = context;
    lh_pool_release(misuse->pool, misuse->pointer);
}

static void deinit(void *context)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    lh_pool_deinit(context, &alloc);
}

static void write_byte(void *context)
{
    *(volatile uint8_t *)context = 1;
}

int main(void)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_error err = {0};
    struct lh_pool pool;

    lh_test_name("a pool that O_DIRECT could not use is refused with the numbers");
    LH_CHECK(lh_pool_init(&pool, &alloc, memory, 5000, 3, &err) == -EINVAL);
    LH_CHECK(strstr(err.message, "5000") && strstr(err.message, "4096") && !pool.base);
    LH_CHECK(lh_pool_init(&pool, &alloc, memory, 0, 3, &err) == -EINVAL);
    LH_CHECK(lh_pool_init(&pool, &alloc, memory + 512, SLAB_BYTES, 3, &err) == -EINVAL);
    LH_CHECK(lh_pool_init(&pool, &alloc, memory, SLAB_BYTES, 0, &err) == -EINVAL);
    LH_CHECK(lh_pool_init(&pool, &alloc, memory, UINT64_C(1) << 62, 4, &err) == -EINVAL);

    lh_test_name("no memory at the N-th allocation leaves nothing behind");
    for (int tries = 0; tries < 2; tries++) {
        alloc.fail_after = tries;
        LH_CHECK(lh_pool_init(&pool, &alloc, memory, SLAB_BYTES, SLAB_COUNT, &err) == -ENOMEM);
        LH_CHECK(alloc.live_count == 0 && !pool.base);
    }
    alloc.fail_after = 2;
    LH_CHECK(lh_pool_init(&pool, &alloc, memory, SLAB_BYTES, SLAB_COUNT, &err) == 0);
    alloc.fail_after = -1;

    lh_test_name("slabs are distinct, inside the memory, and come to an end");
    uint8_t *slabs[SLAB_COUNT];
    for (int i = 0; i < SLAB_COUNT; i++) {
        slabs[i] = lh_pool_acquire(&pool);
        LH_CHECK(slabs[i] == memory + (size_t)i * SLAB_BYTES);
        memset(slabs[i], i, SLAB_BYTES);
    }
    LH_CHECK(!lh_pool_acquire(&pool) && pool.free_count == 0);
    for (int i = 0; i < SLAB_COUNT; i++)
        LH_CHECK(slabs[i][0] == i && slabs[i][SLAB_BYTES - 1] == i);

    lh_test_name("a released slab is the next one given");
    lh_pool_release(&pool, slabs[1]);
    LH_CHECK(pool.free_count == 1);
    LH_CHECK(lh_pool_acquire(&pool) == slabs[1]);

    lh_test_name("misuse is caught: twice released, not a slab, outside, held at the end");
    lh_pool_release(&pool, slabs[1]);
    struct misuse misuse = {&pool, slabs[1]};
    LH_CHECK(lh_test_aborts(release, &misuse));
    misuse.pointer = slabs[0] + LH_BLOCK_BYTES;
    LH_CHECK(lh_test_aborts(release, &misuse));
    misuse.pointer = memory + sizeof(memory);
    LH_CHECK(lh_test_aborts(release, &misuse));
    misuse.pointer = (void *)((uintptr_t)memory - SLAB_BYTES);
    LH_CHECK(lh_test_aborts(release, &misuse));
    LH_CHECK(lh_test_aborts(deinit, &pool));

    lh_test_name("AddressSanitizer sees a write to a free slab, and to no other");
    LH_CHECK(lh_test_aborts(write_byte, slabs[1]) == IS_POISONED);
    LH_CHECK(lh_test_aborts(write_byte, slabs[1] + SLAB_BYTES - 1) == IS_POISONED);
    LH_CHECK(!lh_test_aborts(write_byte, slabs[0]) && !lh_test_aborts(write_byte, slabs[2]));

    lh_test_name("after the pool its memory is ordinary again");
    lh_pool_release(&pool, slabs[0]);
    lh_pool_release(&pool, slabs[2]);
    lh_pool_deinit(&pool, &alloc);
    memset(memory, 9, sizeof(memory));
    LH_CHECK(alloc.live_count == 0);
    return 0;
}
