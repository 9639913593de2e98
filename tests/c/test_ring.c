#include "base/ring.h"

#include <pthread.h>
#include <sched.h>

#include "lh_test.h"

#define WRITER_COUNT 2
#define MESSAGE_COUNT 50000

struct writer {
    struct lh_ring *ring;
    uint64_t writer_index;
    uint64_t full_count;
    pthread_t thread;
};

static struct lh_ring_message message_of(uint64_t writer_index, uint64_t number)
{
    return (struct lh_ring_message){
        {writer_index, number, number * 3, writer_index ^ number ^ UINT64_C(0x5a5a)}};
}

static void *write_messages(void *context)
{
    struct writer *writer = context;
    for (uint64_t number = 0; number < MESSAGE_COUNT;) {
        if (lh_ring_push(writer->ring, message_of(writer->writer_index, number))) {
            number++;
        } else {
            writer->full_count++;
            sched_yield();
        }
    }
    return NULL;
}

static void test_two_writers(struct lh_alloc *alloc, uint64_t cell_count)
{
    lh_test_name("two writers, %" PRIu64 " cells: all arrive whole, once, in each writer's order",
                 cell_count);
    struct lh_ring ring;
    struct writer writers[WRITER_COUNT];
    uint64_t next[WRITER_COUNT] = {0};
    LH_CHECK(lh_ring_init(&ring, alloc, cell_count, NULL) == 0);
    for (uint64_t i = 0; i < WRITER_COUNT; i++) {
        writers[i] = (struct writer){.ring = &ring, .writer_index = i};
        LH_CHECK(pthread_create(&writers[i].thread, NULL, write_messages, &writers[i]) == 0);
    }
    for (uint64_t got = 0; got < WRITER_COUNT * MESSAGE_COUNT;) {
        struct lh_ring_message message;
        if (!lh_ring_pop(&ring, &message)) {
            sched_yield();
            continue;
        }
        uint64_t from = message.words[0];
        LH_CHECK(from < WRITER_COUNT);
        struct lh_ring_message expected = message_of(from, next[from]);
        LH_CHECK(memcmp(&message, &expected, sizeof(message)) == 0);
        next[from]++;
        got++;
    }
    for (uint64_t i = 0; i < WRITER_COUNT; i++)
        LH_CHECK(pthread_join(writers[i].thread, NULL) == 0);
    struct lh_ring_message rest;
    LH_CHECK(!lh_ring_pop(&ring, &rest));
    lh_ring_deinit(&ring, alloc);
}

static void test_one_thread(struct lh_alloc *alloc)
{
    struct lh_ring ring;
    struct lh_ring_message message;
    for (uint64_t wanted = 1; wanted <= 9; wanted++) {
        lh_test_name("a ring for %" PRIu64 " holds them, refuses when full, and loses nothing",
                     wanted);
        LH_CHECK(lh_ring_init(&ring, alloc, wanted, NULL) == 0);
        uint64_t cell_count = ring.mask + 1;
        LH_CHECK(cell_count >= wanted && (cell_count & ring.mask) == 0);
        LH_CHECK(!lh_ring_pop(&ring, &message));
        uint64_t written = 0;
        uint64_t taken = 0;
        for (uint64_t lap = 0; lap < 5; lap++) {
            while (lh_ring_push(&ring, message_of(0, written)))
                written++;
            LH_CHECK(written - taken == cell_count);
            for (uint64_t i = 0; i < cell_count - lap % 2; i++) {
                LH_CHECK(lh_ring_pop(&ring, &message));
                LH_CHECK(message.words[1] == taken && message.words[2] == taken * 3);
                taken++;
            }
        }
        while (lh_ring_pop(&ring, &message))
            LH_CHECK(message.words[1] == taken++);
        LH_CHECK(taken == written);
        lh_ring_deinit(&ring, alloc);
    }
}

int main(void)
{
    struct lh_alloc alloc = LH_ALLOC_INIT;
    struct lh_ring ring;
    struct lh_error err = {0};

    lh_test_name("a size out of range is refused with the number");
    LH_CHECK(lh_ring_init(&ring, &alloc, 0, &err) == -EINVAL);
    LH_CHECK(lh_ring_init(&ring, &alloc, (UINT64_C(1) << 24) + 1, &err) == -EINVAL);
    LH_CHECK(strstr(err.message, "16777217") && !ring.cells);

    lh_test_name("no memory is an error, not a crash");
    alloc.fail_after = 0;
    LH_CHECK(lh_ring_init(&ring, &alloc, 8, &err) == -ENOMEM && !ring.cells);
    alloc.fail_after = -1;

    test_one_thread(&alloc);
    test_two_writers(&alloc, 2);
    test_two_writers(&alloc, 64);
    LH_CHECK(alloc.live_count == 0);
    return 0;
}
