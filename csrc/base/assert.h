/*
 * LH_ASSERT is always enabled: continuing after a broken invariant could write wrong optimizer
 * state to disk. LH_DCHECK is for checks too expensive for release builds. Neither is for user
 * errors: the binding raises exceptions for those.
 */
#ifndef LH_BASE_ASSERT_H
#define LH_BASE_ASSERT_H

#include "base/base.h"

/* Print the expression and its location to stderr, call the hook if one is set, and abort. */
_Noreturn void lh_assert_fail(const char *expression, const char *file, int line);

/*
 * Set the hook, in which a simulator prints its seed; NULL removes the hook. Thread: call this
 * before threads start.
 */
void lh_assert_hook_set(void (*hook)(void *context), void *context);

#define LH_ASSERT(expression)                                                                      \
    do {                                                                                           \
        if (__builtin_expect(!(expression), 0))                                                    \
            lh_assert_fail(#expression, __FILE__, __LINE__);                                       \
    } while (0)

#ifdef LH_DEBUG
#define LH_DCHECK(expression) LH_ASSERT(expression)
#else
#define LH_DCHECK(expression) ((void)0)
#endif

#endif
