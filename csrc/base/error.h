/*
 * How lohan's core reports failure.
 *
 * Every fallible function returns int: 0 or a count on success, -errno on failure, so that a kernel
 * completion, a core function and Python's OSError(errno) speak one language. Boundary functions
 * also take `struct lh_error *err` last; it may be NULL. Its message carries the values and the
 * limits ("host_bytes 1048576 is below the 3145728 that block 0 needs").
 *
 * Thread: a struct lh_error belongs to its caller; no function here keeps a pointer to it.
 */
#ifndef LH_BASE_ERROR_H
#define LH_BASE_ERROR_H

#include <errno.h>

#include "base/base.h"

#define LH_ERROR_MESSAGE_BYTES 768

struct lh_error {
    int code;       /* -errno, 0 when nothing failed */
    int64_t native; /* the code of another library (CUresult), 0 when there is none */
    char message[LH_ERROR_MESSAGE_BYTES];
};

/*
 * Record a failure and return its code, so that `return lh_error_set(err, -EINVAL, "...")` reads as
 * one thing.
 *
 * Errors: none; code must be negative. A message that does not fit is cut.
 * Thread: any.
 */
int lh_error_set(struct lh_error *err, int code, const char *format, ...) LH_PRINTF(3, 4);

/*
 * Put "prefix: " before the message that err already has; does nothing where err is NULL or empty.
 * Returns err's code.
 */
int lh_error_prefix(struct lh_error *err, const char *format, ...) LH_PRINTF(2, 3);

void lh_error_clear(struct lh_error *err);

/*
 * Forward a failure when nothing is to be undone. Never after the first acquisition in a function.
 */
#define LH_TRY(expression)                                                                         \
    do {                                                                                           \
        int lh_try_rc_ = (expression);                                                             \
        if (lh_try_rc_ < 0)                                                                        \
            return lh_try_rc_;                                                                     \
    } while (0)

#endif
