/* Test engines that share parameters: one reads and updates them, the others pin them. */
#include <pthread.h>

#include "base/thread.h"
#include "engine_fixture.h"
#include "lh_test.h"
#include "rig_team.h"
#include "rig_wait.h"
#include "sched/engine_private.h"

#define MATES_MAX 2

struct mate {
    struct rig rig;
    struct rig *owner;
    pthread_t thread;
    pthread_barrier_t *barrier;
    int steps;
};

struct set {
    struct rig owner;
    struct mate mates[MATES_MAX];
    uint32_t count;
    pthread_barrier_t barrier;
};

static void set_make(struct set *set, const char *name, uint32_t count, struct rig_opts opts)
{
    static char names[MATES_MAX][64];
    opts.in_memory = true;
    opts.plain_gradients = true;
    opts.schedule = LH_ENGINE_SCHEDULE_SERIAL;
    opts.commit_every = 1;
    struct rig_opts mate_opts = opts;
    mate_opts.least_memory = !opts.device;
    mate_opts.spare_bytes = 0;
    mate_opts.device = NULL;
    mate_opts.commit_every = LH_ENGINE_COMMIT_NEVER;
    opts.team_mates = count;
    set->count = count;
    rig_make(&set->owner, name, opts);
    for (uint32_t i = 0; i < count; i++) {
        snprintf(names[i], sizeof(names[i]), "%s-mate%u", name, i + 1);
        mate_opts.team_of = &set->owner;
        mate_opts.team_mate = i + 1;
        rig_make(&set->mates[i].rig, names[i], mate_opts);
        set->mates[i].owner = &set->owner;
        set->mates[i].barrier = &set->barrier;
    }
    LH_CHECK(pthread_barrier_init(&set->barrier, NULL, count + 1) == 0);
}

static void set_unmake(struct set *set)
{
    for (uint32_t i = 0; i < set->count; i++)
        lh_engine_stop(set->mates[i].rig.engine);
    lh_engine_stop(set->owner.engine); /* it wakes its mates until here */
    for (uint32_t i = 0; i < set->count; i++)
        rig_unmake(&set->mates[i].rig);
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) /* a mate that ends gives everything back */
        LH_CHECK(!lh_team_is_pinned(set->owner.team, i));
    rig_unmake(&set->owner);
    pthread_barrier_destroy(&set->barrier);
}

/* Forward and backward of a mate; its gradients go to the owner by other means. */
static void mate_uses(struct rig *rig)
{
    LH_CHECK(rig_forward(rig, LH_ENGINE_MODE_TRAIN) == 0);
    for (uint32_t i = RIG_UNIT_COUNT; i-- > 0;) {
        LH_CHECK(rig_acquire(rig, i) == 0);
        lh_engine_handle_drop(rig->engine, i);
        lh_engine_unpin(rig->engine, i);
    }
}

static void *mate_run(void *context)
{
    struct mate *mate = context;
    for (int i = 0; i < mate->steps; i++) {
        mate_uses(&mate->rig);
        rig_team_give_back(&mate->rig);
        pthread_barrier_wait(mate->barrier); /* the owner updates */
        pthread_barrier_wait(mate->barrier);
        rig_team_follow(&mate->rig, mate->owner);
        pthread_barrier_wait(mate->barrier); /* the owner may change its state */
    }
    return NULL;
}

static void set_train(struct set *set, int steps)
{
    for (uint32_t i = 0; i < set->count; i++) {
        set->mates[i].steps = steps;
        LH_CHECK(lh_thread_start(&set->mates[i].thread, NULL, mate_run, &set->mates[i]) == 0);
    }
    for (int i = 0; i < steps; i++) {
        LH_CHECK(rig_forward_backward(&set->owner, RIG_GRADIENTS_ALL) == 0);
        pthread_barrier_wait(&set->barrier);
        LH_CHECK(rig_close(&set->owner, RIG_GRADIENTS_ALL) == 0);
        rig_over_as_planned(&set->owner);
        pthread_barrier_wait(&set->barrier);
        pthread_barrier_wait(&set->barrier);
    }
    for (uint32_t i = 0; i < set->count; i++)
        LH_CHECK(pthread_join(set->mates[i].thread, NULL) == 0);
}

static uint64_t param_bytes(const struct rig *rig)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
        bytes += rig->units[i].bytes;
    return bytes;
}

static void test_steps(uint32_t count, bool least_memory, bool packed)
{
    struct set set;
    lh_test_name("%u mates see the owner's bytes in every use of %s, and read nothing themselves",
                 count, least_memory ? "a region that does not hold all units" : "a large region");
    struct rig_opts opts = {
        .least_memory = least_memory, .large = true, .in_place = packed, .packed = packed};
    if (least_memory)
        opts.spare_bytes = count * (6 << 20);
    set_make(&set, "team-steps", count, opts);
    set_train(&set, LH_TEST_IS_SLOW ? 2 : 4);
    for (uint32_t i = 0; i < count; i++) {
        struct lh_engine_step_stats stats;
        LH_CHECK(lh_engine_stats(set.mates[i].rig.engine, &stats));
        LH_CHECK(stats.bytes[LH_ENGINE_LINK_PARAM_READ] == 0);
        LH_CHECK(stats.bytes[LH_ENGINE_LINK_SHARED] >= param_bytes(&set.owner));
        LH_CHECK(stats.bytes[LH_ENGINE_LINK_SHARED] == stats.planned_bytes[LH_ENGINE_LINK_SHARED]);
        LH_CHECK(set.mates[i].rig.step == set.owner.step);
    }
    set_unmake(&set);
}

static void test_alone(void)
{
    struct set set;
    lh_test_name("a mate alone uses every unit, in any order, while the owner does nothing");
    set_make(&set, "team-alone", 1,
             (struct rig_opts){.least_memory = true, .spare_bytes = 1 << 20});
    struct rig *mate = &set.mates[0].rig;
    LH_CHECK(rig_forward(mate, LH_ENGINE_MODE_EVAL) == 0);
    for (uint32_t i = 0; i < 40; i++) {
        uint32_t unit = i * 7 % RIG_UNIT_COUNT;
        LH_CHECK(rig_acquire(mate, unit) == 0);
        lh_engine_unpin(mate->engine, unit);
    }
    LH_CHECK(rig_forward(&set.owner, LH_ENGINE_MODE_EVAL) == 0);
    set_unmake(&set);
}

static void test_device(void)
{
    struct set set;
    lh_test_name("the owner's accelerator evicts what a mate holds in main memory");
    set_make(&set, "team-device", 1, (struct rig_opts){.device = "emu", .device_bytes = 48 << 10});
    struct rig *owner = &set.owner;
    struct rig *mate = &set.mates[0].rig;
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
        LH_CHECK(rig_acquire(mate, i) == 0);
    LH_CHECK(rig_forward(owner, LH_ENGINE_MODE_EVAL) == 0);
    for (uint32_t i = 0; i < 12; i++) { /* in an order for which there is no plan */
        uint32_t unit = i * 5 % RIG_UNIT_COUNT;
        LH_CHECK(rig_acquire(owner, unit) == 0);
        lh_engine_unpin(owner->engine, unit);
    }
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++)
        lh_engine_unpin(mate->engine, i);
    set_unmake(&set);
}

static void test_no_room(void)
{
    struct set set;
    struct lh_error err = {0};
    lh_test_name("a mate waits while the owner uses what is in its way; if the owner waits, too, "
                 "nothing can end the waits, and the error says so");
    set_make(&set, "team-no-room", 1, (struct rig_opts){.least_memory = true, .large = true});
    struct rig *owner = &set.owner;
    struct rig *mate = &set.mates[0].rig;
    LH_CHECK(rig_acquire(owner, 5) == 0); /* nearly all of the region */
    LH_CHECK(rig_acquire(mate, 1) == 0 && rig_acquire(mate, 3) == 0);
    LH_CHECK(lh_engine_acquire(mate->engine, 4) == 0);
    LH_CHECK(lh_engine_acquire_wait(mate->engine, 4, 1000) == 0);
    LH_CHECK(lh_engine_error(owner->engine, &err) == 0);
    int rc = lh_engine_acquire(owner->engine, 2);
    rig_wait_begin(owner);
    while (rig_waits(owner, rc))
        rc = lh_engine_acquire_wait(owner->engine, 2, 50);
    LH_CHECK(rc == -ENOSPC);
    LH_CHECK(lh_engine_error(owner->engine, &err) == -ENOSPC);
    LH_CHECK(strstr(err.message, "unit 4, which another process") != NULL);
    set_unmake(&set);
}

static bool wants_any(const struct lh_team *team)
{
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        if (lh_team_wants(team, i) != 0)
            return true;
    }
    return false;
}

static void test_ahead(void)
{
    struct set set;
    lh_test_name("nobody is asked for room because of what a mate reads ahead");
    set_make(&set, "team-ahead", 1, (struct rig_opts){.least_memory = true, .large = true});
    struct rig *owner = &set.owner;
    struct rig *mate = &set.mates[0].rig;
    LH_CHECK(rig_forward(mate, LH_ENGINE_MODE_EVAL) == 0);
    rig_team_give_back(mate);
    LH_CHECK(rig_acquire(owner, 5) == 0); /* nearly all of the region */
    LH_CHECK(lh_engine_begin(mate->engine, LH_ENGINE_MODE_EVAL) == 0);
    usleep(300000);
    LH_CHECK(wants_any(owner->team));
    LH_CHECK(!lh_team_needs_room(owner->team));
    lh_engine_unpin(owner->engine, 5);
    set_unmake(&set);
}

static void test_stop(void)
{
    struct set set;
    lh_test_name("a mate that stops gives back what is not lent, and the rest when it ends");
    set_make(&set, "team-stop", 1, (struct rig_opts){.large = true});
    const struct lh_team *team = set.owner.team;
    struct rig *mate = &set.mates[0].rig;
    LH_CHECK(rig_forward(mate, LH_ENGINE_MODE_EVAL) == 0);
    LH_CHECK(rig_acquire(mate, 3) == 0);
    lh_engine_stop(mate->engine);
    for (uint32_t i = 0; i < RIG_UNIT_COUNT; i++) {
        LH_CHECK(lh_team_is_pinned(team, i) == (i == 3));
        LH_CHECK(lh_team_wants(team, i) == 0);
    }
    LH_CHECK(lh_team_is_busy(team)); /* because of unit 3 */
    set_unmake(&set);
}

static void test_refused(void)
{
    struct set set;
    struct lh_engine *engine = NULL;
    lh_test_name("an owner is refused with a schedule that updates before the close");
    set_make(&set, "team-refused", 1, (struct rig_opts){0});
    for (int i = 0; i < LH_ENGINE_SCHEDULE_COUNT; i++) {
        struct lh_engine_opts opts = rig_engine_opts(&set.owner);
        struct lh_alloc alloc = LH_ALLOC_INIT;
        struct lh_error err = {0};
        if (i == LH_ENGINE_SCHEDULE_SERIAL || i == LH_ENGINE_SCHEDULE_DEFERRED)
            continue;
        opts.schedule = (enum lh_engine_schedule)i;
        opts.norms = false;
        LH_CHECK(lh_engine_create(&opts, &alloc, &engine, &err) == -EINVAL && !engine);
        LH_CHECK(strcmp(err.message, "a team requires every update to be deferred") == 0);
        LH_CHECK(alloc.live_count == 0);
    }
    set_unmake(&set);
}

int main(void)
{
    test_steps(1, false, false);
    test_steps(2, false, false);
    test_steps(1, true, false);
    test_steps(2, true, false);
    test_steps(2, true, true);
    test_alone();
    test_device();
    test_no_room();
    test_ahead();
    test_stop();
    test_refused();
    return 0;
}
