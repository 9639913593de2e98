/*
 * The part of the CUDA driver's binary interface that lohan uses. It is declared here so that the
 * build does not need the toolkit, and a machine without the driver can run everything except the
 * backend "cuda".
 *
 * LH_CUDA_CALLS lists each function as CALL(member, name, symbol, parameters): our name, the name
 * in the driver's manual, and the symbol that libcuda.so.1 exports. LH_CUDA_OPTIONAL_CALLS lists
 * those that a driver may lack; their members are then NULL. If the last two differ, CUDA's
 * header maps one to the other; tests/c/test_dev_cuda.c compares symbols, parameters and constants
 * with that header if it is installed.
 *
 * A CUresult is an unsigned here, a CUdevice an int, a CUdeviceptr an unsigned long long.
 */
#ifndef LH_DEV_CUDA_ABI_H
#define LH_DEV_CUDA_ABI_H

#include <stddef.h>

/* The driver's struct tags, so that our types are compatible with its types. */
struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
struct CUmod_st;
struct CUfunc_st;

#define LH_CUDA_OUT_OF_MEMORY 2
#define LH_CUDA_NO_DEVICE 100
#define LH_CUDA_INVALID_DEVICE 101
/* The image of kernels has no code for this GPU, or none that this driver can compile. */
#define LH_CUDA_INVALID_IMAGE 200
#define LH_CUDA_NO_BINARY 209
#define LH_CUDA_UNSUPPORTED_PTX 222
#define LH_CUDA_NOT_FOUND 500
#define LH_CUDA_NOT_READY 600
/* 700, and 714 to 719, are faults of a kernel, which break the context. */
#define LH_CUDA_ILLEGAL_ADDRESS 700
#define LH_CUDA_HARDWARE_STACK_ERROR 714
#define LH_CUDA_LAUNCH_FAILED 719

#define LH_CUDA_STREAM_NON_BLOCKING 1
#define LH_CUDA_EVENT_DEFAULT 0
#define LH_CUDA_EVENT_DISABLE_TIMING 2
#define LH_CUDA_REGISTER_PORTABLE 1

#define LH_CUDA_CALLS(CALL)                                                                        \
    CALL(init, cuInit, "cuInit", (unsigned flags))                                                 \
    CALL(device_count, cuDeviceGetCount, "cuDeviceGetCount", (int *count))                         \
    CALL(device_get, cuDeviceGet, "cuDeviceGet", (int *device, int index))                         \
    CALL(context_retain, cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain",                     \
         (struct CUctx_st * *context, int device))                                                 \
    CALL(context_release, cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (int device)) \
    CALL(context_push, cuCtxPushCurrent, "cuCtxPushCurrent_v2", (struct CUctx_st * context))       \
    CALL(context_pop, cuCtxPopCurrent, "cuCtxPopCurrent_v2", (struct CUctx_st * *context))         \
    CALL(stream_create, cuStreamCreate, "cuStreamCreate",                                          \
         (struct CUstream_st * *stream, unsigned flags))                                           \
    CALL(stream_destroy, cuStreamDestroy, "cuStreamDestroy_v2", (struct CUstream_st * stream))     \
    CALL(stream_query, cuStreamQuery, "cuStreamQuery", (struct CUstream_st * stream))              \
    CALL(stream_synchronize, cuStreamSynchronize, "cuStreamSynchronize",                           \
         (struct CUstream_st * stream))                                                            \
    CALL(stream_wait, cuStreamWaitEvent, "cuStreamWaitEvent",                                      \
         (struct CUstream_st * stream, struct CUevent_st * event, unsigned flags))                 \
    CALL(event_create, cuEventCreate, "cuEventCreate",                                             \
         (struct CUevent_st * *event, unsigned flags))                                             \
    CALL(event_destroy, cuEventDestroy, "cuEventDestroy_v2", (struct CUevent_st * event))          \
    CALL(event_record, cuEventRecord, "cuEventRecord",                                             \
         (struct CUevent_st * event, struct CUstream_st * stream))                                 \
    CALL(event_query, cuEventQuery, "cuEventQuery", (struct CUevent_st * event))                   \
    CALL(copy_in, cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2",                                       \
         (unsigned long long to, const void *from, size_t bytes, struct CUstream_st *stream))      \
    CALL(copy_out, cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2",                                      \
         (void *to, unsigned long long from, size_t bytes, struct CUstream_st *stream))            \
    CALL(host_call, cuLaunchHostFunc, "cuLaunchHostFunc",                                          \
         (struct CUstream_st * stream, void (*function)(void *context), void *context))            \
    CALL(host_register, cuMemHostRegister, "cuMemHostRegister_v2",                                 \
         (void *base, size_t bytes, unsigned flags))                                               \
    CALL(host_unregister, cuMemHostUnregister, "cuMemHostUnregister", (void *base))                \
    CALL(host_address, cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2",                  \
         (unsigned long long *address, void *base, unsigned flags))                                \
    CALL(context_synchronize, cuCtxSynchronize, "cuCtxSynchronize", (void))                        \
    CALL(module_load, cuModuleLoadData, "cuModuleLoadData",                                        \
         (struct CUmod_st * *module, const void *image))                                           \
    CALL(module_unload, cuModuleUnload, "cuModuleUnload", (struct CUmod_st * module))              \
    CALL(module_function, cuModuleGetFunction, "cuModuleGetFunction",                              \
         (struct CUfunc_st * *function, struct CUmod_st * module, const char *name))               \
    CALL(launch, cuLaunchKernel, "cuLaunchKernel",                                                 \
         (struct CUfunc_st * function, unsigned groups_x, unsigned groups_y, unsigned groups_z,    \
          unsigned threads_x, unsigned threads_y, unsigned threads_z, unsigned shared_bytes,       \
          struct CUstream_st *stream, void **arguments, void **extra))                             \
    CALL(error_name, cuGetErrorName, "cuGetErrorName", (unsigned result, const char **text))       \
    CALL(error_text, cuGetErrorString, "cuGetErrorString", (unsigned result, const char **text))

/* Later headers map this name to another symbol, which drivers export in addition to this one. */
#define LH_CUDA_OPTIONAL_CALLS(CALL)                                                               \
    CALL(event_elapsed, cuEventElapsedTime, "cuEventElapsedTime",                                  \
         (float *ms, struct CUevent_st *begun, struct CUevent_st *ended))

/* A member name and a parameter list cannot be put in parentheses. */
/* NOLINTNEXTLINE(bugprone-macro-parentheses) */
#define LH_CUDA_MEMBER(member, name, symbol, parameters) unsigned(*member) parameters;

struct lh_cuda_calls {
    LH_CUDA_CALLS(LH_CUDA_MEMBER)
    LH_CUDA_OPTIONAL_CALLS(LH_CUDA_MEMBER)
};

#endif
