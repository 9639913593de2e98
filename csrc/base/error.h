/*
 * How lohan's core reports failure.
 *
 * Every fallible function returns int: 0 or a count on success, -errno on failure, as kernel
 * completions and Python's OSError(errno) do. Boundary functions also take `struct lh_error *err`
 * as their last argument; it may be NULL. Its message contains the values and the limits
 * ("host_bytes 1048576 is below the 3145728 that block 0 needs").
 *
 * Thread: a struct lh_error belongs to its caller; no function here keeps a pointer to it.
 */
#ifndef LH_BASE_ERROR_H
#define LH_BASE_ERROR_H

#include <errno.h>

#include "base/base.h"

#define LH_ERROR_MESSAGE_BYTES 768

struct lh_error {
    int code;       /* -errno; 0: nothing failed */
    int64_t native; /* the error code of another library (CUresult), or 0 */
    char message[LH_ERROR_MESSAGE_BYTES];
};

/*
 * Record a failure and return its code: `return lh_error_set(err, -EINVAL, "...")`.
 *
 * Errors: none; code must be negative. A message that does not fit is truncated.
 * Thread: any.
 */
int lh_error_set(struct lh_error *err, int code, const char *format, ...) LH_PRINTF(3, 4);

/*
 * Put the formatted text and ": " before the message of err. Returns the code of err; if err is
 * NULL or has no error, does nothing and returns 0.
 */
int lh_error_prefix(struct lh_error *err, const char *format, ...) LH_PRINTF(2, 3);

void lh_error_clear(struct lh_error *err);

/*
 * Return a failure to the caller if nothing has to be undone. Do not use this in a function after
 * it has acquired something.
 */
#define LH_TRY(expression)                                                                         \
    do {                                                                                           \
        int lh_try_rc_ = (expression);                                                             \
        if (lh_try_rc_ < 0)                                                                        \
            return lh_try_rc_;                                                                     \
    } while (0)

#endif
