/*
 * Conversion of Python's values to C and back, by tables of fields: the only code that decides
 * which values a number, a name or a list may have, and that words the errors about values.
 *
 *     struct lhpy_field {name, kind, place of the member, bounds}      one value
 *     struct lhpy_table {what it describes, form, fields}              one struct
 *
 * A member's kind follows from its C type (LHPY_KIND), so that a field cannot write more bytes than
 * its member has.
 *
 * 1. A wrong type raises TypeError and a value out of range ValueError. Both messages name the key,
 *    the value or its type, and what is allowed. bool is not an integer here, and 1 is not a bool.
 * 2. Texts, bytes and objects are borrowed from the objects that are read. Rows are copied, and
 *    released with lhpy_free(); after an error the caller owns nothing.
 * 3. A member whose value is missing (is_optional) or None (may_be_none) is not changed; in rows,
 *    it is 0.
 *
 * Thread: with the GIL.
 */
#ifndef LH_PY_READER_H
#define LH_PY_READER_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum lhpy_kind {
    LHPY_KIND_BOOL = 0,
    LHPY_KIND_U8,
    LHPY_KIND_U32,
    LHPY_KIND_U64,
    LHPY_KIND_I32,
    LHPY_KIND_I64,
    LHPY_KIND_FLOAT,
    LHPY_KIND_DOUBLE,
    LHPY_KIND_TEXT,    /* const char *, from a str or bytes without a zero byte */
    LHPY_KIND_BYTES,   /* struct lhpy_bytes, from bytes */
    LHPY_KIND_ADDRESS, /* a pointer, from an integer, which is trusted */
    LHPY_KIND_OBJECT,  /* PyObject *, the object itself */
    LHPY_KIND_STRUCT,  /* the struct of a table */
    LHPY_KIND_ROWS,    /* a pointer to structs of a table, and their count, from a list or tuple */
};

struct lhpy_bytes {
    const void *data;
    uint64_t bytes;
};

/* Enumerations are uint32_t. */
#define LHPY_KIND(member)                                                                          \
    _Generic((member),                                                                             \
        bool: LHPY_KIND_BOOL,                                                                      \
        uint8_t: LHPY_KIND_U8,                                                                     \
        uint32_t: LHPY_KIND_U32,                                                                   \
        uint64_t: LHPY_KIND_U64,                                                                   \
        int32_t: LHPY_KIND_I32,                                                                    \
        int64_t: LHPY_KIND_I64,                                                                    \
        float: LHPY_KIND_FLOAT,                                                                    \
        double: LHPY_KIND_DOUBLE,                                                                  \
        const char *: LHPY_KIND_TEXT,                                                              \
        struct lhpy_bytes: LHPY_KIND_BYTES,                                                        \
        void *: LHPY_KIND_ADDRESS,                                                                 \
        const void *: LHPY_KIND_ADDRESS,                                                           \
        float *: LHPY_KIND_ADDRESS,                                                                \
        uint32_t *: LHPY_KIND_ADDRESS,                                                             \
        PyObject *: LHPY_KIND_OBJECT)

struct lhpy_field {
    const char *name;
    enum lhpy_kind kind;
    uintptr_t place; /* the member's offset in its struct, or the address of a variable */
    bool is_optional;
    bool may_be_none;
    bool is_index;            /* for a uint32_t: -1 and None are UINT32_MAX, which means none */
    uint64_t min;             /* the minimum of an unsigned integer */
    uint64_t max;             /* its maximum; 0: what the member can hold */
    const char *const *names; /* ends with NULL: the value is a name, the member its index */
    PyTypeObject *type;       /* the type of an object; NULL: any */
    const struct lhpy_table *table; /* the table of a struct or of rows */
    uintptr_t count_place;          /* the place of the number of rows, a uint32_t */
};

/* A field for a struct's member or a variable, under its own name or another; then designators. */
#define LHPY_FIELD(type, member, ...) LHPY_FIELD_AS(#member, type, member, __VA_ARGS__)
#define LHPY_FIELD_AS(text, type, member, ...)                                                     \
    {.name = (text),                                                                               \
     .kind = LHPY_KIND(((type *)0)->member),                                                       \
     .place = offsetof(type, member),                                                              \
     __VA_ARGS__}
#define LHPY_ARG(variable, ...) LHPY_ARG_AS(#variable, variable, __VA_ARGS__)
#define LHPY_ARG_AS(text, variable, ...)                                                           \
    {.name = (text), .kind = LHPY_KIND(variable), .place = (uintptr_t)&(variable), __VA_ARGS__}
/*
 * LHPY_FIELD() for each of up to 81 members. The preprocessor does not expand a macro within
 * itself, so each member leaves a call for the next scan, and LHPY_SCAN() scans 81 times.
 */
#define LHPY_FIELDS(type, ...) LHPY_SCAN(LHPY_FIELDS_NEXT(type, __VA_ARGS__))
#define LHPY_FIELDS_NEXT(type, member, ...)                                                        \
    LHPY_FIELD(type, member) __VA_OPT__(, LHPY_FIELDS_AGAIN LHPY_PARENTHESES(type, __VA_ARGS__))
#define LHPY_FIELDS_AGAIN() LHPY_FIELDS_NEXT
#define LHPY_PARENTHESES ()
#define LHPY_SCAN(...) LHPY_SCAN_27(LHPY_SCAN_27(LHPY_SCAN_27(__VA_ARGS__)))
#define LHPY_SCAN_27(...) LHPY_SCAN_9(LHPY_SCAN_9(LHPY_SCAN_9(__VA_ARGS__)))
#define LHPY_SCAN_9(...) LHPY_SCAN_3(LHPY_SCAN_3(LHPY_SCAN_3(__VA_ARGS__)))
#define LHPY_SCAN_3(...) __VA_ARGS__
/* Fields for a struct of a table, and for a pointer to rows of a table. */
#define LHPY_STRUCT(text, type, member, member_table)                                              \
    {.name = (text),                                                                               \
     .kind = LHPY_KIND_STRUCT,                                                                     \
     .place = offsetof(type, member),                                                              \
     .table = &(member_table)}
#define LHPY_ROWS(text, type, member, count_member, row_table)                                     \
    {.name = (text),                                                                               \
     .kind = LHPY_KIND_ROWS,                                                                       \
     .place = offsetof(type, member),                                                              \
     .count_place = offsetof(type, count_member),                                                  \
     .table = &(row_table)}
#define LHPY_ARG_STRUCT(text, variable, member_table, ...)                                         \
    {.name = (text),                                                                               \
     .kind = LHPY_KIND_STRUCT,                                                                     \
     .place = (uintptr_t)&(variable),                                                              \
     .table = &(member_table),                                                                     \
     __VA_ARGS__}
#define LHPY_ARG_ROWS(text, variable, count, row_table, ...)                                       \
    {.name = (text),                                                                               \
     .kind = LHPY_KIND_ROWS,                                                                       \
     .place = (uintptr_t)&(variable),                                                              \
     .count_place = (uintptr_t)&(count),                                                           \
     .table = &(row_table),                                                                        \
     __VA_ARGS__}

enum lhpy_form {
    LHPY_FORM_TUPLE = 0, /* a tuple with the fields in order */
    LHPY_FORM_DICT,      /* a dict that has the fields by name, and may have other keys */
    LHPY_FORM_VALUE,     /* the value of the only field, which has no name */
};

struct lhpy_table {
    const char *what; /* for messages, with an article: "a unit"; NULL: a call's arguments */
    enum lhpy_form form;
    size_t row_bytes;
    const struct lhpy_field *fields;
    size_t count;
};

/* A table of fields, and a table of members under their own names, in order; both are static. */
#define LHPY_TABLE(what, form, type, ...)                                                          \
    {(what), (form), sizeof(type), (const struct lhpy_field[]){__VA_ARGS__},                       \
     sizeof((const struct lhpy_field[]){__VA_ARGS__}) / sizeof(struct lhpy_field)}
#define LHPY_TABLE_PLAIN(what, form, type, ...)                                                    \
    LHPY_TABLE(what, form, type, LHPY_FIELDS(type, __VA_ARGS__))
/* A table of rows that are one value each, of a C type. */
#define LHPY_TABLE_OF(what, type)                                                                  \
    LHPY_TABLE(what, LHPY_FORM_VALUE, type, {.kind = LHPY_KIND(*(type *)0)})

/* Read an object in the table's form. 0, or -1 with a Python error. */
int lhpy_read(const struct lhpy_table *table, PyObject *object, void *out);
/*
 * Read the arguments of a call into variables: the items of args in order, then those of kwargs,
 * which may be NULL, by name. 0, or -1 with a Python error.
 */
int lhpy_args_read(PyObject *args, PyObject *kwargs, const struct lhpy_field *fields, size_t count);
#define LHPY_ARGS(args, kwargs, ...)                                                               \
    lhpy_args_read((args), (kwargs), (const struct lhpy_field[]){__VA_ARGS__},                     \
                   sizeof((const struct lhpy_field[]){__VA_ARGS__}) / sizeof(struct lhpy_field))
/* Read the only argument of a call. 0, or -1 with a Python error. */
#define LHPY_VALUE(object, variable)                                                               \
    lhpy_value_read((object), &(const struct lhpy_field)LHPY_ARG(variable, .max = 0))
int lhpy_value_read(PyObject *object, const struct lhpy_field *field);
/*
 * Read a sequence into rows, which the caller owns. If a row is one uint32_t, the object may also
 * be bytes with the numbers as they are in memory.
 */
int lhpy_rows_read(PyObject *object, const struct lhpy_table *table, void *rows_out,
                   uint32_t *count_out);
/* Release the rows in a struct of the table, and set their pointers to NULL. */
void lhpy_clear(const struct lhpy_table *table, void *from);
/* Release rows, and the rows in them; rows may be NULL. */
void lhpy_free(const struct lhpy_table *table, const void *rows, uint32_t count);

/* Make a dict, a tuple or a value from a struct. NULL with a Python error. */
PyObject *lhpy_make(const struct lhpy_table *table, const void *from);
/* Make a list from rows. NULL with a Python error. */
PyObject *lhpy_list(const struct lhpy_table *table, const void *rows, uint32_t count);
/* Add value, which is stolen, to dict. Returns dict, or NULL with an error: it is released then. */
PyObject *lhpy_dict_add(PyObject *dict, const char *name, PyObject *value);

#endif
