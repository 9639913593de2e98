#include "base/cpu.h"

#include "base/crc32c.h"
#include "base/crc32c_kernels.h"
#include "compute/adam_kernels.h"
#include "compute/zo_kernels.h"
#include "lh_test.h"

/* The best kernels of each kind on a processor that has all instructions up to the cap. */
static const struct {
    const char *cap, *crc32c, *adam, *zo;
} cases[] = {
    {"sse2", "portable", "ref", "ref"},           {"sse42", "sse42", "ref", "ref"},
    {"avx2", "sse42", "avx2_pclmul", "avx2"},     {"avx512", "sse42", "avx512_pclmul", "avx512"},
    {"vpclmulqdq", "avx512", "avx512", "avx512"},
};

/* Run in a program that has the cap of cases[at]. */
static int look(size_t at)
{
    const struct lh_crc32c_kernel *crc = NULL;
    const struct lh_adam_kernel *adam = NULL;
    const struct lh_zo_kernel *zo = NULL;
    lh_crc32c_kernels(&crc);
    lh_adam_kernels(&adam);
    lh_zo_kernels(&zo);
    lh_test_name("LOHAN_MAX_CPU_ISA=%s: %s, %s, %s", cases[at].cap, crc->name, adam->name,
                 zo->name);
    LH_CHECK(lh_cpu_invalid_cap() == NULL);
    for (size_t isa = at + 1; isa < LH_CPU_ISA_COUNT; isa++)
        LH_CHECK(!lh_cpu_has((enum lh_cpu_isa)isa));
    LH_CHECK(strcmp(crc->name, cases[at].crc32c) == 0);
    LH_CHECK(strcmp(adam->name, cases[at].adam) == 0);
    LH_CHECK(strcmp(zo->name, cases[at].zo) == 0);
    return 0;
}

/* Run in a program whose cap is avx3, which then corrects it. */
static int look_invalid(void)
{
    lh_test_name("an unknown cap is reported until the variable is corrected");
    for (int i = 0; i < 2; i++) {
        const char *cap = lh_cpu_invalid_cap();
        LH_CHECK(cap && strcmp(cap, "avx3") == 0);
    }
    LH_CHECK(setenv("LOHAN_MAX_CPU_ISA", cases[0].cap, 1) == 0);
    LH_CHECK(lh_cpu_invalid_cap() == NULL);
    return lh_cpu_has(LH_CPU_ISA_SSE2) ? look(0) : 0;
}

/* Start this program again with the cap; return its exit code. */
static int run_capped(const char *cap, const char *argument)
{
    pid_t child = fork();
    LH_CHECK(child >= 0);
    if (child == 0) {
        setenv("LOHAN_MAX_CPU_ISA", cap, 1);
        execl("/proc/self/exe", "test_cpu", argument, (char *)NULL);
        _exit(1);
    }
    int status = 0;
    LH_CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "invalid") == 0)
        return look_invalid();
    if (argc > 1)
        return look((size_t)(argv[1][0] - '0'));
    if (LH_TEST_IS_EMULATED)
        LH_TEST_SKIP("an emulated program cannot start itself again");
    lh_test_name("an unknown cap is reported");
    LH_CHECK(run_capped("avx3", "invalid") == 0);
    for (size_t at = 0; at < LH_CPU_ISA_COUNT && lh_cpu_has((enum lh_cpu_isa)at); at++) {
        char text[8];
        snprintf(text, sizeof(text), "%zu", at);
        lh_test_name("the cap %s selects the kernels of such a processor", cases[at].cap);
        LH_CHECK(run_capped(cases[at].cap, text) == 0);
    }
    return 0;
}
