/*
 * Definitions that every module uses: fixed-width integers, attributes, constants, and arithmetic
 * on sizes.
 *
 * This file includes no other file of lohan. Sizes are uint64_t bytes throughout: a store can
 * exceed size_t on a 32-bit machine, and a single type avoids conversion errors.
 */
#ifndef LH_BASE_BASE_H
#define LH_BASE_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LH_MUST_CHECK __attribute__((warn_unused_result))
#define LH_PRINTF(format_index, first_index)                                                       \
    __attribute__((format(printf, format_index, first_index)))

#define LH_KIB (UINT64_C(1) << 10)
#define LH_MIB (UINT64_C(1) << 20)
#define LH_GIB (UINT64_C(1) << 30)

/*
 * The unit of O_DIRECT transfers. Offsets, lengths and addresses that are multiples of it work on
 * every device we know.
 */
#define LH_BLOCK_BYTES UINT64_C(4096)
/* One checksum covers this many bytes of an extent (the last one of an extent may cover fewer). */
#define LH_CHECKSUM_BYTES LH_MIB
/* The size of huge pages on x86-64 and on aarch64 with 4 KiB base pages. */
#define LH_HUGE_PAGE_BYTES (UINT64_C(2) << 20)

#define LH_COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

static inline uint64_t lh_min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline uint64_t lh_max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static inline uint64_t lh_div_ceil(uint64_t value, uint64_t divisor)
{
    return value / divisor + (value % divisor != 0);
}

/*
 * Round value up to a multiple of alignment. value must be at most UINT64_MAX - alignment. Sizes in
 * lohan are at most 2^60, which is checked where they are received.
 */
static inline uint64_t lh_align_up(uint64_t value, uint64_t alignment)
{
    return lh_div_ceil(value, alignment) * alignment;
}

static inline bool lh_is_aligned(uint64_t value, uint64_t alignment)
{
    return value % alignment == 0;
}

#endif
