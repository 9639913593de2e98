/*
 * The engine: training with several schedules, with commits of each step, of every third one and
 * only on request, in one directory and in two.
 */
#include "engine_fixture.h"
#include "kill_worker.h"
#include "lh_test.h"
#include "store_fixture.h"

#define STEP_MAX 24
#define STEPS_OF_LIFE_MAX 4
#define VARIANT_COUNT 6

static const struct rig_opts variants[VARIANT_COUNT] = {
    {.commit_every = 1, .schedule = LH_ENGINE_SCHEDULE_OPTIMIZED},
    {.commit_every = 3, .schedule = LH_ENGINE_SCHEDULE_OPTIMIZED, .directory_count = 2},
    {.commit_every = 1, .schedule = LH_ENGINE_SCHEDULE_DEFERRED, .least_memory = true},
    {.commit_every = 3, .schedule = LH_ENGINE_SCHEDULE_AUTO},
    {.commit_every = 2, .schedule = LH_ENGINE_SCHEDULE_SERIAL, .directory_count = 2},
    {.commit_every = LH_ENGINE_COMMIT_NEVER, .schedule = LH_ENGINE_SCHEDULE_NAIVE},
};

/* Each trained to its end by a run that nobody killed: every step's bytes are in its snapshots. */
static struct rig references[VARIANT_COUNT];

static void engine_prepare(void)
{
    for (uint32_t i = 0; i < VARIANT_COUNT; i++) {
        rig_make(&references[i], "reference", variants[i]);
        for (uint32_t j = 0; j < STEP_MAX + STEPS_OF_LIFE_MAX + 1; j++)
            LH_CHECK(rig_step(&references[i], RIG_GRADIENTS_ALL) == 0);
        LH_CHECK(rig_flush(&references[i], true) == 0);
        rig_shut(&references[i]);
        fixture_remove(fixture_path("reference-0"));
        fixture_remove(fixture_path("reference-1"));
    }
}

/* A store always has the same variant, which its name determines. */
static struct rig *reference_of(const char *name)
{
    return &references[strtoull(name + 1, NULL, 10) % VARIANT_COUNT];
}

static void train(struct rig *rig, uint64_t seed, struct shared *shared)
{
    uint64_t every = rig->opts.commit_every;
    uint64_t step_count = 1 + lh_test_random(&seed) % STEPS_OF_LIFE_MAX;
    for (uint64_t i = 0; i < step_count; i++) {
        shared->phase = PHASE_STEP;
        shared->most = rig->step + 1;
        LH_CHECK(rig_step(rig, RIG_GRADIENTS_ALL) == 0);
        /* A close waits for the step before it to be over, with its commit where one was due. */
        if (every > 0)
            shared->least = lh_max_u64(shared->least, (rig->step - 1) / every * every);
        if (lh_test_random(&seed) % 3 != 0)
            continue;
        shared->phase = PHASE_COMMIT;
        LH_CHECK(rig_flush(rig, true) == 0);
        shared->least = rig->step;
    }
    if (lh_test_random(&seed) % 4 == 0) /* the life ends while a step is in progress */
        LH_CHECK(rig_forward_backward(rig, RIG_GRADIENTS_ALL) == 0);
}

static void engine_life(const char *name, uint64_t seed, struct shared *shared, bool is_there,
                        void (*arm)(void))
{
    struct rig *rig = reference_of(name);
    struct rig made;
    shared->phase = is_there ? PHASE_OPEN : PHASE_CREATE;
    arm();
    if (is_there) {
        rig->name = name;
        rig_reopen(rig);
        LH_CHECK(rig->step == shared->least);
    } else {
        rig_make(&made, name, rig->opts);
        rig = &made;
    }
    shared->is_made = 1;
    train(rig, seed, shared);
    shared->phase = PHASE_CLOSE;
    rig_shut(rig);
}

static int engine_check(const char *name, uint64_t seed, struct shared *shared, bool was_there)
{
    struct rig *rig = reference_of(name);
    struct lh_error err = {0};
    char paths[2][64];
    const char *directories[2];
    (void)seed;
    struct lh_store_open_opts opts = {
        .directories = directories, .read_only = true, .allow_buffered = true};
    opts.directory_count = rig->opts.directory_count > 0 ? rig->opts.directory_count : 1;
    for (uint32_t i = 0; i < opts.directory_count; i++) {
        snprintf(paths[i], sizeof(paths[i]), "%s-%u", name, i);
        directories[i] = fixture_path(paths[i]);
    }
    int rc = lh_store_open(&opts, &rig->alloc, &rig->store, &err);
    if (rc < 0 && !was_there && !shared->is_made)
        return CHECK_REFUSED;
    if (rc < 0) {
        fprintf(stderr, "%s\n", err.message);
        return 1;
    }
    uint64_t step = lh_store_step(rig->store);
    shared->found = step;
    if (step < shared->least || step > shared->most) {
        fprintf(stderr, "step %" PRIu64 " of %" PRIu64 " to %" PRIu64 "\n", step,
                (uint64_t)shared->least, (uint64_t)shared->most);
        return 1;
    }
    if (lh_store_note(rig->store)[0] != '\0')
        fprintf(stderr, "note: %s\n", lh_store_note(rig->store));
    uint64_t filled_bytes = 0;
    lh_store_scalars(rig->store, &filled_bytes);
    if (!was_there && !shared->is_made && step == 0 &&
        lh_store_is_zero(rig->store, rig->units[0].param_extent, 0))
        return CHECK_REFUSED;   /* the store was created but not filled, so a session rejects it */
    rig_check_store(rig, step); /* exits with 1 if the store is wrong */
    lh_store_close(rig->store);
    return CHECK_HELD;
}

const struct world world_engine = {
    .name = "engine",
    .step_max = STEP_MAX,
    .prepare = engine_prepare,
    .life = engine_life,
    .check = engine_check,
};
