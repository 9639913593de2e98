/*
 * Simulate lives by seed: processes end and power fails at random moments, and the drives have
 * faults whose kinds and probabilities the seed chooses. Each life opens the store as a new process
 * would, and lives/life.c judges what it finds: the last committed step or the one whose commit was
 * in progress, bit for bit, or a loss that a fault explains. The last life has no faults, and
 * training has to reach its end.
 *
 *      sim_power SEED              one seed, with a line for each life
 *      sim_power FROM:TO           seeds FROM to TO - 1, and the counts at the end
 *      --without FAULT             disable a fault, or "edits" or "snapshots" (may be repeated)
 *      --lives N                   the last life follows after N lives
 *      --crash LIFE:WHERE:COMMIT:AFTER:KILL   where this life ends, instead of what the seed says
 */
#include <malloc.h>

#include "../c/lh_test.h"
#include "fixture.h"

#define LIFE_COUNT_MAX 4
#define OVERRIDE_MAX 8

struct override {
    uint64_t life;
    struct lh_sim_crash crash;
};

/* What the command line asks for. */
struct command {
    uint64_t from;
    uint64_t to;
    bool is_range;
    uint64_t without; /* faults: LH_SIM_FAULT_BIT_OF */
    bool without_edits;
    bool without_snapshots;
    uint64_t life_max;
    struct override overrides[OVERRIDE_MAX];
    uint32_t override_count;
};

/* What a seed decides beside the case. */
struct plan {
    uint64_t life_count;
    enum lh_sim_fault damage; /* that may happen between lives; LH_SIM_FAULT_COUNT: none */
    bool tears;
    uint64_t resume_life; /* resumes after a kill, and loses power soon; UINT64_MAX: none does */
    struct lh_sim_random resume_random;
};

static struct lh_error err;
static struct command command = {.life_max = UINT64_MAX};
static uint64_t seed_count;
static uint64_t fault_counts[LH_SIM_FAULT_COUNT];
static uint64_t fault_seed_counts[LH_SIM_FAULT_COUNT];
static uint64_t outcomes[LH_SIM_OUTCOME_COUNT];
static uint64_t snapshot_counts[2]; /* whole; left unfinished */
static uint64_t lost_count;         /* seeds whose store could not be opened any more, for good */

static void usage(void)
{
    fprintf(stderr, "usage: sim_power [--without FAULT] [--lives N] "
                    "[--crash LIFE:WHERE:COMMIT:AFTER:KILL] SEED | FROM:TO\n");
    exit(2);
}

static uint64_t number(const char *text, const char **end_out)
{
    char *end = NULL;
    uint64_t value = strtoull(text, &end, 10);
    if (end == text)
        usage();
    *end_out = end;
    return value;
}

static void crash_parse(const char *text)
{
    uint64_t values[5];
    if (command.override_count == OVERRIDE_MAX)
        usage();
    for (uint32_t i = 0; i < 5; i++) {
        values[i] = number(text, &text);
        if (*text != (i < 4 ? ':' : '\0'))
            usage();
        text++;
    }
    if (values[1] >= LH_SIM_CRASH_WHERE_COUNT)
        usage();
    command.overrides[command.override_count++] = (struct override){
        .life = values[0],
        .crash = {.where = (enum lh_sim_crash_where)values[1],
                  .commit = values[2],
                  .after = values[3],
                  .is_kill = values[4] != 0},
    };
}

static void without_parse(const char *name)
{
    if (strcmp(name, "edits") == 0) {
        command.without_edits = true;
        return;
    }
    if (strcmp(name, "snapshots") == 0) {
        command.without_snapshots = true;
        return;
    }
    for (uint32_t i = 0; i < LH_SIM_FAULT_COUNT; i++) {
        if (strcmp(lh_sim_fault_name((enum lh_sim_fault)i), name) == 0) {
            command.without |= LH_SIM_FAULT_BIT_OF(i);
            return;
        }
    }
    usage();
}

static void command_parse(int argc, char **argv)
{
    const char *end = NULL;
    int i = 1;
    for (; i + 1 < argc && argv[i][0] == '-'; i += 2) {
        if (strcmp(argv[i], "--without") == 0)
            without_parse(argv[i + 1]);
        else if (strcmp(argv[i], "--lives") == 0)
            command.life_max = number(argv[i + 1], &end);
        else if (strcmp(argv[i], "--crash") == 0)
            crash_parse(argv[i + 1]);
        else
            usage();
    }
    if (i + 1 != argc)
        usage();
    command.from = number(argv[i], &end);
    command.is_range = *end == ':';
    command.to = command.is_range ? number(end + 1, &end) : command.from + 1;
    if (*end != '\0')
        usage();
}

/* One of one_of seeds has the fault, with up to twice these parts per million. */
static void fault_draw(struct sim_case *sim, enum lh_sim_fault fault, uint32_t one_of, uint32_t ppm)
{
    bool has_it = lh_sim_random_below(&sim->random, one_of) == 0;
    uint32_t drawn = 1 + (uint32_t)lh_sim_random_below(&sim->random, 2 * (uint64_t)ppm);
    if (has_it && (command.without & LH_SIM_FAULT_BIT_OF(fault)) == 0)
        sim->opts.faults.ppm[fault] = drawn;
}

/* Six of ten worlds have only faults that a store survives silently. */
static void faults_draw(struct sim_case *sim, struct plan *plan)
{
    static const enum lh_sim_fault damages[] = {LH_SIM_FAULT_BIT, LH_SIM_FAULT_ZEROS,
                                                LH_SIM_FAULT_TRUNCATE, LH_SIM_FAULT_OLD};
    struct lh_sim_faults *faults = &sim->opts.faults;
    bool is_lossy = lh_sim_random_below(&sim->random, 10) >= 6;
    fault_draw(sim, LH_SIM_FAULT_SPIKE, 2, 50000);
    fault_draw(sim, LH_SIM_FAULT_REORDER, 2, 300000);
    fault_draw(sim, LH_SIM_FAULT_SHORT, 2, 100000);
    fault_draw(sim, LH_SIM_FAULT_ERROR, 4, 3000);
    fault_draw(sim, LH_SIM_FAULT_SPACE, 6, 3000);
    fault_draw(sim, LH_SIM_FAULT_DROP, 3, 50000);
    fault_draw(sim, LH_SIM_FAULT_HANG, 12, 1500);
    plan->tears = lh_sim_random_below(&sim->random, 3) == 0 &&
                  (command.without & LH_SIM_FAULT_BIT_OF(LH_SIM_FAULT_TORN)) == 0;
    faults->spike_ns = lh_sim_random_below(&sim->random, 50000000);
    faults->reorder_ns = lh_sim_random_below(&sim->random, 2000000);
    if (!is_lossy)
        return;
    fault_draw(sim, LH_SIM_FAULT_FLIP, 4, 8000);
    fault_draw(sim, LH_SIM_FAULT_MISDIRECT, 5, 6000);
    fault_draw(sim, LH_SIM_FAULT_LIE, 4, 80000);
    fault_draw(sim, LH_SIM_FAULT_LOST, 5, 5000);
    fault_draw(sim, LH_SIM_FAULT_STALE, 4, 50000);
    fault_draw(sim, LH_SIM_FAULT_DEAD, 6, 1500);
    uint64_t kind = lh_sim_random_below(&sim->random, 2 * LH_COUNT_OF(damages));
    if (kind < LH_COUNT_OF(damages) && (command.without & LH_SIM_FAULT_BIT_OF(damages[kind])) == 0)
        plan->damage = damages[kind];
}

/* Some lives of worlds with edits or snapshots end in these, whatever else was drawn. */
static void world_crash_draw(const struct sim_case *sim, uint64_t life, struct lh_sim_crash *crash)
{
    struct lh_sim_random random;
    lh_sim_random_init(&random, lh_sim_mix(sim->opts.seed, life), LH_SIM_STREAM_WORLDS);
    uint64_t which = lh_sim_random_below(&random, 8);
    uint64_t most = lh_sim_random_below(&random, 2) == 0 ? 30 : 120;
    uint64_t after = lh_sim_random_below(&random, most);
    if (which < 2 && sim->opts.chances.edit_ppm > 0)
        *crash = (struct lh_sim_crash){.where = LH_SIM_CRASH_EDIT, .after = after};
    else if (which < 5 && sim->opts.has_snapshots)
        *crash = (struct lh_sim_crash){.where = LH_SIM_CRASH_COPY, .after = after};
    else
        return;
    crash->is_kill = lh_sim_random_below(&random, 2) == 0;
}

/*
 * In a quarter of the seeds two more lives follow: a process is killed while a commit syncs a
 * superblock, and power fails soon after the next process resumed. What that process read was
 * written, but it is durable only if opening made it so.
 */
static void resume_draw(uint64_t seed, struct plan *plan)
{
    struct lh_sim_random *random = &plan->resume_random;
    lh_sim_random_init(random, seed, LH_SIM_STREAM_RESUMES);
    plan->resume_life = UINT64_MAX;
    if (lh_sim_random_below(random, 4) != 0)
        return;
    plan->resume_life = plan->life_count + 1;
    plan->life_count += 2;
}

static void resume_crash_draw(struct plan *plan, uint64_t life, struct lh_sim_crash *crash)
{
    struct lh_sim_random *random = &plan->resume_random;
    uint64_t most = lh_sim_random_below(random, 2) == 0 ? 8 : 60;
    if (life == plan->resume_life)
        *crash = (struct lh_sim_crash){.where = LH_SIM_CRASH_EVENTS,
                                       .after = lh_sim_random_below(random, most)};
    else if (life + 1 == plan->resume_life)
        *crash = (struct lh_sim_crash){.where = LH_SIM_CRASH_SYNC,
                                       .commit = 1 + lh_sim_random_below(random, 2),
                                       .after = 2 + lh_sim_random_below(random, 3),
                                       .is_kill = true};
}

/*
 * Ten of seventeen lives end within a commit, six of these while it syncs; three more in open or
 * in close, two soon after open.
 */
static struct lh_sim_crash crash_draw(struct sim_case *sim, struct plan *plan, uint64_t life)
{
    static const struct {
        enum lh_sim_crash_where where;
        uint32_t most;
    } ends[] = {
        {LH_SIM_CRASH_SYNC, 5},     {LH_SIM_CRASH_SYNC, 5},    {LH_SIM_CRASH_SYNC, 5},
        {LH_SIM_CRASH_SYNC, 5},     {LH_SIM_CRASH_SYNC, 5},    {LH_SIM_CRASH_SYNC, 5},
        {LH_SIM_CRASH_COMMIT, 4},   {LH_SIM_CRASH_COMMIT, 8},  {LH_SIM_CRASH_COMMIT, 16},
        {LH_SIM_CRASH_COMMIT, 30},  {LH_SIM_CRASH_NEVER, 1},   {LH_SIM_CRASH_EVENTS, 800},
        {LH_SIM_CRASH_EVENTS, 100}, {LH_SIM_CRASH_EVENTS, 30}, {LH_SIM_CRASH_OPEN, 30},
        {LH_SIM_CRASH_OPEN, 120},   {LH_SIM_CRASH_CLOSE, 12},
    };
    struct lh_sim_random *random = &sim->random;
    uint64_t which = lh_sim_random_below(random, LH_COUNT_OF(ends));
    struct lh_sim_crash crash = {.where = ends[which].where};
    /* A sync under way makes a difference to power loss alone. */
    crash.is_kill = lh_sim_random_below(random, 2) == 0 && crash.where != LH_SIM_CRASH_SYNC;
    crash.commit = 1 + lh_sim_random_below(random, 3);
    if (crash.where == LH_SIM_CRASH_SYNC)
        crash.commit = 1 + crash.commit / 3;
    crash.after = lh_sim_random_below(random, ends[which].most);
    world_crash_draw(sim, life, &crash);
    resume_crash_draw(plan, life, &crash);
    crash.tears = plan->tears;
    if (command.without & LH_SIM_FAULT_BIT_OF(LH_SIM_FAULT_KILL))
        crash.is_kill = false;
    if (command.without & LH_SIM_FAULT_BIT_OF(LH_SIM_FAULT_POWER))
        crash.is_kill = true;
    for (uint32_t i = 0; i < command.override_count; i++) {
        if (command.overrides[i].life == life) {
            crash = command.overrides[i].crash;
            crash.tears = plan->tears;
        }
    }
    return crash;
}

static void chances_draw(struct sim_case *sim)
{
    sim->opts.run.step_last += 2;
    sim->opts.chances = (struct lh_sim_train_chances){
        .eval_ppm = lh_sim_random_below(&sim->random, 3) == 0 ? 200000 : 0,
        .abort_ppm = sim->opts.run.commit_every == 1 && lh_sim_random_below(&sim->random, 4) == 0
                         ? 50000
                         : 0,
        .skip_ppm = lh_sim_random_below(&sim->random, 4) == 0 ? 100000 : 0,
        .flush_ppm = lh_sim_random_below(&sim->random, 4) == 0 ? 200000 : 0,
        .split_ppm = 500000,
    };
    if (sim->opts.chances.abort_ppm == 0 && sim->opts.run.commit_every != LH_ENGINE_COMMIT_NEVER &&
        lh_sim_random_below(&sim->random, 3) == 0)
        sim->opts.chances.hold_ppm = 300000;
}

/* What else a seed's world has, from a stream of its own: pinned seeds keep the rest. */
static void worlds_draw(struct sim_case *sim, uint64_t seed)
{
    struct lh_sim_random random;
    lh_sim_random_init(&random, seed, LH_SIM_STREAM_WORLDS);
    bool has_edits = lh_sim_random_below(&random, 3) == 0;
    if (has_edits && !command.without_edits)
        sim->opts.chances.edit_ppm = 400000;
    bool has_snapshots = lh_sim_random_below(&random, 2) == 0;
    sim->opts.has_snapshots =
        has_snapshots && sim->opts.chances.hold_ppm > 0 && !command.without_snapshots;
}

static void counts_print(void)
{
    printf("count seeds %" PRIu64 "\n", seed_count);
    printf("count snapshots made %" PRIu64 "\n", snapshot_counts[0]);
    printf("count snapshots left unfinished %" PRIu64 "\n", snapshot_counts[1]);
    printf("count lost for good, named %" PRIu64 "\n", lost_count);
    for (uint32_t i = 0; i < LH_SIM_FAULT_COUNT; i++)
        printf("count fault %s %" PRIu64 "\ncount seeds with %s %" PRIu64 "\n",
               lh_sim_fault_name((enum lh_sim_fault)i), fault_counts[i],
               lh_sim_fault_name((enum lh_sim_fault)i), fault_seed_counts[i]);
    for (uint32_t i = 0; i < LH_SIM_OUTCOME_COUNT; i++)
        printf("count outcome %s %" PRIu64 "\n", lh_sim_outcome_name((enum lh_sim_outcome)i),
               outcomes[i]);
}

static void counts_add(const struct lh_sim_lives *lives)
{
    seed_count++;
    snapshot_counts[0] += lives->target.whole_count;
    snapshot_counts[1] += lives->target.left_count;
    for (uint32_t i = 0; i < LH_SIM_FAULT_COUNT; i++) {
        fault_counts[i] += lives->faults.counts[i];
        fault_seed_counts[i] += lives->faults.counts[i] > 0;
    }
    for (uint32_t i = 0; i < LH_SIM_OUTCOME_COUNT; i++)
        outcomes[i] += lives->outcomes[i];
}

/* The program ends here where a promise is broken. */
static void require(bool holds, const struct lh_sim_lives *lives, uint64_t seed, const char *what)
{
    if (holds)
        return;
    printf("FAILED %" PRIu64 ": %s%s%s\n", seed, what, err.message[0] ? ": " : "", err.message);
    counts_add(lives);
    if (command.is_range)
        counts_print();
    exit(1);
}

static void life_say(const struct lh_sim_lives *lives, uint64_t life, const char *what, int which)
{
    const struct lh_sim_crash *crash = &lives->opts.crash;
    if (command.is_range)
        return;
    printf("life %" PRIu64 " (crash %d:%" PRIu64 ":%" PRIu64 ":%d) %s %d at %" PRIu64
           " ns, opened at step %" PRIu64 "%s%s\n",
           life, (int)crash->where, crash->commit, crash->after, crash->is_kill, what, which,
           lives->run.world.now_ns, lives->committed_step, err.message[0] ? ": " : "", err.message);
}

/* The process is gone, and with it perhaps the power, and what lay on a drive. */
static void life_end(struct sim_case *sim, struct lh_sim_lives *lives, const struct plan *plan,
                     bool is_last)
{
    bool is_damaged = lh_sim_random_below(&sim->random, 2) == 0;
    bool is_copied = lh_sim_random_below(&sim->random, 2) == 0 || !lives->copy.pages;
    lh_sim_lives_stop(lives);
    if (lives->opts.crash.is_kill || is_last)
        return;
    if (is_damaged && plan->damage != LH_SIM_FAULT_COUNT)
        lh_sim_lives_damage(lives, plan->damage);
    if (is_copied && plan->damage == LH_SIM_FAULT_OLD)
        lh_sim_lives_copy(lives);
}

/* Whether training came to its end; false where the store is lost and said so. */
static bool lives_run(struct sim_case *sim, struct lh_sim_lives *lives, struct plan *plan,
                      uint64_t seed)
{
    for (uint64_t life = 0;; life++) {
        bool is_calm = life >= plan->life_count;
        struct lh_sim_crash crash = crash_draw(sim, plan, life);
        lives->opts.crash = is_calm ? (struct lh_sim_crash){.tears = plan->tears} : crash;
        if (is_calm)
            lh_sim_lives_revive(lives);
        err = (struct lh_error){0};
        enum lh_sim_open open = lh_sim_lives_open(lives, is_calm, &err);
        if (open != LH_SIM_OPEN_DONE)
            life_say(lives, life, "opens", (int)open);
        require(open != LH_SIM_OPEN_BROKEN, lives, seed, "open");
        if (open == LH_SIM_OPEN_REFUSED && is_calm)
            return false;
        if (open == LH_SIM_OPEN_DONE) {
            err = (struct lh_error){0};
            enum lh_sim_end end = lh_sim_lives_drive(lives, &err);
            life_say(lives, life, "ends", (int)end);
            require(end != LH_SIM_END_BROKEN, lives, seed, "checker");
            require(end != LH_SIM_END_FAILED || lh_sim_lives_explains(lives, err.code), lives, seed,
                    "an error that no fault explains");
            require(end == LH_SIM_END_DONE || !is_calm, lives, seed, "no end without faults");
        }
        life_end(sim, lives, plan, is_calm);
        if (open == LH_SIM_OPEN_REFUSED)
            lh_sim_lives_revive(lives);
        if (is_calm)
            return true;
    }
}

static void seed_run(uint64_t seed)
{
    static struct sim_case sim;
    static struct lh_sim_lives lives;
    struct plan plan = {.damage = LH_SIM_FAULT_COUNT};
    /* Most are tiny: what is lost does not depend on how much there is. */
    static const uint64_t counts[] = {100, 100, 600, 600, 3000, 12000};
    struct lh_sim_sizes sizes = {.count_max = counts[lh_sim_mix(seed, 0) % LH_COUNT_OF(counts)],
                                 .large_ppm = 10000};
    sim_case_make(&sim, seed, &sizes);
    plan.life_count = 1 + lh_sim_random_below(&sim.random, LIFE_COUNT_MAX);
    faults_draw(&sim, &plan);
    /* Damage shows in the lives behind it. */
    if (plan.damage != LH_SIM_FAULT_COUNT)
        plan.life_count = LIFE_COUNT_MAX + 1;
    resume_draw(seed, &plan);
    plan.life_count = lh_min_u64(plan.life_count, command.life_max);
    chances_draw(&sim);
    worlds_draw(&sim, seed);
    err = (struct lh_error){0};
    sim_require(lh_sim_lives_init(&lives, &sim.opts, &sim.alloc, &err), &err, "init");
    if (lives_run(&sim, &lives, &plan, seed)) {
        /* The end was closed well and then lost its power: it is there. */
        err = (struct lh_error){0};
        uint64_t step = lives.committed_step;
        require(lh_sim_lives_open(&lives, true, &err) == LH_SIM_OPEN_DONE, &lives, seed,
                "last open");
        /* A life that begins where training was over trains one step more. */
        require(step >= sim.opts.run.step_last && lh_store_step(lives.run.store) == step, &lives,
                seed, "the last step is not there");
    } else {
        lost_count++;
    }
    counts_add(&lives);
    lh_sim_lives_deinit(&lives);
    sim_case_unmake(&sim);
}

int main(int argc, char **argv)
{
    command_parse(argc, argv);
    /* Seeds take and give back the same memory again and again: the process keeps it. */
    (void)mallopt(M_MMAP_THRESHOLD, INT32_MAX);
    (void)mallopt(M_TRIM_THRESHOLD, INT32_MAX);
    for (uint64_t seed = command.from; seed < command.to; seed++) {
        if (command.is_range)
            printf("at %" PRIu64 "\n", seed);
        else
            lh_test_name("seed %" PRIu64 ": no committed step is lost but by a named fault", seed);
        fflush(stdout);
        seed_run(seed);
    }
    if (command.is_range)
        counts_print();
    return 0;
}
