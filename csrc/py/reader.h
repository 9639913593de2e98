/*
 * Python's values into C, and back, by tables of fields: the only place that decides which values a
 * number, a name or a list may have, and how an error about them reads.
 *
 *     struct lhpy_field {name, kind, place of the member, bounds}      one value
 *     struct lhpy_table {what it describes, form, fields}              one struct
 *
 * A member's kind follows from its C type (LHPY_KIND), so that a field cannot write more bytes than
 * its member has.
 *
 * 1. A wrong type raises TypeError and a value out of range ValueError. Both name the key, and the
 *    value or its type, and what is allowed. bool is not an integer here, and 1 is not a bool.
 * 2. Texts, bytes and objects are borrowed from the objects that are read. Rows are copied; they
 *    are released with lhpy_free(), and after an error nothing is owned.
 * 3. A member whose value is missing (is_optional) or None (may_be_none) keeps what it has, and 0
 *    in rows.
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
    LHPY_KIND_TEXT,    /* const char *, of str or bytes without a zero byte */
    LHPY_KIND_BYTES,   /* struct lhpy_bytes, of bytes */
    LHPY_KIND_ADDRESS, /* a pointer, of an integer, which is trusted */
    LHPY_KIND_OBJECT,  /* PyObject *, as it is */
    LHPY_KIND_STRUCT,  /* the struct of a table */
    LHPY_KIND_ROWS,    /* a pointer to structs of a table, and their count: a list or a tuple */
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
        PyObject *: LHPY_KIND_OBJECT)

struct lhpy_field {
    const char *name;
    enum lhpy_kind kind;
    uintptr_t place; /* of the member in its struct; with the struct NULL, of a variable */
    bool is_optional;
    bool may_be_none;
    bool is_index;            /* of a uint32_t: -1 and None are UINT32_MAX, which means none */
    uint64_t min;             /* of unsigned integers */
    uint64_t max;             /* the same; 0: as much as the member holds */
    const char *const *names; /* ends with NULL: the value is one of them, the member its index */
    PyTypeObject *type;       /* of an object; NULL: any */
    const struct lhpy_table *table; /* of a struct or of rows */
    uintptr_t count_place;          /* of the rows' uint32_t */
};

/* A member of a struct, under its own name or another; a variable. The rest are designators. */
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
 * itself, so each member leaves a call for the next scan, and LHPY_SCAN() scans that often.
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
/* A struct of a table, and a pointer to rows of a table. */
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
#define LHPY_ARG_STRUCT(text, variable, member_table)                                              \
    {.name = (text),                                                                               \
     .kind = LHPY_KIND_STRUCT,                                                                     \
     .place = (uintptr_t)&(variable),                                                              \
     .table = &(member_table)}
#define LHPY_ARG_ROWS(text, variable, count, row_table, ...)                                       \
    {.name = (text),                                                                               \
     .kind = LHPY_KIND_ROWS,                                                                       \
     .place = (uintptr_t)&(variable),                                                              \
     .count_place = (uintptr_t)&(count),                                                           \
     .table = &(row_table),                                                                        \
     __VA_ARGS__}

enum lhpy_form {
    LHPY_FORM_TUPLE = 0, /* a tuple with the fields in order */
    LHPY_FORM_DICT,      /* a dict with the fields by name, among others */
    LHPY_FORM_VALUE,     /* the value of the only field, which has no name */
};

struct lhpy_table {
    const char *what; /* with its article, for messages: "a unit"; NULL: a call's arguments */
    enum lhpy_form form;
    size_t row_bytes;
    const struct lhpy_field *fields;
    size_t count;
};

/* A table of fields, and one of members under their own names, in order. For static tables. */
#define LHPY_TABLE(what, form, type, ...)                                                          \
    {(what), (form), sizeof(type), (const struct lhpy_field[]){__VA_ARGS__},                       \
     sizeof((const struct lhpy_field[]){__VA_ARGS__}) / sizeof(struct lhpy_field)}
#define LHPY_TABLE_PLAIN(what, form, type, ...)                                                    \
    LHPY_TABLE(what, form, type, LHPY_FIELDS(type, __VA_ARGS__))
/* A row that is one value, of a C type. */
#define LHPY_TABLE_OF(what, type)                                                                  \
    LHPY_TABLE(what, LHPY_FORM_VALUE, type, {.kind = LHPY_KIND(*(type *)0)})

/* Read an object in the table's form. 0, or -1 with a Python error. */
int lhpy_read(const struct lhpy_table *table, PyObject *object, void *out);
/*
 * Read the arguments of a call into variables: those of a tuple in order, the others by name.
 * kwargs may be NULL. 0, or -1 with a Python error.
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
 * Read a sequence into rows, which the caller owns. If a row is one number, bytes that hold the
 * numbers are a sequence of them.
 */
int lhpy_rows_read(PyObject *object, const struct lhpy_table *table, void *rows_out,
                   uint32_t *count_out);
/* Release the rows in a struct of the table, which has none afterwards. */
void lhpy_clear(const struct lhpy_table *table, void *from);
/* Release rows, and the rows in them; rows may be NULL. */
void lhpy_free(const struct lhpy_table *table, const void *rows, uint32_t count);

/* Make a dict, a tuple or a value of a struct. NULL with a Python error. */
PyObject *lhpy_make(const struct lhpy_table *table, const void *from);
/* The same for a list of rows. */
PyObject *lhpy_list(const struct lhpy_table *table, const void *rows, uint32_t count);
/* Add a value to a dict, which is stolen if that fails; the value always is. NULL: an error. */
PyObject *lhpy_dict_add(PyObject *dict, const char *name, PyObject *value);

#endif
