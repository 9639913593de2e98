/*
 * Parameters that the processes of one node share: one region of memory, and a word per unit by
 * which the processes agree who may read or change the unit's bytes.
 *
 * The owner is the process whose engine reads, updates and evicts units. The others, its mates,
 * only read units where they are. A unit's word:
 *
 *      0              absent, or the owner is changing the unit or is about to
 *      READY | pins   readable; pins is the number of times that mates have pinned it
 *
 *      0            -> READY        lh_team_publish   owner: the bytes are there
 *      READY        -> READY + 1    lh_team_pin       mate
 *      READY + 1    -> READY        lh_team_unpin     mate
 *      READY        -> 0            lh_team_claim     owner, at 0 pins
 *
 * A mate that finds a unit absent asks for it (lh_team_want), and is woken when the owner
 * publishes it. An owner that finds pins is woken when the last one is dropped. Nothing else is
 * shared, and no lock: a process that dies leaves no lock behind, and the pins of a dead mate end
 * with the run.
 *
 * [Note: No news is lost between processes] A mate sets its want and then reads the word again; the
 * owner stores the word and then reads the wants. An owner sets WANTED in a pinned word, and the
 * mate that drops the last pin sees it, since both change the same word. All of these are
 * sequentially consistent.
 *
 * [Note: Offers] The processes can agree to gather a unit from parts that each of them has copied
 * to its own accelerator. A process that has copied its part offers it. Once all have offered the
 * same unit, the unit is appended to a list, and every process gathers the units of the list, in
 * its order. Until then a process can withdraw its offer, and copy the whole unit by itself. So no
 * process takes part in a gather for which another one is not ready, and none waits for one that
 * will not come: there is nothing to agree on in advance, and control flow may differ.
 *
 *      0        -> offers       lh_team_offer          a process has its part
 *      offers   -> 0, listed    lh_team_offer          the last process has its part
 *      offers   -> less         lh_team_offer_withdraw
 *      offers   -> | AWAITED    lh_team_offer_await    a thread of an offering process waits
 *      offers   -> | DECLINED   lh_team_offer_decline  a process will not offer the unit now
 *
 * Whoever changes offers wakes all processes. Mates can wake only the owner, which wakes the
 * others.
 *
 * Thread: one of each process, the engine's.
 */
#ifndef LH_TEAM_TEAM_H
#define LH_TEAM_TEAM_H

#include <stdatomic.h>

#include "base/alloc.h"
#include "base/error.h"

#define LH_TEAM_MATE_COUNT_MAX 63
/* More processes cannot gather units. */
#define LH_TEAM_GATHERING_COUNT_MAX 62
#define LH_TEAM_UNIT_NONE UINT32_MAX
/* A unit's offers: a bit for each process, and these. */
#define LH_TEAM_AWAITED (UINT64_C(1) << 62)
#define LH_TEAM_DECLINED (UINT64_C(1) << 63)

struct lh_team {
    struct lh_team_map *map;
    struct lh_team_unit *units; /* in the map */
    uint8_t *region;            /* in the map; LH_HUGE_PAGE_BYTES-aligned */
    uint64_t region_bytes;
    uint64_t map_bytes;
    uint32_t unit_count;
    uint32_t mate_count;
    uint32_t mate;            /* this process: 0 is the owner, 1 .. mate_count a mate */
    int fd;                   /* of the map */
    uint64_t passed_on_count; /* the changes of offers that the owner has told its mates */
    /* Eventfds that wake each process; borrowed. -1, as at first: it cannot be woken yet. */
    int bells[LH_TEAM_MATE_COUNT_MAX + 1];
};

struct lh_team_opts {
    uint32_t unit_count;
    uint32_t mate_count; /* at least 1 */
    uint64_t region_bytes;
    /* Nobody reads or writes the region, as in a simulation: none of its pages is allocated. */
    bool is_untouched;
};

/*
 * Create the memory of a team, as its owner, and allocate all of its pages. The memory has no name,
 * and ends with the last of its processes. Linux kills processes if memory runs out: check first
 * that opts->region_bytes are available.
 *
 * Owns:   team->fd and the map; release with lh_team_leave().
 * Errors: -EINVAL, -ENOMEM, -errno of memfd_create, ftruncate, fallocate or mmap.
 */
int lh_team_create(const struct lh_team_opts *opts, struct lh_team *team, struct lh_error *err)
    LH_MUST_CHECK;
/*
 * Map the memory of a team, as a mate.
 *
 * Owns:   takes fd over, also in case of an error.
 * Errors: -EBADMSG (fd is not such a memory), -EINVAL (mate), -errno of mmap.
 */
int lh_team_join(int fd, uint32_t mate, struct lh_team *team, struct lh_error *err) LH_MUST_CHECK;
void lh_team_leave(struct lh_team *team);

/* Owner: the unit's bytes are at offset in the region. Wakes the mates that want it. */
void lh_team_publish(struct lh_team *team, uint32_t unit, uint64_t offset);
/*
 * Owner: take the unit away from the mates. Returns false if it is pinned or about to be; the owner
 * is then woken when the last pin is dropped.
 */
bool lh_team_claim(struct lh_team *team, uint32_t unit);
/* Owner: whether mates have pinned the unit. */
bool lh_team_is_pinned(const struct lh_team *team, uint32_t unit);
/* Owner: the mates that wait for the unit, as bits 1 << mate. */
uint64_t lh_team_wants(const struct lh_team *team, uint32_t unit);
/* Owner: whether a mate that wants the unit waits at present, and does not only read ahead. */
bool lh_team_is_awaited(const struct lh_team *team, uint32_t unit);
/* Mate, owner: how many uses the mate has begun in its current cycle. */
void lh_team_uses_set(struct lh_team *team, uint64_t uses);
uint64_t lh_team_uses(const struct lh_team *team, uint32_t mate);
/* Owner: the number of wants so far. It changes when a mate asks for a unit. */
uint64_t lh_team_want_count(const struct lh_team *team);
/* Owner: announce that a step is closed: mates can pin no unit that it will still update. */
void lh_team_step_set(struct lh_team *team, uint64_t step);

/* Owner: ask mates to give back what they do not use at present, or no longer ask. */
void lh_team_room_ask(struct lh_team *team, bool needs_room);
/* Owner: how many units mates have given back since room was asked for. */
uint64_t lh_team_returned_count(const struct lh_team *team);
/* Owner: whether a mate that does not wait has pinned units, which it will thus give back. */
bool lh_team_is_busy(const struct lh_team *team);

/* Any: whether the owner asks for room. */
bool lh_team_needs_room(const struct lh_team *team);
/* Any: the number of the last announced step. */
uint64_t lh_team_step(const struct lh_team *team);

/* Any: see [Note: Offers]. Offer this process's part of a unit that it has not offered. */
void lh_team_offer(struct lh_team *team, uint32_t unit);
/* Any: withdraw an offer. Returns false if the unit is listed already. */
bool lh_team_offer_withdraw(struct lh_team *team, uint32_t unit);
void lh_team_offer_await(struct lh_team *team, uint32_t unit);
void lh_team_offer_decline(struct lh_team *team, uint32_t unit);
/* Any: a bit 1 << process for each process that offers the unit, and the two bits above. */
uint64_t lh_team_offers(const struct lh_team *team, uint32_t unit);
/* Any: the unit at a position of the list of gathers, or LH_TEAM_UNIT_NONE. */
uint32_t lh_team_gather_at(const struct lh_team *team, uint64_t place);
/* Any: how far this process is, and another one: a number that all processes count alike. */
void lh_team_progress_set(struct lh_team *team, uint64_t progress);
uint64_t lh_team_progress(const struct lh_team *team, uint32_t process);
/* Owner: wake the mates if offers have changed. */
void lh_team_offers_pass_on(struct lh_team *team);

/* Mate: pin the unit. Returns false if it is not ready; otherwise *offset_out is its place. */
bool lh_team_pin(struct lh_team *team, uint32_t unit, uint64_t *offset_out);
void lh_team_unpin(struct lh_team *team, uint32_t unit);
/* Mate: ask for a unit that could not be pinned. Returns true if it can be pinned meanwhile. */
bool lh_team_want(struct lh_team *team, uint32_t unit);
/* Mate: withdraw a want. */
void lh_team_unwant(struct lh_team *team, uint32_t unit);
/* Mate: say whether a thread of this process waits for a unit of the owner. */
void lh_team_waits_set(struct lh_team *team, bool waits);

#endif
