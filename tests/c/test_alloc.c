#include "base/alloc.h"

#include "lh_test.h"

/* Something that needs three allocations, undone in reverse order when one is refused. */
static int three_create(struct lh_alloc *alloc, void **three)
{
    int count = 0;
    for (; count < 3; count++) {
        three[count] = lh_alloc_zeroed(alloc, 1, 100);
        if (!three[count])
            break;
    }
    if (count == 3)
        return 0;
    while (count > 0)
        lh_free(alloc, three[--count]);
    return -1;
}

static void free_unknown(void *context)
{
    static char unknown[1];
    lh_free(context, unknown);
}

int main(void)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;

    lh_test_name("memory is zeroed and aligned to 64 bytes for every size");
    for (uint64_t bytes = 0; bytes < 5000; bytes = bytes * 2 + 1) {
        uint8_t *dirty = lh_alloc_zeroed(&alloc, 1, bytes);
        LH_CHECK(dirty && (uintptr_t)dirty % 64 == 0);
        memset(dirty, 0xff, bytes);
        lh_free(&alloc, dirty);
        uint8_t *pointer = lh_alloc_zeroed(&alloc, bytes, 1);
        LH_CHECK(pointer);
        for (uint64_t i = 0; i < bytes; i++)
            LH_CHECK(pointer[i] == 0);
        lh_free(&alloc, pointer);
    }
    LH_CHECK(alloc.live_count == 0);

    lh_test_name("a product that overflows, or that no machine has, is refused");
    LH_CHECK(!lh_alloc_zeroed(&alloc, UINT64_C(1) << 33, UINT64_C(1) << 32));
    LH_CHECK(!lh_alloc_zeroed(&alloc, 1, UINT64_MAX));
    LH_CHECK(alloc.live_count == 0);

    lh_test_name("a sealed allocator refuses, counts the attempt, and still frees");
    void *early = lh_alloc_zeroed(&alloc, 1, 1);
    LH_CHECK(early && alloc.live_count == 1 && alloc.live_bytes >= 1);
    lh_alloc_seal(&alloc);
    LH_CHECK(!lh_alloc_zeroed(&alloc, 1, 1));
    LH_CHECK(alloc.refused_count == 1 && alloc.live_count == 1);
    lh_free(&alloc, early);
    lh_alloc_unseal(&alloc);
    LH_CHECK(alloc.live_count == 0 && alloc.live_bytes == 0);
    early = lh_alloc_zeroed(&alloc, 1, 1);
    LH_CHECK(early);
    lh_free(&alloc, early);
    lh_free(&alloc, NULL);

    lh_test_name("fail_after lets exactly that many allocations succeed, and stays failed");
    void *three[3];
    int tries = 0;
    for (;; tries++) {
        alloc.fail_after = tries;
        if (three_create(&alloc, three) == 0)
            break;
        LH_CHECK(alloc.live_count == 0);
        LH_CHECK(alloc.fail_after == 0 && !lh_alloc_zeroed(&alloc, 1, 1));
    }
    LH_CHECK(tries == 3 && alloc.live_count == 3);
    alloc.fail_after = -1;
    for (int i = 0; i < 3; i++)
        lh_free(&alloc, three[i]);
    LH_CHECK(alloc.live_count == 0);

    lh_test_name("to free what was never allocated is a broken invariant");
    LH_CHECK(lh_test_aborts(free_unknown, &alloc));
    return 0;
}
