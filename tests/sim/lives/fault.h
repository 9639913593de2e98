/*
 * The faults that a simulated machine can have.
 *
 * Faults of a request are drawn by seed for every request of the engine (lives/drives.h) and for
 * every file call of the store (lives/fs.h), with probabilities in parts per million. All other
 * faults happen to the machine or to a drive between two lives.
 *
 * Faults have three classes, by what a store can guarantee:
 *
 *      survived    no committed step may be lost, and no report is needed: delays, errors, short
 *                  transfers, a full drive, failed syncs, the end of the process, power loss, torn
 *                  sectors
 *      detected    a committed step may be lost, and the store has to report it: damage at rest, a
 *                  flipped bit, a dead drive
 *      undetected  a committed step may be lost silently, because the drive reported success and
 *                  has a consistent older state: a sync that lies, a write that never arrives (or
 *                  arrives elsewhere), a stale read
 *
 * Wrong bytes are never accepted.
 */
#ifndef LH_TEST_SIM_FAULT_H
#define LH_TEST_SIM_FAULT_H

#include "lives/random.h"

enum lh_sim_fault {
    /* Faults of a request. */
    LH_SIM_FAULT_SPIKE = 0, /* one request takes spike_ns longer */
    LH_SIM_FAULT_REORDER,   /* one request takes up to reorder_ns longer: later ones overtake it */
    LH_SIM_FAULT_ERROR,     /* -EIO; a write may have happened in part, a sync covers nothing */
    LH_SIM_FAULT_SPACE,     /* -ENOSPC for a write or reserving space; it has no effect */
    LH_SIM_FAULT_SHORT,     /* a transfer stops in the middle and is continued */
    LH_SIM_FAULT_FLIP,      /* a read returns a wrong bit */
    LH_SIM_FAULT_MISDIRECT, /* a write goes to another place of its file */
    LH_SIM_FAULT_DROP,      /* -EIO for a sync, and no later sync covers what was pending */
    LH_SIM_FAULT_LIE,       /* a sync succeeds, but covers nothing */
    LH_SIM_FAULT_LOST,      /* a write succeeds, but has no effect */
    LH_SIM_FAULT_STALE,     /* a read returns the durable bytes instead of those written last */
    LH_SIM_FAULT_HANG,      /* a request never completes */
    LH_SIM_FAULT_DEAD,      /* the drive fails every request with -EIO until it is revived */
    LH_SIM_FAULT_REQUEST_COUNT,
    /* Faults of the machine, and of drives while no process uses them. */
    LH_SIM_FAULT_KILL = LH_SIM_FAULT_REQUEST_COUNT, /* the process ends, the machine does not */
    LH_SIM_FAULT_POWER,                             /* the machine loses power */
    LH_SIM_FAULT_TORN,     /* power loss leaves some sectors of a block new, the others old */
    LH_SIM_FAULT_BIT,      /* a bit on the drive changes */
    LH_SIM_FAULT_ZEROS,    /* some blocks on the drive become zeros */
    LH_SIM_FAULT_TRUNCATE, /* a file loses its end */
    LH_SIM_FAULT_OLD,      /* a directory is restored from an older copy */
    LH_SIM_FAULT_COUNT,
};

#define LH_SIM_FAULT_BIT_OF(fault) (UINT64_C(1) << (fault))

/* See the classes above; most faults that are in neither of these sets are survived. */
#define LH_SIM_FAULTS_UNDETECTED                                                                   \
    (LH_SIM_FAULT_BIT_OF(LH_SIM_FAULT_LIE) | LH_SIM_FAULT_BIT_OF(LH_SIM_FAULT_LOST) |              \
     LH_SIM_FAULT_BIT_OF(LH_SIM_FAULT_STALE) | LH_SIM_FAULT_BIT_OF(LH_SIM_FAULT_MISDIRECT))
#define LH_SIM_FAULTS_DAMAGE                                                                       \
    (LH_SIM_FAULT_BIT_OF(LH_SIM_FAULT_BIT) | LH_SIM_FAULT_BIT_OF(LH_SIM_FAULT_ZEROS) |             \
     LH_SIM_FAULT_BIT_OF(LH_SIM_FAULT_TRUNCATE) | LH_SIM_FAULT_BIT_OF(LH_SIM_FAULT_OLD))

struct lh_sim_faults {
    uint32_t ppm[LH_SIM_FAULT_REQUEST_COUNT];
    uint64_t spike_ns;
    uint64_t reorder_ns;
};

/* The faults that have happened in a world. */
struct lh_sim_fault_log {
    struct lh_sim_world *world; /* borrowed */
    uint64_t counts[LH_SIM_FAULT_COUNT];
};

/* Count a fault, and trace it with its target. */
void lh_sim_fault_add(struct lh_sim_fault_log *log, enum lh_sim_fault fault, uint64_t file,
                      uint64_t offset, uint64_t detail);
/* Whether any fault of a set (LH_SIM_FAULT_BIT_OF) has happened. */
bool lh_sim_fault_had(const struct lh_sim_fault_log *log, uint64_t faults);
uint64_t lh_sim_fault_count(const struct lh_sim_fault_log *log); /* the sum over all kinds */

/* The name of a fault in tables and on command lines. */
const char *lh_sim_fault_name(enum lh_sim_fault fault);

#endif
