#include "base/crc32c.h"

#include <pthread.h>

#include "lh_test.h"

#define MEMORY_BYTES 8192
#define THREAD_COUNT 4

/* Compute the checksum by its definition, bit by bit; this shares no code with the kernels. */
static uint32_t crc32c_by_bits(uint32_t crc, const uint8_t *data, uint64_t bytes)
{
    crc = ~crc;
    for (uint64_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            crc = (crc >> 1) ^ (UINT32_C(0x82F63B78) & (0u - (crc & 1)));
    }
    return ~crc;
}

static void test_vectors(const struct lh_crc32c_kernel *kernel)
{
    lh_test_name("%s gives the published values (RFC 3720 B.4)", kernel->name);
    uint8_t data[32] = {0};
    LH_CHECK(kernel->run(0, "123456789", 9) == UINT32_C(0xE3069283));
    LH_CHECK(kernel->run(0, data, 32) == UINT32_C(0x8A9136AA));
    memset(data, 0xff, sizeof(data));
    LH_CHECK(kernel->run(0, data, 32) == UINT32_C(0x62A8AB43));
    for (uint8_t i = 0; i < 32; i++)
        data[i] = i;
    LH_CHECK(kernel->run(0, data, 32) == UINT32_C(0x46DD794E));
    for (uint8_t i = 0; i < 32; i++)
        data[i] = (uint8_t)(31 - i);
    LH_CHECK(kernel->run(0, data, 32) == UINT32_C(0x113FDB5C));
    LH_CHECK(kernel->run(0, NULL, 0) == 0 && kernel->run(7, data, 0) == 7);
}

/* Each buffer ends where its allocation ends, so that AddressSanitizer detects a read beyond it. */
static void test_lengths(const struct lh_crc32c_kernel *kernel, const uint8_t *memory)
{
    lh_test_name("%s agrees with the definition for all lengths, offsets and starts", kernel->name);
    uint64_t seed = 1;
    for (uint64_t bytes = 0; bytes <= MEMORY_BYTES; bytes += bytes < 1300 ? 1 : 509) {
        uint64_t offset = lh_test_random(&seed) % 64;
        uint32_t start = bytes % 3 == 0 ? 0 : (uint32_t)lh_test_random(&seed);
        uint8_t *copy = malloc(offset + bytes + (offset + bytes == 0));
        LH_CHECK(copy);
        memcpy(copy + offset, memory, bytes);
        uint32_t expected = crc32c_by_bits(start, memory, bytes);
        LH_CHECK(kernel->run(start, copy + offset, bytes) == expected);
        free(copy);
    }
    for (uint64_t offset = 0; offset < 130; offset++) {
        uint64_t bytes = MEMORY_BYTES - 130;
        LH_CHECK(kernel->run(5, memory + offset, bytes) ==
                 crc32c_by_bits(5, memory + offset, bytes));
    }
}

static void test_pieces(const struct lh_crc32c_kernel *kernel, const uint8_t *memory)
{
    lh_test_name("%s: pieces chained or combined equal the whole", kernel->name);
    uint64_t seed = 2;
    uint32_t whole = kernel->run(0, memory, MEMORY_BYTES);
    for (int round = 0; round < 200; round++) {
        uint64_t cut = lh_test_random(&seed) % (MEMORY_BYTES + 1);
        uint32_t head = kernel->run(0, memory, cut);
        uint32_t tail = kernel->run(0, memory + cut, MEMORY_BYTES - cut);
        LH_CHECK(kernel->run(head, memory + cut, MEMORY_BYTES - cut) == whole);
        LH_CHECK(lh_crc32c_combine(head, tail, MEMORY_BYTES - cut) == whole);
    }
}

static void test_each_bit(const struct lh_crc32c_kernel *kernel, uint8_t *memory)
{
    lh_test_name("%s: each flipped bit of 2 KiB changes the value", kernel->name);
    uint32_t before = kernel->run(0, memory, 2048);
    for (uint64_t bit = 0; bit < 2048 * 8; bit++) {
        memory[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        LH_CHECK(kernel->run(0, memory, 2048) != before);
        memory[bit / 8] ^= (uint8_t)(1u << (bit % 8));
    }
}

static void test_combine_long(void)
{
    lh_test_name("combine is exact for lengths that no test can hold");
    /* Compute the crc of 2n zero bytes from that of n, up to 2^40, by two different splits. */
    uint8_t zeros[64] = {0};
    uint32_t doubled = lh_crc32c(0, zeros, 64);
    for (uint64_t bytes = 64; bytes < (UINT64_C(1) << 40); bytes *= 2) {
        uint32_t minus_one = lh_crc32c_combine(doubled, lh_crc32c(0, zeros, 63), 63);
        uint32_t other = lh_crc32c_combine(lh_crc32c(0, zeros, 1), minus_one, bytes + 63);
        LH_CHECK(lh_crc32c_combine(doubled, lh_crc32c(0, zeros, 64), 64) == other);
        doubled = lh_crc32c_combine(doubled, doubled, bytes);
    }
    /* x^(2^31 - 1) is 1, so this many zero bits leave a value unchanged. */
    uint64_t order = (UINT64_C(1) << 31) - 1;
    LH_CHECK(lh_crc32c_combine(0x12345678, 0, order) == 0x12345678);
    LH_CHECK(lh_crc32c_combine(0x12345678, 0, order * 8 + 3) ==
             lh_crc32c_combine(0x12345678, 0, 3));
    LH_CHECK(lh_crc32c_combine(0x12345678, 0, 1) != 0x12345678);
}

static void test_copy(const uint8_t *memory)
{
    lh_test_name("a copy has the bytes and the checksum of what was copied, and nothing more");
    enum { BYTES = 100000 };
    uint8_t *from = malloc(BYTES);
    uint8_t *to = malloc(BYTES + 1);
    LH_CHECK(from && to);
    for (uint32_t i = 0; i < BYTES; i++)
        from[i] = memory[i % MEMORY_BYTES] ^ (uint8_t)(i / MEMORY_BYTES);
    static const uint64_t sizes[] = {0, 1, 4097, 16383, 16384, 16385, 32768, BYTES};
    for (uint32_t i = 0; i < LH_COUNT_OF(sizes); i++) {
        memset(to, 0xa5, BYTES + 1);
        LH_CHECK(lh_crc32c_copy(7, to, from, sizes[i]) == lh_crc32c(7, from, sizes[i]));
        LH_CHECK(memcmp(to, from, sizes[i]) == 0 && to[sizes[i]] == 0xa5);
    }
    free(from);
    free(to);
}

static void *first_call(void *context)
{
    *(uint32_t *)context = lh_crc32c(0, "123456789", 9);
    return NULL;
}

int main(void)
{
    lh_test_name("the first call may come from several threads at once");
    pthread_t threads[THREAD_COUNT];
    uint32_t values[THREAD_COUNT] = {0};
    for (int i = 0; i < THREAD_COUNT; i++)
        LH_CHECK(pthread_create(&threads[i], NULL, first_call, &values[i]) == 0);
    for (int i = 0; i < THREAD_COUNT; i++) {
        LH_CHECK(pthread_join(threads[i], NULL) == 0);
        LH_CHECK(values[i] == UINT32_C(0xE3069283));
    }

    lh_test_name("the portable kernel is always there, last");
    const struct lh_crc32c_kernel *kernels = NULL;
    int kernel_count = lh_crc32c_kernels(&kernels);
    LH_CHECK(kernel_count >= 1);
    LH_CHECK(strcmp(kernels[kernel_count - 1].name, "portable") == 0);

    static _Alignas(64) uint8_t memory[MEMORY_BYTES];
    uint64_t seed = 3;
    for (uint64_t i = 0; i < MEMORY_BYTES; i++)
        memory[i] = (uint8_t)lh_test_random(&seed);
    for (int i = 0; i < kernel_count; i++) {
        test_vectors(&kernels[i]);
        test_lengths(&kernels[i], memory);
        test_pieces(&kernels[i], memory);
        test_each_bit(&kernels[i], memory);
    }
    test_combine_long();
    test_copy(memory);
    return 0;
}
