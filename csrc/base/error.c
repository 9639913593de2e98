#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"

int lh_error_set(struct lh_error *err, int code, const char *format, ...)
{
    LH_ASSERT(code < 0);
    if (!err)
        return code;
    va_list arguments;
    va_start(arguments, format);
    /* Use a separate buffer, because an argument may point into err's message. */
    char message[LH_ERROR_MESSAGE_BYTES];
    int length = vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    LH_ASSERT(length >= 0);
    err->code = code;
    err->native = 0;
    memcpy(err->message, message, sizeof(message));
    return code;
}

int lh_error_prefix(struct lh_error *err, const char *format, ...)
{
    if (!err || err->code == 0)
        return 0;
    va_list arguments;
    va_start(arguments, format);
    char message[LH_ERROR_MESSAGE_BYTES];
    int length = vsnprintf(message, sizeof(message), format, arguments);
    va_end(arguments);
    LH_ASSERT(length >= 0);
    uint64_t used = lh_min_u64((uint64_t)length, sizeof(message) - 3);
    memcpy(message + used, ": ", 2);
    used += 2;
    uint64_t kept = lh_min_u64(strlen(err->message), sizeof(message) - 1 - used);
    memcpy(message + used, err->message, kept);
    message[used + kept] = '\0';
    memcpy(err->message, message, sizeof(message));
    return err->code;
}

void lh_error_clear(struct lh_error *err)
{
    if (!err)
        return;
    err->code = 0;
    err->native = 0;
    err->message[0] = '\0';
}
