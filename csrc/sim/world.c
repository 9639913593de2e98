#include "sim/world.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "base/assert.h"

#define FNV_OFFSET UINT64_C(0xCBF29CE484222325)
#define FNV_PRIME UINT64_C(0x100000001B3)

/* Beyond this, bytes times a billion would overflow 64 bits; no request is nearly as large. */
#define TRANSFER_BYTES_MAX (UINT64_C(1) << 34)

static uint64_t scramble(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

uint64_t lh_sim_mix(uint64_t a, uint64_t b)
{
    return scramble(a + scramble(b + UINT64_C(0x9E3779B97F4A7C15)));
}

void lh_sim_random_init(struct lh_sim_random *random, uint64_t seed, enum lh_sim_stream stream)
{
    uint64_t at = lh_sim_mix(seed, stream);
    for (size_t i = 0; i < LH_COUNT_OF(random->state); i++) {
        at += UINT64_C(0x9E3779B97F4A7C15);
        random->state[i] = scramble(at);
    }
}

static uint64_t rotate(uint64_t value, unsigned count)
{
    return (value << count) | (value >> (64 - count));
}

uint64_t lh_sim_random_next(struct lh_sim_random *random)
{
    uint64_t *s = random->state;
    uint64_t result = rotate(s[1] * 5, 7) * 9;
    uint64_t shifted = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= shifted;
    s[3] = rotate(s[3], 45);
    return result;
}

uint64_t lh_sim_random_below(struct lh_sim_random *random, uint64_t count)
{
    LH_ASSERT(count > 0);
    unsigned __int128 product = (unsigned __int128)lh_sim_random_next(random) * count;
    return (uint64_t)(product >> 64);
}

bool lh_sim_random_chance(struct lh_sim_random *random, uint32_t ppm)
{
    return lh_sim_random_below(random, LH_SIM_PPM_ONE) < ppm;
}

int lh_sim_world_init(struct lh_sim_world *world, struct lh_alloc *alloc, uint32_t event_max,
                      uint64_t trace_bytes_max, struct lh_error *err)
{
    *world = (struct lh_sim_world){.alloc = alloc, .event_max = event_max};
    world->trace_hash = FNV_OFFSET;
    world->trace_bytes_max =
        trace_bytes_max / LH_SIM_TRACE_RECORD_BYTES * LH_SIM_TRACE_RECORD_BYTES;
    world->events = lh_alloc_zeroed(alloc, event_max, sizeof(*world->events));
    if (world->events && world->trace_bytes_max > 0)
        world->trace = lh_alloc_zeroed(alloc, 1, world->trace_bytes_max);
    if (!world->events || (world->trace_bytes_max > 0 && !world->trace)) {
        lh_sim_world_deinit(world);
        return lh_error_set(err, -ENOMEM,
                            "no memory for %" PRIu32 " events and %" PRIu64 " bytes of trace",
                            event_max, trace_bytes_max);
    }
    return 0;
}

void lh_sim_world_deinit(struct lh_sim_world *world)
{
    lh_free(world->alloc, world->events);
    lh_free(world->alloc, world->trace);
    world->events = NULL;
    world->trace = NULL;
}

static uint64_t now_ns(void *context)
{
    const struct lh_sim_world *world = context;
    return world->now_ns;
}

struct lh_clock lh_sim_world_clock(struct lh_sim_world *world)
{
    return (struct lh_clock){.now_ns = now_ns, .context = world};
}

static bool is_before(const struct lh_sim_event *a, const struct lh_sim_event *b)
{
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->sequence < b->sequence;
}

void lh_sim_world_at(struct lh_sim_world *world, uint64_t at_ns, lh_sim_fire_fn fire, void *context)
{
    LH_ASSERT(at_ns >= world->now_ns && world->event_count < world->event_max);
    struct lh_sim_event event = {
        .at_ns = at_ns, .sequence = world->next_sequence++, .fire = fire, .context = context};
    uint32_t at = world->event_count++;
    while (at > 0 && is_before(&event, &world->events[(at - 1) / 2])) {
        world->events[at] = world->events[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    world->events[at] = event;
}

bool lh_sim_world_advance(struct lh_sim_world *world)
{
    if (world->event_count == 0)
        return false;
    struct lh_sim_event first = world->events[0];
    struct lh_sim_event last = world->events[--world->event_count];
    uint32_t at = 0;
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= world->event_count)
            break;
        if (child + 1 < world->event_count &&
            is_before(&world->events[child + 1], &world->events[child]))
            child++;
        if (!is_before(&world->events[child], &last))
            break;
        world->events[at] = world->events[child];
        at = child;
    }
    world->events[at] = last;
    LH_ASSERT(first.at_ns >= world->now_ns);
    world->now_ns = first.at_ns;
    world->fired_count++;
    first.fire(first.context);
    return true;
}

void lh_sim_world_forget(struct lh_sim_world *world)
{
    world->event_count = 0;
}

void lh_sim_world_trace(struct lh_sim_world *world, enum lh_sim_trace_kind kind, uint64_t a,
                        uint64_t b, uint64_t c)
{
    const uint64_t words[] = {world->now_ns, kind, a, b, c};
    _Static_assert(sizeof(words) == LH_SIM_TRACE_RECORD_BYTES, "no padding");
    bool is_kept = world->trace_bytes + sizeof(words) <= world->trace_bytes_max;
    for (uint32_t i = 0; i < LH_SIM_TRACE_RECORD_BYTES; i++) {
        /* Little endian, on every machine. */
        uint8_t byte = (uint8_t)(words[i / 8] >> (i % 8 * 8));
        world->trace_hash = (world->trace_hash ^ byte) * FNV_PRIME;
        if (is_kept)
            world->trace[world->trace_bytes++] = byte;
    }
}

void lh_sim_world_fault(struct lh_sim_world *world, enum lh_sim_fault fault, uint64_t file,
                        uint64_t offset, uint64_t detail)
{
    world->fault_counts[fault]++;
    lh_sim_world_trace(world, LH_SIM_TRACE_FAULT, (uint64_t)fault << 32 | file, offset, detail);
}

bool lh_sim_world_had_fault(const struct lh_sim_world *world, uint64_t faults)
{
    for (uint32_t i = 0; i < LH_SIM_FAULT_COUNT; i++) {
        if ((faults & LH_SIM_FAULT_BIT_OF(i)) != 0 && world->fault_counts[i] > 0)
            return true;
    }
    return false;
}

uint64_t lh_sim_world_fault_count(const struct lh_sim_world *world)
{
    uint64_t count = 0;
    for (uint32_t i = 0; i < LH_SIM_FAULT_COUNT; i++)
        count += world->fault_counts[i];
    return count;
}

void lh_sim_world_fail(struct lh_sim_world *world, const char *format, ...)
{
    char message[LH_ERROR_MESSAGE_BYTES];
    va_list arguments;
    if (world->failure.code != 0)
        return;
    va_start(arguments, format);
    vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    (void)lh_error_set(&world->failure, -EPROTO, "at %" PRIu64 " ns: %s", world->now_ns, message);
}

bool lh_sim_world_has_failed(const struct lh_sim_world *world)
{
    return world->failure.code != 0;
}

uint64_t lh_sim_transfer_ns(uint64_t bytes, uint64_t bytes_per_s)
{
    LH_ASSERT(bytes <= TRANSFER_BYTES_MAX && bytes_per_s > 0);
    return lh_div_ceil(bytes * LH_SIM_NS_PER_S, bytes_per_s);
}
