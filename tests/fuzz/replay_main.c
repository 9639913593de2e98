/*
 * Run a fuzz driver on files, without a fuzzer: to reproduce a finding, and to test a corpus with
 * any compiler.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) {
        perror(path);
        return 1;
    }
    long size = ftell(file);
    uint8_t *data = malloc(size > 0 ? (size_t)size : 1);
    rewind(file);
    if (size < 0 || data == NULL || fread(data, 1, (size_t)size, file) != (size_t)size) {
        perror(path);
        return 1;
    }
    fclose(file);
    printf("%s: %ld bytes\n", path, size);
    LLVMFuzzerTestOneInput(data, (size_t)size);
    free(data);
    return 0;
}

int main(int argument_count, char **arguments)
{
    int failures = 0;
    for (int index = 1; index < argument_count; index++)
        failures += replay(arguments[index]);
    return failures != 0;
}
