/* Test how a backend handles results of the kernel, one at a time. */
#include "io/io_private.h"
#include "lh_test.h"

#define REQUEST_BYTES (4 * LH_BLOCK_BYTES)

static struct lh_clock real;
static struct lh_io_base base;
static struct lh_io_request request;
static _Alignas(4096) uint8_t buffer[REQUEST_BYTES];

static void begin(enum lh_io_kind kind, bool direct)
{
    static const struct lh_io_ops ops = {.version = LH_IO_OPS_VERSION, .name = "none"};
    struct lh_io_file file = {.fd = -1, .direct = direct};
    struct lh_io_opts opts = {
        .files = &file, .file_count = 1, .queue_depth_max = 1, .clock = &real};
    lh_io_base_init(&base, &ops, &opts, NULL);
    request = (struct lh_io_request){.kind = kind, .buffer = buffer, .bytes = REQUEST_BYTES};
    LH_CHECK(lh_io_base_take(&base, &request) == 0);
    LH_CHECK(request.result == -EINPROGRESS);
}

static void test_errors(void)
{
    static const int codes[] = {EIO, ENOSPC, EDQUOT, EBADF, EINVAL, EOPNOTSUPP, EROFS};
    static const enum lh_io_kind kinds[] = {LH_IO_KIND_READ, LH_IO_KIND_WRITE, LH_IO_KIND_SYNC};
    lh_test_name("every error is the request's result, whatever its kind and progress");
    for (uint32_t code = 0; code < LH_COUNT_OF(codes); code++) {
        for (uint32_t kind = 0; kind < LH_COUNT_OF(kinds); kind++) {
            begin(kinds[kind], true);
            LH_CHECK(lh_io_request_advance(&base, &request, -codes[code]));
            LH_CHECK(request.result == -codes[code]);
            if (kinds[kind] == LH_IO_KIND_SYNC)
                continue;
            begin(kinds[kind], true);
            LH_CHECK(!lh_io_request_advance(&base, &request, LH_BLOCK_BYTES));
            LH_CHECK(lh_io_request_advance(&base, &request, -codes[code]));
            LH_CHECK(request.result == -codes[code]);
        }
    }
}

static void test_nothing_moved(void)
{
    lh_test_name("a write of which nothing is taken is an error, a read the end of the file");
    begin(LH_IO_KIND_WRITE, false);
    LH_CHECK(lh_io_request_advance(&base, &request, 0) && request.result == -EIO);
    begin(LH_IO_KIND_READ, false);
    LH_CHECK(lh_io_request_advance(&base, &request, 0) && request.result == -ENODATA);

    lh_test_name("EINTR and EAGAIN are retried, but not forever");
    static const int64_t answers[] = {-EINTR, -EAGAIN};
    for (uint32_t i = 0; i < LH_COUNT_OF(answers); i++) {
        uint32_t tries = 0;
        begin(LH_IO_KIND_WRITE, true);
        while (tries < 1000 && !lh_io_request_advance(&base, &request, answers[i]))
            tries++;
        LH_CHECK(tries == LH_IO_RETRY_COUNT_MAX && request.result == answers[i]);
    }

    lh_test_name("whatever moved some bytes may be tried as often again");
    begin(LH_IO_KIND_WRITE, true);
    for (uint32_t i = 0; i < LH_IO_RETRY_COUNT_MAX; i++)
        LH_CHECK(!lh_io_request_advance(&base, &request, -EAGAIN));
    LH_CHECK(!lh_io_request_advance(&base, &request, LH_BLOCK_BYTES));
    for (uint32_t i = 0; i < LH_IO_RETRY_COUNT_MAX; i++)
        LH_CHECK(!lh_io_request_advance(&base, &request, -EAGAIN));
    LH_CHECK(lh_io_request_advance(&base, &request, -EAGAIN) && request.result == -EAGAIN);
}

static void test_torn(void)
{
    lh_test_name("a direct write that ends inside a block writes that block again");
    begin(LH_IO_KIND_WRITE, true);
    LH_CHECK(!lh_io_request_advance(&base, &request, LH_BLOCK_BYTES + 512));
    LH_CHECK(request.done_bytes == LH_BLOCK_BYTES);
    LH_CHECK(lh_io_base_rest_bytes(&base, &request) == REQUEST_BYTES - LH_BLOCK_BYTES);
    LH_CHECK(lh_io_request_rest(&request) == buffer + LH_BLOCK_BYTES);
    LH_CHECK(lh_io_request_advance(&base, &request, REQUEST_BYTES - LH_BLOCK_BYTES));
    LH_CHECK(request.result == 0);

    lh_test_name("a direct write that never fills a block is an error in the end");
    begin(LH_IO_KIND_WRITE, true);
    uint32_t tries = 0;
    while (tries < 1000 && !lh_io_request_advance(&base, &request, 512))
        tries++;
    LH_CHECK(tries == LH_IO_RETRY_COUNT_MAX && request.result == -EIO);

    lh_test_name("a direct read that ends inside a block has met the end of the file");
    begin(LH_IO_KIND_READ, true);
    LH_CHECK(lh_io_request_advance(&base, &request, 512) && request.result == -ENODATA);

    lh_test_name("a buffered transfer continues at any byte");
    begin(LH_IO_KIND_WRITE, false);
    LH_CHECK(!lh_io_request_advance(&base, &request, 5) && request.done_bytes == 5);
    LH_CHECK(lh_io_request_rest(&request) == buffer + 5);
    LH_CHECK(lh_io_request_advance(&base, &request, REQUEST_BYTES - 5) && request.result == 0);

    lh_test_name("a transfer is cut into pieces that the kernel takes");
    begin(LH_IO_KIND_WRITE, false);
    base.piece_bytes_max = 7;
    LH_CHECK(lh_io_base_rest_bytes(&base, &request) == 7);
    LH_CHECK(!lh_io_request_advance(&base, &request, REQUEST_BYTES - 3));
    LH_CHECK(lh_io_base_rest_bytes(&base, &request) == 3);
}

static void test_least(void)
{
    lh_test_name("a read whose least bytes are here is whole, and one short of them is not");
    begin(LH_IO_KIND_READ, true);
    request.least_bytes = LH_BLOCK_BYTES + 5;
    LH_CHECK(!lh_io_request_advance(&base, &request, LH_BLOCK_BYTES));
    LH_CHECK(lh_io_request_advance(&base, &request, 5) && request.result == 0);
    begin(LH_IO_KIND_READ, true);
    request.least_bytes = LH_BLOCK_BYTES + 5;
    LH_CHECK(lh_io_request_advance(&base, &request, LH_BLOCK_BYTES + 4));
    LH_CHECK(request.result == -ENODATA);
}

static void test_queue(void)
{
    struct lh_io_queue queue = {0};
    struct lh_io_request requests[3] = {0};
    lh_test_name("a queue gives requests back in the order of their arrival, emptied or not");
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 3; i++)
            lh_io_queue_push(&queue, &requests[i]);
        for (int i = 0; i < 3; i++) {
            LH_CHECK(lh_io_queue_pop(&queue) == &requests[i]);
            LH_CHECK(requests[i].next == NULL);
        }
        LH_CHECK(lh_io_queue_pop(&queue) == NULL && queue.tail == NULL);
    }
}

static void test_depth(void)
{
    lh_test_name("one request above the depth is refused, and counted nowhere");
    struct lh_io_request second = {.kind = LH_IO_KIND_SYNC, .result = 7};
    begin(LH_IO_KIND_SYNC, true);
    LH_CHECK(lh_io_base_take(&base, &second) == -EAGAIN);
    LH_CHECK(base.io.in_flight_count == 1 && second.result == 7);
    lh_io_base_finish(&base);
    LH_CHECK(lh_io_base_take(&base, &second) == 0 && base.io.in_flight_count == 1);
    LH_CHECK(second.result == -EINPROGRESS);
}

int main(void)
{
    real = lh_clock_real();
    test_errors();
    test_nothing_moved();
    test_torn();
    test_least();
    test_queue();
    test_depth();
    return 0;
}
