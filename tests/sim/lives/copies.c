#include "lives/copies.h"

#include <inttypes.h>
#include <string.h>

#include "base/assert.h"
#include "base/crc32c.h"
#include "lives/lives.h"

#define GARBAGE 0xc7

void lh_sim_copies_restart(struct lh_sim_copies *copies, struct lh_sim_fault_log *log,
                           const struct lh_sim_faults *faults, uint64_t seed)
{
    *copies = (struct lh_sim_copies){.log = log};
    if (faults)
        copies->faults = *faults;
    lh_sim_random_init(&copies->random, seed, LH_SIM_STREAM_COPIES);
}

static struct lh_sim_copies *of(void *context)
{
    return &((struct lh_sim_lives *)context)->copies;
}

/* Find a copy in flight, or a free place (copy is NULL). */
static struct lh_sim_copy *find(struct lh_sim_copies *copies, const struct lh_dev_copy *copy)
{
    uint32_t i = 0;
    while (i < LH_SIM_COPY_COUNT_MAX && copies->copies[i].copy != copy)
        i++;
    LH_ASSERT(i < LH_SIM_COPY_COUNT_MAX);
    return &copies->copies[i];
}

static uint8_t *target_of(const struct lh_dev_copy *copy)
{
    return copy->direction == LH_DEV_DIRECTION_IN ? copy->device : copy->host;
}

static const uint8_t *source_of(const struct lh_dev_copy *copy)
{
    return copy->direction == LH_DEV_DIRECTION_IN ? copy->host : copy->device;
}

static uint32_t source_crc(const struct lh_dev_copy *copy)
{
    return lh_crc32c(0, source_of(copy), copy->bytes);
}

static void fault_note(struct lh_sim_copies *copies, const struct lh_dev_copy *copy,
                       enum lh_sim_fault fault)
{
    lh_sim_fault_add(copies->log, fault, UINT32_MAX, copy->direction, copy->bytes);
}

int lh_sim_copies_copy_taken(void *context, struct lh_dev_copy *copy, uint64_t *extra_ns,
                             struct lh_error *err)
{
    struct lh_sim_copies *copies = of(context);
    const struct lh_sim_faults *faults = &copies->faults;
    bool is_slow = lh_sim_random_chance(&copies->random, faults->ppm[LH_SIM_FAULT_SPIKE]);
    bool is_failed = lh_sim_random_chance(&copies->random, faults->ppm[LH_SIM_FAULT_ERROR]);
    if (is_failed)
        fault_note(copies, copy, LH_SIM_FAULT_ERROR);
    if (copies->is_dead || (is_failed && lh_sim_random_below(&copies->random, 2) == 0))
        return lh_error_set(err, -EIO, "the simulated accelerator has failed: it takes no copies");
    struct lh_sim_copy *entry = find(copies, NULL);
    *entry = (struct lh_sim_copy){.copy = copy, .is_failed = is_failed};
    if (is_slow) {
        *extra_ns = faults->spike_ns;
        fault_note(copies, copy, LH_SIM_FAULT_SPIKE);
    }
    if (copy->direction == LH_DEV_DIRECTION_IN)
        entry->crc = source_crc(copy);
    else
        memset(copy->host, GARBAGE, copy->bytes);
    return 0;
}

void lh_sim_copies_copy_begun(void *context, struct lh_dev_copy *copy)
{
    if (copy->direction == LH_DEV_DIRECTION_OUT)
        find(of(context), copy)->crc = source_crc(copy);
    memset(target_of(copy), GARBAGE, copy->bytes);
}

int lh_sim_copies_copy_ended(void *context, struct lh_dev_copy *copy)
{
    struct lh_sim_copies *copies = of(context);
    struct lh_sim_copy *entry = find(copies, copy);
    const struct lh_sim_copy ended = *entry;
    *entry = (struct lh_sim_copy){0};
    copies->is_dead |= ended.is_failed;
    if (ended.is_failed)
        return -EIO;
    if (source_crc(copy) != ended.crc)
        lh_sim_world_fail(
            copies->log->world, "%" PRIu64 " bytes changed while they were copied %s", copy->bytes,
            copy->direction == LH_DEV_DIRECTION_IN ? "to the accelerator" : "from it");
    memcpy(target_of(copy), source_of(copy), copy->bytes);
    return 0;
}

bool lh_sim_copies_dev_is_dead(void *context)
{
    return of(context)->is_dead;
}
