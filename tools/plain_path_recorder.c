/*
 * Record which functions of the extension are entered and left, on which thread: preloaded by
 * tools/plain_path.py. The extension is compiled with -finstrument-functions, which calls the two
 * functions below.
 */
#include <stdatomic.h>
#include <stdint.h>

#define EVENT_COUNT_MAX 4000000

struct event {
    uintptr_t function;
    uint32_t thread;
    uint32_t is_entry;
};

void __cyg_profile_func_enter(void *function, void *site);
void __cyg_profile_func_exit(void *function, void *site);

struct event recorded_events[EVENT_COUNT_MAX];
atomic_ullong recorded_count; /* may exceed EVENT_COUNT_MAX: the rest was not recorded */
atomic_bool recording;

static atomic_uint thread_count;
static _Thread_local uint32_t thread; /* 0: this thread has not recorded anything yet */

static void record(void *function, uint32_t is_entry)
{
    if (!atomic_load(&recording))
        return;
    if (thread == 0)
        thread = atomic_fetch_add(&thread_count, 1) + 1;
    unsigned long long at = atomic_fetch_add(&recorded_count, 1);
    if (at < EVENT_COUNT_MAX)
        recorded_events[at] = (struct event){(uintptr_t)function, thread, is_entry};
}

void __cyg_profile_func_enter(void *function, void *site)
{
    (void)site;
    record(function, 1);
}

void __cyg_profile_func_exit(void *function, void *site)
{
    (void)site;
    record(function, 0);
}
