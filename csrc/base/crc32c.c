#include "base/crc32c.h"

#include <pthread.h>
#include <string.h>

#include "base/assert.h"
#include "base/cpu.h"
#include "base/crc32c_kernels.h"

#if defined(__aarch64__)
#include <sys/auxv.h> /* getauxval, HWCAP_CRC32 */
#endif

#define KERNEL_COUNT_MAX 3
/* What lh_crc32c_copy() copies before it reads the copy again from the first-level cache. */
#define COPY_BYTES (16 << 10)
#define X_TO_0 (UINT32_C(1) << 31)
#define X_TO_1 (UINT32_C(1) << 30)

/* slices[i][b]: the remainder of byte b followed by i zero bytes. */
static uint32_t slices[8][256];
static struct lh_crc32c_kernel kernels[KERNEL_COUNT_MAX];
static int kernel_count;
static pthread_once_t kernels_once = PTHREAD_ONCE_INIT;

/* value * x modulo P: a carry into x^32 is reduced by P. */
static uint32_t times_x(uint32_t value)
{
    return (value >> 1) ^ ((value & 1) ? LH_CRC32C_POLYNOMIAL : 0);
}

uint32_t lh_crc32c_multiply(uint32_t left, uint32_t right)
{
    uint32_t product = 0;
    /* Process left's coefficients from x^0 (the top bit) up; multiply right by x each time. */
    for (; left != 0; left <<= 1) {
        if (left & X_TO_0)
            product ^= right;
        right = times_x(right);
    }
    return product;
}

uint32_t lh_crc32c_power(uint64_t exponent)
{
    uint32_t result = X_TO_0;
    uint32_t square = X_TO_1;
    for (; exponent != 0; exponent >>= 1) {
        if (exponent & 1)
            result = lh_crc32c_multiply(result, square);
        square = lh_crc32c_multiply(square, square);
    }
    return result;
}

static void slices_init(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t remainder = byte;
        for (int bit = 0; bit < 8; bit++)
            remainder = times_x(remainder);
        slices[0][byte] = remainder;
    }
    for (uint32_t byte = 0; byte < 256; byte++)
        for (int i = 1; i < 8; i++)
            slices[i][byte] = (slices[i - 1][byte] >> 8) ^ slices[0][slices[i - 1][byte] & 0xff];
}

uint32_t lh_crc32c_portable(uint32_t crc, const void *data, uint64_t bytes)
{
    const uint8_t *source = data;
    crc = ~crc;
    for (; bytes >= 8; bytes -= 8, source += 8) {
        uint64_t word;
        memcpy(&word, source, sizeof(word));
        word ^= crc;
        crc = 0;
        for (int i = 0; i < 8; i++)
            crc ^= slices[7 - i][(word >> (8 * i)) & 0xff];
    }
    for (; bytes > 0; bytes--, source++)
        crc = (crc >> 8) ^ slices[0][(crc ^ *source) & 0xff];
    return ~crc;
}

static void kernel_add(const char *name, lh_crc32c_fn run)
{
    LH_ASSERT(kernel_count < KERNEL_COUNT_MAX);
    kernels[kernel_count++] = (struct lh_crc32c_kernel){.name = name, .run = run};
}

static void kernels_init(void)
{
    slices_init();
#if defined(__x86_64__)
    bool has_sse42 = lh_cpu_has(LH_CPU_ISA_SSE42);
    if (has_sse42 && lh_cpu_has(LH_CPU_ISA_AVX512) && lh_cpu_has(LH_CPU_ISA_VPCLMULQDQ)) {
        lh_crc32c_avx512_init();
        kernel_add("avx512", lh_crc32c_avx512);
    }
    if (has_sse42) {
        lh_crc32c_sse42_init();
        kernel_add("sse42", lh_crc32c_sse42);
    }
#elif defined(__aarch64__)
    if (getauxval(AT_HWCAP) & HWCAP_CRC32)
        kernel_add("armv8", lh_crc32c_armv8);
#endif
    kernel_add("portable", lh_crc32c_portable);
}

int lh_crc32c_kernels(const struct lh_crc32c_kernel **kernels_out)
{
    int rc = pthread_once(&kernels_once, kernels_init);
    LH_ASSERT(rc == 0);
    *kernels_out = kernels;
    return kernel_count;
}

uint32_t lh_crc32c(uint32_t crc, const void *data, uint64_t bytes)
{
    const struct lh_crc32c_kernel *best = NULL;
    lh_crc32c_kernels(&best);
    return best->run(crc, data, bytes);
}

uint32_t lh_crc32c_copy(uint32_t crc, void *to, const void *from, uint64_t bytes)
{
    for (uint64_t at = 0; at < bytes; at += COPY_BYTES) {
        uint64_t part = lh_min_u64(bytes - at, COPY_BYTES);
        memcpy((uint8_t *)to + at, (const uint8_t *)from + at, part);
        crc = lh_crc32c(crc, (const uint8_t *)to + at, part);
    }
    return crc;
}

uint32_t lh_crc32c_combine(uint32_t crc_a, uint32_t crc_b, uint64_t b_bytes)
{
    /*
     * Let R(m) be the remainder of message m, and i and f the inversions before and after it. Then
     * crc(m) = R(m) ^ i * x^len(m) ^ f. In crc(A) * x^len(B) ^ crc(B) the inversion after A cancels
     * the one before B, because i and f are the same word; the result is crc(A|B).
     *
     * x has the order 2^31 - 1 modulo P, so 8 * b_bytes may be taken modulo it and cannot overflow.
     */
    uint64_t order = (UINT64_C(1) << 31) - 1;
    return lh_crc32c_multiply(lh_crc32c_power(b_bytes % order * 8), crc_a) ^ crc_b;
}
