/*
 * Test the calls of a table of features: their order, where a condition stops, and that features
 * which lack a function, and a session without features, change nothing.
 */
#include <string.h>

#include "lh_test.h"
#include "sched/engine_private.h"

static struct lh_engine engine;
static char calls[16]; /* a letter for each call, in order */
static bool answers[2];

static void called(char name)
{
    size_t count = strlen(calls);
    LH_CHECK(count + 1 < sizeof(calls));
    calls[count] = name;
    calls[count + 1] = '\0';
}

static bool first_may_end(const struct lh_engine *made)
{
    LH_CHECK(made == &engine);
    called('a');
    return answers[0];
}

static bool second_may_end(const struct lh_engine *made)
{
    LH_CHECK(made == &engine);
    called('b');
    return answers[1];
}

static bool first_pump(struct lh_engine *made)
{
    return first_may_end(made);
}

static bool second_pump(struct lh_engine *made)
{
    return second_may_end(made);
}

static void second_use_begun(struct lh_engine *made, uint32_t unit)
{
    LH_CHECK(made == &engine && unit == 7);
    called('u');
}

static const struct lh_feature first = {
    .name = "first",
    .step_may_end = first_may_end,
    .pump_after = first_pump,
};
static const struct lh_feature silent = {.name = "silent"};
static const struct lh_feature second = {
    .name = "second",
    .use_begun = second_use_begun,
    .step_may_end = second_may_end,
    .pump_after = second_pump,
};

static void features_set(bool are_there)
{
    const struct lh_feature *const all[] = {&first, &silent, &second};
    memcpy(engine.features.all, all, sizeof(all));
    engine.features.count = are_there ? LH_COUNT_OF(all) : 0;
}

int main(void)
{
    lh_test_name("a session without features may do everything, and calls nothing");
    features_set(false);
    LH_CHECK(LH_FEATURE_ALL(&engine, step_may_end));
    LH_CHECK(!LH_FEATURE_ANY(&engine, step_may_end) && !LH_FEATURE_PUMP(&engine, pump_after));
    LH_FEATURE_CALL(&engine, use_begun, 7);
    LH_CHECK(calls[0] == '\0');

    lh_test_name("conditions stop where they are decided, pumps and calls reach every feature");
    features_set(true);
    for (int i = 0; i < 4; i++) {
        answers[0] = i & 1;
        answers[1] = i & 2;
        calls[0] = '\0';
        LH_CHECK(LH_FEATURE_ALL(&engine, step_may_end) == (answers[0] && answers[1]));
        LH_CHECK(strcmp(calls, answers[0] ? "ab" : "a") == 0);
        calls[0] = '\0';
        LH_CHECK(LH_FEATURE_ANY(&engine, step_may_end) == (answers[0] || answers[1]));
        LH_CHECK(strcmp(calls, answers[0] ? "a" : "ab") == 0);
        calls[0] = '\0';
        LH_CHECK(LH_FEATURE_PUMP(&engine, pump_after) == (answers[0] || answers[1]));
        LH_FEATURE_CALL(&engine, use_begun, 7);
        LH_CHECK(strcmp(calls, "abu") == 0);
    }
    return 0;
}
