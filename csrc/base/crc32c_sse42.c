/*
 * The instruction crc32q accepts 8 bytes per cycle but has a latency of three cycles, so three
 * lanes are computed side by side:
 *
 *      | lane 0: crc .......... | lane 1: 0 .......... | lane 2: 0 .......... |
 *
 * and remainder = lane0 * x^(2 lanes) + lane1 * x^(1 lane) + lane2. crc32q(0, w) is w * x^32 modulo
 * P for a 64-bit word w, and the carry-less product of two 32-bit remainders, read as such a word,
 * is their product times x (see [Note: Reflected polynomials]); so crc32q(0, a clmul k) is
 * a * k * x^33, and k for n bits is x^(n - 33).
 */
#if defined(__x86_64__)

#include <immintrin.h>
#include <string.h>

#include "base/crc32c_kernels.h"

/* Large lanes make the cost of joining negligible; small lanes process the remaining bytes. */
#define LARGE_LANE_BYTES 1024
#define SMALL_LANE_BYTES 128

struct lane_join {
    uint64_t one_lane;
    uint64_t two_lanes;
};

static struct lane_join large_join;
static struct lane_join small_join;

static struct lane_join lane_join_of(uint64_t lane_bytes)
{
    return (struct lane_join){.one_lane = lh_crc32c_power(8 * lane_bytes - 33),
                              .two_lanes = lh_crc32c_power(16 * lane_bytes - 33)};
}

void lh_crc32c_sse42_init(void)
{
    large_join = lane_join_of(LARGE_LANE_BYTES);
    small_join = lane_join_of(SMALL_LANE_BYTES);
}

static inline uint64_t load_word(const uint8_t *source)
{
    uint64_t word;
    memcpy(&word, source, sizeof(word));
    return word;
}

static inline uint64_t product_of(uint64_t left, uint64_t right)
{
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)left),
                                           _mm_cvtsi64_si128((long long)right), 0x00);
    return (uint64_t)_mm_cvtsi128_si64(product);
}

static inline __attribute__((always_inline)) uint64_t three_lanes(uint64_t crc,
                                                                  const uint8_t *source,
                                                                  uint64_t lane_bytes,
                                                                  struct lane_join join)
{
    uint64_t lane1 = 0;
    uint64_t lane2 = 0;
    for (uint64_t i = 0; i < lane_bytes; i += 8) {
        crc = _mm_crc32_u64(crc, load_word(source + i));
        lane1 = _mm_crc32_u64(lane1, load_word(source + lane_bytes + i));
        lane2 = _mm_crc32_u64(lane2, load_word(source + 2 * lane_bytes + i));
    }
    uint64_t joined = product_of(crc, join.two_lanes) ^ product_of(lane1, join.one_lane);
    return _mm_crc32_u64(0, joined) ^ lane2;
}

uint32_t lh_crc32c_sse42(uint32_t crc, const void *data, uint64_t bytes)
{
    const uint8_t *source = data;
    uint64_t sum = ~crc;
    for (; bytes >= 3 * LARGE_LANE_BYTES; bytes -= 3 * LARGE_LANE_BYTES) {
        sum = three_lanes(sum, source, LARGE_LANE_BYTES, large_join);
        source += 3 * LARGE_LANE_BYTES;
    }
    for (; bytes >= 3 * SMALL_LANE_BYTES; bytes -= 3 * SMALL_LANE_BYTES) {
        sum = three_lanes(sum, source, SMALL_LANE_BYTES, small_join);
        source += 3 * SMALL_LANE_BYTES;
    }
    for (; bytes >= 8; bytes -= 8, source += 8)
        sum = _mm_crc32_u64(sum, load_word(source));
    uint32_t rest = (uint32_t)sum;
    for (; bytes > 0; bytes--, source++)
        rest = _mm_crc32_u8(rest, *source);
    return ~rest;
}

#endif
