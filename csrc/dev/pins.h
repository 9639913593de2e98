/*
 * Main memory that is registered with an accelerator (page-locked), and what happens if the driver
 * refuses a part of it.
 *
 * Copies of registered memory run while the CPU does other things. For other memory the driver's
 * call blocks until the device gets to the copy, and with it the thread that calls. Drivers may
 * refuse to register memory: WSL2 and some virtual machines have a limit far below main memory.
 *
 *      lh_dev_pins_add, once for each buffer      all were registered: nothing else to do
 *      lh_dev_pins_fit                            else: the staging memory, then buffers in pieces
 *      lh_dev_staged_create (staged.h)            copies of the rest go through the staging memory
 *
 * A copy should not span two ranges that were registered separately, since drivers may refuse it.
 * A buffer is therefore registered as a whole if possible.
 *
 * Thread: the device's owner.
 */
#ifndef LH_DEV_PINS_H
#define LH_DEV_PINS_H

#include "dev/dev.h"

#define LH_DEV_PIN_COUNT_MAX 256
#define LH_DEV_PIN_PIECE_BYTES (UINT64_C(256) << 20)

/* Main memory that copies use. */
struct lh_dev_buffer {
    uint8_t *base;
    uint64_t bytes;
};

struct lh_dev_pins {
    struct lh_dev *dev; /* borrowed until lh_dev_pins_remove() */
    struct lh_dev_buffer ranges[LH_DEV_PIN_COUNT_MAX];
    uint32_t count;
    struct lh_error refusal; /* why the device refused a range for the first time */
};

/* Register a buffer as one range. Returns false if the device refuses. */
bool lh_dev_pins_add(struct lh_dev_pins *pins, const struct lh_dev_buffer *buffer);

/*
 * Register what the device accepts after it has refused one of the buffers: first staging (whole,
 * even if another range has to be unregistered for it), then the buffers that are not registered,
 * in pieces of piece_bytes, and of less where these are refused.
 */
void lh_dev_pins_fit(struct lh_dev_pins *pins, const struct lh_dev_buffer *staging,
                     const struct lh_dev_buffer *buffers, uint32_t buffer_count,
                     uint64_t piece_bytes);

/* Unregister all ranges, each once. */
void lh_dev_pins_remove(struct lh_dev_pins *pins);

/* The number of a buffer's bytes that are registered. */
uint64_t lh_dev_pins_bytes(const struct lh_dev_pins *pins, const struct lh_dev_buffer *buffer);

/*
 * The number of bytes from base on, at most bytes, that are in one registered range, or that are in
 * no registered range. bytes must not be 0.
 */
uint64_t lh_dev_pins_run(const struct lh_dev_pins *pins, const void *base, uint64_t bytes,
                         bool *is_pinned_out);

#endif
