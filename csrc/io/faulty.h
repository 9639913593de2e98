/*
 * A backend that fails on demand, around another one: for tests and simulators.
 *
 * One fault is armed at a time and fires once. A test counts down: after = 0, 1, 2, ... until the
 * operation passes and the fault has not fired.
 *
 * Thread: as csrc/io/io.h.
 */
#ifndef LH_IO_FAULTY_H
#define LH_IO_FAULTY_H

#include "io/io.h"

enum lh_io_fault_kind {
    LH_IO_FAULT_KIND_NONE = 0,
    /* The request comes back with code; the inner backend never sees it. */
    LH_IO_FAULT_KIND_ERROR = 1,
    /* A read or write moves only its first bytes, and is continued once those are through. */
    LH_IO_FAULT_KIND_SHORT = 2,
    /* A read that went well has one bit wrong, as from a disk or a cable that lies. */
    LH_IO_FAULT_KIND_FLIP = 3,
    /* This request, and every later one that counts, reaches the inner backend once released. */
    LH_IO_FAULT_KIND_HOLD = 4,
};

/* As bits of lh_io_fault.request_kinds. */
#define LH_IO_FAULT_ON(request_kind) (1U << (request_kind))
#define LH_IO_FAULT_ON_ANY 0U

struct lh_io_fault {
    enum lh_io_fault_kind kind;
    uint32_t request_kinds; /* those that count; ON_ANY: all that kind can hit */
    uint64_t after;         /* requests that still pass */
    int code;               /* ERROR: -errno */
    uint64_t bytes;         /* SHORT: of the first part; a request of at most that many passes */
    uint64_t bit;           /* FLIP: counted from the buffer's start, modulo its bits */
};

struct lh_io_faulty_opts {
    struct lh_io *inner;          /* stolen on success */
    struct lh_waker *waker;       /* inner's; may be NULL */
    const struct lh_clock *clock; /* borrowed until destroy */
};

/*
 * Wrap opts->inner. Nothing is armed.
 *
 * Owns:   *io_out owns inner; release with (*io_out)->ops->destroy().
 * Errors: -ENOMEM; *io_out is NULL then, and inner still the caller's.
 */
int lh_io_faulty_create(const struct lh_io_faulty_opts *opts, struct lh_alloc *alloc,
                        struct lh_io **io_out, struct lh_error *err) LH_MUST_CHECK;

/* io: from lh_io_faulty_create. A fault that has not fired is replaced. */
void lh_io_faulty_arm(struct lh_io *io, struct lh_io_fault fault);
/* Thread: any. */
bool lh_io_faulty_has_fired(const struct lh_io *io);

/*
 * End a HOLD. The next poll passes on what was held back; no request of it completes before the
 * poll after that one, so its owner has done whatever it was asked to do before the release.
 *
 * Thread: any.
 */
void lh_io_faulty_release(struct lh_io *io);

#endif
