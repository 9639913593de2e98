#include "sim/world.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "base/assert.h"

/* The most bytes that can be multiplied by a billion in 64 bits; no request is nearly as large. */
#define TRANSFER_BYTES_MAX (UINT64_C(1) << 34)

uint64_t lh_sim_scramble(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

uint64_t lh_sim_mix(uint64_t a, uint64_t b)
{
    return lh_sim_scramble(a + lh_sim_scramble(b + UINT64_C(0x9E3779B97F4A7C15)));
}

int lh_sim_world_init(struct lh_sim_world *world, struct lh_alloc *alloc, uint32_t event_max,
                      struct lh_error *err)
{
    *world = (struct lh_sim_world){.alloc = alloc, .event_max = event_max};
    world->events = lh_alloc_zeroed(alloc, event_max, sizeof(*world->events));
    return world->events
               ? 0
               : lh_error_set(err, -ENOMEM, "no memory for %" PRIu32 " events", event_max);
}

void lh_sim_world_deinit(struct lh_sim_world *world)
{
    lh_free(world->alloc, world->events);
    world->events = NULL;
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

uint64_t lh_sim_world_next_ns(const struct lh_sim_world *world)
{
    return world->event_count > 0 ? world->events[0].at_ns : UINT64_MAX;
}

void lh_sim_world_forget(struct lh_sim_world *world)
{
    world->event_count = 0;
}

void lh_sim_world_trace(const struct lh_sim_world *world, enum lh_sim_trace_kind kind, uint64_t a,
                        uint64_t b, uint64_t c)
{
    LH_SIM_HOOK_CALL(world, traced, kind, a, b, c);
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
