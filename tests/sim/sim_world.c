/*
 * Several processes that train together, by seed: a random number of processes on random machines,
 * with a network between them (lives/group.h). There are four kinds of worlds:
 *
 *      team        one machine: an owner, and one to three mates that read its parameters
 *      replicas    two to four machines, each with all parameters and states
 *      divided     the same, where each unit's states are in one process
 *      teams       two or three machines with a team each
 *
 * Processes, machines, drives and the network have different speeds; messages and requests are
 * late or overtaken. In most seeds processes end or lose power several times, and in some a bit of
 * a message is wrong. At the end all stores hold, bit for bit, the result of plain training in one
 * process; every use in every process saw the bytes of its step; and running the seed again gives
 * the same traces.
 *
 *      sim_world SEED              one seed, with a line for each life
 *      sim_world FROM:TO           seeds FROM to TO - 1
 *      --without crashes|flips     disable a kind of fault (may be repeated)
 *      --kind N                    a kind of world, instead of the one that the seed says
 *      --with holds                single processes hold back commits, as snapshots do. Their
 *                                  stores then fall back: no step is common to all
 */
#include <malloc.h>

#include "../c/lh_test.h"
#include "fixture.h"
#include "lives/group.h"

#define LIFE_COUNT_MAX 4
#define REPEAT_STRIDE 5 /* these seeds run twice; not a multiple of KIND_COUNT */
#define UNIT_COUNT_MAX 64

enum kind {
    KIND_TEAM = 0,
    KIND_REPLICAS,
    KIND_DIVIDED,
    KIND_TEAMS,
};
#define KIND_COUNT 4

struct command {
    uint64_t from;
    uint64_t to;
    bool is_range;
    bool without_crashes;
    bool without_flips;
    bool with_holds;
    uint64_t kind; /* KIND_COUNT: what the seed says */
};

/* Everything that a seed decides. */
struct world {
    struct lh_alloc alloc;
    uint64_t seed;
    enum kind kind;
    struct lh_sim_crew crew;
    uint32_t parts[UNIT_COUNT_MAX];
    struct lh_sim_model models[LH_SIM_PEER_COUNT_MAX + 1]; /* the last one for the plain training */
    struct lh_sim_reference references[LH_SIM_PEER_COUNT_MAX + 1];
    struct lh_sim_lives_opts lives[LH_SIM_PEER_COUNT_MAX];
    struct lh_sim_net_opts net;
    struct lh_sim_random random;
    uint64_t life_count;
    uint64_t hash;
};

static struct command command = {.kind = KIND_COUNT};
static struct lh_error err;
static struct lh_sim_group group;
static uint64_t older_count;
static uint64_t crash_counts[2]; /* of processes, of machines */
static uint64_t flip_count;
static uint64_t refused_count; /* teams whose memory was too small for all of their processes */

static void usage(void)
{
    fprintf(
        stderr,
        "usage: sim_world [--without crashes|flips] [--with holds] [--kind N] SEED | FROM:TO\n");
    exit(2);
}

static void command_parse(int argc, char **argv)
{
    char *end = NULL;
    int i = 1;
    for (; i + 1 < argc && argv[i][0] == '-'; i += 2) {
        if (strcmp(argv[i], "--kind") == 0)
            command.kind = strtoull(argv[i + 1], &end, 10);
        else if (strcmp(argv[i], "--without") == 0 && strcmp(argv[i + 1], "crashes") == 0)
            command.without_crashes = true;
        else if (strcmp(argv[i], "--without") == 0 && strcmp(argv[i + 1], "flips") == 0)
            command.without_flips = true;
        else if (strcmp(argv[i], "--with") == 0 && strcmp(argv[i + 1], "holds") == 0)
            command.with_holds = true;
        else
            usage();
    }
    if (i + 1 != argc || command.kind > KIND_COUNT)
        usage();
    command.from = strtoull(argv[i], &end, 10);
    command.is_range = *end == ':';
    command.to = command.is_range ? strtoull(end + 1, &end, 10) : command.from + 1;
    if (end == argv[i] || *end != '\0')
        usage();
}

/* --- What a seed decides ----------------------------------------------------------------- */

static void machine_add(struct lh_sim_crew *crew, uint32_t process_count)
{
    uint32_t owner = crew->count;
    for (uint32_t i = 0; i < process_count; i++) {
        crew->machines[crew->count] = crew->machine_count;
        crew->owners[crew->count] = owner;
        crew->numbers[crew->count] = i;
        crew->mate_counts[crew->count++] = i == 0 ? process_count - 1 : 0;
    }
    crew->machine_count++;
}

static void crew_draw(struct world *world)
{
    struct lh_sim_random *random = &world->random;
    uint64_t machine_count = 1;
    if (world->kind == KIND_TEAMS)
        machine_count = sim_between(random, 2, 3);
    else if (world->kind != KIND_TEAM)
        machine_count = sim_between(random, 2, 4);
    bool has_teams = world->kind == KIND_TEAM || world->kind == KIND_TEAMS;
    uint64_t most = world->kind == KIND_TEAM ? 4 : 2;
    for (uint64_t i = 0; i < machine_count; i++) {
        /* One process of a world of teams may be alone on its machine. */
        uint64_t least = i == 0 ? 2 : 1;
        machine_add(&world->crew, has_teams ? (uint32_t)sim_between(random, least, most) : 1);
    }
    world->crew.is_divided = world->kind == KIND_DIVIDED;
    world->crew.parts = world->parts;
    world->crew.order_ppm = lh_sim_random_below(random, 3) == 0 ? 400000 : 0;
}

/* The same model for all processes, which compute at different speeds. */
static void models_draw(struct world *world)
{
    static const uint64_t counts[] = {100, 600, 600, 3000};
    const struct lh_sim_sizes sizes = {
        .count_max = counts[lh_sim_mix(world->seed, 0) % LH_COUNT_OF(counts)], .large_ppm = 20000};
    uint32_t skip_ppm = lh_sim_random_below(&world->random, 2) == 0 ? 150000 : 0;
    uint32_t block_skip_ppm = lh_sim_random_below(&world->random, 3) == 0 ? 150000 : 0;
    bool has_scales = lh_sim_random_below(&world->random, 3) == 0;
    for (uint32_t i = 0; i <= world->crew.count; i++) {
        struct lh_sim_model *model = &world->models[i];
        struct lh_sim_reference *reference = &world->references[i];
        struct lh_sim_random random;
        bool is_given[UNIT_COUNT_MAX] = {0};
        lh_sim_random_init(&random, world->seed, LH_SIM_STREAM_MODEL);
        sim_require(lh_sim_model_random(model, &sizes, &random, &world->alloc, &err), &err,
                    "model");
        LH_CHECK(model->unit_count <= UNIT_COUNT_MAX);
        model->has_sums = true;
        for (uint32_t j = 0; i == 0 && j < model->unit_count; j++)
            world->parts[j] = (uint32_t)lh_sim_random_below(&world->random, world->crew.count);
        for (uint32_t j = 0; j < model->unit_count; j++)
            is_given[j] = world->crew.is_divided && world->parts[j] != i;
        if (world->crew.is_divided && i < world->crew.count)
            lh_sim_model_give(model, is_given);
        uint64_t speed = sim_scaled(&world->random, 1, 27);
        for (uint32_t j = 0; j < model->part_count; j++) {
            model->parts[j].forward_ns = model->parts[j].forward_ns * speed / 3;
            model->parts[j].backward_ns = model->parts[j].backward_ns * speed / 3;
        }
        sim_require(lh_sim_reference_init(reference, model, world->seed, &world->alloc, &err), &err,
                    "reference");
        reference->process_count = world->crew.count;
        reference->skip_ppm = skip_ppm;
        reference->block_skip_ppm = block_skip_ppm;
        reference->has_scales = has_scales;
    }
}

static struct lh_sim_accelerator accelerator_draw(const struct world *world, uint32_t rank)
{
    struct lh_sim_accelerator accelerator =
        sim_accelerator_random(&world->models[rank], lh_sim_mix(world->seed, rank));
    accelerator.gradients_in_memory = true; /* sums are */
    return accelerator;
}

static void lives_draw(struct world *world, uint64_t commit_every, uint64_t step_last)
{
    bool is_serial = world->kind == KIND_DIVIDED;
    struct lh_sim_random *random = &world->random;
    for (uint32_t i = 0; i < world->crew.count; i++) {
        struct lh_sim_lives_opts *opts = &world->lives[i];
        bool is_mate = world->crew.owners[i] != i;
        *opts = (struct lh_sim_lives_opts){.seed = lh_sim_mix(world->seed, i),
                                           .reference = &world->references[i]};
        opts->run = (struct lh_sim_run_opts){
            .machine = sim_machine_random(random),
            .model = &world->models[i],
            .io_depth = (uint32_t)sim_scaled(random, 1, 16),
            .transfer_bytes = sim_between(random, 1, 4) * LH_MIB,
            .commit_every = is_mate ? LH_ENGINE_COMMIT_NEVER : commit_every,
            .never_commits = is_mate,
            .schedule = is_serial || lh_sim_random_below(random, 2) == 0
                            ? LH_ENGINE_SCHEDULE_SERIAL
                            : LH_ENGINE_SCHEDULE_DEFERRED,
            .step_last = step_last,
        };
        opts->run.machine.accelerator = accelerator_draw(world, i);
        opts->run.host_bytes = sim_host_bytes_random(&opts->run, random);
        opts->chances.eval_ppm = lh_sim_random_below(random, 2) == 0 ? 250000 : 0;
        if (command.with_holds && !is_mate)
            opts->chances.hold_ppm = 300000;
        if (commit_every == 1 && !is_mate && lh_sim_random_below(random, 3) == 0)
            opts->chances.flush_ppm = 200000;
        if (lh_sim_random_below(random, 2) == 0) {
            opts->faults.ppm[LH_SIM_FAULT_SPIKE] = 50000;
            opts->faults.ppm[LH_SIM_FAULT_REORDER] = 300000;
            opts->faults.ppm[LH_SIM_FAULT_SHORT] = 100000;
        }
        opts->faults.spike_ns = lh_sim_random_below(random, 20000000);
        opts->faults.reorder_ns = lh_sim_random_below(random, 2000000);
    }
}

static void net_draw(struct world *world)
{
    struct lh_sim_random *random = &world->random;
    bool is_late = lh_sim_random_below(random, 2) == 0;
    world->net = (struct lh_sim_net_opts){
        .seed = world->seed,
        .machine_count = world->crew.machine_count,
        .link = {.latency_ns = sim_scaled(random, 1000, 3000000),
                 .queue_depth = (uint32_t)sim_scaled(random, 1, 64),
                 .duplex = true},
        .local_link = {.latency_ns = sim_scaled(random, 500, 100000),
                       .queue_depth = (uint32_t)sim_scaled(random, 1, 64),
                       .duplex = true},
        .spike_ppm = is_late ? 20000 : 0,
        .spike_ns = lh_sim_random_below(random, 400000000),
        .reorder_ppm = is_late ? 300000 : 0,
        .reorder_ns = lh_sim_random_below(random, 5000000),
    };
    for (uint32_t i = 0; i < LH_SIM_DIRECTION_COUNT; i++) {
        world->net.link.bytes_per_s[i] = sim_scaled(random, 10000000, UINT64_C(12000000000));
        world->net.local_link.bytes_per_s[i] = sim_scaled(random, 500000000, 20000000000);
    }
    if (lh_sim_random_below(random, 5) == 0 && !command.without_flips)
        world->net.flip_ppm = 3000;
}

static void world_make(struct world *world, uint64_t seed)
{
    *world = (struct world){.alloc = LH_ALLOC_INIT, .seed = seed};
    lh_sim_random_init(&world->random, seed, LH_SIM_STREAM_WORLDS);
    world->kind = (enum kind)(command.kind < KIND_COUNT ? command.kind : seed % KIND_COUNT);
    crew_draw(world);
    models_draw(world);
    uint64_t commit_every =
        lh_sim_random_below(&world->random, 4) == 0 ? sim_between(&world->random, 2, 3) : 1;
    lives_draw(world, commit_every, sim_between(&world->random, 2, 6));
    net_draw(world);
    world->life_count = lh_sim_random_below(&world->random, LIFE_COUNT_MAX);
    if (command.without_crashes)
        world->life_count = 0;
}

static void world_unmake(struct world *world)
{
    for (uint32_t i = 0; i <= world->crew.count; i++) {
        lh_sim_reference_deinit(&world->references[i]);
        lh_sim_model_deinit(&world->models[i]);
    }
    LH_CHECK(world->alloc.live_count == 0);
}

/* --- A seed ------------------------------------------------------------------------------ */

/* End the program if a promise is broken. */
static void require(bool holds, const struct world *world, uint32_t rank, const char *what)
{
    if (holds)
        return;
    printf("FAILED %" PRIu64 " (kind %d, process %u): %s%s%s\n", world->seed, (int)world->kind,
           rank, what, err.message[0] ? ": " : "", err.message);
    exit(1);
}

static struct lh_sim_group_crash crash_draw(struct lh_sim_random *random, const struct world *world)
{
    static const uint64_t counts[] = {20, 200, 1000, 4000};
    bool is_in_commit = lh_sim_random_below(random, 2) == 0;
    struct lh_sim_group_crash crash = {
        .after = is_in_commit
                     ? lh_sim_random_below(random, 40)
                     : lh_sim_random_below(
                           random, counts[lh_sim_random_below(random, LH_COUNT_OF(counts))]),
        .commit = is_in_commit ? 1 + lh_sim_random_below(random, 3) : 0,
        .rank = (uint32_t)lh_sim_random_below(random, world->crew.count),
        .is_power = lh_sim_random_below(random, 2) == 0,
        .later = lh_sim_random_below(random, 2) == 0 ? 0 : lh_sim_random_below(random, 500),
        .is_well = lh_sim_random_below(random, 2) == 0,
    };
    return crash;
}

/* Train in one process, by the definition of AdamW, and compare all states with all processes'. */
static void plain_compare(struct world *world, uint64_t step_last)
{
    struct lh_sim_reference *plain = &world->references[world->crew.count];
    bool *has_gradient = calloc(plain->model->param_count, sizeof(*has_gradient));
    LH_CHECK(has_gradient != NULL);
    while (plain->step < step_last) {
        for (uint32_t i = 0; i < plain->model->param_count; i++)
            has_gradient[i] = lh_sim_reference_has_gradient(plain, plain->step + 1, i);
        lh_sim_reference_advance(plain, has_gradient);
    }
    free(has_gradient);
    const uint8_t *expected = lh_sim_reference_committed(plain, step_last);
    for (uint32_t i = 0; i < world->crew.count; i++) {
        const struct lh_sim_reference *reference = &world->references[i];
        require(reference->step == step_last &&
                    memcmp(lh_sim_reference_committed(reference, step_last), expected,
                           plain->state_bytes) == 0,
                world, i, "the states of one process are not those of plain training");
    }
}

/* What a process may hold of a block while it waits for the rest, and the holes between that. */
static uint64_t held_bytes_max(const struct lh_sim_model *model)
{
    uint64_t largest_bytes = 0;
    uint64_t most_bytes = 0;
    for (uint32_t i = 0; i < model->unit_count; i++)
        largest_bytes = lh_max_u64(largest_bytes, model->units[i].bytes);
    for (uint32_t i = 0; i < model->block_count; i++) {
        const struct lh_sim_block *block = &model->blocks[i];
        uint64_t bytes = 0;
        for (uint32_t j = 0; j < block->unit_count; j++)
            bytes += model->units[block->units[j]].bytes + largest_bytes;
        most_bytes = lh_max_u64(most_bytes, block->unit_count > 1 ? bytes : 0);
    }
    return most_bytes;
}

/*
 * A team whose memory is enough for one process, but perhaps not for all at the same time, may end
 * with an error that says so. Give it more then, as the user is told to do. Returns whether the
 * error is such a one.
 */
static bool room_make(const struct world *world, uint32_t rank)
{
    struct lh_sim_peer *owner = &group.peers[world->crew.owners[rank]];
    uint64_t mate_count = world->crew.mate_counts[owner->opts.rank];
    const struct lh_sim_model *model = owner->lives.opts.run.model;
    uint64_t needed = lh_sim_model_region_bytes_min(model) + mate_count * held_bytes_max(model);
    uint64_t *region_bytes = &owner->lives.run.budget.region_bytes;
    if (err.code != -ENOSPC || mate_count == 0 || *region_bytes >= needed)
        return false;
    *region_bytes = needed;
    refused_count++;
    return true;
}

/* Train to the end in one or several lives, open all stores again, and compare. */
static void world_run(struct world *world)
{
    const struct lh_sim_group_opts opts = {
        .crew = &world->crew, .lives = world->lives, .net = world->net};
    uint64_t step_last = world->lives[0].run.step_last;
    struct lh_sim_random random;
    enum lh_sim_end end = LH_SIM_END_STOPPED;
    uint32_t rank = 0;
    lh_sim_random_init(&random, world->seed, LH_SIM_STREAM_ENDS);
    sim_require(lh_sim_group_init(&group, &opts, &world->alloc, &err), &err, "init");
    for (uint64_t life = 0; end != LH_SIM_END_DONE; life++) {
        struct lh_sim_group_crash crash = crash_draw(&random, world);
        if (life >= world->life_count)
            crash = (struct lh_sim_group_crash){.after = UINT64_MAX};
        if (life > world->life_count)
            group.net.opts.flip_ppm = 0;
        err = (struct lh_error){0};
        require(lh_sim_group_open(&group, &err) == 0, world, rank, "open");
        uint64_t flips = group.net.flip_count;
        err = (struct lh_error){0};
        end = lh_sim_group_drive(&group, &crash, &rank, &err);
        if (!command.is_range)
            printf("life %" PRIu64 " from step %" PRIu64 " ends %d after %" PRIu64
                   " events at %" PRIu64 " ns%s%s\n",
                   life, group.resumed_step, (int)end, group.fired_count, group.net.world.now_ns,
                   err.message[0] ? ": " : "", err.message);
        require(end != LH_SIM_END_BROKEN, world, rank, "checker");
        bool is_explained = err.code == -EBADMSG && group.net.flip_count > flips;
        require(end != LH_SIM_END_FAILED || is_explained || room_make(world, rank), world, rank,
                "an error that no fault explains");
        crash_counts[group.crash.is_power] += group.is_ending;
        lh_sim_group_stop(&group, end);
    }
    require(lh_sim_group_open(&group, &err) == 0, world, rank, "last open");
    /* Lives that begin where training was over train one step more. */
    require(group.resumed_step >= step_last, world, rank, "the last step is not there");
    plain_compare(world, group.resumed_step);
    world->hash = group.fired_count;
    for (uint32_t i = 0; i < world->crew.count; i++)
        world->hash = lh_sim_mix(world->hash, group.peers[i].lives.trace.hash);
    older_count += group.older_count;
    flip_count += group.net.flip_count;
    lh_sim_group_stop(&group, LH_SIM_END_DONE);
    lh_sim_group_deinit(&group);
}

static uint64_t seed_run(uint64_t seed)
{
    static struct world world;
    world_make(&world, seed);
    world_run(&world);
    world_unmake(&world);
    return world.hash;
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
            lh_test_name("seed %" PRIu64 ": all processes have what plain training gives", seed);
        fflush(stdout);
        uint64_t hash = seed_run(seed);
        if (seed % REPEAT_STRIDE == 0 && seed_run(seed) != hash) {
            printf("FAILED %" PRIu64 ": a second run has other traces\n", seed);
            return 1;
        }
    }
    if (command.is_range)
        printf("crashes of processes %" PRIu64 ", of machines %" PRIu64
               "; stores opened at an older step %" PRIu64 "; wrong bits %" PRIu64
               "; teams with too little memory %" PRIu64 "\n",
               crash_counts[0], crash_counts[1], older_count, flip_count, refused_count);
    return 0;
}
