#define _GNU_SOURCE /* memfd_create, F_ADD_SEALS */
#include "team/team.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"

#define MAP_MAGIC UINT64_C(0x314d414554484c) /* "LHTEAM1" */
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define READY UINT32_C(0x80000000)
/* The owner waits for the last pin. */
#define WANTED UINT32_C(0x20000000)
#define PINS UINT32_C(0x00ffffff)

struct lh_team_unit {
    _Atomic uint32_t word;
    _Atomic uint64_t offset; /* in the region, while READY */
    _Atomic uint64_t wants;  /* a bit for each mate */
    _Atomic uint64_t offers; /* see [Note: Offers] */
    /* A place of the list of gathers: the number of the gather from 1, shifted, and its unit. */
    _Atomic uint64_t gather;
};

struct lh_team_mate {
    _Atomic uint64_t uses;
    _Atomic uint32_t pins;
    _Atomic uint32_t waits;
    _Atomic uint64_t progress;
};

struct lh_team_map {
    uint64_t magic;
    uint64_t map_bytes;
    uint64_t region_offset;
    uint64_t region_bytes;
    uint32_t unit_count;
    uint32_t mate_count;
    _Atomic uint64_t step;
    _Atomic uint64_t want_count;
    _Atomic uint32_t needs_room;
    _Atomic uint64_t returned_count; /* last pins that were dropped while the owner needed room */
    _Atomic uint64_t gather_count;
    _Atomic uint64_t offer_news_count; /* the number of changes of offers */
    struct lh_team_mate mates[LH_TEAM_MATE_COUNT_MAX + 1];
    struct lh_team_unit units[];
};

static int fd_error(struct lh_error *err, const char *what, uint64_t bytes)
{
    int code = -errno;
    return lh_error_set(err, code, "cannot %s of %" PRIu64 " bytes: %s", what, bytes,
                        strerror(-code));
}

static void init(struct lh_team *team, int fd, uint32_t mate)
{
    *team = (struct lh_team){.fd = fd, .mate = mate};
    for (size_t i = 0; i < LH_COUNT_OF(team->bells); i++)
        team->bells[i] = -1;
}

/* Map all of fd at an address that is aligned to huge pages, as is the region in it. */
static int map(struct lh_team *team, uint64_t bytes, struct lh_error *err)
{
    uint64_t wanted = bytes + LH_HUGE_PAGE_BYTES;
    uint8_t *room = mmap(NULL, wanted, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED)
        return fd_error(err, "map shared memory", bytes);
    uint8_t *base = (uint8_t *)(uintptr_t)lh_align_up((uintptr_t)room, LH_HUGE_PAGE_BYTES);
    uint64_t before = (uint64_t)(base - room);
    LH_ASSERT(before < LH_HUGE_PAGE_BYTES);
    void *mapped = mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, team->fd, 0);
    if (mapped == MAP_FAILED) {
        int rc = fd_error(err, "map shared memory", bytes);
        munmap(room, wanted);
        return rc;
    }
    /* What is left of the reserved addresses; shrinking a mapping at its ends cannot fail. */
    if (before > 0)
        munmap(room, before);
    munmap(base + bytes, wanted - before - bytes);
    team->map = mapped;
    team->map_bytes = bytes;
    return 0;
}

static void fields_set(struct lh_team *team)
{
    const struct lh_team_map *shared = team->map;
    team->units = team->map->units;
    team->region = (uint8_t *)team->map + shared->region_offset;
    team->region_bytes = shared->region_bytes;
    team->unit_count = shared->unit_count;
    team->mate_count = shared->mate_count;
}

static int reserve(int fd, uint64_t bytes, struct lh_error *err)
{
    int rc = 0;
    do {
        rc = fallocate(fd, 0, 0, (off_t)bytes) < 0 ? -errno : 0;
    } while (rc == -EINTR);
    if (rc == 0)
        return 0;
    return lh_error_set(err, rc == -ENOSPC ? -ENOMEM : rc,
                        "cannot allocate %" PRIu64 " bytes of shared memory: %s", bytes,
                        strerror(-rc));
}

int lh_team_create(const struct lh_team_opts *opts, struct lh_team *team, struct lh_error *err)
{
    init(team, -1, 0);
    if (opts->unit_count == 0 || opts->mate_count == 0 || opts->mate_count > LH_TEAM_MATE_COUNT_MAX)
        return lh_error_set(err, -EINVAL, "a team of %u units and %u mates is out of range",
                            opts->unit_count, opts->mate_count);
    uint64_t words =
        sizeof(struct lh_team_map) + (uint64_t)opts->unit_count * sizeof(struct lh_team_unit);
    uint64_t region_offset = lh_align_up(words, LH_HUGE_PAGE_BYTES);
    uint64_t bytes = region_offset + lh_align_up(opts->region_bytes, LH_HUGE_PAGE_BYTES);
    team->fd = memfd_create("lohan-parameters", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    int rc = team->fd < 0 ? fd_error(err, "create shared memory", bytes) : 0;
    if (rc == 0 && ftruncate(team->fd, (off_t)bytes) < 0)
        rc = fd_error(err, "set the size of shared memory", bytes);
    /* No process can make the others' memory shorter, which would end them with SIGBUS. */
    if (rc == 0 && fcntl(team->fd, F_ADD_SEALS, SEALS) < 0)
        rc = fd_error(err, "seal shared memory", bytes);
    /* Allocate all pages now: if one were missing later, the process that touches it would end. */
    if (rc == 0)
        rc = reserve(team->fd, opts->is_untouched ? region_offset : bytes, err);
    if (rc == 0)
        rc = map(team, bytes, err);
    if (rc < 0) {
        lh_team_leave(team);
        return rc;
    }
    *team->map = (struct lh_team_map){
        .magic = MAP_MAGIC,
        .map_bytes = bytes,
        .region_offset = region_offset,
        .region_bytes = opts->region_bytes,
        .unit_count = opts->unit_count,
        .mate_count = opts->mate_count,
    };
    fields_set(team);
    return 0;
}

static bool is_team(const struct lh_team *team)
{
    const struct lh_team_map *shared = team->map;
    uint64_t words = sizeof(*shared) + (uint64_t)shared->unit_count * sizeof(struct lh_team_unit);
    return shared->magic == MAP_MAGIC && shared->map_bytes == team->map_bytes &&
           lh_is_aligned(shared->region_offset, LH_HUGE_PAGE_BYTES) &&
           shared->region_offset >= words && shared->region_offset <= team->map_bytes &&
           shared->region_bytes <= team->map_bytes - shared->region_offset;
}

int lh_team_join(int fd, uint32_t mate, struct lh_team *team, struct lh_error *err)
{
    struct stat facts = {0};
    init(team, fd, mate);
    int rc = 0;
    if (fstat(fd, &facts) < 0)
        rc = fd_error(err, "look at shared memory", 0);
    else if ((fcntl(fd, F_GET_SEALS) & SEALS) != SEALS ||
             (uint64_t)facts.st_size < sizeof(struct lh_team_map))
        rc = lh_error_set(err, -EBADMSG, "descriptor %d is not the memory of a team", fd);
    else
        rc = map(team, (uint64_t)facts.st_size, err);
    if (rc == 0 && !is_team(team))
        rc = lh_error_set(err, -EBADMSG, "descriptor %d is not the memory of a team", fd);
    else if (rc == 0 && (mate == 0 || mate > team->map->mate_count))
        rc = lh_error_set(err, -EINVAL, "mate %u is not one of %u", mate, team->map->mate_count);
    if (rc < 0) {
        lh_team_leave(team);
        return rc;
    }
    fields_set(team);
    return 0;
}

void lh_team_leave(struct lh_team *team)
{
    if (team->map)
        munmap(team->map, team->map_bytes);
    if (team->fd >= 0)
        close(team->fd);
    team->map = NULL;
    team->fd = -1;
}

static struct lh_team_unit *unit_at(const struct lh_team *team, uint32_t unit)
{
    LH_ASSERT(unit < team->unit_count);
    return &team->units[unit];
}

static void ring(const struct lh_team *team, uint32_t process)
{
    LH_ASSERT(process <= team->mate_count);
    uint64_t one = 1;
    if (team->bells[process] < 0)
        return; /* the process has not joined yet */
    ssize_t put = write(team->bells[process], &one, sizeof(one));
    /* EAGAIN: the counter is at its limit, so the descriptor is readable already. */
    LH_ASSERT(put == (ssize_t)sizeof(one) || errno == EAGAIN);
}

void lh_team_publish(struct lh_team *team, uint32_t index, uint64_t offset)
{
    struct lh_team_unit *unit = unit_at(team, index);
    LH_ASSERT(team->mate == 0 && offset < team->region_bytes);
    LH_ASSERT(atomic_load(&unit->word) == 0);
    atomic_store(&unit->offset, offset);
    atomic_store(&unit->word, READY);
    uint64_t wants = atomic_load(&unit->wants);
    for (uint32_t mate = 1; wants >> mate != 0; mate++) {
        if (wants >> mate & 1)
            ring(team, mate);
    }
}

bool lh_team_claim(struct lh_team *team, uint32_t index)
{
    struct lh_team_unit *unit = unit_at(team, index);
    uint32_t word = atomic_load(&unit->word);
    LH_ASSERT(team->mate == 0);
    for (;;) {
        /* A mate that wants a unit which is ready is about to pin it. */
        bool is_lent = (word & PINS) > 0 || ((word & READY) && atomic_load(&unit->wants) != 0);
        uint32_t next = is_lent ? word | WANTED : 0;
        if (atomic_compare_exchange_weak(&unit->word, &word, next))
            return !is_lent;
    }
}

bool lh_team_is_pinned(const struct lh_team *team, uint32_t unit)
{
    return (atomic_load(&unit_at(team, unit)->word) & PINS) > 0;
}

uint64_t lh_team_wants(const struct lh_team *team, uint32_t unit)
{
    return atomic_load(&unit_at(team, unit)->wants);
}

bool lh_team_is_awaited(const struct lh_team *team, uint32_t unit)
{
    uint64_t wants = lh_team_wants(team, unit);
    for (uint32_t mate = 1; wants >> mate != 0; mate++) {
        if ((wants >> mate & 1) && atomic_load(&team->map->mates[mate].waits) != 0)
            return true;
    }
    return false;
}

void lh_team_uses_set(struct lh_team *team, uint64_t uses)
{
    LH_ASSERT(team->mate > 0);
    atomic_store(&team->map->mates[team->mate].uses, uses);
}

uint64_t lh_team_uses(const struct lh_team *team, uint32_t mate)
{
    LH_ASSERT(mate > 0 && mate <= team->mate_count);
    return atomic_load(&team->map->mates[mate].uses);
}

uint64_t lh_team_want_count(const struct lh_team *team)
{
    return atomic_load(&team->map->want_count);
}

void lh_team_room_ask(struct lh_team *team, bool needs_room)
{
    LH_ASSERT(team->mate == 0);
    if (atomic_exchange(&team->map->needs_room, needs_room) == needs_room)
        return;
    for (uint32_t mate = 1; mate <= team->mate_count; mate++)
        ring(team, mate);
}

uint64_t lh_team_returned_count(const struct lh_team *team)
{
    return atomic_load(&team->map->returned_count);
}

bool lh_team_needs_room(const struct lh_team *team)
{
    return atomic_load(&team->map->needs_room) != 0;
}

void lh_team_step_set(struct lh_team *team, uint64_t step)
{
    LH_ASSERT(team->mate == 0 && step >= atomic_load(&team->map->step));
    atomic_store(&team->map->step, step);
    for (uint32_t mate = 1; mate <= team->mate_count; mate++)
        ring(team, mate);
}

uint64_t lh_team_step(const struct lh_team *team)
{
    return atomic_load(&team->map->step);
}

bool lh_team_pin(struct lh_team *team, uint32_t index, uint64_t *offset_out)
{
    struct lh_team_unit *unit = unit_at(team, index);
    uint32_t word = atomic_load(&unit->word);
    LH_ASSERT(team->mate > 0);
    while (word & READY) {
        LH_ASSERT((word & PINS) < PINS);
        if (!atomic_compare_exchange_weak(&unit->word, &word, word + 1))
            continue;
        atomic_fetch_add(&team->map->mates[team->mate].pins, 1);
        atomic_fetch_and(&unit->wants, ~(UINT64_C(1) << team->mate));
        *offset_out = atomic_load(&unit->offset);
        return true;
    }
    return false;
}

void lh_team_unpin(struct lh_team *team, uint32_t index)
{
    struct lh_team_unit *unit = unit_at(team, index);
    uint32_t word = atomic_load(&unit->word);
    uint32_t next = 0;
    do {
        LH_ASSERT(team->mate > 0 && (word & READY) && (word & PINS) > 0);
        next = word - 1;
        if ((next & PINS) == 0)
            next &= ~WANTED;
    } while (!atomic_compare_exchange_weak(&unit->word, &word, next));
    atomic_fetch_sub(&team->map->mates[team->mate].pins, 1);
    bool is_last = (next & PINS) == 0;
    bool is_asked = is_last && lh_team_needs_room(team);
    if (is_asked)
        atomic_fetch_add(&team->map->returned_count, 1);
    if (is_asked || (is_last && (word & WANTED)))
        ring(team, 0);
}

void lh_team_unwant(struct lh_team *team, uint32_t index)
{
    uint64_t mine = UINT64_C(1) << team->mate;
    LH_ASSERT(team->mate > 0);
    uint64_t wants = atomic_fetch_and(&unit_at(team, index)->wants, ~mine);
    if (wants & mine)
        ring(team, 0); /* the owner may wait for the unit to be pinned and given back */
}

void lh_team_waits_set(struct lh_team *team, bool waits)
{
    LH_ASSERT(team->mate > 0);
    if (atomic_exchange(&team->map->mates[team->mate].waits, waits) != waits)
        ring(team, 0);
}

bool lh_team_is_busy(const struct lh_team *team)
{
    for (uint32_t i = 1; i <= team->mate_count; i++) {
        const struct lh_team_mate *mate = &team->map->mates[i];
        if (atomic_load(&mate->pins) > 0 && atomic_load(&mate->waits) == 0)
            return true;
    }
    return false;
}

bool lh_team_want(struct lh_team *team, uint32_t index)
{
    struct lh_team_unit *unit = unit_at(team, index);
    LH_ASSERT(team->mate > 0);
    uint64_t mine = UINT64_C(1) << team->mate;
    if (!(atomic_fetch_or(&unit->wants, mine) & mine)) {
        atomic_fetch_add(&team->map->want_count, 1);
        ring(team, 0);
    }
    return (atomic_load(&unit->word) & READY) != 0;
}

/* Offers have changed: wake all other processes that this one can wake. */
static void offers_tell(struct lh_team *team)
{
    atomic_fetch_add(&team->map->offer_news_count, 1);
    for (uint32_t process = 0; process <= team->mate_count; process++) {
        if (process != team->mate)
            ring(team, process);
    }
}

void lh_team_offers_pass_on(struct lh_team *team)
{
    uint64_t count = atomic_load(&team->map->offer_news_count);
    LH_ASSERT(team->mate == 0);
    if (count == team->passed_on_count)
        return;
    team->passed_on_count = count;
    for (uint32_t mate = 1; mate <= team->mate_count; mate++)
        ring(team, mate);
}

/*
 * Append the unit to the list. A process that has not read an earlier entry of the unit has not
 * offered the unit again, so at most unit_count entries are unread by anyone.
 */
static void gather_append(struct lh_team *team, uint32_t unit)
{
    uint64_t place = atomic_fetch_add(&team->map->gather_count, 1);
    struct lh_team_unit *cell = unit_at(team, (uint32_t)(place % team->unit_count));
    atomic_store(&cell->gather, (place + 1) << 32 | unit);
}

void lh_team_offer(struct lh_team *team, uint32_t index)
{
    struct lh_team_unit *unit = unit_at(team, index);
    const uint64_t mine = UINT64_C(1) << team->mate;
    const uint64_t all = (UINT64_C(2) << team->mate_count) - 1;
    LH_ASSERT(team->mate_count < LH_TEAM_GATHERING_COUNT_MAX);
    uint64_t offers = atomic_load(&unit->offers);
    uint64_t next = 0;
    do {
        LH_ASSERT((offers & mine) == 0);
        next = ((offers | mine) & all) == all ? 0 : offers | mine;
    } while (!atomic_compare_exchange_weak(&unit->offers, &offers, next));
    if (next == 0)
        gather_append(team, index);
    offers_tell(team);
}

bool lh_team_offer_withdraw(struct lh_team *team, uint32_t index)
{
    struct lh_team_unit *unit = unit_at(team, index);
    const uint64_t mine = UINT64_C(1) << team->mate;
    uint64_t offers = atomic_load(&unit->offers);
    uint64_t next = 0;
    do {
        if ((offers & mine) == 0)
            return false;
        next = offers & ~(mine | LH_TEAM_AWAITED);
        if ((next & ~LH_TEAM_DECLINED) == 0)
            next = 0; /* nobody is left to whom the answer applies */
    } while (!atomic_compare_exchange_weak(&unit->offers, &offers, next));
    offers_tell(team);
    return true;
}

/* Set a flag of a unit that is offered. */
static void offer_flag(struct lh_team *team, uint32_t index, uint64_t flag)
{
    struct lh_team_unit *unit = unit_at(team, index);
    uint64_t offers = atomic_load(&unit->offers);
    do {
        if (offers == 0 || (offers & flag))
            return;
    } while (!atomic_compare_exchange_weak(&unit->offers, &offers, offers | flag));
    offers_tell(team);
}

void lh_team_offer_await(struct lh_team *team, uint32_t unit)
{
    offer_flag(team, unit, LH_TEAM_AWAITED);
}

void lh_team_offer_decline(struct lh_team *team, uint32_t unit)
{
    offer_flag(team, unit, LH_TEAM_DECLINED);
}

uint64_t lh_team_offers(const struct lh_team *team, uint32_t unit)
{
    return atomic_load(&unit_at(team, unit)->offers);
}

uint32_t lh_team_gather_at(const struct lh_team *team, uint64_t place)
{
    const struct lh_team_unit *cell = unit_at(team, (uint32_t)(place % team->unit_count));
    uint64_t gather = atomic_load(&cell->gather);
    if (gather >> 32 != ((place + 1) & UINT32_MAX))
        return LH_TEAM_UNIT_NONE;
    LH_ASSERT((uint32_t)gather < team->unit_count);
    return (uint32_t)gather;
}

void lh_team_progress_set(struct lh_team *team, uint64_t progress)
{
    atomic_store(&team->map->mates[team->mate].progress, progress);
}

uint64_t lh_team_progress(const struct lh_team *team, uint32_t process)
{
    LH_ASSERT(process <= team->mate_count);
    return atomic_load(&team->map->mates[process].progress);
}
