/* Test the memory that the processes of one node share (team/team.h). */
#define _GNU_SOURCE /* memfd_create */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lh_test.h"
#include "team/team.h"

#define UNIT_BYTES UINT64_C(4096)
#define UNITS 3

static int bells[3];

static void bells_make(void)
{
    for (size_t i = 0; i < LH_COUNT_OF(bells); i++) {
        bells[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        LH_CHECK(bells[i] >= 0);
    }
}

static bool is_rung(int process)
{
    uint64_t count = 0;
    return read(bells[process], &count, sizeof(count)) == (ssize_t)sizeof(count);
}

static void bells_wait(int process)
{
    struct pollfd news = {.fd = bells[process], .events = POLLIN};
    LH_CHECK(poll(&news, 1, 10000) == 1);
    is_rung(process);
}

static void owner_make(struct lh_team *team, uint32_t mate_count)
{
    struct lh_team_opts opts = {
        .unit_count = UNITS, .mate_count = mate_count, .region_bytes = UNITS * UNIT_BYTES};
    LH_CHECK(lh_team_create(&opts, team, NULL) == 0);
    memcpy(team->bells, bells, sizeof(bells));
}

static void mate_make(const struct lh_team *owner, uint32_t mate, struct lh_team *team)
{
    LH_CHECK(lh_team_join(dup(owner->fd), mate, team, NULL) == 0);
    memcpy(team->bells, bells, sizeof(bells));
}

static void test_memory(void)
{
    struct lh_team owner;
    struct lh_team mate;
    lh_test_name("a mate sees the owner's bytes at the unit's offset, in memory without a name");
    owner_make(&owner, 2);
    mate_make(&owner, 2, &mate);
    LH_CHECK(lh_is_aligned((uintptr_t)mate.region, LH_HUGE_PAGE_BYTES));
    LH_CHECK(mate.unit_count == UNITS && mate.region_bytes == UNITS * UNIT_BYTES);
    memset(owner.region + UNIT_BYTES, 0x7c, UNIT_BYTES);
    uint64_t offset = 0;
    LH_CHECK(!lh_team_pin(&mate, 1, &offset));
    lh_team_publish(&owner, 1, UNIT_BYTES);
    LH_CHECK(lh_team_pin(&mate, 1, &offset) && offset == UNIT_BYTES);
    for (uint64_t i = 0; i < UNIT_BYTES; i++)
        LH_CHECK(mate.region[offset + i] == 0x7c);
    lh_team_unpin(&mate, 1);
    LH_CHECK(ftruncate(mate.fd, 4096) == -1); /* it would end the other processes with SIGBUS */
    lh_team_leave(&mate);
    lh_team_leave(&owner);
}

static void test_reserved(void)
{
    struct lh_team owner;
    struct stat facts = {0};
    lh_test_name("all pages of the memory are allocated when it is created");
    owner_make(&owner, 1);
    LH_CHECK(fstat(owner.fd, &facts) == 0);
    LH_CHECK((uint64_t)facts.st_blocks * 512 == owner.map_bytes);
    lh_team_leave(&owner);
    lh_test_name("no page is allocated of a region that nobody touches");
    const struct lh_team_opts untouched = {
        .unit_count = UNITS, .mate_count = 1, .region_bytes = LH_GIB / 16, .is_untouched = true};
    LH_CHECK(lh_team_create(&untouched, &owner, NULL) == 0);
    LH_CHECK(owner.region_bytes == LH_GIB / 16 && fstat(owner.fd, &facts) == 0);
    LH_CHECK((uint64_t)facts.st_blocks * 512 < owner.region_bytes);
    lh_team_leave(&owner);
    lh_test_name("without room for all pages, creation fails and leaves nothing mapped");
    struct rlimit all;
    struct rlimit few = {.rlim_cur = LH_HUGE_PAGE_BYTES};
    LH_CHECK(getrlimit(RLIMIT_FSIZE, &all) == 0);
    few.rlim_max = all.rlim_max;
    struct lh_team_opts opts = {
        .unit_count = 1, .mate_count = 1, .region_bytes = LH_HUGE_PAGE_BYTES};
    LH_CHECK(signal(SIGXFSZ, SIG_IGN) != SIG_ERR && setrlimit(RLIMIT_FSIZE, &few) == 0);
    LH_CHECK(lh_team_create(&opts, &owner, NULL) == -EFBIG);
    LH_CHECK(setrlimit(RLIMIT_FSIZE, &all) == 0);
    LH_CHECK(owner.map == NULL && owner.fd == -1);
}

static void test_claim(void)
{
    struct lh_team owner;
    struct lh_team mates[2];
    uint64_t offset = 0;
    lh_test_name("the owner takes a unit only at 0 pins, and is woken by the last of them alone");
    owner_make(&owner, 2);
    mate_make(&owner, 1, &mates[0]);
    mate_make(&owner, 2, &mates[1]);
    lh_team_publish(&owner, 0, 0);
    LH_CHECK(lh_team_pin(&mates[0], 0, &offset) && lh_team_pin(&mates[1], 0, &offset));
    LH_CHECK(lh_team_is_pinned(&owner, 0) && !lh_team_claim(&owner, 0));
    lh_team_unpin(&mates[1], 0);
    LH_CHECK(!is_rung(0) && !lh_team_claim(&owner, 0));
    lh_team_unpin(&mates[0], 0);
    LH_CHECK(is_rung(0) && !lh_team_is_pinned(&owner, 0));
    LH_CHECK(lh_team_pin(&mates[0], 0, &offset)); /* it is still ready */
    lh_team_unpin(&mates[0], 0);
    LH_CHECK(!is_rung(0)); /* the owner has not asked again */
    LH_CHECK(lh_team_claim(&owner, 0) && !lh_team_pin(&mates[0], 0, &offset));
    lh_team_publish(&owner, 0, UNIT_BYTES);
    LH_CHECK(lh_team_pin(&mates[0], 0, &offset) && offset == UNIT_BYTES);
    lh_team_unpin(&mates[0], 0);
    for (int i = 0; i < 2; i++)
        lh_team_leave(&mates[i]);
    lh_team_leave(&owner);
}

static void test_want(void)
{
    struct lh_team owner;
    struct lh_team mates[2];
    uint64_t offset = 0;
    lh_test_name("a want wakes the owner once, its publication the mates that wait; a unit is not "
                 "taken away before they have pinned it");
    owner_make(&owner, 2);
    mate_make(&owner, 1, &mates[0]);
    mate_make(&owner, 2, &mates[1]);
    LH_CHECK(lh_team_want_count(&owner) == 0 && !lh_team_want(&mates[1], 2));
    LH_CHECK(is_rung(0) && lh_team_want_count(&owner) == 1 && lh_team_wants(&owner, 2) == 4);
    LH_CHECK(!lh_team_want(&mates[1], 2) && !is_rung(0));
    lh_team_publish(&owner, 2, 0);
    LH_CHECK(!is_rung(1) && is_rung(2));
    LH_CHECK(!lh_team_claim(&owner, 2));
    LH_CHECK(lh_team_pin(&mates[1], 2, &offset) && lh_team_wants(&owner, 2) == 0);
    LH_CHECK(!lh_team_claim(&owner, 2));
    lh_team_unpin(&mates[1], 2);
    LH_CHECK(is_rung(0) && lh_team_claim(&owner, 2));
    for (int i = 0; i < 2; i++)
        lh_team_leave(&mates[i]);
    lh_team_leave(&owner);
}

static void test_step(void)
{
    struct lh_team owner;
    struct lh_team mate;
    lh_test_name("the owner announces its steps to all mates");
    owner_make(&owner, 2);
    mate_make(&owner, 1, &mate);
    LH_CHECK(lh_team_step(&mate) == 0);
    lh_team_step_set(&owner, 7);
    LH_CHECK(lh_team_step(&mate) == 7 && is_rung(1) && is_rung(2) && !is_rung(0));
    lh_team_leave(&mate);
    lh_team_leave(&owner);
}

static void test_refusals(void)
{
    struct lh_team owner;
    struct lh_team team;
    struct lh_error err = {0};
    lh_test_name("a descriptor that is not a team's memory is refused, and closed");
    owner_make(&owner, 1);
    LH_CHECK(lh_team_join(dup(owner.fd), 2, &team, &err) == -EINVAL);
    LH_CHECK(lh_team_join(dup(owner.fd), 0, &team, &err) == -EINVAL);
    int plain = memfd_create("plain", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    LH_CHECK(plain >= 0 && ftruncate(plain, 8192) == 0);
    LH_CHECK(lh_team_join(dup(plain), 1, &team, &err) == -EBADMSG);
    LH_CHECK(fcntl(plain, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    LH_CHECK(lh_team_join(plain, 1, &team, &err) == -EBADMSG);
    LH_CHECK(fcntl(plain, F_GETFD) == -1);
    struct lh_team_opts opts = {.unit_count = 1, .mate_count = LH_TEAM_MATE_COUNT_MAX + 1};
    LH_CHECK(lh_team_create(&opts, &team, &err) == -EINVAL);
    lh_team_leave(&owner);
}

/* --- Races ------------------------------------------------------------------------------------ */

#define ROUNDS 20000

static int rounds(void)
{
    return lh_test_is_fast() ? ROUNDS / 10 : ROUNDS;
}

/* Pin unit 0 again and again; the bytes must not change while it is pinned. */
static void mate_run(struct lh_team *mate)
{
    for (int i = 0; i < rounds(); i++) {
        uint64_t offset = 0;
        while (!lh_team_pin(mate, 0, &offset)) {
            if (!lh_team_want(mate, 0))
                bells_wait((int)mate->mate);
        }
        const uint64_t *words = (const uint64_t *)(const void *)(mate->region + offset);
        LH_CHECK(words[0] == words[UNIT_BYTES / 8 - 1] && words[0] > 0);
        lh_team_unpin(mate, 0);
    }
}

/* Change unit 0 and its place again and again, as updates and evictions do. */
static void owner_run(struct lh_team *owner, _Atomic uint32_t *running)
{
    for (uint64_t version = 1; atomic_load(running) > 0; version++) {
        uint64_t offset = version % UNITS * UNIT_BYTES;
        uint64_t *words = (uint64_t *)(void *)(owner->region + offset);
        words[0] = version;
        words[UNIT_BYTES / 8 - 1] = version;
        lh_team_publish(owner, 0, offset);
        while (!lh_team_claim(owner, 0)) {
            struct pollfd news = {.fd = bells[0], .events = POLLIN};
            LH_CHECK(poll(&news, 1, 10000) == 1);
            is_rung(0);
        }
        words[0] = 0;
    }
}

struct mate {
    struct lh_team team;
    _Atomic uint32_t *running; /* mates that are not at their end; shared with other processes */
};

static void *mate_thread(void *context)
{
    struct mate *self = context;
    mate_run(&self->team);
    atomic_fetch_sub(self->running, 1);
    return NULL;
}

static void test_races(bool in_processes)
{
    struct lh_team owner;
    struct mate mates[2];
    pthread_t threads[2];
    pid_t children[2];
    lh_test_name("no mate reads a unit that the owner is changing, and no wake-up is lost: %s",
                 in_processes ? "processes" : "threads");
    owner_make(&owner, 2);
    _Atomic uint32_t *running =
        mmap(NULL, sizeof(*running), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    LH_CHECK(running != MAP_FAILED);
    atomic_store(running, 2);
    for (uint32_t i = 0; i < 2; i++) {
        mate_make(&owner, i + 1, &mates[i].team);
        mates[i].running = running;
        if (!in_processes) {
            LH_CHECK(pthread_create(&threads[i], NULL, mate_thread, &mates[i]) == 0);
            continue;
        }
        children[i] = fork();
        LH_CHECK(children[i] >= 0);
        if (children[i] == 0) {
            mate_thread(&mates[i]);
            _exit(0);
        }
    }
    owner_run(&owner, running);
    for (uint32_t i = 0; i < 2; i++) {
        int status = 0;
        if (in_processes)
            LH_CHECK(waitpid(children[i], &status, 0) == children[i] && status == 0);
        else
            LH_CHECK(pthread_join(threads[i], NULL) == 0);
        lh_team_leave(&mates[i].team);
    }
    munmap((void *)running, sizeof(*running));
    lh_team_leave(&owner);
}

static void test_offers(void)
{
    struct lh_team teams[3];
    lh_test_name(
        "a unit is listed once all have offered it, in one order; before that an offer can "
        "be withdrawn");
    owner_make(&teams[0], 2);
    mate_make(&teams[0], 1, &teams[1]);
    mate_make(&teams[0], 2, &teams[2]);
    for (int i = 0; i < 3; i++)
        is_rung(i);
    lh_team_offer(&teams[1], 2);
    LH_CHECK(is_rung(0) && lh_team_offers(&teams[0], 2) == 2);
    lh_team_offer(&teams[0], 2);
    LH_CHECK(lh_team_offer_withdraw(&teams[1], 2) && lh_team_offers(&teams[2], 2) == 1);
    lh_team_offer(&teams[2], 2);
    LH_CHECK(lh_team_gather_at(&teams[0], 0) == LH_TEAM_UNIT_NONE);
    lh_team_offer(&teams[1], 2);
    for (int i = 0; i < 3; i++) {
        LH_CHECK(lh_team_offers(&teams[i], 2) == 0);
        LH_CHECK(!lh_team_offer_withdraw(&teams[i], 2));
        LH_CHECK(lh_team_gather_at(&teams[i], 0) == 2);
        LH_CHECK(lh_team_gather_at(&teams[i], 1) == LH_TEAM_UNIT_NONE);
    }
    for (uint64_t place = 1; place < 3 * UNITS; place++) { /* the list's memory is used again */
        for (int i = 0; i < 3; i++)
            lh_team_offer(&teams[i], (uint32_t)(place * 2 % UNITS));
        LH_CHECK(lh_team_gather_at(&teams[1], place) == place * 2 % UNITS);
        LH_CHECK(lh_team_gather_at(&teams[1], place + 1) == LH_TEAM_UNIT_NONE);
    }
    for (int i = 0; i < 3; i++)
        lh_team_leave(&teams[i]);
}

static void test_answers(void)
{
    struct lh_team owner;
    struct lh_team mate;
    lh_test_name("an offer that is awaited can be declined; the answer ends with the last offer");
    owner_make(&owner, 2);
    mate_make(&owner, 1, &mate);
    lh_team_offer_decline(&owner, 0); /* nobody has asked */
    LH_CHECK(lh_team_offers(&owner, 0) == 0);
    lh_team_offer(&mate, 0);
    lh_team_offer_await(&mate, 0);
    LH_CHECK(lh_team_offers(&owner, 0) == (LH_TEAM_AWAITED | 2));
    is_rung(1);
    lh_team_offer_decline(&owner, 0);
    LH_CHECK(is_rung(1) && (lh_team_offers(&mate, 0) & LH_TEAM_DECLINED));
    LH_CHECK(lh_team_offer_withdraw(&mate, 0) && lh_team_offers(&owner, 0) == 0);
    lh_team_progress_set(&mate, 7);
    LH_CHECK(lh_team_progress(&owner, 1) == 7 && lh_team_progress(&owner, 0) == 0);
    is_rung(2);
    lh_team_offers_pass_on(&owner);
    LH_CHECK(is_rung(2)); /* which the mate cannot wake itself */
    lh_team_offers_pass_on(&owner);
    LH_CHECK(!is_rung(2));
    lh_team_leave(&mate);
    lh_team_leave(&owner);
}

int main(void)
{
    bells_make();
    test_memory();
    test_reserved();
    test_claim();
    test_want();
    test_step();
    test_refusals();
    test_races(false);
    test_races(true);
    test_offers();
    test_answers();
    return 0;
}
