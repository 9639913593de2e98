#include "mem/arena.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include "lh_test.h"

#define ARENA_BYTES (3 * LH_HUGE_PAGE_BYTES)

/* Return how many of the arena's small pages are in memory. */
static uint64_t resident_count(const struct lh_arena *arena)
{
    static unsigned char in_memory[ARENA_BYTES / 4096];
    uint64_t count = 0;
    LH_CHECK(arena->bytes <= ARENA_BYTES);
    LH_CHECK(mincore(arena->base, arena->bytes, in_memory) == 0);
    for (uint64_t i = 0; i < arena->bytes / 4096; i++)
        count += in_memory[i] & 1;
    return count;
}

/* Whether all pages of an arena are in memory. */
static bool is_resident(const struct lh_arena *arena)
{
    unsigned char in_memory[512];
    for (uint64_t first = 0; first < arena->bytes; first += sizeof(in_memory) * 4096) {
        LH_CHECK(mincore(arena->base + first, sizeof(in_memory) * 4096, in_memory) == 0);
        for (size_t i = 0; i < sizeof(in_memory); i++) {
            if (!(in_memory[i] & 1))
                return false;
        }
    }
    return true;
}

static void test_large(struct lh_alloc *alloc)
{
    lh_test_name("several threads allocate all pages of an arena");
    const uint64_t sizes[] = {UINT64_C(256) << 20, (UINT64_C(512) << 20) + LH_HUGE_PAGE_BYTES};
    for (size_t i = 0; i < LH_COUNT_OF(sizes); i++) {
        struct lh_error err = {0};
        struct lh_arena *arena = NULL;
        struct lh_arena_opts opts = {.bytes = sizes[i], .numa_node = -1};
        LH_CHECK(lh_arena_create(&opts, alloc, &arena, &err) == 0);
        LH_CHECK(arena->bytes == sizes[i] && (LH_TEST_IS_EMULATED || is_resident(arena)));
        lh_arena_destroy(arena, alloc);
    }
}

static void test_later(struct lh_alloc *alloc)
{
    lh_test_name("pages of the part that is wanted later are allocated when they are used");
    struct lh_error err = {0};
    struct lh_arena *arena = NULL;
    struct lh_arena_opts opts = {
        .bytes = ARENA_BYTES, .later_bytes = 2 * LH_HUGE_PAGE_BYTES + 4096, .numa_node = -1};
    LH_CHECK(lh_arena_create(&opts, alloc, &arena, &err) == 0);
    LH_CHECK(LH_TEST_IS_EMULATED || resident_count(arena) == LH_HUGE_PAGE_BYTES / 4096);
    LH_CHECK(arena->base[0] == 0 && arena->base[arena->bytes - 1] == 0);
    memset(arena->base, 1, arena->bytes);
    LH_CHECK(LH_TEST_IS_EMULATED || resident_count(arena) == ARENA_BYTES / 4096);
    lh_arena_destroy(arena, alloc);
    opts.later_bytes = opts.bytes;
    LH_CHECK(lh_arena_create(&opts, alloc, &arena, &err) == 0);
    LH_CHECK(LH_TEST_IS_EMULATED || resident_count(arena) == 0);
    lh_arena_destroy(arena, alloc);
}

static void read_byte(void *context)
{
    (void)*(volatile uint8_t *)context;
}

static uint64_t mapping_bytes(void)
{
    uint64_t kib = 0;
    LH_CHECK(lh_mem_field_read("/proc/self/status", "VmSize", &kib) == 0);
    return kib * LH_KIB;
}

static void test_refusals(struct lh_alloc *alloc)
{
    struct lh_error err = {0};
    struct lh_arena *arena = NULL;
    struct lh_arena_opts opts = {.bytes = ARENA_BYTES, .numa_node = -1};

    lh_test_name("what the machine does not have is refused with both numbers, and not touched");
    uint64_t available_bytes = lh_mem_available_bytes();
    LH_CHECK(available_bytes > 0 && available_bytes < UINT64_MAX);
    opts.bytes = lh_align_up(2 * available_bytes, LH_HUGE_PAGE_BYTES);
    LH_CHECK(lh_arena_create(&opts, alloc, &arena, &err) == -ENOMEM && !arena);
    char asked[32];
    snprintf(asked, sizeof(asked), "%" PRIu64, opts.bytes);
    LH_CHECK(strstr(err.message, asked) && strstr(err.message, "are available"));
    opts.bytes = UINT64_MAX;
    LH_CHECK(lh_arena_create(&opts, alloc, &arena, &err) == -ENOMEM && !arena);
    opts.bytes = 0;
    LH_CHECK(lh_arena_create(&opts, alloc, &arena, &err) == -EINVAL && !arena);
    opts.bytes = ARENA_BYTES;
    alloc->fail_after = 0;
    LH_CHECK(lh_arena_create(&opts, alloc, &arena, &err) == -ENOMEM && !arena);
    alloc->fail_after = -1;
    LH_CHECK(alloc->live_count == 0);
}

static void test_placement(struct lh_alloc *alloc)
{
    struct lh_error err = {0};
    struct lh_arena *arena = NULL;
    struct lh_arena_opts opts = {.bytes = ARENA_BYTES, .numa_node = -1};

    lh_test_name("the caller's NUMA node serves, one that is not there is refused");
    LH_CHECK(lh_numa_node_count() >= 1);
    opts.numa_node = lh_numa_node_here();
    LH_CHECK(opts.numa_node >= 0 && opts.numa_node < lh_numa_node_count());
    LH_CHECK(lh_arena_create(&opts, alloc, &arena, &err) == 0);
    lh_arena_destroy(arena, alloc);
    opts.numa_node = lh_numa_node_count();
    LH_CHECK(lh_arena_create(&opts, alloc, &arena, &err) == -EINVAL && !arena);
    opts.numa_node = -1;

    lh_test_name("a lock that is refused is noted with the limit, and the arena still serves");
    struct rlimit none = {0};
    opts.lock = true;
    LH_CHECK(lh_arena_create(&opts, alloc, &arena, &err) == 0);
    LH_CHECK(arena->locked || strstr(arena->note, "RLIMIT_MEMLOCK"));
    lh_arena_destroy(arena, alloc);
    if (geteuid() != 0) { /* a privileged process has no limit, so it cannot be tested */
        LH_CHECK(setrlimit(RLIMIT_MEMLOCK, &none) == 0);
        LH_CHECK(lh_arena_create(&opts, alloc, &arena, &err) == 0);
        LH_CHECK(!arena->locked && strstr(arena->note, "RLIMIT_MEMLOCK is 0 bytes"));
        lh_arena_destroy(arena, alloc);
    }
}

int main(void)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_error err = {0};
    struct lh_arena *arena = NULL;

    lh_test_name("an arena is aligned, rounded up, zeroed, and touched from the start");
    struct lh_arena_opts opts = {.bytes = ARENA_BYTES - 1000, .numa_node = -1};
    LH_CHECK(lh_arena_create(&opts, &alloc, &arena, &err) == 0);
    LH_CHECK(arena->bytes == ARENA_BYTES && (uintptr_t)arena->base % LH_HUGE_PAGE_BYTES == 0);
    LH_CHECK(LH_TEST_IS_EMULATED || resident_count(arena) == ARENA_BYTES / 4096);
    for (uint64_t i = 0; i < arena->bytes; i++)
        LH_CHECK(arena->base[i] == 0);
    memset(arena->base, 1, arena->bytes);
    printf("  pages %d, note \"%s\"\n", (int)arena->pages, arena->note);

    lh_test_name("an arena on small pages says why");
    LH_CHECK(arena->pages != LH_ARENA_PAGES_SMALL || arena->note[0] != '\0');

    lh_test_name("huge pages that were promised and not given are counted");
    if (arena->pages != LH_ARENA_PAGES_RESERVED && prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0) {
        struct lh_arena *small = NULL;
        LH_CHECK(lh_arena_create(&opts, &alloc, &small, &err) == 0);
        LH_CHECK(small->pages == LH_ARENA_PAGES_SMALL && small->note[0] != '\0');
        LH_CHECK(LH_TEST_IS_EMULATED || resident_count(small) == ARENA_BYTES / 4096);
        lh_arena_destroy(small, &alloc);
        LH_CHECK(prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0) == 0);
    }

    lh_test_name("a forked child does not hold the arena a second time");
    LH_CHECK(LH_TEST_IS_EMULATED || lh_test_aborts(read_byte, arena->base));

    lh_test_name("destroy gives back all address space, the surplus of the alignment included");
    lh_arena_destroy(arena, &alloc);
    uint64_t before_bytes = mapping_bytes();
    for (int i = 0; i < 20; i++) {
        LH_CHECK(lh_arena_create(&opts, &alloc, &arena, &err) == 0);
        lh_arena_destroy(arena, &alloc);
    }
    LH_CHECK(mapping_bytes() < before_bytes + ARENA_BYTES);
    LH_CHECK(alloc.live_count == 0);

    test_refusals(&alloc);
    test_placement(&alloc);
    test_large(&alloc);
    test_later(&alloc);
    LH_CHECK(alloc.live_count == 0);
    return 0;
}
