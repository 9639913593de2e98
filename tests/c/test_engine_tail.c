/*
 * Test the end of a commit's scalars that an accelerator computes: the commit has what the stream
 * computed before the step's close, although the close does not wait for it.
 */
#include <errno.h>
#include <string.h>

#include "dev_fixture.h"
#include "lh_test.h"
#include "rig_device.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define ALWAYS_BYTES UINT64_C(8192)
#define LARGEST_BYTES UINT64_C(16384)
#define DEVICE_BYTES (ALWAYS_BYTES + 2 * LARGEST_BYTES)
#define HEAD_BYTES 5
#define TAIL_BYTES UINT64_C(3000)
#define STEP_COUNT 12
#define UNDEFINED 0xee

struct tails {
    struct rig rig;
    uint8_t *tail;   /* in the device's memory */
    uint8_t *source; /* what the stream copies there */
};

static void tails_open(struct tails *tails, const char *kind, bool is_manual)
{
    *tails = (struct tails){0};
    rig_make(&tails->rig, "tail",
             (struct rig_opts){
                 .device = kind,
                 .device_bytes = DEVICE_BYTES,
                 .least_memory = true,
                 .commit_every = 1,
                 .in_memory = true,
                 .manual = is_manual,
                 .tail_bytes = TAIL_BYTES,
             });
    tails->tail = machine_allocate(rig_device_machine(&tails->rig), TAIL_BYTES);
    tails->source = machine_allocate(rig_device_machine(&tails->rig), TAIL_BYTES);
}

static void tails_close(struct tails *tails)
{
    rig_stop(&tails->rig); /* a copy of a failed engine still reads the tail */
    rig_device_drain(&tails->rig);
    machine_free(rig_device_machine(&tails->rig), tails->tail);
    machine_free(rig_device_machine(&tails->rig), tails->source);
    rig_handles_drop(&tails->rig);
    rig_unmake(&tails->rig);
}

static int post(struct tails *tails, uint64_t bytes)
{
    struct rig *rig = &tails->rig;
    int rc = 0;
    rig_wait_begin(rig);
    do {
        rc = lh_tail_post(rig->engine, tails->tail, bytes, rig_slice_ms(rig));
    } while (rig_waits(rig, rc));
    return rc;
}

static void scalars_close(struct rig *rig, uint64_t tail_bytes)
{
    uint8_t scalars[HEAD_BYTES + TAIL_BYTES];
    int rc = 0;
    memset(scalars, UNDEFINED, sizeof(scalars));
    rig_wait_begin(rig);
    do {
        rc = lh_engine_close(rig->engine, scalars, HEAD_BYTES + tail_bytes, rig_slice_ms(rig));
    } while (rig_waits(rig, rc));
    LH_CHECK(rc == 1);
    rig->step++;
}

/* Close a step without gradients, in which the stream sets the tail to value at last. */
static void step(struct tails *tails, uint8_t value, uint64_t bytes)
{
    LH_CHECK(rig_forward(&tails->rig, LH_ENGINE_MODE_TRAIN) == 0);
    rig_device_drain(&tails->rig); /* the stream has read the source of the step before */
    memset(tails->source, value, TAIL_BYTES);
    machine_compute(rig_device_machine(&tails->rig), tails->tail, tails->source, TAIL_BYTES);
    LH_CHECK(post(tails, bytes) == 1);
    scalars_close(&tails->rig, bytes);
}

/* Check the scalars of the last commit. */
static void check(const struct tails *tails, uint8_t value, uint64_t tail_bytes)
{
    uint64_t bytes = 0;
    const void *all = lh_store_scalars(tails->rig.store, &bytes);
    const uint8_t *scalars = lh_scalars_find(all, bytes, &bytes);
    LH_CHECK(scalars && bytes == HEAD_BYTES + tail_bytes);
    for (uint64_t i = 0; i < bytes; i++)
        LH_CHECK(scalars[i] == (i < HEAD_BYTES ? UNDEFINED : value));
}

static void test_values(const char *kind, bool is_manual)
{
    struct tails tails;
    lh_test_name("%s%s: each commit has the tail that its step has computed", kind,
                 is_manual ? ", manual" : "");
    tails_open(&tails, kind, is_manual);
    for (uint8_t i = 1; i <= STEP_COUNT; i++) {
        uint64_t bytes = i % 3 == 0 ? 1 : TAIL_BYTES;
        step(&tails, i, bytes);
        struct lh_engine_step_stats stats = rig_over_as_planned(&tails.rig);
        LH_CHECK(stats.bytes[LH_ENGINE_LINK_COPY_OUT] == bytes);
        check(&tails, i, bytes);
    }
    lh_test_name("%s: a step without a tail commits its scalars as they are", kind);
    LH_CHECK(rig_forward(&tails.rig, LH_ENGINE_MODE_TRAIN) == 0);
    scalars_close(&tails.rig, 2);
    rig_over_as_planned(&tails.rig);
    check(&tails, UNDEFINED, 2);
    tails_close(&tails);
}

static void test_order(void)
{
    struct tails tails;
    struct rig *rig = &tails.rig;
    lh_test_name("a commit begins only after the copy of the tail");
    tails_open(&tails, "emu", true);
    rig->holds.copies = 1 << LH_DEV_DIRECTION_OUT;
    step(&tails, 7, TAIL_BYTES);
    rig_settle(rig);
    LH_CHECK(lh_store_step(rig->store) == 0);
    rig->holds.copies = 0;
    rig_over_as_planned(rig);
    LH_CHECK(lh_store_step(rig->store) == 1);
    check(&tails, 7, TAIL_BYTES);
    tails_close(&tails);
}

static void test_refusals(void)
{
    struct tails tails;
    struct rig *rig = &tails.rig;
    lh_test_name("a tail that is too large is refused");
    tails_open(&tails, "emu", true);
    LH_CHECK(rig_forward(rig, LH_ENGINE_MODE_TRAIN) == 0);
    LH_CHECK(post(&tails, TAIL_BYTES + 1) == -E2BIG);
    lh_test_name("a tail that was announced, and not closed, is forgotten");
    LH_CHECK(post(&tails, TAIL_BYTES) == 1);
    LH_CHECK(rig_abort(rig) == 0);
    LH_CHECK(rig_forward(rig, LH_ENGINE_MODE_TRAIN) == 0);
    scalars_close(rig, 2);
    rig_over_as_planned(rig);
    check(&tails, UNDEFINED, 2);
    lh_test_name("a tail whose close was refused is forgotten, too");
    static const uint8_t too_many[2 * TAIL_BYTES];
    LH_CHECK(rig_forward(rig, LH_ENGINE_MODE_TRAIN) == 0);
    LH_CHECK(post(&tails, TAIL_BYTES) == 1);
    LH_CHECK(lh_engine_close(rig->engine, too_many, sizeof(too_many), 0) == -E2BIG);
    scalars_close(rig, 2);
    rig_over_as_planned(rig);
    check(&tails, UNDEFINED, 2);
    lh_test_name("a failed engine takes no tail, and one on its way is collected");
    rig->holds.copies = 1 << LH_DEV_DIRECTION_OUT;
    step(&tails, 9, TAIL_BYTES);
    rig_settle(rig);
    struct lh_error err = {0};
    lh_error_set(&err, -EIO, "the test fails the engine");
    lh_core_fail(rig->engine, &err);
    LH_CHECK(post(&tails, TAIL_BYTES) == -EIO);
    tails_close(&tails);
}

int main(void)
{
    test_values("emu", true);
    test_values("emu", false);
    test_values("fake", false);
    test_order();
    test_refusals();
    return 0;
}
