/*
 * Test the table of copies: each kind of user always gets its reserved part, whatever the others
 * hold, and one that is alone gets all but the parts of the others.
 */
#include <string.h>

#include "lh_test.h"
#include "sched/engine_private.h"

#define COUNT 32
#define RESERVED 4 /* an eighth */

/* A device that returns each copy at the first poll after its submit. */
struct device {
    struct lh_dev base; /* must be first */
    struct lh_dev_copy *submitted[COUNT];
    uint32_t count;
};

static int submit(struct lh_dev *dev, struct lh_dev_copy *copy, struct lh_error *err)
{
    struct device *device = (struct device *)dev;
    (void)err;
    LH_CHECK(device->count < COUNT);
    device->submitted[device->count++] = copy;
    return 0;
}

static uint32_t poll(struct lh_dev *dev, struct lh_dev_copy **done, uint32_t done_max)
{
    struct device *device = (struct device *)dev;
    uint32_t count = device->count < done_max ? device->count : done_max;
    device->count -= count;
    memcpy(done, device->submitted + device->count, count * sizeof(struct lh_dev_copy *));
    return count;
}

static void copied(struct lh_engine *engine, struct lh_copy *copy)
{
    (void)engine;
    (void)copy;
}

/* Take copies until none is left for the user, and submit them. Returns their number. */
static uint32_t take_all(struct lh_engine *engine, enum lh_copy_user user)
{
    uint32_t count = 0;
    for (; lh_copy_is_free(engine, user); count++) {
        struct lh_copy *copy = lh_copy_take(engine, user);
        copy->done = copied;
        copy->what = "a copy";
        copy->dev = (struct lh_dev_copy){.bytes = 1};
        LH_CHECK(lh_copy_submit(engine, copy));
    }
    return count;
}

static void empty(struct lh_engine *engine)
{
    while (engine->copies->in_flight > 0)
        LH_CHECK(lh_copy_poll(engine));
}

static void test_reserves(struct lh_engine *engine)
{
    for (int first = 0; first < LH_COPY_USER_COUNT; first++) {
        lh_test_name("a user that takes all it can leaves each of the others its part");
        LH_CHECK(take_all(engine, (enum lh_copy_user)first) == COUNT - 3 * RESERVED);
        for (int i = 1; i < LH_COPY_USER_COUNT; i++) {
            enum lh_copy_user other = (enum lh_copy_user)((first + i) % LH_COPY_USER_COUNT);
            LH_CHECK(take_all(engine, other) == RESERVED);
        }
        LH_CHECK(engine->copies->in_flight == COUNT && engine->copies->free == NULL);
        lh_test_name("copies that have returned can be taken by any user");
        empty(engine);
    }
}

static void test_small_table(struct lh_engine *engine)
{
    lh_test_name("a table too small to divide serves whoever comes first");
    LH_CHECK(take_all(engine, LH_COPY_USER_GRADIENT) == RESERVED);
    LH_CHECK(!lh_copy_is_free(engine, LH_COPY_USER_UNIT));
    empty(engine);
    LH_CHECK(lh_copy_is_free(engine, LH_COPY_USER_UNIT));
}

static void with_table(uint32_t count, void (*test)(struct lh_engine *engine))
{
    static const struct lh_dev_ops ops = {.submit = submit, .poll = poll};
    struct device device = {.base.ops = &ops};
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_error err = {0};
    struct lh_engine *engine = lh_alloc_zeroed(&alloc, 1, sizeof(*engine));
    LH_CHECK(engine != NULL);
    engine->alloc = &alloc;
    engine->dev = &device.base;
    engine->opts.copy_count = count;
    atomic_store(&engine->failed, true); /* copies return to the table then, too */
    LH_CHECK(lh_copy_create(engine, &err) == 0);
    test(engine);
    lh_copy_destroy(engine);
    lh_free(&alloc, engine->copies);
    lh_free(&alloc, engine);
}

int main(void)
{
    with_table(COUNT, test_reserves);
    with_table(RESERVED, test_small_table);
    return 0;
}
