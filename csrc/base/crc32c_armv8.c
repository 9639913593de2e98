/*
 * The ARMv8 CRC instruction, 8 bytes at a time. It is inline assembly because the intrinsics would
 * require compiling the whole file for machines that have the instruction.
 */
#if defined(__aarch64__)

#include <string.h>

#include "base/crc32c_kernels.h"

static inline uint32_t add_word(uint32_t crc, uint64_t word)
{
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    return crc;
}

static inline uint32_t add_byte(uint32_t crc, uint8_t byte)
{
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"((uint32_t)byte));
    return crc;
}

uint32_t lh_crc32c_armv8(uint32_t crc, const void *data, uint64_t bytes)
{
    const uint8_t *source = data;
    crc = ~crc;
    for (; bytes >= 8; bytes -= 8, source += 8) {
        uint64_t word;
        memcpy(&word, source, sizeof(word));
        crc = add_word(crc, word);
    }
    for (; bytes > 0; bytes--, source++)
        crc = add_byte(crc, *source);
    return ~crc;
}

#endif
