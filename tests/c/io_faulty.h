/*
 * A backend that wraps another one and fails on demand.
 *
 * One fault is armed at a time and fires once. A test repeats an operation with after = 0, 1, 2,
 * ... until it succeeds without the fault having fired.
 *
 * Thread: as csrc/io/io.h.
 */
#ifndef LH_TEST_IO_FAULTY_H
#define LH_TEST_IO_FAULTY_H

#include "io/io.h"

enum lh_io_fault_kind {
    LH_IO_FAULT_KIND_NONE = 0,
    /* The request fails with code; the inner backend never sees it. */
    LH_IO_FAULT_KIND_ERROR = 1,
    /* A read or write transfers only its first bytes, and is then continued. */
    LH_IO_FAULT_KIND_SHORT = 2,
    /* A successful read has one wrong bit, as from a faulty disk or cable. */
    LH_IO_FAULT_KIND_FLIP = 3,
    /* This and every later matching request is held back until lh_io_faulty_release(). */
    LH_IO_FAULT_KIND_HOLD = 4,
};

/* The bits of lh_io_fault.request_kinds. */
#define LH_IO_FAULT_ON(request_kind) (1U << (request_kind))
#define LH_IO_FAULT_ON_ANY 0U

struct lh_io_fault {
    enum lh_io_fault_kind kind;
    uint32_t request_kinds; /* which requests match; ON_ANY: all those that the kind can hit */
    uint64_t after;         /* the number of matching requests that still pass */
    int code;               /* ERROR: -errno */
    /* SHORT: the bytes of the first part; a request that is not longer passes */
    uint64_t bytes;
    /* FLIP: the bit, counted from the start of the buffer, modulo its size */
    uint64_t bit;
};

struct lh_io_faulty_opts {
    struct lh_io *inner;          /* stolen on success */
    struct lh_waker *waker;       /* the inner backend's waker; may be NULL */
    const struct lh_clock *clock; /* borrowed until destroy */
};

/*
 * Wrap opts->inner. Nothing is armed.
 *
 * Owns:   *io_out owns inner; release with (*io_out)->ops->destroy().
 * Errors: -ENOMEM; *io_out is NULL then, and the caller still owns inner.
 */
int lh_io_faulty_create(const struct lh_io_faulty_opts *opts, struct lh_alloc *alloc,
                        struct lh_io **io_out, struct lh_error *err) LH_MUST_CHECK;

/* Arm a fault; replaces one that has not fired. io: from lh_io_faulty_create. Thread: any. */
void lh_io_faulty_arm(struct lh_io *io, struct lh_io_fault fault);
/* Thread: any. */
bool lh_io_faulty_has_fired(const struct lh_io *io);

/*
 * End a HOLD. The next poll passes on the held requests; none of them completes before the poll
 * after that one, so the owner has first processed everything that preceded the release.
 *
 * Thread: any.
 */
void lh_io_faulty_release(struct lh_io *io);

#endif
