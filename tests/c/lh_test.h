/*
 * The harness of the C tests: one program per module; exit code 0 pass, 1 fail, 77 skip (as in
 * automake).
 *
 *      lh_test_name("a full ring refuses, and loses nothing");
 *      LH_CHECK(!lh_ring_push(&ring, message));
 *
 * The first check that fails ends the program and prints its file, line and test name.
 */
#ifndef LH_TEST_H
#define LH_TEST_H

#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LH_TEST_SKIP_CODE 77

/*
 * How a program runs: directly, under a sanitizer, or on an emulated processor (tests/run.py neon),
 * which ignores memory advice and limits, and does not support seccomp filters. The latter two need
 * many times the time, and additional address space.
 */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LH_TEST_IS_SANITIZED 1
#else
#define LH_TEST_IS_SANITIZED 0
#endif
#ifdef LH_TEST_EMULATED
#define LH_TEST_IS_EMULATED 1
#else
#define LH_TEST_IS_EMULATED 0
#endif
#define LH_TEST_IS_SLOW (LH_TEST_IS_SANITIZED || LH_TEST_IS_EMULATED)

/*
 * Handle signals as in a program that a terminal has started: a background job ignores SIGINT, and
 * a runner may ignore or block more. SIGHUP stays ignored if it is, as nohup wants it.
 */
__attribute__((constructor)) static void lh_test_signals(void)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGCHLD, SIGALRM, SIGUSR1, SIGUSR2, SIGPIPE};
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++)
        signal(numbers[i], SIG_DFL);
}

/* Whether loops are to be shorter (tests/run.py --fast). */
__attribute__((unused)) static bool lh_test_is_fast(void)
{
    return getenv("LH_TEST_FAST") != NULL;
}

/*
 * Whether the longest loops are to be a sample of what the same program tests in full elsewhere in
 * `make tier1`: without a sanitizer, it has all the values, and under one all the code.
 */
__attribute__((unused)) static bool lh_test_is_sample(void)
{
    return LH_TEST_IS_SANITIZED && lh_test_is_fast();
}

/*
 * The factor for limits on CPU time. On a busy shared machine most of such a time is spent on
 * memory that the host first has to provide, and CI's machines may be 30 times slower; only CI's
 * own limit tells a program that it runs there.
 */
__attribute__((unused)) static double lh_test_slowness(void)
{
    if (LH_TEST_IS_SLOW || getenv("LOHAN_TESTS_END") != NULL)
        return 30;
    enum { BYTES = 32 << 20 };
    const double quiet_s = 0.02;
    clock_t begin = clock();
    volatile char *bytes = malloc(BYTES);
    for (size_t i = 0; bytes != NULL && i < BYTES; i += 64)
        bytes[i] = 1;
    free((void *)bytes);
    double factor = (double)(clock() - begin) / CLOCKS_PER_SEC / quiet_s;
    return factor > 1 ? factor : 1;
}

static char lh_test_claim[256];

/* Begin the proof of one claim. */
__attribute__((format(printf, 1, 2), unused)) static void lh_test_name(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(lh_test_claim, sizeof(lh_test_claim), format, arguments);
    va_end(arguments);
    printf("- %s\n", lh_test_claim);
    fflush(stdout);
}

#define LH_CHECK(expression)                                                                       \
    do {                                                                                           \
        if (!(expression)) {                                                                       \
            fprintf(stderr, "%s:%d: %s: %s is false\n", __FILE__, __LINE__, lh_test_claim,         \
                    #expression);                                                                  \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* End the program as skipped, saying why. */
#define LH_TEST_SKIP(...)                                                                          \
    do {                                                                                           \
        printf("skip: " __VA_ARGS__);                                                              \
        printf("\n");                                                                              \
        exit(LH_TEST_SKIP_CODE);                                                                   \
    } while (0)

/* splitmix64: a seed gives the same numbers on every machine. */
__attribute__((unused)) static uint64_t lh_test_random(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* A number from 0 to end - 1. */
__attribute__((unused)) static uint64_t lh_test_below(uint64_t *state, uint64_t end)
{
    return lh_test_random(state) % end;
}

/*
 * Whether action(context) ends in abort(), as a broken LH_ASSERT does (or a sanitizer's report).
 *
 * Not tried under ThreadSanitizer, whose forked children may block forever if another thread
 * held a lock; the other builds try it.
 */
__attribute__((unused)) static int lh_test_aborts(void (*action)(void *context), void *context)
{
#ifdef __SANITIZE_THREAD__
    (void)action;
    (void)context;
    return 1;
#endif
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        if (!freopen("/dev/null", "w", stderr))
            _exit(2);
        action(context);
        _exit(0);
    }
    LH_CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return !(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 2));
}

#endif
