/*
 * The numbers by which autograd orders a backward.
 *
 * Autograd gives every node of a graph a number, from a counter of the thread that made the node.
 * Of the nodes that are ready, a backward runs the one with the highest number first (torch's
 * ReadyQueue, torch/csrc/autograd/engine.cpp). Forwards that take turns on several threads
 * therefore carry one counter from thread to thread, so that one backward of all of them visits
 * blocks in the reverse of the order in which they were computed.
 *
 * The counter is public in torch's C++ library: at::sequence_number (ATen/SequenceNumber.h).
 */
#include <dlfcn.h>
#include <errno.h>

#include "py/lhpy.h"

/* The most nodes that one turn may have made. A larger difference is a caller's error. */
#define RAISE_MAX (UINT64_C(1) << 32)

struct counter {
    uint64_t (*peek)(void);
    uint64_t (*next)(void);
};

/* Returns 0, or -1 with an exception if torch is not loaded or does not have the counter. */
static int counter_find(struct counter *counter)
{
    void *library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    *counter = (struct counter){0};
    if (library) {
        *(void **)&counter->peek = dlsym(library, "_ZN2at15sequence_number4peekEv");
        *(void **)&counter->next = dlsym(library, "_ZN2at15sequence_number17get_and_incrementEv");
        (void)dlclose(library); /* torch keeps it loaded */
    }
    if (counter->peek && counter->next)
        return 0;
    PyErr_SetString(PyExc_NotImplementedError,
                    "this build of torch does not export at::sequence_number::peek() and"
                    " get_and_increment(), which order='vertical' needs: wrap with"
                    " order='horizontal'");
    return -1;
}

static PyObject *sequence_peek(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    struct counter counter;
    if (counter_find(&counter) < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(counter.peek());
}

static PyObject *sequence_raise(PyObject *Py_UNUSED(module), PyObject *number)
{
    struct counter counter;
    uint64_t least = 0;
    if (LHPY_VALUE(number, least) < 0 || counter_find(&counter) < 0)
        return NULL;
    uint64_t now = counter.peek();
    if (least > now && least - now > RAISE_MAX)
        return PyErr_Format(PyExc_ValueError, "least is %llu, but the counter is at %llu",
                            (unsigned long long)least, (unsigned long long)now);
    Py_BEGIN_ALLOW_THREADS
    while (counter.peek() < least)
        (void)counter.next();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef lhpy_sequence_functions[] = {
    {"sequence_peek", sequence_peek, METH_NOARGS,
     "sequence_peek() -> the number of the next node that this thread makes"},
    {"sequence_raise", sequence_raise, METH_O,
     "sequence_raise(least): number this thread's next nodes from `least` on, or higher."},
    {NULL, NULL, 0, NULL},
};
