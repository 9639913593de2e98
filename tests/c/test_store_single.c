/* Test commits without writes of a store with one slot, which overwrites committed data. */
#include <sys/wait.h>
#include <unistd.h>

#include "lh_test.h"
#include "store_fixture.h"

static struct lh_error err;

/* Make a store of one slot at step 1, and close it. */
static void make(const char *name)
{
    struct fixture_opts opts = {.directory_count = 1, .single_slot = true, .small = true};
    struct lh_store *store = NULL;
    LH_CHECK(fixture_create(name, &opts, &store, &err) == 0);
    fixture_write_step(store, 1);
    fixture_commit(store, 1);
    lh_store_close(store);
}

static struct lh_store *opened(const char *name)
{
    struct lh_store *store = NULL;
    LH_CHECK(fixture_open(name, 1, false, false, &store, &err) == 0);
    return store;
}

static void requests_run(struct lh_store *store, struct lh_io_request *requests, int count)
{
    for (int i = 0; i < count; i++) {
        int fd = lh_store_files(store)[requests[i].file_index].fd;
        if (requests[i].kind == LH_IO_KIND_SYNC)
            requests[i].result = fdatasync(fd);
        else
            requests[i].result =
                pwrite(fd, requests[i].buffer, requests[i].bytes, (off_t)requests[i].offset);
        LH_CHECK(requests[i].result >= 0);
    }
}

/* Begin a commit of nothing, and a write during it; then die, or end the commit and close. */
static void write_in_commit(const char *name, bool is_killed)
{
    struct lh_io_request requests[LH_STORE_COMMIT_REQUEST_COUNT_MAX];
    struct lh_store *store = opened(name);
    LH_CHECK(lh_store_commit_begin(store, 2, NULL, 0, &err) == 0);
    LH_CHECK(lh_store_write_begin(store, &err) == 0);
    if (is_killed)
        _exit(0);
    for (int count = 1; count > 0;) {
        count = lh_store_commit_next(store, requests, LH_COUNT_OF(requests), &err);
        LH_CHECK(count >= 0);
        requests_run(store, requests, count);
    }
    LH_CHECK(lh_store_step(store) == 2);
    lh_store_close(store);
    _exit(0);
}

static void test_write_in_commit(void)
{
    for (int is_killed = 0; is_killed < 2; is_killed++) {
        lh_test_name("a write to one slot may begin during a commit of nothing, and the store is "
                     "unclean from then on, %s",
                     is_killed ? "if the process dies" : "after the commit, too");
        const char *name = is_killed ? "killed" : "committed";
        struct lh_store *store = NULL;
        int status = 0;
        make(name);
        pid_t child = fork();
        if (child == 0)
            write_in_commit(name, is_killed);
        LH_CHECK(waitpid(child, &status, 0) == child && status == 0);
        LH_CHECK(fixture_open(name, 1, false, false, &store, &err) == -EUCLEAN);
        LH_CHECK(strstr(err.message, is_killed ? "step 1:" : "step 2:") != NULL);
    }
}

static void test_clean(void)
{
    lh_test_name("a commit of nothing leaves a store with one slot clean, once it is closed");
    make("clean");
    struct lh_store *store = opened("clean");
    fixture_commit(store, 2);
    lh_store_close(store);
    store = opened("clean");
    LH_CHECK(lh_store_step(store) == 2 && fixture_holds_step(store, 1));
    lh_store_close(store);
}

int main(void)
{
    test_write_in_commit();
    test_clean();
    return 0;
}
