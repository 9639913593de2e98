/* See reader.h. */
#include "py/reader.h"

#include <string.h>

#include "base/assert.h"

/* What a message is about: the struct with its article, or NULL, and the field. */
struct subject {
    const char *what;
    const struct lhpy_field *field;
};

/* "a unit's bytes", "a unit" or "bytes", as three texts for PyErr_Format(). */
#define SUBJECT(s)                                                                                 \
    (s)->what ? (s)->what : "", (s)->what && (s)->field->name ? "'s " : "",                        \
        (s)->field->name ? (s)->field->name : ""

static int type_refuse(const struct subject *subject, PyObject *value, const char *expected)
{
    PyObject *type = PyType_GetName(Py_TYPE(value));
    if (type)
        PyErr_Format(PyExc_TypeError, "%s%s%s must be %s, not %U", SUBJECT(subject), expected,
                     type);
    Py_XDECREF(type);
    return -1;
}

static void *member_at(void *out, uintptr_t place)
{
    return (void *)((uintptr_t)out + place);
}

static uint64_t bytes_max(enum lhpy_kind kind)
{
    if (kind == LHPY_KIND_U8)
        return UINT8_MAX;
    return kind == LHPY_KIND_U32 ? UINT32_MAX : UINT64_MAX;
}

/* Copy the pointer's bytes, because the member may have a pointer type other than void *. */
static void pointer_store(void *member, const void *pointer)
{
    memcpy(member, &pointer, sizeof(pointer));
}

static void number_store(enum lhpy_kind kind, uint64_t number, void *member)
{
    if (kind == LHPY_KIND_U8)
        *(uint8_t *)member = (uint8_t)number;
    else if (kind == LHPY_KIND_U32)
        *(uint32_t *)member = (uint32_t)number;
    else if (kind == LHPY_KIND_U64)
        *(uint64_t *)member = number;
    else
        pointer_store(member, (void *)(uintptr_t)number);
}

static int integer_check(const struct subject *subject, PyObject *value)
{
    if (PyLong_Check(value) && !PyBool_Check(value))
        return 0;
    return type_refuse(subject, value, "an integer");
}

static int unsigned_read(const struct subject *subject, PyObject *value, void *member)
{
    const struct lhpy_field *field = subject->field;
    uint64_t max = field->max > 0 ? field->max : bytes_max(field->kind);
    if (integer_check(subject, value) < 0)
        return -1;
    if (field->is_index && PyLong_AsLongLong(value) == -1 && !PyErr_Occurred()) {
        number_store(field->kind, UINT32_MAX, member);
        return 0;
    }
    PyErr_Clear();
    uint64_t number = PyLong_AsUnsignedLongLong(value);
    if (!PyErr_Occurred() && number >= field->min && number <= max) {
        number_store(field->kind, number, member);
        return 0;
    }
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "%s%s%s is %R: must be %llu to %llu", SUBJECT(subject), value,
                 (unsigned long long)field->min, (unsigned long long)max);
    return -1;
}

static int signed_read(const struct subject *subject, PyObject *value, void *member)
{
    bool is_narrow = subject->field->kind == LHPY_KIND_I32;
    if (integer_check(subject, value) < 0)
        return -1;
    int64_t number = PyLong_AsLongLong(value);
    if (PyErr_Occurred() || (is_narrow && number != (int32_t)number)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s%s%s is %R: must be a signed integer of %d bits",
                     SUBJECT(subject), value, is_narrow ? 32 : 64);
        return -1;
    }
    if (is_narrow)
        *(int32_t *)member = (int32_t)number;
    else
        *(int64_t *)member = number;
    return 0;
}

static int float_read(const struct subject *subject, PyObject *value, void *member)
{
    double number = PyBool_Check(value) ? 0 : PyFloat_AsDouble(value);
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError))
        return -1;
    if (PyBool_Check(value) || PyErr_Occurred()) {
        PyErr_Clear();
        return type_refuse(subject, value, "a number");
    }
    if (subject->field->kind == LHPY_KIND_FLOAT)
        *(float *)member = (float)number;
    else
        *(double *)member = number;
    return 0;
}

/* Read one of the field's names: the member becomes the index of the name. */
static int name_read(const struct subject *subject, PyObject *value, void *member)
{
    const char *const *names = subject->field->names;
    char valid[256] = "";
    if (!PyUnicode_Check(value))
        return type_refuse(subject, value, "a str");
    for (uint64_t i = 0; names[i]; i++) {
        if (PyUnicode_CompareWithASCIIString(value, names[i]) == 0) {
            number_store(subject->field->kind, i, member);
            return 0;
        }
        size_t used = strlen(valid);
        PyOS_snprintf(valid + used, sizeof(valid) - used, "%s%s", i > 0 ? ", " : "", names[i]);
    }
    PyErr_Format(PyExc_ValueError, "%s%s%s is %R: must be one of %s", SUBJECT(subject), value,
                 valid);
    return -1;
}

static int text_read(const struct subject *subject, PyObject *value, void *member)
{
    bool is_bytes = PyBytes_Check(value);
    if (!is_bytes && !PyUnicode_Check(value))
        return type_refuse(subject, value, "a str or bytes");
    Py_ssize_t bytes = is_bytes ? PyBytes_Size(value) : 0;
    const char *text = is_bytes ? PyBytes_AsString(value) : PyUnicode_AsUTF8AndSize(value, &bytes);
    if (!text)
        return -1;
    if (strlen(text) != (size_t)bytes) {
        PyErr_Format(PyExc_ValueError, "%s%s%s has a zero byte", SUBJECT(subject));
        return -1;
    }
    *(const char **)member = text;
    return 0;
}

static int bytes_read(const struct subject *subject, PyObject *value, void *member)
{
    struct lhpy_bytes *bytes = member;
    if (!PyBytes_Check(value))
        return type_refuse(subject, value, "bytes");
    bytes->data = PyBytes_AsString(value);
    bytes->bytes = (uint64_t)PyBytes_Size(value);
    return 0;
}

static int object_read(const struct subject *subject, PyObject *value, void *member)
{
    PyTypeObject *type = subject->field->type;
    if (!type || PyObject_TypeCheck(value, type)) {
        *(PyObject **)member = value;
        return 0;
    }
    PyObject *name = PyType_GetName(type);
    if (name)
        PyErr_Format(PyExc_TypeError, "%s%s%s must be a %U, not %R", SUBJECT(subject), name,
                     (PyObject *)Py_TYPE(value));
    Py_XDECREF(name);
    return -1;
}

int lhpy_rows_read(PyObject *object, const struct lhpy_table *table, void *rows_out,
                   uint32_t *count_out)
{
    /* Packed numbers are copied unchecked, so all bit patterns have to be valid. */
    bool is_packed = PyBytes_Check(object) && table->form == LHPY_FORM_VALUE &&
                     table->fields->kind == LHPY_KIND_U32 && !table->fields->names;
    pointer_store(rows_out, NULL);
    *count_out = 0;
    Py_ssize_t count = PySequence_Size(object) / (is_packed ? (Py_ssize_t)table->row_bytes : 1);
    if (count < 0)
        return -1;
    char *rows = count <= INT32_MAX ? PyMem_Calloc((size_t)count + 1, table->row_bytes) : NULL;
    if (!rows) {
        PyErr_NoMemory();
        return -1;
    }
    if (is_packed)
        memcpy(rows, PyBytes_AsString(object), (size_t)count * table->row_bytes);
    for (Py_ssize_t i = 0; i < count && !is_packed; i++) {
        PyObject *item = PySequence_GetItem(object, i);
        int rc = item ? lhpy_read(table, item, rows + (size_t)i * table->row_bytes) : -1;
        Py_XDECREF(item);
        if (rc < 0) {
            lhpy_free(table, rows, (uint32_t)i);
            return -1;
        }
    }
    pointer_store(rows_out, rows);
    *count_out = (uint32_t)count;
    return 0;
}

static int value_read(const struct subject *subject, PyObject *value, void *out)
{
    const struct lhpy_field *field = subject->field;
    void *member = member_at(out, field->place);
    if (value == Py_None && field->is_index)
        number_store(field->kind, UINT32_MAX, member);
    if (value == Py_None && (field->may_be_none || field->is_index))
        return 0;
    if (field->names)
        return name_read(subject, value, member);
    switch (field->kind) {
    case LHPY_KIND_BOOL:
        if (!PyBool_Check(value))
            return type_refuse(subject, value, "True or False");
        *(bool *)member = value == Py_True;
        return 0;
    case LHPY_KIND_U8:
    case LHPY_KIND_U32:
    case LHPY_KIND_U64:
    case LHPY_KIND_ADDRESS:
        return unsigned_read(subject, value, member);
    case LHPY_KIND_I32:
    case LHPY_KIND_I64:
        return signed_read(subject, value, member);
    case LHPY_KIND_FLOAT:
    case LHPY_KIND_DOUBLE:
        return float_read(subject, value, member);
    case LHPY_KIND_TEXT:
        return text_read(subject, value, member);
    case LHPY_KIND_BYTES:
        return bytes_read(subject, value, member);
    case LHPY_KIND_OBJECT:
        return object_read(subject, value, member);
    case LHPY_KIND_STRUCT:
        return lhpy_read(field->table, value, member);
    case LHPY_KIND_ROWS:
        if (!PyList_Check(value) && !PyTuple_Check(value) && !PyBytes_Check(value))
            return type_refuse(subject, value, "a list or a tuple");
        return lhpy_rows_read(value, field->table, member, member_at(out, field->count_place));
    }
    LH_ASSERT(false);
    return -1;
}

int lhpy_value_read(PyObject *object, const struct lhpy_field *field)
{
    return value_read(&(struct subject){NULL, field}, object, NULL);
}

/* The value of a key, as a new reference. NULL: there is no such key, or a Python error is set. */
static PyObject *named_get(PyObject *dict, const char *name)
{
    PyObject *key = PyUnicode_FromString(name);
    PyObject *value = key ? PyDict_GetItemWithError(dict, key) : NULL;
    Py_XDECREF(key);
    return Py_XNewRef(value);
}

/* Release the rows of the fields before index `end`. */
static void fields_free(const struct lhpy_field *fields, size_t end, void *out)
{
    for (size_t i = 0; i < end; i++) {
        void *member = member_at(out, fields[i].place);
        if (fields[i].kind == LHPY_KIND_STRUCT)
            fields_free(fields[i].table->fields, fields[i].table->count, member);
        if (fields[i].kind != LHPY_KIND_ROWS)
            continue;
        uint32_t *count = member_at(out, fields[i].count_place);
        void *rows = NULL;
        memcpy(&rows, member, sizeof(rows));
        lhpy_free(fields[i].table, rows, *count);
        pointer_store(member, NULL);
        *count = 0;
    }
}

/* Read the fields from items in order, the remaining ones from dict by name; both may be NULL. */
static int fields_read(const struct lhpy_table *table, PyObject *items, PyObject *dict, void *out)
{
    PyObject *missing = table->form == LHPY_FORM_DICT ? PyExc_ValueError : PyExc_TypeError;
    Py_ssize_t item_count = items ? PySequence_Size(items) : 0;
    for (size_t i = 0; i < table->count; i++) {
        const struct lhpy_field *field = &table->fields[i];
        PyObject *value = NULL;
        if ((Py_ssize_t)i < item_count)
            value = PySequence_GetItem(items, (Py_ssize_t)i);
        else if (dict)
            value = named_get(dict, field->name);
        if (!value && !PyErr_Occurred() && field->is_optional)
            continue;
        if (!value && !PyErr_Occurred())
            PyErr_Format(missing, "%s has no '%s'", table->what ? table->what : "the call",
                         field->name);
        int rc = value ? value_read(&(struct subject){table->what, field}, value, out) : -1;
        Py_XDECREF(value);
        if (rc < 0) {
            fields_free(table->fields, i, out);
            return -1;
        }
    }
    return 0;
}

int lhpy_read(const struct lhpy_table *table, PyObject *object, void *out)
{
    const struct subject subject = {table->what, table->fields};
    const struct subject whole = {table->what, &(const struct lhpy_field){0}};
    if (table->form == LHPY_FORM_VALUE)
        return value_read(&subject, object, out);
    if (table->form == LHPY_FORM_DICT && !PyDict_Check(object))
        return type_refuse(&whole, object, "a dict");
    if (table->form == LHPY_FORM_DICT)
        return fields_read(table, NULL, object, out);
    if (!PyTuple_Check(object))
        return type_refuse(&whole, object, "a tuple");
    if (PyTuple_Size(object) > (Py_ssize_t)table->count) {
        PyErr_Format(PyExc_TypeError, "%s has %zd items: must have %zu", table->what,
                     PyTuple_Size(object), table->count);
        return -1;
    }
    return fields_read(table, object, NULL, out);
}

/* Refuse arguments that no field takes: too many, unknown or given twice. */
static int args_check(PyObject *args, PyObject *kwargs, const struct lhpy_field *fields,
                      size_t count)
{
    Py_ssize_t given = PyTuple_Size(args);
    Py_ssize_t at = 0;
    PyObject *key = NULL;
    if (given > (Py_ssize_t)count) {
        PyErr_Format(PyExc_TypeError, "%zd arguments were given: there are %zu", given, count);
        return -1;
    }
    while (kwargs && PyDict_Next(kwargs, &at, &key, NULL)) {
        size_t i = (size_t)given;
        while (i < count && PyUnicode_CompareWithASCIIString(key, fields[i].name) != 0)
            i++;
        if (i == count) {
            PyErr_Format(PyExc_TypeError, "%R is an unexpected keyword argument", key);
            return -1;
        }
    }
    return 0;
}

int lhpy_args_read(PyObject *args, PyObject *kwargs, const struct lhpy_field *fields, size_t count)
{
    const struct lhpy_table table = {.fields = fields, .count = count};
    if (args_check(args, kwargs, fields, count) < 0)
        return -1;
    return fields_read(&table, args, kwargs, NULL);
}

void lhpy_clear(const struct lhpy_table *table, void *from)
{
    fields_free(table->fields, table->count, from);
}

void lhpy_free(const struct lhpy_table *table, const void *rows, uint32_t count)
{
    for (uint32_t i = 0; rows && i < count; i++)
        lhpy_clear(table, (char *)(uintptr_t)rows + i * table->row_bytes);
    PyMem_Free((void *)(uintptr_t)rows);
}

/* --- From C to Python --------------------------------------------------------------------- */

static PyObject *value_make(const struct lhpy_field *field, const void *from)
{
    const void *member = member_at((void *)(uintptr_t)from, field->place);
    uint64_t number = 0;
    switch (field->kind) {
    case LHPY_KIND_BOOL:
        return PyBool_FromLong(*(const bool *)member);
    case LHPY_KIND_I64:
        return PyLong_FromLongLong(*(const int64_t *)member);
    case LHPY_KIND_DOUBLE:
        return PyFloat_FromDouble(*(const double *)member);
    case LHPY_KIND_TEXT:
        return PyUnicode_FromString(*(const char *const *)member);
    case LHPY_KIND_U8:
        number = *(const uint8_t *)member;
        break;
    case LHPY_KIND_U32:
        number = *(const uint32_t *)member;
        break;
    case LHPY_KIND_U64:
        number = *(const uint64_t *)member;
        break;
    default:
        LH_ASSERT(false); /* no table in csrc/py that is converted to Python has other kinds */
    }
    if (field->names)
        return PyUnicode_FromString(field->names[number]);
    return PyLong_FromUnsignedLongLong(number);
}

PyObject *lhpy_dict_add(PyObject *dict, const char *name, PyObject *value)
{
    if (!dict || !value || PyDict_SetItemString(dict, name, value) < 0)
        Py_CLEAR(dict);
    Py_XDECREF(value);
    return dict;
}

PyObject *lhpy_make(const struct lhpy_table *table, const void *from)
{
    if (table->form == LHPY_FORM_VALUE)
        return value_make(table->fields, from);
    bool is_dict = table->form == LHPY_FORM_DICT;
    PyObject *made = is_dict ? PyDict_New() : PyTuple_New((Py_ssize_t)table->count);
    for (size_t i = 0; made && i < table->count; i++) {
        PyObject *value = value_make(&table->fields[i], from);
        if (is_dict)
            made = lhpy_dict_add(made, table->fields[i].name, value);
        else if (!value || PyTuple_SetItem(made, (Py_ssize_t)i, value) < 0)
            Py_CLEAR(made);
    }
    return made;
}

PyObject *lhpy_list(const struct lhpy_table *table, const void *rows, uint32_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (uint32_t i = 0; list && i < count; i++) {
        PyObject *item = lhpy_make(table, (const char *)rows + i * table->row_bytes);
        if (!item || PyList_SetItem(list, (Py_ssize_t)i, item) < 0)
            Py_CLEAR(list);
    }
    return list;
}
