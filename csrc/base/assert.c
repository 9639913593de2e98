#include "base/assert.h"

#include <stdio.h>
#include <stdlib.h>

static void (*assert_hook)(void *context);
static void *assert_hook_context;

void lh_assert_hook_set(void (*hook)(void *context), void *context)
{
    assert_hook = hook;
    assert_hook_context = context;
}

_Noreturn void lh_assert_fail(const char *expression, const char *file, int line)
{
    fprintf(stderr, "lohan: %s:%d: assertion failed: %s\n", file, line, expression);
    /* Clear the hook first: a failed assertion inside it must not recurse forever. */
    void (*hook)(void *context) = assert_hook;
    assert_hook = NULL;
    if (hook)
        hook(assert_hook_context);
    fflush(NULL);
    abort();
}
