/*
 * LH_ASSERT is always on: continuing after a broken invariant could write wrong optimizer state to
 * disk. LH_DCHECK is for checks too dear for release builds. Neither is for user errors: those get
 * a named error from the binding.
 */
#ifndef LH_BASE_ASSERT_H
#define LH_BASE_ASSERT_H

#include "base/base.h"

/* Print the expression and its place to stderr, call the hook if one is set, abort. */
_Noreturn void lh_assert_fail(const char *expression, const char *file, int line);

/*
 * A simulator sets a hook that prints its seed; NULL removes it. Thread: set before threads start.
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
