/*
 * Send SIGKILL at every point of a store's life.
 *
 *      kill_worker WORLD COUNT SEED
 *
 * A life is a process that creates a store or opens it, trains for some steps and closes it. It is
 * killed at its N-th file call (before it, after it, or half-way through a write), or after some
 * time. N advances over all calls of a life, so that enough kills cover each point. Then a separate
 * process opens the store: it must be at a step between the newest committed one and the newest
 * begun one, bit for bit, or, if it was still being created, be rejected with a named error. The
 * next life continues from there.
 *
 * The program prints one JSON line. If a store is wrong, it is kept, and the exit status is 1.
 */
#include "kill_worker.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>

#include "calls.h"
#include "lh_test.h"
#include "store_fixture.h"

/*
 * The kinds of kills, in eighths: before a call, after it, half-way; the others after a random
 * time.
 */
#define KILLS_BEFORE 3
#define KILLS_AFTER 5
#define KILLS_HALF 6
#define LIFE_S_MAX 60

const char *const phase_names[PHASE_COUNT] = {"create", "open", "step", "commit",
                                              "edit",   "copy", "close"};
static const struct world *const worlds[] = {&world_engine, &world_store};

struct tally {
    uint64_t tried, held, refused, failed;
};

struct killer {
    const struct world *world;
    uint64_t seed;
    uint64_t kill_at; /* 0: the kill comes after a random time */
    unsigned kinds;   /* the kinds of calls that are counted */
    enum calls_how how;
    uint64_t delay_us;
    bool is_there; /* whether a store existed before the life */
    char name[64];
};

static struct killer killer;
static struct shared *shared;
static struct tally tallies[PHASE_COUNT];

static void arm(void)
{
    calls_arm(killer.kill_at, killer.kinds, killer.how, SIGKILL, 0);
}

/* Remove every folder that begins with the store's name. */
static void store_remove(const char *name)
{
    DIR *folder = opendir(fixture_root());
    LH_CHECK(folder != NULL);
    for (struct dirent *entry = readdir(folder); entry; entry = readdir(folder)) {
        if (strncmp(entry->d_name, name, strlen(name)) == 0)
            fixture_remove(fixture_path(entry->d_name));
    }
    closedir(folder);
}

static void life_run(void)
{
    uint64_t begun = killer.seed;
    killer.world->life(killer.name, lh_test_random(&begun), shared, killer.is_there, arm);
    shared->calls = calls_count();
    _exit(0);
}

/* Wait for the child, for a limited time, and return how it ended. */
static int child_wait(pid_t child, uint64_t kill_after_us)
{
    int status = 0;
    const struct timespec pause = {0, 200000};
    for (uint64_t us = 0; waitpid(child, &status, WNOHANG) == 0; us += 250) {
        if (us >= (uint64_t)LIFE_S_MAX * 1000000 || us >= kill_after_us)
            kill(child, SIGKILL);
        nanosleep(&pause, NULL);
    }
    return status;
}

/* A life, and its end: true if it was killed as it had to be. */
static bool life_and_kill(void)
{
    fflush(stdout);
    pid_t child = fork();
    LH_CHECK(child >= 0);
    if (child == 0)
        life_run();
    int status = child_wait(child, killer.kill_at > 0 ? UINT64_MAX : killer.delay_us);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return false;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
        return true;
    fprintf(stderr, "seed %" PRIu64 ": a life ended by itself, status %d, in %s\n", killer.seed,
            status, phase_names[shared->phase]);
    tallies[shared->phase].failed++;
    return false;
}

static int check(void)
{
    pid_t child = fork();
    LH_CHECK(child >= 0);
    if (child == 0)
        _exit(killer.world->check(killer.name, killer.seed, shared, killer.is_there));
    int status = child_wait(child, UINT64_MAX);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

/* Check and count what a kill left. Returns false if the life failed, or there is no store. */
static bool judge(bool is_killed)
{
    struct tally *tally = &tallies[shared->phase];
    int verdict = check();
    tally->tried += is_killed;
    if (verdict == CHECK_HELD || verdict == CHECK_REFUSED) {
        tally->held += is_killed && verdict == CHECK_HELD;
        tally->refused += is_killed && verdict == CHECK_REFUSED;
        if (verdict == CHECK_REFUSED)
            store_remove(killer.name);
        return verdict == CHECK_HELD;
    }
    tally->failed++;
    fprintf(stderr,
            "seed %" PRIu64 ": killed in %s at call %" PRIu64 " (how %d, %" PRIu64
            " us): wrong, kept in %s\n",
            killer.seed, phase_names[shared->phase], killer.kill_at, (int)killer.how,
            killer.delay_us, fixture_path(killer.name));
    return false;
}

/* The calls of a life of one sort that was not killed, and at which of them one was killed last. */
struct sweep {
    uint64_t calls;
    uint64_t at;
};

/* Half of all lives are killed only where they change something: most calls read. */
static struct sweep *choose(uint64_t *random, struct sweep (*sweeps)[2])
{
    uint64_t dice = lh_test_random(random) % 8;
    bool is_every = lh_test_random(random) % 2 == 0;
    struct sweep *sweep = &sweeps[killer.is_there][is_every];
    killer.kinds = CALLS_COUNT_CHANGES | (is_every ? CALLS_COUNT_READS : 0);
    killer.seed = lh_test_random(random);
    killer.kill_at = 0;
    killer.how = CALLS_HOW_BEFORE;
    killer.delay_us = lh_test_random(random) % (sweep->calls * 60 + 100);
    if (dice < KILLS_HALF)
        killer.kill_at = sweep->at++ % (sweep->calls + 1) + 1;
    if (dice >= KILLS_BEFORE && dice < KILLS_AFTER)
        killer.how = CALLS_HOW_AFTER;
    else if (dice >= KILLS_AFTER && dice < KILLS_HALF)
        killer.how = CALLS_HOW_HALF;
    return sweep;
}

static void print_results(uint64_t tried, double seconds)
{
    uint64_t held = 0;
    uint64_t refused = 0;
    uint64_t failed = 0;
    for (int i = 0; i < PHASE_COUNT; i++) {
        held += tallies[i].held;
        refused += tallies[i].refused;
        failed += tallies[i].failed;
    }
    printf("{\"world\": \"%s\", \"tried\": %" PRIu64 ", \"held\": %" PRIu64
           ", \"refused\": %" PRIu64 ", \"failed\": %" PRIu64 ", \"seconds\": %.1f, \"phases\": {",
           killer.world->name, tried, held, refused, failed, seconds);
    for (int i = 0; i < PHASE_COUNT; i++)
        printf("%s\"%s\": {\"tried\": %" PRIu64 ", \"held\": %" PRIu64 ", \"refused\": %" PRIu64
               ", \"failed\": %" PRIu64 "}",
               i > 0 ? ", " : "", phase_names[i], tallies[i].tried, tallies[i].held,
               tallies[i].refused, tallies[i].failed);
    printf("}}\n");
}

static uint64_t run(uint64_t count, uint64_t seed)
{
    uint64_t random = seed;
    struct sweep sweeps[2][2] = {{{100, 0}, {200, 0}}, {{100, 0}, {400, 0}}};
    uint64_t tried = 0;
    uint64_t failed = 0;
    while (tried < count && failed < 10) {
        struct sweep *sweep = choose(&random, sweeps);
        *shared = (struct shared){.least = shared->found, .most = shared->found};
        bool is_killed = life_and_kill();
        tried += is_killed;
        if (!is_killed && shared->calls > 0)
            sweep->calls = shared->calls;
        bool is_whole = judge(is_killed);
        failed = 0;
        for (int i = 0; i < PHASE_COUNT; i++)
            failed += tallies[i].failed;
        killer.is_there = is_whole && shared->found < killer.world->step_max;
        if (killer.is_there)
            continue;
        if (is_whole)
            store_remove(killer.name);
        shared->found = 0;
        snprintf(killer.name, sizeof(killer.name), "s%" PRIu64 "-", tried);
    }
    return tried;
}

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "kill_worker WORLD COUNT SEED\n");
        return 2;
    }
    for (size_t i = 0; i < sizeof(worlds) / sizeof(worlds[0]); i++) {
        if (strcmp(worlds[i]->name, argv[1]) == 0)
            killer.world = worlds[i];
    }
    LH_CHECK(killer.world != NULL);
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    LH_CHECK(shared != MAP_FAILED);
    char *root = realpath(fixture_root(), NULL);
    LH_CHECK(root != NULL && calls_set(root, NULL) == 0);
    snprintf(killer.name, sizeof(killer.name), "s-");
    killer.world->prepare();
    struct timespec begun;
    struct timespec ended;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    uint64_t tried = run(strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10));
    clock_gettime(CLOCK_MONOTONIC, &ended);
    print_results(tried, (double)(ended.tv_sec - begun.tv_sec) +
                             (double)(ended.tv_nsec - begun.tv_nsec) / 1e9);
    free(root);
    uint64_t failed = 0;
    for (int i = 0; i < PHASE_COUNT; i++)
        failed += tallies[i].failed;
    if (failed > 0)
        _exit(1); /* keeps the files in the root */
    return 0;
}
