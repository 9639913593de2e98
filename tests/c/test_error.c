#include "base/error.h"

#include "base/assert.h"
#include "base/clock.h"
#include "lh_test.h"

static int third(int code, struct lh_error *err)
{
    LH_TRY(code < 0 ? lh_error_set(err, code, "third refused %d", code) : code);
    return 100;
}

static void assert_false(void *context)
{
    (void)context;
    LH_ASSERT(1 + 1 == 3);
}

static void leave_quietly(void *context)
{
    _exit(*(int *)context);
}

static void assert_false_with_hook(void *context)
{
    lh_assert_hook_set(leave_quietly, context);
    LH_ASSERT(1 + 1 == 3);
}

int main(void)
{
    struct lh_error err = {.native = 7};

    lh_test_name("set returns its code and keeps the numbers in the message");
    LH_CHECK(lh_error_set(&err, -ENOSPC, "slab_bytes %d is above %d", 5000, 4096) == -ENOSPC);
    LH_CHECK(err.code == -ENOSPC && err.native == 0);
    LH_CHECK(strcmp(err.message, "slab_bytes 5000 is above 4096") == 0);

    lh_test_name("a prefix goes before the message and keeps the code");
    LH_CHECK(lh_error_prefix(&err, "block %d", 3) == -ENOSPC);
    LH_CHECK(strcmp(err.message, "block 3: slab_bytes 5000 is above 4096") == 0);

    lh_test_name("an error may be built from its own message");
    LH_CHECK(lh_error_set(&err, -EIO, "again (%s)", err.message) == -EIO);
    LH_CHECK(strcmp(err.message, "again (block 3: slab_bytes 5000 is above 4096)") == 0);

    lh_test_name("what does not fit is cut, never written past the end");
    char long_text[2 * LH_ERROR_MESSAGE_BYTES];
    memset(long_text, 'x', sizeof(long_text) - 1);
    long_text[sizeof(long_text) - 1] = '\0';
    LH_CHECK(lh_error_set(&err, -EIO, "%s", long_text) == -EIO);
    LH_CHECK(strlen(err.message) == LH_ERROR_MESSAGE_BYTES - 1);
    for (uint64_t length = LH_ERROR_MESSAGE_BYTES - 8; length < sizeof(long_text); length++) {
        lh_error_set(&err, -EIO, "tail");
        LH_CHECK(lh_error_prefix(&err, "%.*s", (int)length, long_text) == -EIO);
        LH_CHECK(strlen(err.message) < LH_ERROR_MESSAGE_BYTES);
        LH_CHECK(strstr(err.message, "xxx: ") || length >= LH_ERROR_MESSAGE_BYTES - 3);
    }

    lh_test_name("clear leaves nothing, and an empty error takes no prefix");
    lh_error_clear(&err);
    LH_CHECK(err.code == 0 && err.message[0] == '\0');
    LH_CHECK(lh_error_prefix(&err, "block 3") == 0 && err.message[0] == '\0');

    lh_test_name("a caller that wants no message gets the code");
    LH_CHECK(lh_error_set(NULL, -EINVAL, "unused %d", 1) == -EINVAL);
    LH_CHECK(lh_error_prefix(NULL, "unused %d", 1) == 0);
    lh_error_clear(NULL);

    lh_test_name("LH_TRY forwards failures and nothing else");
    LH_CHECK(third(-EAGAIN, &err) == -EAGAIN && err.code == -EAGAIN);
    LH_CHECK(third(5, &err) == 100);

    lh_test_name("a broken assertion aborts, after its hook");
    int code = 0;
    LH_CHECK(lh_test_aborts(assert_false, NULL));
    LH_CHECK(!lh_test_aborts(assert_false_with_hook, &code));

    lh_test_name("the clock does not go backwards, and moves");
    struct lh_clock clock = lh_clock_real();
    uint64_t first_ns = lh_clock_now_ns(&clock);
    uint64_t now_ns = first_ns;
    for (int i = 0; i < 1000 || now_ns == first_ns; i++) {
        uint64_t next_ns = lh_clock_now_ns(&clock);
        LH_CHECK(next_ns >= now_ns);
        now_ns = next_ns;
    }
    return 0;
}
